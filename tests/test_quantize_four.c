/* test_quantize_four.c - loops for four bits: pairs of codes against the codes of quant.h one by one, candidates of the
 * choice between two factors against those that every machine makes, and errors that are added in any order against
 * those in the right one. */
#include "kernels/cpu/quantize_blocks.h"
#include "test.h"

static uint64_t state = 0x9e3779b97f4a7c15u;

/* Sums in any order are within what quantize_four.c allows for of those in the right order. Factors are what amaxes
 * give, elements at random or on a coarse grid, where products fall on ties. */
static void check_errors_about(const te_quantize_blocks *both[2], int dtype)
{
    enum { BLOCKS = 4, WIDE = BLOCKS * TE_GROUP };
    static float x[TE_GROUP * WIDE];
    static uint16_t narrow[TE_GROUP * WIDE];
    if (!both[0]->of[dtype].errors_about) return;
    for (int turn = 0; turn < 40; turn++) {
        float block_amax[BLOCKS] = {0}, amax = 0, sums[2][BLOCKS], multipliers[2][BLOCKS], values[2][BLOCKS];
        uint8_t codes[2][BLOCKS];
        te_error_rule rules[2];
        for (int i = 0; i < TE_GROUP * WIDE; i++) {
            float value = (float)test_uniform(&state, -3, 3) * (float)(1 + i / TE_GROUP % BLOCKS);
            narrow[i] = te_f32_to_bf16(turn % 2 ? rintf(value) : value);
            x[i] = dtype ? te_bf16_to_f32(narrow[i]) : turn % 2 ? rintf(value) : value;
            block_amax[i / TE_GROUP % BLOCKS] = te_amax(block_amax[i / TE_GROUP % BLOCKS], x[i]);
            amax = te_amax(amax, x[i]);
        }
        float encode = te_two_level_encode(amax, 256);
        for (int k = 0; k < 2; k++) {
            both[turn % 2]->candidates(encode, k ? 1.5f : 1, block_amax, BLOCKS, codes[k], multipliers[k], values[k]);
            rules[k] = (te_error_rule){multipliers[k], values[k], amax, 6 * 256.0f, turn % 3 == 0};
        }
        both[0]->of[dtype].errors_about((float *[2]){sums[0], sums[1]}, rules, dtype ? (void *)narrow : x,
                                        WIDE, BLOCKS);
        for (int k = 0; k < 2; k++)
            for (int b = 0; b < BLOCKS; b++) {
                float line_multipliers[TE_GROUP], line_factors[TE_GROUP], lines[TE_GROUP];
                te_error_rule rule = rules[k];
                double right = 0, size = turn % 3 ? (double)block_amax[b]
                    : (double)block_amax[b] * (double)block_amax[b];
                for (int i = 0; i < TE_GROUP; i++)
                    line_multipliers[i] = multipliers[k][b], line_factors[i] = values[k][b];
                rule.multipliers = line_multipliers, rule.factors = line_factors;
                both[1]->errors(lines, &rule, x + b * TE_GROUP, WIDE, TE_GROUP, TE_GROUP);
                for (int i = 0; i < TE_GROUP; i++) right += (double)lines[i];
                CHECK_MSG(fabs((double)sums[k][b] - right) < size * 0x1p-11,
                          "errors_about, dtype %d, turn %d, block %d: %g, not %g", dtype, turn, b,
                          (double)sums[k][b], right);
            }
    }
}

static void check_candidates(const te_quantize_blocks *both[2])
{
    enum { MANY = 37 };
    static float amax[MANY], numbers[2][2][MANY];
    static uint8_t codes[2][MANY];
    for (int turn = 0; turn < 200; turn++) {
        float encode = te_two_level_encode(te_f32_from_bits((uint32_t)test_random(&state) & 0x7fffffffu),
                                           turn % 2 ? 448 : 256);
        if (!(encode <= TE_FLT_MAX)) encode = 1;
        for (int i = 0; i < MANY; i++) {
            amax[i] = te_f32_from_bits((uint32_t)test_random(&state) % 0x7f800001u);
            if (i % 3) amax[i] = (float)test_uniform(&state, 0, 2700) / encode;
            if (i % 8 == 7) amax[i] = 0;
        }
        for (int v = 0; v < 2; v++)
            both[v]->candidates(encode, turn % 3 ? 1.5f : 1, amax, MANY, codes[v], numbers[v][0], numbers[v][1]);
        CHECK_MSG(memcmp(codes[0], codes[1], sizeof codes[0]) == 0, "codes of candidates, turn %d", turn);
        CHECK_MSG(memcmp(numbers[0], numbers[1], sizeof numbers[0]) == 0, "numbers of candidates, turn %d", turn);
    }
}

static uint8_t code_of(float x, bool chance, uint32_t random)
{
    return chance ? te_f32_to_e2m1_stochastic(x, random) : te_f32_to_e2m1(x);
}

