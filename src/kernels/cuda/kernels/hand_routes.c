/* hand_routes.c - plans of mixtures of experts. */
#include "hand_internal.h"

enum { WARP = 32 }; /* threads for a token */

static te_cuda_call *add(te_cuda_plan *plan, const char *name, int64_t blocks, const void *args, size_t bytes,
                         te_dtype dtype)
{
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_ROUTES, name, blocks < TE_HAND_FULL ? blocks : TE_HAND_FULL,
                         TE_HAND_THREADS, args, bytes);
    call->kernel.dtype[0] = call->kernel.dtype[1] = (uint8_t)dtype;
    call->kernel.wide = dtype == TE_F64;
    return call;
}

te_status te_cuda_plan_route_map(te_exec *exec, te_cuda_plan *plan, const te_view *map, const te_view *counts,
                                 const te_view *routing, int64_t rows)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_route_map(exec, map, counts, routing);
    if (status != TE_OK || (map->ndim == 1 && te_view_numel(map) == 0)) return status;
    te_route_map_args args = {.routing = routing->data,
                              .map = map->data,
                              .tokens = routing->shape[0],
                              .columns = routing->shape[1],
                              .rows = rows,
                              .wide = routing->dtype == TE_I64,
                              .experts = TE_MOST_EXPERTS};
    int64_t n = args.tokens * args.columns;
    if (map->ndim == 2) {
        enum { SHORT_TILE = 64, MOST_TILES = 256 };
        args.counts = counts->data;
        args.tile = (args.tokens + MOST_TILES - 1) / MOST_TILES;
        if (args.tile < SHORT_TILE) args.tile = SHORT_TILE;
        args.tiles = (args.tokens + args.tile - 1) / args.tile;
        plan->scratch_bytes = (size_t)(n + (args.tiles + 1) * args.columns) * sizeof(int32_t);
        if (n > 0) add(plan, "te_route_count", te_blocks_for(args.tiles * args.columns), &args, sizeof args, TE_F32);
        add(plan, "te_route_offsets", 1, &args, sizeof args, TE_F32);
        if (n == 0) return TE_OK;
        add(plan, "te_route_place", te_blocks_for(args.tiles * args.columns), &args, sizeof args, TE_F32);
        add(plan, "te_route_entries", te_blocks_for(args.tokens * WARP), &args, sizeof args, TE_F32);
        return TE_OK;
    }
    plan->check = (te_cuda_check){TE_CUDA_CHECK_IDS, "route_map", TE_MOST_EXPERTS, 0};
    add(plan, "te_route_keys", te_blocks_for(n), &args, sizeof args, TE_F32);
    args.sorted = te_cuda_plan_sort(plan, n, TE_MOST_EXPERTS);
    add(plan, "te_route_sorted", te_blocks_for(n), &args, sizeof args, TE_F32);
    return TE_OK;
}

static te_routes_args args_for(const te_routes *r, const te_view *to, const te_view *from, const te_view *rows)
{
    return (te_routes_args){.tokens = r->tokens,
                            .slots = r->slots,
                            .token_step = r->token_step,
                            .slot_step = r->slot_step,
                            .experts = r->experts,
                            .row = r->row,
                            .expert = r->expert,
                            .count = r->count,
                            .shift = r->shift,
                            .weights = r->weights.data,
                            .gates = r->gates,
                            .to = to->data,
                            .from = from->data,
                            .n = rows->shape[0],
                            .width = rows->shape[1]};
}

te_status te_cuda_plan_route_rows(te_exec *exec, te_cuda_plan *plan, const te_routes *r, const te_view *rows,
                                  const te_view *tokens)
{
    te_cuda_plan_open(plan);
    te_status      status = te_check_routes(exec, "route_rows", r, rows, tokens);
    te_routes_args args = args_for(r, rows, tokens, rows);
    if (status != TE_OK || te_view_numel(rows) == 0) return status;
    plan->scratch_bytes = (size_t)args.n * sizeof(uint64_t);
    plan->check = (te_cuda_check){TE_CUDA_CHECK_INDEX, "route_rows", args.n, 0};
    add(plan, "te_route_clear", te_blocks_for(args.n), &args, sizeof args, rows->dtype);
    add(plan, "te_route_invert", te_blocks_for(args.tokens * args.slots), &args, sizeof args, rows->dtype);
    add(plan, "te_route_rows", args.n, &args, sizeof args, rows->dtype);
    return TE_OK;
}

te_status te_cuda_plan_route_tokens(te_exec *exec, te_cuda_plan *plan, const te_routes *r, const te_view *tokens,
                                    const te_view *rows)
{
    te_cuda_plan_open(plan);
    te_status      status = te_check_routes(exec, "route_tokens", r, rows, tokens);
    te_routes_args args = args_for(r, tokens, rows, rows);
    if (status != TE_OK || te_view_numel(tokens) == 0) return status;
    plan->check = (te_cuda_check){TE_CUDA_CHECK_INDEX, "route_tokens", args.n, 0};
    add(plan, "te_route_tokens", args.tokens, &args, sizeof args, rows->dtype);
    return TE_OK;
}

te_status te_cuda_plan_route_weights(te_exec *exec, te_cuda_plan *plan, const te_routes *r, const te_view *weights,
                                     const te_view *rows, const te_view *tokens)
{
    te_cuda_plan_open(plan);
    te_routes made = *r;
    made.weights = *weights;
    te_status      status = te_check_routes(exec, "route_weights", &made, rows, tokens);
    te_routes_args args = args_for(r, weights, rows, rows);
    if (status != TE_OK || te_view_numel(weights) == 0) return status;
    args.beside = tokens->data;
    plan->check = (te_cuda_check){TE_CUDA_CHECK_INDEX, "route_weights", args.n, 0};
    add(plan, "te_route_weights", args.tokens, &args, sizeof args, rows->dtype);
    return TE_OK;
}

te_status te_cuda_plan_route_choose(te_exec *exec, te_cuda_plan *plan, const te_view *map, const te_view *scores,
                                    int64_t k, int64_t groups, int64_t best_groups)
{
    te_cuda_plan_open(plan);
    te_status status = te_check_route_choose(exec, map, scores, k, groups, best_groups);
    if (status != TE_OK || te_view_numel(scores) == 0) return status;
    te_choose_args args = {.scores = scores->data,
                           .map = map->data,
                           .tokens = scores->shape[0],
                           .experts = scores->shape[1],
                           .k = k,
                           .groups = groups,
                           .best_groups = best_groups};
    if (args.experts > INT32_MAX)
        return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "route_choose: %s has more columns than int32 can number",
                            te_describe_view(scores).text);
    plan->scratch_bytes = (size_t)(args.tokens * groups) * sizeof(float);
    add(plan, "te_route_choose", te_blocks_for(args.tokens * WARP), &args, sizeof args, TE_F32);
    return TE_OK;
}
