/* loss.c - losses. Cross entropy is one row program: probabilities are never written. */
#include "ops.h"

#include "../autograd.h"

#include <math.h>
#include <stdio.h>

/* Every target is a class or the ignored index: found by the device, for which nobody waits, or by the host. */
static te_status check_targets(te_call *call, te_tensor *target, int64_t classes, double ignored)
{
    te_exec *exec = te_call_exec(call, target);
    if (exec->backend->check_classes) {
        te_view view = te_tensor_view(target);
        return te_call_kernel(call, exec, exec->backend->check_classes(exec, &view, classes, ignored));
    }
    int64_t n = te_tensor_numel(target);
    int64_t *ids = te_mem_alloc(&call->ctx->mem, (size_t)n * sizeof *ids);
    if (!ids) return te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
    te_status status = te_tensor_read(target, TE_I64, ids);
    for (int64_t i = 0; i < n && status == TE_OK; i++)
        if ((ids[i] < 0 || ids[i] >= classes) && (double)ids[i] != ignored)
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "target %lld at position %lld is not a class from 0 to %lld",
                                  (long long)ids[i], (long long)i + 1, (long long)(classes - 1));
    te_mem_free(&call->ctx->mem, ids, (size_t)n * sizeof *ids);
    return status;
}

/* In a graph, whose steps nobody looks at before they are made: a loss whose target is no class is not a number, so
 * that te.optim.grad_clip lets no weight change. Takes over the losses. */
static te_tensor *mark_targets(te_call *call, te_tensor *losses, te_tensor *target, int64_t classes)
{
    te_arg args[] = {TE_A_TENSOR(losses), TE_A_TENSOR(target), TE_A_NUMBER((double)classes),
                     TE_A_NUMBER(call->attr[0].number), TE_A_NUMBER(NAN)};
    te_tensor *marked = losses ? te_op_call(call->ctx, "loss_of_class", 5, args) : NULL;
    te_tensor_release(losses);
    return marked;
}

/* The programs look targets up by number, in the dtype that they compute in. */
static te_status check_classes(te_call *call, const te_tensor *x, int64_t classes)
{
    const int64_t most = (int64_t)1 << 24;
    if (classes <= most || x->dtype == TE_F64) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT,
                        "%lld classes: float32, in which %s logits are computed with, tells %lld apart; use float64 "
                        "logits", (long long)classes, te_dtype_name(x->dtype), (long long)most);
}

static te_status check_shapes(te_call *call, const te_tensor *x, const te_tensor *target)
{
    bool whole = target->dtype == TE_I64 || target->dtype == TE_I32 || target->dtype == TE_U8;
    if (!whole)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "targets must be int64, int32 or uint8, not %s",
                            te_dtype_name(target->dtype));
    if (x->ndim != target->ndim + 1 || memcmp(x->shape, target->shape, (size_t)target->ndim * sizeof *x->shape) != 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "logits %s need targets with one dimension less, not %s",
                            TE_SHAPE_TEXT(x), TE_SHAPE_TEXT(target));
    return TE_OK;
}

static te_status check_alike(te_call *call)
{
    te_tensor *x = call->in[0], *target = call->in[1];
    if (te_same_shape(x, target)) return TE_OK;
    return te_call_fail(call, TE_ERROR_ARGUMENT, "x is %s, target %s: both must have one shape", TE_SHAPE_TEXT(x),
                        TE_SHAPE_TEXT(target));
}

enum { MEAN, SUM, NONE, BATCHMEAN }; /* reductions */

/* The loss from those of all elements, which it takes over. */
static te_tensor *reduced(te_call *call, te_tensor *each, double reduction)
{
    if (!each || reduction == NONE) return each;
    te_tensor *y = te_op_call(call->ctx, reduction == MEAN ? "mean" : "sum", 1, &TE_A_TENSOR(each));
    if (y && reduction == BATCHMEAN && each->ndim > 0) {
        te_arg scale[] = {TE_A_TENSOR(y), TE_A_NUMBER((double)each->shape[0])};
        te_tensor *sum = y;
        y = te_op_call(call->ctx, "div", 2, scale);
        te_tensor_release(sum);
    }
    te_tensor_release(each);
    return y;
}

