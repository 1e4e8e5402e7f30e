/* test_quantize_loops.c - the loops of quantizing that this machine takes against those that every machine has, byte
 * for byte: maxima of blocks, factors, codes of both directions, random bytes, stochastic rounding, the transform,
 * errors of candidates, decoding. Sources hold ordinary values, or any bits at all: infinities, NaNs, subnormal
 * numbers. */
#include "kernels/cpu/quantize_blocks.h"
#include "test.h"

enum { ROWS = 16, COLUMNS = 1111, WIDTH = 1152, N = ROWS * COLUMNS };

static float floats[N], factors[N], found[2][ROWS * WIDTH];
static uint16_t halves[N];
static _Alignas(64) uint8_t bytes[2][ROWS * WIDTH];
static uint64_t state = 0x9e3779b97f4a7c15u;

static const void *source(int dtype) { return dtype == 0 ? (const void *)floats : halves; }

static const void *row(int dtype, int i)
{
    return (const char *)source(dtype) + (size_t)(i * COLUMNS) * (dtype == 0 ? sizeof(float) : sizeof(uint16_t));
}

/* any: of a hundred values, how many are bits drawn at random. */
static void fill(int dtype, int any)
{
    for (int i = 0; i < N; i++) {
        bool wild = test_random(&state) % 100 < (uint64_t)any;
        float x = (float)test_uniform(&state, -8, 8);
        floats[i] = wild ? te_f32_from_bits((uint32_t)test_random(&state)) : x;
        halves[i] = wild ? (uint16_t)test_random(&state) : dtype == 1 ? te_f32_to_bf16(x) : te_f32_to_f16(x);
        factors[i] = ldexpf((float)test_uniform(&state, 0.5, 1), (int)(test_random(&state) % 9) - 4);
    }
}

static void same(const char *what, int dtype, int any, int64_t block, const void *a, const void *b, size_t size)
{
    CHECK_MSG(memcmp(a, b, size) == 0, "%s: dtype %d, %d%% of any bits, blocks of %lld", what, dtype, any,
              (long long)block);
}

static void check_maxima(const te_quantize_blocks *both[2], int dtype, int any)
{
    static const int64_t blocks[] = {16, 32, 48, 128, COLUMNS};
    for (size_t k = 0; k < sizeof blocks / sizeof *blocks; k++) {
        memset(found, 0xa5, sizeof found);
        for (int v = 0; v < 2; v++)
            for (int i = 0; i < ROWS; i++)
                both[v]->of[dtype].amax_along(found[v] + i * WIDTH, row(dtype, i), COLUMNS, blocks[k]);
        same("amax_along", dtype, any, blocks[k], found[0], found[1], sizeof found[0]);
        for (int v = 0; v < 2; v++) both[v]->of[dtype].amax_along(found[v], source(dtype), N, blocks[k]);
        same("amax_along, long", dtype, any, blocks[k], found[0], found[1], sizeof found[0]);
    }
    for (int v = 0; v < 2; v++) both[v]->of[dtype].amax_down(found[v], source(dtype), COLUMNS, ROWS, COLUMNS);
    same("amax_down", dtype, any, ROWS, found[0], found[1], sizeof found[0]);
}

static void check_stochastic(const te_quantize_blocks *both[2], int dtype, int any)
{
    static const int64_t blocks[] = {1, 16, 24, 64, COLUMNS};
    static uint8_t random[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) random[j] = (uint8_t)test_random(&state);
    for (size_t k = 0; k < sizeof blocks / sizeof *blocks; k++) {
        memset(bytes, 0xa5, sizeof bytes);
        for (int v = 0; v < 2; v++)
            for (int i = 0; i < ROWS; i++)
                both[v]->of[dtype].stochastic(bytes[v] + i * WIDTH, row(dtype, i), factors, blocks[k], random, COLUMNS);
        same("stochastic", dtype, any, blocks[k], bytes[0], bytes[1], sizeof bytes[0]);
    }
}

