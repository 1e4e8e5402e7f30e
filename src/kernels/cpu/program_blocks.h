/* program_blocks.h - the inner loops of the program interpreter, as a table of functions over blocks of values.
 *
 * A block is an array of float32 (or float64) values of any length that lives in L1, or a tensor's own memory where its
 * type and strides allow. The destination of an operation may be one of its arguments, exactly. There is one table per
 * instruction set for float32, all with the same bits, and one for float64, which serves gradient checks and is plain
 * C.
 */
#ifndef TE_KERNELS_CPU_PROGRAM_BLOCKS_H
#define TE_KERNELS_CPU_PROGRAM_BLOCKS_H

#include "cpu.h"

/* Two operations in one go, (a first b) second c, for values that have but one use: each still rounds. They follow the
 * opcodes in the table; of the scalars bit patterns with a and b both set are absent. */
typedef enum te_pair_first { TE_FIRST_ADD, TE_FIRST_SUB, TE_FIRST_MUL, TE_FIRST_COUNT } te_pair_first;
typedef enum te_pair_second {
    TE_SECOND_ADD,
    TE_SECOND_SUB,  /* (a first b) - c */
    TE_SECOND_FROM, /* c - (a first b) */
    TE_SECOND_MUL,
    TE_SECOND_COUNT
} te_pair_second;

enum {
    TE_BLOCK_PAIRS = TE_PW_COUNT,
    TE_BLOCK_PAIR_COUNT = TE_FIRST_COUNT * TE_SECOND_COUNT,
    TE_BLOCK_LOOK_UP = TE_BLOCK_PAIRS + TE_BLOCK_PAIR_COUNT, /* of a: b is a table, c none (program_lookup.c) */
    TE_BLOCK_OPS
};

static inline int te_block_pair(te_pair_first first, te_pair_second second)
{
    return TE_BLOCK_PAIRS + (int)first * TE_SECOND_COUNT + (int)second;
}

/* dst[i] = op(a[i], b[i], c[i]); an argument whose bit is set in the table's second index is one number instead; of
 * TE_BLOCK_LOOK_UP it is a table, for all numbers of bfloat16 by their bits. */
typedef void (*te_block_op)(void *dst, const void *a, const void *b, const void *c, size_t n);

/* Conversion between values and elements of a type, `stride` elements apart (0: the same one). */
typedef void (*te_block_load)(void *dst, const void *src, int64_t stride, size_t n);
typedef void (*te_block_store)(void *dst, int64_t stride, const void *src, size_t n);

/* Reductions. Element i of what is added goes to lane i % TE_FOLD_LANES, and lanes are joined as a balanced tree. Sums
 * go over to a float64 total each TE_FOLD_SPAN elements, so their error does not grow with the length; blocks other
 * than a row's last one are divisors of it in length. */
typedef enum te_fold_kind { TE_FOLD_SUM, TE_FOLD_MAX, TE_FOLD_MIN, TE_FOLD_AMAX } te_fold_kind;

enum { TE_FOLD_LANES = 64, TE_FOLD_SPAN = 16384 };

typedef struct te_fold {
    double lane[TE_FOLD_LANES]; /* of the table's value type */
    double total;
    size_t held;                /* elements in the lanes */
    bool   spilled;             /* total is in use */
} te_fold;

/* RANDOM, KEEP, NORMAL for elements first … first + n - 1. */
typedef struct te_block_random {
    te_opcode   op;
    te_rng      rng;
    uint64_t    first;
    uint64_t    threshold; /* KEEP, where p is NULL */
    const void *p;         /* KEEP: drop probabilities, one per element */
} te_block_random;

/* Memory that will be wanted next, fetched while something else is computed: `each` bytes, whole lines, per
 * TE_FOLD_LANES elements of a fold, or per strip of a chain, as long as there are any; then `next`. */
typedef struct te_ahead te_ahead;
struct te_ahead {
    const char     *at, *end;
    int64_t         each;
    bool            write; /* it will be written: lines are fetched as this core's own */
    const te_ahead *next;  /* NULL: that is all */
};

enum { TE_LINE = 64 };

struct te_link;

typedef struct te_fold_columns te_fold_columns;

/* Rows that are folded. Steps are in elements, to the next row's. Of sums with `times` its products with `by` take the
 * place of `by`; where `also` is not NULL, it gets the sums of what stands for `by`. Each argument is read once for
 * both. So for the column sums `beside`, if any: these are of the same src, by and about. Then src_half is by_half,
 * there are `times` in values, and the columns fill all lanes. */
