/* kernel_ops.c - operations by hand-written kernels: a plan is made, its memory lent, its kernels launched.
 *
 * Ids and weights are checked on the device while they are used; the verdict comes out where the host next waits
 * (reports.c, and graph.c for recorded ones).
 */
#include "cuda_backend.h"
#include "kernels/args.h"
#include "kernels/hand.h"

enum { LISTS = 8 };

/* A list of delayed scaling's tensors, on the host and on the device. */
typedef struct delayed_list {
    te_delayed *tensors;
    void *there;
    int64_t n, room; /* tensors that it has, and has memory for */
    uint64_t used;
} delayed_list;

struct te_cuda_hand {
    size_t n, capacity;
    struct hand_code {
        te_cuda_kernel kernel;
        te_cuda_code *code;
    } * codes;
    delayed_list lists[LISTS];
    uint64_t list_clock;
};

static te_status open_hand(te_exec *exec, struct te_cuda_hand **out)
{
    te_cuda_device *d = te_cuda(exec);
    if ((*out = d->hand)) return TE_OK;
    struct te_cuda_hand *hand = te_mem_zalloc(exec->mem, sizeof *hand);
    if (!hand) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for kernels");
    *out = d->hand = hand;
    return TE_OK;
}

static void drop_list(te_exec *exec, delayed_list *list)
{
    size_t bytes = (size_t)list->room * sizeof *list->tensors;
    te_cuda_memory_free(exec, list->there, bytes);
    te_mem_free(exec->mem, list->tensors, bytes);
    *list = (delayed_list){.n = 0};
}

void te_cuda_hand_close(te_exec *exec)
{
    struct te_cuda_hand *hand = te_cuda(exec)->hand;
    if (!hand) return;
    for (int i = 0; i < LISTS; i++) drop_list(exec, &hand->lists[i]);
    te_mem_free(exec->mem, hand->codes, hand->capacity * sizeof *hand->codes);
    te_mem_free(exec->mem, hand, sizeof *hand);
    te_cuda(exec)->hand = NULL;
}

static te_status compile_kernel(te_exec *exec, const te_cuda_kernel *kernel, const char *operation, te_cuda_code **code)
{
    te_text source;
    te_text_open(&source, exec->mem);
    te_status status = te_cuda_kernel_source(kernel, &source);
    if (status == TE_OK)
        status = te_cuda_compile(exec, operation, source.data, source.length, code);
    else
        te_exec_fail(exec, status, "%s: out of host memory for its source", operation);
    te_text_close(&source);
    return status;
}

static te_status find_kernel(te_exec *exec, struct te_cuda_hand *hand, const te_cuda_kernel *kernel,
                             const char *operation, te_cuda_code **code)
{
    for (size_t i = 0; i < hand->n; i++) {
        if (memcmp(&hand->codes[i].kernel, kernel, sizeof *kernel) != 0) continue;
        *code = hand->codes[i].code;
        return TE_OK;
    }
    if (!te_mem_grow(exec->mem, &hand->codes, &hand->capacity, hand->n + 1, sizeof *hand->codes))
        return te_exec_fail(exec, TE_ERROR_MEMORY, "%s: out of host memory", operation);
    te_status status = compile_kernel(exec, kernel, operation, code);
    if (status == TE_OK) hand->codes[hand->n++] = (struct hand_code){*kernel, *code};
    return status;
}

