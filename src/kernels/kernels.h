/* kernels.h - what a backend (cpu, cuda) offers to the engine.
 *
 * Kernels know nothing of tensors, autograd or Lua. Operands are plain views; memory they need in passing comes from
 * the te_exec; a failure is a te_status with a message in the te_exec that names the offending values. On a device with
 * streams every call is asynchronous and ordered after the calls before it on the same te_exec; pointers in views are
 * device pointers that the host must not touch. On the CPU every call has finished when it returns, and one that takes
 * long is left off with TE_ERROR_INTERRUPTED when the te_exec's flag says so: what it was writing is then neither old
 * nor new.
 *
 * All functions accept empty views (some extent 0) and any alignment of the element's natural size.
 */
#ifndef TE_KERNELS_KERNELS_H
#define TE_KERNELS_KERNELS_H

#include "memory.h"
#include "program.h"
#include "quant.h"
#include "tetrain/types.h"

#include <stdatomic.h>

typedef struct te_exec    te_exec;
typedef struct te_backend te_backend;

typedef struct te_quantize_job te_quantize_job; /* quantize.h */

/* What the bytes of a quantized operand stand for: x = element * factor of its block. Everything is said along the
 * last two dimensions of the view, [0] the one before last, so that a transposed view has its pairs exchanged too;
 * how the matrix lies in memory is in the view's strides alone. Where one factor serves several rows but stands once
 * for each, a block has one row here. te_quantized_view (quantize.h) makes a view and its te_quant from a stored
 * copy.
 *
 * E4M3 and E5M2 take a byte each; of E2M1 two share one, the even one in the low half: the view's strides count
 * elements, its data are bytes, one of the last two strides is 1 and all others are even. The view's dtype is that of
 * the bytes. */
typedef struct te_quant {
    te_element_kind element;
    te_scale_kind   scale;
    const void     *scale_inv;       /* float32, E8M0 or E4M3, as `scale` says */
    int             block[2];        /* elements that share a factor; 0, 0: all of them */
    int64_t         scale_stride[2]; /* factors, from block to block */
    bool            power_of_two;    /* float32 factors are powers of two */
    const float    *amax;            /* TE_SCALE_E4M3: the factor is e4m3 * amax / (6 * scale_max) … */
    int64_t         amax_stride[2];  /* … and this, per element, is not 0 where rows have amaxes of their own */
    float           scale_max;
} te_quant;

/* A strided window on memory. Strides count elements and may be 0 (broadcast), never negative but for the source of a
 * copy in the host's memory. data NULL: absent. */
typedef struct te_view {
    void           *data;
    te_dtype        dtype;
    int             ndim;
    int64_t         shape[TE_MAX_DIMS];
    int64_t         stride[TE_MAX_DIMS];
    const te_quant *quant; /* NULL: plain values */
} te_view;

/* Counter-based random numbers: Philox4x32-10 with key `seed`; element i of the iteration space (row-major, logical
 * position, whatever the strides) uses word i % 4 of counter {lo(offset + i / 4), hi(offset + i / 4), lo(stream),
 * hi(stream)}. */
typedef struct te_rng {
    uint64_t        seed, stream, offset;
    const uint64_t *base; /* NULL, or on a device with graphs: {seed, what is added to offset}, read when the kernel
                             runs */
} te_rng;

/* Whole numbers of which `range` begin at low: number i is low + (b * range >> 64), where word 2i of the generator is
 * the upper half of b and word 2i + 1 the lower one. The bias is below range / 2^64. */
typedef struct te_integers {
    te_rng   rng;
    int64_t  low;
    uint64_t range;
} te_integers;

/* --- running programs ------------------------------------------------------------------------------------------- */

typedef struct te_operand {
    void    *data;
    te_dtype dtype;
    bool     accumulate;          /* outputs: add to what is there (beta = 1); of an amax, keep the larger */
    int64_t  stride[TE_MAX_DIMS]; /* elements, per dimension of the run's shape */
    int64_t  block;               /* 0, or a divisor of the number of columns: these come in blocks of so many, with as
                                     many others in between. Column j lies at te_operand_place(block, j) strides */
    /* Where the backend `emits`, an output of every element may be left quantized: its values rounded to job->dtype are
     * the job's source. data is NULL then; where the job's quantizer looks at the whole tensor first
     * (te_quantizer_measures) one run measures it and another one converts it (te_quantize_step). Outputs of rows then
     * lie apart from all inputs. */
    const te_quantize_job *quantized;
} te_operand;

