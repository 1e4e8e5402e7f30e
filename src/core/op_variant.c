/* op_variant.c - the compiled programs of a context.
 *
 * A declaration's formula is compiled once per *variant*: which inputs are there, which are numbers, whether gradients
 * are recorded, which are wanted and how each input was broadcast. Everything else (shapes, strides, dtypes, attribute
 * values) is bound per run, so the number of programs stays small.
 */
#include "op_program.h"
#include "ops/ops.h"

#include <stdio.h>

/* --- cache of variants -------------------------------------------------------------------------------------------- */

static void free_variant(te_context *ctx, te_variant *v)
{
    te_gradient_clear(&v->gradient);
    te_mem_free(&ctx->mem, v, sizeof *v);
}

void te_variants_close(te_context *ctx)
{
    te_variant *v;
    for (size_t at = 0; (v = te_map_next(&ctx->variants, &at));) free_variant(ctx, v);
    te_map_clear(&ctx->variants, &ctx->mem);
}

static te_map_key key_of(const te_op *op, uint64_t key) { return (te_map_key){(uint64_t)(uintptr_t)op, key}; }

void te_variants_drop(te_context *ctx, const te_op *op)
{
    for (te_variant *v = op->variants, *next; v; v = next) {
        next = v->next;
        te_map_remove(&ctx->variants, key_of(op, v->key));
        free_variant(ctx, v);
    }
}

/* Keeps a new variant; without memory for that it is freed. */
static te_variant *keep_variant(te_context *ctx, te_variant *v)
{
    if (te_map_put(&ctx->variants, &ctx->mem, key_of(v->op, v->key), v)) return v;
    free_variant(ctx, v);
    te_fail_memory(ctx, "program cache");
    return NULL;
}

/* --- compiling a variant ------------------------------------------------------------------------------------------ */

/* Words of "y lse" into rows of names; how many. */
static int split_names(const char *text, char names[][24], int limit)
{
    int n = 0;
    while (text && *text && n < limit) {
        while (*text == ' ' || *text == ',') text++;
        size_t length = strcspn(text, " ,");
        if (!length) break;
        snprintf(names[n++], 24, "%.*s", (int)(length < 23 ? length : 23), text);
        text += length;
    }
    return n;
}

bool te_is_row_input(const te_op_def *def, const char *name)
{
    char names[TE_OP_MAX_INPUTS][24];
    int n = split_names(def->rows, names, TE_OP_MAX_INPUTS);
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

/* Names and presence in the order the formula compiler wants them. */
typedef struct formula_names {
    const char *inputs[TE_PROGRAM_SLOTS], *params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS], *outputs[TE_OP_MAX_OUTPUTS];
    bool present[TE_PROGRAM_SLOTS];
    double defaults[TE_PROGRAM_SLOTS];
    te_rate rates[TE_PROGRAM_SLOTS];
    char output_text[TE_OP_MAX_OUTPUTS][24];
    int n_inputs, n_params, n_outputs;
} formula_names;

static void collect_names(const te_call *call, formula_names *f, unsigned present, unsigned numbers)
{
    const te_op *op = call->op;
    memset(f, 0, sizeof *f);
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        if (p->type != TE_TYPE_TENSOR || (numbers >> p->slot & 1)) continue;
        bool gated = (op->def->flags & TE_OP_GATED) && p->slot == 0;
        for (int half = 0; half <= (int)gated; half++) {
            int k = f->n_inputs++;
            f->inputs[k] = gated ? (half ? "b" : "a") : p->name;
            f->present[k] = present >> p->slot & 1;
            f->defaults[k] = p->number == 0 ? -0.0 : p->number; /* what is absent adds nothing, not even 0 to -0 */
            f->rates[k] = te_is_row_input(op->def, p->name) ? TE_RATE_ROW : TE_RATE_ELEM;
        }
    }
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type > TE_TYPE_TENSORS) f->params[f->n_params++] = op->params[i].name;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type == TE_TYPE_TENSOR && (numbers >> op->params[i].slot & 1))
            f->params[f->n_params++] = op->params[i].name;
    f->n_outputs = split_names(op->def->outputs ? op->def->outputs : "y", f->output_text, TE_OP_MAX_OUTPUTS);
    for (int i = 0; i < f->n_outputs; i++) f->outputs[i] = f->output_text[i];
}

