/* test_gemm.c - the CPU's matrix product against a float64 reference: hostile shapes and strides, every combination of
 * types, epilogues, NaN and infinity, kept copies of operands, and the same bits from one thread and from two. */
#include "gemm_products.h"
#include "kernels/cpu/gemm_cache.h"

static void test_random_products(void)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 64, 65, 97, 130};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (int round = 0; round < 700; round++) {
        int64_t batch[3] = {random_int(1, 3), random_int(0, 8) ? random_int(1, 4) : 0, random_int(1, 2)};
        int batch_dims = random_int(0, 1) ? 0 : (int)random_int(1, 3);
        int64_t limit = batch_dims ? 12 : SIZES - 1;
        product p = make(type_pairs[round % TYPE_PAIRS], sizes[random_int(0, limit)], sizes[random_int(0, limit)],
                         sizes[random_int(0, limit)], batch_dims, batch);
        add_epilogue(&p);
        run_all(&p);
        release(&p);
    }
}

/* Several slices and units of the blocked kernel, shared by threads: complete tiles as in a
 * model, and incomplete ones. */
static void test_large_products(void)
{
    static const int64_t shapes[][3] = {{257, 70, 300}, {33, 500, 129}, {5, 17, 9000}, {300, 1, 400}, {1, 700, 600},
                                        {9, 1500, 1500}, {20, 60, 4200}, {64, 192, 768}, {600, 96, 64},
                                        {131, 337, 514}, {65, 128, 768}, {128, 512, 96}, {528, 40, 1056},
                                        {600, 5, 500}, {530, 2, 531}, {40, 8, 90}, {530, 110, 1100},
                                        {528, 130, 320}, {208, 300, 128}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int t = 0; t < TYPE_PAIRS; t++) {
            product p = make(type_pairs[t], shapes[i][0], shapes[i][1], shapes[i][2], 0, NULL);
            if (t % 2) add_epilogue(&p);
            run_all(&p);
            release(&p);
        }
}

/* An a whose steps of k are pages apart, and odd in number, with more lines than are packed at a time. */
static void test_steps_apart(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++)
        for (int64_t k = 69; k <= 420; k += 351) {
            product p = make(type_pairs[t], 1100, 59, k, 0, NULL);
            free(p.a.base), free(p.b.base);
            p.a = place(&p.gemm.a, COLUMNS, false);
            p.b = place(&p.gemm.b, k % 2 ? COLUMNS : ROWS, false);
            expectation *expected = expect(&p.gemm);
            run_and_check(&p, expected, "blocked");
            free(expected);
            release(&p);
        }
}

static void test_small_products(void)
{
    static const int64_t shapes[][3] = {{4, 4, 4}, {3, 7, 5}, {9, 33, 6}, {1, 40, 17}, {20, 18, 30}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int t = 0; t < TYPE_PAIRS; t++) {
            if (type_pairs[t].out == TE_F16) continue; /* some of so many sums are too near 0 for its precision */
            product p = make(type_pairs[t], shapes[i][0], shapes[i][1], shapes[i][2], 2, (int64_t[2]){101, 3});
            if (t % 3 == 0) add_epilogue(&p);
            run_all(&p);
            release(&p);
        }
}

/* However many threads share c, the units of our own kernel cover it once, and its bits are those of one thread. */
static void test_many_threads(void)
{
    static const int64_t shapes[][3] = {{65, 128, 300}, {256, 512, 70}, {500, 130, 128}, {40, 900, 64},
                                        {8, 2100, 129}, {528, 400, 320}};
    int usual = execs[1].threads;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int threads = 3; threads <= 17; threads += 2) {
            type_pair types = type_pairs[(i + (size_t)threads / 2) % 3];
            product p = make(types, shapes[i][0], shapes[i][1], shapes[i][2], 0, NULL);
            p.gemm.beta = threads % 4 == 1;
            expectation *expected = expect(&p.gemm);
            execs[1].threads = threads;
            CHECK(run_and_check(&p, expected, "blocked"));
            free(expected);
            release(&p);
        }
    execs[1].threads = usual;
}

/* Products of a training step, in pieces that are enough for many threads: a layer forward, both of its gradients. */
static void test_pieces_for_many_threads(void)
{
    static const struct {
        int64_t m, n, k;
        layout  a, b;
    } cases[] = {{640, 128, 300, ROWS, ROWS},    {768, 128, 130, ROWS, COLUMNS},  {320, 136, 700, COLUMNS, ROWS},
                 {150, 900, 260, COLUMNS, ROWS}, {1100, 96, 260, ROWS, COLUMNS}, {160, 512, 400, COLUMNS, ROWS},
                 {1, 770, 900, ROWS, COLUMNS},   {2, 510, 1100, ROWS, COLUMNS}};
    static const int threads[] = {3, 5, 8, 16, 64};
    int              usual = execs[1].threads;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        product p = make(type_pairs[0], cases[i].m, cases[i].n, cases[i].k, 0, NULL);
        free(p.a.base);
        free(p.b.base);
        p.a = place(&p.gemm.a, cases[i].a, false);
        p.b = place(&p.gemm.b, cases[i].b, false);
        p.gemm.beta = i % 2;
        expectation *expected = expect(&p.gemm);
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            execs[1].threads = threads[t];
            CHECK(run_and_check(&p, expected, NULL));
            (void)run_and_check(&p, expected, "onednn");
        }
        free(expected);
        release(&p);
    }
    execs[1].threads = usual;
}

