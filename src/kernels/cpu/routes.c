/* routes.c - mixtures of experts: where the slots of tokens stand, and rows on their way there and back.
 *
 * Places are looked at before anything is written. Rows are then made in the order in which they lie, from a list of
 * the slots that stand in them, tokens from their slots: nothing is written twice, and sums have the order of slots.
 */
#include "routes.h"

#include "../check.h"
#include "workers.h"

#include <string.h>

enum { PARALLEL_FROM = 1 << 14 /* elements */ };

/* --- maps --------------------------------------------------------------------------------------------------------- */

/* Calls for each expert of token t that is marked, by 8 at a time. */
typedef void marked_slot(void *context, int64_t t, int64_t e);

static inline __attribute__((always_inline)) void visit_marked(const uint8_t *marks, int64_t t, int64_t experts,
                                                               marked_slot *visit, void *context)
{
    enum { WORD = sizeof(uint64_t) };
    int64_t e = 0;
    for (; e + WORD <= experts; e += WORD) {
        uint64_t word;
        memcpy(&word, marks + t * experts + e, sizeof word);
        for (int i = 0; word != 0; i++, word >>= 8)
            if (word & 0xff) visit(context, t, e + i);
    }
    for (; e < experts; e++)
        if (marks[t * experts + e]) visit(context, t, e);
}

typedef struct placing {
    int32_t *next; /* per expert: how many so far, then where its next slot stands */
    int32_t *map;
    int64_t  experts, rows;
} placing;

static void count_slot(void *context, int64_t t, int64_t e)
{
    (void)t;
    ((const placing *)context)->next[e]++;
}

static int32_t next_place(const placing *p, int64_t e)
{
    int32_t at = p->next[e]++;
    return at < p->rows ? at : -1;
}

static void place_slot(void *context, int64_t t, int64_t e)
{
    const placing *p = context;
    int32_t *entry = p->map + t * (2 * p->experts + 1), *count = entry + 2 * p->experts;
    entry[*count] = next_place(p, e);
    entry[p->experts + *count] = (int32_t)e;
    ++*count;
}

/* Counts become places, one expert after the other. */
static void begin_experts(int32_t *next, int64_t experts)
{
    int32_t before = 0;
    for (int64_t e = 0; e < experts; e++) {
        int32_t count = next[e];
        next[e] = before;
        before += count;
    }
}

static te_status map_marks(te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing,
                           int64_t rows)
{
    int64_t  tokens = routing->shape[0], experts = routing->shape[1], width = 2 * experts + 1;
    int32_t *next = exec->scratch(exec, (size_t)(experts + 1) * sizeof *next);
    placing  p = {next, map->data, experts, rows};
    if (!next) return TE_ERROR_MEMORY;
    memset(next, 0, (size_t)experts * sizeof *next);
    for (int64_t t = 0; t < tokens; t++) visit_marked(routing->data, t, experts, count_slot, &p);
    if (experts) memcpy(counts->data, next, (size_t)experts * sizeof *next);
    begin_experts(next, experts);
    if (tokens) memset(p.map, 0xff, (size_t)(tokens * width) * sizeof *p.map);
    for (int64_t t = 0; t < tokens; t++) {
        p.map[t * width + 2 * experts] = 0;
        visit_marked(routing->data, t, experts, place_slot, &p);
    }
    exec->scratch_free(exec, next);
    return TE_OK;
}

static int64_t id_at(const te_view *ids, int64_t i)
{
    return ids->dtype == TE_I64 ? ((const int64_t *)ids->data)[i] : ((const int32_t *)ids->data)[i];
}

static te_status map_ids(te_exec *exec, const te_view *map, const te_view *routing, int64_t rows)
{
    int64_t tokens = routing->shape[0], slots = routing->shape[1], experts = 0;
    for (int64_t i = 0; i < tokens * slots; i++) {
        int64_t id = id_at(routing, i);
        if (id < 0 || id >= TE_MOST_EXPERTS)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT, "route_map: expert %lld at position %lld is outside 0 to %d",
                                (long long)id, (long long)i + 1, TE_MOST_EXPERTS - 1);
        if (id >= experts) experts = id + 1;
    }
    int32_t *next = exec->scratch(exec, (size_t)(experts + 1) * sizeof *next);
    placing  p = {next, map->data, experts, rows};
    if (!next) return TE_ERROR_MEMORY;
    memset(next, 0, (size_t)experts * sizeof *next);
    for (int64_t i = 0; i < tokens * slots; i++) next[id_at(routing, i)]++;
    begin_experts(next, experts);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t s = 0; s < slots; s++) p.map[s * tokens + t] = next_place(&p, id_at(routing, t * slots + s));
    exec->scratch_free(exec, next);
    return TE_OK;
}

