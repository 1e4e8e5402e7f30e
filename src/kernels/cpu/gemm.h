/* gemm.h - how the CPU's matrix product is put together.
 *
 *      te_cpu_gemm            checks the operands, turns them into a te_gemm_problem (gemm_problem.c), where few
 *                             columns become few rows, cuts a large one in slices for the library (gemm.c)
 *        turned               more rows times contiguous columns, whose places they take (gemm_turned.c)
 *        rows                 few rows times contiguous columns, nothing packed (gemm_rows.c): b is read once
 *        sweep                few rows times contiguous rows, as they lie (gemm_sweep.c)
 *        small                one thread, workspace on the stack: the call costs less than a microsecond
 *        own                  our own kernel where it is the faster one (rule in gemm_choose.c)
 *        onednn               the library, where it is there (gemm_onednn.c)
 *        blocked              our own kernel: accepts everything (gemm_blocked.c)
 *
 * The implementations stand in this order in one table (gemm_choose.c); the first that accepts a problem runs it, and
 * one that declines says why. An element of c is one chain of additions over k in an order that depends on the shape
 * alone, never on how many threads share the work: threads divide m and n, not k.
 *
 * Our own kernel computes c in tiles of mr x nr from packed panels. A *word* is what one step of the inner loop
 * consumes per row of a and column of b: one float, one double, or a pair of bfloat16 that are neighbours along k.
 *
 *      panel of a:  word [w][i], i < mr        panel of b:  word [w][j], j < nr        tile of sums:  [i][j]
 *
 * Products too small for panels, as batches have them by the thousand, are computed from a and b as they lie, where the
 * instruction set has masks (isa/gemm_small.c).
 *
 * Pairs of bfloat16 also have a kernel for matrix units (isa/gemm_amx.c), whose panels of a have 16 words of a row
 * together; and float32 one that makes three bfloat16 of every number (isa/gemm_amx_f32.c).
 *
 * Sums of our own kernels run in ascending k, so where the arithmetic is a fused multiply-add (avx2, avx512 and NEON,
 * float32 and float64) tiles agree in every bit between instruction sets. Which implementation takes a product does
 * depend on the instruction set, though: few rows are added by lanes, and oneDNN has orders of its own. The portable
 * copy for x86 rounds products, and pairs of bfloat16 are added as pairs. So products agree within rounding.
 */
#ifndef TE_KERNELS_CPU_GEMM_H
#define TE_KERNELS_CPU_GEMM_H

#include "cpu.h"

/* A matrix in memory; strides in elements of `size` bytes. */
typedef struct te_gemm_matrix {
    char    *data;
    te_dtype dtype;
    int32_t  size;
    int64_t  rs, cs;
} te_gemm_matrix;

static inline char *te_gemm_element(const te_gemm_matrix *m, int64_t row, int64_t col)
{
    return m->data + (row * m->rs + col * m->cs) * m->size;
}

/* Whether contiguous lines, or the steps between them where these lie side by side, are whole pages apart: they share
 * the few cache lines of one set. */
static inline bool te_gemm_lines_apart(const te_gemm_matrix *m)
{
    enum { PAGE = 4096 };
    return (m->cs == 1 ? m->rs : m->cs) * m->size % PAGE == 0;
}

enum { TE_GEMM_BATCH_DIMS = TE_MAX_DIMS - 2 };

/* A checked product. The unit stride of c, if it has one, is in its columns: c^T = b^T a^T is computed where it is in
 * the rows, and the bias then runs along the rows. Batch dimensions are merged as far as strides allow. */
typedef struct te_gemm_problem {
    int64_t        m, n, k;
    te_gemm_matrix a, b, c;    /* of the first batch */
    te_view        bias;       /* absent or one-dimensional */
    bool           bias_by_row;
    float          alpha;
    bool           accumulate; /* beta is 1 */
    uint64_t       a_key, b_key;
    double        *squares;    /* of te_gemm, or NULL: added to, by NaN where they are not known */
    int            batch_dims;
    int64_t        batches; /* product of batch_shape */
    int64_t        batch_shape[TE_GEMM_BATCH_DIMS];
    int64_t        batch_stride[3][TE_GEMM_BATCH_DIMS]; /* of a, b, c */
} te_gemm_problem;

