/* emit.h - programs that leave results quantized for the products that read them; see emit.c. */
#ifndef TE_CORE_FUSER_EMIT_H
#define TE_CORE_FUSER_EMIT_H

#include "plan.h"

/* On a device: tiles of 16 bits that a kernel has room for in shared memory. */
enum { TE_EMIT_TILES = 2 };

/* Of one run: gradients of slots, and operands computed again. */
enum { TE_EMIT_VALUES = TE_UNIT_SLOTS + TE_UNIT_RESULTS };
enum { TE_EMIT_OUTPUTS = TE_UNIT_RESULTS + 2 * TE_UNIT_SLOTS + TE_GRAD_MAX_SOURCES };

/* How a value between a program and a product gets quantized. */
typedef enum te_emit_way {
    TE_EMIT_APART,   /* stored, then by a kernel of its own */
    TE_EMIT_AT_ONCE, /* by the program, where it is made */
    TE_EMIT_TWICE,   /* the same in a second run; a first one has measured it */
    TE_EMIT_STORED   /* stored and measured by the program, quantized when it is whole */
} te_emit_way;

/* A value that a program leaves quantized. */
typedef struct te_emission {
    int output, second; /* of the program; second: the other half of a gated operation's gradient, -1: none */
    int value;
    te_recipe_state *state;
    const te_product_recipe *recipe;
    te_role role;
    te_emit_way way; /* TWICE, STORED: that of all which are measured */
    te_dtype dtype; /* that it is rounded to first */
    int64_t width, block; /* block: as in te_part, of a gated operation's gradient */
    bool want[2];
    te_quantized *target;
    te_tensor *factor; /* NULL: the quantizer's own */
    void *stripe; /* STORED: all of it */
    float amaxes[2]; /* on the host */
    te_tensor *measured; /* on devices: the same */
    const te_product_saved *again; /* of an operand that backward computes once more: what forward kept; NULL
                                      otherwise */
} te_emission;

/* Those of one run. */
typedef struct te_emitting {
    te_group_state *state;
    const te_space *space; /* of the unit: its rows */
    te_program **measuring; /* of the unit */
    int n;
    te_emission of[TE_EMIT_VALUES];
} te_emitting;

/* Whether rows can be quantized before the others are known. */
bool te_quantizer_is_local(const te_quantizer *q);

/* Finds the values between one program and one product, and what measuring them would cost. */
te_status te_plan_mark_emissions(te_fuse_plan *plan);
/* The product, or attention, that reads a marked value, or in backward the product that reads its gradient, and as
 * what; what that runs under; and whether a copy for its weight gradient is made at once, of its input or of the
 * gradient of its result. */
const te_unit *te_emitted_product(const te_fuse_plan *plan, int value, te_role *role);
const te_product_recipe *te_emitted_recipe(const te_unit *product);
bool te_emitted_columns(const te_fuse_plan *plan, const te_unit *product, te_role role);
const te_quantizer *te_emitted_quantizer(const te_fuse_plan *plan, int value); /* what it is quantized by */
/* The marked value that an output of a unit's program is, or in backward its gradient; TE_NO_VALUE: none. */
int te_emitted_by(const te_fuse_plan *plan, const te_unit *unit, bool forward, int output);

/* Fills the unit's emit_cost; emit_cost.c. */
te_status te_emit_cost_of(te_fuse_plan *plan, te_unit *unit, bool forward);

/* How a value that is marked gets quantized by a run over so many rows: on the cpu in stripes, on other devices by the
 * kernel of the program. */
te_emit_way te_plan_emits(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows);

/* The same of operand `i` that the gradient program of a unit gives again: at once or apart. */
te_emit_way te_plan_emits_again(const te_fuse_plan *plan, const te_device *device, const te_unit *unit, int i,
                                int64_t rows);

/* Why so: "by the program that makes it". */
const char *te_emit_reason(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows);

/* What a unit's program will emit; false when it runs as a whole. `inputs` are its operands. */
bool te_emitting_forward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                         te_emitting *e);
bool te_emitting_backward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                          te_emitting *e);
te_emission *te_emission_of(te_emitting *e, int value); /* NULL: none */

/* Runs the program; outputs that are emitted may be bound to anything. */
te_status te_emitting_run(te_emitting *e, te_program *program, const te_run *run);
int64_t te_emit_stripe(const te_emitting *e); /* rows of one */
int64_t te_emit_rows(const te_space *s);
/* Operands over {rows, width}: false when the rows of one are not evenly spaced. */
bool te_emit_flatten(int ndim, const int64_t *shape, te_operand *operands, int n);

#endif
