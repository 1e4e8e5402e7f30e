/* program_build.c - the life of a program and the ways in which instructions enter it.
 *
 * Every instruction passes push, which looks for an equal one. Most programs are short: there a scan over
 * 24-byte records is cheaper than keeping a hash table beside them. Longer ones have one, or building would take the
 * square of their length. An instruction is stored in one normal form (unused arguments -1, unused slot and immediate
 * 0) and compared as bytes.
 */
#include "program_internal.h"

#include <stdarg.h>
#include <stdio.h>

_Static_assert(sizeof(te_insn) == 24, "te_insn has no padding: instructions are compared with memcmp");

te_status te_build_fail(te_build_error *error, te_status status, const char *format, ...)
{
    if (!error) return status;
    va_list args;
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    error->status = status;
    return status;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

te_program *te_program_new(const te_mem *mem, const char *name)
{
    te_program *program = te_mem_zalloc(mem, sizeof *program);
    if (!program) return NULL;
    program->mem = mem;
    snprintf(program->name, sizeof program->name, "%s", name ? name : "");
    return program;
}

static bool reserve(te_program *program, size_t insns, size_t outputs, size_t inputs)
{
    const te_mem *mem = program->mem;
    return te_mem_grow(mem, &program->insns, &program->insn_capacity, insns, sizeof *program->insns) &&
           te_mem_grow(mem, &program->outputs, &program->output_capacity, outputs, sizeof *program->outputs) &&
           te_mem_grow(mem, &program->input_rates, &program->input_capacity, inputs, sizeof *program->input_rates);
}

te_program *te_program_clone(const te_program *program)
{
    size_t n_insns = (size_t)program->n_insns, n_outputs = (size_t)program->n_outputs;
    size_t n_inputs = (size_t)program->n_inputs;
    te_program *copy = te_program_new(program->mem, program->name);
    if (!copy) return NULL;
    if (!reserve(copy, n_insns, n_outputs, n_inputs)) {
        te_program_free(copy);
        return NULL;
    }
    if (n_insns) memcpy(copy->insns, program->insns, n_insns * sizeof(te_insn));
    if (n_outputs) memcpy(copy->outputs, program->outputs, n_outputs * sizeof *program->outputs);
    if (n_inputs) memcpy(copy->input_rates, program->input_rates, n_inputs);
    copy->n_insns = program->n_insns;
    copy->n_outputs = program->n_outputs;
    copy->n_inputs = program->n_inputs;
    copy->n_params = program->n_params;
    copy->n_rngs = program->n_rngs;
    return copy;
}

/* What a backend compiled is void as soon as the program changes. */
static void forget_compiled(te_program *program)
{
    if (program->compiled && program->release_compiled) program->release_compiled(program);
    if (program->device_compiled) program->release_device_compiled(program);
    program->compiled = NULL;
    program->release_compiled = NULL;
}

static void drop_index(te_program *program)
{
    if (program->index) te_mem_free(program->mem, program->index, program->index_size * sizeof *program->index);
    program->index = NULL;
    program->index_size = 0;
    program->n_indexed = 0;
}

void te_program_free(te_program *program)
{
    if (!program) return;
    const te_mem *mem = program->mem;
    forget_compiled(program);
    drop_index(program);
    te_mem_free(mem, program->insns, program->insn_capacity * sizeof(te_insn));
    te_mem_free(mem, program->outputs, program->output_capacity * sizeof *program->outputs);
    te_mem_free(mem, program->input_rates, program->input_capacity);
    te_mem_free(mem, program, sizeof *program);
}

/* --- instructions ------------------------------------------------------------------------------------------------- */

bool te_opcode_is_truth(te_opcode op)
{
    switch (op) {
    case TE_PW_KEEP: case TE_PW_ISNAN: case TE_PW_ISFINITE:
    case TE_PW_LT: case TE_PW_LE: case TE_PW_EQ: case TE_PW_NE: return true;
    default: return false;
    }
}

static bool is_commutative(te_opcode op)
{
    return op == TE_PW_ADD || op == TE_PW_MUL || op == TE_PW_EQ || op == TE_PW_NE;
}

static te_insn swapped(const te_insn *insn)
{
    te_insn other = *insn;
    if (is_commutative((te_opcode)insn->op)) {
        other.arg[0] = insn->arg[1];
        other.arg[1] = insn->arg[0];
    }
    return other;
}

static bool equal_insns(const te_insn *a, const te_insn *insn, const te_insn *turned)
{
    return memcmp(a, insn, sizeof *a) == 0 || memcmp(a, turned, sizeof *a) == 0;
}

/* The same for both orders of the arguments of what is commutative. */
static uint64_t hash_insn(const te_insn *insn)
{
    uint64_t imm, h = (uint64_t)insn->op << 16 | (uint16_t)insn->slot;
    int32_t a = insn->arg[0], b = insn->arg[1];
    if (is_commutative((te_opcode)insn->op) && a > b) a = insn->arg[1], b = insn->arg[0];
    memcpy(&imm, &insn->imm, sizeof imm);
    const uint64_t parts[] = {(uint32_t)a, (uint32_t)b, (uint32_t)insn->arg[2], imm};
    for (int i = 0; i < 4; i++) h = (h ^ parts[i] ^ h >> 29) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 32;
}

static void index_insn(te_program *program, int i)
{
    size_t at = (size_t)hash_insn(&program->insns[i]) & (program->index_size - 1);
    while (program->index[at] >= 0) at = (at + 1) & (program->index_size - 1);
    program->index[at] = i;
}

/* Brings the index up to date; false where there is no memory for it. */
static bool update_index(te_program *program)
{
    size_t wanted = 256;
    while (wanted < 2 * (size_t)program->n_insns) wanted *= 2;
    if (wanted > program->index_size) {
        drop_index(program);
        program->index = te_mem_alloc(program->mem, wanted * sizeof *program->index);
        if (!program->index) return false;
        program->index_size = wanted;
        memset(program->index, 0xff, wanted * sizeof *program->index); /* all -1 */
    }
    while (program->n_indexed < program->n_insns) index_insn(program, program->n_indexed++);
    return true;
}

static int find_equal(te_program *program, const te_insn *insn)
{
    enum { SHORT = 64 };
    te_insn turned = swapped(insn);
    if (program->n_insns > SHORT && update_index(program)) {
        size_t at = (size_t)hash_insn(insn) & (program->index_size - 1);
        for (; program->index[at] >= 0; at = (at + 1) & (program->index_size - 1))
            if (equal_insns(&program->insns[program->index[at]], insn, &turned)) return program->index[at];
        return -1;
    }
    for (int i = program->n_insns - 1; i >= 0; i--) {
        const te_insn *other = &program->insns[i];
        if (other->op == insn->op && equal_insns(other, insn, &turned)) return i;
    }
    return -1;
}

/* Appends the instruction as it is, or returns the value that an equal one already has. Rates are computed here. */
static int push(te_program *program, te_opcode op, int slot, const int arg[3], double imm)
{
    te_insn insn = {.op = (uint8_t)op, .slot = (int16_t)slot, .arg = {arg[0], arg[1], arg[2]}, .imm = imm};
    insn.rate = (uint8_t)te_insn_rate(program, &insn);
    int equal = find_equal(program, &insn);
    if (equal >= 0) return equal;
    if (program->n_insns == INT32_MAX || !reserve(program, (size_t)program->n_insns + 1, 0, 0)) return -1;
    forget_compiled(program);
    program->insns[program->n_insns] = insn;
    return program->n_insns++;
}

static const int no_args[3] = {-1, -1, -1};

static bool slot_fits(int slot) { return slot >= 0 && slot < TE_MAX_SLOTS; }

int te_program_input(te_program *program, te_rate rate)
{
    int slot = program->n_inputs;
    if (!slot_fits(slot) || !reserve(program, 0, 0, (size_t)slot + 1)) return -1;
    program->input_rates[slot] = (uint8_t)rate;
    int value = push(program, TE_PW_LOAD, slot, no_args, 0.0);
    if (value >= 0) program->n_inputs++;
    return value;
}

int te_program_load(te_program *program, int slot)
{
    if (slot < 0 || slot >= program->n_inputs) return -1;
    return push(program, TE_PW_LOAD, slot, no_args, 0.0);
}

int te_program_param(te_program *program, int slot)
{
    if (!slot_fits(slot)) return -1;
    int value = push(program, TE_PW_PARAM, slot, no_args, 0.0);
    if (value >= 0 && slot >= program->n_params) program->n_params = slot + 1;
    return value;
}

int te_program_const(te_program *program, double value)
{
    return push(program, TE_PW_CONST, 0, no_args, value);
}

int te_program_generator(te_program *program, te_opcode op, int slot, int a)
{
    if (!te_opcode_is_random(op) || !slot_fits(slot)) return -1;
    int n_args = te_opcode_args(op);
    if (n_args == 1 && (a < 0 || a >= program->n_insns)) return -1;
    const int arg[3] = {n_args == 1 ? a : -1, -1, -1};
    int value = push(program, op, slot, arg, 0.0);
    if (value >= 0 && slot >= program->n_rngs) program->n_rngs = slot + 1;
    return value;
}

int te_program_exp_below(te_program *program, int a)
{
    const int arg[3] = {a, -1, -1};
    return a < 0 || a >= program->n_insns ? -1 : push(program, TE_PW_EXP, TE_EXP_BELOW, arg, 0.0);
}

/* The same value once per element. Backends may rely on reductions reading ELEM values; pushed without simplification,
 * which would find the choice pointless. */
static int spread(te_program *program, int value)
{
    int column = push(program, TE_PW_COLUMN, 0, no_args, 0.0);
    if (column < 0) return -1;
    int always = push(program, TE_PW_EQ, 0, (const int[3]){column, column, -1}, 0.0);
    if (always < 0) return -1;
    return push(program, TE_PW_WHERE, 0, (const int[3]){always, value, value}, 0.0);
}

int te_program_emit(te_program *program, te_opcode op, int a, int b, int c)
{
    if ((unsigned)op >= TE_PW_COUNT || op == TE_PW_LOAD || op == TE_PW_PARAM || op == TE_PW_CONST ||
        te_opcode_is_random(op))
        return -1;
    int arg[3] = {a, b, c}, n_args = te_opcode_args(op);
    for (int i = 0; i < 3; i++) {
        if (i >= n_args) arg[i] = -1;
        else if (arg[i] < 0 || arg[i] >= program->n_insns) return -1;
    }
    int simpler = te_program_simplify(program, op, arg);
    if (simpler != TE_VALUE_NONE) return simpler;
    if (te_opcode_reduces(op) && te_program_rate(program, arg[0]) != TE_RATE_ELEM) {
        arg[0] = spread(program, arg[0]);
        if (arg[0] < 0) return -1;
    }
    return push(program, op, 0, arg, 0.0);
}

int te_program_output(te_program *program, te_output_kind kind, int value)
{
    if (value < 0 || value >= program->n_insns) return -1;
    if (kind == TE_OUT_ROW && te_program_rate(program, value) == TE_RATE_ELEM) return -1;
    if (!reserve(program, 0, (size_t)program->n_outputs + 1, 0)) return -1;
    forget_compiled(program);
    struct te_program_output *output = &program->outputs[program->n_outputs];
    memset(output, 0, sizeof *output);
    output->kind = (uint8_t)kind;
    output->value = value;
    return program->n_outputs++;
}

/* --- pruning ------------------------------------------------------------------------------------------------------ */

void te_program_mark(const te_program *program, int32_t *map)
{
    for (int i = 0; i < program->n_insns; i++) map[i] = 0;
    for (int i = 0; i < program->n_outputs; i++) map[program->outputs[i].value] = 1;
    for (int i = program->n_insns - 1; i >= 0; i--) {
        const te_insn *insn = &program->insns[i];
        for (int k = 0; map[i] && k < te_opcode_args((te_opcode)insn->op); k++) map[insn->arg[k]] = 1;
    }
}

te_status te_program_prune(te_program *program)
{
    size_t bytes = (size_t)program->n_insns * sizeof(int32_t);
    int32_t *map = te_mem_alloc(program->mem, bytes);
    if (!map) return TE_ERROR_MEMORY;
    te_program_mark(program, map);

    int kept = 0;
    for (int i = 0; i < program->n_insns; i++) {
        if (!map[i]) continue;
        te_insn insn = program->insns[i];
        for (int k = 0; k < te_opcode_args((te_opcode)insn.op); k++) insn.arg[k] = map[insn.arg[k]];
        program->insns[kept] = insn;
        map[i] = kept++;
    }
    for (int i = 0; i < program->n_outputs; i++) program->outputs[i].value = map[program->outputs[i].value];
    if (kept != program->n_insns) forget_compiled(program);
    drop_index(program);
    program->n_insns = kept;
    te_mem_free(program->mem, map, bytes);
    return TE_OK;
}