static void check_factors(const te_quantize_blocks *both[2])
{
    enum { MANY = 133 };
    static float amax[MANY], multipliers[2][MANY], stored[2][MANY];
    for (int turn = 0; turn < 600; turn++) {
        te_factor_rule rule = {.scale = (te_scale_kind)(turn % 3), .max = turn % 2 ? 448 : 57344,
                               .epsilon = turn % 7 ? 0 : 0.25f,
                               .overflow = TE_FLT_MAX,
                               .power_of_two = turn % 5 == 0};
        rule.encode = te_two_level_encode(te_f32_from_bits((uint32_t)test_random(&state) & 0x7fffffffu),
                                          turn % 2 ? 448 : 256);
        for (int i = 0; i < MANY; i++) {
            uint32_t bits = (uint32_t)test_random(&state) & 0x7fffffffu, rare = (uint32_t)test_random(&state) % 16;
            amax[i] = rare == 0   ? ldexpf(1, (int)(bits % 277) - 149)
                      : rare == 1 ? 0
                      : rare < 8  ? (float)test_uniform(&state, 0, 8)
                                  : te_f32_from_bits(bits <= 0x7f800000u ? bits : 0x7f800000u);
        }
        if (!(rule.encode <= TE_FLT_MAX)) rule.encode = 1;
        memset(stored, 0xa5, sizeof stored);
        for (int v = 0; v < 2; v++) both[v]->factors(&rule, amax, MANY, stored[v], multipliers[v]);
        same("factors", 0, turn, rule.scale, stored[0], stored[1], sizeof stored[0]);
        same("multipliers", 0, turn, rule.scale, multipliers[0], multipliers[1], sizeof multipliers[0]);
    }
}

/* Of two NaNs a sum keeps either: all become the same one, as all have the same code. */
static void one_nan(int dtype, void *x)
{
    float *wide = x;
    uint16_t *narrow = x;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        if (dtype == 0 && wide[i] != wide[i]) wide[i] = NAN;
        if (dtype != 0 && (narrow[i] & 0x7fff) > (dtype == 1 ? 0x7f80 : 0x7c00)) narrow[i] = 0x7fff;
    }
}

static void check_transform(const te_quantize_blocks *both[2], int dtype, int any)
{
    size_t size = dtype == 0 ? sizeof(float) : sizeof(uint16_t);
    for (int rows = ROWS; rows > 0; rows -= 5) {
        float amax[2];
        for (int v = 0; v < 2; v++) {
            both[v]->of[dtype].transform(found[v], WIDTH, source(dtype), COLUMNS, rows, COLUMNS);
            amax[v] = both[v]->of[dtype].transform_amax(source(dtype), COLUMNS, rows, COLUMNS);
            one_nan(dtype, found[v]);
        }
        for (int i = 0; i < ROWS; i++) {
            const char *a = (const char *)found[0] + (size_t)(i * WIDTH) * size,
                       *b = a + ((char *)found[1] - (char *)found[0]);
            same("transform", dtype, any, rows, a, b, COLUMNS * size);
        }
        same("transform_amax", dtype, any, rows, &amax[0], &amax[1], sizeof amax[0]);
        for (int i = 0; i < ROWS; i++) { /* and that of what was transformed */
            const char *line = (const char *)found[0] + (size_t)(i * WIDTH) * size;
            both[1]->of[dtype].amax_along(found[1] + i, line, COLUMNS, COLUMNS);
        }
        amax[1] = 0;
        for (int i = 0; i < ROWS; i++) amax[1] = te_amax(amax[1], found[1][i]);
        same("amax of the transformed", dtype, any, rows, &amax[0], &amax[1], sizeof amax[0]);
    }
}

static void check_errors(const te_quantize_blocks *both[2], int any)
{
    for (int turn = 0; turn < 64; turn++) {
        int lines = turn % 4 == 3 ? 7 : 16, n = turn % 8 == 5 ? 11 : 16;
        te_error_rule rule = {.multipliers = factors + turn, .factors = factors + 100 + turn,
                              .amax = 3.1f * (float)(1 + turn),
                              .most = turn % 2 ? 6 * 448.0f : 6 * 256.0f, .squared = turn % 3 == 0};
        float same_factor[16], sums[2][16] = {{0}};
        for (int i = 0; i < 16; i++) same_factor[i] = factors[turn];
        if (turn % 5 == 0) rule.factors = same_factor;
        for (int v = 0; v < 2; v++) both[v]->errors(sums[v], &rule, floats + turn, COLUMNS, lines, n);
        for (int i = 0; i < lines; i++) /* a NaN of either kind is a NaN */
            CHECK_MSG(sums[0][i] == sums[1][i] || (sums[0][i] != sums[0][i] && sums[1][i] != sums[1][i]),
                      "errors, turn %d, %d%% of any bits, line %d: %g, not %g", turn, any, i, (double)sums[0][i],
                      (double)sums[1][i]);
    }
}

