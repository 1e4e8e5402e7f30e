/* hand.h - the hand-written kernels: what else a backend offers beside row programs and matrix products.
 *
 * For each operation a plan is made: it checks the operands (as the CPU backend does), and holds the launches that do
 * the work, in order. The caller then
 *
 *      allocates plan.scratch_bytes of device memory (64-byte aligned; kept until the launches are done), and where
 *      plan.check.kind is not 0 one uint64_t of device memory set to all ones;
 *      binds both; compiles and launches each call (te_cuda_kernel_source; equal text, equal module);
 *      and where there is a check reads the word when the launches are done: te_cuda_check_fault says what it means.
 *
 * Kernels skip what is out of range, so a fault never reaches foreign memory. All of them add in a fixed order.
 */
#ifndef TE_KERNELS_CUDA_KERNELS_HAND_H
#define TE_KERNELS_CUDA_KERNELS_HAND_H

#include "../../quantize.h"
#include "../program_source.h"
#include "args.h"

typedef enum te_cuda_file {
    TE_CUDA_FILE_INDEX,
    TE_CUDA_FILE_SELECT,
    TE_CUDA_FILE_ATTENTION,
    TE_CUDA_FILE_QUANTIZE,
    TE_CUDA_FILE_ROUTES,
    TE_CUDA_FILE_PRODUCT,
    TE_CUDA_FILE_ORDER,
    TE_CUDA_FILE_MOVE,
    TE_CUDA_FILE_ADD,
    TE_CUDA_FILE_COUNT
} te_cuda_file;

enum { TE_CUDA_HAND_ARGS = 4080 };

/* What the source depends on. */
typedef struct te_cuda_kernel {
    uint8_t  file;     /* te_cuda_file */
    uint8_t  wide;     /* te_real is double */
    uint8_t  dtype[2]; /* te_a and te_b */
    uint16_t vector;   /* INDEX, MOVE, ADD: elements of a unit; ATTENTION: rows of a tile, on tensor cores
                        * elements of a unit, 0: the kernels for rows that see nothing; PRODUCT: warps of a block */
    uint16_t dim[2];   /* ATTENTION on tensor cores: head sizes rounded up to 16; QUANTIZE: a quantizer's variant, 0
                        * for the kernels that serve all; else 0 */
    uint8_t  third;    /* 1 + the dtype te_c, 0: there is none; ATTENTION: of a bias, PRODUCT: of the result */
    uint8_t  decode;   /* ATTENTION on tensor cores: the kernels for few queries, of so many warps; else 0 */
} te_cuda_kernel;

typedef struct te_cuda_call {
    te_cuda_kernel kernel;
    te_cuda_launch launch; /* its arguments lie in the plan */
} te_cuda_call;

typedef enum te_cuda_check_kind {
    TE_CUDA_CHECK_NONE,
    TE_CUDA_CHECK_IDS,
    TE_CUDA_CHECK_INDEX,
    TE_CUDA_CHECK_CLASSES,
    TE_CUDA_CHECK_LENGTHS,
    TE_CUDA_CHECK_WEIGHTS
} te_cuda_check_kind;

/* What a fault word means: of ids, indices, classes and lengths, the place of the first in the upper half and the value
 * found there in the lower, of lengths their sum at the place `count`; of weights 4 times the row and what is wrong
 * with it. Small, to be kept where it is read later. */
typedef struct te_cuda_check {
    te_cuda_check_kind kind;
    const char        *operation; /* a literal */
    int64_t            bound;     /* ids, indices and classes are below it; lengths add up to it */
    int64_t            count;     /* of lengths; of elements that an index serves, one after the other; 0: one */
} te_cuda_check;

/* Calls: three for each digit of a sort, and what stands around it. Words: four calls with the most arguments, which is
 * more than many with few. */
enum { TE_CUDA_MAX_CALLS = 25, TE_CUDA_PLAN_WORDS = 4 * TE_CUDA_HAND_ARGS / 8 };

typedef struct te_cuda_plan {
    int           n_calls; /* 0: there is nothing to do */
    size_t        scratch_bytes;
    te_cuda_check check;
    te_cuda_call  calls[TE_CUDA_MAX_CALLS];
    int           n_words;
    uint64_t      words[TE_CUDA_PLAN_WORDS]; /* the calls' arguments, one after the other */
} te_cuda_plan;

te_status te_cuda_plan_embedding(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *table,
                                 const te_view *ids);
te_status te_cuda_plan_embedding_backward(te_exec *exec, te_cuda_plan *plan, const te_view *dtable, const te_view *dy,
                                          const te_view *ids);
te_status te_cuda_plan_check_classes(te_exec *exec, te_cuda_plan *plan, const te_view *targets, int64_t classes,
                                     double ignored);
te_status te_cuda_plan_gather(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *src,
                              const te_view *index, int dim);
te_status te_cuda_plan_scatter(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                               const te_view *index, int dim);
te_status te_cuda_plan_scatter_add(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                                   const te_view *index, int dim);
/* Copies of as many of n pairs of views as fit one launch, from the first on: *done; the others are for later. A pair
 * that is no rows of elements of one dtype, or large, is left to a copy of its own: *done is 0 where the first is. */
te_status te_cuda_plan_copy_all(te_cuda_plan *plan, const te_view *dst, const te_view *src, int n, int *done);
/* A copy from memory that is walked backwards along some dimensions, of one dtype; and te_backend.triangle, but for a
 * source whose rows are no neighbours in memory. */
te_status te_cuda_plan_turn(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src);
te_status te_cuda_plan_triangle(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src,
                                int64_t diagonal, bool upper);
