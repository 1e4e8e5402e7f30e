/* test_halves.c - lines of float16, on every instruction set: each of its numbers, what lies between them and NaN of
 * all kinds, copied and through programs, against the conversions of dtype.h one by one. */
#include "program_hand.h"

#include "kernels/dtype.h"

enum { CODES = 1 << 16, RANDOM = 1 << 20, VALUES = 6 * CODES + RANDOM };

static float    floats[VALUES], wide[CODES];
static uint16_t codes[CODES], halves[VALUES], expected[VALUES];

/* Every number, its neighbours, and the middle of it and the next one with its neighbours. */
static void fill(void)
{
    uint64_t seed = 21;
    int      n = 0;
    for (int c = 0; c < CODES; c++) {
        codes[c] = (uint16_t)c;
        uint32_t bits = te_f32_bits(te_f16_to_f32((uint16_t)c));
        uint32_t middle = te_f32_bits(0.5f * (te_f16_to_f32((uint16_t)c) + te_f16_to_f32((uint16_t)(c + 1))));
        for (uint32_t step = 0; step < 3; step++) {
            floats[n++] = te_f32_from_bits(bits + step - 1);
            floats[n++] = te_f32_from_bits(middle + step - 1);
        }
    }
    for (int i = 0; i < RANDOM; i++) {
        uint32_t high = test_random(&seed) << 16;
        floats[n++] = te_f32_from_bits(high ^ test_random(&seed));
    }
    for (int i = 0; i < VALUES; i++) expected[i] = te_f32_to_f16(floats[i]);
}

static bool same_bits(float a, float b) { return te_f32_bits(a) == te_f32_bits(b); }

static void check(const char *what, te_cpu_isa isa)
{
    int wrong = 0, first = -1;
    for (int i = 0; i < VALUES; i++)
        if (halves[i] != expected[i] && wrong++ == 0) first = i;
    CHECK_MSG(wrong == 0, "%s, %s: %d wrong, 0x%08x became 0x%04x, not 0x%04x", what, te_cpu_isa_name(isa), wrong,
              first < 0 ? 0 : te_f32_bits(floats[first]), first < 0 ? 0 : halves[first],
              first < 0 ? 0 : expected[first]);
    wrong = 0;
    for (int c = 0; c < CODES; c++) wrong += !same_bits(wide[c], te_f16_to_f32((uint16_t)c));
    CHECK_MSG(wrong == 0, "%s, %s: %d of all numbers are others as float32", what, te_cpu_isa_name(isa), wrong);
    memset(halves, 0x55, sizeof halves);
    memset(wide, 0x55, sizeof wide);
}

static void check_copies(te_exec *exec)
{
    te_view from = test_view(floats, TE_F32, 1, (int64_t[]){VALUES});
    te_view to = test_view(halves, TE_F16, 1, (int64_t[]){VALUES});
    te_view all = test_view(codes, TE_F16, 1, (int64_t[]){CODES}), out = test_view(wide, TE_F32, 1, (int64_t[]){CODES});
    CHECK(te_cpu_copy(exec, &to, &from) == TE_OK && te_cpu_copy(exec, &out, &all) == TE_OK);
    check("copies", te_cpu(exec)->isa);
}

/* Through |x|, which changes no bit but the sign. */
static void run_program(te_exec *exec, void *to, te_dtype to_dtype, void *from, te_dtype from_dtype, int64_t n)
{
    static built p;
    begin(&p, "abs");
    output(&p, TE_OUT_ELEM, emit(&p, TE_PW_ABS, input(&p, TE_RATE_ELEM), -1, -1));
    te_operand in = {.data = from, .dtype = from_dtype, .stride = {1}};
    te_operand out = {.data = to, .dtype = to_dtype, .stride = {1}};
    te_run     run = {.ndim = 1, .shape = {n}, .inputs = &in, .outputs = &out};
    CHECK(te_cpu_program_run(exec, &p.program, &run, 1) == TE_OK);
    release(&p);
}

static void check_programs(te_exec *exec)
{
    run_program(exec, halves, TE_F16, floats, TE_F32, VALUES);
    run_program(exec, wide, TE_F32, codes, TE_F16, CODES);
    int negative = 0;
    for (int i = 0; i < VALUES; i++) {
        negative += halves[i] >> 15;
        halves[i] |= expected[i] & 0x8000u;
    }
    for (int c = 0; c < CODES; c++) {
        negative += (int)(te_f32_bits(wide[c]) >> 31);
        wide[c] = te_f32_from_bits(te_f32_bits(wide[c]) | (uint32_t)(c & 0x8000) << 16);
    }
    CHECK_MSG(negative == 0, "%d absolute values are negative", negative);
    check("programs", te_cpu(exec)->isa);
}

int main(void)
{
    fill();
    open_devices();
    for (int i = 0; i < n_devices; i++) {
        check_copies(&devices[i]);
        check_programs(&devices[i]);
    }
    close_devices();
    return TEST_END();
}
