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
    default: return te_program_emit(target, op, arg[0], arg[1], arg[2]);
    }
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

te_program *te_program_bind(const te_program *source, const double *values)
{
    te_program *bound = te_program_new(source->mem, source->name);
    size_t bytes = (size_t)source->n_insns * sizeof(int32_t);
    int32_t *map = te_mem_alloc(source->mem, bytes);
    bool ok = bound && map;
    for (int i = 0; i < source->n_inputs && ok; i++) ok = te_program_input(bound, (te_rate)source->input_rates[i]) >= 0;
    for (int i = 0; i < source->n_insns && ok; i++) {
        const te_insn *insn = &source->insns[i];
        map[i] = insn->op == TE_PW_LOAD    ? te_program_load(bound, insn->slot)
                 : insn->op == TE_PW_PARAM ? te_program_const(bound, values[insn->slot])
                                           : te_program_replay(bound, insn, map, 0, 0);
        ok = map[i] >= 0;
    }
    for (int i = 0; i < source->n_outputs && ok; i++) {
        const struct te_program_output *output = &source->outputs[i];
        ok = te_program_output(bound, (te_output_kind)output->kind, map[output->value]) >= 0;
    }
    if (map) te_mem_free(source->mem, map, bytes);
    if (ok && te_program_prune(bound) == TE_OK) {
        bound->n_rngs = source->n_rngs;
        return bound;
    }
    te_program_free(bound);
    return NULL;
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
