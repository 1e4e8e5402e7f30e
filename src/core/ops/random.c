/* random.c - draws. Element i of a draw is a function of seed and position alone, the same on every device. */
#include "ops.h"

#include <math.h>
#include <stdio.h>

/* p, which is the first attribute everywhere. */
static te_status check_p(te_call *call)
{
    double p = call->attr[0].number;
    return p >= 0 && p <= 1 ? TE_OK : te_call_fail(call, TE_ERROR_ARGUMENT, "p must lie in [0, 1], not %g", p);
}

/* dropout(x; p, training) */
static te_status dropout_resolve(te_call *call, te_delegate *to)
{
    double p = call->attr[0].number;
    te_status status = check_p(call);
    if (status != TE_OK) return status;
    if (p == 0 || call->attr[1].number == 0) return TE_OK;
    *to = (te_delegate){.name = "dropout_apply", .attrs = {p, p < 1 ? 1 / (1 - p) : 0}, .n = 2};
    return TE_OK;
}

/* --- stochastic depth --------------------------------------------------------------------------------------------- */

/* {n}, true with probability 1 - p. */
static te_tensor *draw_kept(te_call *call, int64_t n, double p)
{
    te_tensor *kept = te_tensor_new(call->ctx, call->in[0]->storage->device, TE_BOOL, 1, &n);
    const te_op *draw = te_op_find(call->ctx, "kept");
    te_arg args[] = {TE_A_TENSOR(kept), TE_A_NUMBER(p)};
    if (kept && draw && te_op_run_inplace(call->ctx, draw, args, 2) == TE_OK) return kept;
    te_tensor_release(kept);
    return NULL;
}

/* The number of its sequence for every token. */
static te_status number_tokens(te_call *call, te_tensor *lens, int64_t tokens, int64_t *lengths, int64_t *ids)
{
    int64_t n = 0;
    te_status status = te_tensor_read(lens, TE_I64, lengths);
    if (status != TE_OK) { /* as while a graph is recorded */
        char reason[256];
        snprintf(reason, sizeof reason, "%s", te_context_error(call->ctx));
        return te_call_fail(call, status, "seq_lens are read by the host: %s", reason);
    }
    for (int64_t i = 0; i < lens->shape[0] && status == TE_OK; i++) {
        if (lengths[i] < 0 || lengths[i] > tokens - n)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens[%lld] = %lld does not fit %lld tokens",
                                te_counted(call->ctx, i), (long long)lengths[i], (long long)tokens);
        for (int64_t k = 0; k < lengths[i]; k++) ids[n++] = i;
    }
    if (status == TE_OK && n != tokens)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "seq_lens add up to %lld of %lld tokens", (long long)n,
                              (long long)tokens);
    return status;
}

/* {tokens} from {sequences}. */
static te_tensor *spread(te_call *call, te_tensor *kept, te_tensor *lens, int64_t tokens)
{
    const te_mem *mem = &call->ctx->mem;
    size_t bytes = (size_t)(lens->shape[0] + tokens) * sizeof(int64_t);
    int64_t *numbers = te_mem_alloc(mem, bytes);
    if (!numbers) {
        te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
        return NULL;
    }
    te_tensor *ids = NULL, *wide = NULL;
    if (number_tokens(call, lens, tokens, numbers, numbers + lens->shape[0]) == TE_OK)
        ids = te_tensor_new(call->ctx, kept->storage->device, TE_I64, 1, &tokens);
    te_arg args[] = {TE_A_TENSOR(kept), TE_A_NUMBER(0), TE_A_TENSOR(ids)};
    if (ids && te_tensor_write(ids, TE_I64, numbers + lens->shape[0]) == TE_OK)
        wide = te_op_call(call->ctx, "index_select", 3, args);
    te_tensor_release(ids);
    te_mem_free(mem, numbers, bytes);
    return wide;
}

/* {batch, 1, …} of {batch, …}; {1, …} when x has at most two dimensions and so is one sequence; {tokens, 1} with
 * lengths. */
static te_status mask_forward(te_call *call)
{
    te_tensor *x = call->in[0], *lens = call->in[1];
    double p = call->attr[0].number;
    if (check_p(call) != TE_OK) return call->ctx->status;
    if (lens && (lens->ndim != 1 || x->ndim != 2 || (lens->dtype != TE_I32 && lens->dtype != TE_I64)))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "seq_lens must be {batch} of int32 or int64 beside {tokens, hidden}, not %s of %s beside "
                            "%s",
                            TE_SHAPE_TEXT(lens), te_dtype_name(lens->dtype), TE_SHAPE_TEXT(x));
    int64_t shape[TE_MAX_DIMS], n = lens ? lens->shape[0] : x->ndim > 2 ? x->shape[0] : 1;
    te_tensor *kept = draw_kept(call, n, p);
    if (kept && lens) {
        te_tensor *wide = spread(call, kept, lens, x->shape[0]);
        te_tensor_release(kept);
        kept = wide;
    }
    if (!kept) return call->ctx->status;
    for (int i = 0; i < x->ndim; i++) shape[i] = i ? 1 : kept->shape[0];
    te_arg args[] = {TE_A_TENSOR(kept), TE_A_INTS(shape, x->ndim)};
    te_tensor *mask = te_op_call(call->ctx, "view", 2, args);
    te_tensor_release(kept);
    return te_call_result(call, mask);
}

