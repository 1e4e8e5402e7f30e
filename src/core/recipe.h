/* recipe.h - how the operands of a matrix product are quantized, and what delayed scaling remembers of them.
 *
 * A *product recipe* holds a quantizer per role and says what backward computes with. It never changes, so plans may
 * keep it: other quantizers are another recipe. A *recipe state* belongs to one operation, whatever recipe it runs
 * under:
 *
 *      scale[role]      float32 {1}           what the next tensor in this role is multiplied by
 *      history[role]    float32 {length}      amaxes: of the step in progress, then of earlier ones, oldest first
 *
 * both only for quantizers that need a history, on the device of the tensors that were last quantized, where kernels
 * read and write them without the host, and the quantized copy of the weight, made once per version of it.
 *
 * Scales and histories change in te_recipe_states_update alone. In between, te_role_quantize collects the step's amax
 * where gradients are recorded, so that evaluating a model leaves training as it was. When a stretch of forward is run
 * twice (te.checkpoint) the factors of the first run are written to a tape and read back in the second, so that both
 * give the same bytes. */
#ifndef TE_CORE_RECIPE_H
#define TE_CORE_RECIPE_H

#include "quantized.h"

extern const char *const te_role_names[]; /* "input", "weight", "grad_output", NULL */

typedef enum te_backward_precision {
    TE_BACKWARD_QUANTIZED,
    TE_BACKWARD_HIGH_PRECISION, /* from the operands before they were quantized */
    TE_BACKWARD_DEQUANTIZED     /* from what forward multiplied, in high precision */
} te_backward_precision;

/* The products of a linear layer. */
typedef enum te_product_kind {
    TE_PRODUCT_FORWARD, TE_PRODUCT_DGRAD, TE_PRODUCT_WGRAD, TE_PRODUCT_COUNT
} te_product_kind;

typedef struct te_recipe_state te_recipe_state;

typedef struct te_product_recipe {
    te_context *ctx;
    int refs;
    bool quantized[TE_ROLE_COUNT]; /* false: the role stays in high precision */
    te_quantizer quantizers[TE_ROLE_COUNT];
    te_backward_precision backward;
    bool fast_sums[TE_PRODUCT_COUNT]; /* sums of fp8 products may be taken in fewer bits than float32 has (te_gemm) */
    bool hands_on; /* of an attention: a product that reads its result multiplies the bytes that it left */
    int64_t history_length[TE_ROLE_COUNT]; /* 1 at least, where the role's quantizer needs a history */
} te_product_recipe;

/* Whose sums are fast under a choice of fast_accumulation (te_fast_accumulation_names) for each role: those that the
 * choices of both operands allow. */
extern const char *const te_fast_accumulation_names[];
void te_product_recipe_allow_fast_sums(te_product_recipe *recipe, const int choices[TE_ROLE_COUNT]);
/* A checked copy of `from`; NULL with the reason recorded. One reference is the caller's. */
te_product_recipe *te_product_recipe_new(te_context *ctx, const te_product_recipe *from);
te_product_recipe *te_product_recipe_retain(te_product_recipe *recipe); /* NULL passes through, as below */
void te_product_recipe_release(te_product_recipe *recipe);
/* Whether products run alike under both, histories apart: a script may make a recipe per step. NULL: none. */
bool te_product_recipe_alike(const te_product_recipe *a, const te_product_recipe *b);

