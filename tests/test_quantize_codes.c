/* test_quantize_codes.c - the vector loops of quantizing against the codes of dtype.h and quant.h one by one: every
 * bfloat16 and every float16 under factors of all sizes, powers of two and others, and float32 of random bits. */
#include "kernels/cpu/quantize_blocks.h"
#include "test.h"

enum { N = 1 << 16, ROWS = 2 };

static uint16_t halves[N];
static float floats[N], multipliers[N];
static uint8_t codes[ROWS * N], want[N];
static uint64_t state = 0x2545f4914f6cdd1du;

static uint8_t code_of(te_element_kind kind, float x)
{
    return kind == TE_E4M3 ? te_f32_to_f8e4m3(x) : kind == TE_E5M2 ? te_f32_to_f8e5m2(x) : te_f32_to_e2m1(x);
}

static void check(const char *way, te_element_kind kind, int source, float m, const uint8_t *got)
{
    int at = 0;
    while (at < N && got[at] == want[at]) at++;
    if (at < N)
        CHECK_MSG(false, "%s, element %d, source %d, factor %g: code of %d is %d, not %d", way, (int)kind, source,
                  (double)m, at, got[at], want[at]);
    else
        CHECK(true);
}

/* One factor for all, in blocks of every kind; and a factor per column, every other one doubled. */
static void check_factor(const te_quantize_blocks *blocks, te_element_kind kind, int source, float m)
{
    const te_quantize_loops *loops = &blocks->of[source];
    const void *x = source == 0 ? (const void *)floats : halves;
    for (int down = 0; down < 2; down++) {
        for (int i = 0; i < N; i++) {
            float value = source == 0   ? floats[i]
                          : source == 1 ? te_bf16_to_f32(halves[i])
                                        : te_f16_to_f32(halves[i]);
            multipliers[i] = down && i % 2 && m < 0x1p126f ? 2 * m : m;
            want[i] = code_of(kind, value * multipliers[i]);
        }
        if (down) {
            loops->encode_down[kind](codes, N, x, 0, ROWS, multipliers, N);
            check("down", kind, source, m, codes);
            check("down, second row", kind, source, m, codes + N);
            continue;
        }
        for (int block = 16; block <= N; block *= block == 128 ? N / 128 : 2) {
            loops->encode_along[kind](codes, x, multipliers, N, block, false);
            check("along", kind, source, m, codes);
        }
    }
}

/* FP8 straight to bfloat16 against the way through float32, codes in any order, factors in blocks or one each. What is
 * refused must have a reason. */
static void check_narrow(const te_quantize_blocks *blocks, te_element_kind kind)
{
    static const int64_t sizes[] = {1, 32, 128, 512};
    static uint16_t straight[512], around[512];
    float factors[512], values[512];
    int refused = 0;
    for (int turn = 0; turn < 4000 && blocks->narrow_along[kind]; turn++) {
        int64_t block = sizes[turn % 4];
        int n = turn % 3 ? 512 : 1 + (int)(test_random(&state) % 512), odd = turn % 50 == 7, wild = turn % 100 == 9;
        bool special = false, wide = false;
        for (int i = 0; i < n; i++) {
            uint8_t size = (uint8_t)(test_random(&state) % 128);
            if (!wild && size >= (kind == TE_E4M3 ? 0x7f : 0x7c)) size = 0;
            codes[i] = (uint8_t)(size | (test_random(&state) % 2 << 7));
            special |= size >= (kind == TE_E4M3 ? 0x7f : 0x7c);
        }
        for (int i = 0; i < 512; i++) {
            int exponent = (int)(test_random(&state) % 250) - 125;
            if (turn % 5) exponent /= 2;
            factors[i] = ldexpf(odd ? 1.5f : 1, exponent);
            int used = (n + (int)block - 1) / (int)block;
            wide |= i < used && (exponent < (kind == TE_E4M3 ? -117 : -110) ||
                                 exponent > (kind == TE_E4M3 ? 119 : 112));
        }
        bool good = blocks->narrow_along[kind](straight, codes, factors, n, block);
        CHECK_MSG(good != (special || wide || odd), "turn %d, block %d: taken %d, special %d, wide %d",
                  turn, (int)block, good, special, wide);
        refused += !good;
        if (!good) continue;
        if (block == 1)
            blocks->decode_down[kind](values, codes, factors, n);
        else
            blocks->decode_along[kind](values, codes, factors, n, block);
        CHECK(blocks->narrow(around, values, n));
        CHECK_MSG(memcmp(straight, around, (size_t)n * sizeof *around) == 0, "turn %d, block %d, %d",
                  turn, (int)block, n);
    }
    CHECK(refused < 2000);
}

