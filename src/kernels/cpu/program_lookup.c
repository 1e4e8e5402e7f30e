/* program_lookup.c - dear functions of one input of bfloat16, looked up (../program_tables.h).
 *
 * Such a value of a program is a load: of the input, whose bits stand for the value in a table. So for programs with
 * such values there is a second one, in which they are loads (te_compiled.tabled), and large runs are done by that.
 * Tables are made by the interpreter itself, so the bits are the same, and the device keeps a few: the same function of
 * an activation comes again in every layer and every step. The part of a table that activations use stays in L1.
 */
#include "program_exec.h"

#include "../program_tables.h"

#include <string.h>

enum {
    LEAST = 1 << 18, /* elements: making a table takes a quarter as many */
    CODES = 1 << 16,
    MOST_TABLES = 4, /* of a program */
    MOST_INSNS = 48, /* of a function */
    WORTH = 18,      /* cycles that a look-up of sixteen elements must save */
    KEPT = 8         /* tables of the device, of 256 KB each */
};

/* --- functions ---------------------------------------------------------------------------------------------------- */

/* A program of its own, with values of all parameters: element i of the only output follows from element i of the only
 * input. */
typedef struct function {
    int     n;
    te_insn insns[MOST_INSNS]; /* the last one is the result */
} function;

/* What value v of the program is a function of, with one input; false: it is too long, or follows from more than that.
 * `params` may be NULL. */
static bool function_of(const te_program *program, int v, const double *params, function *f)
{
    bool    needed[TE_TABLES_INSNS] = {false};
    int32_t at[TE_TABLES_INSNS];
    *f = (function){.n = 0};
    needed[v] = true;
    for (int i = v; i >= 0; i--)
        for (int k = 0; needed[i] && k < te_opcode_args((te_opcode)program->insns[i].op); k++)
            needed[program->insns[i].arg[k]] = true;
    for (int i = 0; i <= v; i++) {
        if (!needed[i]) continue;
        te_insn insn = program->insns[i];
        if (f->n == MOST_INSNS || (insn.op == TE_PW_LOAD && insn.rate != TE_RATE_ELEM)) return false;
        if (insn.op == TE_PW_LOAD) insn.slot = 0;
        if (insn.op == TE_PW_PARAM) {
            insn.imm = params ? params[insn.slot] : 0;
            insn.op = TE_PW_CONST;
            insn.slot = 0;
        }
        for (int k = 0; k < te_opcode_args((te_opcode)insn.op); k++) insn.arg[k] = at[insn.arg[k]];
        at[i] = f->n;
        f->insns[f->n++] = insn;
    }
    return true;
}

