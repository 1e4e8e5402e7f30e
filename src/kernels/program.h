/* program.h - row programs: the intermediate form of every computation that is not a matrix product.
 *
 * A program is a list of instructions in static single assignment form over a rectangular iteration space
 * [d0, …, dn-1]. The last dimension is the *row*; everything before it enumerates rows. Value i is the result of
 * instruction i. Each value has a rate:
 *
 *      UNIFORM   one number for the whole run           constants, parameters and what follows from them
 *      ROW       one number per row                     row reductions, inputs declared so, and what follows
 *      ELEM      one number per element                 everything else
 *
 *      mean = rowsum(x) * (1/n)                         ELEM -> ROW -> ROW
 *      d    = x - mean                                  ELEM
 *      rstd = rsqrt(rowsum(d * d) * (1/n) + eps)        ROW: a second pass over the row
 *      y    = d * rstd * gamma + beta                   ELEM: a third pass
 *
 * So a program without reductions is the pointwise skeleton, one with reductions is the row skeleton, and outputs may
 * also be column sums, total sums and amaxes. A backend splits the instructions into passes at the reductions; it may
 * recompute an ELEM value in a later pass or keep it, since every instruction is a pure function.
 *
 * Arithmetic: values are float32 (or float64 when the run asks for it); each instruction rounds once, nothing is
 * contracted, and elementary functions are those of elementary.h. Hence the bits of an ELEM value do not depend on the
 * device, the instruction set, the thread count or on what else is in the program, but for what follows from a row's
 * sum. The order of sums is fixed per backend and independent of the number of threads. A device may have an exp of its
 * own for exp(x - rowmax(x)), which is added up or divided by such a sum, and for such a quotient's logarithm.
 *
 * Programs are built, simplified and differentiated in src/core; backends only run them.
 */
#ifndef TE_KERNELS_PROGRAM_H
#define TE_KERNELS_PROGRAM_H

#include "memory.h"
#include "tetrain/types.h"

/* X(enumerator, text, number of arguments, meaning). Order is part of no file format. */
#define TE_OPCODES(X)                                                                                              \
    /* leaves */                                                                                                   \
    X(LOAD, "load", 0, "element of input `slot`, converted to the compute type")                                   \
    X(PARAM, "param", 0, "scalar parameter `slot` of the run")                                                     \
    X(CONST, "const", 0, "the number `imm`")                                                                       \
    X(COLUMN, "column", 0, "position in the row, from 0")                                                          \
    X(RANDOM, "random", 0, "uniform in [0,1): top 24 bits of the Philox word of this element, generator `slot`")   \
    /* an argument that is itself a PARAM or CONST counts as given, in float64: probabilities are exact to 2^-32 */ \
    X(KEEP, "keep", 1, "1 when the Philox word of this element >= round(a * 2^32), else 0; generator `slot`")      \
    X(NORMAL, "normal", 0, "standard normal by Box-Muller from the Philox words of this element, generator `slot`") \
    /* one argument */                                                                                             \
    X(NEG, "neg", 1, "-a")                                                                                         \
    X(ABS, "abs", 1, "|a|")                                                                                        \
    X(SIGN, "sign", 1, "-1, 0 or 1; NaN for NaN")                                                                  \
    X(FLOOR, "floor", 1, "largest integer <= a")                                                                   \
    X(CEIL, "ceil", 1, "smallest integer >= a")                                                                    \
    X(ROUND, "round", 1, "nearest integer, ties to even")                                                          \
    X(TRUNC, "trunc", 1, "integer part")                                                                           \
    X(SQRT, "sqrt", 1, "correctly rounded square root")                                                            \
    X(RSQRT, "rsqrt", 1, "1 / sqrt(a), both correctly rounded")                                                    \
    X(RECIP, "recip", 1, "1 / a, correctly rounded")                                                               \
    X(EXP, "exp", 1, "e^a")                                                                                        \
    X(LOG, "log", 1, "natural logarithm")                                                                          \
    X(SIN, "sin", 1, "sine of a radians")                                                                          \
    X(COS, "cos", 1, "cosine of a radians")                                                                        \
    X(TANH, "tanh", 1, "hyperbolic tangent")                                                                       \
    X(SIGMOID, "sigmoid", 1, "1 / (1 + e^-a)")                                                                     \
    X(ERF, "erf", 1, "error function")                                                                             \
    X(ISNAN, "isnan", 1, "1 when a is NaN, else 0")                                                                \
    X(ISFINITE, "isfinite", 1, "1 when a is neither NaN nor infinite, else 0")                                     \
    X(TO_BF16, "to_bf16", 1, "a rounded to bfloat16 (nearest, ties to even)")                                      \
    X(TO_F16, "to_f16", 1, "a rounded to float16 (nearest, ties to even)")                                         \
    X(TO_F32, "to_f32", 1, "a rounded to float32; the identity unless computing in float64")                       \
    /* two arguments. Equal ones of min and max have half of the gradient each; where one is a constant or a       \
       parameter, all of it goes to a of min and to b of max */                                                    \
    X(ADD, "add", 2, "a + b")                                                                                      \
    X(SUB, "sub", 2, "a - b")                                                                                      \
    X(MUL, "mul", 2, "a * b")                                                                                      \
    X(DIV, "div", 2, "a / b")                                                                                      \
    X(POW, "pow", 2, "a^b as C's pow: small whole b by repeated multiplication, otherwise through exp and log")    \
    X(MIN, "min", 2, "smaller of both; NaN when either is NaN.")                                                   \
    X(MAX, "max", 2, "larger of both; NaN when either is NaN.")                                                    \
    X(LT, "lt", 2, "1 when a < b, else 0")                                                                         \
    X(LE, "le", 2, "1 when a <= b, else 0")                                                                        \
    X(EQ, "eq", 2, "1 when a == b, else 0")                                                                        \
    X(NE, "ne", 2, "1 when a != b, else 0")                                                                        \
    /* three arguments */                                                                                          \
    X(WHERE, "where", 3, "b when a != 0, else c; the value not chosen does not matter, NaN or not")                \
    /* reductions over the row: ELEM -> ROW */                                                                     \
    X(ROWSUM, "rowsum", 1, "sum of a over the row")                                                                \
    X(ROWMAX, "rowmax", 1, "maximum over the row, NaN when the row holds one, -inf for an empty row")              \
    X(ROWMIN, "rowmin", 1, "minimum over the row, NaN when the row holds one, +inf for an empty row")

