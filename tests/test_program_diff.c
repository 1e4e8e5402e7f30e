/* test_program_diff.c - derived gradients: every opcode, choices at ties, every broadcast, random programs. */
#include "program_gradient.h"
#include "core/program_internal.h"
#include "kernels/program_tables.h"

/* --- every opcode ------------------------------------------------------------------------------------------------- */

static int emit(te_program *p, te_opcode op, int a, int b) { return te_program_emit(p, op, a, b, -1); }

/* a^2 + 0.5: a positive argument for those that need one. */
static int positive(te_program *p, int a)
{
    return emit(p, TE_PW_ADD, emit(p, TE_PW_MUL, a, a), te_program_const(p, 0.5));
}

static bool needs_positive(te_opcode op)
{
    return op == TE_PW_SQRT || op == TE_PW_RSQRT || op == TE_PW_RECIP || op == TE_PW_LOG || op == TE_PW_POW;
}

/* Arguments: input 0 read per element, input 1 declared with `rate`, so each broadcast meets each opcode. */
static int apply_opcode(te_program *p, te_opcode op, int x, int y, bool exchanged)
{
    int a = exchanged ? y : x, b = exchanged ? x : y;
    if (op == TE_PW_KEEP || op == TE_PW_RANDOM || op == TE_PW_NORMAL)
        return emit(p, TE_PW_MUL, y, te_program_generator(p, op, 0, te_program_const(p, 0.4)));
    if (op == TE_PW_DIV) b = positive(p, b);
    if (needs_positive(op)) a = positive(p, a);
    if (te_opcode_args(op) == 0) return emit(p, TE_PW_MUL, y, te_program_emit(p, op, -1, -1, -1));
    if (te_opcode_args(op) == 1) return emit(p, op, emit(p, TE_PW_MUL, a, b), -1);
    if (te_opcode_args(op) == 3) return te_program_emit(p, op, emit(p, TE_PW_LT, a, b), a, b);
    return emit(p, op, a, b);
}

static bool is_rounding(te_opcode op) { return op == TE_PW_TO_BF16 || op == TE_PW_TO_F16 || op == TE_PW_TO_F32; }

static void test_opcodes(void)
{
    uint64_t seed = 3;
    for (int op = TE_PW_COLUMN; op < TE_PW_COUNT; op++)
        for (int variant = 0; variant < 6; variant++) {
            if (is_rounding((te_opcode)op)) continue;
            te_program *p = te_program_new(&te_mem_libc, te_opcode_name((te_opcode)op));
            int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, (te_rate)(variant % 3));
            int r = apply_opcode(p, (te_opcode)op, x, y, variant >= 3);
            te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_SIN, r, -1));
            grad_case g;
            case_open(&g, p->name, p, &seed);
            check_and_clear(&g);
            te_program_free(p);
        }
}