/* Codes and amax at once, of stretches with NaNs and of those without, of any length. */
static void check_whole(const te_quantize_blocks *blocks, te_element_kind kind, int source, float m)
{
    static const struct {
        int first, n;
    } parts[] = {{0, N}, {0x3c00, 0x800}, {0x3f00, 1000}, {0x3f00, 63}, {0x7f00, 0x80}, {0xbe01, 0x2ff}, {0, 0}};
    size_t size = source == 0 ? sizeof *floats : sizeof *halves;
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        int first = parts[p].first, n = parts[p].n;
        float amax = 0;
        memset(codes, 0xa5, N);
        memset(want, 0xa5, N);
        for (int i = 0; i < n; i++) {
            float value = source == 0   ? floats[first + i]
                          : source == 1 ? te_bf16_to_f32(halves[first + i])
                                        : te_f16_to_f32(halves[first + i]);
            want[i] = code_of(kind, value * m);
            amax = te_amax(amax, value);
        }
        const void *x = (source == 0 ? (const char *)floats : (const char *)halves) + (size_t)first * size;
        float got = blocks->of[source].encode_whole[kind](codes, x, m, n, false);
        check("whole", kind, source, m, codes);
        CHECK_MSG(got == amax, "whole, source %d, %d from %d: amax %g, not %g", source, n, first,
                  (double)got, (double)amax);
    }
}

static void check_turn(te_transpose_fn turn, int stride)
{
    static _Alignas(64) uint8_t turned[N];
    for (int i = 0; i < N; i++) want[i] = (uint8_t)test_random(&state);
    for (int rows = 1; rows < 200; rows += 21)
        for (int cols = 3; cols < 200; cols += cols < 60 ? 61 : 37) {
            int wrong = 0;
            memset(turned, 0, N);
            turn(turned, stride, want, 201, rows, cols);
            for (int j = 0; j < rows; j++)
                for (int i = 0; i < stride; i++) wrong += turned[j * stride + i] != (i < cols ? want[i * 201 + j] : 0);
            CHECK_MSG(wrong == 0, "turn, %d x %d, stride %d: %d wrong", rows, cols, stride, wrong);
        }
}

int main(void)
{
    te_exec exec = test_exec_open(1);
    const te_quantize_blocks *blocks = te_quantize_blocks_of(&exec);
    for (int i = 0; i < N; i++) {
        halves[i] = (uint16_t)i;
        floats[i] = te_f32_from_bits(test_random(&state));
    }
    for (int kind = 0; kind < TE_ELEMENT_COUNT; kind++)
        for (int source = 0; source < TE_SOURCES; source++) {
            for (int k = -126; k <= 127; k += k < 110 && k > -118 ? 9 : 1)
                check_factor(blocks, (te_element_kind)kind, source, ldexpf(1, k));
            for (int i = 0; i < 8; i++)
                check_factor(blocks, (te_element_kind)kind, source, (float)exp2(test_uniform(&state, -20, 20)));
            for (int k = -120; k <= 120; k += 24) check_whole(blocks, (te_element_kind)kind, source, ldexpf(1.1f, k));
            check_factor(blocks, (te_element_kind)kind, source, 0x1p-127f);
            check_factor(blocks, (te_element_kind)kind, source, TE_FLT_MAX);
        }
    for (int i = 0x3c00; i < 0x4400; i += 3) halves[i] = i % 2 ? 0x8000 : 0; /* zeros among numbers */
    for (int kind = 0; kind < TE_ELEMENT_COUNT; kind++)
        for (int i = 0; i < 24; i++) { /* some with ties */
            float short_one = ldexpf(1 + (float)(i % 8) * 0.125f, i / 2 - 6),
                  any = (float)exp2(test_uniform(&state, -8, 8));
            check_whole(blocks, (te_element_kind)kind, 1, i % 2 ? any : short_one);
        }
    check_narrow(blocks, TE_E4M3);
    check_narrow(blocks, TE_E5M2);
    for (int past = 0; past < 2 && blocks->turn[past]; past++) {
        check_turn(blocks->turn[past], 256);
        check_turn(blocks->turn[past], 250);
    }
    test_exec_close(&exec);
    return TEST_END();
}