static te_status run_plan(te_exec *exec, te_cuda_plan *plan, const char *operation)
{
    struct te_cuda_hand *hand;
    te_cuda_code *code;
    te_status status = plan->n_calls ? open_hand(exec, &hand) : TE_OK;
    if (status != TE_OK || plan->n_calls == 0) return status;
    bool checked = plan->check.kind != TE_CUDA_CHECK_NONE;
    void *scratch = plan->scratch_bytes ? exec->scratch(exec, plan->scratch_bytes) : NULL;
    if (plan->scratch_bytes && !scratch) return TE_ERROR_MEMORY;
    uint64_t *fault = NULL;
    if (checked && !te_cuda(exec)->capture)
        status = te_cuda_report(exec, &plan->check, &fault);
    else if (checked && !(fault = te_cuda_graph_report(exec, &plan->check)))
        status = TE_ERROR_MEMORY;
    te_cuda_plan_bind(plan, scratch, fault);
    te_cuda_trace(exec, "dispatch: %s: kernel %s, %u blocks of %u\n", operation, plan->calls[0].launch.name,
                  plan->calls[0].launch.grid[0], plan->calls[0].launch.block[0]);
    for (int i = 0; i < plan->n_calls && status == TE_OK; i++) {
        status = find_kernel(exec, hand, &plan->calls[i].kernel, operation, &code);
        if (status == TE_OK) status = te_cuda_launch_code(exec, code, &plan->calls[i].launch, operation);
    }
    if (scratch) exec->scratch_free(exec, scratch);
    return status;
}

/* Enters the device, makes the plan and runs it. */
#define RUN(operation, make)                                                                                           \
    te_cuda_plan plan;                                                                                                 \
    te_status status = te_cuda_enter(exec);                                                                            \
    if (status == TE_OK) status = make;                                                                                \
    return status == TE_OK ? run_plan(exec, &plan, operation)        : status

/* The same as part of another operation, which has entered it. */
#define RUN_PART(operation, make)                                                                                      \
    te_cuda_plan plan;                                                                                                 \
    te_status status = make;                                                                                           \
    return status == TE_OK ? run_plan(exec, &plan, operation) : status

te_status te_cuda_embedding(te_exec *exec, const te_view *out, const te_view *table, const te_view *ids)
{
    RUN("embedding", te_cuda_plan_embedding(exec, &plan, out, table, ids));
}

te_status te_cuda_embedding_backward(te_exec *exec, const te_view *dtable, const te_view *dy, const te_view *ids,
                                     double *squares)
{
    if (squares) *squares = (double)NAN;
    RUN("embedding.backward", te_cuda_plan_embedding_backward(exec, &plan, dtable, dy, ids));
}

te_status te_cuda_check_classes(te_exec *exec, const te_view *targets, int64_t classes, double ignored)
{
    RUN("check of classes", te_cuda_plan_check_classes(exec, &plan, targets, classes, ignored));
}

te_status te_cuda_gather(te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim)
{
    RUN("gather", te_cuda_plan_gather(exec, &plan, out, src, index, dim));
}

te_status te_cuda_scatter(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    RUN("scatter", te_cuda_plan_scatter(exec, &plan, dst, src, index, dim));
}

te_status te_cuda_scatter_add(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    RUN("scatter_add", te_cuda_plan_scatter_add(exec, &plan, dst, src, index, dim));
}

te_status te_cuda_copy_all(te_exec *exec, const te_view *dst, const te_view *src, int n)
{
    te_cuda_plan plan;
    te_status status = te_cuda_enter(exec);
    for (int i = 0, done; i < n && status == TE_OK; i += done) {
        status = te_cuda_plan_copy_all(&plan, dst + i, src + i, n - i, &done);
        if (status == TE_OK && done > 0) status = run_plan(exec, &plan, "copy");
        if (status != TE_OK || done > 0) continue;
        status = te_cuda_copy(exec, dst + i, src + i);
        done = 1;
    }
    return status;
}

te_status te_cuda_turn(te_exec *exec, const te_view *dst, const te_view *src)
{
    RUN("copy", te_cuda_plan_turn(exec, &plan, dst, src));
}

te_status te_cuda_triangle(te_exec *exec, const te_view *dst, const te_view *src, int64_t diagonal, bool upper)
{
    bool turned = src->ndim > 0 && src->stride[src->ndim - 1] != 1 && te_view_numel(dst) > 0;
    te_status before = turned ? te_cuda_copy(exec, dst, src) : TE_OK; /* which knows how to turn tiles */
    if (before != TE_OK) return before;
    RUN("triangle", te_cuda_plan_triangle(exec, &plan, dst, turned ? dst : src, diagonal, upper));
}

