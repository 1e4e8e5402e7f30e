/* test_program_build.c - emitting, sharing, simplifying, pruning, appending, dumping and verifying programs. */
#include "test.h"
#include "program_eval.h"
#include "core/program_internal.h"

static te_program *new_program(void) { return te_program_new(&te_mem_libc, "test"); }

static void check_verified(const te_program *program)
{
    char wrong[160];
    CHECK_MSG(te_program_verify(program, wrong, sizeof wrong), "%s", wrong);
}

static int emit(te_program *p, te_opcode op, int a, int b) { return te_program_emit(p, op, a, b, -1); }

static void test_values(void)
{
    te_program *p = new_program();
    int x = te_program_input(p, TE_RATE_ELEM), r = te_program_input(p, TE_RATE_ROW);
    int u = te_program_input(p, TE_RATE_UNIFORM);
    int q = te_program_param(p, 2), k = te_program_const(p, 0.25);
    CHECK(p->n_inputs == 3 && p->n_params == 3);
    CHECK(te_program_load(p, 1) == r && te_program_load(p, 3) == -1 && te_program_load(p, -1) == -1);
    CHECK(te_program_param(p, 2) == q && te_program_param(p, 40000) == -1 && te_program_param(p, -1) == -1);
    CHECK(te_program_const(p, 0.25) == k && te_program_const(p, -0.0) != te_program_const(p, 0.0));
    CHECK(te_program_rate(p, emit(p, TE_PW_ADD, q, k)) == TE_RATE_UNIFORM);
    CHECK(te_program_rate(p, emit(p, TE_PW_ADD, u, r)) == TE_RATE_ROW);
    CHECK(te_program_rate(p, emit(p, TE_PW_ADD, r, x)) == TE_RATE_ELEM);
    CHECK(te_program_rate(p, emit(p, TE_PW_ROWSUM, x, -1)) == TE_RATE_ROW);
    CHECK(te_program_rate(p, te_program_emit(p, TE_PW_COLUMN, -1, -1, -1)) == TE_RATE_ELEM);
    CHECK(emit(p, TE_PW_MUL, x, r) == emit(p, TE_PW_MUL, r, x));
    CHECK(emit(p, TE_PW_SUB, x, r) != emit(p, TE_PW_SUB, r, x));
    CHECK(emit(p, TE_PW_MIN, x, r) != emit(p, TE_PW_MIN, r, x));

    int keep = te_program_generator(p, TE_PW_KEEP, 1, q);
    CHECK(p->n_rngs == 2 && te_program_rate(p, keep) == TE_RATE_ELEM);
    CHECK(te_program_generator(p, TE_PW_KEEP, 1, q) == keep && te_program_generator(p, TE_PW_KEEP, 0, q) != keep);
    CHECK(te_program_generator(p, TE_PW_RANDOM, 0, -1) >= 0 && te_program_generator(p, TE_PW_ADD, 0, x) == -1);

    int n = p->n_insns;
    CHECK(emit(p, TE_PW_ADD, -1, x) == -1 && emit(p, TE_PW_ADD, x, n) == -1 && emit(p, TE_PW_LOAD, -1, -1) == -1);
    CHECK(te_program_emit(p, TE_PW_COUNT, x, x, x) == -1 && te_program_emit(p, TE_PW_KEEP, x, -1, -1) == -1);
    CHECK(p->n_insns == n);
    CHECK(te_program_output(p, TE_OUT_ROW, x) == -1 && te_program_output(p, TE_OUT_ELEM, -1) == -1);
    CHECK(te_program_output(p, TE_OUT_ROW, r) == 0 && te_program_output(p, TE_OUT_SUM, x) == 1);
    check_verified(p);
    te_program_free(p);
    te_program_free(NULL);
}

