/* op.h - operations: one declaration each, from which argument checks, binding, help, gradient and tests follow.
 *
 * A declaration is a row of a table in src/core/ops/. Its signature is text:
 *
 *     layer_norm(x, gamma = 1, beta = 0; eps: number = 1e-5)
 *
 * Parameters without a type are tensors; a default makes them optional, and where the op takes numbers, a number may
 * stand for a tensor. `name: type` are attributes; types: number, int, bool, dim and index (from 1 in Lua, from 0
 * here), dims, shape, dtype, device, text, tensors, or choices a|b|c. What follows ';' is given by name only, in the
 * options table.
 *
 * An op is either a *program op* (`formula` set: a row program, see formula in program_build.h; its gradient is
 * derived, or given as a formula), a *structured op* with a forward and a backward function over a te_call, or stands
 * for one of these (`resolve`).
 */
#ifndef TE_CORE_OP_H
#define TE_CORE_OP_H

#include "tensor.h"

enum { TE_OP_MAX_INPUTS = 6, TE_OP_MAX_ATTRS = 12, TE_OP_MAX_OUTPUTS = 8, TE_OP_MAX_SAVED = 12 };

typedef enum te_param_type {
    TE_TYPE_TENSOR, TE_TYPE_TENSORS, TE_TYPE_NUMBER, TE_TYPE_INT, TE_TYPE_BOOL, TE_TYPE_DIM, TE_TYPE_INDEX,
    TE_TYPE_DIMS, TE_TYPE_SHAPE, TE_TYPE_DTYPE, TE_TYPE_DEVICE, TE_TYPE_TEXT, TE_TYPE_CHOICE
} te_param_type;

/* A parsed parameter. */
typedef struct te_param {
    char          name[24];
    te_param_type type;
    bool          optional, by_name; /* by_name: only in the options table */
    bool          has_default;
    double        number;      /* default of tensors that stand for a constant, numbers, ints, bools, dims, choices
                                  (index) */
    char          text[64];    /* choices "a|b|c", or default text */
    int           slot;        /* index among inputs or among attributes */
} te_param;

typedef struct te_attr {
    bool    set; /* given by the caller or by a default */
    double  number;
    int     n; /* dims, shape */
    int64_t ints[TE_MAX_DIMS];
    const char *text;
} te_attr;

typedef struct te_call te_call;

enum te_op_flags {
    TE_OP_NUMBERS = 1 << 0,  /* numbers may stand for tensors */
    TE_OP_INPLACE = 1 << 1,  /* has a form `name_` that writes into its first input */
    TE_OP_METHOD = 1 << 2,   /* also a method of tensors */
    TE_OP_COMPUTE = 1 << 3,  /* result in the compute dtype (autocast), else the first input's */
    TE_OP_BOOL = 1 << 4,     /* result is bool */
    TE_OP_FLOAT = 1 << 5,    /* integers give float32 */
    TE_OP_F32 = 1 << 6,      /* result is float32 (float64 for float64) */
    TE_OP_GATED = 1 << 7,    /* x is split in halves along the last dimension: program inputs a and b. Where it has
                                an attribute `interleave` that is not 0, a and b alternate in blocks of so many */
    TE_OP_FLOAT8 = 1 << 8,   /* float8 stays float8 */
    TE_OP_ELEMENTS = 1 << 9, /* results have a value per element even where the formula comes to one per row */
    TE_OP_LASTROW = 1 << 10, /* the row is the last dimension; the space is that of the first input */
    TE_OP_HIDDEN = 1 << 11,  /* not bound in Lua: a building block of other ops */
    TE_OP_NOGRAD = 1 << 12,  /* never differentiable */
    TE_OP_QUANTIZED = 1 << 14, /* takes parameters that are stored quantized as they are */
    TE_OP_EFFECTS = 1 << 15,   /* backward may give gradients to more than the inputs */
    TE_OP_ATTENDS = 1 << 16, /* attention, whose operands a recipe may quantize */
    TE_OP_ACROSS = 1 << 13   /* inputs may be on other devices than the first: they are brought to it */
};

/* Another op that a call stands for: its name (NULL: no op at all, the result is the first input) and its attributes by
 * position; the inputs are the call's. */
typedef struct te_delegate {
    const char *name;
    double      attrs[4];
    int         n;
} te_delegate;