static inline int64_t te_operand_place(int64_t block, int64_t column)
{
    return block ? column + column / block * block : column;
}

/* One application of a program: an iteration space and what its slots are bound to. */
typedef struct te_run {
    int               ndim; /* 1 … TE_MAX_DIMS; backends merge dimensions where strides allow, never the last one into
                               others when the program has ROW values or reductions */
    int64_t           shape[TE_MAX_DIMS];
    const te_operand *inputs;  /* program->n_inputs */
    const te_operand *outputs; /* program->n_outputs; an output with data NULL is not wanted */
    const double     *params;  /* program->n_params */
    const te_rng     *rngs;    /* program->n_rngs */
    bool              compute_f64; /* float64 instead of float32 values */
    struct te_small  *small;       /* the CPU backend's own; NULL to callers, */
    const float *const *tables;    /* and so are these, one per input */
} te_run;

/* --- matrix product --------------------------------------------------------------------------------------------- */

/* c[…, m, n] = alpha * a[…, m, k] b[…, k, n] + bias[n] + beta * c. Leading dimensions are batches, equal in all
 * three (stride 0 to broadcast a or b). Any strides; views whose unit stride is in either of the last two dimensions
 * are used without a copy. Inputs f32, bf16, f16 or f64 (a and b equal); c f32, the inputs' dtype, or of f32 inputs
 * bf16 or f16; accumulation f32 (f64 for f64).
 *
 * Either input may be quantized, beside a plain one of f32, bf16 or f16 or another quantized one of whatever format;
 * c is then f32, bf16 or f16. The products are those of the values that the operands stand for: of the bytes as they
 * are with their factors where the device does that (gemm_decline), else decoded; where the values are exact in
 * bfloat16 up to a factor of the whole tensor, that factor goes to alpha and the multiplication is in bfloat16, else in
 * float32. A quantized operand is one matrix: leading dimensions are 1 or have stride 0. */
typedef struct te_gemm {
    te_view  a, b, c;
    te_view  bias;         /* absent or [n], any float dtype */
    float    alpha, beta;  /* beta 0 (c is not read) or 1 */
    bool     fast_sums;    /* of quantized operands: sums may be kept in fewer bits than float32 has, where that is
                              faster */
    uint64_t a_key, b_key; /* non-zero: identifies the contents (storage and version), so that a packed or decoded
                              copy may be kept */
    double  *squares;      /* NULL, or what becomes the sum of squares of a float32 c where that is found while c is
                              written, else keeps the caller's value or becomes NaN */
} te_gemm;

/* --- rotary positions ------------------------------------------------------------------------------------------- */

/* Rows of pairs (a, b) turned by angles: y = a cos - b sin, z = b cos + a sin, or with `back` by their negatives. Views
 * of one shape [.., pairs], any strides; a, b, y, z of one dtype, f32, bf16 or f16, y and z apart from a and b; cos and
 * sin f32 with unit stride in the last dimension. */
typedef struct te_rotation {
    te_view a, b, y, z, cos, sin;
    bool    back;
} te_rotation;

/* --- mixtures of experts ---------------------------------------------------------------------------------------- */

/* Tokens, and the rows that experts work on. Slot s of token t is for expert e = expert[t * token_step + s], or s where
 * there is no `expert`, and stands in row row[t * token_step + s * slot_step] + shift[e]; a negative `row` is nowhere.
 * A token has `slots` slots, or count[t * token_step] of them. Arrays that are NULL: no experts, counts, shifts. */
typedef struct te_routes {
    int64_t        tokens, slots, token_step, slot_step, experts;
    const int32_t *row, *expert, *count, *shift;
    te_view        weights; /* [tokens, experts]; absent: all are 1 */
    bool           gates;   /* a weight counts as 1, but for 0 */
} te_routes;

/* --- attention -------------------------------------------------------------------------------------------------- */