static void test_reduction_of_row_value(void)
{
    te_program *p = new_program();
    int r = te_program_input(p, TE_RATE_ROW);
    int sum = emit(p, TE_PW_ROWSUM, r, -1);
    CHECK(te_program_rate(p, p->insns[sum].arg[0]) == TE_RATE_ELEM);
    te_program_output(p, TE_OUT_ROW, sum);
    check_verified(p);
    double data[2] = {1.5, -2}, out[2], *outputs[1] = {out};
    eval_operand input = {data, 1, 0};
    program_eval(p, &(eval_space){2, 5, &input, NULL, true}, outputs);
    CHECK(out[0] == 7.5 && out[1] == -10);
    te_program_free(p);
}

/* --- simplification ----------------------------------------------------------------------------------------------- */

static double const_value(const te_program *p, int value)
{
    return te_program_is_op(p, value, TE_PW_CONST) ? p->insns[value].imm : NAN;
}

static void test_rules(void)
{
    te_program *p = new_program();
    int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, TE_RATE_ELEM);
    int one = te_program_const(p, 1), zero = te_program_const(p, 0), minus_zero = te_program_const(p, -0.0);
    CHECK(emit(p, TE_PW_MUL, x, one) == x && emit(p, TE_PW_MUL, one, x) == x && emit(p, TE_PW_DIV, x, one) == x);
    CHECK(emit(p, TE_PW_SUB, x, zero) == x && emit(p, TE_PW_ADD, x, minus_zero) == x);
    CHECK(emit(p, TE_PW_ADD, x, zero) != x && emit(p, TE_PW_SUB, x, minus_zero) != x);
    CHECK(!te_program_is_op(p, emit(p, TE_PW_MUL, x, zero), TE_PW_CONST));
    CHECK(!te_program_is_op(p, emit(p, TE_PW_SUB, x, x), TE_PW_CONST));
    CHECK(emit(p, TE_PW_NEG, emit(p, TE_PW_NEG, x, -1), -1) == x);
    int magnitude = emit(p, TE_PW_ABS, x, -1);
    CHECK(emit(p, TE_PW_ABS, emit(p, TE_PW_NEG, x, -1), -1) == magnitude);
    CHECK(emit(p, TE_PW_ABS, magnitude, -1) == magnitude);
    int half = emit(p, TE_PW_TO_BF16, x, -1);
    CHECK(emit(p, TE_PW_TO_BF16, half, -1) == half && emit(p, TE_PW_TO_F32, half, -1) == half);
    CHECK(emit(p, TE_PW_TO_F16, half, -1) != half);
    CHECK(te_program_emit(p, TE_PW_WHERE, one, x, y) == x && te_program_emit(p, TE_PW_WHERE, minus_zero, x, y) == y);
    CHECK(te_program_emit(p, TE_PW_WHERE, te_program_const(p, NAN), x, y) == x);
    CHECK(te_program_is_op(p, te_program_emit(p, TE_PW_WHERE, te_program_const(p, 1e-300), x, y), TE_PW_WHERE));
    CHECK(te_program_emit(p, TE_PW_WHERE, y, x, x) == x && emit(p, TE_PW_MIN, x, x) == x);
    CHECK(te_program_is_op(p, emit(p, TE_PW_DIV, x, te_program_const(p, 4)), TE_PW_MUL));
    CHECK(te_program_is_op(p, emit(p, TE_PW_DIV, x, te_program_const(p, 3)), TE_PW_DIV));
    CHECK(te_program_is_op(p, emit(p, TE_PW_DIV, x, te_program_const(p, 0x1p-140)), TE_PW_DIV));
    CHECK(te_program_is_op(p, emit(p, TE_PW_DIV, one, x), TE_PW_RECIP));
    CHECK(emit(p, TE_PW_POW, x, te_program_const(p, 2)) == emit(p, TE_PW_MUL, x, x));
    CHECK(emit(p, TE_PW_POW, x, one) == x && const_value(p, emit(p, TE_PW_POW, x, zero)) == 1);
    check_verified(p);
    te_program_free(p);
}