/* What an op is in a group (fuser/plan.h). Those with a formula, and those that stand for one (resolve), are parts of
 * programs; others are units of their own, or in no group: then their kind is TE_UNIT_PROGRAM as well. */
typedef enum te_unit_kind {
    TE_UNIT_PROGRAM,
    TE_UNIT_LINEAR,
    TE_UNIT_ATTENTION, /* the op as it is, on a packed projection */
    TE_UNIT_GATHER,    /* rows of a table by id */
    TE_UNIT_GROUPED,   /* ranges of rows times weights of their own */
    TE_UNIT_BIASES,    /* every row's bias, that of its range; made again where backward reads it */
    TE_UNIT_MASK,      /* which rows stochastic depth keeps */
    TE_UNIT_VIEW       /* memory read in rows of another width */
} te_unit_kind;

enum { TE_UNIT_KINDS = TE_UNIT_VIEW + 1 };

typedef struct te_op_def {
    const char *signature;
    const char *module;   /* activations: names of the Lua module that stands for it, "GEGLU GeGLU"; NULL: none */
    const char *doc;      /* first sentence: what; then shapes, errors, source */
    unsigned    flags;
    const char *formula;  /* program ops */
    const char *gradient; /* explicit gradient formula, NULL: derived */
    const char *outputs;  /* names of the formula's results, "y" when NULL; structured ops: only their number counts */
    const char *rows;     /* names of inputs that hold one value per row, "target" */
    const char *domain;   /* where the gradient test draws inputs, "0.1 3"; "-2 2" when NULL */
    te_unit_kind unit;
    te_status (*forward)(te_call *call);
    te_status (*backward)(te_call *call);
    te_status (*resolve)(te_call *call, te_delegate *to); /* instead of both: from the attributes alone, the op it
                                                             stands for */
    te_status (*check)(te_call *call);        /* before a formula runs: refuses attributes */
    te_status (*check_inputs)(te_call *call); /* likewise tensors, which a group does not have yet */
    te_status (*after)(te_call *call); /* with forward's result: mends what depends on its dtype */
    const char *(*title)(const te_call *call); /* how messages begin where one op stands for many; NULL: "te." and its
                                                  name */
} te_op_def;

struct te_op {
    const te_op_def *def;
    const char      *group; /* NULL: te_op_define made it */
    char             name[40];
    te_param         params[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS];
    int              n_params, n_inputs, n_attrs, n_outputs;
    bool             takes_list; /* first input is a list of tensors */
    bool             simple;     /* a formula of tensors alone with one result in their dtype: te_program_op_quick may
                                    run it */
    int              refs;       /* holders of an op that te_op_define made; 0: declared in a table */
    struct te_variant *variants; /* of one that te_op_define made: its compiled programs */
    struct te_op    *next;       /* of those in tables whose names have the same hash */
};

/* Whether the op is one of the context's tables, or was defined in it; and where one without a group was defined. */
bool te_op_is_of(const te_context *ctx, const te_op *op);
const te_context *te_op_definer(const te_op *op);

/* One application of an op. The same struct, kept in the graph, is what backward sees. */
struct te_call {
    te_context  *ctx;
    const te_op *op;
    te_tensor   *in[TE_OP_MAX_INPUTS]; /* borrowed in forward; NULL: absent. In backward: NULL, use what was saved */
    bool         is_number[TE_OP_MAX_INPUTS];
    double       number[TE_OP_MAX_INPUTS]; /* numbers that stand for tensors */
    te_tensor  **list; /* list inputs, borrowed */
    int          n_list;
    te_attr      attr[TE_OP_MAX_ATTRS];
    te_tensor   *out[TE_OP_MAX_OUTPUTS]; /* forward: results, owned */
    te_tensor   *inplace;                /* forward: result 0 goes here, NULL: a new tensor */
    bool         record;                 /* forward: some input needs a gradient; save what backward reads */

    te_tensor *saved[TE_OP_MAX_SAVED];
    uint64_t   saved_version[TE_OP_MAX_SAVED];
    int        n_saved;
    te_rng     rng;
    int64_t    memo[8];  /* whatever forward wants backward to know */
    const void *pointer; /* likewise, not owned; or owned by release */
    void      (*release)(te_call *call);