static te_status tabulate(te_exec *exec, const function *f, float *values)
{
    struct te_program_output output = {.kind = TE_OUT_ELEM, .value = f->n - 1};
    uint8_t    rate = TE_RATE_ELEM;
    te_program program = {.mem = exec->mem, .name = "table", .insns = (te_insn *)f->insns, .outputs = &output,
                          .input_rates = &rate, .n_insns = f->n, .n_outputs = 1, .n_inputs = 1};
    uint16_t  *codes = exec->scratch(exec, CODES * sizeof *codes);
    if (!codes) return TE_ERROR_MEMORY;
    for (int i = 0; i < CODES; i++) codes[i] = (uint16_t)i;
    te_operand in = {.data = codes, .dtype = TE_BF16, .stride = {1}};
    te_operand out = {.data = values, .dtype = TE_F32, .stride = {1}};
    te_run     run = {.ndim = 1, .shape = {CODES}, .inputs = &in, .outputs = &out};
    te_status  status = te_cpu_program_run(exec, &program, &run, 1);
    exec->scratch_free(exec, codes);
    if (program.release_compiled) program.release_compiled(&program);
    return status;
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

typedef struct table {
    float   *values; /* NULL: none so far */
    uint64_t used;   /* when */
    function of;
} table;

struct te_tables {
    table    table[KEPT];
    uint64_t uses;
};

void te_tables_free(te_exec *exec, te_cpu_device *device)
{
    for (int i = 0; device->tables && i < KEPT; i++)
        te_mem_free(exec->mem, device->tables->table[i].values, CODES * sizeof(float));
    te_mem_free(exec->mem, device->tables, sizeof *device->tables);
    device->tables = NULL;
}

static bool same_function(const function *a, const function *b)
{
    return a->n == b->n && memcmp(a->insns, b->insns, (size_t)a->n * sizeof *a->insns) == 0;
}

/* The function's table, made where there is none in the place of the one whose last use is longest ago; NULL: there is
 * no memory for it, or the call is interrupted. */
static const float *table_of(te_exec *exec, const function *f)
{
    te_cpu_device *device = te_cpu(exec);
    if (!device->tables) device->tables = te_mem_zalloc(exec->mem, sizeof *device->tables);
    if (!device->tables) return NULL;
    table *oldest = device->tables->table;
    for (table *t = oldest; t < device->tables->table + KEPT; t++) {
        if (t->values && same_function(&t->of, f)) {
            t->used = ++device->tables->uses;
            return t->values;
        }
        if (t->used < oldest->used) oldest = t;
    }
    if (!oldest->values) oldest->values = te_mem_alloc(exec->mem, CODES * sizeof(float));
    if (!oldest->values) return NULL;
    oldest->of.n = 0; /* the name of none, should it not be made */
    if (tabulate(exec, f, oldest->values) != TE_OK) return NULL;
    oldest->of = *f;
    oldest->used = ++device->tables->uses;
    return oldest->values;
}

/* --- the second program ------------------------------------------------------------------------------------------- */

struct te_lookup {
    uint32_t          narrow;              /* the inputs of bfloat16 */
    int               n_tables;            /* 0: nothing is looked up */
    te_program_table  tables[MOST_TABLES]; /* of the first program */
    te_program        program;
    uint32_t          tabled;              /* inputs of the second one */
    uint8_t           input_rates[TE_LOOKUP_OPERANDS];
    int8_t            source[TE_LOOKUP_OPERANDS];    /* the first program's input behind each */
    int8_t            looked_up[TE_LOOKUP_OPERANDS]; /* which of the tables; -1: none */
};

void te_lookup_free(te_lookup *lookup)
{
    if (!lookup) return;
    te_program *second = &lookup->program;
    const te_mem *mem = second->mem;
    if (second->release_compiled) second->release_compiled(second);
    te_mem_free(mem, second->insns, second->insn_capacity * sizeof *second->insns);
    te_mem_free(mem, second->outputs, second->output_capacity * sizeof *second->outputs);
    te_mem_free(mem, lookup, sizeof *lookup);
}

static int table_at(const te_lookup *lookup, int v)
{
    for (int t = 0; t < lookup->n_tables; t++)
        if (lookup->tables[t].value == v) return t;
    return -1;
}

/* Values that outputs need; what is looked up needs none. */
static void mark_needed(const te_program *program, const te_lookup *lookup, bool needed[TE_TABLES_INSNS])
{
    for (int o = 0; o < program->n_outputs; o++) needed[program->outputs[o].value] = true;
    for (int v = program->n_insns - 1; v >= 0; v--) {
        const te_insn *insn = &program->insns[v];
        for (int k = 0; needed[v] && table_at(lookup, v) < 0 && k < te_opcode_args((te_opcode)insn->op); k++)
            needed[insn->arg[k]] = true;
    }
}

/* Of sixteen elements, measured on Zen 4. What plans go by (te_op_cost) does not tell elementary functions apart. */
static int cycles_of(te_opcode op)
{
    switch (op) {
    case TE_PW_EXP: return 8;
    case TE_PW_SIGMOID: return 16;
    case TE_PW_TANH: case TE_PW_ERF: case TE_PW_LOG: return 22;
    case TE_PW_SIN: case TE_PW_COS: return 28;
    case TE_PW_POW: return 60;
    case TE_PW_DIV: case TE_PW_SQRT: case TE_PW_RSQRT: case TE_PW_RECIP: return 5;
    default: return 1;
    }
}

/* Cycles that what is not looked up takes. */
static int cost_of(const te_program *program, const te_lookup *lookup)
{
    bool needed[TE_TABLES_INSNS] = {false};
    int  cycles = 0;
    mark_needed(program, lookup, needed);
    for (int v = 0; v < program->n_insns; v++)
        if (needed[v] && table_at(lookup, v) < 0 && program->insns[v].rate == TE_RATE_ELEM)
            cycles += cycles_of((te_opcode)program->insns[v].op);
    return cycles;
}

/* The second program's input for one of the first's, or for a table of it; -1: there are too many. */
static int input_for(te_lookup *lookup, int source, int t)
{
    te_program *second = &lookup->program;
    for (int i = 0; i < second->n_inputs; i++)
        if (lookup->source[i] == source && lookup->looked_up[i] == t) return i;
    if (second->n_inputs == TE_LOOKUP_OPERANDS) return -1;
    lookup->source[second->n_inputs] = (int8_t)source;
    lookup->looked_up[second->n_inputs] = (int8_t)t;
    lookup->tabled |= (uint32_t)(t >= 0) << second->n_inputs;
    return second->n_inputs++;
}

/* Instructions that outputs need, with loads in the place of what is looked up. */
static bool rewrite(te_lookup *lookup, const te_program *first)
{
    te_program *second = &lookup->program;
    bool        needed[TE_TABLES_INSNS] = {false};
    int32_t     at[TE_TABLES_INSNS];
    mark_needed(first, lookup, needed);
    for (int v = 0; v < first->n_insns; v++) {
        if (!needed[v]) continue;
        te_insn insn = first->insns[v];
        int     t = table_at(lookup, v);
        if (t >= 0) insn = (te_insn){.op = TE_PW_LOAD, .rate = TE_RATE_ELEM, .arg = {-1, -1, -1}};
        if (insn.op == TE_PW_LOAD) {
            int source = t >= 0 ? lookup->tables[t].input : insn.slot, input = input_for(lookup, source, t);
            if (input < 0) return false;
            lookup->input_rates[input] = first->input_rates[source];
            insn.slot = (int16_t)input;
        }
        for (int k = 0; k < te_opcode_args((te_opcode)insn.op); k++) insn.arg[k] = at[insn.arg[k]];
        at[v] = second->n_insns;
        second->insns[second->n_insns++] = insn;
    }
    for (int o = 0; o < first->n_outputs; o++) {
        second->outputs[o] = first->outputs[o];
        second->outputs[o].value = at[first->outputs[o].value];
    }
    return true;
}

static bool write_second(te_lookup *lookup, const te_program *first)
{
    te_program *second = &lookup->program;
    second->insns = te_mem_alloc(first->mem, (size_t)first->n_insns * sizeof *second->insns);
    second->outputs = te_mem_alloc(first->mem, (size_t)first->n_outputs * sizeof *second->outputs);
    second->insn_capacity = second->insns ? (size_t)first->n_insns : 0;
    second->output_capacity = second->outputs ? (size_t)first->n_outputs : 0;
    second->input_rates = lookup->input_rates;
    second->n_outputs = first->n_outputs;
    second->n_params = first->n_params;
    second->n_rngs = first->n_rngs;
    return second->insns && second->outputs && rewrite(lookup, first);
}

/* Those tables whose functions are short enough, if they save enough: a look-up takes some nine cycles for sixteen
 * elements, and tables push other things out of L1. */
static void find_tables(te_lookup *lookup, const te_program *first)
{
    bool narrow[TE_LOOKUP_OPERANDS] = {false}, wanted[TE_LOOKUP_OPERANDS];
    te_program_table found[MOST_TABLES];
    for (int i = 0; i < first->n_inputs; i++) narrow[i] = lookup->narrow >> i & 1;
    memset(wanted, true, sizeof wanted);
    int n = te_program_tables(first, narrow, wanted, found, MOST_TABLES);
    for (int t = 0; t < n; t++) {
        function f;
        if (function_of(first, found[t].value, NULL, &f)) lookup->tables[lookup->n_tables++] = found[t];
    }
    if (lookup->n_tables == 0) return;
    te_lookup none = {.n_tables = 0};
    for (int t = lookup->n_tables - 1; t >= 0; t--) { /* one of several may be worth it, and all together not */
        te_program_table kept = lookup->tables[t];
        int with = cost_of(first, lookup);
        lookup->tables[t] = lookup->tables[--lookup->n_tables];
        if (cost_of(first, lookup) - with >= WORTH) {
            lookup->tables[lookup->n_tables++] = lookup->tables[t];
            lookup->tables[t] = kept;
        }
    }
    if (cost_of(first, &none) - cost_of(first, lookup) < WORTH * lookup->n_tables) lookup->n_tables = 0;
}

/* What is looked up when these inputs are of bfloat16; NULL: there is no memory. */
static te_lookup *lookup_of(const te_program *first, uint32_t narrow)
{
    te_compiled *compiled = first->compiled;
    if (compiled->lookup && compiled->lookup->narrow == narrow) return compiled->lookup;
    te_lookup_free(compiled->lookup);
    compiled->lookup = te_mem_zalloc(first->mem, sizeof *compiled->lookup);
    te_lookup *lookup = compiled->lookup;
    if (!lookup) return NULL;
    lookup->narrow = narrow;
    lookup->program.mem = first->mem;
    memcpy(lookup->program.name, first->name, sizeof first->name);
    find_tables(lookup, first);
    if (lookup->n_tables && !write_second(lookup, first)) {
        te_lookup_free(lookup);
        compiled->lookup = NULL;
    }
    return compiled->lookup;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

/* Whether a power is but a product of two or three: the exponent may be a number of the run. */
static bool is_short_power(const function *f)
{
    for (int i = 0; i < f->n; i++) {
        const te_insn *insn = &f->insns[i], *exponent = insn->op == TE_PW_POW ? &f->insns[insn->arg[1]] : NULL;
        double times = exponent && exponent->op == TE_PW_CONST ? exponent->imm : -1;
        if (times == 0 || times == 1 || times == 2 || times == 3) return true;
    }
    return false;
}

/* Whether there are so many elements, whatever their number. */
static bool is_large(const te_run *run)
{
    int64_t elements = 1;
    for (int d = 0; d < run->ndim; d++)
        if (run->shape[d] <= 0 || __builtin_mul_overflow(elements, run->shape[d], &elements)) return false;
    return elements >= LEAST;
}

bool te_program_look_up(te_exec *exec, const te_program *program, const te_run *run, te_table_run *by)
{
    uint32_t narrow = 0;
    if (!((const te_compiled *)program->compiled)->dear || run->compute_f64 || program->n_inputs > TE_LOOKUP_OPERANDS ||
        program->n_outputs > TE_LOOKUP_OPERANDS || !is_large(run))
        return false;
    for (int i = 0; i < program->n_inputs; i++) {
        bool half = run->inputs[i].dtype == TE_BF16 && run->inputs[i].data;
        narrow |= (uint32_t)(half && program->input_rates[i] == TE_RATE_ELEM) << i;
    }
    te_lookup *lookup = narrow ? lookup_of(program, narrow) : NULL;
    if (!lookup || !lookup->n_tables || te_program_compile(exec, &lookup->program) != TE_OK) return false;
    ((te_compiled *)lookup->program.compiled)->tabled = lookup->tabled;
    by->program = &lookup->program;
    by->run = *run;
    by->run.inputs = by->inputs;
    by->run.tables = by->tables;
    for (int i = 0; i < lookup->program.n_inputs; i++) {
        by->inputs[i] = run->inputs[lookup->source[i]];
        by->tables[i] = NULL;
        if (lookup->looked_up[i] < 0) continue;
        function f;
        function_of(program, lookup->tables[lookup->looked_up[i]].value, run->params, &f);
        if (is_short_power(&f) || !(by->tables[i] = table_of(exec, &f))) return false;
    }
    return true;
}
