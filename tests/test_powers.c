/* test_powers.c - powers in programs: te_pow's bits on every instruction set, for an exponent that is a number, for a
 * base that is one, and for exponents of which some, all or none have loops of their own. */
#include "program_hand.h"

#include "kernels/elementary.h"

enum { COUNT = 3001 };

static float bases[COUNT], exponents[COUNT], got[COUNT];

static void run(te_exec *exec, const float *base, const float *exponent, const char *what)
{
    static built p;
    begin(&p, "pow");
    te_operand in[2] = {{.dtype = TE_F32, .stride = {1}}, {.dtype = TE_F32, .stride = {1}}};
    int        a = base == bases ? input(&p, TE_RATE_ELEM) : number(&p, (double)*base);
    int        b = exponent == exponents ? input(&p, TE_RATE_ELEM) : number(&p, (double)*exponent);
    in[0].data = base == bases ? bases : exponents;
    in[1].data = exponents;
    output(&p, TE_OUT_ELEM, emit(&p, TE_PW_POW, a, b, -1));
    te_operand out = {.data = got, .dtype = TE_F32, .stride = {1}};
    te_run     r = {.ndim = 1, .shape = {COUNT}, .inputs = in, .outputs = &out};
    CHECK(te_cpu_program_run(exec, &p.program, &r, 1) == TE_OK);
    release(&p);
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        float want = te_pow(base == bases ? bases[i] : *base, exponent == exponents ? exponents[i] : *exponent);
        bool  same = isnan(want) ? isnan(got[i]) : te_f32_bits(want) == te_f32_bits(got[i]);
        wrong += !same;
    }
    CHECK_MSG(wrong == 0, "%s: %d of %d are wrong, %s", what, wrong, (int)COUNT,
              te_cpu_isa_name(te_cpu(exec)->isa));
}

int main(void)
{
    static const float edges[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, 0x1.fffffep127f};
    static const float numbers[] = {0.0f, 1.0f, -1.0f, 2.0f, -2.0f, 3.0f, 7.0f, -15.0f, 0.5f, -0.5f,
                                    2.5f, 1.5f, 16.0f, -33.0f, 0.1f, 1e9f, -1e9f, INFINITY, -INFINITY, NAN};
    uint64_t state = 88172645463325252u;
    open_devices();
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < COUNT; i++) {
            bases[i] = (float)test_uniform(&state, -4, 12);
            if (i % 7 == 0) bases[i] = edges[test_random(&state) % (sizeof edges / sizeof *edges)];
            exponents[i] = (float)test_uniform(&state, -20, 20) + 0.1f;
            if (turn == 2 || (turn == 1 && i % 5 == 0)) exponents[i] = (float)(int)exponents[i];
            if (turn == 1 && i % 11 == 0)
                exponents[i] = numbers[test_random(&state) % (sizeof numbers / sizeof *numbers)];
        }
        for (int d = 0; d < n_devices; d++) {
            run(&devices[d], bases, exponents, "of two tensors");
            for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
                if (turn == 0) run(&devices[d], bases, &numbers[i], "exponent a number");
                run(&devices[d], &numbers[i], exponents, "base a number");
            }
        }
    }
    close_devices();
    return TEST_END();
}
