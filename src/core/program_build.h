/* program_build.h - making row programs: by hand, from a formula, by joining, by differentiating.
 *
 * Building never leaves a half-made program behind: after a failed call the program is unchanged or must only be freed.
 * Every emit simplifies on the way, and only in ways that keep each bit of the result: constants are folded with the
 * arithmetic of the run, x * 1, x - 0, x / 1 and double negation vanish, equal instructions are shared.
 */
#ifndef TE_CORE_PROGRAM_BUILD_H
#define TE_CORE_PROGRAM_BUILD_H

#include "kernels/program.h"

/* Message of a failed build. */
typedef struct te_build_error {
    te_status status;
    char      message[256];
} te_build_error;

/* NULL when memory is exhausted. */
te_program *te_program_new(const te_mem *mem, const char *name);
te_program *te_program_clone(const te_program *program);
void        te_program_free(te_program *program); /* NULL is a no-op; releases what a backend compiled */

/* Each returns the id of a value, or -1 when memory is exhausted (or an argument is -1, so calls can be chained and
 * checked once). The rate of a result follows from the arguments. */
int te_program_input(te_program *program, te_rate rate);  /* next input slot; LOAD of it */
int te_program_load(te_program *program, int slot);       /* an existing slot */
int te_program_param(te_program *program, int slot);      /* grows n_params to slot + 1 */
int te_program_const(te_program *program, double value);
int te_program_generator(te_program *program, te_opcode op, int slot, int a); /* RANDOM, KEEP, NORMAL */
int te_program_emit(te_program *program, te_opcode op, int a, int b, int c);  /* unused arguments -1 */
int te_program_exp_below(te_program *program, int a); /* EXP of a value that is never above 0 */
int te_program_output(te_program *program, te_output_kind kind, int value);   /* index of the output */

/* Drops instructions that no output needs; inputs, parameters and generators keep their slots. */
te_status te_program_prune(te_program *program);

/* Copies the instructions of `source` into `target`. Input i of the source becomes value inputs[i] of the target,
 * parameter and generator slots are shifted by param_base and rng_base; on success outputs[j] is the target's value for
 * source output j. This is how chains are fused: where the unfused graph would have stored a bf16 tensor, pass the
 * value through TO_BF16 first. */
te_status te_program_append(te_program *target, const te_program *source, const int *inputs, int param_base,
                            int rng_base, int *outputs);

/* A copy in which every parameter is the constant of its slot, simplified accordingly; NULL when memory is
 * exhausted. */
te_program *te_program_bind(const te_program *source, const double *values);

/* A copy that does without the inputs that are absent: what is made of them alone is left out of sums, whatever it
 * would have been multiplied by, and an output that is nothing else is the constant 0. Slots stay as they are. NULL
 * when memory is exhausted. */
te_program *te_program_without(const te_program *source, const bool *absent);
/* Whether an output is that constant. */
bool te_program_gives_nothing(const te_program *program, int output);

/* One line per instruction, for people and tests; returns the length as snprintf does. */
int te_program_dump(const te_program *program, char *text, size_t size);

/* --- formulas --------------------------------------------------------------------------------------------------- */

/* A computation in text form:
 *
 *     "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * gamma + beta"
 *
 * Statements are separated by ';'. Operators by falling precedence: unary - and ^ (right associative, binds tighter
 * than unary minus, as in Lua), * /, + -, comparisons (< <= > >= == ~=), `and`, `or`, parentheses. Functions: every
 * opcode's text, plus rowmean(v) = rowsum(v) / n where n is the built-in name of the row's length, relu(v) = max(v, 0),
 * clamp(v, lo, hi) = min(max(lo, v), hi), square(v), keep(p) (takes the next free generator slot), random(), normal(),
 * column(), exp_below(v) = exp(v) where v, the logarithm of a share of a row's sum, is never above 0. `inf`, `nan` and
 * `pi` are numbers.
 * Names: inputs, parameters, names assigned before, and `n`.
 */
typedef struct te_formula {
    const char        *text;
    int                n_inputs, n_params, n_outputs;
    const char *const *input_names;
    const te_rate     *input_rates;   /* NULL: all ELEM */
    const double      *input_defaults;/* used where present[i] is false: the constant that stands for an absent input */
    const bool        *present;       /* NULL: all. Slots count present inputs only */
    const char *const *param_names;   /* slot i; `n`, where used, is parameter slot n_params */
    const char *const *output_names;  /* each becomes a TE_OUT_ELEM, or TE_OUT_ROW output when its rate is lower, */
    bool               elements;      /* unless that is set */
} te_formula;