te_status te_cpu_route_map(te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing,
                           int64_t rows)
{
    te_status status = te_check_route_map(exec, map, counts, routing);
    if (status != TE_OK) return status;
    return map->ndim == 2 ? map_marks(exec, map, counts, routing, rows) : map_ids(exec, map, routing, rows);
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

typedef struct slot {
    int64_t row, expert; /* row < 0: nowhere */
} slot;

static int64_t slots_of(const te_routes *r, int64_t t) { return r->count ? r->count[t * r->token_step] : r->slots; }

static slot slot_at(const te_routes *r, int64_t t, int64_t s)
{
    slot at = {r->row[t * r->token_step + s * r->slot_step], r->expert ? r->expert[t * r->token_step + s] : s};
    if (r->shift && at.row >= 0) at.row += r->shift[at.expert];
    return at;
}

static te_status check_places(te_exec *exec, const char *op, const te_routes *r, int64_t rows)
{
    for (int64_t t = 0; t < r->tokens; t++) {
        int64_t count = slots_of(r, t);
        if (count < 0 || count > r->slots)
            return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: token %lld has %lld of %lld slots", op,
                                (long long)t + 1, (long long)count, (long long)r->slots);
        for (int64_t s = 0; s < count; s++) {
            int64_t expert = r->expert ? r->expert[t * r->token_step + s] : s;
            if (expert < 0 || expert >= r->experts)
                return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: expert %lld of token %lld is outside 0 to %lld", op,
                                    (long long)expert, (long long)t + 1, (long long)r->experts - 1);
            slot at = slot_at(r, t, s);
            if (at.row >= rows || (at.row < 0 && r->row[t * r->token_step + s * r->slot_step] >= 0))
                return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: row %lld of token %lld is outside 0 to %lld", op,
                                    (long long)at.row, (long long)t + 1, (long long)rows - 1);
        }
    }
    return TE_OK;
}

static double weight_of(const te_routes *r, int64_t t, int64_t expert)
{
    if (!te_view_present(&r->weights)) return 1;
    int64_t at = t * r->experts + expert;
    double weight = r->weights.dtype == TE_F64 ? ((const double *)r->weights.data)[at]
                                               : (double)((const float *)r->weights.data)[at];
    return !r->gates ? weight : weight != 0;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

typedef struct routing {
    te_exec              *exec;
    const te_routes      *r;
    const te_route_loops *loops;
    char                 *rows, *tokens;
    int64_t               width;
    size_t                bytes; /* of a row */
    const int64_t        *from;  /* rows: t * slots + s of the slot that stands there, -1: none */
    char                 *lists; /* tokens: room for the terms of a sum, per thread */
    size_t                list_bytes;
    te_view               weights; /* that are made */
} routing;

static const te_route_loops *loops_for(te_exec *exec, te_dtype dtype)
{
    const te_route_rows *rows = &te_route_rows_portable;
    (void)exec;
#ifdef TE_ISA_HAS_X86
    if (te_cpu(exec)->isa == TE_CPU_AVX512) rows = &te_route_rows_avx512;
    if (te_cpu(exec)->isa == TE_CPU_AVX2) rows = &te_route_rows_avx2;
#endif
    if (dtype == TE_F16) return &te_route_rows_f16;
    return dtype == TE_F32 ? &rows->f32 : dtype == TE_BF16 ? &rows->bf16 : &te_route_rows_f64;
}

static routing open_routing(te_exec *exec, const te_routes *r, const te_view *rows, const te_view *tokens)
{
    return (routing){.exec = exec,
                     .r = r,
                     .loops = loops_for(exec, rows->dtype),
                     .rows = rows->data,
                     .tokens = tokens->data,
                     .width = rows->shape[1],
                     .bytes = (size_t)rows->shape[1] * te_dtype_size(rows->dtype)};
}

static void share(routing *job, int64_t n, te_cpu_body *body)
{
    enum { PIECES = 8 }; /* a thread's */
    int     threads = n * job->width < PARALLEL_FROM ? 1 : job->exec->threads;
    int64_t grain = te_cpu_even_grain(n, threads > 1 ? PIECES * threads : 1);
    te_cpu_loop(job->exec, threads, n, grain ? grain : 1, body, job);
}

static void make_rows(void *context, int64_t first, int64_t end, int thread)
{
    const routing *job = context;
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec); i++) {
        char   *to = job->rows + (size_t)i * job->bytes;
        int64_t t = job->from[i] < 0 ? 0 : job->from[i] / job->r->slots;
        double  weight = 0;
        if (job->from[i] >= 0) weight = weight_of(job->r, t, slot_at(job->r, t, job->from[i] % job->r->slots).expert);
        if (weight == 1)
            memcpy(to, job->tokens + (size_t)t * job->bytes, job->bytes);
        else if (job->from[i] < 0 || (weight == 0 && job->r->gates))
            memset(to, 0, job->bytes);
        else
            job->loops->scale(to, job->tokens + (size_t)t * job->bytes, weight, job->width);
    }
}