/* --- what an instruction set supplies (isa/gemm_*.c) -------------------------------------------------------------- */

/* Rows of c on the way out: c = alpha * sum + bias + (accumulate ? c : 0). */
typedef struct te_gemm_finish {
    te_gemm_matrix c;
    const void    *bias; /* float (double when c is float64), or NULL */
    bool           bias_by_row;
    float          alpha;
    bool           accumulate;
} te_gemm_finish;

/* How elements become words. */
typedef enum te_gemm_word {
    TE_GEMM_WORD_F32,      /* float32 as it is */
    TE_GEMM_WORD_BF16,     /* bfloat16 widened to float32 */
    TE_GEMM_WORD_F16,      /* float16 widened to float32 */
    TE_GEMM_WORD_BF16PAIR, /* two bfloat16 along k; an odd last one is paired with 0 */
    TE_GEMM_WORD_F32PARTS, /* two float32 along k, each the sum of three bfloat16 (isa/gemm_amx_f32.c) */
    TE_GEMM_WORD_F64
} te_gemm_word;

/* Packs `extent` lines (rows of a, columns of b) of k elements into panels `width` words wide, one after the other.
 * Lines that are not there are zeros in the `filled` first of a panel and left out behind them. Strides in bytes: from
 * line to line, and along k. */
typedef struct te_gemm_pack {
    te_gemm_word word;
    const char  *src;
    int64_t      line_stride, k_stride;
    int64_t      k;
    int          extent, width, filled;
    uint32_t    *largest; /* of each line, the bits of its largest magnitude so far; for kernels that mend */
} te_gemm_pack;

/* Magnitudes in a line, as a float's bits: the largest, and, once somebody asked for it, the smallest that is not 0, or
 * infinity; 0 until then. */
typedef struct te_gemm_range {
    uint32_t *largest, *smallest;
} te_gemm_range;

/* Where the sums of a tile come from, for kernels that mend: rows of a and columns of b, strides in bytes, and their
 * ranges. */
typedef struct te_gemm_origin {
    const char   *a, *b;
    int64_t       a_row, a_step, b_col, b_step, k;
    te_gemm_range a_range, b_range;
    float         least; /* sums that are less than this times the largest, or times 1, may have lost something */
} te_gemm_origin;

/* Where a tile leaves its sums: where it keeps them, or whole vectors of them in c, which has their type or, to round,
 * is bfloat16; past the caches, to stream, which of the kernels that round those with `drain` do. */
typedef enum te_gemm_way {
    TE_GEMM_OUT_KEEP,
    TE_GEMM_OUT_STORE,
    TE_GEMM_OUT_STREAM,
    TE_GEMM_OUT_ADD,
    TE_GEMM_OUT_ROUND,
    TE_GEMM_OUT_ROUND_STREAM
} te_gemm_way;

/* Memory that is read soon: `runs` pieces of `bytes` bytes, `stride` apart, of the first of which `at` are done. */
typedef struct te_gemm_ahead {
    const char *data;
    int64_t runs, stride, bytes, at;
} te_gemm_ahead;

/* Asks for the next `lines` cache lines of it. */
static inline void te_gemm_ask(te_gemm_ahead *ahead, int64_t lines)
{
    for (; lines > 0 && ahead->runs > 0; lines--) {
        __builtin_prefetch(ahead->data + ahead->at, 0, 2);
        if ((ahead->at += 64) < ahead->bytes) continue;
        ahead->at = 0, ahead->data += ahead->stride, ahead->runs--;
    }
}

/* Contiguous rows of a that tiles pack beside multiplying, a piece of a line at a time: what is left of them. */
typedef struct te_gemm_beside {
    te_gemm_pack pack; /* of the lines that are left */
    char        *panels, *to;
    int64_t      at; /* along k */
    _Alignas(64) uint32_t most[16]; /* the largest magnitudes of the line so far */
} te_gemm_beside;

