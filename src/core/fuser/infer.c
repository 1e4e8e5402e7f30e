/* infer.c - class, width and dtype of every value of a plan, from those of the inputs. */
#include "plan.h"

#include "../ops/ops.h"
#include "../product.h"

#include <stdio.h>

te_status te_plan_refuse(te_fuse_plan *plan, const te_group_node *node, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return te_fail(plan->ctx, TE_ERROR_UNSUPPORTED, "te.%s: cannot be planned: %s", node->call.op->name, text);
}

static const te_plan_value *input_of(const te_fuse_plan *plan, const te_group_node *node, int i)
{
    int value = i < node->call.op->n_inputs ? node->in[i] : TE_NO_VALUE;
    return value != TE_NO_VALUE && plan->values[value].cls != TE_VALUE_ABSENT ? &plan->values[value] : NULL;
}

unsigned te_plan_present(const te_fuse_plan *plan, const te_group_node *node)
{
    unsigned present = 0;
    for (int i = 0; i < node->call.op->n_inputs; i++) present |= (unsigned)(input_of(plan, node, i) != NULL) << i;
    return present;
}

/* --- program ops -------------------------------------------------------------------------------------------------- */

/* The dtype that the op would give its result, asked with stand-ins for the tensors. */
static te_dtype program_dtype(const te_fuse_plan *plan, const te_group_node *node, const te_layout *l)
{
    te_tensor dummies[TE_OP_MAX_INPUTS];
    te_call call = node->call;
    call.ctx = plan->ctx;
    for (int i = 0; i < call.op->n_inputs; i++) {
        const te_plan_value *v = input_of(plan, node, i);
        if (!v) continue;
        dummies[i].dtype = v->dtype;
        dummies[i].ndim = v->cls == TE_VALUE_FIXED ? v->ndim : plan->frames[v->frame].ndim - (v->cls == TE_VALUE_ROWS);
        call.in[i] = &dummies[i];
    }
    return te_program_result_dtype(&call, l);
}

/* The frame that the activations among an operation's inputs have in common: *frame, x's when there is none. */
static bool common_frame(te_fuse_plan *plan, const te_group_node *node, int *frame)
{
    *frame = -1;
    for (int i = 0; i < node->call.op->n_inputs; i++) {
        if (!input_of(plan, node, i)) continue;
        te_plan_value *v = &plan->values[node->in[i]];
        if (v->cls != TE_VALUE_TOKENS && v->cls != TE_VALUE_ROWS) continue;
        v->space = plan->frames[v->frame].space;
        if (*frame >= 0 && !te_plan_same_frame(plan, *frame, v->frame)) return false;
        *frame = v->frame;
    }
    if (*frame < 0) *frame = 0;
    return true;
}

/* A parameter must be one number or, where elements are read, one number per column. */
static bool fits_columns(const te_plan_value *v, int64_t width, te_rate rate)
{
    if (v->width == 1 || rate == TE_RATE_ROW) return v->width == 1;
    return v->width == width && v->ndim > 0 && v->shape[v->ndim - 1] == width;
}

