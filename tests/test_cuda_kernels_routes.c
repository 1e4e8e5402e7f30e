/* test_cuda_kernels_routes.c - mixtures of experts: the CPU's rows with every instruction set, to the bit, and the CUDA
 * kernels, run by the simulator, against the CPU's. That both are right is shown by spec/ops/moe_spec.lua. */
#include "cuda_device.h"

#include "kernels/cpu/routes.h"
#include "kernels/dtype.h"

enum { TOKENS = 37, EXPERTS = 11, WIDTH = 83, MOST = TOKENS * EXPERTS, ROOM = MOST * WIDTH };

static cuda_device  cuda;
static te_cuda_plan plan;
static uint64_t     seed = 91;
static uint8_t      mask[MOST];
static int64_t      ids[MOST];
static int32_t      map[2][TOKENS * (2 * EXPERTS + 1)], counts[2][EXPERTS], shift[EXPERTS];
static double       tokens[TOKENS * WIDTH], rows[2][ROOM], made[2][ROOM], weights[MOST]; /* room for any dtype */

#define RUN_PLAN(made) CHECK_MSG((made) == TE_OK && cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message)

static void fill(void *data, te_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) te_store_f64(data, dtype, i, test_uniform(&seed, -3, 3));
}

static te_view view(void *data, te_dtype dtype, int64_t n, int64_t width)
{
    return test_view(data, dtype, 2, (int64_t[2]){n, width});
}

static te_view line(void *data, int64_t n) { return test_view(data, TE_I32, 1, &n); }

/* Maps of a mask, and of ids with `slots` columns; returns the routes of the CPU's. */
static te_routes check_maps(bool masked, int64_t slots, int64_t limit)
{
    int64_t all = TOKENS * slots, width = 2 * EXPERTS + 1;
    for (int64_t i = 0; i < MOST; i++) mask[i] = test_random(&seed) % 3 == 0, ids[i] = test_random(&seed) % EXPERTS;
    te_view routing = masked ? view(mask, TE_BOOL, TOKENS, EXPERTS) : view(ids, TE_I64, TOKENS, slots), to[2], n[2];
    for (int i = 0; i < 2; i++) {
        to[i] = masked ? view(map[i], TE_I32, TOKENS, width) : line(map[i], all);
        n[i] = masked ? line(counts[i], EXPERTS) : (te_view){0};
    }
    CHECK(te_cpu_route_map(&cuda.exec, &to[0], &n[0], &routing, limit) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_map(&cuda.exec, &plan, &to[1], &n[1], &routing, limit));
    CHECK(memcmp(map[0], map[1], (size_t)te_view_numel(&to[0]) * sizeof **map) == 0);
    CHECK(!masked || memcmp(counts[0], counts[1], sizeof *counts) == 0);
    if (!masked)
        return (te_routes){.tokens = TOKENS, .slots = slots, .token_step = 1, .slot_step = TOKENS, .experts = slots,
                           .row = map[0]};
    return (te_routes){.tokens = TOKENS, .slots = EXPERTS, .token_step = width, .slot_step = 1, .experts = EXPERTS,
                       .row = map[0], .expert = map[0] + EXPERTS, .count = map[0] + 2 * EXPERTS};
}

static bool near(const double *a, const double *b, te_dtype dtype, int64_t n, double tolerance)
{
    for (int64_t i = 0; i < n; i++) {
        double x = te_load_f64(a, dtype, i), y = te_load_f64(b, dtype, i);
        if (!(fabs(x - y) <= tolerance * (1 + fabs(y)))) return false;
    }
    return true;
}

static void check_rows(te_routes *r, te_dtype dtype, int64_t n)
{
    te_dtype wide = dtype == TE_F64 ? TE_F64 : TE_F32;
    te_view  x = view(tokens, dtype, TOKENS, WIDTH), y[2], back[2], w[2];
    fill(tokens, dtype, TOKENS * WIDTH);
    fill(weights, wide, r->tokens * r->experts);
    if (te_view_present(&r->weights)) r->weights = view(weights, wide, r->tokens, r->experts);
    te_store_f64(weights, wide, 3, 0);
    memset(rows, 0x55, sizeof rows);
    for (int i = 0; i < 2; i++) y[i] = view(rows[i], dtype, n, WIDTH);
    CHECK(te_cpu_route_rows(&cuda.exec, r, &y[0], &x) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_rows(&cuda.exec, &plan, r, &y[1], &x));
    CHECK_MSG(memcmp(rows[0], rows[1], sizeof rows[0]) == 0, "rows of %s", te_dtype_name(dtype));
    for (int i = 0; i < 2; i++) back[i] = view(made[i], dtype, TOKENS, WIDTH);
    CHECK(te_cpu_route_tokens(&cuda.exec, r, &back[0], &y[0]) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_tokens(&cuda.exec, &plan, r, &back[1], &y[0]));
    CHECK_MSG(memcmp(made[0], made[1], (size_t)(TOKENS * WIDTH) * te_dtype_size(dtype)) == 0, "tokens of %s",
              te_dtype_name(dtype));
    for (int i = 0; i < 2; i++) w[i] = view(made[i], wide, r->tokens, r->experts);
    CHECK(te_cpu_route_weights(&cuda.exec, r, &w[0], &y[0], &x) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_weights(&cuda.exec, &plan, r, &w[1], &y[0], &x));
    CHECK_MSG(near(made[0], made[1], wide, r->tokens * r->experts, 1e-4), "weights by %s", te_dtype_name(dtype));
}

