/* op_variant.c - the compiled programs of a context.
 *
 * A declaration's formula is compiled once per *variant*: which inputs are there, which are numbers, whether gradients
 * are recorded, which are wanted and how each input was broadcast. Everything else (shapes, strides, dtypes, attribute
 * values) is bound per run, so the number of programs stays small.
 */
#include "op_program.h"
#include "ops/ops.h"

#include <stdio.h>

struct te_variants {
    te_variant **slots; /* open addressing, power of two */
    size_t capacity, count;
};

/* --- cache of variants -------------------------------------------------------------------------------------------- */

te_status te_variants_open(te_context *ctx)
{
    ctx->variants = te_mem_zalloc(&ctx->mem, sizeof *ctx->variants);
    return ctx->variants ? TE_OK : te_fail_memory(ctx, "te_context_open");
}

static void free_variant(te_context *ctx, te_variant *v)
{
    te_gradient_clear(&v->gradient);
    te_mem_free(&ctx->mem, v, sizeof *v);
}

void te_variants_close(te_context *ctx)
{
    te_variants *cache = ctx->variants;
    if (!cache) return;
    for (size_t i = 0; i < cache->capacity; i++)
        if (cache->slots[i]) free_variant(ctx, cache->slots[i]);
    te_mem_free(&ctx->mem, cache->slots, cache->capacity * sizeof *cache->slots);
    te_mem_free(&ctx->mem, cache, sizeof *cache);
    ctx->variants = NULL;
}

static size_t hash(const te_op *op, uint64_t key)
{
    uint64_t h = ((uint64_t)(uintptr_t)op ^ key * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return (size_t)(h ^ h >> 29);
}

static te_variant **find_slot(te_variant **slots, size_t capacity, const te_op *op, uint64_t key)
{
    size_t i = hash(op, key) & (capacity - 1);
    while (slots[i] && (slots[i]->op != op || slots[i]->key != key)) i = (i + 1) & (capacity - 1);
    return &slots[i];
}

static te_status grow_cache(te_context *ctx)
{
    te_variants *cache = ctx->variants;
    if (cache->count * 2 < cache->capacity) return TE_OK;
    size_t capacity = cache->capacity ? cache->capacity * 2 : 64;
    te_variant **slots = te_mem_zalloc(&ctx->mem, capacity * sizeof *slots);
    if (!slots) return te_fail_memory(ctx, "program cache");
    for (size_t i = 0; i < cache->capacity; i++)
        if (cache->slots[i]) *find_slot(slots, capacity, cache->slots[i]->op, cache->slots[i]->key) = cache->slots[i];
    te_mem_free(&ctx->mem, cache->slots, cache->capacity * sizeof *slots);
    cache->slots = slots;
    cache->capacity = capacity;
    return TE_OK;
}

/* Frees the entry at i; those behind it that it stood in the way of move up. */
static void remove_slot(te_context *ctx, size_t i)
{
    te_variants *cache = ctx->variants;
    size_t mask = cache->capacity - 1;
    free_variant(ctx, cache->slots[i]);
    cache->slots[i] = NULL;
    cache->count--;
    for (i = (i + 1) & mask; cache->slots[i]; i = (i + 1) & mask) {
        te_variant *moved = cache->slots[i];
        cache->slots[i] = NULL;
        *find_slot(cache->slots, cache->capacity, moved->op, moved->key) = moved;
    }
}

void te_variants_drop(te_context *ctx, const te_op *op)
{
    te_variants *cache = ctx->variants;
    for (te_variant *v = op->variants, *next; v; v = next) {
        next = v->next;
        remove_slot(ctx, (size_t)(find_slot(cache->slots, cache->capacity, op, v->key) - cache->slots));
    }
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
    const te_variants *cache = ctx->variants;
    return cache->capacity ? *find_slot(cache->slots, cache->capacity, op, (1u << n) - 1) : NULL;
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
    if (grow_cache(ctx) != TE_OK) return NULL;
    te_variant **slot = find_slot(ctx->variants->slots, ctx->variants->capacity, call->op, key);
    if (*slot) return *slot;
    te_variant *v = te_mem_zalloc(&ctx->mem, sizeof *v);
    if (!v) {
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
    ctx->variants->count++;
    if (v->op->refs) {
        te_op *own = (te_op *)(uintptr_t)v->op;
        v->next = own->variants;
        own->variants = v;
    }
    return *slot = v;
}

te_program *te_utility_program(te_context *ctx, const te_utility *u)
{
    const te_op *op = (const te_op *)(const void *)u; /* its address identifies it among the ops */
    if (grow_cache(ctx) != TE_OK) return NULL;
    te_variant **slot = find_slot(ctx->variants->slots, ctx->variants->capacity, op, 0);
    if (*slot) return (*slot)->gradient.forward;
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
    te_variant *v = te_mem_zalloc(&ctx->mem, sizeof *v);
    if (!v) {
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
    ctx->variants->count++;
    *slot = v;
    return v->gradient.forward;
}