te_status te_cuda_arg_reduce(te_exec *exec, const te_view *index, const te_view *src, bool largest)
{
    RUN("arg_reduce", te_cuda_plan_arg_reduce(exec, &plan, index, src, largest));
}

te_status te_cuda_topk(te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool largest)
{
    RUN("topk", te_cuda_plan_topk(exec, &plan, values, indices, src, largest));
}

te_status te_cuda_sort(te_exec *exec, const te_view *values, const te_view *indices, const te_view *src,
                       bool descending)
{
    RUN("sort", te_cuda_plan_order(exec, &plan, values, indices, src, descending));
}

te_status te_cuda_cumsum(te_exec *exec, const te_view *dst, const te_view *src, bool reverse)
{
    RUN("cumsum", te_cuda_plan_cumsum(exec, &plan, dst, src, reverse));
}

te_status te_cuda_multinomial(te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng)
{
    RUN("multinomial", te_cuda_plan_multinomial(exec, &plan, out, src, replacement, rng));
}

te_status te_cuda_integers(te_exec *exec, void *values, te_dtype dtype, int64_t n, const te_integers *drawn)
{
    RUN("randint", te_cuda_plan_integers(&plan, values, dtype, n, drawn));
}

te_status te_cuda_route_map(te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing,
                            int64_t rows)
{
    RUN("route_map", te_cuda_plan_route_map(exec, &plan, map, counts, routing, rows));
}

te_status te_cuda_route_rows(te_exec *exec, const te_routes *routes, const te_view *rows, const te_view *tokens)
{
    RUN("route_rows", te_cuda_plan_route_rows(exec, &plan, routes, rows, tokens));
}

te_status te_cuda_route_tokens(te_exec *exec, const te_routes *routes, const te_view *tokens, const te_view *rows)
{
    RUN("route_tokens", te_cuda_plan_route_tokens(exec, &plan, routes, tokens, rows));
}

te_status te_cuda_route_weights(te_exec *exec, const te_routes *routes, const te_view *weights, const te_view *rows,
                                const te_view *tokens)
{
    RUN("route_weights", te_cuda_plan_route_weights(exec, &plan, routes, weights, rows, tokens));
}

te_status te_cuda_route_choose(te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups,
                               int64_t best_groups)
{
    RUN("route_choose", te_cuda_plan_route_choose(exec, &plan, map, scores, k, groups, best_groups));
}

/* --- quantizing --------------------------------------------------------------------------------------------------- */

/* What run_plan needs: kernels, and memory to work in, which is given back. */
static te_status prepare_plan(te_exec *exec, const te_cuda_plan *plan, const char *operation)
{
    struct te_cuda_hand *hand;
    te_cuda_code *code;
    te_status status = open_hand(exec, &hand);
    for (int i = 0; i < plan->n_calls && status == TE_OK; i++)
        status = find_kernel(exec, hand, &plan->calls[i].kernel, operation, &code);
    void *scratch = status == TE_OK && plan->scratch_bytes ? exec->scratch(exec, plan->scratch_bytes) : NULL;
    if (status == TE_OK && plan->scratch_bytes && !scratch) return TE_ERROR_MEMORY;
    if (scratch) exec->scratch_free(exec, scratch);
    return status;
}

static te_status prepare_quantize(te_exec *exec, const te_quantize_job *job)
{
    te_cuda_plan plan;
    te_quantize_job whole = *job;
    whole.step = TE_QUANTIZE_BOTH;
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = te_cuda_plan_quantize(&plan, &whole);
    return status == TE_OK ? prepare_plan(exec, &plan, "quantize") : status;
}

te_status te_cuda_quantize(te_exec *exec, const te_quantize_job *job)
{
    if (job->step == TE_QUANTIZE_PREPARE) return prepare_quantize(exec, job);
    RUN("quantize", te_cuda_plan_quantize(&plan, job));
}

