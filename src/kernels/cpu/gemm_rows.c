/* gemm_rows.c - products of few rows: a model that answers token by token.
 *
 * Such a product reads b once and does next to nothing with it, so packing b, or reading it in tiles that hop from
 * column to column, would be most of the time. Where columns of b are contiguous, as those of weights are, a thread
 * goes through its share of them from the first byte to the last and every element of c is one sum over two lines
 * (isa/gemm_dots.c). Rows of a that are not contiguous are copied, one product's.
 *
 * Quantized weights are read as they are stored, which is half of the bytes or a quarter (isa/gemm_coded.c).
 */
#include "decode.h"
#include "gemm.h"
#include "workers.h"

#include <string.h>

enum {
    MOST_ROWS = 64, MOST_OF_PAIRS = 56,
    FEW_ROWS = 8, PART_ROWS = 19, /* which long lines of go through in parts */
    TINY_BYTES = 16 << 10,     /* of b */
    SMALL_BYTES = 128 << 10,   /* stays near */
    LARGE_BYTES = 1 << 20,     /* does not */
    ROWS_BYTES = 512 << 10,    /* of a, which is read for every column */
    COLUMNS = 64,              /* of a piece of work: what `finish` takes at once, … */
    FEW_COLUMNS = 16,          /* … and least, where there would be fewer pieces than threads */
    PITCH = COLUMNS + 4,       /* of sums */
    STACK_BYTES = 16 << 10,
    CODED_ROWS = 8,            /* four at a time: more would decode too often */
    CODED_FACTORS = 4096       /* of the columns that are multiplied together */
};

typedef struct rows_work {
    const te_gemm_problem *p;
    const te_gemm_isa *isa;
    void (*dots)(const te_gemm_dots *);
    const void *bias;
    const char *lines;   /* rows of a, where they had to be made contiguous; or NULL */
    const te_decode *coded; /* b as it is stored; or NULL */
    const te_quantize_blocks *blocks;
    te_gemm_shares shares;
} rows_work;

/* Up to how many rows this is faster than tiles that have to be packed first: that takes as long as a product of many
 * rows, the longer the farther away b is. */
static int rows_before_tiles(const te_gemm_state *state, const te_gemm_problem *p, double bytes)
{
    int    far = p->a.dtype != TE_F32 ? MOST_OF_PAIRS : state->f32_in_unit ? TE_GEMM_UNIT_ROWS - 1 : MOST_ROWS;
    int    most = bytes < SMALL_BYTES ? FEW_ROWS : bytes < LARGE_BYTES ? 32 : far;
    int    least = bytes < LARGE_BYTES ? FEW_ROWS : PART_ROWS;
    double near = ROWS_BYTES / ((double)p->k * p->a.size);
    return near < least ? least : near < most ? (int)near : most;
}

/* Up to how many rows this is the faster way. Tiles use what they loaded more often: earlier where registers hold the
 * sums of one row alone, where vectors are multiplied one in a cycle, and in a matrix unit. */
static int most_rows(te_exec *exec, const te_gemm_state *state, const te_gemm_problem *p)
{
    double bytes = (double)p->n * (double)p->k * p->b.size;
    bool   pairs = p->a.dtype == TE_BF16 && state->bf16_pairs && !state->matrix_unit;
    if (te_cpu(exec)->isa != TE_CPU_AVX512) return bytes < LARGE_BYTES ? 1 : FEW_ROWS;
    if (p->a.cs != 1) return FEW_ROWS; /* they are copied one by one */
    if (bytes >= TINY_BYTES && (pairs || (p->a.dtype == TE_F32 && state->f32.rate >= 2)))
        return rows_before_tiles(state, p, bytes);
    if (bytes >= SMALL_BYTES || p->a.dtype == TE_F16) return FEW_ROWS;
    return p->a.dtype == TE_BF16 ? 2 : 4;
}

const char *te_gemm_rows_decline(te_exec *exec, const te_gemm_problem *p)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return "no memory";
    if (p->m > most_rows(exec, state, p)) return "many rows";
    if (p->a.dtype == TE_F64) return "float64";
    if (p->b.rs != 1) return "columns of b are not contiguous";
    if (te_gemm_turns_b(state, p)) return "columns of b are few and short";
    if (p->a.cs != 1 && p->batches > 1) return "rows of a are not contiguous";
    return NULL;
}

static void (*dots_of(const te_gemm_state *state, te_dtype dtype))(const te_gemm_dots *)
{
    const te_gemm_isa *isa = state->isa;
    if (dtype == TE_F32) return isa->dots_f32;
    if (dtype == TE_F16) return isa->dots_f16;
    return state->bf16_pairs ? isa->dots_pairs : isa->dots_bf16;
}

/* What multiplies by codes of an element; NULL: this build has nothing for it. */
static void (*dots_of_element(te_element_kind element))(const te_gemm_coded *)
{
#if defined(TE_ISA_HAS_AVX512VBMI) && defined(TE_ISA_HAS_AVX512BF16)
    return te_gemm_coded_dots[element];
#else
    (void)element;
    return NULL;
#endif
}

/* Factors of `cols` columns from number `col` on, n each, `pitch` apart and filled up with zeros. */
static void factors_of_columns(const rows_work *w, int64_t col, int cols, int n, int pitch, float *factors)
{
    const te_decode *d = w->coded;
    bool together = d->block_rows == 1 && d->factor_col_stride == 1 && d->factor_row_stride == n && pitch == n;
    if (together) {
        te_decode_factors(w->blocks, d, col, cols * n, factors);
        return;
    }
    for (int i = 0; i < cols; i++, factors += pitch) {
        if (i > 0 && d->block_rows && (col + i) % d->block_rows != 0) {
            memcpy(factors, factors - pitch, (size_t)pitch * sizeof *factors);
            continue;
        }
        for (int b = 0; b < pitch; b++) factors[b] = b < n;
        if (d->block_rows) te_decode_factors(w->blocks, d, col + i, n, factors);
    }
}