/* out = dropout(softmax(scale q k^T + bias, masked)) v for each batch and head; a fully masked row gives zeros.
 * A sink, where there is one, stands in the denominator beside the scores, and so in lse; backward finds it there.
 * q, out [batch, heads, seq_q, dim]; k [batch, kv_heads, seq_kv, dim]; v [batch, kv_heads, seq_kv, dim_v] with
 * heads % kv_heads == 0 (query head h reads kv head h / (heads / kv_heads)). Unit stride in the last dimension, others
 * any. Packed sequences: batch = 1, cu_seqlens_* hold n_seqs + 1 ascending int32 offsets into seq_q and seq_kv. Where
 * `longest` is not 0 they are one list that te_backend.pack has made in the device's memory, and no sequence is longer.
 * Position j is visible from i when i + delta - window_left <= j <= i + delta + window_right (a negative window is
 * open), delta = seq_kv - seq_q of the sequence when bottom_right, else 0; causal is window_right = 0.
 *
 * In the forward pass q, k and v may be quantized together: E4M3 with one float32 factor each. Products are those of
 * the values that the bytes stand for, sums are float32, and probabilities are rounded to E4M3, too:
 *
 *      t = E4M3(448 softmax(scale q k^T + bias))        out = dropout(t) v / 448
 *
 * out then is f32, bf16 or f16, or float8_e4m3: bytes with v's factor. Without dropout out is an average of rows of v,
 * so it cannot leave the range of that factor; with dropout it would be cut off there.
 *
 * A probability lies in [0, 1], so its factor needs neither an amax nor a history: 448 makes of 1 the largest number of
 * the format, which is what delayed scaling finds wherever some row sees one key only. Below 2^-6 / 448 precision is
 * lost, below 2^-10 / 448, two in a million, a probability counts as 0. */
typedef struct te_attention {
    te_view        q, k, v, out; /* of one dtype; out may be f32 where te_backend's wide_attention says so */
    te_view        lse;  /* f32 (f64 is fine too) [batch, heads, seq_q]: log of the softmax denominator, -inf for a
                            masked row; may be absent */
    te_view        bias; /* absent or [batch, heads, seq_q, seq_kv] (strides may be 0), any float dtype, added to scaled
                            scores */
    te_view        sinks; /* absent, or a further score of every row of a head, in the denominator alone: [heads] of
                             f32, of f64 for f64, with unit stride; -inf: none */
    double         scale;
    int64_t        window_left, window_right;
    bool           bottom_right;
    const int32_t *cu_seqlens_q, *cu_seqlens_kv; /* NULL: not packed */
    int            n_seqs;
    int64_t        longest;
    double         dropout; /* probability of dropping an entry of the softmax */
    te_rng         rng;     /* element ((b * heads + h) * seq_q + i) * seq_kv + j (total extents when packed) */
} te_attention;

/* Gradients, overwritten: dq, dk, dv have the shapes and dtype of q, k, v, or with wide_attention f32, and any strides
 * with a unit last one. */
typedef struct te_attention_grad {
    te_attention forward; /* with out and lse as forward left them */
    te_view      dout, dq, dk, dv;
    te_view      dbias; /* absent, or what dS is written to where a query sees a key: [batch, heads, seq_q,
                           seq_kv] of f32, of f64 for f64. Other elements are left alone */
} te_attention_grad;

/* --- the table -------------------------------------------------------------------------------------------------- */

typedef enum te_copy_kind { TE_COPY_HOST_TO_DEVICE, TE_COPY_DEVICE_TO_HOST, TE_COPY_DEVICE_TO_DEVICE } te_copy_kind;

/* Where kernels run: one device, in order. Made by device_open, used by one thread at a time. */
struct te_exec {
    const te_backend *backend;
    const te_mem     *mem;     /* host memory for descriptors, caches, compiled programs */
    void             *device;  /* the backend's own state */
    int               threads; /* CPU threads that kernels may use; results do not depend on it */
    bool              tf32;    /* float32 products may round their operands to TF32 where that is faster */
    bool              any_order; /* sums may be taken in another order every time, which changes bits, where faster */
    const atomic_int *interrupt; /* not 0: leave off what runs; any thread sets it. NULL: nobody will */

    /* Device memory for the duration of a kernel, from the engine's caching allocator, 64-byte aligned; NULL with the
     * message set when memory is exhausted. */
    void *(*scratch)(te_exec *, size_t bytes);
    void  (*scratch_free)(te_exec *, void *ptr);
    te_status refused; /* why scratch was refused last; TE_OK: it was not since a failure was told */
    void  *owner;

    char message[512];
};

