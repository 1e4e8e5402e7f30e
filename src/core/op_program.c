/* op_program.c - running program ops: from tensors to runs of a row program, forward and backward.
 *
 * A declaration's formula is compiled once per *variant*: which inputs are there, which are numbers, whether gradients are
 * recorded, which are wanted and how each input was broadcast. Everything else (shapes, strides, dtypes, attribute
 * values) is bound per run, so the number of programs stays small.
 *
 *     call ── iteration space (broadcast of the inputs) ── operands (strides, 0 where broadcast) ── te_run
 *
 * In backward, the gradient of an input that was broadcast along rows is a column sum, along the row a row sum, to a
 * scalar a total sum, all outputs of the one gradient program; any other broadcast is written out and summed after.
 */
#include "autograd.h"
#include "ops/ops.h"
#include "program_build.h"

#include <stdio.h>

enum { MAX_SLOTS = TE_OP_MAX_INPUTS + 1, MAX_NAMES = 40 };

/* One compiled form of one op. */
typedef struct variant {
    const te_op *op;
    uint64_t     key;
    te_gradient  gradient; /* forward alone when nothing is recorded */
    bool         differentiated;
} variant;

struct te_variants {
    variant **slots; /* open addressing, power of two */
    size_t    capacity, count;
};

/* The program's inputs: which tensor of the call each one reads. A gated op reads both halves of its first. */
typedef struct layout {
    int     n;
    int     input[MAX_SLOTS];
    int     half[MAX_SLOTS]; /* 0: whole, 1: first half, 2: second half of the last dimension */
    te_rate rate[MAX_SLOTS];
} layout;

typedef struct space {
    int     ndim;
    int64_t shape[TE_MAX_DIMS];
} space;

/* --- cache of variants -------------------------------------------------------------------------------------------- */

te_status te_variants_open(te_context *ctx)
{
    ctx->variants = te_mem_zalloc(&ctx->mem, sizeof *ctx->variants);
    return ctx->variants ? TE_OK : te_fail_memory(ctx, "te_context_open");
}

static void free_variant(te_context *ctx, variant *v)
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

static variant **find_slot(variant **slots, size_t capacity, const te_op *op, uint64_t key)
{
    size_t i = hash(op, key) & (capacity - 1);
    while (slots[i] && (slots[i]->op != op || slots[i]->key != key)) i = (i + 1) & (capacity - 1);
    return &slots[i];
}

static te_status grow_cache(te_context *ctx)
{
    te_variants *cache = ctx->variants;
    if (cache->count * 2 < cache->capacity) return TE_OK;
    size_t    capacity = cache->capacity ? cache->capacity * 2 : 64;
    variant **slots = te_mem_zalloc(&ctx->mem, capacity * sizeof *slots);
    if (!slots) return te_fail_memory(ctx, "program cache");
    for (size_t i = 0; i < cache->capacity; i++)
        if (cache->slots[i]) *find_slot(slots, capacity, cache->slots[i]->op, cache->slots[i]->key) = cache->slots[i];
    te_mem_free(&ctx->mem, cache->slots, cache->capacity * sizeof *slots);
    cache->slots = slots;
    cache->capacity = capacity;
    return TE_OK;
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

static bool is_row_input(const te_op_def *def, const char *name)
{
    char names[TE_OP_MAX_INPUTS][24];
    int  n = split_names(def->rows, names, TE_OP_MAX_INPUTS);
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0) return true;
    return false;
}

/* Names and presence in the order the formula compiler wants them. */
typedef struct formula_names {
    const char *inputs[MAX_SLOTS], *params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS], *outputs[TE_OP_MAX_OUTPUTS];
    bool        present[MAX_SLOTS];
    double      defaults[MAX_SLOTS];
    te_rate     rates[MAX_SLOTS];
    char        output_text[TE_OP_MAX_OUTPUTS][24];
    int         n_inputs, n_params, n_outputs;
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
            f->defaults[k] = p->number;
            f->rates[k] = is_row_input(op->def, p->name) ? TE_RATE_ROW : TE_RATE_ELEM;
        }
    }
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type > TE_TYPE_TENSORS) f->params[f->n_params++] = op->params[i].name;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type == TE_TYPE_TENSOR && (numbers >> op->params[i].slot & 1)) f->params[f->n_params++] = op->params[i].name;
    f->n_outputs = split_names(op->def->outputs ? op->def->outputs : "y", f->output_text, TE_OP_MAX_OUTPUTS);
    for (int i = 0; i < f->n_outputs; i++) f->outputs[i] = f->output_text[i];
}