static void test_folding(void)
{
    te_program *p = new_program();
    int a = te_program_const(p, 3), b = te_program_const(p, 0.1), big = te_program_const(p, 1e300);
    CHECK(const_value(p, emit(p, TE_PW_ADD, a, a)) == 6 && const_value(p, emit(p, TE_PW_NEG, b, -1)) == -0.1);
    CHECK(const_value(p, emit(p, TE_PW_LT, b, a)) == 1 && const_value(p, emit(p, TE_PW_MAX, b, a)) == 3);
    CHECK(const_value(p, emit(p, TE_PW_FLOOR, b, -1)) == 0);
    CHECK(const_value(p, emit(p, TE_PW_SQRT, te_program_const(p, 9), -1)) == 3);
    CHECK(const_value(p, emit(p, TE_PW_TO_F32, b, -1)) == (double)0.1f);
    CHECK(isnan(const_value(p, emit(p, TE_PW_ISFINITE, big, -1)))); /* finite only in float64: left to the run */
    CHECK(isnan(const_value(p, emit(p, TE_PW_EXP, a, -1))));
    CHECK(isnan(const_value(p, emit(p, TE_PW_SUB, te_program_const(p, INFINITY), te_program_const(p, INFINITY)))));
    te_program_free(p);
}

/* --- random programs, with and without simplification ------------------------------------------------------------- */

static int raw_push(te_program *p, te_opcode op, int slot, const int32_t arg[3], double imm)
{
    void *insns = p->insns;
    te_mem_grow(p->mem, &insns, &p->insn_capacity, (size_t)p->n_insns + 1, sizeof(te_insn));
    p->insns = insns;
    te_insn insn = {.op = (uint8_t)op, .slot = (int16_t)slot, .arg = {arg[0], arg[1], arg[2]}, .imm = imm};
    insn.rate = (uint8_t)te_insn_rate(p, &insn);
    p->insns[p->n_insns] = insn;
    return p->n_insns++;
}

enum { RANDOM_INPUTS = 3, RANDOM_LENGTH = 50, RANDOM_ROWS = 4, RANDOM_COLUMNS = 7 };

/* Every value of the raw program is an output, so nothing is hidden. Reductions read sums only of what they may. */
static te_program *random_raw(uint64_t *seed)
{
    static const double constants[] = {0, -0.0, 1, -1, 2, 0.5, 0.1, 3, INFINITY, -INFINITY, NAN, 1e-300, 1e30, 4, 8};
    static const te_rate rates[RANDOM_INPUTS] = {TE_RATE_ELEM, TE_RATE_ROW, TE_RATE_UNIFORM};
    te_program *p = new_program();
    for (int i = 0; i < RANDOM_INPUTS; i++) te_program_input(p, rates[i]);
    for (int i = 0; i < RANDOM_LENGTH; i++) {
        te_opcode op = (te_opcode)random_below(seed, TE_PW_COUNT);
        int32_t arg[3] = {-1, -1, -1};
        for (int k = 0; k < te_opcode_args(op); k++) arg[k] = random_below(seed, p->n_insns);
        int slot = op == TE_PW_LOAD || op == TE_PW_PARAM || op == TE_PW_RANDOM || op == TE_PW_KEEP || op == TE_PW_NORMAL
                       ? random_below(seed, RANDOM_INPUTS) : 0;
        if (te_opcode_reduces(op) && te_program_rate(p, arg[0]) != TE_RATE_ELEM) continue;
        double imm = op == TE_PW_CONST ? constants[random_below(seed, (int)(sizeof constants / sizeof *constants))] : 0;
        raw_push(p, op, slot, arg, imm);
    }
    p->n_params = p->n_rngs = RANDOM_INPUTS;
    for (int i = 0; i < p->n_insns; i++) te_program_output(p, TE_OUT_ELEM, i);
    return p;
}

static double hostile(uint64_t *seed)
{
    static const double values[] = {0,     -0.0,   1,    -1,       INFINITY, -INFINITY, NAN,
                                    1e-40, -1e-40, 3e38, 0x1p-149, 0.5,      2.5,       1e9};
    int i = random_below(seed, 30);
    return i < (int)(sizeof values / sizeof *values) ? values[i] : random_between(seed, -4, 4);
}