static te_status reduce_loss(te_call *call, te_tensor *each, double reduction)
{
    return te_call_result(call, reduced(call, each, reduction));
}

/* The same of operands that may have 16 bits, to which the loss is rounded when it is reduced. */
static te_status round_loss(te_call *call, te_tensor *each, double reduction)
{
    te_tensor *y = reduced(call, each, reduction);
    te_dtype dtype = call->in[0]->dtype;
    for (int i = 1; i < call->op->n_inputs; i++)
        if (call->in[i] && (call->in[i]->ndim > 0) == (call->in[0]->ndim > 0))
            dtype = te_promote(dtype, call->in[i]->dtype);
    if (!y || y->dtype != TE_F32 || (dtype != TE_BF16 && dtype != TE_F16)) return te_call_result(call, y);
    te_arg cast[] = {TE_A_TENSOR(y), TE_A_NUMBER(dtype)};
    te_tensor *rounded = te_op_call(call->ctx, "cast", 2, cast);
    te_tensor_release(y);
    return te_call_result(call, rounded);
}

/* --- cross entropy ---
 *
 * With m = max(x) and s = log(sum(exp(x - m))), a class's term is s - (x - m). m + s is never formed: rounded at the
 * size of m, it would leave nothing of the differences between large logits.
 */

/* cross_entropy(logits, targets; ignore_index, label_smoothing, reduction, weight) */
enum { IGNORED, SMOOTHING, REDUCTION };

/* Targets that are probabilities. */
static te_status soft_cross_entropy(te_call *call)
{
    te_arg rows[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1]), TE_A_ABSENT,
                     TE_A_NUMBER(call->attr[SMOOTHING].number)};
    if (call->in[2]) rows[2] = TE_A_TENSOR(call->in[2]);
    if (!te_same_shape(call->in[0], call->in[1]))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "targets of %s are probabilities in the shape of logits, %s, not %s",
                            te_dtype_name(call->in[1]->dtype), TE_SHAPE_TEXT(call->in[0]), TE_SHAPE_TEXT(call->in[1]));
    return reduce_loss(call, te_op_call(call->ctx, "cross_entropy_soft", 4, rows), call->attr[REDUCTION].number);
}

/* Classes with weights: the mean is that of the weights of the targets. */
static te_status weighted_cross_entropy(te_call *call, bool captured)
{
    te_context *ctx = call->ctx;
    te_tensor *x = call->in[0], *target = call->in[1], *weight = call->in[2], *each[2] = {NULL};
    double reduction = call->attr[REDUCTION].number;
    if (ctx->grad_enabled && te_needs_grad(weight))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "weight gets no gradient beside classes; use weight:detach()");
    te_arg rows[] = {TE_A_TENSOR(x), TE_A_TENSOR(target), TE_A_TENSOR(weight),
                     TE_A_NUMBER(call->attr[IGNORED].number), TE_A_NUMBER(call->attr[SMOOTHING].number)};
    bool smooth = call->attr[SMOOTHING].number != 0;
    const char *op = smooth ? "cross_entropy_weighted_smooth" : "cross_entropy_weighted";
    te_status status = te_op_run(ctx, te_op_find(ctx, op), rows, smooth ? 5 : 4, each, 2);
    if (status != TE_OK) return status;
    if (captured) each[0] = mark_targets(call, each[0], target, x->shape[x->ndim - 1]);
    te_tensor *weights = te_tensor_alias(each[1], each[1]->ndim, each[1]->shape, each[1]->stride, each[1]->offset);
    te_tensor_release(each[1]);
    status = weights ? reduce_loss(call, each[0], reduction == MEAN ? SUM : reduction) : ctx->status;
    if (status == TE_OK && reduction == MEAN) {
        te_tensor *sum = call->out[0], *by = te_op_call(ctx, "sum", 1, &TE_A_TENSOR(weights));
        te_arg args[] = {TE_A_TENSOR(sum), TE_A_TENSOR(by)};
        status = te_call_result(call, by ? te_op_call(ctx, "div", 2, args) : NULL);
        te_tensor_release(sum);
        te_tensor_release(by);
    }
    if (!weights) te_tensor_release(each[0]);
    te_tensor_release(weights);
    return status;
}

