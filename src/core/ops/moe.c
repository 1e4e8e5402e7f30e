/* moe.c - mixtures of experts: rows of tokens sorted by expert, and back. moe_router.c chooses the experts.
 *
 * A routing map says which experts see a token: a mask {tokens, experts} of bool or uint8, or ids {tokens, slots} of
 * int64 or int32. From it follows a row_id_map, where each slot's row stands: with a mask {tokens, 2 experts + 1}, per
 * token the rows, their experts and how many there are; with ids {slots * tokens}, slot by slot. Kernels read either as
 * te_routes. Probabilities have a column for every expert of a mask, and for every slot of ids.
 *
 * Source: Transformer Engine's moe_permute and moe_unpermute.
 */
#include "ops.h"

#include "../autograd.h"

#include <limits.h>

/* --- routes ------------------------------------------------------------------------------------------------------- */

/* Where rows go, with what keeps the arrays alive. */
typedef struct routed {
    te_routes  r;
    te_tensor *held[3]; /* map, weights, shifts; NULL: absent */
} routed;

static void close_routes(routed *routes)
{
    for (int i = 0; i < 3; i++) te_tensor_release(routes->held[i]);
}

static te_dtype weight_dtype(te_dtype dtype) { return dtype == TE_F64 ? TE_F64 : TE_F32; }

static te_tensor *in_order(te_tensor *t, te_dtype dtype)
{
    te_tensor *cast = te_tensor_cast(t, dtype), *made = cast ? te_tensor_contiguous_copy(cast) : NULL;
    te_tensor_release(cast);
    return made;
}

/* Routes of a row_id_map that was checked; those of a map of one dimension are of `tokens` tokens. Weights of `dtype`
 * and shifts of experts may be NULL. Also after a failure it must be closed. */
static te_status open_routes(te_call *call, routed *routes, te_tensor *map, int64_t tokens, te_tensor *weights,
                             te_dtype dtype, te_tensor *shifts)
{
    *routes = (routed){.held = {in_order(map, TE_I32), weights ? in_order(weights, weight_dtype(dtype)) : NULL,
                                shifts ? in_order(shifts, TE_I32) : NULL}};
    te_tensor *const *held = routes->held;
    if (!held[0] || (weights && !held[1]) || (shifts && !held[2])) return call->ctx->status;
    const int32_t *places = te_tensor_pointer(held[0]);
    te_routes     *r = &routes->r;
    if (map->ndim == 2) {
        int64_t width = map->shape[1];
        *r = (te_routes){.tokens = map->shape[0], .slots = width / 2, .token_step = width, .slot_step = 1,
                         .experts = width / 2, .row = places, .expert = places + width / 2,
                         .count = places + width - 1};
    } else {
        int64_t slots = tokens ? map->shape[0] / tokens : weights ? weights->shape[1] : 0;
        *r = (te_routes){.tokens = tokens, .slots = slots, .token_step = 1, .slot_step = tokens, .experts = slots,
                         .row = places};
    }
    if (weights) r->weights = te_tensor_view(held[1]);
    if (shifts) r->shift = te_tensor_pointer(held[2]);
    return TE_OK;
}

static te_tensor *new_rows(te_call *call, const te_tensor *like, te_dtype dtype, int64_t n, int64_t width)
{
    return te_tensor_new(call->ctx, like->storage->device, dtype, width < 0 ? 1 : 2, (int64_t[2]){n, width});
}

/* Rows from tokens; or tokens from rows. */
static te_status run_rows(te_call *call, const te_routes *r, te_tensor *rows, te_tensor *tokens, bool to_tokens)
{
    te_exec *exec = te_call_exec(call, rows);
    te_view  a = te_tensor_view(rows), b = te_tensor_view(tokens);
    te_status status = to_tokens ? exec->backend->route_tokens(exec, r, &b, &a)
                                 : exec->backend->route_rows(exec, r, &a, &b);
    return te_call_kernel(call, exec, status);
}

