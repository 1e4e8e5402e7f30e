/* test_elementary64.c - the float64 elementary functions against the C library in long double: every range of
 * arguments, edges, angles next to multiples of pi / 2; and the loops of every instruction set against one another,
 * those from and to int64 too. */
#include "test.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/program_blocks.h"
#include "kernels/elementary64.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

typedef struct function {
    const char *name;
    double (*ours)(double);
    long double (*reference)(long double);
    double most; /* ulp */
} function;

static double our_exp(double x) { return te_exp64(x); }
static double our_log(double x) { return te_log64(x); }
static double our_tanh(double x) { return te_tanh64(x); }
static double our_sigmoid(double x) { return te_sigmoid64(x); }
static double our_erf(double x) { return te_erf64(x); }
static double our_sin(double x) { return te_sin_turned64(x, 0); }
static double our_cos(double x) { return te_sin_turned64(x, 1); }

static long double sigmoid_long(long double x) { return x >= 0 ? 1 / (1 + expl(-x)) : expl(x) / (1 + expl(x)); }

static const function FUNCTIONS[] = {{"exp", our_exp, expl, 1.0},   {"log", our_log, logl, 1.0},
                                     {"tanh", our_tanh, tanhl, 1.7}, {"sigmoid", our_sigmoid, sigmoid_long, 1.8},
                                     {"erf", our_erf, erfl, 1.4},    {"sin", our_sin, sinl, 1.0},
                                     {"cos", our_cos, cosl, 1.0}};
enum { N_FUNCTIONS = sizeof FUNCTIONS / sizeof *FUNCTIONS };

static uint64_t state = 1;

static uint64_t next_bits(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state ^ state >> 29) * 0x9e3779b97f4a7c15u;
}

static double next_unit(void) { return (double)(next_bits() >> 11) * 0x1p-53; }

/* In units of the last place; 0 for matching specials. */
static double ulp_error(double got, long double want)
{
    double near = (double)want;
    if (isnan(near)) return isnan(got) ? 0 : 1e30;
    if (isinf(near) || isinf(got)) return near == got ? 0 : 1e30;
    int exponent = fabs(near) < DBL_MIN ? -1022 : ilogb(near);
    return isnan(got) ? 1e30 : (double)(fabsl((long double)got - want) / ldexpl(1.0L, exponent - 52));
}

typedef struct record {
    double worst, at;
} record;

static void compare(const function *f, double x, record *most)
{
    double      got = f->ours(x);
    long double want = f->reference((long double)x);
    double      error = ulp_error(got, want);
    if (!signbit(got) != !signbit(want) && !isnan(got)) error = 1e30;
    if (error > most->worst) most->worst = error, most->at = x;
}

/* Any bits, magnitudes around 1, and a range of each that functions change in. */
static double argument(int i)
{
    static const double range[] = {1, 3, 20, 750, 1e6};
    if (i % 3 == 0) return te_f64_from_bits(next_bits());
    if (i % 3 == 1) return ldexp(next_unit() * 2 - 1, (int)(next_bits() >> 32) % 60 - 50);
    return (next_unit() * 2 - 1) * range[i / 3 % 5];
}

static void check_function(const function *f)
{
    static const double edges[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1.0, -1.0, 0.5, -0.5, 6.0, 5.99, 19.06, 20.0,
                                   0x1p-1074, -0x1p-1074, 0x1p-1022, -0x1p-1022, DBL_MAX, -DBL_MAX, 709.782712893384,
                                   709.7827128933841, -708.3964185322641, -744.4400719213812, -745.1332191019411,
                                   -745.1332191019412, -746.0, 0x1p30, 0x1.fffffffffffffp29, 0x1.6a09e667f3bcdp-1,
                                   0x1.6a09e667f3bcdp0, 0x1.fffffffffffffp-1, 0x1.0000000000001p0};
    record most = {0, 0};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) compare(f, edges[i], &most);
    for (int i = 0; i < 600000; i++) compare(f, argument(i), &most);
    for (int i = 0; i < 100000; i++) compare(f, 0.7 + next_unit(), &most);
    for (int i = 1; i < 300000; i++) /* next to multiples of pi / 2 */
        compare(f, (i < 150000 ? i : floor(next_unit() * 6.8e8)) * 1.57079632679489661923, &most);
    printf("%-8s max %.3f ulp at %a\n", f->name, most.worst, most.at);
    CHECK_MSG(most.worst <= f->most, "%s: %g ulp at %a", f->name, most.worst, most.at);
}

