/* test_gemm_ways.c - the ways that some of the CPU's matrix products take: results past the caches, operands that tiles
 * pack while they multiply, packed rows that units share, panels that stay in a cache, few rows. */
#include "gemm_products.h"
#include "kernels/cpu/gemm_plan.h"

/* Gives c rows of `pitch` elements, each a whole number of cache lines. */
static void place_in_lines(product *p, int64_t rows, int64_t pitch)
{
    enum { LINE = 64 };
    free(p->c.base);
    p->c.bytes = (size_t)(rows * pitch) * te_dtype_size(p->gemm.c.dtype) + LINE;
    p->c.base = malloc(p->c.bytes);
    if (!p->c.base) abort();
    memset(p->c.base, 0xff, p->c.bytes);
    p->gemm.c.data = (char *)(((uintptr_t)p->c.base + LINE - 1) & ~(uintptr_t)(LINE - 1));
    p->gemm.c.stride[0] = pitch, p->gemm.c.stride[1] = 1;
}

/* Whether large results of that type of operands are written past the caches. */
static bool streams_from(te_dtype in)
{
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    return in == TE_F32 ? state->f32.streams : state->bf16_pairs && (state->matrix_unit || state->bf16.streams);
}

/* A result of whole cache lines, too large for the caches: products of bfloat16 pairs, and all of machines with a
 * matrix unit, write it past them, and sum up its squares. */
static void test_streamed_result(void)
{
    enum { N = 640 };
    static const int64_t rows[] = {1050, 1050, 1056, 1056, 2112, 2112}, steps[] = {32, 32, 69, 69, 72, 72};
    for (int run = 0; run < 6; run++) {
        int64_t M = rows[run], K = steps[run];
        product p = make((type_pair){run % 2 ? TE_F32 : TE_BF16, TE_F32}, M, N, K, 0, NULL);
        place_in_lines(&p, M, N);
        squares_found = 0;
        run_all(&p);
        expectation *expected = expect(&p.gemm);
        int found = squares_found;
        bool streams = streams_from(p.gemm.a.dtype);
        int  group = te_gemm_state_get(&execs[0])->matrix_unit ? 16 : 1; /* which does so in whole registers */
        CHECK_MSG(found > 0 || !streams || M % group, "%d rows: no sum of squares", (int)M);
        run_in_slices(&p, expected, 0.6 * (double)(M * N * K));
        bool halves = M > 2000 && streams && run % 2 == 0;
        CHECK_MSG(squares_found > found || !halves, "%d rows in two slices: no sum of squares", (int)M);
        free(expected);
        release(&p);
    }
}

/* The same of bfloat16, with a last panel of half the width, and with rows that fill no register. */
static void test_streamed_rounded(void)
{
    enum { PITCH = 1024 };
    static const int64_t rows[] = {2112, 2100}, cols[] = {1008, 1024}, steps[] = {37, 32};
    for (int run = 0; run < 2; run++) {
        product p = make((type_pair){TE_BF16, TE_BF16}, rows[run], cols[run], steps[run], 0, NULL);
        place_in_lines(&p, rows[run], PITCH);
        run_all(&p);
        release(&p);
    }
}

/* Units side by side share packed rows of a, but calls do not: an a that changed where it lies is read again. */
static void test_operand_changes(void)
{
    enum { M = 9, N = 3300, K = 300 };
    for (int run = 0; run < 4; run++) {
        type_pair types = {run % 2 ? TE_BF16 : TE_F32, TE_F32};
        product p = make(types, M, N, K, 0, NULL);
        size_t size = te_dtype_size(types.in);
        float *c = malloc(2 * sizeof(float[M * N])), *negated = c + M * N;
        if (!c) abort();
        p.gemm.c.data = c, p.gemm.c.stride[0] = N, p.gemm.c.stride[1] = 1;
        CHECK(te_cpu_gemm_with(&execs[run / 2], "blocked", &p.gemm) == TE_OK);
        for (size_t at = size - 1; at < p.a.bytes; at += size) p.a.base[at] ^= (char)0x80; /* signs */
        p.gemm.c.data = negated;
        CHECK(te_cpu_gemm_with(&execs[run / 2], "blocked", &p.gemm) == TE_OK);
        int same = 0;
        for (int i = 0; i < M * N; i++) same += negated[i] == -c[i];
        CHECK_MSG(same == M * N, "%d of %d numbers of -a b are those of a b, negated", same, M * N);
        free(c);
        release(&p);
    }
}

/* Whether two threads would each hold all of b. */
static bool is_held(const te_gemm *g)
{
    te_gemm_problem problem;
    te_gemm_plan    plan;
    CHECK(te_gemm_problem_make(&execs[1], g, &problem) == TE_OK);
    te_gemm_plan_make(&execs[1], te_gemm_state_get(&execs[1]), &problem, &plan);
    return plan.held;
}

