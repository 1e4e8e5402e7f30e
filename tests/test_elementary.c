/* test_elementary.c - the float32 elementary functions against the C library in float64: a stride over all floats,
 * every kind of edge, and C's rules for pow. Philox against the vectors of its authors, and what is derived from its
 * words. */
#include "test.h"

#include "kernels/elementary.h"
#include "kernels/philox.h"

#include <stdbool.h>

/* Distance of `got` from the true value in units of the last place of float32 at that value; 0 for matching specials.
 * */
static double ulp_error(float got, double want)
{
    if (isnan(want)) return isnan(got) ? 0 : 1e30;
    if (isinf(want)) return (double)got == want ? 0 : 1e30;
    double size = fabs(want);
    if (size >= 0x1.ffffffp127) return isinf(got) && (got > 0) == (want > 0) ? 0 : size >= 0x1p128 ? 1e30 : 1;
    if (!isfinite(got)) return size > 0x1.fffffep127 ? 1 : 1e30;
    int exponent = size < 0x1p-126 ? -126 : ilogb(size);
    return fabs((double)got - want) / ldexp(1.0, exponent - 23);
}

static double sigmoid64(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

static void check_unary(const char *name, float (*function)(float), double (*reference)(double))
{
    double worst = 0;
    float  worst_at = 0;
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 1013) {
        float  x = te_f32_from_bits((uint32_t)bits);
        double error = ulp_error(function(x), reference((double)x));
        if (error > worst) worst = error, worst_at = x;
    }
    static const float edges[] = {0.0f,
                                  -0.0f,
                                  INFINITY,
                                  -INFINITY,
                                  NAN,
                                  1.0f,
                                  -1.0f,
                                  0x1p-149f,
                                  -0x1p-149f,
                                  0x1p-126f,
                                  0x1.fffffep127f,
                                  -0x1.fffffep127f,
                                  88.722839f,
                                  88.72284f,
                                  -87.33655f,
                                  -103.97208f,
                                  -103.97209f,
                                  -104.0f,
                                  0x1p40f,
                                  0x1.fffffep39f,
                                  0x1.921fb6p0f,
                                  0x1.921fb6p1f,
                                  0x1.6ac5b262ca1ffp43f,
                                  0.91f,
                                  0x1.d1eb84p-1f,
                                  4.0f,
                                  9.01f,
                                  10.0f,
                                  0x1.555556p-1f,
                                  0x1.555554p0f,
                                  0x1.555556p0f};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        double error = ulp_error(function(edges[i]), reference((double)edges[i]));
        if (error > worst) worst = error, worst_at = edges[i];
    }
    /* around 1, where log vanishes, and around 0 */
    for (int i = -200000; i <= 200000; i++) {
        float  x = te_f32_from_bits((uint32_t)(0x3f800000 + i));
        double error = ulp_error(function(x), reference((double)x));
        if (error > worst) worst = error, worst_at = x;
    }
    printf("%-8s max %.3f ulp at %a\n", name, worst, (double)worst_at);
    CHECK_MSG(worst <= 2.0, "%s: %g ulp at %a", name, worst, (double)worst_at);
}

/* A handful of bits per argument: signs, subnormals, powers of two, whole numbers, huge and ordinary ones. */
static float pow_argument(uint64_t *state)
{
    uint32_t r = test_random(state);
    switch (r % 5) {
    case 0: return te_f32_from_bits(test_random(state));
    case 1: return (float)test_uniform(state, -40, 40);
    case 2: return (float)(int)test_uniform(state, -40, 40);
    case 3: return (float)(1 + test_uniform(state, -1e-3, 1e-3));
    default: return (float)test_uniform(state, 0, 4);
    }
}