te_status te_cuda_plan_arg_reduce(te_exec *exec, te_cuda_plan *plan, const te_view *index, const te_view *src,
                                  bool largest);
te_status te_cuda_plan_topk(te_exec *exec, te_cuda_plan *plan, const te_view *values, const te_view *indices,
                            const te_view *src, bool largest);
te_status te_cuda_plan_order(te_exec *exec, te_cuda_plan *plan, const te_view *values, const te_view *indices,
                             const te_view *src, bool descending);
te_status te_cuda_plan_cumsum(te_exec *exec, te_cuda_plan *plan, const te_view *dst, const te_view *src, bool reverse);
te_status te_cuda_plan_multinomial(te_exec *exec, te_cuda_plan *plan, const te_view *out, const te_view *src,
                                   bool replacement, te_rng rng);
/* Whole numbers of a dtype that holds them. */
te_status te_cuda_plan_integers(te_cuda_plan *plan, void *values, te_dtype dtype, int64_t n, const te_integers *drawn);

/* Mixtures of experts: te_backend.route_map and what follows it. */
te_status te_cuda_plan_route_map(te_exec *exec, te_cuda_plan *plan, const te_view *map, const te_view *counts,
                                 const te_view *routing, int64_t rows);
te_status te_cuda_plan_route_rows(te_exec *exec, te_cuda_plan *plan, const te_routes *routes, const te_view *rows,
                                  const te_view *tokens);
te_status te_cuda_plan_route_tokens(te_exec *exec, te_cuda_plan *plan, const te_routes *routes, const te_view *tokens,
                                    const te_view *rows);
te_status te_cuda_plan_route_weights(te_exec *exec, te_cuda_plan *plan, const te_routes *routes,
                                     const te_view *weights, const te_view *rows, const te_view *tokens);
te_status te_cuda_plan_route_choose(te_exec *exec, te_cuda_plan *plan, const te_view *map, const te_view *scores,
                                    int64_t k, int64_t groups, int64_t best_groups);

/* Offsets of packed sequences from their lengths, and those in the form that cuDNN reads (te_packed_args). */
te_status te_cuda_plan_pack(te_exec *exec, te_cuda_plan *plan, int32_t *offsets, const te_view *lens, int64_t tokens);
void      te_cuda_plan_ragged(te_cuda_plan *plan, const te_packed_args *args);

/* The cu_seqlens of a te_attention are device pointers here; that they ascend is the caller's to check. */
te_status te_cuda_plan_attention(te_exec *exec, te_cuda_plan *plan, const te_attention *attention);
te_status te_cuda_plan_attention_backward(te_exec *exec, te_cuda_plan *plan, const te_attention_grad *grad);
/* After and before cuDNN's, of scores with a bias: te_cuda_attention_unseen. */
void te_cuda_plan_attention_unseen(te_cuda_plan *plan, const te_attention *attention);
void te_cuda_plan_attention_raised(te_cuda_plan *plan, const te_view *lse, float *raised);

/* For kernels that quantize tiles (quantize_tile.cu): a job as an argument, the variant of a quantizer (args.h), and
 * shared memory in elements of a program's tile, bytes of codes, bytes of numbers for the lines of blocks. */
enum { TE_CUDA_SQUARE_TILE = 128 * 128, TE_CUDA_SQUARE_CODES = 128 * 128 };
te_quantize_args te_cuda_quantize_args(const te_quantize_job *job);
uint16_t         te_cuda_quantize_variant(const te_quantizer *quantizer);
size_t           te_cuda_quantize_lines(const te_quantizer *quantizer);

/* Whether a program's kernel makes the codes where it has the values (quantize_whole.cu). */
bool te_cuda_quantizes_whole(uint16_t variant);

/* The job's pointers are device pointers; its quantizer is valid. */
te_status te_cuda_plan_quantize(te_cuda_plan *plan, const te_quantize_job *job);
te_status te_cuda_plan_dequantize(te_cuda_plan *plan, const te_quantize_job *job, int side);

/* The matrix of a quantized view's last two dimensions to that of `to` (bfloat16 or float32); whole: with the factor
 * of the whole tensor, which te_cuda_plan_scales multiplies alpha by otherwise. */
te_status te_cuda_plan_decode(te_cuda_plan *plan, const te_view *to, const te_view *from, bool whole);
/* {alpha, beta, 0} of a product to device memory, alpha times the factors of the operands that are quantized. */
te_status te_cuda_plan_scales(te_cuda_plan *plan, const te_gemm *gemm, float *scales);
/* te_backend.delayed_update with its list on the device. */
te_status te_cuda_plan_delayed(te_cuda_plan *plan, const te_delayed *tensors, int64_t n, uint64_t *skipped);
/* Factors of blocks in another order: te_arrange_args (args.h). */
struct te_arrange_args;
te_status te_cuda_plan_arrange(te_cuda_plan *plan, const struct te_arrange_args *args);
/* A product of few rows; dtypes of w (bfloat16, float16, FP8), of x (w's, or FP8 as well) and of y. */
struct te_few_args;
te_status te_cuda_plan_few(te_cuda_plan *plan, const struct te_few_args *args, const te_dtype dtypes[3]);
/* Lines of bytes with zeros beyond them. */
te_status te_cuda_plan_pad(te_cuda_plan *plan, const struct te_pad_args *args);

void      te_cuda_plan_bind(te_cuda_plan *plan, void *scratch, uint64_t *fault);
te_status te_cuda_kernel_source(const te_cuda_kernel *kernel, te_text *out);

/* TE_OK for a word of all ones, else an error with its message in the exec. */
te_status te_cuda_check_fault(te_exec *exec, const te_cuda_check *check, uint64_t fault);

#endif