static void check_routes(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16, TE_F64};
    for (int i = 0; i < 8; i++) {
        bool      masked = i % 2 == 0;
        int64_t   n = i < 4 ? 120 : 60;
        te_routes r = check_maps(masked, i % 3 + 1, n);
        if (masked && i % 4 == 0) {
            for (int e = 0; e < EXPERTS; e++) shift[e] = e;
            r.shift = shift;
            n += EXPERTS;
        }
        r.weights.data = i % 3 ? weights : NULL;
        r.gates = i % 3 == 2;
        check_rows(&r, dtypes[i % 4], n);
    }
    te_routes r = check_maps(true, 0, 120);
    te_view   y = view(rows[0], TE_F32, 120, WIDTH), x = view(tokens, TE_F32, TOKENS, WIDTH);
    map[0][1] = 120;
    map[0][2 * EXPERTS] = 2;
    CHECK(te_cpu_route_rows(&cuda.exec, &r, &y, &x) == TE_ERROR_ARGUMENT);
    CHECK(te_cuda_plan_route_rows(&cuda.exec, &plan, &r, &y, &x) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, "120"));
}

/* Maps of `n` tokens: masks with so many experts of which one in `rare` is marked, or ids below `rare`. */
static void check_map(bool masked, int64_t n, int64_t columns, int64_t rare, int64_t limit)
{
    int64_t  all = n * columns, entries = masked ? n * (2 * columns + 1) : all;
    uint8_t *marks = test_scratch(&cuda.exec, (size_t)all);
    int32_t *found = test_scratch(&cuda.exec, (size_t)(2 * entries) * sizeof *found), *at = found + entries;
    int32_t *number = test_scratch(&cuda.exec, (size_t)(2 * columns) * sizeof *number);
    int32_t *wanted = test_scratch(&cuda.exec, (size_t)all * sizeof *wanted);
    for (int64_t i = 0; i < all; i++) {
        wanted[i] = (int32_t)(test_random(&seed) % (uint64_t)rare);
        marks[i] = wanted[i] == 0;
    }
    te_view routing = masked ? view(marks, TE_BOOL, n, columns) : view(wanted, TE_I32, n, columns);
    te_view counted[2] = {{0}, {0}}, to[2] = {line(found, entries), line(at, entries)};
    for (int i = 0; i < 2 && masked; i++) {
        to[i] = view(i ? at : found, TE_I32, n, 2 * columns + 1);
        counted[i] = line(number + i * columns, columns);
    }
    CHECK(te_cpu_route_map(&cuda.exec, &to[0], &counted[0], &routing, limit) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_map(&cuda.exec, &plan, &to[1], &counted[1], &routing, limit));
    CHECK_MSG(entries == 0 || memcmp(found, at, (size_t)entries * sizeof *at) == 0, "map of %lld x %lld, one in %lld",
              (long long)n, (long long)columns, (long long)rare);
    CHECK(!masked || memcmp(number, number + columns, (size_t)columns * sizeof *number) == 0);
    free(marks), free(found), free(number), free(wanted);
}

static void check_all_maps(void)
{
    static const int64_t sizes[] = {0, 1, 15, 16, 17, 63, 64, 65, 200};
    for (int i = 0; i < 9; i++) {
        check_map(true, sizes[i], 8, 3, 70);
        check_map(true, sizes[i], 33, 1, INT32_MAX);
        check_map(false, sizes[i], 3, 7, 100);
    }
    check_map(true, 70, 300, 20, 1000);             /* more experts than threads */
    check_map(true, 64 * 256 + 1, 4, 2, INT32_MAX); /* longer tiles */
    check_map(false, 683, 3, 1, INT32_MAX);         /* just more than a tile of a sort, all ids alike */
    check_map(false, 683, 3, 600, INT32_MAX);       /* two digits of three */
    check_map(false, 683, 3, 1 << 20, INT32_MAX);
    check_map(false, 66000, 8, 60, INT32_MAX); /* several tiles a block */
    for (int i = 0; i < 8; i++) {
        int64_t n = (int64_t)(test_random(&seed) % 900), columns = 1 + (int64_t)(test_random(&seed) % 40);
        check_map(i % 2, n, columns, 1 + (int64_t)(test_random(&seed) % 50), (int64_t)(test_random(&seed) % 5000));
    }
    int64_t  id = 1 << 20;
    int32_t  to;
    te_view  routing = view(&id, TE_I64, 1, 1), map_view = line(&to, 1), none = {0};
    CHECK(te_cuda_plan_route_map(&cuda.exec, &plan, &map_view, &none, &routing, 1) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, "1048576"));
}