    te_node   *node;                    /* backward: where the call stands in the graph */
    te_tensor *dout[TE_OP_MAX_OUTPUTS]; /* backward: gradients of the results, any strides; NULL: zero */
};

/* Of numbers that an int64_t holds. */
static inline bool te_is_whole(double x) { return x >= -0x1p63 && x < 0x1p63 && x == (double)(int64_t)x; }

/* --- for ops ------------------------------------------------------------------------------------------------------ */

/* Keeps t (retained) for backward; returns its index in saved, or -1 (already failed). NULL is kept as NULL. */
int te_call_save(te_call *call, te_tensor *t);
/* Errors in the op's name: "te.softmax: …". */
te_status te_call_fail(te_call *call, te_status status, const char *format, ...) TE_PRINTF(3, 4);
te_status te_call_kernel(te_call *call, te_exec *exec, te_status status); /* passes a kernel's failure on */
te_exec  *te_call_exec(te_call *call, const te_tensor *t);                /* where t lives */
te_dtype  te_call_compute_dtype(const te_call *call, te_dtype otherwise);

/* Gradient of input i. `give` hands over a tensor (the reference is consumed; NULL reports the failure that made it
 * NULL). `target` returns a contiguous buffer of the input's shape to be written (*accumulate false) or added to
 * (true): the parameter's own .grad where possible. Borrowed; NULL on failure. Backward runs where some input's
 * gradient is wanted, so who has several asks te_grad_wanted first. */
te_status  te_grad_give(te_call *call, int i, te_tensor *grad);
te_tensor *te_grad_target(te_call *call, int i, bool *accumulate);
/* Whether input i needs a gradient; whether inputs i and j are the same tensor; shape and dtype of input i. */
bool                       te_grad_wanted(const te_call *call, int i);
bool                       te_grad_same(const te_call *call, int i, int j);
const struct te_grad_meta *te_grad_input(const te_call *call, int i);

/* --- registry ----------------------------------------------------------------------------------------------------- */

te_status te_ops_open(te_context *ctx);
void      te_ops_close(te_context *ctx);
te_status te_op_parse(te_context *ctx, const te_op_def *def, te_op *op);

/* An op made at run time from texts, which are copied: it has a formula, and parameters that are tensors and numbers.
 * NULL with the reason recorded. One reference is the caller's; every recorded call holds one. Retaining and releasing
 * leave declared ops alone. */
const te_op *te_op_define(te_context *ctx, const te_op_def *def);
void         te_op_retain(const te_op *op);
void         te_op_release(const te_op *op);

/* The in-place form: result 0 is written into the first input. */
te_status te_op_run_inplace(te_context *ctx, const te_op *op, const te_arg *args, int n_args);
/* Short forms for use inside the engine: tensors only, in order. A new reference or NULL. */
te_tensor *te_op_apply(te_context *ctx, const char *name, int n, te_tensor *const *in);

/* Fills attributes, and the numbers that stand for tensors, from arguments in the order of the signature; tensors are
 * left out. For calls whose tensors are not known yet. */
te_status te_call_attributes(te_call *call, const te_arg *args, int n_args);
/* Fills inputs and attributes of a call, which is empty but for context and op, from arguments in the order of the
 * signature; those that are absent or behind the last have their defaults. Tensors are borrowed. TE_ERROR_ARGUMENT that
 * names the argument where it is none that the signature allows. */
te_status te_call_arguments(te_call *call, const te_arg *args, int n_args);

/* Runs a call whose op, inputs and attributes are set; on success call->out holds the results. */
te_status te_call_run_op(te_call *call);

/* A composite op: runs op `name` (recorded by itself) and hands its results on as the call's own. */
te_status te_call_delegate(te_call *call, const char *name, int n_args, const te_arg *args);
/* Likewise with a tensor made by ops that recorded themselves (reference consumed; NULL reports the failure). */
te_status te_call_result(te_call *call, te_tensor *result);

/* Program ops. */
te_status te_program_op_forward(te_call *call);
te_status te_program_op_backward(te_call *call);
/* The short way for a simple op on tensors alike (op_quick.c). False, with nothing done, where it is not open. */
bool te_program_op_quick(te_context *ctx, const te_op *op, const te_arg *args, int n_args, te_tensor **out,
                         te_status *status);

#endif