static te_status cross_entropy_forward(te_call *call)
{
    te_tensor *x = call->in[0], *target = call->in[1], *weight = call->in[2];
    double smoothing = call->attr[SMOOTHING].number;
    bool soft = te_dtype_is_float(target->dtype) && target->ndim == x->ndim;
    te_status status = soft ? TE_OK : check_shapes(call, x, target);
    if (status != TE_OK) return status;
    if (!(smoothing >= 0 && smoothing <= 1))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "label_smoothing must lie in [0, 1], not %g", smoothing);
    if (weight && (x->ndim == 0 || weight->ndim != 1 || weight->shape[0] != x->shape[x->ndim - 1]))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "weight must have one number for each class of logits %s, not %s",
                            TE_SHAPE_TEXT(x), TE_SHAPE_TEXT(weight));
    if (soft) return soft_cross_entropy(call);
    int64_t classes = x->shape[x->ndim - 1];
    bool captured = call->ctx->capture != NULL;
    status = check_classes(call, x, classes);
    if (status == TE_OK) status = check_targets(call, target, classes, call->attr[0].number);
    if (status != TE_OK) return status;
    if (weight) return weighted_cross_entropy(call, captured);
    te_arg rows[] = {TE_A_TENSOR(x), TE_A_TENSOR(target), TE_A_NUMBER(call->attr[0].number), TE_A_NUMBER(smoothing)};
    bool smooth = smoothing != 0;
    te_tensor *losses =
        te_op_call(call->ctx, smooth ? "cross_entropy_smooth" : "cross_entropy_row", smooth ? 4 : 3, rows);
    if (captured) losses = mark_targets(call, losses, target, classes);
    if (!losses || call->attr[2].number == 2) return te_call_result(call, losses);
    te_arg flat_args[] = {TE_A_TENSOR(losses), TE_A_INTS(((int64_t[]){-1}), 1)};
    te_tensor *flat = te_op_call(call->ctx, "reshape", 2, flat_args);
    te_arg target_args[] = {TE_A_TENSOR(target), TE_A_INTS(((int64_t[]){-1}), 1)};
    te_tensor *flat_target = flat ? te_op_call(call->ctx, "reshape", 2, target_args) : NULL;
    te_arg sum[] = {TE_A_TENSOR(flat), TE_A_TENSOR(flat_target), TE_A_NUMBER(call->attr[0].number)};
    te_tensor *loss =
        flat_target ? te_op_call(call->ctx, call->attr[2].number == 0 ? "mean_counted" : "sum_counted", 3, sum) : NULL;
    te_tensor_release(flat_target);
    te_tensor_release(flat);
    te_tensor_release(losses);
    return te_call_result(call, loss);
}

/* parallel_cross_entropy(logits, targets; first, classes, ignore_index): what the rows of one process's logits add to
 * the loss; lua/te/distributed/cross_entropy.lua puts the processes' together. */
static te_status parallel_forward(te_call *call)
{
    te_tensor *x = call->in[0], *target = call->in[1];
    int64_t classes = (int64_t)call->attr[1].number;
    te_status status = check_shapes(call, x, target);
    if (status == TE_OK) status = check_classes(call, x, classes);
    if (status == TE_OK) status = check_targets(call, target, classes, call->attr[2].number);
    if (status != TE_OK) return status;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(target), TE_A_NUMBER(call->attr[0].number)};
    return te_op_run(call->ctx, te_op_find(call->ctx, "cross_entropy_statistics"), args, 3, call->out, 4);
}

/* --- others ------------------------------------------------------------------------------------------------------- */

static te_status mse_forward(te_call *call)
{
    te_status status = check_alike(call);
    if (status != TE_OK) return status;
    te_arg args[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1])};
    bool truths = call->in[0]->dtype == TE_BOOL && call->in[1]->dtype == TE_BOOL; /* which sub refuses */
    te_tensor *s = te_op_call(call->ctx, truths ? "sub" : "squared_difference", 2, args);
    return round_loss(call, s, call->attr[0].number);
}

