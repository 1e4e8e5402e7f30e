/* moe_router.c - mixtures of experts: which experts see a token, and with what weight.
 *
 * Experts are chosen by scores in float32, outside the graph; probabilities are row programs with the mask of the
 * chosen as an input.
 *
 * Source: Transformer Engine's fused router.
 */
#include "ops.h"

enum { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
#define SCORE_FUNCTIONS "score_function: softmax|sigmoid|sqrtsoftplus = softmax"

static te_status check_logits(te_call *call, const te_tensor *logits, int64_t k)
{
    if (logits->ndim != 2 || !te_dtype_is_float(logits->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "logits must be {tokens, experts} of a floating dtype, not %s of %s",
                            TE_SHAPE_TEXT(logits), te_dtype_name(logits->dtype));
    if (k < 1 || k > logits->shape[1])
        return te_call_fail(call, TE_ERROR_ARGUMENT, "topk = %lld of %lld experts", (long long)k,
                            (long long)logits->shape[1]);
    return TE_OK;
}

/* Scores of all experts, float32 or float64, by ops that record themselves where logits are in the graph. */
static te_tensor *scores_of(te_call *call, te_tensor *logits, int function)
{
    static const char *const ops[] = {
        [SOFTMAX] = "softmax_row", [SIGMOID] = "sigmoid", [SQRT_SOFTPLUS] = "sqrt_softplus"};
    te_arg args[] = {TE_A_TENSOR(logits), TE_A_NUMBER(logits->dtype == TE_F64 ? TE_F64 : TE_F32)};
    te_tensor *wide = te_op_call(call->ctx, "cast", 2, args);
    te_tensor *scores = wide ? te_op_apply(call->ctx, ops[function], 1, &wide) : NULL;
    te_tensor_release(wide);
    return scores;
}

static te_tensor *choose(te_call *call, te_tensor *scores, int64_t k, int64_t groups, int64_t best_groups)
{
    te_exec   *exec = te_call_exec(call, scores);
    te_tensor *narrow = te_tensor_cast(scores, TE_F32), *ordered = narrow ? te_tensor_contiguous_copy(narrow) : NULL;
    te_tensor_release(narrow);
    te_tensor *map = ordered ? te_tensor_new(call->ctx, scores->storage->device, TE_BOOL, 2, scores->shape) : NULL;
    if (map) {
        te_view out = te_tensor_view(map), in = te_tensor_view(ordered);
        te_status status = exec->backend->route_choose(exec, &out, &in, k, groups, best_groups);
        if (te_call_kernel(call, exec, status) != TE_OK) {
            te_tensor_release(map);
            map = NULL;
        }
    }
    te_tensor_release(ordered);
    return map;
}

/* What experts are chosen by, outside the graph: those that share a row's softmax are in the order of their logits. */
static te_tensor *choosing_scores(te_call *call, te_tensor *logits, int function, bool before, te_tensor *bias)
{
    te_tensor *alone = te_tensor_alias(logits, 2, logits->shape, logits->stride, logits->offset);
    bool       as_is = function == SOFTMAX && !before;
    te_tensor *scores = !alone ? NULL : as_is ? te_tensor_retain(alone) : scores_of(call, alone, function);
    te_tensor_release(alone);
    if (!scores || !bias) return scores;
    te_tensor *own = te_tensor_alias(bias, 1, bias->shape, bias->stride, bias->offset);
    te_tensor *sum = own ? te_op_apply(call->ctx, "add", 2, (te_tensor *[2]){scores, own}) : NULL;
    te_tensor_release(own);
    te_tensor_release(scores);
    return sum;
}

enum { TOPK, GROUPS, BEST_GROUPS, PRE_SOFTMAX, SCALE, FUNCTION };

static te_status check_groups(te_call *call, int64_t experts, int64_t k, int64_t groups, int64_t best)
{
    if (groups < 1 || experts % groups != 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "num_groups = %lld of %lld experts", (long long)groups,
                            (long long)experts);
    if (best < 1 || best > groups || (groups > 1 && (k % best != 0 || k / best > experts / groups)))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "group_topk = %lld for topk = %lld in %lld groups of %lld experts",
                            (long long)best, (long long)k, (long long)groups, (long long)(experts / groups));
    return TE_OK;
}

static te_status fused_topk_forward(te_call *call)
{
    static const char *const ops[] = {
        [SOFTMAX] = "moe_softmax_chosen", [SIGMOID] = "moe_sigmoid", [SQRT_SOFTPLUS] = "moe_sqrt_softplus"};
    te_tensor *logits = call->in[0], *bias = call->in[1];
    const te_attr *a = call->attr;
    int64_t   k = (int64_t)a[TOPK].number, groups = a[GROUPS].set ? (int64_t)a[GROUPS].number : 1;
    int64_t   best = a[BEST_GROUPS].set ? (int64_t)a[BEST_GROUPS].number : groups;
    int       function = (int)a[FUNCTION].number;
    bool      before = a[PRE_SOFTMAX].number != 0;
    te_status status = check_logits(call, logits, k);
    if (status == TE_OK) status = check_groups(call, logits->shape[1], k, groups, best);
    if (status != TE_OK) return status;
    if (bias && (function == SOFTMAX || bias->ndim != 1 || bias->shape[0] != logits->shape[1]))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "expert_bias must be {%lld} beside sigmoid or sqrtsoftplus, not %s beside %s",
                            (long long)logits->shape[1], TE_SHAPE_TEXT(bias),
                            function == SOFTMAX ? "softmax" : "these");
    if (before && function != SOFTMAX)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "use_pre_softmax is for score_function = softmax");
    te_tensor *scores = choosing_scores(call, logits, function, before, bias);
    te_tensor *map = call->out[1] = scores ? choose(call, scores, k, groups, best) : NULL;
    te_tensor_release(scores);
    if (!map) return call->ctx->status;
    te_arg args[] = {TE_A_TENSOR(logits), TE_A_TENSOR(map), TE_A_NUMBER(a[SCALE].number), TE_A_NUMBER(k > 1)};
    const char *op = before ? "moe_softmax_all" : ops[function];
    return te_call_result(call, te_op_call(call->ctx, op, function == SOFTMAX ? 3 : 4, args));
}