static void check_errors_across(const te_quantize_blocks *both[2], int any)
{
    for (int turn = 0; turn < 32; turn++) {
        te_error_rule rules[2];
        float sums[2][2][TE_GROUP];
        for (int k = 0; k < 2; k++)
            rules[k] = (te_error_rule){.multipliers = factors + turn + k, .factors = factors + 100 + turn + k,
                                       .amax = 0.7f * (float)(1 + turn), .most = 6 * 448.0f, .squared = turn % 2};
        int n = turn % 4 == 3 ? 9 : 16;
        for (int v = 0; v < 2; v++) both[v]->errors_across(sums[v], rules, floats + turn, COLUMNS, n);
        for (int i = 0; i < 2 * TE_GROUP; i++) {
            float a = sums[0][i / TE_GROUP][i % TE_GROUP], b = sums[1][i / TE_GROUP][i % TE_GROUP];
            CHECK_MSG(a == b || (a != a && b != b), "errors_across, turn %d, %d%% of any bits, sum %d: %g, not %g",
                      turn, any, i, (double)a, (double)b);
        }
    }
}

static void check_random(const te_quantize_blocks *both[2])
{
    static const te_rng rngs[] = {{.seed = 1}, {.seed = 0x123456789abcdefu, .stream = 0xfedcba9876543210u,
                                                .offset = 0xfffffff0u}, {.seed = 5, .offset = UINT64_MAX - 40}};
    for (size_t r = 0; r < sizeof rngs / sizeof *rngs; r++)
        for (int n = 1; n < 70; n += 4) {
            memset(bytes, 0xa5, sizeof bytes);
            for (int v = 0; v < 2; v++) both[v]->random_along(bytes[v], rngs[r], 0xffffffff9u, n);
            same("random_along", 0, 0, n, bytes[0], bytes[1], sizeof bytes[0]);
            for (int v = 0; v < 2; v++) both[v]->random_down(bytes[v], WIDTH, rngs[r], 77, 0x3fffffffu, n);
            same("random_down", 0, 0, n, bytes[0], bytes[1], sizeof bytes[0]);
        }
}

/* Codes of both directions from one rounding against each by itself. Factors bring what is not infinite near the
 * format's largest value, or far below it, so that codes are subnormal, or 0. `any`: of a hundred values, how many
 * are bits drawn at random. */
