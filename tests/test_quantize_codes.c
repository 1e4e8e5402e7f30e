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
            loops->encode_along[kind](codes, x, multipliers, N, block);
            check("along", kind, source, m, codes);
        }
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
            check_factor(blocks, (te_element_kind)kind, source, 0x1p-127f);
            check_factor(blocks, (te_element_kind)kind, source, TE_FLT_MAX);
        }
    test_exec_close(&exec);
    return TEST_END();
}