static te_status compile_variant(te_call *call, variant *v, const formula_names *f, const bool *wanted, const te_output_kind *reduce)
{
    const te_op_def *def = call->op->def;
    te_build_error   error = {.status = TE_OK};
    te_formula       formula = {.text = def->formula, .n_inputs = f->n_inputs, .n_params = f->n_params, .n_outputs = f->n_outputs,
                                .input_names = f->inputs, .input_rates = f->rates, .input_defaults = f->defaults, .present = f->present,
                                .param_names = f->params, .output_names = f->outputs};
    te_program *forward = te_formula_compile(&call->ctx->mem, call->op->name, &formula, &error);
    if (!forward) return te_call_fail(call, error.status, "%s", error.message);
    if (!call->record) {
        v->gradient.forward = forward;
        return TE_OK;
    }
    te_gradient_request request = {.forward = forward, .formula = &formula, .gradient_text = def->gradient, .wanted = wanted, .reduce = reduce};
    te_status status = te_program_differentiate(&request, &v->gradient, &error);
    te_program_free(forward);
    v->differentiated = status == TE_OK;
    return status == TE_OK ? TE_OK : te_call_fail(call, status, "%s", error.message);
}

/* The variant for this call: wanted and reduce per program input. */
static variant *get_variant(te_call *call, unsigned present, unsigned numbers, const layout *l, const bool *wanted, const te_output_kind *reduce)
{
    te_context *ctx = call->ctx;
    uint64_t    key = (uint64_t)present | (uint64_t)numbers << 6 | (uint64_t)call->record << 12;
    for (int i = 0; call->record && i < l->n; i++) {
        key |= (uint64_t)wanted[i] << (13 + i);
        if (wanted[i]) key |= (uint64_t)reduce[i] << (20 + 3 * i);
    }
    if (grow_cache(ctx) != TE_OK) return NULL;
    variant **slot = find_slot(ctx->variants->slots, ctx->variants->capacity, call->op, key);
    if (*slot) return *slot;
    variant *v = te_mem_zalloc(&ctx->mem, sizeof *v);
    if (!v) {
        te_fail_memory(ctx, call->op->name);
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
    ctx->variants->count++;
    return *slot = v;
}

te_program *te_utility_program(te_context *ctx, const te_utility *u)
{
    const te_op *op = (const te_op *)(const void *)u; /* its address identifies it among the ops */
    if (grow_cache(ctx) != TE_OK) return NULL;
    variant **slot = find_slot(ctx->variants->slots, ctx->variants->capacity, op, 0);
    if (*slot) return (*slot)->gradient.forward;
    char           names[3][TE_GRAD_MAX_SOURCES][24];
    const char    *pointers[3][TE_GRAD_MAX_SOURCES];
    int            n[3];
    const char    *texts[3] = {u->inputs, u->params, u->outputs};
    te_build_error error = {.status = TE_OK};
    for (int k = 0; k < 3; k++) {
        n[k] = split_names(texts[k], names[k], TE_GRAD_MAX_SOURCES);
        for (int i = 0; i < n[k]; i++) pointers[k][i] = names[k][i];
    }
    te_formula formula = {.text = u->formula, .n_inputs = n[0], .n_params = n[1], .n_outputs = n[2], .input_names = pointers[0],
                          .param_names = pointers[1], .output_names = pointers[2]};
    variant *v = te_mem_zalloc(&ctx->mem, sizeof *v);
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

/* --- geometry ----------------------------------------------------------------------------------------------------- */

static layout make_layout(const te_call *call, unsigned present)
{
    const te_op *op = call->op;
    layout       l = {0};
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        if (p->type != TE_TYPE_TENSOR || !(present >> p->slot & 1)) continue;
        bool gated = (op->def->flags & TE_OP_GATED) && p->slot == 0;
        for (int half = 0; half <= (int)gated; half++) {
            l.input[l.n] = p->slot;
            l.half[l.n] = gated ? half + 1 : 0;
            l.rate[l.n++] = is_row_input(op->def, p->name) ? TE_RATE_ROW : TE_RATE_ELEM;
        }
    }
    return l;
}

/* Shape of program input i: halves are halved, row inputs get a last dimension of 1. */
static space input_space(const layout *l, int i, int ndim, const int64_t *shape)
{
    space s = {.ndim = ndim};
    memcpy(s.shape, shape, (size_t)ndim * sizeof *shape);
    if (l->half[i]) s.shape[ndim - 1] /= 2;
    if (l->rate[i] == TE_RATE_ROW && ndim < TE_MAX_DIMS) s.shape[s.ndim++] = 1;
    return s;
}

static te_status iteration_space(te_call *call, const layout *l, space *out)
{
    *out = (space){0};
    for (int i = 0; i < l->n; i++) {
        te_tensor *t = call->in[l->input[i]];
        if (l->half[i] && (t->ndim == 0 || t->shape[t->ndim - 1] % 2))
            return te_call_fail(call, TE_ERROR_ARGUMENT, "the last dimension is split in halves, so it must be even: %s", TE_SHAPE_TEXT(t));
        space s = input_space(l, i, t->ndim, t->shape);
        if (i == 0) {
            *out = s;
        } else if (!te_broadcast(&out->ndim, out->shape, s.ndim, s.shape)) {
            te_tensor *first = call->in[l->input[0]];
            return te_call_fail(call, TE_ERROR_ARGUMENT, "shapes do not broadcast: %s and %s", TE_SHAPE_TEXT(first), TE_SHAPE_TEXT(t));
        }
    }
    te_tensor *x = l->n ? call->in[l->input[0]] : NULL;
    bool rows = call->op->def->flags & TE_OP_LASTROW;
    if (rows && x->ndim == 0) return te_call_fail(call, TE_ERROR_ARGUMENT, "a tensor with at least one dimension is needed");
    space s = rows ? input_space(l, 0, x->ndim, x->shape) : *out;
    if (rows && (s.ndim != out->ndim || memcmp(s.shape, out->shape, (size_t)s.ndim * sizeof *s.shape) != 0))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "the other arguments do not fit x of shape %s", TE_SHAPE_TEXT(x));
    return TE_OK;
}