te_status te_cpu_route_rows(te_exec *exec, const te_routes *r, const te_view *rows, const te_view *tokens)
{
    int64_t   n = rows->shape[0];
    te_status status = te_check_routes(exec, "route_rows", r, rows, tokens);
    if (status == TE_OK) status = check_places(exec, "route_rows", r, n);
    if (status != TE_OK || n == 0 || rows->shape[1] == 0) return status;
    int64_t *from = exec->scratch(exec, (size_t)n * sizeof *from);
    if (!from) return TE_ERROR_MEMORY;
    memset(from, 0xff, (size_t)n * sizeof *from);
    for (int64_t t = 0; t < r->tokens; t++) {
        for (int64_t s = 0, count = slots_of(r, t); s < count; s++) {
            slot at = slot_at(r, t, s);
            if (at.row >= 0 && from[at.row] < 0) from[at.row] = t * r->slots + s;
        }
    }
    routing job = open_routing(exec, r, rows, tokens);
    job.from = from;
    share(&job, n, make_rows);
    exec->scratch_free(exec, from);
    return te_cpu_finish(exec, TE_OK);
}

static void make_tokens(void *context, int64_t first, int64_t end, int thread)
{
    const routing *job = context;
    double        *weights = (double *)(void *)(job->lists + (size_t)thread * job->list_bytes);
    const void   **terms = (const void **)(void *)(weights + job->r->slots);
    for (int64_t t = first; t < end && !te_cpu_stopping(job->exec); t++) {
        int64_t n = 0;
        for (int64_t s = 0, count = slots_of(job->r, t); s < count; s++) {
            slot   at = slot_at(job->r, t, s);
            double weight = at.row < 0 ? 0 : weight_of(job->r, t, at.expert);
            if (at.row < 0 || (weight == 0 && job->r->gates)) continue;
            weights[n] = weight;
            terms[n++] = job->rows + (size_t)at.row * job->bytes;
        }
        job->loops->sum(job->tokens + (size_t)t * job->bytes, terms, weights, n, job->width);
    }
}

te_status te_cpu_route_tokens(te_exec *exec, const te_routes *r, const te_view *tokens, const te_view *rows)
{
    te_status status = te_check_routes(exec, "route_tokens", r, rows, tokens);
    if (status == TE_OK) status = check_places(exec, "route_tokens", r, rows->shape[0]);
    if (status != TE_OK || r->tokens == 0 || rows->shape[1] == 0) return status;
    routing job = open_routing(exec, r, rows, tokens);
    job.list_bytes = ((size_t)r->slots * (sizeof(double) + sizeof(void *)) + 63) / 64 * 64;
    job.lists = exec->scratch(exec, (size_t)exec->threads * job.list_bytes + 64);
    if (!job.lists) return TE_ERROR_MEMORY;
    share(&job, r->tokens, make_tokens);
    exec->scratch_free(exec, job.lists);
    return te_cpu_finish(exec, TE_OK);
}

static void make_weights(void *context, int64_t first, int64_t end, int thread)
{
    const routing *job = context;
    int64_t        experts = job->r->experts;
    bool           wide = job->weights.dtype == TE_F64;
    size_t         size = wide ? sizeof(double) : sizeof(float);
    (void)thread;
    for (int64_t t = first; t < end && !te_cpu_stopping(job->exec); t++) {
        char *to = (char *)job->weights.data + (size_t)(t * experts) * size;
        memset(to, 0, (size_t)experts * size);
        for (int64_t s = 0, count = slots_of(job->r, t); s < count; s++) {
            slot at = slot_at(job->r, t, s);
            if (at.row < 0) continue;
            double product = job->loops->dot(job->rows + (size_t)at.row * job->bytes,
                                             job->tokens + (size_t)t * job->bytes, job->width);
            if (wide)
                ((double *)(void *)to)[at.expert] = product;
            else
                ((float *)(void *)to)[at.expert] = (float)product;
        }
    }
}