/* The gradient of weights, a column per expert or slot, in `dtype`. NULL on failure. */
static te_tensor *gradient_of_weights(te_call *call, const te_routes *r, te_tensor *rows, te_tensor *tokens,
                                      te_dtype dtype)
{
    te_exec   *exec = te_call_exec(call, rows);
    te_tensor *made = new_rows(call, rows, weight_dtype(rows->dtype), r->tokens, r->experts), *cast = NULL;
    te_view    a = te_tensor_view(rows), b = te_tensor_view(tokens), w = made ? te_tensor_view(made) : a;
    if (made && te_call_kernel(call, exec, exec->backend->route_weights(exec, r, &w, &a, &b)) == TE_OK)
        cast = te_tensor_cast(made, dtype);
    te_tensor_release(made);
    return cast;
}

/* Numbers, one per token or row, as rows of one column. */
static te_tensor *as_column(te_tensor *t)
{
    return te_tensor_alias(t, 2, (int64_t[2]){t->shape[0], 1}, NULL, t->offset);
}

static te_tensor *ones(te_call *call, const te_tensor *like, te_dtype dtype, int64_t n)
{
    te_tensor *t = new_rows(call, like, dtype, n, 1);
    if (!t || te_tensor_fill(t, 1) == TE_OK) return t;
    te_tensor_release(t);
    return NULL;
}

/* Keeps a result (NULL: none) for backward without its place in the graph, or node and result would keep each other
 * alive. */
static te_status keep_result(te_call *call, te_tensor *t)
{
    if (!t) return te_call_save(call, NULL) >= 0 ? TE_OK : call->ctx->status;
    te_tensor *kept = te_tensor_alias(t, t->ndim, t->shape, t->stride, t->offset);
    te_status  status = kept && te_call_save(call, kept) >= 0 ? TE_OK : call->ctx->status;
    te_tensor_release(kept);
    return status;
}

/* --- to experts --------------------------------------------------------------------------------------------------- */

static bool is_mask(const te_tensor *t) { return t->dtype == TE_BOOL || t->dtype == TE_U8; }

static te_status check_permutation(te_call *call, const te_tensor *x, const te_tensor *probs, const te_tensor *routing)
{
    bool ids = routing->dtype == TE_I64 || routing->dtype == TE_I32;
    if (x->ndim != 2 || !te_dtype_has_gradient(x->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "x must be {tokens, width} of a floating dtype, not %s of %s",
                            TE_SHAPE_TEXT(x), te_dtype_name(x->dtype));
    if (!ids && !is_mask(routing))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "routing_map must be a mask of bool or uint8, or ids of int64 or int32, not %s",
                            te_dtype_name(routing->dtype));
    if (routing->ndim != 2 || routing->shape[0] != x->shape[0] || routing->shape[1] == 0)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "routing_map must be {%lld, %s}, not %s", (long long)x->shape[0],
                            ids ? "slots" : "experts", TE_SHAPE_TEXT(routing));
    if (probs && (!te_same_shape(probs, routing) || !te_dtype_is_float(probs->dtype)))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "probs must be %s of a floating dtype, as routing_map is, not %s of %s",
                            TE_SHAPE_TEXT(routing), TE_SHAPE_TEXT(probs), te_dtype_name(probs->dtype));
    return TE_OK;
}

/* The row_id_map of a routing map, and of a mask the number of each expert's tokens. */
static te_status make_map(te_call *call, te_tensor *routing, int64_t rows, te_tensor **map, te_tensor **counts)
{
    te_device *device = routing->storage->device;
    int64_t    tokens = routing->shape[0], columns = routing->shape[1], mask[2] = {tokens, 2 * columns + 1};
    int64_t    all = tokens * columns;
    te_tensor *marks = te_tensor_contiguous_copy(routing);
    *map = te_tensor_new(call->ctx, device, TE_I32, is_mask(routing) ? 2 : 1, is_mask(routing) ? mask : &all);
    *counts = is_mask(routing) ? te_tensor_new(call->ctx, device, TE_I32, 1, &columns) : NULL;
    te_status status = marks && *map && (*counts || !is_mask(routing)) ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_exec *exec = te_call_exec(call, routing);
        te_view  out = te_tensor_view(*map), in = te_tensor_view(marks), n = {0};
        if (*counts) n = te_tensor_view(*counts);
        status = te_call_kernel(call, exec, exec->backend->route_map(exec, &out, &n, &in, rows));
    }
    te_tensor_release(marks);
    return status;
}