/* kind: 0 any scores, 1 few different ones, 2 all alike, 3 all NaN */
static void check_choosing(int64_t k, int64_t groups, int64_t best, int columns, int kind)
{
    enum { ROWS = 40, MOST_COLUMNS = 320 };
    static float   scores[ROWS * MOST_COLUMNS];
    static uint8_t chosen[2][ROWS * MOST_COLUMNS];
    te_view        s = view(scores, TE_F32, ROWS, columns), to[2];
    const float    special[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1, 1};
    for (int i = 0; i < ROWS * columns; i++) {
        scores[i] = test_random(&seed) % 4 ? (float)test_uniform(&seed, -2, 2) : special[test_random(&seed) % 7];
        if (kind == 1) scores[i] = special[2 + test_random(&seed) % 4];
        if (kind >= 2) scores[i] = kind == 2 ? 0.5f : NAN;
    }
    for (int i = 0; i < 2; i++) to[i] = view(chosen[i], TE_BOOL, ROWS, columns);
    CHECK(te_cpu_route_choose(&cuda.exec, &to[0], &s, k, groups, best) == TE_OK);
    RUN_PLAN(te_cuda_plan_route_choose(&cuda.exec, &plan, &to[1], &s, k, groups, best));
    CHECK_MSG(memcmp(chosen[0], chosen[1], (size_t)(ROWS * columns)) == 0,
              "%d of %d experts in %d of %d groups, kind %d", (int)k, columns, (int)best, (int)groups, kind);
    for (int t = 0; t < ROWS; t++) {
        int64_t sum = 0;
        for (int e = 0; e < columns; e++) sum += chosen[0][t * columns + e];
        CHECK(sum == k);
    }
}

#ifdef TE_ISA_HAS_X86
/* Every length of a row, with what the instruction sets have in common. */
static void check_loops(const te_route_rows *a, const te_route_rows *b)
{
    const te_route_loops *loops[2][2] = {{&a->f32, &a->bf16}, {&b->f32, &b->bf16}};
    static const te_dtype dtypes[] = {TE_F32, TE_BF16};
    for (int d = 0; d < 2; d++) {
        fill(rows[0], dtypes[d], 3 * 200);
        fill(rows[1], dtypes[d], 3 * 200);
        for (int64_t n = 0; n <= 200; n++) {
            const void  *terms[3] = {rows[0], rows[1], rows[0] + 50};
            const double by[3] = {0.3, -1.7, 1};
            for (int i = 0; i < 2; i++) {
                memset(made[i], 0x33, 300 * sizeof(double));
                loops[i][d]->sum(made[i], terms, by, 3, n);
                loops[i][d]->scale(made[i] + 250, rows[0], 0.7, n < 40 ? n : 40);
            }
            CHECK(memcmp(made[0], made[1], 300 * sizeof(double)) == 0);
            CHECK(loops[0][d]->dot(rows[0], rows[1], n) == loops[1][d]->dot(rows[0], rows[1], n));
        }
    }
}
#endif

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(2), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_routes();
    check_all_maps();
    for (int kind = 0; kind < 4; kind++) {
        check_choosing(3, 1, 1, 24, kind);
        check_choosing(24, 1, 1, 24, kind);
        check_choosing(0, 1, 1, 33, kind);
        check_choosing(1, 1, 1, 1, kind);
        check_choosing(6, 4, 2, 24, kind);
        check_choosing(4, 8, 4, 24, kind);
        check_choosing(8, 8, 4, 256, kind);
        check_choosing(7, 1, 1, 320, kind);
        check_choosing(40, 40, 40, 80, kind);
        for (int i = 0; i < 6; i++) {
            int64_t groups = 1 + (int64_t)(test_random(&seed) % 9), size = 1 + (int64_t)(test_random(&seed) % 35);
            int64_t best = 1 + (int64_t)(test_random(&seed) % (uint64_t)groups);
            int64_t counted = (int64_t)(test_random(&seed) % (uint64_t)(size < 5 ? size + 1 : 5));
            check_choosing(best * counted, groups, best, (int)(groups * size), kind);
        }
    }
#ifdef TE_ISA_HAS_X86
    te_cpu_isa isa = te_cpu(&cuda.exec)->isa;
    if (isa >= TE_CPU_AVX2) check_loops(&te_route_rows_portable, &te_route_rows_avx2);
    if (isa >= TE_CPU_AVX512) check_loops(&te_route_rows_portable, &te_route_rows_avx512);
#endif
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