static te_status infer_program(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    te_layout l = te_program_layout(&node->call, te_plan_present(plan, node));
    const te_plan_value *first = l.n ? input_of(plan, node, l.input[0]) : NULL;
    if (!first) return te_plan_refuse(plan, node, "it takes no tensor");
    out->cls = TE_VALUE_FIXED;
    for (int i = 0; i < l.n; i++) {
        const te_plan_value *v = input_of(plan, node, l.input[i]);
        if (!te_dtype_has_gradient(v->dtype))
            return te_plan_refuse(plan, node, "an input of dtype %s", te_dtype_name(v->dtype));
        if (v->cls == TE_VALUE_ROWS && l.rate[i] != TE_RATE_ROW)
            return te_plan_refuse(plan, node, "one number per row where an element is read");
        if (v->cls == TE_VALUE_TOKENS && l.rate[i] == TE_RATE_ROW)
            return te_plan_refuse(plan, node, "rows of %lld where one number per row is read", (long long)v->width);
        if (v->cls == TE_VALUE_TOKENS) {
            int64_t width = l.part[i].half ? v->width / 2 : v->width;
            if (!te_part_fits(l.part[i], v->width))
                return te_plan_refuse(plan, node, "no halves in rows of %lld", (long long)v->width);
            if (out->cls == TE_VALUE_TOKENS && out->width != width)
                return te_plan_refuse(plan, node, "widths %lld and %lld", (long long)out->width, (long long)width);
            out->cls = TE_VALUE_TOKENS;
            out->width = width;
        }
    }
    if ((node->call.op->def->flags & TE_OP_LASTROW) && first->cls != TE_VALUE_TOKENS)
        return te_plan_refuse(plan, node, "x is a parameter");
    if (out->cls == TE_VALUE_FIXED) { /* parameters with numbers: in the shape of the first */
        out->ndim = first->ndim;
        out->width = first->width;
        memcpy(out->shape, first->shape, sizeof out->shape);
    }
    int ndim = out->cls == TE_VALUE_FIXED ? out->ndim : plan->frames[out->frame].ndim;
    for (int i = 0; i < l.n; i++) {
        const te_plan_value *v = input_of(plan, node, l.input[i]);
        if (v->cls == TE_VALUE_FIXED && l.part[i].half)
            return te_plan_refuse(plan, node, "halves of a parameter, whose rows are not x's");
        if (v->cls == TE_VALUE_FIXED && v->ndim + (l.rate[i] == TE_RATE_ROW) > ndim)
            return te_plan_refuse(plan, node, "an argument of %d dimensions beside %d", v->ndim, ndim);
        if (v->cls == TE_VALUE_FIXED && !fits_columns(v, out->width, l.rate[i]))
            return te_plan_refuse(plan, node, "an argument with %lld elements beside rows of %lld", (long long)v->width,
                                  (long long)out->width);
    }
    out->dtype = program_dtype(plan, node, &l);
    if (!te_dtype_has_gradient(out->dtype))
        return te_plan_refuse(plan, node, "a result of dtype %s", te_dtype_name(out->dtype));
    return TE_OK;
}

/* --- others ------------------------------------------------------------------------------------------------------- */

static te_status infer_linear(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = input_of(plan, node, 0), *w = input_of(plan, node, 1), *b = input_of(plan, node, 2);
    if (!x || x->cls != TE_VALUE_TOKENS || !te_dtype_has_gradient(x->dtype))
        return te_plan_refuse(plan, node, "x is no activation");
    bool fits = w && w->cls == TE_VALUE_FIXED && w->input >= 0 && w->ndim == 2 && te_dtype_has_gradient(w->dtype);
    if (!fits || w->shape[1] != x->width)
        return te_plan_refuse(plan, node, "the weight does not fit rows of %lld", (long long)x->width);
    if (b && (b->cls != TE_VALUE_FIXED || b->input < 0 || b->ndim != 1 || b->shape[0] != w->shape[0]))
        return te_plan_refuse(plan, node, "the bias does not fit the weight");
    out->cls = TE_VALUE_TOKENS;
    out->width = w->shape[0];
    out->dtype = te_product_dtype(plan->ctx, x->dtype, w->dtype);
    if (out->dtype == TE_F64 && plan->recipes[node - plan->nodes])
        return te_plan_refuse(plan, node, "float64 under a recipe"); /* by itself it raises */
    return TE_OK;
}

static te_status infer_attention(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = input_of(plan, node, 0);
    const te_attr *attr = node->call.attr;
    int heads_at = -1, kv_at = -1;
    for (int i = 0; i < node->call.op->n_params; i++) {
        const te_param *p = &node->call.op->params[i];
        if (strcmp(p->name, "heads") == 0) heads_at = p->slot;
        if (strcmp(p->name, "kv_heads") == 0) kv_at = p->slot;
    }
    const te_plan_value *sinks = input_of(plan, node, 3);
    if (!x || x->cls != TE_VALUE_TOKENS) return te_plan_refuse(plan, node, "its input is no activation");
    if (sinks && (sinks->cls != TE_VALUE_FIXED || sinks->input < 0))
        return te_plan_refuse(plan, node, "its sinks are made in the group");
    int64_t heads = (int64_t)attr[heads_at].number, kv = attr[kv_at].set ? (int64_t)attr[kv_at].number : heads;
    if (heads < 1 || kv < 1 || x->width % (heads + 2 * kv))
        return te_plan_refuse(plan, node, "%lld columns for %lld + 2 x %lld heads", (long long)x->width,
                              (long long)heads, (long long)kv);
    out->cls = TE_VALUE_TOKENS;
    te_call call = node->call;
    call.ctx = plan->ctx;
    out->width = x->width / (heads + 2 * kv) * heads;
    out->dtype = te_call_compute_dtype(&call, x->dtype);
    return TE_OK;
}