/* Counts of experts on the host. */
static int64_t *read_counts(te_call *call, te_tensor *counts)
{
    int64_t *host = te_mem_alloc(&call->ctx->mem, (size_t)counts->shape[0] * sizeof *host);
    if (!host) {
        te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
        return NULL;
    }
    if (te_tensor_read(counts, TE_I64, host) == TE_OK) return host;
    te_mem_free(&call->ctx->mem, host, (size_t)counts->shape[0] * sizeof *host);
    return NULL;
}

static te_status count_rows(te_call *call, te_tensor *counts, int64_t *rows)
{
    int64_t *host = read_counts(call, counts);
    if (!host) return call->ctx->status;
    *rows = 0;
    for (int64_t e = 0; e < counts->shape[0]; e++) *rows += host[e];
    te_mem_free(&call->ctx->mem, host, (size_t)counts->shape[0] * sizeof *host);
    return TE_OK;
}

enum { TO_ROWS_MAP, TO_ROWS_SHIFTS, TO_ROWS_PROBS }; /* what is saved */

/* x's rows, and probabilities where there are any, to `rows` rows by a map; results 0 and 1. */
static te_status permute(te_call *call, te_tensor *x, te_tensor *probs, te_tensor *map, te_tensor *shifts, int64_t rows)
{
    routed     routes;
    te_tensor *y = call->out[0] = new_rows(call, x, x->dtype, rows, x->shape[1]), *ordered = NULL;
    te_status  status = y ? open_routes(call, &routes, map, x->shape[0], probs, x->dtype, shifts) : call->ctx->status;
    if (!y) return status;
    routes.r.gates = true;
    if (status == TE_OK && !(ordered = te_tensor_contiguous_copy(x))) status = call->ctx->status;
    if (status == TE_OK) status = run_rows(call, &routes.r, y, ordered, false);
    te_tensor_release(ordered);
    if (status == TE_OK && probs) {
        te_dtype   dtype = weight_dtype(x->dtype);
        te_tensor *one = ones(call, x, dtype, x->shape[0]), *column = new_rows(call, x, dtype, rows, 1);
        te_tensor *line = column ? te_tensor_alias(column, 1, &rows, NULL, column->offset) : NULL;
        routes.r.gates = false;
        status = one && line ? run_rows(call, &routes.r, column, one, false) : call->ctx->status;
        if (status == TE_OK && !(call->out[1] = te_tensor_cast(line, probs->dtype))) status = call->ctx->status;
        te_tensor_release(one);
        te_tensor_release(column);
        te_tensor_release(line);
    }
    close_routes(&routes);
    if (status != TE_OK || !call->record) return status;
    call->memo[0] = x->shape[0];
    status = keep_result(call, map);
    if (status == TE_OK) status = keep_result(call, shifts);
    if (status == TE_OK && te_call_save(call, probs) < 0) status = call->ctx->status;
    return status;
}

/* A row of a slot without probability was 0 whatever the token is. */
static te_status permute_backward(te_call *call)
{
    routed     routes;
    te_tensor *probs = call->saved[TO_ROWS_PROBS];
    int64_t    tokens = call->memo[0];
    te_tensor *dy = call->dout[0] ? te_tensor_contiguous_copy(call->dout[0]) : NULL;
    te_dtype   dtype = te_grad_input(call, 0)->dtype;
    te_status  status = open_routes(call, &routes, call->saved[TO_ROWS_MAP], tokens, probs, dtype,
                                    call->saved[TO_ROWS_SHIFTS]);
    routes.r.gates = true;
    if (status == TE_OK && call->dout[0] && te_grad_wanted(call, 0)) {
        te_tensor *dx = dy ? new_rows(call, dy, dy->dtype, tokens, dy->shape[1]) : NULL;
        status = dx ? run_rows(call, &routes.r, dy, dx, true) : call->ctx->status;
        if (status == TE_OK)
            status = te_grad_give(call, 0, dx);
        else
            te_tensor_release(dx);
    }
    if (status == TE_OK && probs && call->dout[1] && te_grad_wanted(call, 1)) {
        te_tensor *line = in_order(call->dout[1], weight_dtype(dtype)), *column = line ? as_column(line) : NULL;
        te_tensor *one = column ? ones(call, column, column->dtype, tokens) : NULL;
        status = one ? te_grad_give(call, 1, gradient_of_weights(call, &routes.r, column, one, probs->dtype))
                     : call->ctx->status;
        te_tensor_release(line);
        te_tensor_release(column);
        te_tensor_release(one);
    }
    te_tensor_release(dy);
    close_routes(&routes);
    return status;
}