static bool same_number(double a, double b) { return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0; }

static double *evaluate_all(const te_program *p, const eval_space *space)
{
    size_t size = (size_t)space->rows * (size_t)space->columns;
    double *memory = malloc(((size_t)p->n_outputs * size + 1) * sizeof *memory);
    double **outputs = malloc(((size_t)p->n_outputs + 1) * sizeof *outputs);
    for (int i = 0; i < p->n_outputs; i++) outputs[i] = memory + (size_t)i * size;
    program_eval(p, space, outputs);
    free(outputs);
    return memory;
}

static void compare_programs(const te_program *a, const te_program *b, uint64_t *seed)
{
    double data[RANDOM_INPUTS][RANDOM_ROWS * RANDOM_COLUMNS], params[RANDOM_INPUTS];
    eval_operand inputs[RANDOM_INPUTS] = {{data[0], RANDOM_COLUMNS, 1}, {data[1], 1, 0}, {data[2], 0, 0}};
    for (int i = 0; i < RANDOM_INPUTS; i++) {
        params[i] = hostile(seed);
        for (int k = 0; k < RANDOM_ROWS * RANDOM_COLUMNS; k++) data[i][k] = hostile(seed);
    }
    for (int f32 = 0; f32 < 2; f32++) {
        eval_space space = {RANDOM_ROWS, RANDOM_COLUMNS, inputs, params, f32};
        double *left = evaluate_all(a, &space), *right = evaluate_all(b, &space);
        int differing = -1;
        for (int i = 0; i < a->n_outputs * RANDOM_ROWS * RANDOM_COLUMNS; i++)
            if (!same_number(left[i], right[i]) && differing < 0) differing = i;
        int output = differing / (RANDOM_ROWS * RANDOM_COLUMNS);
        CHECK_MSG(differing < 0, "f32=%d output %d (%s): %.17g, simplified %.17g", f32, output,
                  te_opcode_name((te_opcode)a->insns[output].op), left[differing], right[differing]);
        free(left);
        free(right);
    }
}

static void test_random_programs(void)
{
    uint64_t seed = 1;
    for (int round = 0; round < 400; round++) {
        te_program *raw = random_raw(&seed), *simple = new_program();
        int inputs[RANDOM_INPUTS], outputs[RANDOM_LENGTH + RANDOM_INPUTS];
        for (int i = 0; i < RANDOM_INPUTS; i++) inputs[i] = te_program_input(simple, (te_rate)raw->input_rates[i]);
        CHECK(te_program_append(simple, raw, inputs, 0, 0, outputs) == TE_OK);
        for (int i = 0; i < raw->n_outputs; i++) CHECK(te_program_output(simple, TE_OUT_ELEM, outputs[i]) == i);
        check_verified(simple);
        CHECK(simple->n_insns <= raw->n_insns + 3);
        compare_programs(raw, simple, &seed);
        int before = simple->n_insns;
        CHECK(te_program_prune(simple) == TE_OK && simple->n_insns <= before);
        check_verified(simple);
        compare_programs(raw, simple, &seed);
        te_program *copy = te_program_clone(simple);
        check_verified(copy);
        compare_programs(simple, copy, &seed);
        te_program_free(copy);
        te_program_free(simple);
        te_program_free(raw);
    }
}

/* --- joining ------------------------------------------------------------------------------------------------------ */

static te_program *scale_program(const te_mem *mem)
{
    te_program *p = te_program_new(mem, "scale");
    if (!p) return NULL;
    int x = te_program_input(p, TE_RATE_ELEM), unused = te_program_input(p, TE_RATE_ELEM);
    int masked = te_program_emit(p, TE_PW_MUL, x, te_program_generator(p, TE_PW_KEEP, 0, te_program_const(p, 0.5)), -1);
    int y = te_program_emit(p, TE_PW_MUL, masked, te_program_param(p, 0), -1);
    if (unused < 0 || te_program_output(p, TE_OUT_ELEM, y) < 0) return te_program_free(p), NULL;
    return p;
}

