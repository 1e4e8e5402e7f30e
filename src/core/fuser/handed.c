/* handed.c - FP8 attention before a product: its result stays bytes.
 *
 * Attention of quantized operands leaves E4M3 with one factor (te_attention). Where the recipe hands that on, and one
 * product that multiplies this format reads it and nobody else, no value of it is ever stored: the product takes the
 * bytes as its input, and their transpose where its weight gradient wants it.
 */
#include "handed.h"

#include "../quantized_parameter.h"

static double option(const te_group_node *node, const char *name)
{
    for (int i = 0; i < node->call.op->n_params; i++)
        if (strcmp(node->call.op->params[i].name, name) == 0)
            return node->call.attr[node->call.op->params[i].slot].number;
    return 0;
}

static const te_unit *product_behind(const te_fuse_plan *plan, const te_unit *call)
{
    const te_plan_value *v = &plan->values[call->result];
    bool alone =
        v->cls == TE_VALUE_TOKENS && v->output < 0 && v->first_reader >= 0 && v->first_reader == v->last_reader;
    const te_unit *reader = alone ? &plan->units[v->first_reader] : NULL;
    return reader && reader->kind == TE_UNIT_LINEAR ? reader : NULL;
}

const char *te_plan_why_not_handed(const te_fuse_plan *plan, const te_unit *call)
{
    const te_plan_value *v = &plan->values[call->result];
    const te_unit *product = product_behind(plan, call);
    if (!call->attention) return NULL;
    if (!call->attention->hands_on) return "the recipe hands it on in high precision";
    if (option(&plan->nodes[call->nodes[0]], "dropout") > 0) return "with dropout it may leave the range of its factor";
    if (!product) return "something else than one product reads it";
    if (!product->recipe || !product->recipe->quantized[TE_ROLE_INPUT]) return "the product is in high precision";
    const te_quantizer *q = &product->recipe->quantizers[TE_ROLE_INPUT];
    if (q->element != TE_E4M3 || q->scale != TE_SCALE_F32 || q->block_rows)
        return "the product multiplies another format";
    if (product->recipe->backward == TE_BACKWARD_HIGH_PRECISION) return "backward reads it in high precision";
    return v->saved || v->dtype != product->compute ? "backward reads it" : NULL;
}

void te_plan_mark_handed(te_fuse_plan *plan)
{
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        if (unit->kind != TE_UNIT_ATTENTION || !unit->attention) continue;
        plan->values[unit->result].handed = te_plan_why_not_handed(plan, unit) == NULL;
    }
}

te_status te_state_hand_on(te_group_state *state, const te_unit *call, const te_tensor *y)
{
    const te_fuse_plan *plan = state->plan;
    const te_unit *product = product_behind(plan, call);
    te_quantized *copies = &state->emitted[2 * product->product];
    bool columnwise = product->recipe->backward == TE_BACKWARD_QUANTIZED && plan->values[product->weight].wanted;
    te_quantized_share(&y->storage->quantized->copies, true, false, copies);
    return columnwise ? te_quantized_complete(copies) : TE_OK;
}