/* Sums that a tile kept, on their way to c. */
typedef struct te_gemm_leaving {
    te_gemm_way way;
    int         rows, vectors; /* the rest of them */
    const char *sums;
    char       *c;
    int64_t     row;
    float      *squares; /* where the sums of squares of each vector of columns go; NULL: not wanted */
    te_gemm_origin origin; /* of the rest of them */
} te_gemm_leaving;

typedef struct te_gemm_out {
    te_gemm_way way;
    char       *c;
    int64_t     row, vector; /* bytes from row to row, and of a vector */
    /* For kernels with `drain`: what leaves is written while the next tile is multiplied, before its sums are kept. */
    te_gemm_leaving *leaving;
    float           *squares;
    te_gemm_origin   origin;
    /* What is fetched while multiplying, in a step: lines of what is ahead, of the next tile's sums, and rows of c.
     * Kernels with `fetch` fetch the first alone, in tiles of all rows, every `apart` (a power of two) of their first
     * `asking` steps. */
    te_gemm_ahead *ahead;
    int            lines, sums, rows;
    int64_t        asking, apart;
    te_gemm_beside *beside;  /* or NULL */
    int            pieces;   /* of it, each of the kernel's `times` in a step */
    bool           b_passes; /* b is loaded past the first-level cache, and a is near; else a may be what passes */
} te_gemm_out;

/* (first ? 0 : kept) + a * b over `words` words, a multiple of the kernel's step. Row r of a's step s is at
 * a + r * a_row + s * a_step bytes; b is a panel. */
typedef void te_gemm_tile(const char *a, int64_t a_row, int64_t a_step, const char *b, int64_t words, void *kept,
                          bool first, const te_gemm_out *out);

/* A b whose columns lie side by side, and the panel that becomes of it. Bytes from row to row, from step to step, and
 * to what is asked for in a step. */
typedef struct te_gemm_lying {
    const char *data;
    int64_t     row, step, ahead;
    char       *panel;
} te_gemm_lying;

/* The same of mr rows and a b as it lies: packing takes no time where multiplying leaves loads and stores idle. */
typedef void te_gemm_packing_tile(const char *a, int64_t a_row, int64_t a_step, const te_gemm_lying *b, int64_t words,
                                  void *kept, bool first, const te_gemm_out *out);

enum { TE_GEMM_MAX_ROWS = 8, TE_GEMM_MAX_VECTORS = 3 };

typedef struct te_gemm_kernel {
    int mr, nr, lanes; /* lanes: columns per vector; nr = vectors * lanes */
    int row_group;     /* rows that are computed together: 1, or those of a matrix unit's register */
    int step;          /* words of a row of a that stand together in a panel, word [w / step][i][w % step] */
    int slice_words, unit_rows, unit_panels; /* what caches hold (gemm_blocked.c) … */
    int chunk_bytes;                         /* … of a, where several slices are a chunk, … */
    int held_bytes;                          /* … and of all panels of b, where these are held; */
    double rate;       /* multiplications of vectors in a cycle */
    double word_cycles; /* that packing one takes; 0: no more than moving it */
    int word_bytes, sum_bytes, k_per_word;
    bool rounds, streams; /* tiles can leave bfloat16, and write past the caches */
    /* Writes a tile of sums, nr apart from row to row, past the caches, to c with `row` bytes from row to row, and
     * leaves the sum of squares of each vector of columns. Where tiles stream. */
    void (*stream_squares)(char *c, int64_t row, const void *sums, int nr, int rows, int vectors, float *squares);
    /* [(rows - 1) / row_group][vectors - 1], so that narrow edges cost less */
    te_gemm_tile *const (*tile)[TE_GEMM_MAX_VECTORS];
    te_gemm_packing_tile *const *packing;               /* [vectors - 1]; or NULL */
    void (*pack_a)(const te_gemm_pack *, void *panels); /* NULL: as b is packed */
    void (*pack_b)(const te_gemm_pack *, void *panel);  /* whole steps of k of one panel; NULL: as isa packs */
    /* For kernels whose tiles pack rows beside multiplying, so many times in a step: packs what is left of them. */
    int  times;
    void (*pack_rest)(te_gemm_beside *);
    /* Replaces those of `rows` rows of complete sums, nr apart, that are not exact. For kernels whose `drain` and tiles
     * do so with what leaves; NULL: all are as exact as they can be. */
    void (*mend)(const te_gemm_origin *, void *sums, int rows, int vectors);
    void (*enter)(void), (*leave)(void);                /* around tiles on a thread; or NULL */
    void (*drain)(te_gemm_leaving *);                   /* writes what no tile follows; or NULL */
    /* Brings rows x cols of c at (row, col) near, to be written. NULL: tiles do, and fetch what is `ahead`. */
    void (*fetch)(const te_gemm_matrix *c, int64_t row, int64_t col, int rows, int cols);
    /* Writes rows x cols sums (nr apart from row to row) to c at (row, col). */
    void (*finish)(const te_gemm_finish *, const void *sums, int nr, int64_t row, int64_t col, int rows, int cols);
} te_gemm_kernel;