/* Columns of `dots`, of which the first is number `col`: as many at a time as have room for their factors. */
static void dots_of_codes(const rows_work *w, const te_gemm_dots *dots, int64_t col)
{
    float            factors[CODED_FACTORS];
    const te_decode *d = w->coded;
    int64_t          k = d->cols, block = d->block_rows ? d->block_cols : k, line = d->row_stride;
    int              n = (int)((k + block - 1) / block), pitch = (n + 3) / 4 * 4, most = CODED_FACTORS / pitch;
    if (d->element == TE_E2M1) line /= 2;
    for (int j = 0, cols; j < dots->cols; j += cols) {
        cols = dots->cols - j < most ? dots->cols - j : most;
        te_gemm_coded c = {.a = dots->a, .a_line = dots->a_line, .codes = d->data + (col + j) * line, .line = line,
                           .factors = factors, .factor_line = pitch, .k = k, .block = block, .rows = dots->rows,
                           .cols = cols, .pitch = dots->pitch, .sums = dots->sums + j};
        factors_of_columns(w, col + j, cols, n, pitch, factors);
        dots_of_element(d->element)(&c);
    }
}

static void run_piece(const rows_work *w, int64_t batch, int64_t piece)
{
    const te_gemm_problem *p = w->p;
    te_gemm_product t = te_gemm_product_of(p, batch);
    int64_t columns = w->shares.columns, col = piece * columns, left = p->n - col;
    float   sums[MOST_ROWS * PITCH];
    te_gemm_dots dots = {.a = t.a.data, .b = te_gemm_element(&t.b, 0, col), .a_line = t.a.rs * t.a.size,
                         .b_line = t.b.cs * t.b.size, .bytes = p->k * t.a.size, .rows = (int)p->m,
                         .cols = (int)(left < columns ? left : columns), .pitch = PITCH, .sums = sums};
    if (w->lines) dots.a = w->lines, dots.a_line = dots.bytes;
    if (w->coded) dots_of_codes(w, &dots, col);
    else w->dots(&dots);
    te_gemm_finish finish = te_gemm_finish_of(p, &t, w->bias);
    w->isa->f32.finish(&finish, sums, PITCH, 0, col, dots.rows, dots.cols);
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    const rows_work *w = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) run_piece(w, i / w->shares.pieces, i % w->shares.pieces);
}

static size_t lines_bytes(const te_gemm_problem *p)
{
    return p->a.cs == 1 ? 0 : (size_t)p->m * (size_t)p->k * (size_t)p->a.size;
}

static const char *copy_lines(const te_gemm_problem *p, char *to)
{
    if (p->a.cs == 1) return NULL;
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t w = 0; w < p->k; w++) {
            const char *from = te_gemm_element(&p->a, i, w);
            if (p->a.size == 4) memcpy(to + (i * p->k + w) * 4, from, 4);
            else memcpy(to + (i * p->k + w) * 2, from, 2);
        }
    return to;
}

static te_status run(te_exec *exec, const te_gemm_problem *p, const te_decode *coded)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    _Alignas(64) char stack[STACK_BYTES];
    size_t bias = te_gemm_bias_bytes(p, false), bytes = bias + lines_bytes(p);
    char  *room = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!room) return TE_ERROR_MEMORY;
    rows_work work = {.p = p, .isa = state->isa, .dots = dots_of(state, p->a.dtype),
                      .shares = te_gemm_shares_of(exec, p, COLUMNS, FEW_COLUMNS, 1),
                      .bias = te_gemm_bias_array(p, false, room), .lines = copy_lines(p, room + bias),
                      .coded = coded, .blocks = coded ? te_quantize_blocks_of(exec) : NULL};
    int64_t pieces = work.shares.pieces * p->batches;
    te_cpu_loop(exec, work.shares.threads, pieces, te_cpu_even_grain(pieces, 4 * work.shares.threads), run_pieces,
                &work);
    if (room != stack) exec->scratch_free(exec, room);
    return TE_OK;
}

te_status te_gemm_rows_run(te_exec *exec, const te_gemm_problem *p) { return run(exec, p, NULL); }

te_status te_gemm_coded_run(te_exec *exec, const te_gemm_problem *p, const te_decode *d) { return run(exec, p, d); }

const char *te_gemm_coded_decline(te_exec *exec, const te_gemm_problem *p, const te_decode *d)
{
    const te_gemm_state *state = te_gemm_state_get(exec);
    const char          *reason = te_gemm_rows_decline(exec, p);
    int64_t              block = d->block_rows ? d->block_cols : d->cols;
    if (reason) return reason;
    if (!state->bf16_pairs || !te_cpu(exec)->has_vbmi || !dots_of_element(d->element))
        return "no permutations of bytes, or no pairs of bfloat16";
    if (p->m > CODED_ROWS || p->batches > 1) return "many rows";
    if (p->n * p->k * p->b.size < LARGE_BYTES) return "b stays near";
    if (d->cols % 64 != 0 || d->col_stride != 1) return "lines are no whole steps";
    bool blocks = d->element == TE_E2M1 ? block == 16 : block == 32 || block % 64 == 0;
    if (d->amax || !blocks) return "blocks of another size, or factors of rows";
    return d->cols / block > TE_DECODE_RUN ? "a long line" : NULL;
}
