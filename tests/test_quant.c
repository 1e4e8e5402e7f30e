/* test_quant.c - formats and factors at their edges, quantizing from C, and every allocation failing in turn.
 *
 * The specs compare whole tensors with a reference, byte for byte; here are single values that numerics name, and what
 * a script cannot reach.
 */
#include "core/quantized.h"
#include "test.h"

#include <float.h>

static float bits(uint32_t u) { return te_f32_from_bits(u); }

static void test_e8m0(void)
{
    const struct {
        float v;
        uint8_t code;
    } cases[] = {
        {0, 0},
        {bits(1), 0},
        {bits(0x400000), 0},
        {bits(0x400001), 1},
        {bits(0x7fffff), 1},
        {FLT_MIN, 1},
        {bits(0x00800001), 2},
        {1, 127},
        {bits(0x3f800001), 128},
        {1.5f, 128},
        {2, 128},
        {0x1p126f, 253},
        {bits(0x7e800001), 254},
        {0x1p127f, 254},
        {FLT_MAX, 254},
        {INFINITY, 254},
        {NAN, 255},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_MSG(te_f32_to_e8m0(cases[i].v) == cases[i].code, "%g gives %d, not %d", (double)cases[i].v,
                  te_f32_to_e8m0(cases[i].v), cases[i].code);
    for (int code = 0; code < 255; code++) {
        float value = te_e8m0_to_f32((uint8_t)code);
        CHECK(value == ldexpf(1, code - 127) && te_e8m0_inverse((uint8_t)code) == ldexpf(1, 127 - code));
        CHECK(te_f32_to_e8m0(value) == code);
    }
    CHECK(isnan(te_e8m0_to_f32(255)) && isnan(te_e8m0_inverse(255)));
}

static void test_e2m1(void)
{
    const float grid[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int code = 0; code < 8; code++) {
        CHECK(te_e2m1_to_f32((uint8_t)code) == grid[code] && te_e2m1_to_f32((uint8_t)(code + 8)) == -grid[code]);
        CHECK(te_f32_to_e2m1(grid[code]) == code && te_f32_to_e2m1(-grid[code]) == code + 8);
        for (uint32_t random = 0; random < 256; random++)
            CHECK(te_f32_to_e2m1_stochastic(-grid[code], random) == code + 8); /* what is exact stays */
        if (code == 7) continue;
        float middle = (grid[code] + grid[code + 1]) / 2;
        CHECK(te_f32_to_e2m1(middle) == code + code % 2);
        CHECK(te_f32_to_e2m1(nextafterf(middle, 0)) == code && te_f32_to_e2m1(nextafterf(middle, 9)) == code + 1);
        int up = 0;
        for (uint32_t random = 0; random < 256; random++) up += te_f32_to_e2m1_stochastic(middle, random) == code + 1;
        CHECK_MSG(up == 128, "%g goes up for %d of 256 bytes", (double)middle, up);
    }
    CHECK(te_f32_to_e2m1(NAN) == 7 && te_f32_to_e2m1(-NAN) == 7 && te_f32_to_e2m1_stochastic(-NAN, 9) == 7);
    CHECK(te_f32_to_e2m1(-INFINITY) == 15 && te_f32_to_e2m1_stochastic(INFINITY, 0) == 7);
}

static void test_scales(void)
{
    CHECK(te_scale_from_amax(2, 448, false, 0, FLT_MAX) == 224);
    CHECK(te_scale_from_amax(3, 448, true, 0, FLT_MAX) == 128); /* 149.3 down to a power of two */
    CHECK(te_scale_from_amax(0, 448, false, 0, FLT_MAX) == 1);
    CHECK(te_scale_from_amax(0, 448, false, 2, FLT_MAX) == 224);
    CHECK(te_scale_from_amax(INFINITY, 448, true, 0, FLT_MAX) == 1 &&
          te_scale_from_amax(NAN, 448, false, 1, FLT_MAX) == 1);
    CHECK(te_scale_from_amax(1e-40f, 448, false, 0, 7) == 7);
    CHECK(te_two_level_encode(0, 448) == 1 && te_two_level_encode(INFINITY, 448) == 1);
    CHECK(te_two_level_encode(1e-40f, 448) == FLT_MAX && te_two_level_encode(2688, 448) == 1);
    CHECK(te_two_level_multiplier(0, 1) == FLT_MAX);
    CHECK(te_two_level_block(2.25f, 896) == te_f32_to_f8e4m3(320)); /* of 336, a tie; times 1 / 6 it would be more */
    CHECK(te_two_level_candidate(2.25f, 896, 1) == te_f32_to_f8e4m3(320));
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static const te_quantizer two_levels = {.element = TE_E2M1,
                                        .scale = TE_SCALE_E4M3,
                                        .block_rows = 1,
                                        .block_cols = 16,
                                        .has_columnwise = true,
                                        .transposed = true,
                                        .replicated = true,
                                        .hadamard = true,
                                        .stochastic = true,
                                        .scale_max = 448};

enum { ROWS = 150, COLS = 37 };

static te_tensor *source(te_context *ctx)
{
    int64_t shape[] = {ROWS, COLS};
    te_tensor *t = te_tensor_empty(ctx, TE_BF16, 2, shape);
    float values[ROWS * COLS];
    uint64_t state = 5;
    for (int i = 0; i < ROWS * COLS; i++) values[i] = (float)test_uniform(&state, -3, 3);
    if (t && te_tensor_write(t, TE_F32, values) == TE_OK) return t;
    te_tensor_release(t);
    return NULL;
}

typedef struct failing {
    long countdown; /* fails when it reaches 0, and from then on when `lasting`; negative: never */
    bool lasting, reached;
    size_t live;
} failing;

static void *failing_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    failing *f = user;
    if (new_size && f->countdown >= 0 && f->countdown-- == 0) {
        f->reached = true;
        if (f->lasting) f->countdown = 0;
        return NULL;
    }
    void *p = te_mem_libc.realloc(NULL, ptr, old_size, new_size);
    if (p || new_size == 0) f->live += new_size - (ptr ? old_size : 0);
    return p;
}

/* There and back while allocation n fails: an error with a message and nothing held, or success. Returns whether n was
 * never reached. */
static bool round_trip(long n, bool lasting)
{
    failing f = {.countdown = -1, .lasting = lasting};
    te_context_options options = {
        .struct_size = sizeof options, .threads = 2, .realloc = failing_realloc, .realloc_user = &f};
    te_context *ctx = te_context_open(&options);
    te_tensor *x = source(ctx), *back = NULL;
    te_quantized z;
    te_quantize_options wanted = {.want = {true, true}};
    f.countdown = n;
    te_status status = te_quantize(x, &two_levels, &wanted, &z);
    if (status == TE_OK) {
        back = te_dequantize(ctx, &z, 1);
        te_quantized_close(&z);
    } else {
        CHECK(status == TE_ERROR_MEMORY && !z.side[0].data && !z.side[1].amax);
    }
    f.countdown = -1;
    CHECK_MSG(back || te_context_error(ctx)[0], "allocation %ld failed without a message", n);
    CHECK(back || f.reached);
    te_tensor_release(back);
    te_tensor_release(x);
    te_context_release(ctx);
    CHECK_MSG(f.live == 0, "allocation %ld: %zu bytes leaked", n, f.live);
    return !f.reached;
}

static void test_failing_allocations(void)
{
    for (int lasting = 0; lasting < 2; lasting++) {
        long n = 0;
        while (!round_trip(n, lasting) && n < 1000) n++;
        CHECK_MSG(n > 8 && n < 1000, "%ld allocations", n);
    }
}

/* The engine's random numbers are used up by stochastic rounding and by nothing else. */
static void test_draws(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *x = source(ctx);
    te_quantizer plain = two_levels;
    te_quantized z;
    te_quantize_options wanted = {.want = {true, false}};
    uint64_t seed, before, after, groups = ROWS * 3 + COLS * 10; /* of 16, in both directions whatever was wanted */
    plain.stochastic = false;
    te_context_rng_state(ctx, &seed, &before);
    CHECK(te_quantize(x, &plain, &wanted, &z) == TE_OK);
    te_quantized_close(&z);
    te_context_rng_state(ctx, &seed, &after);
    CHECK(after == before);
    CHECK(te_quantize(x, &two_levels, &wanted, &z) == TE_OK);
    te_quantized_close(&z);
    te_context_rng_state(ctx, &seed, &after);
    CHECK_MSG(after == before + groups, "%llu counters", (unsigned long long)(after - before));
    CHECK(te_quantize(x, &plain, &(te_quantize_options){.want = {false, false}, .scale = 1}, &z) == TE_ERROR_ARGUMENT);
    te_tensor_release(x);
    te_context_release(ctx);
}

int main(void)
{
    test_e8m0();
    test_e2m1();
    test_scales();
    test_failing_allocations();
    test_draws();
    return TEST_END();
}
