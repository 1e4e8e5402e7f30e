/* program_internal.h - what the files that build, parse and differentiate programs share.
 *
 *      program_build.c      instructions in, each value once       program_diff.c          driver, sources, results
 *      program_simplify.c   the rules of te_program_emit           program_diff_values.c   forward values in backward
 *      program_append.c     copying instructions                   program_diff_algebra.c  sums, products of adjoints
 *      program_dump.c       text and invariants                    program_diff_rules.c    one derivative per opcode
 *      formula*.c           text to program                        program_diff_formula.c  gradients written by hand
 */
#ifndef TE_CORE_PROGRAM_INTERNAL_H
#define TE_CORE_PROGRAM_INTERNAL_H

#include "program_build.h"

/* "No value" where -1 already means that memory is exhausted. */
enum { TE_VALUE_NONE = -2 };

/* Slots are 16 bits wide in an instruction. */
enum { TE_MAX_SLOTS = INT16_MAX + 1 };

/* The value that op(arg…) can be replaced by, TE_VALUE_NONE when no rule applies, -1 when memory is exhausted. */
int te_program_simplify(te_program *program, te_opcode op, const int arg[3]);

/* Emits a copy of an instruction other than LOAD, with arguments looked up in `map`. */
int te_program_replay(te_program *target, const te_insn *insn, const int32_t *map, int param_base, int rng_base);

/* map[i] = 1 for every value that an output needs, else 0. */
void te_program_mark(const te_program *program, int32_t *map);

bool te_opcode_is_truth(te_opcode op); /* results are 0 or 1 */

/* Fills the error, which may be NULL, and returns the status. */
te_status te_build_fail(te_build_error *error, te_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static inline bool te_program_is_op(const te_program *program, int value, te_opcode op)
{
    return value >= 0 && program->insns[value].op == op;
}

static inline bool te_program_is_const(const te_program *program, int value, double number)
{
    return te_program_is_op(program, value, TE_PW_CONST) && program->insns[value].imm == number;
}

#endif
