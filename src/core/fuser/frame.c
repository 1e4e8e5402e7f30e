/* frame.c - the dimensions in which rows are seen, and the reshapes that change them.
 *
 *      {2, 3, 8} -> relu -> reshape {-1, 8} -> linear 8 x 8 -> reshape {-1, 4} -> rms_norm
 *       frame 0             frame 1, wired                     frame 2, a view
 *       space 0             space 0                            space 2, twice the rows
 *
 * A reshape that keeps the width of rows keeps the rows, so it is wiring: what reads it reads its input. One that
 * changes the width is a view, a step that moves nothing, and the rows behind it are another space. Plans hold for any
 * number of rows, so a frame gives its rows as a ratio to x's; what its dimensions are, and whether they fit, a run
 * finds out.
 */
#include "plan.h"

#include "../autograd.h"
#include "../ops/ops.h"

static bool is_reshape(const te_group_node *node) { return node->call.op->def->unit == TE_UNIT_VIEW; }

/* --- groups ------------------------------------------------------------------------------------------------------- */

te_space te_frame_of_input(const te_tensor *x)
{
    bool ids = x->dtype == TE_I32 || x->dtype == TE_I64;
    te_space s = {.ndim = x->ndim + ids};
    memcpy(s.shape, x->shape, (size_t)x->ndim * sizeof *s.shape);
    return s;
}

te_space te_group_frame(const te_group *group, int frame, const te_tensor *x)
{
    te_space s = te_frame_of_input(x);
    for (int n = 0; n < group->n_nodes && frame > 0; n++) {
        if (group->nodes[n].frame != frame) continue;
        const te_attr *shape = &group->nodes[n].call.attr[0];
        s.ndim = shape->n;
        memcpy(s.shape, shape->ints, sizeof s.shape);
    }
    return s;
}