te_status te_cuda_dequantize(te_exec *exec, const te_quantize_job *job, int side)
{
    RUN("dequantize", te_cuda_plan_dequantize(&plan, job, side));
}

/* Memory for n tensors, which the device gives up seldom, since that waits for it. */
static bool has_room(te_exec *exec, delayed_list *list, int64_t n)
{
    if (n <= list->room) return true;
    int64_t room = 64;
    while (room < n) room *= 2;
    drop_list(exec, list);
    te_delayed *tensors = te_mem_alloc(exec->mem, (size_t)room * sizeof *tensors);
    void *there = tensors ? te_cuda_memory_alloc(exec, (size_t)room * sizeof *tensors) : NULL;
    if (there)
        *list = (delayed_list){.tensors = tensors, .there = there, .room = room};
    else
        te_mem_free(exec->mem, tensors, (size_t)room * sizeof *tensors);
    return there != NULL;
}

/* The list on the device; NULL: it cannot stay there. The same tensors come in every step, with the same addresses, so
 * the last few lists stay; a new one takes the place of the one that nobody has asked for longest. */
static void *list_there(te_exec *exec, struct te_cuda_hand *hand, const te_delayed *tensors, int64_t n)
{
    delayed_list *oldest = &hand->lists[0];
    size_t bytes = (size_t)n * sizeof *tensors;
    for (int i = 0; i < LISTS; i++) {
        delayed_list *list = &hand->lists[i];
        if (list->n == n && memcmp(list->tensors, tensors, bytes) == 0) {
            list->used = ++hand->list_clock;
            return list->there;
        }
        if (list->used < oldest->used) oldest = list;
    }
    oldest->n = 0;
    if (!has_room(exec, oldest, n)) return NULL;
    if (te_cuda_memory_copy(exec, oldest->there, tensors, bytes, TE_COPY_HOST_TO_DEVICE) != TE_OK) return NULL;
    memcpy(oldest->tensors, tensors, bytes);
    oldest->n = n;
    oldest->used = ++hand->list_clock;
    return oldest->there;
}

te_status te_cuda_delayed_update(te_exec *exec, const te_delayed *tensors, int64_t n, uint64_t *skipped)
{
    te_cuda_plan plan;
    struct te_cuda_hand *hand;
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK) status = open_hand(exec, &hand);
    if (status != TE_OK) return status;
    void *list = te_cuda(exec)->capture ? NULL : list_there(exec, hand, tensors, n); /* a graph brings its own */
    bool lent = list == NULL;
    if (lent) list = te_cuda_upload(exec, tensors, (size_t)n * sizeof *tensors);
    if (!list) return TE_ERROR_MEMORY;
    status = te_cuda_plan_delayed(&plan, list, n, skipped);
    if (status == TE_OK) status = run_plan(exec, &plan, "delayed scaling");
    if (lent) exec->scratch_free(exec, list);
    return status;
}

te_status te_cuda_decode(te_exec *exec, const te_view *to, const te_view *from, bool whole)
{
    RUN_PART("matrix product", te_cuda_plan_decode(&plan, to, from, whole));
}

te_status te_cuda_arrange_factors(te_exec *exec, const te_arrange_args *args)
{
    RUN_PART("matrix product", te_cuda_plan_arrange(&plan, args));
}

te_status te_cuda_product_few(te_exec *exec, const te_few_args *args, const te_dtype dtypes[3])
{
    RUN_PART("matrix product", te_cuda_plan_few(&plan, args, dtypes));
}

te_status te_cuda_pad_lines(te_exec *exec, const te_pad_args *args)
{
    RUN_PART("matrix product", te_cuda_plan_pad(&plan, args));
}