static te_status compile_variant(te_call *call, te_variant *v, const formula_names *f, const bool *wanted,
                                 const te_output_kind *reduce)
{
    const te_op_def *def = call->op->def;
    te_build_error error = {.status = TE_OK};
    te_formula formula = {.text = def->formula,
                          .n_inputs = f->n_inputs,
                          .n_params = f->n_params,
                          .n_outputs = f->n_outputs,
                          .input_names = f->inputs,
                          .input_rates = f->rates,
                          .input_defaults = f->defaults,
                          .present = f->present,
                          .param_names = f->params,
                          .output_names = f->outputs,
                          .elements = (def->flags & TE_OP_ELEMENTS) != 0};
    te_program *forward = te_formula_compile(&call->ctx->mem, call->op->name, &formula, &error);
    if (!forward) return te_call_fail(call, error.status, "%s", error.message);
    if (!call->record) {
        v->gradient.forward = forward;
        return TE_OK;
    }
    te_gradient_request request = {
        .forward = forward, .formula = &formula, .gradient_text = def->gradient, .wanted = wanted, .reduce = reduce};
    te_status status = te_program_differentiate(&request, &v->gradient, &error);
    te_program_free(forward);
    return status == TE_OK ? TE_OK : te_call_fail(call, status, "%s", error.message);
}

static bool is_flat(const te_program *p)
{
    if (p->n_outputs != 1 || p->outputs[0].kind != TE_OUT_ELEM || p->n_params || p->n_rngs) return false;
    for (int i = 0; i < p->n_insns; i++)
        if (p->insns[i].rate == TE_RATE_ROW || p->insns[i].op == TE_PW_COLUMN) return false;
    return true;
}

te_variant *te_variant_find(te_context *ctx, const te_op *op, int n)
{
    return te_map_find(&ctx->variants, key_of(op, (1u << n) - 1));
}

/* The variant for this call: wanted and reduce per program input. */
te_variant *te_variant_get(te_call *call, unsigned present, unsigned numbers, const te_layout *l, const bool *wanted,
                           const te_output_kind *reduce)
{
    te_context *ctx = call->ctx;
    uint64_t key = (uint64_t)present | (uint64_t)numbers << 6 | (uint64_t)call->record << 12;
    for (int i = 0; call->record && i < l->n; i++) {
        key |= (uint64_t)wanted[i] << (13 + i);
        if (wanted[i]) key |= (uint64_t)reduce[i] << (20 + 3 * i);
    }
    te_variant *v = te_map_find(&ctx->variants, key_of(call->op, key));
    if (v) return v;
    if (!(v = te_mem_zalloc(&ctx->mem, sizeof *v))) {
        te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
        return NULL;
    }
    formula_names names;
    collect_names(call, &names, present, numbers);
    v->op = call->op;
    v->key = key;
    if (compile_variant(call, v, &names, wanted, reduce) != TE_OK) {
        free_variant(ctx, v);
        return NULL;
    }
    v->flat = !call->record && is_flat(v->gradient.forward);
    if (!keep_variant(ctx, v)) return NULL;
    if (v->op->refs) {
        te_op *own = (te_op *)(uintptr_t)v->op;
        v->next = own->variants;
        own->variants = v;
    }
    return v;
}

te_program *te_utility_program(te_context *ctx, const te_utility *u)
{
    const te_op *op = (const te_op *)(const void *)u; /* its address identifies it among the ops */
    te_variant *v = te_map_find(&ctx->variants, key_of(op, 0));
    if (v) return v->gradient.forward;
    char names[3][TE_GRAD_MAX_SOURCES][24];
    const char *pointers[3][TE_GRAD_MAX_SOURCES];
    int n[3];
    const char *texts[3] = {u->inputs, u->params, u->outputs};
    te_build_error error = {.status = TE_OK};
    for (int k = 0; k < 3; k++) {
        n[k] = split_names(texts[k], names[k], TE_GRAD_MAX_SOURCES);
        for (int i = 0; i < n[k]; i++) pointers[k][i] = names[k][i];
    }
    te_formula formula = {.text = u->formula,
                          .n_inputs = n[0],
                          .n_params = n[1],
                          .n_outputs = n[2],
                          .input_names = pointers[0],
                          .param_names = pointers[1],
                          .output_names = pointers[2]};
    if (!(v = te_mem_zalloc(&ctx->mem, sizeof *v))) {
        te_fail_memory(ctx, u->name);
        return NULL;
    }
    v->op = op;
    v->gradient.forward = te_formula_compile(&ctx->mem, u->name, &formula, &error);
    if (!v->gradient.forward) {
        te_fail(ctx, error.status, "%s: %s", u->name, error.message);
        free_variant(ctx, v);
        return NULL;
    }
    if (u->kind != TE_OUT_ELEM) v->gradient.forward->outputs[0].kind = (uint8_t)u->kind;
    return keep_variant(ctx, v) ? v->gradient.forward : NULL;
}