static te_status fused_scores_forward(te_call *call)
{
    te_tensor *logits = call->in[0];
    int64_t    k = (int64_t)call->attr[0].number;
    int        function = (int)call->attr[1].number;
    te_status  status = check_logits(call, logits, k);
    if (status != TE_OK) return status;
    te_tensor *scores = scores_of(call, logits, function);
    if (scores && function != SOFTMAX) {
        te_tensor *shares = te_op_apply(call->ctx, "moe_shares", 1, &scores);
        te_tensor_release(scores);
        scores = shares;
    }
    call->out[1] = scores;
    return te_call_result(call, scores ? choose(call, scores, k, 1, 1) : NULL);
}

#define HIDDEN (TE_OP_HIDDEN | TE_OP_LASTROW | TE_OP_FLOAT)
/* log(1 + e) to float32's last digits where e = exp(-|x|) is small too. */
#define SOFTPLUS "e = exp(-abs(x)); u = 1 + e; p = max(x, 0) + where(u == 1, e, log(u) * e / (u - 1)); "

const te_op_def te_ops_moe_router[] = {
    {.signature = "fused_topk_with_score_function(logits, topk: int, expert_bias = nil; num_groups: int = nil, "
                  "group_topk: int = nil, use_pre_softmax: bool = false, scaling_factor: number = 1, " SCORE_FUNCTIONS
                  ")",
     .doc = "Selects the topk experts of every token by logits {tokens, experts}: probs, 0 elsewhere, and the mask of "
            "the selected. softmax is over the selected, or with use_pre_softmax over all; sigmoid and sqrtsoftplus, "
            "sqrt(log(1 + exp(x))), are divided by their sum if topk > 1. expert_bias {experts} affects only the "
            "selection (Wang et al. 2024). With num_groups, only experts of the group_topk groups with "
            "the largest sum of topk / group_topk scores take part (DeepSeek-AI 2024). Computed in float32, "
            "float64 logits in float64, but selected at float32 precision.",
     .outputs = "probs map",
     .forward = fused_topk_forward},
    {.signature = "fused_compute_score_for_moe_aux_loss(logits, topk: int; " SCORE_FUNCTIONS ")",
     .doc = "The mask of the topk experts of every token, and the scores of all, in float32 (float64 for float64): "
            "softmax, or sigmoid or sqrtsoftplus divided by their sum.",
     .outputs = "map scores",
     .forward = fused_scores_forward},
    {.signature = "sqrt_softplus(x)",
     .doc = "sqrt(log(1 + exp(x))).",
     .flags = TE_OP_HIDDEN | TE_OP_FLOAT,
     .formula = SOFTPLUS "y = sqrt(p)",
     .gradient = "dx = where(y > 0, dy * sigmoid(x) / (2 * y), 0)"},
    {.signature = "moe_shares(x)",
     .doc = "x divided by its sum.",
     .flags = HIDDEN,
     .formula = "y = x / (rowsum(x) + 1e-20)"},
    {.signature = "moe_softmax_all(x, map; scale: number = 1)",
     .doc = "Softmax over all, at the selected.",
     .flags = HIDDEN,
     .formula = "e = exp(x - rowmax(x)); y = where(map, e / rowsum(e), 0) * scale",
     .gradient = "e = exp(x - rowmax(x)); p = e / rowsum(e); g = where(map, dy * scale, 0); "
                 "dx = p * (g - rowsum(g * p))"},
    {.signature = "moe_softmax_chosen(x, map; scale: number = 1)",
     .doc = "Softmax over the selected.",
     .flags = HIDDEN,
     .formula = "e = where(map, exp(x - rowmax(where(map, x, -inf))), 0); y = e / rowsum(e) * scale",
     .gradient = "e = where(map, exp(x - rowmax(where(map, x, -inf))), 0); p = e / rowsum(e); "
                 "dx = p * scale * (dy - rowsum(dy * p))"},
    {.signature = "moe_sigmoid(x, map; scale: number = 1, shares: number = 0)",
     .doc = "Sigmoids of the selected, divided by their sum where shares is not 0.",
     .flags = HIDDEN,
     .formula = "s = where(map, sigmoid(x), 0); y = s / where(shares ~= 0, rowsum(s) + 1e-20, 1) * scale"},
    {.signature = "moe_sqrt_softplus(x, map; scale: number = 1, shares: number = 0)",
     .doc = "sqrt(softplus) of the selected, divided by their sum where shares is not 0.",
     .flags = HIDDEN,
     .formula = SOFTPLUS
     "s = where(map, sqrt(p), 0); y = s / where(shares ~= 0, rowsum(s) + 1e-20, 1) * scale",
     .gradient = SOFTPLUS
     "s = where(map, sqrt(p), 0); t = where(shares ~= 0, rowsum(s) + 1e-20, 1); "
     "g = (dy - where(shares ~= 0, rowsum(dy * s) / t, 0)) / t * scale; "
     "dx = where(s > 0, g * sigmoid(x) / (2 * s), 0)"},
    {0},
};