/* moe_permute, and with probs as input 1. The map is the last result. */
static te_status permute_by(te_call *call, te_tensor *probs, te_tensor *routing)
{
    te_tensor *x = call->in[0], *map = NULL, *counts = NULL;
    int64_t    rows = (int64_t)call->attr[0].number;
    te_status  status = check_permutation(call, x, probs, routing);
    if (status != TE_OK) return status;
    if (rows == 0 && !is_mask(routing)) rows = -1;
    if (rows < -1 || (rows == 0 && routing->shape[0] > 0) || rows > INT_MAX)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "num_out_tokens = %lld; rows, or -1 for all", (long long)rows);
    status = make_map(call, routing, rows < 0 ? INT_MAX : rows, &map, &counts);
    if (status == TE_OK && rows < 0) {
        rows = routing->shape[0] * routing->shape[1];
        if (counts) status = count_rows(call, counts, &rows);
    }
    if (status == TE_OK) status = permute(call, x, probs, map, NULL, rows);
    te_tensor_release(counts);
    call->out[probs ? 2 : 1] = map;
    return status;
}

static te_status moe_permute_forward(te_call *call) { return permute_by(call, NULL, call->in[1]); }
static te_status moe_permute_probs_forward(te_call *call) { return permute_by(call, call->in[1], call->in[2]); }

/* Where experts' rows begin once each has a multiple of `align`: by how much that shifts them, and how many each has;
 * counts becomes the latter. Returns the number of rows, or -1. */
static int64_t pad_counts(int64_t *counts, int32_t *shifts, int64_t experts, int64_t align)
{
    int64_t rows = 0, shift = 0;
    for (int64_t e = 0; e < experts; e++) {
        int64_t padded = (counts[e] + align - 1) / align * align;
        shifts[e] = (int32_t)shift;
        shift += padded - counts[e];
        rows += counts[e] = padded;
        if (rows > INT_MAX) return -1;
    }
    return rows;
}

static te_status moe_permute_pad_forward(te_call *call)
{
    te_tensor *x = call->in[0], *probs = call->in[1], *routing = call->in[2], *given = call->in[3];
    te_tensor *map = NULL, *counts = NULL;
    int64_t    align = (int64_t)call->attr[0].number, rows = -1;
    te_status  status = check_permutation(call, x, probs, routing);
    if (status != TE_OK) return status;
    int64_t experts = routing->shape[1];
    size_t  bytes = (size_t)experts * (2 * sizeof(int64_t) + sizeof(int32_t));
    if (!is_mask(routing)) return te_call_fail(call, TE_ERROR_ARGUMENT, "routing_map must be a mask of experts");
    if (align < 1 || align > INT_MAX)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "align = %lld", (long long)align);
    if (given->ndim != 1 || given->shape[0] != experts || te_dtype_is_float(given->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "tokens_per_expert must be {%lld} of integers, not %s of %s",
                            (long long)experts, TE_SHAPE_TEXT(given), te_dtype_name(given->dtype));
    int64_t *host = te_mem_alloc(&call->ctx->mem, bytes);
    if (!host) return te_call_fail(call, TE_ERROR_MEMORY, "out of host memory");
    int64_t *said = host + experts;
    int32_t *shifts = (int32_t *)(void *)(said + experts);
    status = make_map(call, routing, INT_MAX, &map, &counts);
    if (status == TE_OK) status = te_tensor_read(counts, TE_I64, host);
    if (status == TE_OK) status = te_tensor_read(given, TE_I64, said);
    for (int64_t e = 0; e < experts && status == TE_OK; e++)
        if (host[e] != said[e])
            status = te_call_fail(call, TE_ERROR_ARGUMENT, "tokens_per_expert[%lld] = %lld, routing_map has %lld",
                                  te_counted(call->ctx, e), (long long)said[e], (long long)host[e]);
    if (status == TE_OK && (rows = pad_counts(host, shifts, experts, align)) < 0)
        status = te_call_fail(call, TE_ERROR_ARGUMENT, "align = %lld gives more rows than int32 can number",
                              (long long)align);
    te_device *device = x->storage->device;
    if (status == TE_OK) {
        te_tensor *moved = call->out[3] = te_tensor_new(call->ctx, device, TE_I32, 1, &experts);
        te_tensor *padded = call->out[4] = te_tensor_new(call->ctx, device, TE_I64, 1, &experts);
        status = moved && padded ? te_tensor_write(moved, TE_I32, shifts) : call->ctx->status;
        if (status == TE_OK) status = te_tensor_write(padded, TE_I64, host);
        if (status == TE_OK) status = permute(call, x, probs, map, moved, rows);
    }
    te_mem_free(&call->ctx->mem, host, bytes);
    te_tensor_release(counts);
    call->out[2] = map;
    return status;
}

