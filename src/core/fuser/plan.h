/* plan.h - what the files of the fuser share: the graph, and how a plan executes it.
 *
 *      graph  -- infer.c     class, width and dtype of every value
 *             -- frame.c     the dimensions that rows are seen in, which reshapes change
 *             -- cluster.c   which nodes share a unit, and the order of the units
 *             -- compile.c   one row program per unit of program ops, and its gradient
 *             -- recompute.c what backward computes anew instead of keeping
 *             -- emit.c, handed.c  what is stored quantized alone
 *      plan   -- forward.c, backward.c, gather.c, grouped.c, ranges.c; describe*.c reads it
 *
 * A *unit* is one step of the plan: a row program made of all program ops that may be computed together, a matrix
 * product, a look-up in a table, a view in rows of another width, or another operation called as it is. Values inside a
 * unit live in registers. Where the unfused graph would store a value in its dtype, the program rounds to that dtype,
 * so that fusing does not change a forward result.
 *
 * Backward runs the units in reverse. A program's gradient is derived from the whole of it, hence it is fused as
 * forward is: the gradient of a residual sum, the norm under it and the bias gradients above come out of one pass. A
 * value that is also read by later units, such as the residual stream, enters its program as an *identity* output: its
 * gradient so far is then one more input of the gradient program, not an addition afterwards.
 */
#ifndef TE_CORE_FUSER_PLAN_H
#define TE_CORE_FUSER_PLAN_H

#include "../op_program.h"
#include "../product_quantized.h"
#include "group.h"

typedef struct te_group_node {
    te_call call; /* op, attributes, numbers in place of tensors; nothing else is set */
    int     in[TE_OP_MAX_INPUTS];
    int     out, label;
    int     frame; /* a reshape: which of the group's, from 1 */
    int    *list, n_list; /* grouped_linear: its weights, then its biases; grouped_biases: those; owned */
    te_recipe_state   **states;  /* grouped_linear: of its weights; owned, n_states of them or none */
    te_product_recipe **recipes; /* of a plan: what they run under */
    int n_states;
    te_recipe_state *recipe_state; /* NULL: its product is never quantized */
    bool    cache_quantized;
} te_group_node;

/* How a value's shape depends on x {.., width of x}. */
typedef enum te_value_class {
    TE_VALUE_ABSENT,
    TE_VALUE_TOKENS, /* {.., width}: the dimensions of x but the last, then its own width */
    TE_VALUE_ROWS,   /* {..}: one number per row; inputs only */
    TE_VALUE_FIXED,  /* a shape of its own: parameters and what is computed from them alone */
    TE_VALUE_LENGTHS /* integers, as lengths of sequences and ids; not read by programs */
} te_value_class;

/* The leading dimensions in which an activation is seen: those of x, frame 0, until a reshape makes others. A *space*
 * is a number of rows. Values of one space are stored in the dimensions of its first frame, whatever frame they are
 * seen in: row programs and products know rows alone. Only the caller, and what attends along sequences, are given the
 * dimensions of the frame. */
typedef struct te_plan_frame {
    int     ndim; /* with that of the row */
    int64_t shape[TE_MAX_DIMS]; /* as the reshape says; -1: what is left. Of frame 0 unknown */
    int     space; /* its first frame */
    int     same;  /* an earlier frame that has to have the same dimensions in a run, because an operation reads both;
                      or itself */
    int64_t rows, per; /* so many rows for `per` of x, in lowest terms */
} te_plan_frame;

typedef struct te_plan_value {
    te_value_class cls;
    te_dtype       dtype;
    int            node, input; /* what makes it; -1: the other */
    int            frame, space; /* TOKENS, ROWS */
    int            wired;       /* the value that it is, seen in another frame; TE_NO_VALUE: one of its own */
    int            ndim;        /* FIXED */
    int64_t        shape[TE_MAX_DIMS];
    int64_t        width;       /* last dimension; FIXED: number of elements */
    bool           wanted;      /* its gradient is */
    bool           saved;       /* backward reads it */
    bool           emitted;     /* of a program, between it and a product: may be left quantized. Of a product: its
                                   gradient */
    bool           handed;      /* of FP8 attention: the product that reads it takes its bytes */
    bool           packed;      /* … as E4M3 with one factor: what is saved is that */
    bool           again;       /* operand of weight gradients that the gradient program of its unit computes anew */
    bool           spread;      /* biases over the rows of ranges: backward reads them, and spreads them again */
    bool           inside;      /* never stored: read by its own unit alone */
    int            unit;        /* position in the plan of the unit that makes it; -1: an input */
    int            first_reader, last_reader; /* positions of units; -1: none */
    int            pack;        /* packed: its place in the run's array */
    int            output;      /* first output of the group that it is; -1: none */
} te_plan_value;