/* A run has at least one dimension. */
static void start_run(te_run *run, const space *s)
{
    memset(run, 0, sizeof *run);
    run->ndim = s->ndim ? s->ndim : 1;
    run->shape[0] = 1;
    memcpy(run->shape, s->shape, (size_t)s->ndim * sizeof *s->shape);
}

/* The operand of a tensor in the space: aligned at the last dimension, stride 0 where broadcast. */
static te_operand operand_of(const te_tensor *t, const space *s, int half, te_rate rate)
{
    te_operand o = {.data = te_tensor_pointer(t), .dtype = t->dtype};
    int        ndim = t->ndim + (rate == TE_RATE_ROW);
    for (int i = 0; i < t->ndim && ndim <= s->ndim; i++)
        o.stride[s->ndim - ndim + i] = t->shape[i] == 1 ? 0 : t->stride[i];
    if (half == 2) o.data = (char *)o.data + (size_t)(t->shape[t->ndim - 1] / 2 * t->stride[t->ndim - 1]) * te_dtype_size(t->dtype);
    return o;
}

/* How the gradient of an input of shape `s` follows from gradients over the space; false: write it out and sum after. */
static bool reduce_kind(const space *whole, const space *s, te_output_kind *kind)
{
    int64_t rows = 1, columns = whole->ndim ? whole->shape[whole->ndim - 1] : 1, n = 1;
    for (int i = 0; i + 1 < whole->ndim; i++) rows *= whole->shape[i];
    for (int i = 0; i < s->ndim; i++) n *= s->shape[i];
    int64_t last = s->ndim ? s->shape[s->ndim - 1] : 1;
    if (n == rows * columns)
        *kind = TE_OUT_ELEM;
    else if (n == 1)
        *kind = TE_OUT_SUM;
    else if (n == columns && last == columns)
        *kind = TE_OUT_COLSUM;
    else if (n == rows && last == 1)
        *kind = TE_OUT_ROW;
    else {
        *kind = TE_OUT_ELEM;
        return false;
    }
    return true;
}

/* --- binding ------------------------------------------------------------------------------------------------------ */

static void bind_params(const te_call *call, const te_program *program, unsigned numbers, int64_t row_length, double *params)
{
    const te_op *op = call->op;
    int          n = 0;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type > TE_TYPE_TENSORS) params[n++] = call->attr[op->params[i].slot].number;
    for (int i = 0; i < op->n_params; i++)
        if (op->params[i].type == TE_TYPE_TENSOR && (numbers >> op->params[i].slot & 1)) params[n++] = call->number[op->params[i].slot];
    if (program->n_params > n) params[n] = (double)row_length;
}