te_status te_cpu_route_weights(te_exec *exec, const te_routes *r, const te_view *weights, const te_view *rows,
                               const te_view *tokens)
{
    te_routes made = *r;
    made.weights = *weights;
    te_status status = te_check_routes(exec, "route_weights", &made, rows, tokens);
    if (status == TE_OK) status = check_places(exec, "route_weights", r, rows->shape[0]);
    if (status != TE_OK || r->tokens == 0 || r->experts == 0) return status;
    routing job = open_routing(exec, r, rows, tokens);
    job.weights = *weights;
    share(&job, r->tokens, make_weights);
    return te_cpu_finish(exec, TE_OK);
}

/* --- choosing ----------------------------------------------------------------------------------------------------- */

/* Orders as the number does; NaN above all, both zeros alike; never INT32_MIN. */
static int32_t key_of(float x)
{
    int32_t bits;
    if (x != x) return INT32_MAX;
    x += 0.0f; /* -0 */
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? (int32_t)(0x80000000u - (uint32_t)bits) : bits;
}

/* Positions of the k largest of n keys, from the largest on; of equals the first ones. */
static void find_best(const int32_t *keys, int64_t n, int64_t k, int64_t *best)
{
    int64_t found = 0;
    for (int64_t i = 0; i < n && k > 0; i++) {
        if (found == k && keys[i] <= keys[best[k - 1]]) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && keys[i] > keys[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = i;
    }
}

typedef struct choosing {
    te_exec     *exec;
    const float *scores;
    uint8_t     *map;
    int64_t      experts, k, groups, best_groups;
    char        *lists; /* per thread: positions, keys of experts, keys of groups */
    size_t       list_bytes;
} choosing;

/* Only the keys of the best groups stay. */
static void keep_groups(const choosing *job, const float *scores, int64_t *best, int32_t *keys, int32_t *sums)
{
    int64_t size = job->experts / job->groups, counted = job->k / job->best_groups;
    for (int64_t g = 0; g < job->groups; g++) {
        float sum = 0;
        find_best(keys + g * size, size, counted, best);
        for (int64_t i = 0; i < counted; i++) sum += scores[g * size + best[i]];
        sums[g] = key_of(sum);
    }
    find_best(sums, job->groups, job->best_groups, best);
    for (int64_t i = 0; i < job->best_groups; i++) sums[best[i]] = INT32_MIN;
    for (int64_t g = 0; g < job->groups; g++)
        for (int64_t e = g * size; e < (g + 1) * size && sums[g] != INT32_MIN; e++) keys[e] = INT32_MIN;
}

static void choose_experts(void *context, int64_t first, int64_t end, int thread)
{
    const choosing *job = context;
    int64_t *best = (int64_t *)(void *)(job->lists + (size_t)thread * job->list_bytes);
    int32_t *keys = (int32_t *)(void *)(best + job->experts), *sums = keys + job->experts;
    for (int64_t t = first; t < end && !te_cpu_stopping(job->exec); t++) {
        const float *scores = job->scores + t * job->experts;
        for (int64_t e = 0; e < job->experts; e++) keys[e] = key_of(scores[e]);
        if (job->groups > 1) keep_groups(job, scores, best, keys, sums);
        find_best(keys, job->experts, job->k, best);
        memset(job->map + t * job->experts, 0, (size_t)job->experts);
        for (int64_t i = 0; i < job->k; i++) job->map[t * job->experts + best[i]] = 1;
    }
}

te_status te_cpu_route_choose(te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups,
                              int64_t best_groups)
{
    te_status status = te_check_route_choose(exec, map, scores, k, groups, best_groups);
    if (status != TE_OK || te_view_numel(scores) == 0) return status;
    int64_t  tokens = scores->shape[0], experts = scores->shape[1];
    choosing job = {exec, scores->data, map->data, experts, k, groups, best_groups, NULL, 0};
    int      threads = tokens * experts < PARALLEL_FROM ? 1 : exec->threads;
    job.list_bytes = ((size_t)experts * (sizeof(int64_t) + 2 * sizeof(int32_t)) + 63) / 64 * 64;
    job.lists = exec->scratch(exec, (size_t)threads * job.list_bytes);
    if (!job.lists) return TE_ERROR_MEMORY;
    te_cpu_loop(exec, threads, tokens, te_cpu_even_grain(tokens, threads), choose_experts, &job);
    exec->scratch_free(exec, job.lists);
    return te_cpu_finish(exec, TE_OK);
}