/* Roundings pass the gradient on, comparisons and steps have none. */
static void test_no_gradient(void)
{
    static const te_opcode passing[] = {TE_PW_TO_BF16, TE_PW_TO_F16, TE_PW_TO_F32};
    static const te_opcode steps[] = {TE_PW_SIGN,  TE_PW_FLOOR, TE_PW_CEIL,    TE_PW_ROUND,
                                      TE_PW_TRUNC, TE_PW_ISNAN, TE_PW_ISFINITE};
    bool wanted[] = {true};
    te_output_kind reduce[] = {TE_OUT_ELEM};
    for (size_t i = 0; i < 10; i++) {
        bool passes = i < 3;
        te_program *p = te_program_new(&te_mem_libc, "step");
        int x = te_program_input(p, TE_RATE_ELEM);
        te_program_output(p, TE_OUT_ELEM, emit(p, passes ? passing[i] : steps[i - 3], x, -1));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        CHECK(gradient.n_sources == passes && gradient.backward->n_insns == 1);
        CHECK(passes || te_program_is_const(gradient.backward, gradient.backward->outputs[0].value, 0));
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* An infinite or NaN adjoint stays away from the side that was not chosen; ties go where program.h says. */
static void test_choices(void)
{
    static const te_opcode ops[] = {TE_PW_MIN, TE_PW_MAX};
    bool wanted[] = {true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_ELEM};
    for (int i = 0; i < 2; i++) {
        te_program *p = te_program_new(&te_mem_libc, "choice");
        int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, TE_RATE_ELEM);
        te_program_output(p, TE_OUT_ELEM, emit(p, ops[i], x, y));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        double values[][3] = {{1, 2, 1}, {2, 1, 1}, {INFINITY, NAN, 5}}, dx[3], dy[3], *outputs[] = {dx, dy};
        eval_operand sources[3];
        for (int k = 0; k < gradient.n_sources; k++) {
            te_grad_source source = gradient.sources[k];
            sources[k] = (eval_operand){values[source.kind == TE_GRAD_FROM_DOUT ? 2 : source.index], 3, 1};
        }
        program_eval(gradient.backward, &(eval_space){1, 3, sources, NULL, false}, outputs);
        double *chosen = i == 0 ? dx : dy, *other = i == 0 ? dy : dx;
        CHECK(chosen[0] == INFINITY && chosen[1] == 0 && chosen[2] == 2.5);
        CHECK(other[0] == 0 && isnan(other[1]) && other[2] == 2.5);
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* Beside a constant a tie goes to the first of min and to the second of max. */
static void test_choices_of_constants(void)
{
    static const te_opcode ops[] = {TE_PW_MIN, TE_PW_MAX};
    bool wanted[] = {true};
    te_output_kind reduce[] = {TE_OUT_ELEM};
    for (int i = 0; i < 4; i++) {
        te_program *p = te_program_new(&te_mem_libc, "choice");
        int x = te_program_input(p, TE_RATE_ELEM), one = te_program_const(p, 1);
        bool first = i < 2;
        te_program_output(p, TE_OUT_ELEM, emit(p, ops[i % 2], first ? x : one, first ? one : x));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        double values[] = {1}, d[] = {5}, dx[1], *outputs[] = {dx};
        eval_operand sources[2];
        for (int k = 0; k < gradient.n_sources; k++)
            sources[k] = (eval_operand){gradient.sources[k].kind == TE_GRAD_FROM_DOUT ? d : values, 1, 1};
        program_eval(gradient.backward, &(eval_space){1, 1, sources, NULL, false}, outputs);
        CHECK(dx[0] == (first == (ops[i % 2] == TE_PW_MIN) ? 5 : 0));
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* y = bf16(x * 1.7) * 0.3 + x, where x and the product in the middle are tensors: each program rounds what it gives
 * them, before it is added to what is there, and their factors stay apart. */
static void test_joints(void)
{
    for (int dtypes = 0; dtypes < 2; dtypes++) {
        te_program *p = te_program_new(&te_mem_libc, "joined");
        te_joint joints[16] = {{0}};
        uint8_t stored = dtypes ? TE_PW_TO_BF16 : 0;
        int x = te_program_input(p, TE_RATE_ELEM), first = emit(p, TE_PW_MUL, x, te_program_const(p, 1.7));
        joints[x] = (te_joint){false, true, stored};
        joints[first].last = true;
        int middle = dtypes ? emit(p, TE_PW_TO_BF16, first, -1) : first;
        joints[middle].tensor = true;
        joints[middle].stored = stored;
        int last = emit(p, TE_PW_MUL, middle, te_program_const(p, 0.3));
        joints[last].last = true;
        te_program_output(p, TE_OUT_ELEM, last);
        te_program_output(p, TE_OUT_ELEM, x);
        bool wanted[] = {true};
        te_output_kind reduce[] = {TE_OUT_ELEM};
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce, .joints = joints,
                                       .out_stored = (const uint8_t[]){stored, stored}};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        char text[1000];
        te_program_dump(gradient.backward, text, sizeof text);
        CHECK_MSG(count_opcode(gradient.backward, TE_PW_MUL) == 2, "%s", text);
        CHECK_MSG(count_opcode(gradient.backward, TE_PW_TO_BF16) == dtypes, "%s", text); /* the sum's store rounds */
        te_gradient_clear(&gradient);
        request.joints = NULL;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        CHECK(count_opcode(gradient.backward, TE_PW_TO_BF16) == 0);
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* The gradient of f(x) y is f'(x) by itself times what comes from outside, so that f and f' may be looked up; where f
 * makes a choice, what comes from outside stays away from the side that was not chosen. */
static void test_slopes(void)
{
    bool wanted[] = {true, true}, narrow[TE_GRAD_MAX_SOURCES] = {false}, all[] = {true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_ELEM};
    for (int chooses = 0; chooses < 2; chooses++) {
        te_program *p = te_program_new(&te_mem_libc, "slope");
        int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, TE_RATE_ELEM);
        int base = chooses ? emit(p, TE_PW_MAX, x, te_program_const(p, 0)) : x;
        int bent = emit(p, TE_PW_ERF, emit(p, TE_PW_MUL, base, te_program_const(p, 0.7)), -1);
        int f = emit(p, TE_PW_MUL, emit(p, TE_PW_ADD, bent, te_program_const(p, 1)), base);
        te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_MUL, f, y));
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        const te_program *backward = gradient.backward;
        te_program_table tables[4];
        double from_y[] = {-1, 3}, from_x[] = {-2, 2}, from_out[] = {INFINITY, 1}, dx[2], dy[2], *outputs[] = {dx, dy};
        eval_operand sources[3];
        for (int k = 0; k < gradient.n_sources; k++) {
            te_grad_source source = gradient.sources[k];
            narrow[k] = source.kind != TE_GRAD_FROM_DOUT && source.index == 0;
            double *values = source.kind == TE_GRAD_FROM_DOUT ? from_out : narrow[k] ? from_x : from_y;
            sources[k] = (eval_operand){values, 2, 1};
        }
        int n = te_program_tables(backward, narrow, all, tables, 4);
        const te_insn *insn = &backward->insns[backward->outputs[0].value];
        bool last = n == 2 && (insn->arg[0] == tables[0].value || insn->arg[0] == tables[1].value ||
                               insn->arg[1] == tables[0].value || insn->arg[1] == tables[1].value);
        CHECK(chooses || (insn->op == TE_PW_MUL && last));
        program_eval(backward, &(eval_space){1, 2, sources, NULL, false}, outputs);
        double h = 1.4, slope = 1 + erf(h) + 2 * 0.7 * 2 / sqrt(acos(-1)) * exp(-h * h);
        CHECK(fabs(dx[1] - 3 * slope) < 1e-12 && (chooses ? dx[0] == 0 : isinf(dx[0])));
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* Of f(x) with f(x) read elsewhere, as in (x - e^x) y + e^x: what both contribute cancels before it is multiplied. And
 * a small number divides an adjoint, not 1. */
static void test_adjoints_first(void)
{
    bool wanted[] = {true, true};
    te_output_kind reduce[] = {TE_OUT_ELEM, TE_OUT_ELEM};
    for (int kind = 0; kind < 2; kind++) {
        te_program *p = te_program_new(&te_mem_libc, "adjoints");
        int x = te_program_input(p, TE_RATE_ELEM), y = te_program_input(p, TE_RATE_ELEM), e = emit(p, TE_PW_EXP, x, -1);
        int gated = emit(p, TE_PW_ADD, emit(p, TE_PW_MUL, emit(p, TE_PW_SUB, x, e), y), e);
        te_program_output(p, TE_OUT_ELEM, kind ? emit(p, TE_PW_ADD, emit(p, TE_PW_LOG, x, -1), y) : gated);
        te_gradient_request request = {.forward = p, .wanted = wanted, .reduce = reduce};
        te_gradient gradient;
        CHECK(te_program_differentiate(&request, &gradient, NULL) == TE_OK);
        double from_x[] = {kind ? 1e-310 : 80, kind ? 1e-310 : 5}, from_y[] = {1, 1};
        double dx[2], dy[2], *outputs[] = {dx, dy};
        double from_out[] = {kind ? 0 : 0.75, kind ? 1e-5 : 0.75};
        eval_operand sources[3];
        for (int k = 0; k < gradient.n_sources; k++) {
            te_grad_source source = gradient.sources[k];
            double *values = source.kind == TE_GRAD_FROM_DOUT ? from_out : source.index ? from_y : from_x;
            sources[k] = (eval_operand){values, 2, 1};
        }
        program_eval(gradient.backward, &(eval_space){1, 2, sources, NULL, false}, outputs);
        CHECK(kind ? dx[0] == 0 && isfinite(dx[1]) : dx[0] == 0.75 && dx[1] == 0.75);
        te_gradient_clear(&gradient);
        te_program_free(p);
    }
}

/* As an output per element where the value is no output per row. */
static void add_output(te_program *p, te_output_kind kind, int value)
{
    bool elem = te_program_rate(p, value) == TE_RATE_ELEM;
    te_program_output(p, kind == TE_OUT_ROW && elem ? TE_OUT_ELEM : kind, value);
}

/* --- broadcasts --------------------------------------------------------------------------------------------------- */

/* y = tanh(x * a) * b + c over every way to declare and to spread a, b and c. */
static void test_broadcasts(void)
{
    static const struct { te_rate rate; te_output_kind kind; } forms[] = {
        {TE_RATE_ELEM, TE_OUT_ELEM}, {TE_RATE_ELEM, TE_OUT_ROW}, {TE_RATE_ELEM, TE_OUT_COLSUM},
        {TE_RATE_ELEM, TE_OUT_SUM},  {TE_RATE_ROW, TE_OUT_ROW},  {TE_RATE_ROW, TE_OUT_SUM},
        {TE_RATE_UNIFORM, TE_OUT_SUM}};
    static const te_output_kind out_kinds[] = {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_SUM, TE_OUT_ROW};
    uint64_t seed = 11;
    for (int first = 0; first < 7; first++)
        for (int second = 0; second < 7; second++)
            for (int out = 0; out < 4; out++) {
                te_program *p = te_program_new(&te_mem_libc, "broadcast");
                int x = te_program_input(p, TE_RATE_ELEM), a = te_program_input(p, forms[first].rate);
                int b = te_program_input(p, forms[second].rate);
                int lone = emit(p, TE_PW_EXP, emit(p, TE_PW_SIN, b, -1), -1);
                int bent = emit(p, TE_PW_TANH, emit(p, TE_PW_MUL, x, a), -1);
                int y = emit(p, TE_PW_ADD, emit(p, TE_PW_MUL, bent, lone), b);
                if (out_kinds[out] == TE_OUT_ROW) y = emit(p, TE_PW_MUL, emit(p, TE_PW_ROWSUM, y, -1), b);
                add_output(p, out_kinds[out], y);
                add_output(p, te_program_rate(p, lone) == TE_RATE_ELEM ? TE_OUT_SUM : TE_OUT_ROW, lone);
                te_program_output(p, TE_OUT_AMAX, y);
                grad_case g;
                case_open(&g, "broadcast", p, &seed);
                g.reduce[1] = forms[first].kind;
                g.reduce[2] = forms[second].kind;
                check_and_clear(&g);
                g.wanted[0] = g.wanted[2] = false;
                check_and_clear(&g);
                te_program_free(p);
            }
}

/* --- random programs ---------------------------------------------------------------------------------------------- */

static int random_step(te_program *p, uint64_t *seed)
{
    int a = random_below(seed, p->n_insns), b = random_below(seed, p->n_insns), c = random_below(seed, p->n_insns);
    int soft = emit(p, TE_PW_TANH, b, -1);
    switch (random_below(seed, 26)) {
    case 0: return emit(p, TE_PW_NEG, a, -1);
    case 1: return emit(p, TE_PW_ABS, a, -1);
    case 2: return emit(p, TE_PW_SIN, a, -1);
    case 3: return emit(p, TE_PW_COS, a, -1);
    case 4: return emit(p, TE_PW_EXP, soft, -1);
    case 5: return emit(p, TE_PW_LOG, positive(p, a), -1);
    case 6: return emit(p, TE_PW_SQRT, positive(p, a), -1);
    case 7: return emit(p, TE_PW_RSQRT, positive(p, a), -1);
    case 8: return emit(p, TE_PW_RECIP, positive(p, a), -1);
    case 9: return emit(p, TE_PW_SIGMOID, a, -1);
    case 10: return emit(p, TE_PW_ERF, a, -1);
    case 11: return emit(p, TE_PW_DIV, a, positive(p, b));
    case 12: return emit(p, TE_PW_POW, positive(p, emit(p, TE_PW_SIN, a, -1)), soft);
    case 13: return emit(p, TE_PW_MIN, a, b);
    case 14: return emit(p, TE_PW_MAX, a, b);
    case 15: return te_program_emit(p, TE_PW_WHERE, emit(p, TE_PW_LT, a, b), soft, c);
    case 16: return emit(p, TE_PW_ROWMAX, a, -1);
    case 17: return emit(p, TE_PW_ROWMIN, a, -1);
    case 18: return emit(p, TE_PW_MUL, te_program_generator(p, TE_PW_KEEP, a % 2, te_program_const(p, 0.3)), a);
    case 19: return emit(p, TE_PW_MUL, te_program_param(p, 0), te_program_emit(p, TE_PW_COLUMN, -1, -1, -1));
    case 20: case 21: return emit(p, TE_PW_MUL, emit(p, TE_PW_ROWSUM, a, -1), te_program_const(p, 0.2));
    case 22: return emit(p, TE_PW_ADD, a, b);
    case 23: return emit(p, TE_PW_SUB, a, b);
    default: return emit(p, TE_PW_MUL, a, soft);
    }
}

static void random_inputs(te_program *p, te_output_kind *kinds, uint64_t *seed)
{
    static const te_output_kind of_elem[] = {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_ROW, TE_OUT_SUM};
    static const te_output_kind of_row[] = {TE_OUT_ROW, TE_OUT_SUM};
    int n = 1 + random_below(seed, 4);
    for (int i = 0; i < n; i++) {
        te_rate rate = i == 0 ? TE_RATE_ELEM : (te_rate)random_below(seed, 3);
        te_program_input(p, rate);
        kinds[i] = TE_OUT_SUM;
        if (rate == TE_RATE_ELEM) kinds[i] = of_elem[random_below(seed, 5)];
        if (rate == TE_RATE_ROW) kinds[i] = of_row[random_below(seed, 2)];
    }
}

/* Without some results' gradients, which then are not even read, the others are as where those are 0, unless 0 meets
 * what is infinite there. */
static void check_without(grad_case *g, uint64_t *seed)
{
    te_gradient gradient;
    te_build_error error;
    te_status status = te_program_differentiate(&g->request, &gradient, &error);
    CHECK_MSG(status == TE_OK, "%s", error.message);
    if (status != TE_OK) return;
    objective(g, gradient.forward);
    static double nothing[2][MAX_SIZE];
    eval_operand sources[2][TE_GRAD_MAX_SOURCES];
    double results[2][MAX_INPUTS + MAX_OUTPUTS][MAX_SIZE], *outputs[2][MAX_INPUTS + MAX_OUTPUTS];
    bool absent[TE_GRAD_MAX_SOURCES] = {false};
    for (int k = 0; k < MAX_SIZE; k++) nothing[1][k] = NAN;
    for (int i = 0; i < gradient.n_sources; i++) {
        te_grad_source source = gradient.sources[i];
        absent[i] = source.kind == TE_GRAD_FROM_DOUT && random_below(seed, 2);
        for (int way = 0; way < 2; way++) {
            sources[way][i] = source_operand(g, &gradient, source);
            if (absent[i]) sources[way][i].data = nothing[way];
        }
    }
    te_program *partial = te_gradient_without(&gradient, absent);
    char wrong[160];
    CHECK_MSG(partial && te_program_verify(partial, wrong, sizeof wrong), "%s", wrong);
    CHECK(te_gradient_without(&gradient, absent) == partial && partial->n_inputs == gradient.n_sources);
    const te_program *programs[2] = {gradient.backward, partial};
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < MAX_INPUTS + MAX_OUTPUTS; i++) outputs[way][i] = results[way][i];
        eval_space space = {g->rows, g->columns, sources[way], g->params, false};
        program_eval(programs[way], &space, outputs[way]);
    }
    for (int i = 0; i < partial->n_outputs; i++)
        for (int k = 0; k < eval_output_size((te_output_kind)partial->outputs[i].kind, g->rows, g->columns); k++) {
            double whole = results[0][i][k], part = results[1][i][k];
            CHECK_MSG(whole == part || !isfinite(whole), "output %d, element %d: %.17g, not %.17g", i, k, part, whole);
        }
    te_gradient_clear(&gradient);
}

static void test_without(void)
{
    te_program *p = te_program_new(&te_mem_libc, "two");
    int x = te_program_input(p, TE_RATE_ELEM);
    te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_SIGMOID, x, -1));
    te_program_output(p, TE_OUT_ELEM, emit(p, TE_PW_SQRT, x, -1));
    bool wanted = true;
    te_output_kind reduce = TE_OUT_ELEM;
    te_gradient gradient;
    CHECK(te_program_differentiate(&(te_gradient_request){.forward = p, .wanted = &wanted, .reduce = &reduce},
                                   &gradient, NULL) == TE_OK);
    bool absent[TE_GRAD_MAX_SOURCES] = {false}, all[TE_GRAD_MAX_SOURCES] = {false};
    for (int i = 0; i < gradient.n_sources; i++) {
        all[i] = gradient.sources[i].kind == TE_GRAD_FROM_DOUT;
        absent[i] = all[i] && gradient.sources[i].index == 1;
    }
    CHECK(te_gradient_without(&gradient, (bool[TE_GRAD_MAX_SOURCES]){false}) == gradient.backward);
    te_program *partial = te_gradient_without(&gradient, absent);
    for (int i = 0; i < partial->n_insns; i++) CHECK(partial->insns[i].op != TE_PW_SQRT);
    CHECK(!te_program_gives_nothing(partial, 0));
    CHECK(te_program_gives_nothing(te_gradient_without(&gradient, all), 0));
    te_gradient_clear(&gradient);
    te_program_free(p);
}

static void test_random_programs(void)
{
    uint64_t seed = 61;
    for (int round = 0; round < 500; round++) {
        te_program *p = te_program_new(&te_mem_libc, "random");
        te_output_kind kinds[MAX_INPUTS];
        bool saved[MAX_OUTPUTS];
        random_inputs(p, kinds, &seed);
        int steps = 3 + random_below(&seed, 18), last = -1;
        for (int i = 0; i < steps; i++) last = random_step(p, &seed);
        for (int i = 0; i < 1 + round % 3; i++) {
            int value = i == 0 ? last : random_below(&seed, p->n_insns);
            add_output(p, (te_output_kind)random_below(&seed, 4), value);
        }
        grad_case g;
        case_open(&g, "random", p, &seed);
        for (int i = 0; i < MAX_OUTPUTS; i++) saved[i] = random_below(&seed, 2);
        if (round % 4 == 0) g.request.save_output = saved;
        for (int i = 0; i < p->n_inputs; i++) {
            g.reduce[i] = kinds[i];
            g.wanted[i] = random_below(&seed, 4) > 0;
        }
        int before = test_failures;
        check_without(&g, &seed);
        check_and_clear(&g);
        if (test_failures > before && before < 3) {
            char text[8000];
            te_program_dump(p, text, sizeof text);
            fprintf(stderr, "round %d\n%s", round, text);
        }
        te_program_free(p);
    }
    CHECK_MSG(kinks * 20 < compared, "%d of %d elements stood at a kink", kinks, compared);
}

int main(void)
{
    test_opcodes();
    test_no_gradient();
    test_choices();
    test_choices_of_constants();
    test_joints();
    test_slopes();
    test_adjoints_first();
    test_broadcasts();
    test_without();
    test_random_programs();
    return TEST_END();
}