static void check_both(const te_quantize_blocks *both[2], int dtype, te_element_kind element, int any)
{
    enum { WIDE = 512, HIGH = 32 };
    static _Alignas(64) uint8_t codes[2][2][HIGH * WIDE];
    static float x[HIGH * WIDE], along[HIGH * WIDE / 32], down[WIDE];
    static uint16_t narrow[HIGH * WIDE];
    const te_quantize_loops *fast = &both[0]->of[dtype], *slow = &both[1]->of[dtype];
    if (!fast->encode_both[element]) return;
    for (int turn = 0; turn < 24; turn++) {
        te_two_ways w = {.x = dtype == 0 ? (void *)x : narrow, .stride = WIDE, .rows = turn % 5 ? HIGH : 7,
                         .n = turn % 3 ? WIDE : WIDE - 48, .block = turn % 2 ? 32 : 128, .along = along, .down = down,
                         .step = WIDE / 32, .codes_stride = {WIDE, WIDE}, .past = {turn % 4 == 0, turn % 4 == 1}};
        int low = turn % 6 == 5 ? 60 : 3; /* powers of two below which the largest value stays */
        for (int i = 0; i < HIGH * WIDE; i++) {
            bool wild = test_random(&state) % 100 < (uint64_t)any;
            x[i] = wild ? te_f32_from_bits((uint32_t)test_random(&state)) : (float)test_uniform(&state, -1, 1);
            if (test_random(&state) % 64 == 0) x[i] = 0.0f * x[i];
            if (!wild && test_random(&state) % 512 == 0) x[i] *= 0x1p-15f;
            if (fabsf(x[i]) > 1 && fabsf(x[i]) <= TE_FLT_MAX) x[i] = 0.25f;
            narrow[i] = te_f32_to_bf16(x[i]);
        }
        for (int i = 0; i < HIGH * WIDE / 32; i++) along[i] = ldexpf(1, 8 - (int)(test_random(&state) % (uint32_t)low));
        for (int j = 0; j < WIDE; j++) down[j] = ldexpf(1, 8 - (int)(test_random(&state) % (uint32_t)low));
        if (turn % 8 == 6) down[5] = 0x1p127f; /* what a block of zeros has */
        for (int i = 0; i < HIGH && turn % 8 == 6; i++) x[i * WIDE + 5] = narrow[i * WIDE + 5] = 0;
        bool tiny = turn == 14 && any == 0;
        if (tiny) x[77] = 0x1p-126f, narrow[77] = te_f32_to_bf16(0x1p-126f);
        if (turn == 23) down[3] = 0x1.8p3f;
        memset(codes, 0xa5, sizeof codes);
        for (int side = 0; side < 2; side++) w.codes[side] = codes[0][side];
        int64_t done = fast->encode_both[element](&w);
        CHECK(done == (turn == 23 ? 0 : w.n - w.n % 64) || (done == 0 && turn % 8 == 6 && (any || tiny)));
        for (int i = 0; i < w.rows; i++) {
            const char *row = (const char *)w.x + (size_t)(i * WIDE) * (dtype == 0 ? 4 : 2);
            slow->encode_along[element](codes[1][0] + i * WIDE, row, along + i * w.step, w.n, w.block, false);
            slow->encode_down[element](codes[1][1] + i * WIDE, WIDE, row, WIDE, 1, down, w.n);
            for (int side = 0; side < 2; side++)
                same(side ? "encode_both, down" : "encode_both, along", dtype, any, w.block, codes[0][side] + i * WIDE,
                     codes[1][side] + i * WIDE, (size_t)done);
        }
    }
}

/* Codes of each direction by itself. Factors are powers of two that bring elements into the format, or any power, or
 * any positive number. */
static void check_codes(const te_quantize_blocks *both[2], int dtype, te_element_kind element, int any)
{
    static const int64_t blocks[] = {16, 32, 48, 64, 128, 192, COLUMNS};
    static float some[COLUMNS];
    for (int turn = 0; turn < 28; turn++) {
        int64_t block = blocks[turn % 7];
        for (int i = 0; i < COLUMNS; i++) {
            int exponent = turn % 4 == 0 ? (int)(test_random(&state) % 254) - 126 : 5 - (int)(test_random(&state) % 12);
            some[i] = ldexpf(1, exponent);
            if (turn % 4 == 3 && i % 7 == 3) some[i] = te_f32_from_bits((uint32_t)test_random(&state) % 0x7f800000u);
        }
        memset(bytes, 0xa5, sizeof bytes);
        for (int v = 0; v < 2; v++)
            for (int i = 0; i < ROWS; i++)
                both[v]->of[dtype].encode_along[element](bytes[v] + i * WIDTH, row(dtype, i), some, COLUMNS,
                                                         block, turn % 2);
        same("encode_along", dtype, any, block, bytes[0], bytes[1], sizeof bytes[0]);
        for (int v = 0; v < 2; v++)
            both[v]->of[dtype].encode_down[element](bytes[v], WIDTH, source(dtype), COLUMNS, ROWS, some, COLUMNS);
        same("encode_down", dtype, any, element, bytes[0], bytes[1], sizeof bytes[0]);
        float amax[2];
        for (int v = 0; v < 2; v++)
            amax[v] = both[v]->of[dtype].encode_whole[element](bytes[v], source(dtype), some[turn], N, turn % 2);
        same("encode_whole", dtype, any, element, bytes[0], bytes[1], N);
        same("encode_whole, amax", dtype, any, element, &amax[0], &amax[1], sizeof amax[0]);
    }
}