/* l1_loss(x, target; reduction), smooth_l1_loss(…; reduction, beta), huber_loss(…; reduction, delta): the operation of
 * their elements has "_of" behind the name. */
static te_status absolute_forward(te_call *call)
{
    char name[64];
    int n = call->op->n_params > 3;
    te_status status = check_alike(call);
    if (status == TE_OK && n && !(call->attr[1].number > 0 && isfinite(call->attr[1].number)))
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "%s: expected a finite number above 0, got %g",
                              call->op->params[3].name, call->attr[1].number);
    if (status != TE_OK) return status;
    snprintf(name, sizeof name, "%s_of", call->op->name);
    te_arg args[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1]), TE_A_NUMBER(n ? call->attr[1].number : 0)};
    return round_loss(call, te_op_call(call->ctx, name, 2 + n, args), call->attr[0].number);
}

/* binary_cross_entropy_with_logits(x, target, weight, pos_weight; reduction) */
static te_status binary_forward(te_call *call)
{
    te_tensor *x = call->in[0];
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(call->in[1]), TE_A_ABSENT, TE_A_ABSENT};
    te_status status = check_alike(call);
    for (int i = 2; i < 4 && status == TE_OK; i++) {
        te_tensor *w = call->in[i];
        int64_t shape[TE_MAX_DIMS];
        int ndim = x->ndim;
        if (!w) continue;
        args[i] = TE_A_TENSOR(w);
        memcpy(shape, x->shape, sizeof shape);
        if (w->ndim > x->ndim || !te_broadcast(&ndim, shape, w->ndim, w->shape) ||
            memcmp(shape, x->shape, (size_t)ndim * sizeof *shape) != 0)
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "%s %s does not fit x %s", call->op->params[i].name,
                                  TE_SHAPE_TEXT(w), TE_SHAPE_TEXT(x));
    }
    if (status != TE_OK) return status;
    return round_loss(call, te_op_call(call->ctx, "binary_cross_entropy_of", 4, args), call->attr[0].number);
}

/* kl_div(x, target; reduction, log_target) */
static te_status kl_div_forward(te_call *call)
{
    te_arg args[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1])};
    const char *op = call->attr[1].number != 0 ? "kl_div_of_logs" : "kl_div_of";
    te_status status = check_alike(call);
    return status == TE_OK ? round_loss(call, te_op_call(call->ctx, op, 2, args), call->attr[0].number) : status;
}