/* --- particular behaviour ----------------------------------------------------------------------------------------- */

static void test_not_finite(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++) {
        product p = make(type_pairs[t], 40, 50, 33, 0, NULL);
        te_store_f64(p.gemm.a.data, p.gemm.a.dtype, offset_of(&p.gemm.a, 0, 3, 5), NAN);
        te_store_f64(p.gemm.a.data, p.gemm.a.dtype, offset_of(&p.gemm.a, 0, 7, 5), INFINITY);
        te_store_f64(p.gemm.b.data, p.gemm.b.dtype, offset_of(&p.gemm.b, 0, 2, 49), -INFINITY);
        te_store_f64(p.gemm.b.data, p.gemm.b.dtype, offset_of(&p.gemm.b, 0, 5, 4), 0);
        run_all(&p);
        release(&p);
    }
}

/* beta = 0 does not read c: what is there, NaN included, is gone. */
static void test_result_not_read(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++) {
        product p = make(type_pairs[t], 70, 60, 80, 0, NULL);
        for (size_t i = 0; i < p.c.bytes / te_dtype_size(p.gemm.c.dtype); i++)
            te_store_f64(p.c.base, p.gemm.c.dtype, i, NAN);
        run_all(&p);
        release(&p);
    }
}

static void test_errors(void)
{
    te_exec *exec = &execs[0];
    product p = make(type_pairs[0], 4, 5, 6, 0, NULL);
    te_gemm g = p.gemm;
    g.b.shape[0] = 7;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(exec->message, "{4, 6}") && strstr(exec->message, "{7, 5}"), "%s", exec->message);
    g = p.gemm;
    g.beta = 0.5f;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    g = p.gemm;
    g.b.dtype = TE_BF16;
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(exec->message, "bfloat16"), "%s", exec->message);
    g = p.gemm;
    g.bias = (te_view){.data = p.a.base, .dtype = TE_F32, .ndim = 1, .shape = {4}, .stride = {1}};
    CHECK(te_cpu_gemm(exec, &g) == TE_ERROR_ARGUMENT);
    release(&p);
}

/* --- kept copies
 * ----------------------------------------------------------------------------------------------------------- */

static void check_product(product *p, const char *what)
{
    expectation *expected = expect(&p->gemm);
    CHECK(te_cpu_gemm(&execs[1], &p->gemm) == TE_OK);
    compare(&p->gemm, expected, (char *)p->gemm.c.data, what);
    free(expected);
}

/* A weight keeps its key while its contents stay; the copy made on the way gives the bits that no copy gives. */
static void test_keys(void)
{
    for (int t = 0; t < TYPE_PAIRS; t++)
        for (int64_t m = 3; m < 100; m += 40) {
            product p = make(type_pairs[t], m, 200, 150, 0, NULL);
            CHECK(te_cpu_gemm(&execs[1], &p.gemm) == TE_OK);
            char *first = copy_of(&p.gemm.c, &p.c);
            p.gemm.b_key = (uint64_t)t << 20 | (uint64_t)m << 40 | 7;
            for (int repeat = 0; repeat < 4; repeat++) {
                check_product(&p, "same key");
                CHECK_MSG(memcmp(first - ((char *)p.gemm.c.data - p.c.base), p.c.base, p.c.bytes) == 0,
                          "a kept copy changes bits: m=%lld %s", (long long)m, te_dtype_name(p.gemm.a.dtype));
            }
            for (int change = 0; change < 3; change++) {
                for (size_t i = 0; i < p.b.bytes / te_dtype_size(p.gemm.b.dtype); i++)
                    te_store_f64(p.b.base, p.gemm.b.dtype, i, test_uniform(&seed, -1, 1));
                p.gemm.b_key++;
                for (int repeat = 0; repeat < 3; repeat++) check_product(&p, "new key");
            }
            free(first - ((char *)p.gemm.c.data - p.c.base));
            release(&p);
        }
}

/* Counts what is allocated and fails on demand. */
typedef struct counting_mem {
    size_t bytes;
    int    until_failure; /* negative: never */
} counting_mem;