/* Groups of 32 become very small or very large together, some of them zeros: of float32 and of bfloat16. */
static void spread(void)
{
    for (int i = 0, power = 0; i < N; i++) {
        if (i % 32 == 0) power = (int)(test_random(&state) % 270) - 150;
        floats[i] = test_random(&state) % 8 ? ldexpf(floats[i], power) : 0;
        halves[i] = te_f32_to_bf16(floats[i]);
    }
}

/* Factors and codes from one visit against maxima, factors and codes. */
static void check_at_once(const te_quantize_blocks *both[2], int dtype, te_element_kind element, int any)
{
    enum { MOST = N / 32 + 1 };
    static float amax[MOST], multipliers[MOST], stored[2][MOST + 16];
    static const int64_t widths[] = {64, 1000, 4096, N};
    for (int turn = 0; turn < 16 && element != TE_E2M1 && both[0]->of[dtype].at_once[element]; turn++) {
        int64_t n = widths[turn / 4], block = turn % 2 ? 32 : 128, first = turn % 3;
        const char *x = (const char *)source(dtype) + (size_t)first * (dtype == 0 ? sizeof(float) : sizeof(uint16_t));
        te_factor_rule rule = {.scale = turn & 2 ? TE_SCALE_F32 : TE_SCALE_E8M0, .max = te_element_max(element),
                               .epsilon = turn % 5 ? 0 : 4, .overflow = TE_FLT_MAX, .power_of_two = true};
        size_t size = rule.scale == TE_SCALE_F32 ? sizeof(float) : 1;
        n -= n == N ? first : 0;
        memset(bytes, 0xa5, sizeof bytes), memset(stored, 0xa5, sizeof stored);
        int64_t done = both[0]->of[dtype].at_once[element](bytes[0], stored[0], x, n, &rule, block, turn % 4 == 3,
                                                             turn % 3 * 4096);
        CHECK(done == n - n % (block == 32 ? 64 : 128) || (any && done % 512 == 0));
        CHECK(((uint8_t *)stored[0])[n / block * (int64_t)size] == 0xa5);
        both[1]->of[dtype].amax_along(amax, x, n, block);
        both[1]->factors(&rule, amax, (int)(n / block), stored[1], multipliers);
        both[1]->of[dtype].encode_along[element](bytes[1], x, multipliers, done, block, false);
        same("at_once, factors", dtype, any, block, stored[0], stored[1], size * (size_t)(done / block));
        same("at_once", dtype, any, block, bytes[0], bytes[1], (size_t)done);
    }
}

/* Maxima of rows and of columns from one visit against each by itself. */
static void check_maxima_both(const te_quantize_blocks *both[2], int dtype, int any)
{
    const te_quantize_loops *fast = &both[0]->of[dtype], *slow = &both[1]->of[dtype];
    if (!fast->amax_both) return;
    for (int turn = 0; turn < 6; turn++) {
        static float along[2][ROWS * 16], down[2][COLUMNS];
        static const int widths[] = {512, 384, 500};
        te_two_ways w = {.x = source(dtype), .stride = COLUMNS, .rows = ROWS, .n = widths[turn / 2],
                         .block = turn % 2 ? 32 : 128, .step = turn / 2 == 1 && turn % 2 ? 12 : turn % 2 ? 16 : 4};
        bool nan = false;
        memset(along, 0, sizeof along);
        bool found_both = fast->amax_both(along[0], down[0], &w);
        for (int i = 0; i < ROWS; i++) {
            slow->amax_along(along[1] + i * w.step, row(dtype, i), w.n, w.block);
            for (int j = 0; j < w.n; j++) {
                uint16_t half = halves[i * COLUMNS + j];
                nan = nan || (dtype == 0 ? floats[i * COLUMNS + j] != floats[i * COLUMNS + j]
                              : (half & 0x7fff) > 0x7f80);
            }
        }
        slow->amax_down(down[1], w.x, w.stride, w.rows, (int)w.n);
        CHECK_MSG(found_both == (turn < 4 && !nan), "amax_both: dtype %d, %d%% of any bits, %lld columns: %d",
                  dtype, any, (long long)w.n, found_both);
        if (!found_both) continue;
        same("amax_both, along", dtype, any, w.block, along[0], along[1], sizeof along[0]);
        same("amax_both, down", dtype, any, w.block, down[0], down[1], (size_t)w.n * sizeof(float));
    }
}

