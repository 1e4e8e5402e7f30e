/* gather.c - a table's rows by id, at the head of a group: x holds the ids, and their dimensions are those of the
 * group's rows. */
#include "backward.h"

#include "../ops/ops.h"

te_status te_gather_forward(te_group_state *state, const te_unit *unit)
{
    te_fuse_plan *plan = state->plan;
    te_call call = plan->nodes[unit->nodes[0]].call;
    te_tensor *y = state->values[unit->result] = te_state_tensor(state, &plan->values[unit->result]);
    call.ctx = plan->ctx;
    return y ? te_embedding_rows(&call, y, state->values[unit->weight], state->values[unit->x]) : plan->ctx->status;
}

/* Rows of the gradient are added straight to where the tape wants them. */
te_status te_backward_gather(te_group_backward *b, const te_unit *unit)
{
    te_call call = b->plan->nodes[unit->nodes[0]].call;
    te_tensor *dy = b->state->grads[unit->result];
    int edge = te_wanted_edge(b, unit->weight);
    bool accumulate;
    if (!dy || edge < 0) return TE_OK;
    te_tensor *dtable = te_grad_target(b->call, edge, &accumulate);
    if (!dtable || (!accumulate && te_tensor_fill(dtable, 0) != TE_OK)) return b->ctx->status;
    call.ctx = b->ctx;
    return te_embedding_add_rows(&call, dtable, dy, b->state->values[unit->x]);
}