static void test_append(void)
{
    te_program *p = new_program(), *scale = scale_program(&te_mem_libc);
    int x = te_program_input(p, TE_RATE_ELEM), first, second, third;
    CHECK(te_program_append(p, scale, (const int[]){x, -1}, 0, 0, &first) == TE_OK);
    int rounded = te_program_emit(p, TE_PW_TO_BF16, first, -1, -1);
    CHECK(te_program_append(p, scale, (const int[]){rounded, -1}, 1, 1, &second) == TE_OK);
    CHECK(p->n_params == 2 && p->n_rngs == 2);
    int n = p->n_insns;
    CHECK(te_program_append(p, scale, (const int[]){x, -1}, 0, 0, &third) == TE_OK);
    CHECK(third == first && p->n_insns == n);
    CHECK(te_program_append(p, scale, (const int[]){-1, x}, 0, 0, &third) == TE_ERROR_ARGUMENT);
    CHECK(te_program_append(p, scale, (const int[]){x, x}, -1, 0, &third) == TE_ERROR_ARGUMENT);
    te_program_output(p, TE_OUT_ELEM, second);
    check_verified(p);
    CHECK(te_program_prune(p) == TE_OK && p->n_inputs == 1);
    check_verified(p);
    te_program_free(scale);
    te_program_free(p);
}

/* What is known of an exponential's argument stays with it in copies, and only there. */
static void test_exp_below(void)
{
    te_program *p = new_program(), *copy = new_program();
    int x = te_program_input(p, TE_RATE_ELEM), plain = emit(p, TE_PW_EXP, x, -1), below = te_program_exp_below(p, x), y;
    CHECK(below != plain && te_program_exp_below(p, x) == below && emit(p, TE_PW_EXP, x, -1) == plain);
    CHECK(p->insns[plain].slot == 0 && p->insns[below].slot == TE_EXP_BELOW && te_program_exp_below(p, -1) == -1);
    te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_SUB, plain, below));
    check_verified(p);
    CHECK(te_program_append(copy, p, (const int[]){te_program_input(copy, TE_RATE_ELEM)}, 0, 0, &y) == TE_OK);
    te_program_output(copy, TE_OUT_ELEM, y);
    check_verified(copy);
    char text[256];
    te_program_dump(copy, text, sizeof text);
    CHECK_MSG(strstr(text, " = exp %0\n") && strstr(text, " = exp #1 %0\n"), "%s", text);
    CHECK(copy->n_insns == p->n_insns && copy->insns[copy->insns[y].arg[0]].slot == 0 &&
          copy->insns[copy->insns[y].arg[1]].slot == TE_EXP_BELOW);
    te_program_free(copy);
    te_program_free(p);
}

static void test_dump(void)
{
    te_program *p = new_program();
    int x = te_program_input(p, TE_RATE_ELEM), y = te_program_emit(p, TE_PW_MUL, x, te_program_const(p, 0.1), -1);
    te_program_output(p, TE_OUT_ELEM, y);
    te_program_output(p, TE_OUT_SUM, y);
    const char *expected = "test: 1 inputs, 0 parameters, 0 generators\n  %0 elem = load #0\n  %1 uniform = const 0.1\n"
                           "  %2 elem = mul %0 %1\n  output 0: elem %2\n  output 1: sum %2\n";
    char text[512], small[10];
    int length = te_program_dump(p, text, sizeof text);
    CHECK_MSG(strcmp(text, expected) == 0, "%s", text);
    CHECK(length == (int)strlen(expected) && te_program_dump(p, NULL, 0) == length);
    CHECK(te_program_dump(p, small, sizeof small) == length && strcmp(small, "test: 1 i") == 0);
    te_program_free(p);
}