static te_status stochastic_depth_forward(te_call *call)
{
    double p = call->attr[0].number;
    te_tensor *x = call->in[0];
    if (p == 0 || call->attr[1].number == 0) return te_call_result(call, te_tensor_retain(x));
    te_arg draw[] = {TE_A_TENSOR(x), TE_A_ABSENT, TE_A_NUMBER(p)};
    if (call->in[1]) draw[1] = TE_A_TENSOR(call->in[1]);
    te_tensor *kept = te_op_call(call->ctx, "stochastic_depth_mask", 3, draw);
    if (!kept) return call->ctx->status;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(kept), TE_A_NUMBER(p < 1 ? 1 / (1 - p) : 0)};
    te_status status = te_call_delegate(call, "stochastic_depth_apply", 3, args);
    te_tensor_release(kept);
    return status;
}

/* --- bounds ------------------------------------------------------------------------------------------------------- */

static te_status check_ends(te_call *call)
{
    double low = call->attr[0].number, high = call->attr[1].number;
    if (low <= high && isfinite(high - low)) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "there are no numbers from %g to %g", low, high);
}

static te_status check_whole_ends(te_call *call)
{
    double low = call->attr[0].number, high = call->attr[1].number;
    if (ceil(low) <= floor(high) && isfinite(high - low)) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "there are no whole numbers from %g to %g", low, high);
}

static te_status check_normal(te_call *call)
{
    double mean = call->attr[0].number, std = call->attr[1].number;
    if (isfinite(mean) && std >= 0 && isfinite(std)) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "there is no normal distribution of mean %g and std %g", mean, std);
}

static double nearest(te_dtype dtype, double x)
{
    double element;
    te_store_f64(&element, dtype, 0, x);
    return te_load_f64(&element, dtype, 0);
}

/* The dtype's next number above, or below when direction is -1. */
static double next(te_dtype dtype, double x, int direction)
{
    double to = direction > 0 ? (double)INFINITY : -(double)INFINITY;
    if (dtype == TE_F64) return nextafter(x, to);
    if (dtype == TE_F32) return (double)nextafterf((float)x, (float)to);
    bool bytes = te_dtype_is_float8(dtype), away = (direction > 0) == (x > 0);
    union {
        double element; /* of whatever dtype */
        uint16_t two;
        uint8_t one;
    } code = {0};
    te_store_f64(&code, dtype, 0, x);
    if (bytes)
        code.one = (uint8_t)(x != 0 ? code.one + (away ? 1 : -1) : direction > 0 ? 1 : 0x81);
    else
        code.two = (uint16_t)(x != 0 ? code.two + (away ? 1 : -1) : direction > 0 ? 1 : 0x8001);
    return te_load_f64(&code, dtype, 0);
}

/* A number just below high may be rounded to high: it becomes the last one below. Between 0 and 1 float32 and float64
 * hold what is drawn. */
static te_status stay_within(te_call *call)
{
    te_tensor *y = call->out[0];
    te_dtype dtype = y->dtype;
    double low = call->attr[0].number, high = call->attr[1].number;
    if (!te_dtype_is_float(dtype) || ((dtype == TE_F32 || dtype == TE_F64) && low == 0 && high == 1)) return TE_OK;
    double first = nearest(dtype, low), last = nearest(dtype, high);
    if (!(low < high) || !isfinite(first) || !isfinite(last)) return TE_OK;
    if (first < low) first = next(dtype, first, 1);
    if (last >= high) last = next(dtype, last, -1);
    const te_op *clamp = te_op_find(call->ctx, "clamp");
    te_arg args[] = {TE_A_TENSOR(y), TE_A_NUMBER(first), TE_A_NUMBER(last)};
    if (first > last) return TE_OK; /* the dtype has no number between them */
    if (!clamp) return call->ctx->status;
    bool      recording = te_context_set_grad_enabled(call->ctx, false); /* draws fill leaves, too */
    te_status status = te_op_run_inplace(call->ctx, clamp, args, 3);
    te_context_set_grad_enabled(call->ctx, recording);
    return status;
}

/* --- draws by weight ---------------------------------------------------------------------------------------------- */