/* --- back --------------------------------------------------------------------------------------------------------- */

/* How many tokens a map of one dimension has. */
static te_status tokens_of(te_call *call, const te_tensor *x, const te_tensor *map, const te_tensor *probs,
                           int64_t *tokens)
{
    const te_attr *shape = &call->attr[0];
    if (map->dtype != TE_I32 || (map->ndim == 2 ? map->shape[1] % 2 == 0 : map->ndim != 1))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "row_id_map must be one that te.moe_permute gave, not %s of %s",
                            TE_SHAPE_TEXT(map), te_dtype_name(map->dtype));
    if (x->ndim != 2 || !te_dtype_has_gradient(x->dtype))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "x must be {rows, width} of a floating dtype, not %s of %s",
                            TE_SHAPE_TEXT(x), te_dtype_name(x->dtype));
    *tokens = map->ndim == 2 ? map->shape[0]
        : probs && probs->ndim == 2 ? probs->shape[0]
        : shape->set && shape->n == 2 ? shape->ints[0]
                                      : map->shape[0];
    bool fits = !shape->set || (shape->n == 2 && shape->ints[0] == *tokens && shape->ints[1] == x->shape[1]);
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "restore_shape must be {%lld,%lld}", (long long)*tokens,
                            (long long)x->shape[1]);
    if (map->ndim == 1 && (*tokens ? map->shape[0] % *tokens != 0 : map->shape[0] != 0))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "row_id_map %s does not fit %lld tokens", TE_SHAPE_TEXT(map),
                            (long long)*tokens);
    int64_t columns = map->ndim == 2 ? map->shape[1] / 2 : *tokens ? map->shape[0] / *tokens : 0;
    if (probs && (probs->ndim != 2 || probs->shape[0] != *tokens || (*tokens && probs->shape[1] != columns) ||
                  !te_dtype_is_float(probs->dtype)))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "merging_probs must be {%lld,%lld} of a floating dtype, not %s of %s",
                            (long long)*tokens, (long long)columns, TE_SHAPE_TEXT(probs), te_dtype_name(probs->dtype));
    return TE_OK;
}

enum { BACK_MAP, BACK_SHIFTS, BACK_PROBS, BACK_ROWS }; /* what is saved */

static te_status moe_unpermute_forward(te_call *call)
{
    te_tensor *x = call->in[0], *map = call->in[1], *probs = call->in[2], *shifts = call->in[3];
    routed     routes;
    int64_t    tokens = 0;
    te_status  status = tokens_of(call, x, map, probs, &tokens);
    if (status != TE_OK) return status;
    if (shifts && (map->ndim != 2 || shifts->ndim != 1 || shifts->shape[0] != map->shape[1] / 2 ||
                   te_dtype_is_float(shifts->dtype)))
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "pad_offsets must be integers, one per expert of row_id_map %s, not %s",
                            TE_SHAPE_TEXT(map), TE_SHAPE_TEXT(shifts));
    te_tensor *y = call->out[0] = new_rows(call, x, x->dtype, tokens, x->shape[1]);
    te_tensor *ordered = y ? te_tensor_contiguous_copy(x) : NULL;
    if (!ordered) return call->ctx->status;
    status = open_routes(call, &routes, map, tokens, probs, x->dtype, shifts);
    if (status == TE_OK) status = run_rows(call, &routes.r, ordered, y, true);
    te_tensor_release(ordered);
    close_routes(&routes);
    call->memo[0] = tokens;
    call->memo[1] = x->shape[0];
    te_tensor *kept[4] = {map, shifts, probs, probs ? x : NULL};
    for (int i = 0; i < 4 && status == TE_OK && call->record; i++)
        if (te_call_save(call, kept[i]) < 0) status = call->ctx->status;
    return status;
}