/* sums[i * pitch + j] = line i of a times line j of b, for `rows` lines of a and `cols` of b, all of `bytes` bytes
 * and so far apart. pitch is at least cols + 3. */
typedef struct te_gemm_dots {
    const char *a, *b;
    int64_t a_line, b_line, bytes;
    int     rows, cols, pitch;
    float  *sums;
} te_gemm_dots;

/* The same where lines of b are k codes, `line` bytes apart, whose factors change every `block`, those of the next line
 * factor_line further on: of E4M3 and E5M2 in blocks of 32 or a multiple of 64, of E2M1 in blocks of 16. a is bfloat16,
 * k a multiple of 64, and behind the last factor of a line there are zeros up to a multiple of 64 elements. */
typedef struct te_gemm_coded {
    const char    *a;
    const uint8_t *codes;
    const float   *factors;
    int64_t        a_line, line, factor_line, k, block;
    int            rows, cols, pitch;
    float         *sums;
} te_gemm_coded;

/* sums[i * pitch + j] for `rows` rows of a and `cols` columns of b, whose rows are contiguous. Strides in bytes; pitch
 * is cols rounded up to TE_GEMM_SWEEP_COLS. */
enum { TE_GEMM_SWEEP_ROWS = 8, TE_GEMM_SWEEP_COLS = 32 };

typedef struct te_gemm_sweep {
    te_dtype    dtype;
    const char *a, *b;
    int64_t     a_row, a_step, b_line, k, pitch;
    int         rows, cols;
    float      *sums;
} te_gemm_sweep;

/* A small product: c = a b, plus a bias of the columns where there is one, or c += that where c is float32. Strides in
 * bytes; columns of b and c lie side by side. */
typedef struct te_gemm_small {
    te_dtype     in, out;
    const char  *a, *b;
    char        *c;
    const float *bias; /* or NULL */
    int64_t      a_row, a_step, b_row, c_row;
    int64_t      m;
    int          n, k;
    bool         panel; /* b is float32 already, … */
    bool         pairs; /* … or of pairs of bfloat16, as which those of a are multiplied; n is at most a vector */
    bool         add;
} te_gemm_small;

typedef struct te_gemm_isa {
    te_gemm_kernel f32, f64, bf16; /* bf16.mr 0: no arithmetic on pairs */
    void (*dots_f32)(const te_gemm_dots *);
    void (*dots_bf16)(const te_gemm_dots *);
    void (*dots_f16)(const te_gemm_dots *);
    void (*dots_pairs)(const te_gemm_dots *); /* of bfloat16, where the machine multiplies pairs; or NULL */
    void (*sweep)(const te_gemm_sweep *);
    void (*small)(const te_gemm_small *); /* or NULL */
    void (*small_pairs)(const te_gemm_small *); /* where the machine multiplies pairs; or NULL */
    void (*pack)(const te_gemm_pack *, void *panels);
} te_gemm_isa;