static void check_pow(void)
{
    double   worst = 0;
    float    at[2] = {0, 0};
    uint64_t state = 88172645463325252u;
    for (int i = 0; i < 4000000; i++) {
        float  a = pow_argument(&state), b = pow_argument(&state);
        double error = ulp_error(te_pow(a, b), pow((double)a, (double)b));
        if (error > worst) worst = error, at[0] = a, at[1] = b;
    }
    /* results of every size, and beyond both ends of float32 */
    for (int i = 0; i < 4000000; i++) {
        float  a = te_abs(pow_argument(&state)), b = (float)(test_uniform(&state, -151, 130) / log2((double)a));
        double error = ulp_error(te_pow(a, b), pow((double)a, (double)b));
        if (error > worst) worst = error, at[0] = a, at[1] = b;
    }
    for (int i = 1; i < 256; i++) {
        float x = (float)(i * i);
        CHECK(te_pow(x, 0.5f) == (float)i && te_pow(x, 1.5f) == (float)(i * i * i));
        CHECK(i > 64 || te_pow(x * x, 0.25f) == (float)i);
    }
    static const float values[] = {0.0f,
                                   -0.0f,
                                   1.0f,
                                   -1.0f,
                                   2.0f,
                                   -2.0f,
                                   3.0f,
                                   -3.0f,
                                   0.5f,
                                   -0.5f,
                                   1.5f,
                                   INFINITY,
                                   -INFINITY,
                                   NAN,
                                   0x1p-149f,
                                   -0x1p-149f,
                                   0x1.fffffep127f,
                                   -0x1.fffffep127f,
                                   0x1p24f,
                                   16777215.0f,
                                   15.0f,
                                   16.0f,
                                   -15.0f,
                                   -16.0f,
                                   -17.0f,
                                   31.0f};
    enum { COUNT = sizeof values / sizeof values[0] };
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < COUNT; j++) {
            float  a = values[i], b = values[j], got = te_pow(a, b);
            double want = pow((double)a, (double)b), error = ulp_error(got, want);
            if (error > worst) worst = error, at[0] = a, at[1] = b;
            CHECK_MSG(isnan(want) || signbit(got) == signbit((float)want), "pow(%a, %a) = %a, want %a", (double)a,
                      (double)b, (double)got, want);
        }
    for (int i = 0; i < 100000; i++) {
        float x = te_f32_from_bits(test_random(&state));
        float square = te_pow(x, 2.0f), inverse = te_pow(x, -1.0f);
        CHECK(isnan(x) || square == x * x);
        CHECK(isnan(x) || inverse == 1.0f / x);
        CHECK(te_pow(3.0f, (float)(i % 16)) == (float)pow(3.0, i % 16));
    }
    printf("%-8s max %.3f ulp at %a ^ %a\n", "pow", worst, (double)at[0], (double)at[1]);
    CHECK_MSG(worst <= 2.0, "pow: %g ulp at %a ^ %a", worst, (double)at[0], (double)at[1]);
}

static void check_signs(void)
{
    CHECK(signbit(te_sin(-0.0f)) && signbit(te_tanh(-0.0f)) && signbit(te_erf(-0.0f)));
    CHECK(te_exp(0.0f) == 1.0f && te_cos(0.0f) == 1.0f && te_log(1.0f) == 0.0f && te_sigmoid(0.0f) == 0.5f);
    CHECK(te_tanh(30.0f) == 1.0f && te_erf(-8.0f) == -1.0f && te_tanh(INFINITY) == 1.0f && te_erf(INFINITY) == 1.0f);
}

static void check_philox(void)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        const uint32_t *c = vectors[i].counter, *k = vectors[i].key;
        te_rng rng = {(uint64_t)k[1] << 32 | k[0], (uint64_t)c[3] << 32 | c[2], (uint64_t)c[1] << 32 | c[0], NULL};
        te_philox_words words = te_philox(c[0], c[1], c[2], c[3], k[0], k[1]);
        for (unsigned w = 0; w < 4; w++) {
            CHECK(words.word[w] == vectors[i].want[w]);
            CHECK(te_rng_word(rng, w) == vectors[i].want[w]);
        }
    }
    te_rng rng = {7, 9, 0xfffffffeu, NULL}, later = {7, 9, 0x100000003u, NULL};
    CHECK(te_rng_word(rng, 4 * 5 + 2) == te_rng_word(later, 2));
}