bool te_plan_turns(const te_group_node *node)
{
    return node->call.op->def->unit == TE_UNIT_ATTENTION && node->in[2] != TE_NO_VALUE;
}

int te_plan_sinks(const te_fuse_plan *plan, const te_group_node *node)
{
    int sinks = node->call.op->def->unit == TE_UNIT_ATTENTION ? node->in[3] : TE_NO_VALUE;
    return sinks != TE_NO_VALUE && plan->values[sinks].wanted ? sinks : TE_NO_VALUE;
}

static te_status infer_embedding(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *table = input_of(plan, node, 0), *ids = input_of(plan, node, 1);
    bool fits = table && table->cls == TE_VALUE_FIXED && table->input >= 0 && table->ndim == 2 &&
                te_dtype_has_gradient(table->dtype);
    if (!fits) return te_plan_refuse(plan, node, "the table does not fit");
    if (!ids || ids->cls != TE_VALUE_LENGTHS || ids->input != 0)
        return te_plan_refuse(plan, node, "its ids are not what the group is given first");
    te_call call = node->call;
    call.ctx = plan->ctx;
    out->cls = TE_VALUE_TOKENS;
    out->width = table->shape[1];
    out->dtype = te_call_compute_dtype(&call, table->dtype);
    return TE_OK;
}

/* One number per row. x only says how many rows there are. */
static te_status infer_mask(te_fuse_plan *plan, te_group_node *node, te_plan_value *out)
{
    const te_plan_value *x = input_of(plan, node, 0), *lens = input_of(plan, node, 1);
    if (!x || x->cls != TE_VALUE_TOKENS || plan->frames[x->frame].ndim < 2)
        return te_plan_refuse(plan, node, "its input has no rows");
    if (lens && lens->cls != TE_VALUE_LENGTHS)
        return te_plan_refuse(plan, node, "the lengths of sequences are no integers");
    out->cls = TE_VALUE_ROWS;
    out->width = 1;
    out->dtype = TE_F32;
    return TE_OK;
}

te_status te_plan_infer(te_fuse_plan *plan)
{
    static te_status (*const infer[TE_UNIT_KINDS])(te_fuse_plan *, te_group_node *, te_plan_value *) = {
        [TE_UNIT_PROGRAM] = infer_program,         [TE_UNIT_LINEAR] = infer_linear,
        [TE_UNIT_ATTENTION] = infer_attention,     [TE_UNIT_GATHER] = infer_embedding,
        [TE_UNIT_GROUPED] = te_plan_infer_grouped, [TE_UNIT_BIASES] = te_plan_infer_biases,
        [TE_UNIT_MASK] = infer_mask,               [TE_UNIT_VIEW] = te_plan_infer_reshape,
    };
    for (int n = 0; n < plan->n_nodes; n++) {
        te_group_node *node = &plan->nodes[n];
        te_plan_value *out = &plan->values[node->out];
        const te_op *op = node->call.op;
        te_status status = TE_OK;
        if (!common_frame(plan, node, &out->frame))
            status = te_plan_refuse(plan, node, "its inputs are seen in different shapes");
        if (status != TE_OK) return status;
        status = infer[op->def->unit](plan, node, out);
        if (status != TE_OK) return status;
        out->space = plan->frames[out->frame].space;
        for (int i = 0; i < op->n_inputs; i++) {
            const te_plan_value *v = input_of(plan, node, i);
            out->wanted |= v && v->wanted && !(op->def->flags & TE_OP_NOGRAD);
        }
        for (int i = 0; i < node->n_list; i++) out->wanted |= plan->values[node->list[i]].wanted;
    }
    return TE_OK;
}
