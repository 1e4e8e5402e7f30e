/* loss.c - losses. Cross entropy is one row program: probabilities are never written. */
#include "ops.h"

#include <math.h>

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
    if (!ids) return te_fail_memory(call->ctx, call->op->name);
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

/* cross_entropy(logits, targets; ignore_index, label_smoothing, reduction) */
static te_status cross_entropy_forward(te_call *call)
{
    te_tensor *x = call->in[0], *target = call->in[1];
    double smoothing = call->attr[1].number;
    te_status status = check_shapes(call, x, target);
    if (status != TE_OK) return status;
    if (!(smoothing >= 0 && smoothing <= 1))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "label_smoothing must lie in [0, 1], not %g", smoothing);
    int64_t classes = x->shape[x->ndim - 1];
    bool captured = call->ctx->capture != NULL;
    status = check_targets(call, target, classes, call->attr[0].number);
    if (status != TE_OK) return status;
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
    te_status status = check_shapes(call, x, target);
    if (status == TE_OK) status = check_targets(call, target, (int64_t)call->attr[1].number, call->attr[2].number);
    if (status != TE_OK) return status;
    te_arg args[] = {TE_A_TENSOR(x), TE_A_TENSOR(target), TE_A_NUMBER(call->attr[0].number)};
    return te_op_run(call->ctx, te_op_find(call->ctx, "cross_entropy_statistics"), args, 3, call->out, 4);
}

static te_status mse_forward(te_call *call)
{
    te_arg sub[] = {TE_A_TENSOR(call->in[0]), TE_A_TENSOR(call->in[1])};
    te_tensor *d = te_op_call(call->ctx, "sub", 2, sub);
    te_tensor *s = d ? te_op_call(call->ctx, "square", 1, &TE_A_TENSOR(d)) : NULL;
    te_tensor *y = s && call->attr[0].number < 2
                       ? te_op_call(call->ctx, call->attr[0].number == 0 ? "mean" : "sum", 1, &TE_A_TENSOR(s))
                       : te_tensor_retain(s);
    te_tensor_release(d);
    te_tensor_release(s);
    return te_call_result(call, y);
}

const te_op_def te_ops_loss[] = {
    {.signature = "cross_entropy(logits, targets; ignore_index: int = -100, label_smoothing: number = 0, reduction: "
                  "mean|sum|none = mean)",
     .doc =
         "Cross entropy of softmax(logits) with class ids from 0: (1-a) (lse - x[target]) + a (lse - mean(x)), a = "
         "label_smoothing. logits {..., classes}, targets {...}. "
         "Rows whose target is ignore_index count nothing; mean divides by the others. float32 arithmetic and result.",
     .forward = cross_entropy_forward,
     .domain = "-2 2"},
    {.signature = "cross_entropy_row(x, target; ignore: number = -100)",
     .doc = "Cross entropy of every row.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .formula = "m = rowmax(x); lse = m + log(rowsum(exp(x - m))); picked = rowsum(where(column() == target, x, 0)); "
                "y = where(target == ignore, 0, lse - picked)",
     .gradient = "dx = where(target == ignore, 0, dy * (exp(x - lse) - (column() == target)))"},
    {.signature = "cross_entropy_smooth(x, target; ignore: number = -100, smoothing: number = 0)",
     .doc = "Cross entropy of every row with a share of the target spread over all classes.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target",
     .formula = "m = rowmax(x); lse = m + log(rowsum(exp(x - m))); picked = rowsum(where(column() == target, x, 0)); "
                "smooth = (1 - smoothing) * (lse - picked) + smoothing * (lse - rowmean(x)); y = "
                "where(target == ignore, 0, smooth)",
     .gradient = "dx = where(target == ignore, 0, dy * (exp(x - lse) - where(column() == target, 1 - smoothing, 0) - "
                 "smoothing / n))"},
    {.signature = "parallel_cross_entropy(logits, targets; first: int = 0, classes: int = 0, ignore_index: int = -100)",
     .doc = "Of every row of logits whose classes count from first: maximum, sum of exp(x - maximum), the target's "
            "logit or 0, sum.",
     .flags = TE_OP_HIDDEN | TE_OP_NOGRAD,
     .outputs = "m s picked total",
     .forward = parallel_forward},
    {.signature = "cross_entropy_statistics(x, target; first: number = 0)",
     .doc = "The same of targets that are classes.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN | TE_OP_NOGRAD,
     .rows = "target",
     .outputs = "m s picked total",
     .formula = "m = rowmax(x); s = rowsum(exp(x - where(m == -inf, 0, m))); "
                "picked = rowsum(where(column() == target - first, x, 0)); total = rowsum(x)"},
    {.signature = "cross_entropy_of_part(x, target, lse, picked, total = 0; first: number = 0, classes: number = 1, "
                  "ignore: number = -100, smoothing: number = 0)",
     .doc = "Cross entropy of every row from what all parts of the row gave; its gradient is that of the part x.",
     .flags = TE_OP_F32 | TE_OP_LASTROW | TE_OP_HIDDEN,
     .rows = "target lse picked total",
     .formula = "smooth = where(smoothing == 0, 0, smoothing * (lse - total / classes)); "
                "y = where(target == ignore, 0, (1 - smoothing) * (lse - picked) + smooth)",
     .gradient = "dx = where(target == ignore, 0, dy * (exp(x - lse) - "
                 "where(column() == target - first, 1 - smoothing, 0) - smoothing / classes))"},
    {.signature = "loss_of_class(x, target; classes: number = 1, ignore: number = -100, otherwise: number = 0)",
     .doc = "x where its target is a class or ignored.",
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
     .doc = "Squared difference.",
     .forward = mse_forward},
    {0},
};