/* Maxima of squares against those of columns, of which they are maxima. */
static void check_squares(const te_quantize_blocks *both[2], int dtype, int any)
{
    static float amax[2][COLUMNS], columns[COLUMNS];
    const te_quantize_loops *fast = &both[0]->of[dtype], *slow = &both[1]->of[dtype];
    for (int64_t n = 100; n <= COLUMNS && fast->amax_squares; n += 337) {
        slow->amax_down(columns, source(dtype), COLUMNS, ROWS, (int)n);
        both[1]->of[0].amax_along(amax[1], columns, n, 128);
        int64_t done = fast->amax_squares(amax[0], source(dtype), COLUMNS, ROWS, n, 128);
        CHECK(done == n / 128 * 128 || (done == 0 && any));
        same("amax_squares", dtype, any, 128, amax[0], amax[1], (size_t)(done / 128) * sizeof(float));
    }
}

/* Values of stored bytes by the short way, where it is taken, against codes one by one. `any`: of a hundred bytes,
 * how many may be no numbers; of a hundred factors, how many are no powers of two, or are any number. */
static void check_decode_to(const te_quantize_blocks *both[2], te_element_kind element, int any)
{
    enum { WIDE = 1088 };
    static const int64_t blocks[] = {16, 32, 64, 128, 192, WIDE};
    static uint8_t stored[WIDE], codes[WIDE];
    static float values[WIDE], some[WIDE];
    static _Alignas(64) float found_wide[WIDE];
    static _Alignas(64) uint16_t found_narrow[WIDE];
    if (!both[0]->decode_to[element]) return;
    for (int turn = 0; turn < 48; turn++) {
        int64_t block = blocks[turn % 6], n = turn % 7 == 6 ? 512 : WIDE;
        float times = turn % 4 ? 1 : (float)test_uniform(&state, 0.1, 3);
        for (int i = 0; i < WIDE; i++) {
            float power = ldexpf(1, (int)(test_random(&state) % 40) - 20);
            stored[i] = (uint8_t)test_random(&state);
            if (element == TE_E4M3 && (stored[i] & 0x7f) == 0x7f && any == 0) stored[i]--;
            if (element == TE_E5M2 && (stored[i] & 0x7f) >= 0x7c && any == 0) stored[i] &= 0xf0;
            some[i] = turn % 3 ? power : power * (float)test_uniform(&state, 1, 2);
            if (test_random(&state) % 1000 < (uint64_t)any) some[i] = te_f32_from_bits((uint32_t)test_random(&state));
        }
        both[1]->unpack_along(codes, stored, n);
        both[1]->decode_along[element](values, element == TE_E2M1 ? codes : stored, some, n, block);
        both[1]->multiply(values, times, n);
        bool wide = both[0]->decode_to[element](found_wide, TE_F32, stored, some, n, block, times, turn % 2);
        bool narrow = both[0]->decode_to[element](found_narrow, TE_BF16, stored, some, n, block, times, turn % 2);
        CHECK_MSG(any || (wide && narrow), "decode_to: element %d, blocks of %lld: not taken", element,
                  (long long)block);
        for (int64_t i = 0; i < n; i++) {
            CHECK_MSG(!wide || te_f32_bits(found_wide[i]) == te_f32_bits(values[i]),
                      "decode_to: element %d, byte %02x: %g, not %g",
                      element, stored[i], (double)found_wide[i], (double)values[i]);
            CHECK_MSG(!narrow || found_narrow[i] == te_f32_to_bf16(values[i]),
                      "decode_to: element %d, byte %02x: %04x, not %04x",
                      element, stored[i], found_narrow[i], te_f32_to_bf16(values[i]));
        }
    }
    CHECK(!both[0]->decode_to[element](found_wide, TE_F16, stored, some, 64, 64, 1, false));
}