/* A b that the second-level cache holds, by rows that tiles of a matrix unit read where they lie, or of float32 packs
 * some at a time: of one slice and of several, with edges of any width, every end, and a b that is another one in the
 * next call. */
static void test_held(void)
{
    static const struct {
        int64_t m, n, k;
        bool    held, floats;
    } cases[] = {{528, 70, 1056, true, true}, {530, 130, 161, true, true}, {1000, 384, 384, true, true},
                 {777, 33, 544, true, true}, {1056, 257, 1050, true, true}, {500, 800, 384, true, true},
                 {600, 700, 1203, true, true}, {528, 70, 1056, true, false},
                 {272, 130, 160, true, false}, {784, 33, 544, true, false}, {528, 40, 1504, true, false},
                 {1056, 257, 160, true, false}, {528, 70, 1050, false, false}, {536, 70, 1056, false, false},
                 {528, 70, 128, false, false}, {1056, 600, 1056, false, false}};
    bool unit = te_gemm_state_get(&execs[0])->matrix_unit != NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int end = 0; end < 4; end++) {
            type_pair types = {cases[i].floats ? TE_F32 : TE_BF16, end % 2 ? TE_F32 : TE_BF16};
            size_t    size = te_dtype_size(types.in);
            product p = make(types, cases[i].m, cases[i].n, cases[i].k, 0, NULL);
            free(p.a.base), free(p.c.base);
            p.a = place(&p.gemm.a, ROWS, false);
            p.c = place(&p.gemm.c, ROWS, false);
            if (end >= 2) add_epilogue(&p);
            CHECK_MSG(is_held(&p.gemm) == (unit && cases[i].held), "case %zu", i);
            for (int call = 0; call < 2 && cases[i].held && (call == 0 || end == 0); call++) {
                expectation *expected = expect(&p.gemm);
                run_and_check(&p, expected, "blocked");
                for (size_t at = size - 1; at < p.b.bytes; at += size) p.b.base[at] ^= (char)0x80; /* signs */
                free(expected);
            }
            release(&p);
        }
}

/* Each row of p is computed alone, to the bits that it has among all, as p.c holds them. */
static void check_rows_alone(product *p, const char *impl)
{
    char  *all = copy_of(&p->gemm.c, &p->c);
    size_t size = te_dtype_size(p->gemm.c.dtype), skip = (size_t)((char *)p->gemm.c.data - p->c.base);
    for (int64_t i = 0; i < p->gemm.a.shape[0]; i++) {
        te_gemm one = p->gemm;
        one.a.shape[0] = one.c.shape[0] = 1;
        one.a.data = (char *)one.a.data + i * one.a.stride[0] * (int64_t)te_dtype_size(one.a.dtype);
        one.c.data = (char *)one.c.data + i * one.c.stride[0] * (int64_t)size;
        CHECK(te_cpu_gemm_with(&execs[0], impl, &one) == TE_OK);
    }
    bool same_bits = memcmp(all - skip, p->c.base, p->c.bytes) == 0;
    CHECK_MSG(same_bits, "%s of %lld have other bits than alone", impl, (long long)p->gemm.a.shape[0]);
    free(all - skip);
}

/* Few rows, as a model's answers token by token: a row has the bits that it has alone. False: `impl` declines. */
static bool check_few_rows(const char *impl, layout of_b, type_pair types, int64_t m, int64_t n, int64_t k)
{
    product p = {.gemm = {.a = view_of(types.in, 2, NULL, m, k), .b = view_of(types.in, 2, NULL, k, n),
                          .c = view_of(types.out, 2, NULL, m, n), .alpha = 1}};
    p.a = place(&p.gemm.a, ROWS, false);
    p.b = place(&p.gemm.b, of_b, false);
    p.c = place(&p.gemm.c, m % 3 ? ROWS : BOTH_STRIDED, false);
    if (m % 2) add_epilogue(&p);
    p.gemm.beta = 0;
    expectation *expected = expect(&p.gemm);
    bool runs = run_and_check(&p, expected, impl);
    if (runs) {
        CHECK(te_cpu_gemm_with(&execs[1], impl, &p.gemm) == TE_OK);
        check_rows_alone(&p, impl);
    }
    free(expected);
    release(&p);
    return runs;
}