static bool wants_f64(const te_tensor *t, te_rate rate)
{
    return t->dtype == TE_F64 || (rate == TE_RATE_ELEM && (t->dtype == TE_I64 || t->dtype == TE_I32));
}

static te_dtype result_dtype(const te_call *call, const layout *l)
{
    unsigned flags = call->op->def->flags;
    te_dtype dtype = TE_BOOL;
    if (flags & TE_OP_BOOL) return TE_BOOL;
    if (l->n == 0) return TE_F32;
    if (flags & (TE_OP_COMPUTE | TE_OP_GATED | TE_OP_LASTROW)) {
        dtype = call->in[l->input[0]]->dtype;
    } else {
        /* a tensor without dimensions has no say against one with */
        bool ranked = false;
        for (int i = 0; i < l->n; i++) ranked |= call->in[l->input[i]]->ndim > 0;
        bool first = true;
        for (int i = 0; i < l->n; i++) {
            const te_tensor *t = call->in[l->input[i]];
            if ((ranked && t->ndim == 0) || l->rate[i] == TE_RATE_ROW || strcmp(call->op->params[i].name, "condition") == 0) continue;
            dtype = first ? t->dtype : te_promote(dtype, t->dtype);
            first = false;
        }
    }
    bool integer = dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL;
    for (int i = 0; i < call->op->n_inputs; i++) {
        if (!call->is_number[i] || !integer) continue;
        if (call->number[i] != (double)(int64_t)call->number[i]) dtype = TE_F32;
        else if (dtype == TE_BOOL) dtype = TE_I64;
    }
    integer = dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8 || dtype == TE_BOOL;
    if (dtype == TE_F8E4M3 || dtype == TE_F8E5M2 || (integer && (flags & TE_OP_FLOAT))) dtype = TE_F32;
    if (flags & TE_OP_F32) return dtype == TE_F64 ? TE_F64 : TE_F32;
    return flags & TE_OP_COMPUTE ? te_call_compute_dtype(call, dtype) : dtype;
}

/* A result: over the whole space, or one value per row. */
static te_tensor *new_result(te_call *call, bool per_row, const space *s, te_dtype dtype, te_device *device)
{
    int ndim = per_row ? s->ndim - 1 : s->ndim;
    return te_tensor_new(call->ctx, device, dtype, ndim, s->shape);
}