/* To nearest or by chance: every bfloat16 under factors of all sizes, and float32 near what they round to. */
static void check_pairs(const te_quantize_loops *loops, int dtype, float factor, bool chance, bool tied)
{
    enum { N = 1 << 16, ROWS = 3, WIDE = N / ROWS / 64 * 64 - 24 };
    static uint16_t halves[N];
    static float floats[N], multipliers[N];
    static uint8_t pairs[N], random[N];
    const void *x = dtype ? (const void *)halves : floats;
    if (!loops->pairs_along) return;
    for (int i = 0; i < N; i++) {
        uint32_t around = test_random(&state) % 3 ? 0 : (uint32_t)test_random(&state) % 0x1ffffu - 0xffffu;
        halves[i] = (uint16_t)((i * 40503u) ^ (i >> 5)); /* in no order */
        floats[i] = te_f32_from_bits(((uint32_t)halves[i] << 16) + around);
        random[i] = i % 5 ? (uint8_t)test_random(&state) : (uint8_t)(255 * (i % 2));
        multipliers[i] = factor > 0x1p126f ? factor : factor * (float)(1 + i % 3);
    }
    int wrong = 0;
    te_pair_rows lines = {x, N / 16, 16, multipliers, N / 16 / 16, chance ? random : NULL, N / 16, tied};
    int64_t done = loops->pairs_along(pairs, N / 16 / 2, &lines, N / 16);
    for (int64_t i = 0; i < N; i++) {
        float value = (dtype ? te_bf16_to_f32(halves[i]) : floats[i]) * multipliers[i / 16];
        wrong += (pairs[i / 2] >> i % 2 * 4 & 15) != code_of(value, chance, random[i]);
    }
    lines.rows = 2; /* and of long ones, which are not whole 64s */
    lines.stride = 3 * N / 8, lines.step = 5, lines.random_stride = 7;
    wrong += loops->pairs_along(pairs, N / 4, &lines, N / 2 + 40) != N / 2;
    for (int64_t i = 0; i < N; i++) {
        int64_t r = i / (N / 2), j = i % (N / 2), at = r * lines.stride + j;
        float value = (dtype ? te_bf16_to_f32(halves[at]) : floats[at]) * multipliers[r * lines.step + j / 16];
        wrong += (pairs[i / 2] >> i % 2 * 4 & 15) != code_of(value, chance, random[r * lines.random_stride + j]);
    }
    CHECK_MSG(wrong == 0 && done == N / 16, "along, dtype %d, factor %g: %d wrong", dtype, (double)factor, wrong);
    for (int rows = ROWS - 1; rows <= ROWS; rows++) {
        wrong = 0;
        te_pair_rows w = {x, WIDE, rows, multipliers, 0, chance ? random : NULL, WIDE, tied};
        done = loops->pairs_down(pairs, WIDE, &w, WIDE);
        for (int i = 0; i < (rows + 1) / 2 * 2; i++)
            for (int64_t j = 0; j < done; j++) {
                int at = i < rows ? i * WIDE + (int)j : 0;
                uint8_t code = code_of((dtype ? te_bf16_to_f32(halves[at]) : floats[at]) * multipliers[j],
                                       chance, random[at]);
                wrong += (pairs[i / 2 * WIDE + j] >> i % 2 * 4) % 16 != (i < rows ? code : 0);
            }
        CHECK_MSG(wrong == 0 && done == WIDE - 40, "down, %d rows, dtype %d, factor %g: %d wrong", rows, dtype,
                  (double)factor, wrong);
    }
}

static void check_turned_factors(const te_quantize_blocks *blocks)
{
    enum { HIGH = 8, WIDE = 200, STRIDE = 11 };
    static uint8_t from[HIGH * TE_DOWN_COLUMNS], to[WIDE * STRIDE];
    for (int rows = HIGH - 1; rows <= HIGH; rows++) {
        int wrong = 0;
        for (size_t i = 0; i < sizeof from; i++) from[i] = (uint8_t)test_random(&state);
        memset(to, 0xa5, sizeof to);
        blocks->turn_factors(to, STRIDE, from, rows, WIDE - 1);
        for (int j = 0; j < WIDE; j++)
            for (int i = 0; i < STRIDE; i++)
                wrong += to[j * STRIDE + i] != (j < WIDE - 1 && i < rows ? from[i * TE_DOWN_COLUMNS + j] : 0xa5);
        CHECK_MSG(wrong == 0, "turn_factors, %d rows: %d wrong", rows, wrong);
    }
}

int main(void)
{
    te_exec exec = test_exec_open(1);
    const te_quantize_blocks *both[2] = {te_quantize_blocks_of(&exec), &te_quantize_blocks_portable};
    check_candidates(both);
    for (int v = 0; v < 2; v++) check_turned_factors(both[v]);
    for (int dtype = 0; dtype < TE_SOURCES; dtype++) {
        check_errors_about(both, dtype);
        for (int tied = 0; tied < 2; tied++) check_pairs(&both[0]->of[dtype], dtype, TE_FLT_MAX, false, tied);
        for (int turn = 0; turn < 40; turn++) {
            float factor = ldexpf(turn % 2 ? 1 : (float)test_uniform(&state, 1, 2),
                                  turn < 20 ? turn / 2 - 6 : 12 * (turn - 30));
            check_pairs(&both[0]->of[dtype], dtype, factor, turn % 4 > 1, turn % 3 == 0);
        }
    }
    test_exec_close(&exec);
    return TEST_END();
}