static void test_few_rows(void)
{
    static const type_pair types[] = {{TE_F32, TE_F32}, {TE_BF16, TE_BF16}, {TE_BF16, TE_F32}, {TE_F16, TE_F16}};
    for (int m = 1; m <= 8; m += 1 + m / 3) /* 1, 2, 3, 5, 7 */
        for (int t = 0; t < 4; t++) {
            int64_t n = random_int(800, 900), k = random_int(700, 900);
            bool few = m <= 3 || types[t].in == TE_F16;
            bool strided = m % 3 == 0;
            CHECK(check_few_rows("rows", COLUMNS, types[t], m, n, k));
            CHECK(check_few_rows("sweep", ROWS, types[t], m, n, k) == (few || strided));
            few = m <= 2 || types[t].in != TE_BF16;
            n = random_int(32, 180), k = random_int(1, 170);
            CHECK(check_few_rows("sweep", ROWS, types[t], m, n, k) == (few || strided));
        }
    /* more of them, where tiles would have to be packed for longer, and a does not grow too long */
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    bool wide = te_cpu(&execs[0])->isa == TE_CPU_AVX512, floats = wide && state->f32.rate >= 2;
    bool pairs = wide && state->bf16_pairs && !state->matrix_unit;
    for (int t = 0; t < 3; t++) {
        int64_t m = random_int(9, 32), n = random_int(300, 700), k = random_int(300, 700);
        CHECK(check_few_rows("rows", COLUMNS, types[t], m, n, k) == (types[t].in == TE_F32 ? floats : pairs));
        CHECK(!check_few_rows("rows", COLUMNS, types[t], m, random_int(20, 120), random_int(1, 130)));
    }
    /* lines that are gone through in parts: with and without a rest, pages apart, and fewer columns than take turns */
    static const int64_t lengths[] = {1031, 2048, 3585, 4096, 9001};
    for (int i = 0; i < 5; i++)
        for (int t = 0; t < 4; t++) {
            int64_t m = i < 4 ? random_int(4, 8) : random_int(9, 19), n = (2 << 20) / lengths[i] / 2 + i;
            bool    can = m <= 8 || (types[t].in == TE_F32 ? floats : types[t].in == TE_BF16 && pairs);
            CHECK(check_few_rows("rows", COLUMNS, types[t], m, n, lengths[i]) == can);
        }
    CHECK(check_few_rows("rows", COLUMNS, types[0], 49, 2200, 2001) == (floats && !state->f32_in_unit));
    CHECK(check_few_rows("rows", COLUMNS, types[0], 47, 2200, 2001) == floats);
    CHECK(check_few_rows("rows", COLUMNS, types[2], 56, 2100, 4001) == pairs);
    CHECK(!check_few_rows("rows", COLUMNS, types[2], 57, 2100, 4001));
    CHECK(!check_few_rows("rows", COLUMNS, types[0], 49, 1100, 3900));
}

/* A b whose rows lie side by side is packed by the first tiles that meet it, where it is whole vectors wide; it has the
 * bits of one that was packed before. A unit that multiplies float32 does not pack so; vectors do. */
static void check_packed_by_tiles(type_pair types, int64_t m, int64_t n, int64_t k)
{
    const te_gemm_kernel *unit = te_gemm_state_get(&execs[0])->f32_in_unit;
    for (int e = 0; e < 2; e++) te_gemm_state_get(&execs[e])->f32_in_unit = NULL;
    product p = make(types, m, n, k, 0, NULL);
    free(p.b.base), free(p.c.base);
    p.b = place(&p.gemm.b, ROWS, false);
    p.c = place(&p.gemm.c, ROWS, false);
    p.gemm.beta = (float)random_int(0, 1);
    expectation *expected = expect(&p.gemm);
    CHECK(run_and_check(&p, expected, "blocked"));
    size_t skip = (size_t)((char *)p.gemm.c.data - p.c.base);
    char  *before = copy_of(&p.gemm.c, &p.c) - skip;
    CHECK(te_cpu_gemm_with(&execs[1], "blocked", &p.gemm) == TE_OK);
    char   *lay = copy_of(&p.gemm.c, &p.c) - skip;
    te_view rows = p.gemm.b;
    block   turned = place(&p.gemm.b, COLUMNS, false);
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < n; j++)
            te_store_f64(p.gemm.b.data, types.in, offset_of(&p.gemm.b, 0, i, j), value_at(&rows, 0, i, j));
    memcpy(p.c.base, before, p.c.bytes);
    CHECK(te_cpu_gemm_with(&execs[1], "blocked", &p.gemm) == TE_OK);
    CHECK_MSG(memcmp(lay, p.c.base, p.c.bytes) == 0, "%s %lld x %lld x %lld: other bits when b is turned",
              te_dtype_name(types.in), (long long)m, (long long)n, (long long)k);
    for (int e = 0; e < 2; e++) te_gemm_state_get(&execs[e])->f32_in_unit = unit;
    free(expected), free(before), free(lay), free(turned.base);
    release(&p);
}