typedef enum te_opcode {
#define TE_OPCODE_ENUM(name, text, args, doc) TE_PW_##name,
    TE_OPCODES(TE_OPCODE_ENUM)
#undef TE_OPCODE_ENUM
        TE_PW_COUNT
} te_opcode;

typedef enum te_rate { TE_RATE_UNIFORM = 0, TE_RATE_ROW = 1, TE_RATE_ELEM = 2 } te_rate;

/* Of an EXP whose argument is the logarithm of a share of a row's sum, so never above 0. */
enum { TE_EXP_BELOW = 1 };

typedef struct te_insn {
    uint8_t op;      /* te_opcode */
    uint8_t rate;    /* te_rate of the result */
    int16_t slot;    /* LOAD: input, PARAM: parameter, RANDOM, KEEP, NORMAL: generator, EXP: 0 or TE_EXP_BELOW */
    int32_t arg[3];  /* earlier values; unused ones are -1 */
    double  imm;     /* CONST */
} te_insn;

/* Where a result goes. */
typedef enum te_output_kind {
    TE_OUT_ELEM,   /* every element; the operand has strides for the whole space */
    TE_OUT_ROW,    /* one per row (value of ROW or UNIFORM rate); stride of the last dimension ignored */
    TE_OUT_COLSUM, /* sum over all rows, one per position in the row; stride[ndim-1] applies */
    TE_OUT_SUM,    /* sum over the whole space, one number */
    TE_OUT_AMAX    /* max |value| over the whole space ignoring NaN, one number; 0 for an empty space */
} te_output_kind;

struct te_program_output { /* no typedef: te_program_output is the function that adds one (program_build.h) */
    uint8_t kind;  /* te_output_kind */
    int32_t value;
};

typedef struct te_program {
    const te_mem      *mem;
    char               name[48]; /* for profiles and dumps: "gelu", "layer_norm.backward" */
    te_insn           *insns;
    struct te_program_output *outputs;
    uint8_t           *input_rates; /* te_rate per input: ROW inputs are read once per row, UNIFORM ones once */
    size_t             insn_capacity, output_capacity, input_capacity;
    int                n_insns, n_outputs, n_inputs, n_params, n_rngs;
    int32_t           *index; /* where equal instructions are found while a long program is built (program_build.c) */
    size_t             index_size;
    int                n_indexed;

    /* What a backend made of the program; made at the first run, released through `release_compiled`. The CPU and an
     * accelerator may both run it. */
    void *compiled, *device_compiled;
    void (*release_compiled)(struct te_program *);
    void (*release_device_compiled)(struct te_program *);
} te_program;

/* Table look-ups. */
const char *te_opcode_name(te_opcode op);
int         te_opcode_args(te_opcode op);

static inline bool te_opcode_reduces(int op) { return op == TE_PW_ROWSUM || op == TE_PW_ROWMAX || op == TE_PW_ROWMIN; }
static inline bool te_opcode_is_random(int op) { return op == TE_PW_RANDOM || op == TE_PW_KEEP || op == TE_PW_NORMAL; }

static inline te_rate te_program_rate(const te_program *program, int value)
{
    return (te_rate)program->insns[value].rate;
}

/* What an instruction's arguments make of it. */
te_rate te_insn_rate(const te_program *program, const te_insn *insn);

/* Whether order, slots, arities and rates are as stated above, on which a backend's memory safety rests; what is wrong
 * goes to text, which may be NULL. */
bool te_program_verify(const te_program *program, char *text, size_t size);

#endif