#ifdef TE_ISA
void TE_ISA_NAME(te_gemm_dots_f32)(const te_gemm_dots *);
void TE_ISA_NAME(te_gemm_dots_bf16)(const te_gemm_dots *);
void TE_ISA_NAME(te_gemm_dots_f16)(const te_gemm_dots *);
void TE_ISA_NAME(te_gemm_dots_pairs)(const te_gemm_dots *);
void TE_ISA_NAME(te_gemm_sweep)(const te_gemm_sweep *);
void TE_ISA_NAME(te_gemm_pack_panels)(const te_gemm_pack *, void *panels);
void TE_ISA_NAME(te_gemm_fetch)(const te_gemm_matrix *, int64_t, int64_t, int, int);
void TE_ISA_NAME(te_gemm_finish_f32)(const te_gemm_finish *, const void *, int, int64_t, int64_t, int, int);
void TE_ISA_NAME(te_gemm_finish_f64)(const te_gemm_finish *, const void *, int, int64_t, int64_t, int, int);
#endif

void te_gemm_small_avx512(const te_gemm_small *);
void te_gemm_small_pairs_avx512(const te_gemm_small *);
/* By te_element_kind, for processors with avx512vbmi and avx512bf16. */
extern void (*const te_gemm_coded_dots[])(const te_gemm_coded *);
extern const te_gemm_isa te_gemm_isa_portable, te_gemm_isa_avx2, te_gemm_isa_avx512, te_gemm_isa_neonbf16;

/* Pairs of bfloat16 in a matrix unit, and float32; and whether there is one that this process may use: it asks the
 * system, which then makes room for 8 KiB more in the signal frames of threads that do. */
extern const te_gemm_kernel te_gemm_kernel_amx, te_gemm_kernel_f32_amx;
bool te_gemm_amx_allowed(void);

void te_gemm_stream_squares_avx512(char *, int64_t, const void *, int, int, int, float *);
void te_gemm_streamed_avx512(void); /* what this thread wrote past the caches is there before it tells another so */
void te_gemm_finish_f32_avx512(const te_gemm_finish *, const void *, int, int64_t, int64_t, int, int);

/* --- implementations ---------------------------------------------------------------------------------------------- */

/* From so many rows on no other way takes less time for float32 than a matrix unit. */
enum { TE_GEMM_UNIT_ROWS = 48 };

/* How c was divided for a shape (gemm_plan.c). */
typedef struct te_gemm_division {
    const te_gemm_kernel *kernel; /* NULL: an empty entry */
    int64_t m, n, words, batches; /* the shape, … */
    int     threads;
    bool    direct_a, rows_serve;
    bool    blocks_first, held;   /* … and what was found */
    int64_t width, unit_rows, unit_panels, held_words;
} te_gemm_division;
enum { TE_GEMM_DIVISIONS = 64 };

/* Behind te_cpu_device.gemm. */
typedef struct te_gemm_state {
    const te_gemm_isa *isa;
    te_gemm_kernel f32, bf16; /* isa's, for this machine's caches */
    bool bf16_pairs; /* this machine multiplies pairs of bfloat16 */
    const te_gemm_kernel *matrix_unit; /* and whole matrices of them; or NULL */
    const te_gemm_kernel *f32_in_unit; /* which multiplies float32 so; or NULL */
    double matrix_macs;            /* multiply-adds that pay for entering it */
    struct te_gemm_cache  *packed; /* packed weights */
    struct te_gemm_onednn *onednn; /* primitives */
    te_gemm_division divisions[TE_GEMM_DIVISIONS]; /* by hash of the shape */
    double slice_macs;             /* multiply-adds that the library does between two looks at an interrupt, about */
} te_gemm_state;

typedef struct te_gemm_impl {
    const char *name;
    const char *(*decline)(te_exec *, const te_gemm_problem *); /* NULL: accepts; else why not */
    te_status (*run)(te_exec *, const te_gemm_problem *);
} te_gemm_impl;

/* The table, ended by an entry without name, and the entry that takes a problem. `reasons`, when given, receives what
 * each entry said (NULL for the one taken and those after it). */
extern const te_gemm_impl te_gemm_impls[];
enum { TE_GEMM_IMPLS = 7 };
const te_gemm_impl *te_gemm_choose(te_exec *exec, const te_gemm_problem *problem, const char *reasons[TE_GEMM_IMPLS]);

/* The operands of one product of the batch. */
typedef struct te_gemm_product {
    te_gemm_matrix a, b, c;
} te_gemm_product;

