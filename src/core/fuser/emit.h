/* emit.h - programs that leave results quantized for the products that read them; see emit.c. */
#ifndef TE_CORE_FUSER_EMIT_H
#define TE_CORE_FUSER_EMIT_H

#include "plan.h"

/* On a device: tiles of 16 bits that a kernel has room for in shared memory. */
enum { TE_EMIT_TILES = 2 };

enum { TE_EMIT_OUTPUTS = TE_UNIT_RESULTS + 2 * TE_UNIT_SLOTS + TE_GRAD_MAX_SOURCES };

/* A value that a program leaves quantized. */
typedef struct te_emission {
    int output, second; /* of the program; second: the other half of a gated operation's gradient, -1: none */
    int value;
    te_recipe_state *state;
    te_role role;
    te_dtype dtype; /* that it is rounded to first */
    int64_t width, block; /* block: as in te_part, of a gated operation's gradient */
    bool want[2];
    te_quantized *target;
    te_tensor *factor; /* NULL: the quantizer's own */
    void *stripe;
    float amax;
} te_emission;

/* Those of one run. */
typedef struct te_emitting {
    te_group_state *state;
    int n;
    te_emission of[TE_UNIT_SLOTS];
} te_emitting;

/* Whether rows can be quantized before the others are known. */
bool te_quantizer_is_local(const te_quantizer *q);

/* Finds the values between one program and one product. */
void te_plan_mark_emissions(te_fuse_plan *plan);

/* Whether a value that is marked will be left quantized by a run over so many rows: on the cpu in stripes, on other devices by the
 * kernel of the program. */
bool te_plan_emits(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows);

/* What a unit's program will emit; false when it runs as a whole. `inputs` are its operands. */
bool te_emitting_forward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                         te_emitting *e);
bool te_emitting_backward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                          te_emitting *e);
te_emission *te_emission_of(te_emitting *e, int value); /* NULL: none */

/* Runs the program; outputs that are emitted may be bound to anything. */
te_status te_emitting_run(te_emitting *e, te_program *program, const te_run *run);

#endif