typedef struct te_fold_rows {
    const void *src, *by, *about, *times; /* by, about: as in fold_add; about one number per row, its step may be 0 */
    void       *also;
    int64_t     src_step, by_step, about_step, times_step;
    size_t      rows, columns;
    bool        src_half, by_half, times_half; /* are bfloat16; of amaxes never */
    const te_fold_columns *beside;
} te_fold_rows;

/* Rows that are added up, one after the other: sums[j] += src[j], or with `by` += by[j] * ((src[j] - about) * times)
 * and also[j] += by[j]. `about` and `times` are one number per row, 0 and 1 where NULL; steps are in elements. */
struct te_fold_columns {
    void       *sums, *also;
    const void *src, *by, *about, *times;
    int64_t     src_step, by_step;
    size_t      rows, columns;
    bool        src_half, by_half; /* are bfloat16 */
};

/* What a chain goes over: n elements in windows, both multiples of the strip. Registers hold a window and begin anew in
 * the next one, where tensors go on. With `step` windows are rows: what is in slot i goes on by step[i] bytes, and
 * numbers are one per row. */
typedef struct te_chain_run {
    const struct te_link *links;
    char *const          *slot;
    const uint8_t        *form; /* te_slot_form of each slot */
    const int64_t        *step; /* NULL: windows are no rows */
    size_t                n, window;
    bool                  far; /* windows are no rows, and read tensors that no near cache holds */
    bool                  gathers; /* te_cpu_device.gathers */
    te_ahead              ahead;
} te_chain_run;

typedef struct te_blocks {
    size_t         size; /* bytes of a value */
    te_block_op    op[TE_BLOCK_OPS][8];
    te_block_load  load[TE_DTYPE_COUNT];
    te_block_store store[TE_DTYPE_COUNT];
    void (*set)(void *dst, double value); /* one value */
    double (*get)(const void *src);
    void (*column)(void *dst, int64_t first, int64_t columns, size_t n); /* (first + i) % columns */
    void (*random)(void *dst, const te_block_random *random, size_t n);
    void (*repeat)(void *dst, const void *src, size_t rows, size_t columns); /* each of `rows` values `columns` times */

    void (*fold_start)(te_fold *fold, te_fold_kind kind);
    /* Sums only: where `by` is not NULL, the products src[i] * by[i] are added; where `about` is not, a number, the
     * distance src[i] - *about takes the place of src[i] and, without `by`, of both factors. What is summed without
     * either may be bfloat16. */
    void (*fold_add)(te_fold *fold, te_fold_kind kind, const void *src, bool half, const void *by, const void *about,
                     size_t n, te_ahead ahead);
    void (*fold_finish)(te_fold *fold, te_fold_kind kind, void *dst);
    void (*fold_rows)(te_fold_kind kind, void *dst, const te_fold_rows *fold, te_ahead ahead);
    void (*fold_columns)(const te_fold_columns *fold, te_ahead ahead);
    /* NULL: there is none, as for float64. Of rows that lie side by side, `columns` of them, at least TE_FOLD_LANES,
     * whose n elements, at most TE_FOLD_SPAN, are `step` elements apart: dst[j] is what fold_rows would make of src[j],
     * src[j + step] and so on, but perhaps for the sign of a zero that is an extreme. */
    void (*fold_across)(te_fold_kind kind, void *dst, const void *src, int64_t step, bool half, size_t n,
                        size_t columns);

    /* float32's table alone: from whole numbers (int64, int32) below 2^bits in magnitude; false: others are among them.
     */
    bool (*load_small)(void *dst, const void *src, te_dtype dtype, int64_t stride, size_t n, int bits);

    /* float32's table alone: numbers first … first + n - 1, `first` even. */
    void (*integers)(int64_t *dst, const te_integers *drawn, uint64_t first, size_t n);

    size_t strip; /* elements that a chain works on at a time, see program_chain.h; 0: there are no chains */
    void (*chain)(const te_chain_run *run);
} te_blocks;

extern const te_blocks te_program_blocks_portable, te_program_blocks_avx2, te_program_blocks_avx512;
extern const te_blocks te_program_blocks_avx512bf16; /* the same as avx512 but for how bfloat16 is stored */
extern const te_blocks te_program_blocks_f64_portable, te_program_blocks_f64_avx2, te_program_blocks_f64_avx512;

#endif