static void *counting_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    counting_mem *count = user;
    if (new_size && count->until_failure >= 0 && count->until_failure-- == 0) return NULL;
    void *p = te_mem_libc.realloc(NULL, ptr, old_size, new_size);
    if (p || new_size == 0) count->bytes += new_size - (ptr ? old_size : 0);
    return p;
}

static const void *look_up(te_gemm_cache *cache, uint64_t key, size_t bytes, void **room)
{
    te_gemm_packed_id id = {.key = key, .form = {1, 2, 3}};
    return te_gemm_cache_find(cache, &id, bytes, room);
}

static void test_cache(void)
{
    enum { MIB = 1 << 20 };
    counting_mem count = {.until_failure = -1};
    te_mem mem = {counting_realloc, &count};
    te_gemm_cache *cache = te_gemm_cache_new(&mem);
    void *room;
    CHECK(!look_up(cache, 1, 100, &room) && !room); /* first sight */
    CHECK(!look_up(cache, 1, 100, &room) && room);
    CHECK((uintptr_t)room % 64 == 0);
    void *kept = room;
    CHECK(look_up(cache, 1, 100, &room) == kept && !room);
    CHECK(!look_up(cache, 2, 100, &room) && !room); /* another key, not this copy */

    for (uint64_t key = 10; key < 20; key++) look_up(cache, key, 64 * MIB, &room), look_up(cache, key, 64 * MIB, &room);
    CHECK(te_gemm_cache_bytes(cache) > 64 * MIB && te_gemm_cache_bytes(cache) <= 256 * MIB);
    CHECK(!look_up(cache, 19, 64 * MIB, &room) && !room);                /* no room, and those in use stay */
    for (int i = 0; i < 3000; i++) look_up(cache, 1, 100, &room);
    CHECK(!look_up(cache, 30, 64 * MIB, &room) && !room);
    CHECK(!look_up(cache, 30, 64 * MIB, &room) && room);                 /* the stale ones have made room */
    CHECK(te_gemm_cache_bytes(cache) == 64 * MIB + 100);

    for (uint64_t key = 1000; key < 3000; key++) look_up(cache, key, 8, &room); /* more keys than entries */
    count.until_failure = 0;
    look_up(cache, 31, 100, &room);
    CHECK(!look_up(cache, 31, 100, &room) && !room); /* no memory: no copy */
    te_gemm_cache_free(cache);
    CHECK(count.bytes == 0);
}

/* Every allocation of a session fails once: the product is right or says that memory is exhausted, and nothing leaks.
 */
static void check_memory_failures(int64_t m, int64_t n, int64_t k)
{
    product p = make((type_pair){TE_F32, TE_F32}, m, n, k, 0, NULL);
    free(p.b.base), free(p.c.base);
    p.b = place(&p.gemm.b, COLUMNS, false);
    p.c = place(&p.gemm.c, ROWS, false);
    p.gemm.b_key = 99;
    expectation *expected = expect(&p.gemm);
    for (int fail_at = 0; fail_at < 12; fail_at++) {
        counting_mem count = {.until_failure = -1};
        te_mem mem = {counting_realloc, &count};
        te_exec exec = {.backend = &te_backend_cpu, .mem = &mem, .threads = 1, .scratch = test_scratch,
                        .scratch_free = test_scratch_free};
        CHECK(te_backend_cpu.device_open(&exec, 0) == TE_OK);
        count.until_failure = fail_at;
        for (int repeat = 0; repeat < 3; repeat++) {
            te_status status = te_cpu_gemm(&exec, &p.gemm);
            CHECK_MSG(status == TE_OK || status == TE_ERROR_MEMORY, "allocation %d: status %d", fail_at, status);
            if (status == TE_OK) compare(&p.gemm, expected, (char *)p.gemm.c.data, "after a failed allocation");
        }
        count.until_failure = -1;
        test_exec_close(&exec);
        CHECK_MSG(count.bytes == 0, "allocation %d: %zu bytes leaked", fail_at, count.bytes);
    }
    free(expected);
    release(&p);
}

static void test_memory_failures(void)
{
    check_memory_failures(90, 200, 150);
    check_memory_failures(64, 300, 600); /* rows as columns */
}