static void check_pairs_at_once(const te_quantize_blocks *both[2], int dtype, int any)
{
    enum { MOST = N / 16 + 1 };
    static float amax[MOST], multipliers[MOST];
    static uint8_t stored[2][MOST + 16], codes[N];
    static const int64_t widths[] = {64, 320, 1000, 4096, N - 1};
    for (int turn = 0; turn < 15 && both[0]->of[dtype].at_once[TE_E2M1]; turn++) {
        int64_t n = widths[turn / 3], whole = n - n % 64;
        const char *x = (const char *)source(dtype) + (size_t)(turn % 2) * (dtype == 0 ? sizeof(float) : 2);
        float tensor = turn % 3 ? (float)test_uniform(&state, 0.1, 20) : te_f32_from_bits((uint32_t)(turn + 1) << 24);
        te_factor_rule rule = {.scale = TE_SCALE_E4M3, .max = 6, .encode = te_two_level_encode(tensor, 448)};
        memset(bytes, 0xa5, sizeof bytes), memset(stored, 0xa5, sizeof stored);
        int64_t done = both[0]->of[dtype].at_once[TE_E2M1](bytes[0], stored[0], x, n, &rule, 16, false,
                                                             turn % 3 * 4096);
        CHECK(done == whole || (any && done % 512 == 0 && done < whole));
        CHECK(stored[0][whole / 16] == 0xa5 && bytes[0][whole / 2] == 0xa5);
        both[1]->of[dtype].amax_along(amax, x, whole, 16);
        both[1]->factors(&rule, amax, (int)(whole / 16), stored[1], multipliers);
        both[1]->of[dtype].encode_along[TE_E2M1](codes, x, multipliers, done, 16, false);
        both[1]->pack_along(bytes[1], codes, done);
        same("pairs at once, factors", dtype, any, turn, stored[0], stored[1], (size_t)(done / 16));
        same("pairs at once", dtype, any, turn, bytes[0], bytes[1], (size_t)(done / 2));
    }
}

static void check_loops(const te_quantize_blocks *both[2])
{
    for (int dtype = 0; dtype < TE_SOURCES; dtype++)
        for (int any = 0; any <= 100; any += any < 2 ? 1 : 49) {
            fill(dtype, any);
            check_maxima(both, dtype, any);
            check_maxima_both(both, dtype, any);
            check_squares(both, dtype, any);
            for (int element = 0; element < TE_ELEMENT_COUNT; element++) {
                check_codes(both, dtype, (te_element_kind)element, any);
                check_at_once(both, dtype, (te_element_kind)element, any);
            }
            check_pairs_at_once(both, dtype, any);
            check_stochastic(both, dtype, any);
            check_transform(both, dtype, any);
            if (dtype == 0) check_errors(both, any);
            if (dtype == 0) check_errors_across(both, any);
        }
    for (int turn = 0; turn < 8; turn++) {
        fill(turn % 2, 0);
        spread();
        check_at_once(both, turn % 2, turn & 2 ? TE_E5M2 : TE_E4M3, 0);
        check_pairs_at_once(both, turn % 2, 0);
    }
    for (int dtype = 0; dtype < TE_SOURCES; dtype++)
        for (int any = 0; any < 3; any++) {
            check_both(both, dtype, TE_E4M3, any);
            check_both(both, dtype, TE_E5M2, any);
        }
    check_random(both);
    check_factors(both);
    for (int element = 0; element < TE_ELEMENT_COUNT; element++)
        for (int any = 0; any < 3; any++) check_decode_to(both, (te_element_kind)element, any);
}

/* What this machine takes, and what it would take without its latest extensions. */
int main(void)
{
    te_exec exec = test_exec_open(1);
    const te_quantize_blocks *best = te_quantize_blocks_of(&exec);
    check_loops((const te_quantize_blocks *[2]){best, &te_quantize_blocks_portable});
#ifdef TE_ISA_HAS_X86
    if (te_cpu(&exec)->isa == TE_CPU_AVX512 && best != &te_quantize_blocks_avx512)
        check_loops((const te_quantize_blocks *[2]){&te_quantize_blocks_avx512, &te_quantize_blocks_portable});
#endif
    test_exec_close(&exec);
    return TEST_END();
}