/* Writes the message and returns the status. */
te_status te_exec_fail(te_exec *exec, te_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

struct te_backend {
    const char *name; /* "cpu", "cuda" */
    bool        host_memory; /* device pointers may be read and written by the host */
    bool        emits;       /* program_run leaves outputs quantized (te_operand) */
    bool        adds_halves; /* scatter_add adds bfloat16 to float32 */
    bool        wide_attention; /* attention's out and gradients may be float32 beside operands of 16 bits */

    /* the device and what its kernels come from; NULL: none */
    void      (*describe)(te_exec *exec, char *text, size_t size);
    te_status (*device_open)(te_exec *exec, int index);
    void      (*device_close)(te_exec *exec);

    /* Raw memory under the caching allocator; 64-byte aligned; NULL when exhausted. */
    void *(*memory_alloc)(te_exec *exec, size_t bytes);
    void  (*memory_free)(te_exec *exec, void *ptr, size_t bytes);
    /* Host memory given to it may be reused when it returns; what came from a device can be read then. */
    te_status (*memory_copy)(te_exec *exec, void *dst, const void *src, size_t bytes, te_copy_kind kind);
    te_status (*synchronize)(te_exec *exec);
    /* A few bytes of device memory, at most 4096, as the calls so far leave them, to the host without anybody waiting:
     * what read_begin gives, read_end takes, once. It copies them to dst (NULL: nobody wants them) and waits only where
     * they have not arrived. NULL where memory is the host's. */
    te_status (*read_begin)(te_exec *exec, const void *src, size_t bytes, void **reading);
    te_status (*read_end)(te_exec *exec, void *reading, void *dst);

    /* program_run, gemm, attention …: see there. */
#define TE_KERNEL(name, parameters, arguments, moved) te_status (*name) parameters;
#include "kernel_list.h"

    /* Why the product would decode its quantized operands; NULL: it multiplies their bytes as they are. Views need no
     * data. The function is NULL where no device of the backend does. */
    const char *(*gemm_decline)(te_exec *exec, const te_gemm *gemm);
    /* Contents in this memory that had a key (te_gemm) come no more: what was kept of them goes. NULL: that goes by
     * itself. */
    void (*forget)(te_exec *exec, const void *data, size_t bytes);
    /* offsets[0 … n] of n lengths, one dimension of int32 or int64. Lengths that are negative or do not add up to
     * `tokens` are an error where the host next waits; the offsets then ascend within tokens all the same. NULL where
     * memory is the host's. */
    te_status (*pack)(te_exec *exec, int32_t *offsets, const te_view *lens, int64_t tokens);

    /* Delayed scaling at the end of a step, all tensors in one kernel; *skipped grows by the amaxes that were not
     * finite. All is in device memory but the list. NULL where memory is the host's. */
    te_status (*delayed_update)(te_exec *exec, const te_delayed *tensors, int64_t n, uint64_t *skipped);

    /* Elements that are neither from 0 to classes - 1 nor `ignored` are an error naming the first, where the host next
     * waits; int64, int32 or uint8. NULL where memory is the host's. */
    te_status (*check_classes)(te_exec *exec, const te_view *targets, int64_t classes, double ignored);

    /* n of them, one after the other: int64, and where memory is not the host's any dtype of whole numbers that holds
     * them. */
    te_status (*integers)(te_exec *exec, void *values, te_dtype dtype, int64_t n, const te_integers *drawn);

    /* Graphs; NULL where the device has none. From capture_begin to capture_end calls are recorded, with the addresses
     * they were given, and nothing runs; a call that the host would have to wait for or to bring memory to fails.
     * capture_end gives the graph, or NULL where it is not to be kept. graph_launch makes all the calls again, in order
     * with others. */
    te_status (*capture_begin)(te_exec *exec);
    te_status (*capture_end)(te_exec *exec, bool keep, void **graph);
    te_status (*graph_launch)(te_exec *exec, void *graph);
    void      (*graph_free)(te_exec *exec, void *graph);

    const struct te_collectives *collectives; /* between devices of several processes; NULL: none (collectives.h) */
};

extern const te_backend te_backend_cpu;

static inline bool te_view_present(const te_view *v) { return v->data != NULL; }

static inline int64_t te_view_numel(const te_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
    return n;
}

/* Whether the elements follow one another in the order of the dimensions. */
static inline bool te_view_dense(const te_view *v)
{
    int64_t step = 1;
    for (int i = v->ndim - 1; i >= 0; i--) {
        if (v->shape[i] != 1 && v->stride[i] != step) return false;
        step *= v->shape[i];
    }
    return true;
}

#endif