/* Where its operands a, b and c begin, in bytes. */
void te_gemm_offsets_of(const te_gemm_problem *problem, int64_t batch, int64_t offsets[3]);
te_gemm_product te_gemm_product_of(const te_gemm_problem *problem, int64_t batch);

/* How the sums of a product become its c; bias as te_gemm_bias_array makes it. */
static inline te_gemm_finish te_gemm_finish_of(const te_gemm_problem *p, const te_gemm_product *t, const void *bias)
{
    return (te_gemm_finish){.c = t->c, .bias = bias, .bias_by_row = p->bias_by_row, .alpha = p->alpha,
                            .accumulate = p->accumulate};
}

/* How threads share a b that is read once: pieces of so many columns, of each product. */
typedef struct te_gemm_shares {
    int     threads;
    int64_t columns, pieces;
} te_gemm_shares;

/* Of `most` columns, or of fewer, down to `least`, where there would be less than `each` pieces for a thread. */
te_gemm_shares te_gemm_shares_of(const te_exec *exec, const te_gemm_problem *problem, int64_t most, int64_t least,
                                 int each);

te_status te_gemm_problem_make(te_exec *exec, const te_gemm *gemm, te_gemm_problem *problem);
te_gemm_state *te_gemm_state_get(te_exec *exec); /* NULL with the message set: memory is exhausted */

/* te_cpu_gemm with an implementation of the caller's choice, by name; declining is TE_ERROR_UNSUPPORTED. For tests and
 * benchmarks. */
te_status te_cpu_gemm_with(te_exec *exec, const char *impl, const te_gemm *gemm);

/* te_cpu_gemm where a or b is quantized (gemm_quantized.c). */
te_status te_gemm_quantized(te_exec *exec, const te_gemm *gemm);

/* Whether our own kernel can read rows of a as they lie. */
bool te_gemm_reads_rows(const te_gemm_matrix *a);
/* Whether it takes many rows of few columns, summed over few steps of k, without tiles. */
bool te_gemm_is_narrow(const te_gemm_state *state, const te_gemm_problem *problem);
/* Whether b is so small that its columns, a copy of which lies side by side, take less time than as they lie. */
bool te_gemm_turns_b(const te_gemm_state *state, const te_gemm_problem *problem);
te_status te_gemm_blocked_run(te_exec *exec, const te_gemm_problem *problem);
const char *te_gemm_turned_decline(te_exec *exec, const te_gemm_problem *problem);
te_status te_gemm_turned_run(te_exec *exec, const te_gemm_problem *problem);
const char *te_gemm_rows_decline(te_exec *exec, const te_gemm_problem *problem);
te_status te_gemm_rows_run(te_exec *exec, const te_gemm_problem *problem);
/* The same for a problem of bfloat16 whose b is what rows of `coded` stand for, apart from the factor of the tensor.
 * Declines where that takes longer than with a decoded copy, which is kept. */
struct te_decode;
const char *te_gemm_coded_decline(te_exec *exec, const te_gemm_problem *problem, const struct te_decode *coded);
te_status te_gemm_coded_run(te_exec *exec, const te_gemm_problem *problem, const struct te_decode *coded);
const char *te_gemm_sweep_decline(te_exec *exec, const te_gemm_problem *problem);
te_status te_gemm_sweep_run(te_exec *exec, const te_gemm_problem *problem);

/* The bias as a dense array of float64, if `wide`, or float32: NULL where there is none, its own data where that
 * will do, else written to `buffer`, which te_gemm_bias_bytes says the size of. */
size_t te_gemm_bias_bytes(const te_gemm_problem *problem, bool wide);
const void *te_gemm_bias_array(const te_gemm_problem *problem, bool wide, void *buffer);
#ifdef TE_WITH_ONEDNN
struct te_gemm_onednn;
const char *te_gemm_onednn_decline(te_exec *exec, const te_gemm_problem *problem);
te_status te_gemm_onednn_run(te_exec *exec, const te_gemm_problem *problem);
void te_gemm_onednn_close(te_exec *exec, struct te_gemm_onednn *lib);
#endif
#endif