static void test_verify(void)
{
    te_program *p = new_program();
    int x = te_program_input(p, TE_RATE_ELEM);
    int sum = emit(p, TE_PW_ROWSUM, emit(p, TE_PW_EXP, x, -1), -1);
    te_program_output(p, TE_OUT_ROW, sum);
    te_insn good = p->insns[sum];
    check_verified(p);
    te_insn bad[] = {good, good, good, good, good, good, good};
    bad[0].op = TE_PW_COUNT;
    bad[1].rate = TE_RATE_ELEM;
    bad[2].arg[0] = sum;
    bad[3].arg[1] = 0;
    bad[4].slot = 1;
    bad[5] = (te_insn){.op = TE_PW_LOAD, .rate = TE_RATE_ELEM, .slot = 1, .arg = {-1, -1, -1}};
    bad[6] = (te_insn){.op = TE_PW_EXP, .rate = TE_RATE_ELEM, .slot = TE_EXP_BELOW + 1, .arg = {x, -1, -1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char wrong[160] = "";
        p->insns[sum] = bad[i];
        CHECK_MSG(!te_program_verify(p, wrong, sizeof wrong) && wrong[0], "case %zu", i);
    }
    p->insns[sum] = good;
    p->outputs[0].value = x;
    CHECK(!te_program_verify(p, NULL, 0));
    p->outputs[0].value = 7;
    CHECK(!te_program_verify(p, NULL, 0));
    te_program_free(p);
}

/* --- exhausted memory --------------------------------------------------------------------------------------------- */

static te_status build_much(const te_mem *mem)
{
    te_program *p = te_program_new(mem, "much"), *scale = scale_program(mem), *copy = NULL;
    te_status status = TE_ERROR_MEMORY;
    int y = -1;
    if (p && scale) {
        int x = te_program_input(p, TE_RATE_ELEM);
        if (x >= 0) status = te_program_append(p, scale, (const int[]){x, -1}, 0, 0, &y);
        for (int i = 0; status == TE_OK && i < 40; i++)
            y = te_program_emit(p, TE_PW_TANH, te_program_emit(p, TE_PW_ADD, y, te_program_const(p, i), -1), -1, -1);
        if (y < 0 || te_program_output(p, TE_OUT_ELEM, y) < 0) status = TE_ERROR_MEMORY;
        if (status == TE_OK) status = te_program_prune(p);
        if (status == TE_OK && !(copy = te_program_clone(p))) status = TE_ERROR_MEMORY;
    }
    te_program_free(copy);
    te_program_free(scale);
    te_program_free(p);
    return status;
}

static void test_memory(void)
{
    te_status status = TE_ERROR_MEMORY;
    long n = 0;
    while (status != TE_OK && n < 1000) {
        failing_heap heap = {.fail_at = ++n};
        te_mem mem = {failing_realloc, &heap};
        status = build_much(&mem);
        CHECK_MSG(heap.live == 0, "%zu bytes lost when allocation %ld fails", heap.live, n);
        CHECK(status == TE_OK || status == TE_ERROR_MEMORY);
    }
    CHECK(n > 10 && n < 1000);
}

static int released;
static void release_stub(te_program *program)
{
    program->compiled = NULL;
    released++;
}

static void test_compiled(void)
{
    te_program *p = new_program();
    int x = te_program_input(p, TE_RATE_ELEM);
    p->compiled = &released;
    p->release_compiled = release_stub;
    CHECK(te_program_load(p, 0) == x && released == 0);
    te_program_emit(p, TE_PW_EXP, x, -1, -1);
    CHECK(released == 1 && !p->compiled);
    for (int i = 2; i <= 3; i++) { /* pruning drops exp and changes the program; freeing */
        p->compiled = &released;
        p->release_compiled = release_stub;
        if (i == 2) CHECK(te_program_prune(p) == TE_OK);
        else te_program_free(p);
        CHECK(released == i);
    }
}

int main(void)
{
    test_values();
    test_reduction_of_row_value();
    test_rules();
    test_folding();
    test_random_programs();
    test_append();
    test_dump();
    test_exp_below();
    test_verify();
    test_memory();
    test_compiled();
    return TEST_END();
}