static te_status moe_unpermute_backward(te_call *call)
{
    routed     routes;
    te_tensor *probs = call->saved[BACK_PROBS], *rows = call->saved[BACK_ROWS];
    te_tensor *dy = te_tensor_contiguous_copy(call->dout[0]);
    if (!dy) return call->ctx->status;
    te_status status = open_routes(call, &routes, call->saved[BACK_MAP], call->memo[0], probs, dy->dtype,
                                   call->saved[BACK_SHIFTS]);
    if (status == TE_OK && te_grad_wanted(call, 0)) {
        te_tensor *dx = new_rows(call, dy, dy->dtype, call->memo[1], dy->shape[1]);
        status = dx ? run_rows(call, &routes.r, dx, dy, false) : call->ctx->status;
        if (status == TE_OK)
            status = te_grad_give(call, 0, dx);
        else
            te_tensor_release(dx);
    }
    if (status == TE_OK && probs && te_grad_wanted(call, 2)) {
        te_tensor *ordered = te_tensor_contiguous_copy(rows);
        status = ordered ? te_grad_give(call, 2, gradient_of_weights(call, &routes.r, ordered, dy, probs->dtype))
                         : call->ctx->status;
        te_tensor_release(ordered);
    }
    te_tensor_release(dy);
    close_routes(&routes);
    return status;
}

const te_op_def te_ops_moe[] = {
    {.signature = "moe_permute(x, routing_map, num_out_tokens: int = -1)",
     .doc = "Rows of x {tokens, width} sorted by expert, and row_id_map, with which te.moe_unpermute restores them. "
            "routing_map is a mask {tokens, experts} (bool, uint8) or ids {tokens, slots} (int64, int32); an expert's "
            "tokens keep their order. num_out_tokens is the number of rows: further ones are dropped, missing ones "
            "are 0; -1: as many as are routed, for which a mask must be counted.",
     .outputs = "y row_id_map",
     .forward = moe_permute_forward,
     .backward = permute_backward},
    {.signature = "moe_permute_with_probs(x, probs, routing_map, num_out_tokens: int = -1)",
     .doc = "te.moe_permute with probs in routing_map's shape: returns the rows, permuted_probs, which are theirs, and "
            "row_id_map. A row whose probability is exactly 0 is 0.",
     .outputs = "y permuted_probs row_id_map",
     .forward = moe_permute_probs_forward,
     .backward = permute_backward},
    {.signature = "moe_permute_and_pad_with_probs(x, probs, routing_map, tokens_per_expert, align: int)",
     .doc = "te.moe_permute_with_probs by a mask, with each expert's rows padded with zeros to a multiple of align. "
            "tokens_per_expert {experts} are routing_map's sums. Returns the rows, permuted_probs, row_id_map, "
            "pad_offsets, by how many rows each expert's were moved (for te.moe_unpermute), and "
            "padded_tokens_per_expert, how many it has now.",
     .outputs = "y permuted_probs row_id_map pad_offsets padded_tokens_per_expert",
     .forward = moe_permute_pad_forward,
     .backward = permute_backward},
    {.signature = "moe_unpermute(x, row_id_map, merging_probs = nil, pad_offsets = nil, restore_shape: shape = nil)",
     .doc = "Tokens {tokens, width} as sums over their rows in x, times merging_probs if given: {tokens, experts}, or "
            "{tokens, slots} where row_id_map was made from ids. restore_shape gives the number of tokens where "
            "nothing else does. Sums are taken in float32.",
     .forward = moe_unpermute_forward,
     .backward = moe_unpermute_backward},
    {0},
};