te_status te_cuda_product_scales(te_exec *exec, const te_gemm *gemm, float *scales)
{
    RUN_PART("matrix product", te_cuda_plan_scales(&plan, gemm, scales));
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

te_status te_cuda_pack(te_exec *exec, int32_t *offsets, const te_view *lens, int64_t tokens)
{
    RUN("self_attention", te_cuda_plan_pack(exec, &plan, offsets, lens, tokens));
}

te_status te_cuda_ragged(te_exec *exec, const te_packed_args *args)
{
    te_cuda_plan plan;
    te_cuda_plan_ragged(&plan, args);
    return run_plan(exec, &plan, "attention");
}

te_status te_cuda_attention_unseen(te_exec *exec, const te_attention *attention)
{
    te_cuda_plan plan;
    te_cuda_plan_attention_unseen(&plan, attention);
    return run_plan(exec, &plan, "attention");
}

te_status te_cuda_attention_raised(te_exec *exec, const te_view *lse, float *raised)
{
    te_cuda_plan plan;
    te_cuda_plan_attention_raised(&plan, lse, raised);
    return run_plan(exec, &plan, "attention.backward");
}

/* Offsets of packed sequences, lent on the device; both null where nothing is packed or they lie there already. */
typedef struct offsets {
    int32_t *q, *kv;
} offsets;

static te_status check_offsets(te_exec *exec, const int32_t *at, int n_seqs, int64_t total)
{
    bool fits = at[0] >= 0 && at[n_seqs] <= total;
    for (int i = 0; fits && i < n_seqs; i++) fits = at[i] <= at[i + 1];
    return fits ? TE_OK
                : te_exec_fail(exec, TE_ERROR_ARGUMENT,
                               "attention: offsets of %d packed sequences do not ascend within %lld", n_seqs,
                               (long long)total);
}

static void lend_back(te_exec *exec, const offsets *o)
{
    if (o->kv && o->kv != o->q) exec->scratch_free(exec, o->kv);
    if (o->q) exec->scratch_free(exec, o->q);
}

static te_status upload_offsets(te_exec *exec, te_attention *a, offsets *o)
{
    *o = (offsets){NULL, NULL};
    if (!a->cu_seqlens_q || a->longest > 0) return TE_OK;
    size_t bytes = ((size_t)a->n_seqs + 1) * sizeof *a->cu_seqlens_q;
    te_status status = check_offsets(exec, a->cu_seqlens_q, a->n_seqs, a->q.shape[2]);
    if (status == TE_OK) status = check_offsets(exec, a->cu_seqlens_kv, a->n_seqs, a->k.shape[2]);
    if (status != TE_OK) return status;
    bool shared = a->cu_seqlens_q == a->cu_seqlens_kv;
    o->q = te_cuda_upload(exec, a->cu_seqlens_q, bytes);
    o->kv = shared || !o->q ? o->q : te_cuda_upload(exec, a->cu_seqlens_kv, bytes);
    if (!o->kv) {
        lend_back(exec, o);
        return TE_ERROR_MEMORY;
    }
    a->cu_seqlens_q = o->q;
    a->cu_seqlens_kv = o->kv;
    return TE_OK;
}

te_status te_cuda_attention(te_exec *exec, const te_attention *attention)
{
    te_attention a = *attention;
    offsets packed;
    te_cuda_plan plan;
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK && te_cuda_attention_dnn(exec, attention, NULL, &status)) return status;
    if (status == TE_OK) status = upload_offsets(exec, &a, &packed);
    if (status != TE_OK) return status;
    status = te_cuda_plan_attention(exec, &plan, &a);
    if (status == TE_OK) status = run_plan(exec, &plan, "attention");
    lend_back(exec, &packed);
    return status;
}

te_status te_cuda_attention_backward(te_exec *exec, const te_attention_grad *grad)
{
    te_attention_grad g = *grad;
    offsets packed;
    te_cuda_plan plan;
    te_status status = te_cuda_enter(exec);
    if (status == TE_OK && te_cuda_attention_dnn(exec, &grad->forward, grad, &status)) return status;
    if (status == TE_OK) status = upload_offsets(exec, &g.forward, &packed);
    if (status != TE_OK) return status;
    status = te_cuda_plan_attention_backward(exec, &plan, &g);
    if (status == TE_OK) status = run_plan(exec, &plan, "attention.backward");
    lend_back(exec, &packed);
    return status;
}