/* Implementations are asked in order, and each that declines says why. */
static void test_choice(void)
{
    const char *reasons[TE_GEMM_IMPLS] = {0};
    te_gemm_problem problem;
    product p = make((type_pair){TE_F64, TE_F64}, 200, 200, 200, 0, NULL);
    CHECK(te_gemm_problem_make(&execs[0], &p.gemm, &problem) == TE_OK);
    const te_gemm_impl *impl = te_gemm_choose(&execs[0], &problem, reasons);
    CHECK_MSG(strcmp(impl->name, "blocked") == 0, "%s", impl->name);
    for (int i = 0; te_gemm_impls + i < impl; i++)
        CHECK_MSG(reasons[i] && reasons[i][0], "%s gives no reason", te_gemm_impls[i].name);
    release(&p);

    p = make((type_pair){TE_BF16, TE_BF16}, 160, 128, 768, 0, NULL);
    CHECK(te_gemm_problem_make(&execs[0], &p.gemm, &problem) == TE_OK);
    impl = te_gemm_choose(&execs[0], &problem, reasons);
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    bool ours = state->bf16_pairs, here = true;
#ifndef TE_WITH_ONEDNN
    here = false; /* without the library there is nothing to prefer it to */
#endif
    CHECK_MSG((strcmp(impl->name, "own") == 0) == (ours && here), "%s: %s", impl->name, reasons[4]);
    release(&p);
}

static void fill_with_nan(const block *memory, te_dtype dtype)
{
    for (size_t i = 0; i < memory->bytes / te_dtype_size(dtype); i++) te_store_f64(memory->base, dtype, i, (double)NAN);
}

/* Many rows of few columns, in units of two threads; NaN stands between lines and behind an odd k. */
static void test_narrow_products(void)
{
    for (int i = 0; i < 60 * TYPE_PAIRS; i++) {
        int64_t m = i % 3 ? random_int(30, 70) : random_int(1000, 3100), k = random_int(0, i % 3 ? 70 : 9);
        product p = make(type_pairs[i % TYPE_PAIRS], m, random_int(1, 17), k, 0, NULL);
        te_gemm *g = &p.gemm;
        if (i % 2) {
            product apart = p;
            p.a = place(&g->a, ROWS, false);
            fill_with_nan(&p.a, g->a.dtype);
            for (int64_t r = 0; r < g->a.shape[0]; r++)
                for (int64_t w = 0; w < g->a.shape[1]; w++)
                    te_store_f64(g->a.data, g->a.dtype, offset_of(&g->a, 0, r, w), test_uniform(&seed, -1, 1));
            free(apart.a.base);
        }
        if (i % 4 == 3) add_epilogue(&p);
        if (i % 8 == 5) g->beta = 1;
        run_all(&p);
        release(&p);
    }
}

/* A weight by few rows: the same bits without its packed copy and with it, for any number of threads. */
static void test_kept_weights(void)
{
    static const int64_t sizes[][3] = {{9, 200, 300}, {13, 97, 401}, {32, 768, 256}, {47, 130, 129}, {64, 300, 1000}};
    for (int i = 0; i < 10; i++) {
        const int64_t *size = sizes[i / 2];
        type_pair types = {i % 2 ? TE_BF16 : TE_F32, i % 2 ? TE_BF16 : TE_F32};
        product p = make(types, size[0], size[1], size[2], 0, NULL);
        free(p.a.base), free(p.b.base), free(p.c.base);
        p.a = place(&p.gemm.a, ROWS, false), p.b = place(&p.gemm.b, COLUMNS, false);
        p.c = place(&p.gemm.c, ROWS, false);
        expectation *expected = expect(&p.gemm);
        char *first = NULL;
        p.gemm.b_key = 7000 + i;
        for (int run = 0; run < 8; run++) {
            te_exec *exec = &execs[run % 2];
            const char *impl = run < 4 ? NULL : "blocked";
            te_status status = impl ? te_cpu_gemm_with(exec, impl, &p.gemm) : te_cpu_gemm(exec, &p.gemm);
            CHECK(status == TE_OK);
            compare(&p.gemm, expected, NULL, "kept weight");
            if (run % 4 == 0) {
                if (first) free(first - ((char *)p.gemm.c.data - p.c.base));
                first = copy_of(&p.gemm.c, &p.c);
            }
            CHECK(memcmp(first - ((char *)p.gemm.c.data - p.c.base), p.c.base, p.c.bytes) == 0);
        }
        free(first - ((char *)p.gemm.c.data - p.c.base));
        free(expected);
        release(&p);
    }
}

int main(void)
{
    execs[0] = open_exec(1);
    execs[1] = open_exec(2);
    test_random_products();
    test_large_products();
    test_steps_apart();
    test_small_products();
    test_many_threads();
    test_pieces_for_many_threads();
    test_not_finite();
    test_result_not_read();
    test_errors();
    test_keys();
    test_narrow_products();
    test_kept_weights();
    test_cache();
    test_memory_failures();
    test_choice();
    CHECK(row_runs > 0);
#ifdef TEST_MATRIX_UNIT
    CHECK(matrix_entries > 0 || !te_gemm_state_get(&execs[0])->bf16_pairs);
#endif
#ifdef TE_WITH_ONEDNN
    CHECK(onednn_runs > 0 || te_cpu(&execs[0])->isa == TE_CPU_PORTABLE);
#endif
    test_exec_close(&execs[0]);
    test_exec_close(&execs[1]);
    return TEST_END();
}