static te_status run_program(te_call *call, te_device *device, te_program *program, te_run *run)
{
    te_status status = device->exec.backend->program_run(&device->exec, program, run, 1);
    return te_call_kernel(call, &device->exec, status);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static te_status check_inplace(te_call *call, const space *s)
{
    const te_tensor *t = call->inplace;
    if (s->ndim != t->ndim || memcmp(s->shape, t->shape, (size_t)s->ndim * sizeof *s->shape) != 0) {
        char text[160];
        return te_call_fail(call, TE_ERROR_ARGUMENT, "the result %s does not fit in place into %s",
                            te_shape_text(s->ndim, s->shape, text, sizeof text), TE_SHAPE_TEXT(t));
    }
    return TE_OK;
}

/* Whether writing result elements may change input elements that are still to be read: same memory seen differently. */
static bool overlaps_otherwise(const te_tensor *out, const te_tensor *in)
{
    if (out->storage != in->storage) return false;
    return out->offset != in->offset || out->dtype != in->dtype || out->ndim != in->ndim ||
           memcmp(out->shape, in->shape, (size_t)in->ndim * sizeof *in->shape) != 0 ||
           memcmp(out->stride, in->stride, (size_t)in->ndim * sizeof *in->stride) != 0;
}

/* In place, an input that overlaps the target in another geometry is copied first. */
static te_status unalias_inputs(te_call *call, const layout *l, te_tensor **copies)
{
    for (int i = 0; call->inplace && i < l->n; i++) {
        te_tensor *t = call->in[l->input[i]];
        if (!overlaps_otherwise(call->inplace, t)) continue;
        copies[i] = te_tensor_clone_data(t);
        if (!copies[i]) return call->ctx->status;
        call->in[l->input[i]] = copies[i];
    }
    return TE_OK;
}

static te_status save_sources(te_call *call, const variant *v, const layout *l, te_tensor *const *rows)
{
    for (int i = 0; i < v->gradient.n_sources; i++) {
        const te_grad_source *source = &v->gradient.sources[i];
        te_tensor            *t = NULL;
        if (source->kind == TE_GRAD_FROM_INPUT) t = te_tensor_retain(call->in[l->input[source->index]]);
        if (source->kind == TE_GRAD_FROM_ROW) t = te_tensor_retain(rows[source->index]);
        if (source->kind == TE_GRAD_FROM_OUTPUT) { /* without its place in the graph, or node and result would keep each other alive */
            const te_tensor *y = call->out[source->index];
            t = te_tensor_alias(call->out[source->index], y->ndim, y->shape, y->stride, y->offset);
        }
        if (!t && source->kind != TE_GRAD_FROM_DOUT) return call->ctx->status;
        int saved = te_call_save(call, t);
        te_tensor_release(t);
        if (saved < 0) return call->ctx->status;
    }
    return TE_OK;
}

static te_status bind_and_run(te_call *call, variant *v, const layout *l, const space *s, unsigned numbers)
{
    te_program *program = v->gradient.forward;
    te_device  *device = l->n ? call->in[l->input[0]]->storage->device : call->inplace->storage->device;
    te_operand  inputs[MAX_SLOTS], outputs[TE_OP_MAX_OUTPUTS + TE_GRAD_MAX_SOURCES];
    te_tensor  *rows[TE_GRAD_MAX_SOURCES] = {NULL};
    double      params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS + 1] = {0};
    te_dtype    dtype = call->inplace ? call->inplace->dtype : result_dtype(call, l);
    te_status   status = TE_OK;
    te_run      run;
    start_run(&run, s);
    for (int i = 0; i < l->n; i++) {
        inputs[i] = operand_of(call->in[l->input[i]], s, l->half[i], l->rate[i]);
        run.compute_f64 |= wants_f64(call->in[l->input[i]], l->rate[i]);
    }
    if (call->inplace && dtype == TE_F64) run.compute_f64 = true;
    int n_results = program->n_outputs - v->gradient.n_rows;
    for (int i = 0; i < program->n_outputs; i++) {
        te_tensor *t;
        if (i == 0 && call->inplace)
            t = te_tensor_retain(call->inplace);
        else
            t = new_result(call, program->outputs[i].kind != TE_OUT_ELEM, s, i < n_results ? dtype : run.compute_f64 ? TE_F64 : TE_F32, device);
        if (i < n_results)
            call->out[i] = t;
        else
            rows[i - n_results] = t;
        if (!t) {
            status = call->ctx->status;
            goto done;
        }
        outputs[i] = operand_of(t, s, 0, program->outputs[i].kind == TE_OUT_ROW ? TE_RATE_ROW : TE_RATE_ELEM);
    }
    bind_params(call, program, numbers, run.shape[run.ndim - 1], params);
    if (program->n_rngs) {
        uint64_t words = 1;
        for (int i = 0; i < run.ndim; i++) words *= (uint64_t)run.shape[i];
        call->rng = te_context_draw(call->ctx, words);
    }
    run.inputs = inputs;
    run.outputs = outputs;
    run.params = params;
    run.rngs = &call->rng;
    status = run_program(call, device, program, &run);
    if (status == TE_OK && call->inplace) call->inplace->storage->version++;
    if (status == TE_OK && call->record) status = save_sources(call, v, l, rows);
done:
    for (int i = 0; i < v->gradient.n_rows; i++) te_tensor_release(rows[i]);
    return status;
}

