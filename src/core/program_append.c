/* program_append.c - copying the instructions of one program into another: the joint of a fused chain.
 *
 * Instructions are emitted anew, so rates follow from what the inputs were bound to, and whatever simplifies or is
 * already there in the target is shared.
 */
#include "program_internal.h"

int te_program_replay(te_program *target, const te_insn *insn, const int32_t *map, int param_base, int rng_base)
{
    te_opcode op = (te_opcode)insn->op;
    int arg[3] = {-1, -1, -1};
    for (int k = 0; k < te_opcode_args(op); k++) arg[k] = map[insn->arg[k]];
    switch (op) {
    case TE_PW_PARAM: return te_program_param(target, param_base + insn->slot);
    case TE_PW_CONST: return te_program_const(target, insn->imm);
    case TE_PW_RANDOM: case TE_PW_KEEP: case TE_PW_NORMAL:
        return te_program_generator(target, op, rng_base + insn->slot, arg[0]);
    case TE_PW_EXP:
        if (insn->slot == TE_EXP_BELOW) return te_program_exp_below(target, arg[0]);
        break;
    default: break;
    }
    return te_program_emit(target, op, arg[0], arg[1], arg[2]);
}

/* Replaces the marks in `map` by values of the target. */
static te_status copy_marked(te_program *target, const te_program *source, const int *inputs, int param_base,
                             int rng_base, int32_t *map)
{
    for (int i = 0; i < source->n_insns; i++) {
        if (!map[i]) continue;
        const te_insn *insn = &source->insns[i];
        if (insn->op == TE_PW_LOAD) {
            map[i] = inputs[insn->slot];
            if (map[i] < 0 || map[i] >= target->n_insns) return TE_ERROR_ARGUMENT;
        } else {
            map[i] = te_program_replay(target, insn, map, param_base, rng_base);
            if (map[i] < 0) return TE_ERROR_MEMORY;
        }
    }
    return TE_OK;
}

/* The value in `target` of an instruction whose arguments are in `map`; TE_VALUE_NONE: none, -1: no memory. */
typedef int copy_insn(te_program *target, const te_insn *insn, const int32_t *map, const void *by);

/* A copy of a program, instruction by instruction; slots of inputs and generators stay. */
static te_program *remade(const te_program *source, copy_insn *copy, const void *by)
{
    te_program *made = te_program_new(source->mem, source->name);
    size_t bytes = (size_t)source->n_insns * sizeof(int32_t);
    int32_t *map = te_mem_alloc(source->mem, bytes);
    bool ok = made && map;
    for (int i = 0; i < source->n_inputs && ok; i++) ok = te_program_input(made, (te_rate)source->input_rates[i]) >= 0;
    for (int i = 0; i < source->n_insns && ok; i++) {
        map[i] = copy(made, &source->insns[i], map, by);
        ok = map[i] != -1;
    }
    for (int i = 0; i < source->n_outputs && ok; i++) {
        int value = map[source->outputs[i].value];
        if (value == TE_VALUE_NONE) value = te_program_const(made, 0);
        ok = te_program_output(made, (te_output_kind)source->outputs[i].kind, value) >= 0;
    }
    if (map) te_mem_free(source->mem, map, bytes);
    if (ok && te_program_prune(made) == TE_OK) {
        made->n_rngs = source->n_rngs;
        return made;
    }
    te_program_free(made);
    return NULL;
}

static int copy_bound(te_program *target, const te_insn *insn, const int32_t *map, const void *values)
{
    if (insn->op == TE_PW_LOAD) return te_program_load(target, insn->slot);
    if (insn->op == TE_PW_PARAM) return te_program_const(target, ((const double *)values)[insn->slot]);
    return te_program_replay(target, insn, map, 0, 0);
}

te_program *te_program_bind(const te_program *source, const double *values)
{
    return remade(source, copy_bound, values);
}

/* --- without some inputs ------------------------------------------------------------------------------------------ */

/* The value of an instruction some of whose arguments are absent: TE_VALUE_NONE where it is absent as well. What is
 * absent adds nothing, and multiplied by infinity it still is. */
static int replay_without(te_program *target, const te_insn *insn, const int32_t *map)
{
    int a = insn->arg[0] < 0 ? -1 : map[insn->arg[0]], b = insn->arg[1] < 0 ? -1 : map[insn->arg[1]];
    bool no_a = a == TE_VALUE_NONE, no_b = b == TE_VALUE_NONE;
    switch (insn->op) {
    case TE_PW_ADD: return no_a ? b : a;
    case TE_PW_SUB: return !no_a ? a : no_b ? TE_VALUE_NONE : te_program_emit(target, TE_PW_NEG, b, -1, -1);
    case TE_PW_MUL: return TE_VALUE_NONE;
    case TE_PW_NEG: case TE_PW_ROWSUM: case TE_PW_TO_BF16: case TE_PW_TO_F16: case TE_PW_TO_F32: return TE_VALUE_NONE;
    case TE_PW_DIV:
        if (no_a) return TE_VALUE_NONE;
        break;
    case TE_PW_WHERE:
        if (no_b && map[insn->arg[2]] == TE_VALUE_NONE) return TE_VALUE_NONE;
        break;
    default: break;
    }
    int32_t numbers[3]; /* 0 in the place of what is absent */
    te_insn as_zero = *insn;
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) {
        numbers[k] = map[insn->arg[k]];
        if (numbers[k] == TE_VALUE_NONE) numbers[k] = te_program_const(target, 0);
        as_zero.arg[k] = k;
    }
    return te_program_replay(target, &as_zero, numbers, 0, 0);
}

static int copy_without(te_program *target, const te_insn *insn, const int32_t *map, const void *by)
{
    const bool *absent = by;
    bool whole = true;
    if (insn->op == TE_PW_LOAD) return absent[insn->slot] ? TE_VALUE_NONE : te_program_load(target, insn->slot);
    for (int k = 0; k < te_opcode_args((te_opcode)insn->op); k++) whole &= map[insn->arg[k]] != TE_VALUE_NONE;
    return whole ? te_program_replay(target, insn, map, 0, 0) : replay_without(target, insn, map);
}

te_program *te_program_without(const te_program *source, const bool *absent)
{
    te_program *made = remade(source, copy_without, absent);
    if (made) made->n_params = source->n_params;
    return made;
}

bool te_program_gives_nothing(const te_program *program, int output)
{
    return te_program_is_const(program, program->outputs[output].value, 0);
}

te_status te_program_append(te_program *target, const te_program *source, const int *inputs, int param_base,
                            int rng_base, int *outputs)
{
    if (param_base < 0 || param_base > TE_MAX_SLOTS - source->n_params) return TE_ERROR_ARGUMENT;
    if (rng_base < 0 || rng_base > TE_MAX_SLOTS - source->n_rngs) return TE_ERROR_ARGUMENT;
    size_t bytes = (size_t)source->n_insns * sizeof(int32_t);
    int32_t *map = te_mem_alloc(target->mem, bytes);
    if (!map) return TE_ERROR_MEMORY;
    te_program_mark(source, map);
    te_status status = copy_marked(target, source, inputs, param_base, rng_base, map);
    if (status == TE_OK) {
        for (int i = 0; i < source->n_outputs; i++) outputs[i] = map[source->outputs[i].value];
        if (target->n_params < param_base + source->n_params) target->n_params = param_base + source->n_params;
        if (target->n_rngs < rng_base + source->n_rngs) target->n_rngs = rng_base + source->n_rngs;
    }
    te_mem_free(target->mem, map, bytes);
    return status;
}