int te_group_enter_frame(te_group *group, const te_group_node *node)
{
    int frame = -1;
    for (int i = 0; i < node->call.op->n_inputs && frame < 0; i++)
        if (node->in[i] != TE_NO_VALUE && !group->values[node->in[i]].parameter)
            frame = group->values[node->in[i]].frame;
    if (frame < 0) frame = 0;
    for (int i = 0; i < node->call.op->n_inputs; i++) {
        te_group_value *v = node->in[i] == TE_NO_VALUE ? NULL : &group->values[node->in[i]];
        if (v && !v->parameter && v->frame < 0) v->frame = frame;
    }
    return is_reshape(node) ? ++group->n_frames : frame;
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

static int root(const te_fuse_plan *plan, int frame)
{
    while (plan->frames[frame].same != frame) frame = plan->frames[frame].same;
    return frame;
}

bool te_plan_same_frame(te_fuse_plan *plan, int a, int b)
{
    a = root(plan, a);
    b = root(plan, b);
    if (plan->frames[a].space != plan->frames[b].space || plan->frames[a].ndim != plan->frames[b].ndim) return false;
    plan->frames[a > b ? a : b].same = a > b ? b : a;
    return true;
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

te_status te_plan_infer_reshape(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = &plan->values[node->in[0]];
    const te_attr *shape = &node->call.attr[0];
    if (x->cls != TE_VALUE_TOKENS) return te_plan_refuse(plan, node, "its input is no activation");
    int64_t width = shape->n ? shape->ints[shape->n - 1] : -1;
    if (width < 1 || x->width < 1) return te_plan_refuse(plan, node, "rows of no known length");
    int64_t unit = common_divisor(x->width, width);
    te_plan_frame *from = &plan->frames[x->frame], *frame = &plan->frames[plan->n_frames];
    *frame = (te_plan_frame){.ndim = shape->n, .space = plan->n_frames, .same = plan->n_frames};
    memcpy(frame->shape, shape->ints, sizeof frame->shape);
    if (__builtin_mul_overflow(from->rows, x->width / unit, &frame->rows) ||
        __builtin_mul_overflow(from->per, width / unit, &frame->per))
        return te_plan_refuse(plan, node, "too many rows");
    unit = common_divisor(frame->rows, frame->per);
    frame->rows /= unit;
    frame->per /= unit;
    for (int f = plan->n_frames - 1; f >= 0; f--)
        if (plan->frames[f].rows == frame->rows && plan->frames[f].per == frame->per)
            frame->space = plan->frames[f].space;
    out->cls = TE_VALUE_TOKENS;
    out->dtype = x->dtype;
    out->width = width;
    out->frame = plan->n_frames++;
    if (x->width == width) out->wired = x->wired == TE_NO_VALUE ? node->in[0] : x->wired;
    return TE_OK;
}

void te_plan_wire(te_fuse_plan *plan)
{
    for (int n = 0; n < plan->n_nodes; n++) {
        te_group_node *node = &plan->nodes[n];
        bool wired = plan->values[node->out].wired != TE_NO_VALUE;
        for (int i = 0; i < node->call.op->n_inputs; i++) {
            int to = node->in[i] == TE_NO_VALUE ? TE_NO_VALUE : plan->values[node->in[i]].wired;
            if (wired) node->in[i] = TE_NO_VALUE;
            else if (to != TE_NO_VALUE) node->in[i] = to;
        }
        /* its frame says it all */
        if (node->call.op->def->unit == TE_UNIT_MASK) node->in[0] = TE_NO_VALUE;
    }
    for (int v = 0; v < plan->n_values; v++) plan->values[v].output = -1;
    for (int i = plan->n_outputs - 1; i >= 0; i--) {
        const te_plan_value *v = &plan->values[plan->outputs[i]];
        plan->output_frames[i] = v->frame;
        if (v->wired != TE_NO_VALUE) plan->outputs[i] = v->wired;
        plan->values[plan->outputs[i]].output = i;
    }
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

/* The dimensions of a frame beside so many rows of x; false when they do not hold as many elements. */
static bool place(const te_plan_frame *frame, int64_t tokens, te_space *s)
{
    int64_t rows, known = 1;
    int open = -1;
    if (__builtin_mul_overflow(tokens, frame->rows, &rows) || rows % frame->per) return false;
    rows /= frame->per;
    s->ndim = frame->ndim;
    for (int i = 0; i + 1 < frame->ndim; i++) {
        s->shape[i] = frame->shape[i];
        bool is_open = s->shape[i] == -1 && open < 0;
        if (is_open) open = i;
        else if (s->shape[i] < 0 || __builtin_mul_overflow(known, s->shape[i], &known)) return false;
    }
    if (open < 0) return known == rows;
    if (known == 0 || rows % known) return false;
    s->shape[open] = rows / known;
    return true;
}

static bool same_lead(const te_space *a, int ndim, const int64_t *shape)
{
    return memcmp(a->shape, shape, (size_t)(ndim - 1) * sizeof *shape) == 0;
}

te_status te_state_open_frames(te_group_state *state, te_tensor *const *inputs)
{
    const te_fuse_plan *plan = state->plan;
    int64_t tokens = 1;
    state->frames[0] = te_frame_of_input(inputs[0]);
    state->ndim = state->frames[0].ndim;
    memcpy(state->shape, state->frames[0].shape, sizeof state->shape);
    for (int i = 0; i + 1 < state->ndim; i++) tokens *= state->shape[i];
    for (int f = 1; f < plan->n_frames; f++) {
        const te_plan_frame *frame = &plan->frames[f];
        bool fits = place(frame, tokens, &state->frames[f]);
        if (!fits || !same_lead(&state->frames[frame->same], frame->ndim, state->frames[f].shape))
            return te_fail(plan->ctx, TE_ERROR_UNSUPPORTED,
                           "te.reshape: cannot be planned: %lld rows of x do not fit it", (long long)tokens);
    }
    for (int v = 0; v < plan->n_values && plan->n_frames > 1; v++) {
        const te_plan_value *value = &plan->values[v];
        if (value->input < 0 || (value->cls != TE_VALUE_TOKENS && value->cls != TE_VALUE_ROWS)) continue;
        const te_space *s = &state->frames[value->frame];
        if (!same_lead(s, s->ndim, inputs[value->input]->shape))
            return te_fail(plan->ctx, TE_ERROR_UNSUPPORTED, "an extra input of shape %s does not fit the rows it meets",
                           TE_SHAPE_TEXT(inputs[value->input]));
    }
    return TE_OK;
}

te_tensor *te_state_seen(const te_group_state *state, const te_plan_value *value, te_tensor *t, int frame)
{
    bool rows = value->cls == TE_VALUE_TOKENS || value->cls == TE_VALUE_ROWS;
    if (state->plan->n_frames == 1 || !rows) return te_tensor_retain(t);
    te_space s = state->frames[frame];
    s.shape[s.ndim - 1] = value->width;
    if (value->cls == TE_VALUE_ROWS) s.ndim--;
    bool same = t->ndim == s.ndim && memcmp(t->shape, s.shape, (size_t)s.ndim * sizeof *s.shape) == 0;
    return same ? te_tensor_retain(t) : te_tensor_seen(t, s.ndim, s.shape);
}

te_tensor *te_state_stored(const te_group_state *state, const te_plan_value *value, te_tensor *t)
{
    return te_state_seen(state, value, t, value->space);
}