te_status te_program_op_forward(te_call *call)
{
    unsigned present = 0, numbers = 0;
    for (int i = 0; i < call->op->n_inputs; i++) {
        present |= (unsigned)(call->in[i] != NULL) << i;
        numbers |= (unsigned)call->is_number[i] << i;
    }
    layout    l = make_layout(call, present);
    space     s;
    te_status status = iteration_space(call, &l, &s);
    if (status == TE_OK && call->inplace) status = check_inplace(call, &s);
    if (status == TE_OK && l.n == 0 && !call->inplace) status = te_call_fail(call, TE_ERROR_ARGUMENT, "at least one tensor is needed");
    if (status != TE_OK) return status;

    bool           wanted[MAX_SLOTS] = {false};
    te_output_kind reduce[MAX_SLOTS] = {TE_OUT_ELEM};
    for (int i = 0; call->record && i < l.n; i++) {
        te_tensor *t = call->in[l.input[i]];
        space      own = input_space(&l, i, t->ndim, t->shape);
        wanted[i] = te_needs_grad(t);
        if (wanted[i]) reduce_kind(&s, &own, &reduce[i]);
    }
    variant *v = get_variant(call, present, numbers, &l, wanted, reduce);
    if (!v) return call->ctx->status;
    call->pointer = v;
    call->memo[0] = (int64_t)present;
    call->memo[1] = (int64_t)numbers;
    te_tensor *copies[MAX_SLOTS] = {NULL};
    status = unalias_inputs(call, &l, copies);
    if (status == TE_OK) status = bind_and_run(call, v, &l, &s, numbers);
    for (int i = 0; i < l.n; i++) te_tensor_release(copies[i]);
    return status;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Where the gradient of one program input is written. */
typedef struct grad_output {
    int        slot; /* program input */
    te_tensor *target; /* borrowed from the graph, or own */
    te_tensor *own;    /* must be given (or summed and given) after the run */
} grad_output;

/* dx of a gated op is one buffer that both halves are written into. */
static te_status open_output(te_call *call, const layout *l, int i, const space *s, te_output_kind kind, grad_output *out, int done,
                             const grad_output *outs, te_operand *operand)
{
    const te_grad_meta *meta = te_grad_input(call, l->input[i]);
    space               own = input_space(l, i, meta->ndim, meta->shape);
    te_output_kind      exact;
    bool                direct = reduce_kind(s, &own, &exact);
    bool                shared = false, accumulate = false;
    for (int j = 0; j < done; j++) {
        if (!outs[j].target) continue;
        if (l->half[i] == 2 && l->input[outs[j].slot] == l->input[i]) { /* the second half goes where the first went */
            *out = outs[j];
            out->own = NULL;
            *operand = operand_of(out->target, s, 2, TE_RATE_ELEM);
            operand->accumulate = operand[-1].accumulate;
            return TE_OK;
        }
        shared |= te_grad_same(call, l->input[outs[j].slot], l->input[i]);
    }
    out->slot = i;
    if (!direct) {
        te_dtype dtype = meta->dtype == TE_F64 ? TE_F64 : TE_F32;
        out->own = out->target = te_tensor_new(call->ctx, meta->device, dtype, s->ndim, s->shape);
    } else if (shared) {
        out->own = out->target = te_tensor_new(call->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
    } else {
        out->target = te_grad_target(call, l->input[i], &accumulate);
    }
    if (!out->target) return call->ctx->status;
    if (kind == TE_OUT_COLSUM || kind == TE_OUT_SUM) {
        *operand = (te_operand){.data = te_tensor_pointer(out->target), .dtype = out->target->dtype};
        if (s->ndim) operand->stride[s->ndim - 1] = 1;
    } else {
        *operand = operand_of(out->target, s, l->half[i], l->rate[i]);
    }
    operand->accumulate = accumulate;
    return TE_OK;
}

static te_status close_output(te_call *call, const layout *l, grad_output *out)
{
    const te_grad_meta *meta = te_grad_input(call, l->input[out->slot]);
    te_tensor          *grad = out->own;
    out->own = NULL;
    int64_t n = 1;
    for (int i = 0; i < meta->ndim; i++) n *= meta->shape[i];
    if (te_tensor_numel(grad) != n) {
        te_tensor *sum = te_tensor_new(call->ctx, meta->device, meta->dtype, meta->ndim, meta->shape);
        te_status  status = sum ? te_sum_to(sum, grad, 1.0, false) : call->ctx->status;
        te_tensor_release(grad);
        if (status != TE_OK) {
            te_tensor_release(sum);
            return status;
        }
        grad = sum;
    }
    return te_grad_give(call, l->input[out->slot], grad);
}

/* The space that forward ran over, from what the graph remembers of the inputs. */
static space backward_space(const te_call *call, const layout *l)
{
    space s = {0};
    for (int i = 0; i < l->n; i++) {
        const te_grad_meta *meta = te_grad_input(call, l->input[i]);
        space               own = input_space(l, i, meta->ndim, meta->shape);
        te_broadcast(&s.ndim, s.shape, own.ndim, own.shape);
    }
    return s;
}

static bool source_rate_is_row(const te_gradient *g, const layout *l, int i)
{
    const te_grad_source *source = &g->sources[i];
    switch (source->kind) {
    case TE_GRAD_FROM_INPUT: return l->rate[source->index] == TE_RATE_ROW;
    case TE_GRAD_FROM_ROW: return true;
    default: return g->forward->outputs[source->index].kind == TE_OUT_ROW;
    }
}

/* An input whose gradient is the result's own, as in a sum, receives that tensor itself: nothing is computed or copied.
 * NULL when it has to be. */
static te_tensor *passed_through(te_call *call, const variant *v, const layout *l, int i, const struct te_program_output *out)
{
    const te_program    *program = v->gradient.backward;
    const te_insn       *insn = &program->insns[out->value];
    const te_grad_meta  *meta = te_grad_input(call, l->input[i]);
    if (insn->op != TE_PW_LOAD || out->kind != TE_OUT_ELEM || l->half[i]) return NULL;
    const te_grad_source *source = &v->gradient.sources[insn->slot];
    te_tensor            *dout = source->kind == TE_GRAD_FROM_DOUT ? call->dout[source->index] : NULL;
    bool same = dout && dout->dtype == meta->dtype && dout->ndim == meta->ndim &&
                memcmp(dout->shape, meta->shape, (size_t)meta->ndim * sizeof *meta->shape) == 0;
    return same ? dout : NULL;
}

te_status te_program_op_backward(te_call *call)
{
    const variant *v = call->pointer;
    layout         l = make_layout(call, (unsigned)call->memo[0]);
    space          s = backward_space(call, &l);
    te_program    *program = v->gradient.backward;
    te_operand     inputs[TE_GRAD_MAX_SOURCES], outputs[MAX_SLOTS];
    grad_output    outs[MAX_SLOTS];
    double         params[TE_OP_MAX_ATTRS + TE_OP_MAX_INPUTS + 1] = {0};
    te_tensor     *zeros[TE_OP_MAX_OUTPUTS] = {NULL};
    te_status      status = TE_OK;
    te_run         run;
    int            n = 0, to_compute = 0;
    start_run(&run, &s);
    memset(outs, 0, sizeof outs);
    for (int i = 0; i < v->gradient.n_sources && status == TE_OK; i++) {
        const te_grad_source *source = &v->gradient.sources[i];
        te_tensor            *t = source->kind == TE_GRAD_FROM_DOUT ? call->dout[source->index] : call->saved[i];
        int                   half = source->kind == TE_GRAD_FROM_INPUT ? l.half[source->index] : 0;
        te_rate               rate = source_rate_is_row(&v->gradient, &l, i) ? TE_RATE_ROW : TE_RATE_ELEM;
        if (!t) { /* nothing came back for this result */
            t = zeros[source->index] = new_result(call, rate == TE_RATE_ROW, &s, TE_F32, te_grad_input(call, l.input[0])->device);
            status = t ? te_tensor_fill(t, 0) : call->ctx->status;
            if (status != TE_OK) break;
        }
        inputs[i] = operand_of(t, &s, half, rate);
        run.compute_f64 |= wants_f64(t, rate);
    }
    for (int i = 0, k = 0; i < l.n && status == TE_OK; i++) {
        if (!(v->key >> (13 + i) & 1)) continue;
        const struct te_program_output *out = &program->outputs[k++];
        te_tensor *same = passed_through(call, v, &l, i, out);
        outs[n].slot = i;
        outputs[n] = (te_operand){.data = NULL};
        if (same) {
            status = te_grad_give(call, l.input[i], te_tensor_retain(same));
        } else if (te_grad_wanted(call, l.input[i])) {
            status = open_output(call, &l, i, &s, (te_output_kind)out->kind, &outs[n], n, outs, &outputs[n]);
            to_compute++;
        }
        n++;
    }
    if (status == TE_OK && to_compute) {
        bind_params(call, program, (unsigned)call->memo[1], run.shape[run.ndim - 1], params);
        run.inputs = inputs;
        run.outputs = outputs;
        run.params = params;
        run.rngs = &call->rng;
        status = run_program(call, te_grad_input(call, l.input[0])->device, program, &run);
    }
    for (int i = 0; i < n; i++) {
        if (outs[i].own && status == TE_OK)
            status = close_output(call, &l, &outs[i]);
        else
            te_tensor_release(outs[i].own);
    }
    for (int i = 0; i < TE_OP_MAX_OUTPUTS; i++) te_tensor_release(zeros[i]);
    return status;
}