struct te_recipe_state {
    te_context *ctx;
    int refs;
    te_product_recipe *recipe; /* NULL: none yet */
    te_tensor *scale[TE_ROLE_COUNT], *history[TE_ROLE_COUNT];
    struct te_scaled_for {
        bool known, counted;
        te_element_kind element;  /* known: the scale was computed for it; else it is 1, or was set, and for any */
        te_element_kind counting; /* counted: what tensors were quantized to whose amaxes wait for the next update */
    } scaled_for[TE_ROLE_COUNT];
    te_quantized weight; /* of the weight below, under `recipe` */
    uint64_t weight_id, weight_version;
    uint64_t weight_scale_id, weight_scale_version; /* of scale[TE_ROLE_WEIGHT] then */
    int64_t weight_offset, weight_stride[TE_MAX_DIMS]; /* which part of its storage it was */
    uint64_t weight_graph;   /* made while this graph was recorded; 0: none was */
    te_tensor *weight_scale; /* float32 {1}: what it was multiplied by, where that is given; nobody writes it, or it is
                                scale[TE_ROLE_WEIGHT] itself */
    te_tensor *weight_kept;  /* on devices: te_quantize_job.kept; NULL: none */
    bool weight_collected;   /* its amax counts in this step already */
    uint64_t backward;       /* the last backward pass that a scale with a history took part in, as te_context.backwards
                                counts them; 0: none */
    struct te_numerics *watched; /* numerics.h; NULL: nobody looks */
    struct te_product_host *host; /* of a C host's product (autocast.h); NULL: of a script's */
};

te_recipe_state *te_recipe_state_new(te_context *ctx);
te_recipe_state *te_recipe_state_retain(te_recipe_state *state);
void te_recipe_state_release(te_recipe_state *state);

/* What the operation runs under from now on. Scales start at 1; a history of another length keeps its first entries. A
 * tensor that is quantized to another element than the scale was computed for is multiplied by as much more or less as
 * that reaches further. */
te_status te_recipe_state_use(te_recipe_state *state, te_product_recipe *recipe);

/* Copies of a scale, float32 {1}, and of a history, float32 {n}, on the cpu; and whether they would be taken. */
te_status te_recipe_state_check(const te_recipe_state *state, te_role role, te_tensor *scale, te_tensor *history);
te_status te_recipe_state_set(te_recipe_state *state, te_role role, te_tensor *scale, te_tensor *history);
/* The scale that was set is one that was computed at the end of a step. */
void te_recipe_state_updated(te_recipe_state *state, te_role role);

/* The end of a step for one role. `algorithm`: the largest amax of the history, or the last one. The step's amax is
 *
 *      0                 nothing happens: the tensor was not used
 *      infinite or NaN   it is forgotten and counted, the scale stays
 *      otherwise         the history rolls, scale = max 2^-margin / amax; the scale stays where this or its inverse is
 *                        not positive and finite in float32
 */
typedef enum te_amax_algorithm { TE_AMAX_MAX, TE_AMAX_MOST_RECENT } te_amax_algorithm;
typedef struct te_recipe_update {
    te_recipe_state *state;
    te_role role;
    te_amax_algorithm algorithm;
    int margin;
    const te_delayed_algorithms *own; /* functions of the host's in place of these, called with numbers that are waited
                                         for; or NULL */
} te_recipe_update;

/* Of many roles: those on a device in one kernel, and the host does not wait for it. A role without a history is passed
 * over. */
te_status te_recipe_states_update(te_context *ctx, const te_recipe_update *updates, size_t n);
/* The step of a state ends without a new scale: what inputs and the weight had is forgotten, but for what an optimizer
 * has written to a weight that is stored quantized; or with `gradients` what these had. While a graph is recorded there
 * is nothing. */
te_status te_recipe_state_forget(te_recipe_state *state, bool gradients);
/* Forgets the amax that a history, or NULL, has collected since its last update. */
te_status te_recipe_forget_amax(te_tensor *history);
/* How many steps' amaxes were infinite or NaN on all devices, since the context was opened; waits for them. */
te_status te_recipe_skipped_amaxes(te_context *ctx, uint64_t *count);
/* Has *t on the device: another tensor takes its place where it lies elsewhere. */
te_status te_recipe_move(te_tensor **t, te_device *device);

/* recipe_factors.c. Scales and histories lie where the tensors are that they are about: brings a role's to a device. */
te_status te_role_settle(te_recipe_state *state, te_role role, te_device *device);
/* The factor that delayed scaling has for a tensor on `device`, held for the caller: of a weight possibly a copy of its
 * own, or, with `current`, that of the quantized weight which is there; from the tape where a stretch runs again, or a
 * part of it. */
te_status te_role_take_factor(te_recipe_state *state, const te_quantizer *q, te_role role, te_device *device,
                              bool current, te_tensor **factor);