enum { TE_UNIT_SLOTS = 24, TE_UNIT_RESULTS = 12, TE_UNIT_RNGS = 8 };

/* A tensor that a unit's program reads. */
typedef struct te_unit_slot {
    int     value;
    te_part part;
    te_rate rate;
} te_unit_slot;

/* An output of the gradient program. */
typedef struct te_unit_grad {
    int            slot;
    te_output_kind kind;
    int            alias; /* source of the gradient that it is, unchanged; -1: computed */
    int            same;  /* one before it, of another value, that it is equal to: they share a tensor; -1: none */
    int            bias;  /* a column sum for this parameter of the matrix product that made the slot's value;
                             TE_NO_VALUE: no */
} te_unit_grad;

/* Of the results of a program that are measured before they are quantized, per row; see emit.c. */
typedef struct te_emit_cost {
    int64_t stored, read; /* bytes of them, bytes that they follow from */
    int64_t flops, work;  /* to compute them; what that takes, in bytes (emit.c) */
    bool    reduces, stochastic;
    bool    whole; /* none is a half, or measured otherwise than by the amax of its elements */
} te_emit_cost;

typedef struct te_unit {
    te_unit_kind kind;
    int          n_nodes, *nodes; /* ascending; memory of the plan */
    /* TE_UNIT_PROGRAM */
    te_gradient  gradient;        /* without gradients: forward alone */
    te_unit_slot slots[TE_UNIT_SLOTS];
    int          results[TE_UNIT_RESULTS]; /* values; the program's first outputs, rows are the others */
    te_unit_grad grads[2 * TE_UNIT_SLOTS];
    int          n_slots, n_results, n_identities, n_grads;
    int          n_again, again[TE_UNIT_RESULTS]; /* values; the gradient program's last outputs */
    int          identities[TE_UNIT_SLOTS]; /* slots, in the order of their outputs */
    bool         reload[TE_UNIT_RESULTS]; /* backward loads the result rather than computing it again */
    te_emit_cost emit_cost[2];    /* forward, backward */
    te_program  *measuring[2];    /* the programs with amaxes of what is stored, for devices; made when first run */
    int          n_rngs;
    int          rng_nodes[TE_UNIT_RNGS]; /* which node draws it */
    int          first_row, first_rng; /* in the run's arrays; TE_UNIT_ATTENTION, TE_UNIT_MASK: where its own numbers
                                          begin */
    int          space;
    int64_t      width;
    bool         compute_f64;
    /* TE_UNIT_LINEAR; of others x and result, of TE_UNIT_GATHER weight */
    bool         bias_elsewhere;  /* the bias gradient is an output of the program that makes the gradient of
                                     the result */
    int          x, weight, bias, result; /* values */
    te_dtype     compute;         /* dtype of the product */
    te_product_recipe *recipe;    /* how its operands are quantized; NULL: not. Borrowed from the plan */
    int          product, n_products; /* under a recipe: what backward reads, in the run's arrays; of TE_UNIT_GROUPED
                                         for each group */
    /* TE_UNIT_ATTENTION */
    te_product_recipe *attention; /* likewise, of an attention, which has a place among the products: for its operands,
                                     where a program leaves them quantized */
    /* TE_UNIT_LINEAR and TE_UNIT_ATTENTION */
    int          first_aux;       /* tensors of its own in the run's arrays: its operands; of a product under no recipe,
                                     while its weight gradient waits for x, the gradient of the result as well */
} te_unit;

/* Random numbers that a run draws. */
typedef struct te_plan_draw {
    int node, unit, rng;
} te_plan_draw;

/* What tells plans apart: one per input, and the settings of the context. */
typedef struct te_plan_key {
    te_dtype       dtype;
    te_value_class cls;
    bool           wanted;
    int            ndim;
    int64_t        width;
    int64_t        shape[TE_MAX_DIMS]; /* FIXED */
} te_plan_key;