/* --- loops ------------------------------------------------------------------------------------------------------ */

enum { COUNT = 1003 };

/* Every function of one or two arguments has the bits of the portable set. */
static void check_blocks(const te_blocks *blocks, const char *isa)
{
    static double a[COUNT], b[COUNT], want[COUNT], got[COUNT];
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < COUNT; i++) a[i] = argument(i), b[i] = argument(i + round);
        for (int op = 0; op < TE_BLOCK_OPS; op++)
            for (int numbers = 0; numbers < 8; numbers++) {
                te_block_op plain = te_program_blocks_f64_portable.op[op][numbers], fast = blocks->op[op][numbers];
                CHECK(!plain == !fast);
                if (!plain || !fast) continue;
                plain(want, a, b, a + 1, COUNT - 1);
                fast(got, a, b, a + 1, COUNT - 1);
                int wrong = 0;
                for (int i = 0; i < COUNT - 1; i++)
                    wrong += te_f64_bits(want[i]) != te_f64_bits(got[i]) && !(isnan(want[i]) && isnan(got[i]));
                CHECK_MSG(wrong == 0, "%s: operation %d, numbers %d: %d of %d differ", isa, op, numbers, wrong, COUNT);
            }
    }
}

/* From int64 and back, of numbers around the limit of the fast way, and beyond it. */
static void check_whole(const te_blocks *blocks, const char *isa)
{
    static int64_t whole[COUNT], back[COUNT];
    static double  values[COUNT];
    for (int bits = 1; bits < 64; bits++) {
        for (int i = 0; i < COUNT; i++) whole[i] = (int64_t)next_bits() >> (63 - bits), back[i] = 0;
        int wrong = 0;
        blocks->load[TE_I64](values, whole, 1, COUNT);
        for (int i = 0; i < COUNT; i++) wrong += values[i] != (double)whole[i];
        for (int i = 0; i < COUNT; i++) values[i] += bits < 50 ? next_unit() - 0.5 : 0;
        values[0] = -0.0, values[1] = bits < 50 ? -0.75 : bits < 60 ? NAN : INFINITY;
        blocks->store[TE_I64](back, 1, values, COUNT);
        for (int i = 0; i < COUNT; i++) wrong += back[i] != te_f64_to_i64(values[i]);
        CHECK_MSG(wrong == 0, "%s: %d of int64 with %d bits", isa, wrong, bits);
    }
}

/* Exponents with loops of their own mean what pow means. */
static void check_powers(void)
{
    static const double exponents[] = {2, 3, 0.5, 2.5, -1, 0};
    double a[COUNT], got[COUNT];
    for (int i = 0; i < COUNT; i++) a[i] = argument(i);
    a[0] = -INFINITY, a[1] = -0.0, a[2] = NAN, a[3] = INFINITY, a[4] = -4;
    for (size_t e = 0; e < sizeof exponents / sizeof *exponents; e++) {
        te_program_blocks_f64_portable.op[TE_PW_POW][2](got, a, &exponents[e], NULL, COUNT);
        for (int i = 0; i < COUNT; i++) {
            double error = ulp_error(got[i], powl((long double)a[i], (long double)exponents[e]));
            CHECK_MSG(error <= 1.5, "pow(%a, %g) is %a", a[i], exponents[e], got[i]);
        }
    }
}

int main(void)
{
    for (int i = 0; i < N_FUNCTIONS; i++) check_function(&FUNCTIONS[i]);
    check_powers();
    check_whole(&te_program_blocks_f64_portable, "portable");
#ifdef TE_ISA_HAS_X86
    static const te_blocks *const further[] = {&te_program_blocks_f64_avx2, &te_program_blocks_f64_avx512};
    for (int isa = TE_CPU_AVX2; isa <= (int)te_cpu_isa_detect(); isa++) {
        check_blocks(further[isa - TE_CPU_AVX2], te_cpu_isa_name((te_cpu_isa)isa));
        check_whole(further[isa - TE_CPU_AVX2], te_cpu_isa_name((te_cpu_isa)isa));
    }
#else
    check_blocks(&te_program_blocks_f64_portable, "portable");
#endif
    return TEST_END();
}