static void test_packed_by_tiles(void)
{
    static const int64_t shapes[][3] = {{8, 16, 2},     {8, 48, 1},     {9, 32, 70},   {16, 64, 386}, {64, 112, 384},
                                        {65, 144, 770}, {23, 288, 193}, {300, 96, 40}, {7, 48, 64},   {530, 208, 402},
                                        {3, 144, 770},  {5, 96, 1538}, {1, 32, 200}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int t = 0; t < TYPE_PAIRS; t++)
            check_packed_by_tiles(type_pairs[t], shapes[i][0], shapes[i][1], shapes[i][2]);
}

/* Rows of a as columns of panels: bits are those of tiles of vectors that take them as rows. False: it declines. */
static bool check_turned(type_pair types, int64_t m, int64_t n, int64_t k)
{
    te_gemm_state *state = te_gemm_state_get(&execs[0]);
    const te_gemm_kernel *unit = state->f32_in_unit;
    product p = {.gemm = {.a = view_of(types.in, 2, NULL, m, k), .b = view_of(types.in, 2, NULL, k, n),
                          .c = view_of(types.out, 2, NULL, m, n), .alpha = 1}};
    p.a = place(&p.gemm.a, random_int(0, LAYOUT_COUNT - 1), random_int(0, 3) == 0);
    p.b = place(&p.gemm.b, COLUMNS, random_int(0, 1) == 0);
    p.c = place(&p.gemm.c, random_int(0, 2) ? ROWS : BOTH_STRIDED, false);
    if (m % 2) add_epilogue(&p);
    expectation *expected = expect(&p.gemm);
    bool runs = run_and_check(&p, expected, "turned");
    if (runs) {
        size_t skip = (size_t)((char *)p.gemm.c.data - p.c.base);
        char  *before = copy_of(&p.gemm.c, &p.c) - skip;
        CHECK(te_cpu_gemm_with(&execs[0], "turned", &p.gemm) == TE_OK);
        char *turned = copy_of(&p.gemm.c, &p.c) - skip;
        memcpy(p.c.base, before, p.c.bytes);
        state->f32_in_unit = NULL;
        CHECK(te_cpu_gemm_with(&execs[0], "blocked", &p.gemm) == TE_OK);
        state->f32_in_unit = unit;
        CHECK_MSG(memcmp(turned, p.c.base, p.c.bytes) == 0, "%s %lld x %lld x %lld: other bits than in blocks",
                  te_dtype_name(types.in), (long long)m, (long long)n, (long long)k);
        free(before), free(turned);
    }
    free(expected);
    release(&p);
    return runs;
}

static void test_turned(void)
{
    static const type_pair types[] = {{TE_F32, TE_F32}, {TE_BF16, TE_BF16}, {TE_BF16, TE_F32}};
    static const int       rows[] = {48, 61, 63, 64, 78, 80, 96, 110, 112, 128, 144}; /* few lanes of panels are idle */
    const te_gemm_state *state = te_gemm_state_get(&execs[0]);
    bool floats = te_cpu(&execs[0])->isa == TE_CPU_AVX512 && state->f32.rate >= 2;
    bool pairs = floats && state->bf16_pairs && !state->matrix_unit;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int t = 0; t < 3; t++) {
            int64_t n = random_int(256, 330), k = 2 * random_int(256, 300);
            bool lanes = floats && (rows[i] < TE_GEMM_UNIT_ROWS || !state->f32_in_unit);
            CHECK(check_turned(types[t], rows[i], n, k) == (t ? pairs : lanes));
            if (t) CHECK(!check_turned(types[t], rows[i], n, k + 1));
        }
    CHECK(check_turned(types[0], 28, 400, 700) == floats); /* a b that does not stay near */
    CHECK(check_turned(types[0], 24, 1030, 1030) == floats);
    CHECK(check_turned(types[1], 30, 270, 2050) == pairs); /* rows that no first-level cache holds */
    CHECK(!check_turned(types[1], 32, 600, 1022));
    CHECK(!check_turned(types[0], 33, 400, 700));
    CHECK(!check_turned(types[0], 145, 300, 300));
    CHECK(!check_turned(types[0], 144, 300, 2600));
    CHECK(!check_turned(types[0], 64, 255, 600));
    CHECK(!check_turned(types[0], 64, 300, 255));
}

int main(void)
{
    execs[0] = open_exec(1);
    execs[1] = open_exec(2);
    test_streamed_result();
    test_streamed_rounded();
    test_operand_changes();
    test_held();
    test_packed_by_tiles();
    test_few_rows();
    test_turned();
    test_exec_close(&execs[0]);
    test_exec_close(&execs[1]);
    return TEST_END();
}