typedef struct te_fuse_plan {
    size_t         counted; /* bytes, towards the limit of tensor memory */
    te_context    *ctx;
    int            refs;
    te_plan_key   *keys; /* per input */
    te_dtype       compute_dtype;
    bool           record;
    int            x_ndim;
    int64_t        recompute_width;
    int            n_inputs, n_nodes, n_values, n_units, n_outputs, n_frames;
    te_plan_frame *frames; /* memory for one per node and x's */
    te_plan_value *values;
    te_unit       *units;
    te_group_node *nodes; /* copies of the group's */
    te_product_recipe **recipes; /* per node: what its product runs under, NULL: high precision */
    int           *outputs, *output_frames;
    te_plan_draw  *draws; /* n_rngs, in the order of their nodes */
    int            n_rows, n_rngs, n_aux, n_products, n_packs; /* sizes of a run's arrays */
    char          *refusal; /* why there is no plan for these inputs, as long as the context's message; NULL: there is
                               one */
    struct te_fuse_plan *next; /* of the same group */
} te_fuse_plan;

typedef struct te_group_value {
    int  producer; /* its node, or -1 - input */
    int  frame;    /* behind which reshape it stands, 0: x's dimensions, -1: read by nothing yet */
    bool parameter;
} te_group_value;

struct te_group {
    te_context    *ctx;
    te_group_node *nodes;
    te_group_value *values;
    te_plan_key   *keys;      /* per input, of the run in progress */
    int            outputs[TE_GROUP_MAX_OUTPUTS];
    size_t         node_capacity, value_capacity, key_capacity;
    int            n_nodes, n_values, n_inputs, n_outputs, n_frames;
    bool           refused; /* the last run had no plan */
    te_fuse_plan  *plans; /* the last used first */
    size_t         counted; /* bytes of all this, towards the limit of tensors: a script may add values without end */
};

enum { TE_GROUP_MAX_PLANS = 64 }; /* and those of runs whose backward is to come */

/* What one forward pass leaves for backward; also its working memory. */
typedef struct te_group_state {
    te_fuse_plan *plan;
    size_t        bytes;
    int           ndim; /* of frame 0 */
    int64_t       shape[TE_MAX_DIMS];
    te_space     *frames; /* as they are in this run, their last dimension to be filled in */
    te_device    *device;
    te_tensor   **values, **rows, **aux, **grads; /* n_values, n_rows, n_aux, n_values */
    uint64_t     *versions; /* of values and aux */
    te_product_saved *products;
    te_quantized *emitted; /* per product: its input and the gradient of its result, where programs left them
                              quantized */
    te_quantized *packs; /* n_packs; filled once their readers have run */
    te_rng       *rngs;
} te_group_state;

/* --- making plans ------------------------------------------------------------------------------------------------- */

/* Gives a node lists of its own, copies; false: no memory, and te_node_disown lets go of those that are there. */
bool te_node_own(const te_mem *mem, te_group_node *node, const int *list, int n, te_recipe_state *const *states,
                 int n_states);
void          te_node_disown(const te_mem *mem, te_group_node *node);
/* Whether these inputs can be planned for; *record: whether a gradient is wanted. */
te_status te_group_check_inputs(te_group *group, te_tensor *const *inputs, bool *record);
/* found or made; NULL on failure */
te_fuse_plan *te_group_plan(te_group *group, te_tensor *const *inputs, bool record);
void          te_fuse_plan_release(te_fuse_plan *plan);
/* trace.c: the plan, for these inputs, on standard error. */
void          te_fuse_trace(te_fuse_plan *plan, te_tensor *const *inputs);
te_status     te_plan_infer(te_fuse_plan *plan);
te_status     te_plan_cluster(te_fuse_plan *plan);
te_status     te_plan_compile(te_fuse_plan *plan);
/* compile_gradient.c: derives the gradient of a program unit, whose forward has an output for every result and behind
 * them for every identity, and `joints` for its values; fills unit->gradient and grads. What that takes of compile.c:
 * how the gradient of a value is summed, whose slot has that rate, and what rounds to the dtype of a value where the
 * unit's arithmetic is wider (0: nothing). */
te_status      te_plan_differentiate(te_fuse_plan *plan, int position, const te_joint *joints);
te_output_kind te_plan_reduction(const te_plan_value *value, te_rate rate);
uint8_t        te_plan_rounding(const te_fuse_plan *plan, const te_unit *unit, int value);
/* per result; true: some */
bool          te_plan_may_recompute(const te_fuse_plan *plan, const te_unit *unit, bool *again);
/* Whether backward keeps fewer bytes with the second gradient, which gives those results again, than with the first. */
bool te_plan_recompute_pays(const te_fuse_plan *plan, const te_unit *unit, const bool *again,
                            const te_gradient *keeping, const te_gradient *recomputing);