const te_op_def te_ops_loss[] = {
    {.signature = "cross_entropy(logits, targets; ignore_index: int = -100, label_smoothing: number = 0, reduction: "
                  "mean|sum|none = mean, weight = nil)",
     .doc =
         "Cross entropy of softmax(logits) with class ids from 0: (1-a) (lse - x[target]) + a (lse - mean(x)), a = "
         "label_smoothing. logits {..., classes}, targets {...}. "
         "Rows whose target is ignore_index are ignored; mean divides by the number of the others. With weight "
         "{classes} each class's term is weighted, and mean divides by the sum of the targets' weights. "
         "Floating-point targets are probabilities of all classes, in the shape of logits: sum(weight ((1-a) target + "
         "a / classes) (lse - x)), and mean divides by the number of rows. Arithmetic and result are float32, or "
         "float64 for float64 logits.",
     .forward = cross_entropy_forward,
     .domain = "-2 2"},
    {.signature = "cross_entropy_row(x, target; ignore: number = -100)",
     .doc = "Cross entropy of every row.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .formula = "m = rowmax(x); s = log(rowsum(exp(x - m))); picked = rowsum(where(column() == target, x, 0)); "
                "y = where(target == ignore, 0, s - (picked - m))",
     .gradient = "dx = where(target == ignore, 0, dy * (exp_below(x - m - s) - (column() == target)))"},
    {.signature = "cross_entropy_smooth(x, target; ignore: number = -100, smoothing: number = 0)",
     .doc = "Cross entropy of every row with a share of the target spread over all classes.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .formula = "m = rowmax(x); s = log(rowsum(exp(x - m))); picked = rowsum(where(column() == target, x, 0)); "
                "smooth = (1 - smoothing) * (s - (picked - m)) + smoothing * (s - rowmean(x - m)); "
                "y = where(target == ignore, 0, smooth)",
     .gradient = "dx = where(target == ignore, 0, dy * (exp_below(x - m - s) - "
                 "where(column() == target, 1 - smoothing, 0) - "
                 "smoothing / n))"},
    {.signature = "cross_entropy_weighted(x, target, weight; ignore: number = -100)",
     .doc = "Cross entropy of every row with weights of classes, and its target's weight.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .outputs = "y w",
     .formula = "hit = column() == target; m = rowmax(x); s = log(rowsum(exp(x - m))); "
                "own = rowsum(where(hit, weight, 0)); picked = rowsum(where(hit, x, 0)); "
                "y = where(target == ignore, 0, own * (s - (picked - m))); w = where(target == ignore, 0, own)",
     .gradient = "dx = where(target == ignore, 0, dy * (own * exp_below(x - m - s) - "
                 "where(column() == target, weight, 0)))"},
    {.signature = "cross_entropy_weighted_smooth(x, target, weight; ignore: number = -100, smoothing: number = 0)",
     .doc = "The same with a share of the target spread over all classes.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .outputs = "y w",
     .formula = "hit = column() == target; m = rowmax(x); s = log(rowsum(exp(x - m))); "
                "own = rowsum(where(hit, weight, 0)); picked = rowsum(where(hit, x, 0)); "
                "all = rowsum(where(smoothing == 0 or weight == 0, 0, weight * (s - (x - m)))); "
                "y = where(target == ignore, 0, (1 - smoothing) * own * (s - (picked - m)) + smoothing / n * all); "
                "w = where(target == ignore, 0, own)",
     .gradient = "share = smoothing / n; dx = where(target == ignore, 0, dy * (((1 - smoothing) * own + share * "
                 "rowsum(weight)) * exp_below(x - m - s) - where(column() == target, (1 - smoothing) * weight, 0) - "
                 "share * weight))"},
    {.signature = "cross_entropy_soft(x, target, weight = 1; smoothing: number = 0)",
     .doc = "Cross entropy of every row with probabilities.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .formula = "m = rowmax(x); s = log(rowsum(exp(x - m))); p = weight * ((1 - smoothing) * target + smoothing / "
                "n); y = rowsum(where(p == 0, 0, p * (s - (x - m))))",
     .gradient = "q = (1 - smoothing) * target + smoothing / n; p = weight * q; g = dy * (s - (x - m)); "
                 "dx = dy * (rowsum(p) * exp_below(x - m - s) - p); dtarget = (1 - smoothing) * weight * g; "
                 "dweight = q * g"},
    {.signature = "parallel_cross_entropy(logits, targets; first: int = 0, classes: int = 0, ignore_index: int = -100)",
     .doc = "For every row of logits whose classes start at first: maximum, sum of exp(x - maximum), the target's "
            "logit or 0, sum of x - maximum.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .outputs = "m s picked total",
     .forward = parallel_forward},
    {.signature = "cross_entropy_statistics(x, target; first: number = 0)",
     .doc = "The same for targets that are classes.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN | TE_OP_NOGRAD,
     .rows = "target",
     .outputs = "m s picked total",
     .formula = "m = rowmax(x); d = x - where(m == -inf, 0, m); s = rowsum(exp(d)); total = rowsum(d); "
                "picked = rowsum(where(column() == target - first, x, 0))"},
    {.signature = "cross_entropy_of_part(x, target, m, s, picked, total = 0; first: number = 0, classes: number = 1, "
                  "ignore: number = -100, smoothing: number = 0)",
     .doc = "Cross entropy of every row from the results of all its parts; its gradient is that of the part x.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target m s picked total",
     .formula = "smooth = where(smoothing == 0, 0, smoothing * (s - total / classes)); "
                "y = where(target == ignore, 0, (1 - smoothing) * (s - (picked - m)) + smooth)",
     .gradient = "dx = where(target == ignore, 0, dy * (exp_below(x - m - s) - "
                 "where(column() == target - first, 1 - smoothing, 0) - smoothing / classes))"},
    {.signature = "loss_of_class(x, target; classes: number = 1, ignore: number = -100, otherwise: number = 0)",
     .doc = "x where its target is a valid class or ignored.",
     .flags = TE_OP_HIDDEN,
     .formula = "y = where((target >= 0 and target < classes) or target == ignore, x, otherwise)"},
    {.signature = "mean_counted(x, target; ignore: number = -100)",
     .doc = "Sum of a row over the number of its targets that are not ignored.",
     .flags = TE_OP_LASTROW | TE_OP_HIDDEN,
     .formula = "y = rowsum(x) / rowsum(target ~= ignore)"},
    {.signature = "sum_counted(x, target; ignore: number = -100)",
     .doc = "Sum of a row.",
     .flags = TE_OP_LASTROW | TE_OP_HIDDEN,
     .formula = "y = rowsum(x)"},
    {.signature = "mse_loss(x, target; reduction: mean|sum|none = mean)",
     .doc = "Squared difference of tensors of the same shape; integers give float32.",
     .forward = mse_forward},
    {.signature = "squared_difference(x, target)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "d = x - target; y = d * d"},
    {.signature = "l1_loss(x, target; reduction: mean|sum|none = mean)",
     .doc = "Absolute difference of tensors of the same shape; integers give float32.",
     .forward = absolute_forward},
    {.signature = "l1_loss_of(x, target)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "y = abs(x - target)"},
    {.signature = "smooth_l1_loss(x, target; reduction: mean|sum|none = mean, beta: number = 1)",
     .doc = "With d = |x - target|: d^2 / (2 beta) where d < beta, else d - beta / 2 (Girshick 2015).",
     .forward = absolute_forward},
    {.signature = "smooth_l1_loss_of(x, target; beta: number = 1)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "a = abs(x - target); c = min(a, beta); y = where(a < beta, c * c / (2 * beta), a - beta / 2)"},
    {.signature = "huber_loss(x, target; reduction: mean|sum|none = mean, delta: number = 1)",
     .doc = "With d = |x - target|: d^2 / 2 where d < delta, else delta (d - delta / 2) (Huber 1964).",
     .forward = absolute_forward},
    {.signature = "huber_loss_of(x, target; delta: number = 1)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "a = abs(x - target); c = min(a, delta); y = where(a < delta, c * c / 2, delta * (a - delta / 2))"},
    {.signature = "binary_cross_entropy_with_logits(x, target, weight = nil, pos_weight = nil; reduction: "
                  "mean|sum|none = mean)",
     .doc = "weight (pos_weight target softplus(-x) + (1 - target) softplus(x)): cross entropy of sigmoid(x) with "
            "probabilities in x's shape.",
     .forward = binary_forward},
    {.signature = "binary_cross_entropy_of(x, target, weight = 1, pos_weight = 1)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = TE_LOG1P_EXP
     "y = weight * (pos_weight * target * (l - min(x, 0)) + (1 - target) * (max(x, 0) + l))"},
    {.signature = "kl_div(x, target; reduction: mean|sum|none|batchmean = mean, log_target: bool = false)",
     .doc = "Kullback-Leibler divergence target (log(target) - x) for log-probabilities x and probabilities target "
            "in x's shape, or with log_target their logarithms. batchmean divides the sum by the first extent.",
     .forward = kl_div_forward,
     .domain = "0.1 2"},
    {.signature = "kl_div_of(x, target)",
     .doc = "The same of every element.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "y = where(target == 0, 0, target * (log(target) - x))"},
    {.signature = "kl_div_of_logs(x, target)",
     .doc = "The same for logarithms.",
     .flags = TE_OP_F32 | TE_OP_HIDDEN,
     .formula = "y = where(target == -inf, 0, exp(target) * (target - x))"},
    {0},
};