static te_status multinomial_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    int64_t n = (int64_t)call->attr[0].number, shape[2];
    if (x->ndim < 1 || x->ndim > 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "weights must be {classes} or {rows, classes}, not %s",
                            TE_SHAPE_TEXT(x));
    if (n < 1) return te_call_fail(call, TE_ERROR_ARGUMENT, "n = %lld draws", (long long)n);
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    te_tensor *y = call->out[0] = te_tensor_new(call->ctx, x->storage->device, TE_I64, x->ndim, shape);
    if (!y) return call->ctx->status;
    te_exec *exec = te_call_exec(call, x);
    te_view out = te_tensor_view(y), src = te_tensor_view(x);
    te_rng rng = te_context_draw(call->ctx, (uint64_t)te_tensor_numel(y));
    return te_call_kernel(call, exec, exec->backend->multinomial(exec, &out, &src, call->attr[1].number != 0, rng));
}

const te_op_def te_ops_draw[] = {
    {.signature = "multinomial(x, n: int = 1, replacement: bool = false)",
     .doc = "n class ids (from 0, int64) per row of x, drawn with the row as weights.",
     .flags = TE_OP_METHOD | TE_OP_NOGRAD,
     .forward = multinomial_forward},
    {0},
};

#define DRAW (TE_OP_METHOD | TE_OP_INPLACE | TE_OP_NOGRAD)

const te_op_def te_ops_random[] = {
    {.signature = "dropout(x, p: number = 0.5, training: bool = true)",
     .doc = "Zeroes each element with probability p (exact to 2^-32) and divides the others by 1 - p; the mask is "
            "recomputed in backward, not stored.",
     .flags = TE_OP_METHOD,
     .resolve = dropout_resolve},
    {.signature = "dropout_apply(x; p: number = 0.5, scale: number = 2)",
     .doc = "Dropout with a given scale.",
     .flags = TE_OP_HIDDEN,
     .formula = "y = where(keep(p), x * scale, 0)"},
    {.signature = "stochastic_depth(x, seq_lens = nil; p: number = 0.5, training: bool = true)",
     .doc =
         "Zeroes whole samples with probability p and divides the others by 1 - p: sequences of {batch, …}, those of "
         "packed {tokens, hidden} with seq_lens {batch}, or all of {tokens, hidden} (Huang et al. 2016).",
     .flags = TE_OP_METHOD,
     .forward = stochastic_depth_forward},
    {.signature = "stochastic_depth_mask(x, seq_lens = nil; p: number = 0.5)",
     .doc = "Which rows of x stochastic depth keeps.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .unit = TE_UNIT_MASK,
     .forward = mask_forward},
    {.signature = "stochastic_depth_apply(x, kept; scale: number = 2)",
     .doc = "x times scale where kept, else 0.",
     .flags = TE_OP_HIDDEN,
     .formula = "y = where(kept, x * scale, 0)"},
    {.signature = "stochastic_depth_rows(x, kept; scale: number = 2)",
     .doc = "x times scale in rows that are kept, else 0: one number for every row.",
     .flags = TE_OP_HIDDEN,
     .rows = "kept",
     .formula = "y = where(kept, x * scale, 0)"},
    {.signature = "kept(x; p: number = 0.5)",
     .doc = "0 with probability p, else 1, in x's shape.",
     .flags = TE_OP_HIDDEN | TE_OP_INPLACE | TE_OP_NOGRAD,
     .formula = "y = keep(p)"},
    {.signature = "uniform(x; low: number = 0, high: number = 1)",
     .doc = "Uniform numbers in [low, high) in x's shape, with 24 random bits each, also in float64.",
     .flags = DRAW,
     .formula = "y = low + (high - low) * random()",
     .check = check_ends,
     .after = stay_within},
    {.signature = "normal(x; mean: number = 0, std: number = 1)",
     .doc = "Normal numbers in x's shape, drawn as float32.",
     .flags = DRAW,
     .formula = "y = mean + std * normal()",
     .check = check_normal},
    {.signature = "integers(x, low: number, high: number)",
     .doc = "Integers from low to high in x's shape; both limits are included where they are integers.",
     .flags = DRAW,
     .formula = "a = ceil(low); b = floor(high); y = min(b, floor(a + (b - a + 1) * random()))",
     .check = check_whole_ends},
    {.signature = "bernoulli(x; p: number = 0.5)",
     .doc = "1 with probability p, else 0, in x's shape.",
     .flags = DRAW,
     .formula = "y = keep(1 - p)",
     .check = check_p},
    {.signature = "sequence(x, first: number = 0, step: number = 1)",
     .doc = "first + step * i along the last dimension, i from 0.",
     .flags = DRAW,
     .formula = "y = first + step * column()"},
    {0},
};