bool          te_plan_computes_f64(const te_fuse_plan *plan, const te_group_node *node); /* a program op */
unsigned      te_plan_present(const te_fuse_plan *plan, const te_group_node *node); /* bit i: input i is there */
te_status     te_plan_refuse(te_fuse_plan *plan, const te_group_node *node, const char *format, ...) TE_PRINTF(3, 4);

/* --- running them ------------------------------------------------------------------------------------------------- */

te_group_state *te_group_state_new(te_fuse_plan *plan, te_tensor *const *inputs); /* NULL on failure */
void            te_group_state_free(te_group_state *state);
void            te_group_state_trim(te_group_state *state); /* after forward: drops what backward does not read */
te_status       te_group_state_unpack(te_group_state *state, const te_unit *unit); /* what its backward reads */
void            te_group_state_repack(te_group_state *state, const te_unit *unit, bool release);
te_status       te_plan_forward(te_group_state *state, te_tensor *const *inputs);
te_status       te_plan_backward(te_group_state *state, te_call *call);

/* The iteration space of a unit. */
te_space   te_state_space(const te_group_state *state, const te_unit *unit);
te_tensor *te_state_tensor(te_group_state *state, const te_plan_value *value); /* uninitialised */

/* --- frames ------------------------------------------------------------------------------------------------------- */

/* Of x, which stands for {x's dimensions, width} where it holds ids. */
te_space  te_frame_of_input(const te_tensor *x);
/* The dimensions that input i of a group, no parameter, is expected to have for every row; -1: any. */
te_space  te_group_frame(const te_group *group, int frame, const te_tensor *x);
/* The frame that a node stands in, from its inputs; those that stand in none yet join it. */
int       te_group_enter_frame(te_group *group, const te_group_node *node);
/* Values that one operation reads are seen in the same dimensions; false when that cannot be. */
bool      te_plan_same_frame(te_fuse_plan *plan, int a, int b);
te_status te_plan_infer_reshape(te_fuse_plan *plan, te_group_node *node, te_plan_value *out);
void      te_plan_wire(te_fuse_plan *plan); /* takes out the reshapes that leave rows as they are */
/* Fills in the frames of a run; TE_ERROR_UNSUPPORTED when x's rows, or the inputs, do not fit them. */
te_status te_state_open_frames(te_group_state *state, te_tensor *const *inputs);
/* t, a value's memory or gradient, as it is stored, or as it is seen in `frame`. A new reference, NULL on failure. */
te_tensor *te_state_stored(const te_group_state *state, const te_plan_value *value, te_tensor *t);
te_tensor *te_state_seen(const te_group_state *state, const te_plan_value *value, te_tensor *t, int frame);

/* draw.c: random numbers, drawn in the order in which single operations draw them. */
bool      te_plan_draws(const te_group_node *node); /* a called operation: by itself */
bool      te_plan_turns(const te_group_node *node); /* attention: its queries and keys by their positions */
int       te_plan_sinks(const te_fuse_plan *plan, const te_group_node *node); /* the value, if a gradient is wanted */
enum { TE_CALL_AUX = 3 }; /* of a called operation, as its own tape sees them: its input, its result, and its sinks */
te_status te_plan_order_draws(te_fuse_plan *plan);
void      te_state_draw(te_group_state *state);
te_status te_mask_forward(te_group_state *state, const te_unit *unit);

/* gather.c: units that look rows up. grouped.c, ranges.c: those of ranges of rows. */
te_status te_gather_forward(te_group_state *state, const te_unit *unit);
te_status te_plan_infer_grouped(te_fuse_plan *plan, te_group_node *node, te_plan_value *out);
te_status te_grouped_forward(te_group_state *state, const te_unit *unit);
int       te_grouped_count(const te_fuse_plan *plan, const te_group_node *node); /* of groups */
void      te_plan_describe_grouped(te_fuse_plan *plan, te_unit *unit);
/* of a group; NULL: high precision */
te_product_recipe *te_grouped_recipe(const te_fuse_plan *plan, const te_unit *unit, int i);
te_status te_plan_infer_biases(te_fuse_plan *plan, te_group_node *node, te_plan_value *out);
te_status te_biases_forward(te_group_state *state, const te_unit *unit);

#endif