/* Another holder of the factor, or a copy where it is one that updates change. */
te_tensor *te_role_lasting(const te_recipe_state *state, te_role role, te_tensor *factor);
/* Lets go of the factors on a tape. */
void te_scale_tape_clear(te_scale_tape *tape);

/* The recipe that an operation with this state runs under now: NULL outside te.autocast, and where it quantizes no
 * role. */
te_product_recipe *te_recipe_active(const te_recipe_state *state);
/* Whether it runs without one, but amaxes of its operands are to be collected. */
bool te_recipe_calibrates(const te_recipe_state *state);

/* Copies that a tensor's values came from: a product that reads the tensor multiplies them and quantizes nothing. A
 * column-wise copy that is missing is made of a row-wise one with one factor, whose bytes it has. */
struct te_quantized_values {
    te_quantized copies;
    uint64_t version; /* of the storage, when they were its values */
};

/* The values of copies, which are taken over, with them attached; or a tensor without values, for operations that read
 * nothing but the copies. NULL on failure. */
te_tensor *te_quantized_values(te_context *ctx, te_quantized *copies);
te_tensor *te_quantized_shell(te_context *ctx, te_device *device, te_quantized *copies);
/* The values of t's copies in dtype `compute`, with the copies attached. NULL on failure. */
te_tensor *te_role_quantized_values(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                                    te_dtype compute, bool columnwise);
void te_quantized_values_free(te_storage *storage);

/* t in dtype `compute`, quantized for row-wise use, column-wise use or both, to be closed by the caller. `recipe` is
 * the state's own, or of a gradient the one that forward ran under: the operation may have met another since. The
 * weight may come from an earlier call. */
te_status te_role_quantize(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_tensor *t,
                           te_dtype compute, bool rowwise, bool columnwise, te_quantized *result);
/* The same for what a program makes: room, the factor that is held for the caller (NULL: the quantizer's own), and
 * what kernels of a device raise to its amax (NULL: it does not count); on the host _close raises that. Not for
 * weights. */
te_status te_role_open(te_recipe_state *state, const te_product_recipe *recipe, te_role role, te_device *device,
                       te_dtype dtype, int ndim, const int64_t *shape, const bool want[2], te_quantized *result,
                       te_tensor **factor);
te_tensor *te_role_seen(te_recipe_state *state, const te_product_recipe *recipe, te_role role);
te_status te_role_close(te_recipe_state *state, const te_product_recipe *recipe, te_role role, const te_quantized *z);

/* An input's row-wise copy, where the column-wise one is made in backward, from x computed again: result->factor is
 * what that is multiplied by then, NULL where it follows from the values. te_role_keep_factor does it for what
 * te_role_open began. */
te_status te_role_quantize_first(te_recipe_state *state, const te_product_recipe *recipe, te_tensor *x,
                                 te_dtype compute, te_quantized *result);
te_status te_role_keep_factor(te_recipe_state *state, te_role role, te_tensor *factor, te_quantized *z);

/* A weight for a parameter that is stored quantized, by the parameter's own quantizer, whatever recipe its product
 * runs under now: its amax belongs to the step in which it was written. `over`: in the memory of the copies that
 * *result has, which are closed on failure. */
te_status te_role_quantize_resident(te_recipe_state *state, const te_quantizer *q, te_tensor *t, bool columnwise,
                                    bool over, te_quantized *result);
/* Before a parameter gets other values: the amax of those that they replace, which no step has used, does not count. */
te_status te_role_forget_resident(te_recipe_state *state, const te_quantizer *q);
/* What that needs of the state, on the device of t, so that it fails here if at all. */
te_status te_role_settle_resident(te_recipe_state *state, const te_quantizer *q, te_device *device);
/* The same in stripes, in memory of the host: the factor, and counting what was written, wherever that happens. */
te_status te_role_resident_scale(te_recipe_state *state, const te_quantizer *q, float *scale);
te_status te_role_count_resident(te_recipe_state *state, const te_quantized *z);
/* Calibration: collects the amax of t in `compute` as if it were quantized. */
te_status te_role_observe(te_recipe_state *state, te_role role, te_tensor *t, te_dtype compute);

#endif