/* NULL with *error filled: names the formula, the position and what was expected. */
te_program *te_formula_compile(const te_mem *mem, const char *name, const te_formula *formula, te_build_error *error);

/* --- gradients -------------------------------------------------------------------------------------------------- */

/* Where the value of an input of a gradient program comes from. */
typedef enum te_grad_source_kind {
    TE_GRAD_FROM_INPUT,    /* forward input slot `index` */
    TE_GRAD_FROM_OUTPUT,   /* saved forward output `index` */
    TE_GRAD_FROM_ROW,      /* ROW value that forward stores as extra output `index` (counted from 0 after its own
                              outputs) */
    TE_GRAD_FROM_DOUT      /* gradient of forward output `index` */
} te_grad_source_kind;

typedef struct te_grad_source {
    te_grad_source_kind kind;
    int                 index;
} te_grad_source;

enum { TE_GRAD_MAX_SOURCES = 32 };

/* What a value of a forward program would be if the programs that it was joined from ran one by one. */
typedef struct te_joint {
    bool    last;    /* the last instruction of one of them */
    bool    tensor;  /* one per element that would be stored: its gradient too */
    uint8_t stored;  /* the opcode that rounds to its dtype; 0: none is needed */
} te_joint;

/* What is asked for. For each forward input slot: whether its gradient is wanted, and as which output: ELEM, ROW (the
 * gradient summed over the row), COLSUM (summed over rows) or SUM, according to how the input was broadcast. */
typedef struct te_gradient_request {
    const te_program     *forward;
    const te_formula     *formula;       /* that forward was compiled from; NULL: only the derived gradient */
    const char           *gradient_text; /* explicit gradient formula, or NULL. Assigns d<input> for every wanted input;
                                            may use inputs, outputs (then saved), parameters, `n`, names of ROW rate
                                            assigned in the forward formula (then saved as rows) and d<output> */
    const bool           *wanted;
    const te_output_kind *reduce;
    double                row_length;    /* the length of a row where it is known, else 0 */
    const bool           *save_output;   /* per forward output: its ELEM value may be loaded instead of recomputed;
                                            NULL: none */
    const bool           *again;         /* per forward output: backward gives its ELEM value as well, computed anew,
                                            behind the gradients; NULL: none */
    const te_joint       *joints;        /* per forward value: gradients then have the bits that single programs give
                                            them, but for sums of rows; NULL: it is one program */
    const uint8_t        *out_stored;    /* per forward output, with joints: as te_joint's */
} te_gradient_request;

/* The result: `forward` is a copy of the forward program with the ROW values that backward needs as extra TE_OUT_ROW
 * outputs; `backward` has one output per wanted input, in order, then what is asked for again. ELEM values are
 * recomputed from saved inputs, ROW values that depend on a row reduction are stored: they are few and cost a pass.
 * Generators keep their slots, so dropout masks are recomputed, not stored. A gradient that is zero everywhere is a
 * constant 0 output. rowmax and rowmin pass no gradient when used only to shift (stop-gradient is never assumed: their
 * gradient goes to the elements equal to the extreme, divided among ties). Comparison results, sign, floor, ceil,
 * round, trunc, isnan, isfinite, column, random have none; to_bf16 and to_f16 pass theirs through, rounded only where a
 * joint says that it would be stored. */
typedef struct te_gradient {
    te_program    *forward, *backward;
    int            n_sources, n_rows;
    te_grad_source sources[TE_GRAD_MAX_SOURCES];
    struct te_partial_gradient *partial; /* te_gradient_without */
} te_gradient;

te_status te_program_differentiate(const te_gradient_request *request, te_gradient *gradient, te_build_error *error);
void      te_gradient_clear(te_gradient *gradient); /* frees its programs */
/* `backward` where the sources that are absent have no gradient, as those of a result that nothing came back for; it
 * belongs to the gradient. NULL when memory is exhausted. */
te_program *te_gradient_without(te_gradient *gradient, const bool *absent);

#endif