static void check_random_values(void)
{
    enum { COUNT = 1 << 20 };
    te_rng rng = {1234, 5, 0, NULL};
    double sum = 0, squares = 0, cross = 0, previous = 0, kept = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        te_philox_words words = te_rng_group(rng, i / 4);
        unsigned        pair = (unsigned)(i % 4) & 2u;
        double          z = (double)te_rng_normal(words.word[pair], words.word[pair + 1], i % 2 == 1);
        double          u = (double)te_rng_uniform(words.word[i % 4]);
        CHECK(u >= 0 && u < 1 && fabs(z) < 6.8);
        kept += words.word[i % 4] >= te_rng_threshold(0.1);
        sum += z, squares += z * z, cross += z * previous, previous = z;
    }
    CHECK(fabs(sum / COUNT) < 5e-3 && fabs(squares / COUNT - 1) < 1e-2 && fabs(cross / COUNT) < 5e-3);
    CHECK(fabs(kept / COUNT - 0.9) < 2e-3);
    CHECK(te_rng_threshold(0) == 0 && te_rng_threshold(1) == (uint64_t)1 << 32 && te_rng_threshold(0.5) == 1u << 31);
    CHECK(te_rng_threshold(0.1) == 429496730u && te_rng_threshold(NAN) == (uint64_t)1 << 32);
}

/* The exponential of what is not positive has te_exp's bits. */
static void check_exp_negative(void)
{
    uint32_t wrong = 0;
    for (uint64_t bits = 0x80000000u; bits <= 0xff800000u; bits += 97) {
        float x = te_f32_from_bits((uint32_t)bits);
        wrong += te_f32_bits(te_exp_negative(x)) != te_f32_bits(te_exp(x));
    }
    CHECK(wrong == 0);
    CHECK(te_exp_negative(-TE_INFINITY) == 0.0f && te_exp_negative(0.0f) == 1.0f);
    CHECK(te_exp_negative(TE_NAN) != te_exp_negative(TE_NAN));
}

/* How GPUs divide in te_inverse and te_sigmoid, from inverses up to one place off, which is what theirs may be. */
static void check_quotients(void)
{
    uint32_t inverses = 0, quotients = 0;
    for (uint32_t bits = 0x3f800000u; bits < 0x40000000u; bits += 7)
        for (uint32_t off = 0; off < 3; off++) {
            float d = te_f32_from_bits(bits), r = te_f32_from_bits(te_f32_bits(1.0f / d) + off - 1u);
            if (fabs((double)r - 1.0 / (double)d) > 0x1p-24) continue;
            inverses += TE_FMA(TE_FMA(-d, r, 1.0f), r, r) != te_inverse(d);
        }
    for (uint32_t bits = 0; bits <= 0x3f800000u; bits += 101) {
        float e = te_f32_from_bits(bits), d = 1.0f + e, near = e * te_inverse(d);
        quotients += TE_FMA(TE_FMA(-d, near, e), te_inverse(d), near) != e / d;
    }
    CHECK(inverses == 0 && quotients == 0);
}

int main(void)
{
    check_unary("exp", te_exp, exp);
    check_exp_negative();
    check_quotients();
    check_unary("log", te_log, log);
    check_unary("tanh", te_tanh, tanh);
    check_unary("sigmoid", te_sigmoid, sigmoid64);
    check_unary("erf", te_erf, erf);
    check_unary("sin", te_sin, sin);
    check_unary("cos", te_cos, cos);
    check_pow();
    check_signs();
    check_philox();
    check_random_values();
    return TEST_END();
}
