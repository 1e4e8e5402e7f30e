/* gemm_onednn.c - the matrix product through oneDNN: which products, in which pieces.
 *
 * oneDNN lets threads share the sum over k of long products, from about eight threads on, so its bits would depend on their
 * number. Therefore it never sees more than one: c is cut into a grid of pieces that follows from the shape alone, oneDNN
 * computes a piece on one thread, and our threads take pieces as they become free.
 *
 *               n0      n1                    pieces of one grid have at most four shapes (the last row and
 *           +-------+-------+                 column may be smaller), hence at most four primitives
 *      m0   |       |       |
 *           +-------+-------+
 *      m1   |       |       |
 *           +-------+-------+
 *
 * What oneDNN computes on the way out is the bias and the accumulation. Activations are ours, applied to a piece while it is
 * still in the cache: they are the same functions as everywhere else.
 */
#ifdef TE_WITH_ONEDNN
#include "../dtype.h"
#include "gemm_cache.h"
#include "gemm_onednn.h"

#include <omp.h>
#include <string.h>

enum {
    PIECE_MACS = 4 << 20,
    PIECES = 16,
    PIECE_ROWS = 128,   /* oneDNN rearranges b for each piece: with fewer rows that becomes noticeable */
    PIECE_COLS = 512,
    PACK_ROWS = 128,    /* up to here b is worth a packed copy */
    SHAPES = 4
};

typedef struct grid {
    int64_t rows, cols;     /* of a piece */
    int64_t down, across;   /* pieces */
} grid;

/* Halves whichever side is long enough, wide products across and others down, until there are enough pieces. */
static grid grid_make(const te_gemm_problem *p)
{
    double macs = (double)p->m * (double)p->n * (double)p->k;
    int64_t rows = p->m, cols = p->n, pieces = 1, wanted = macs >= PIECES * (double)PIECE_MACS ? PIECES : (int64_t)(macs / PIECE_MACS);
    while (2 * pieces <= wanted) {
        if (cols >= 4 * rows && cols >= 4 * PIECE_COLS) cols = (cols + 1) / 2;
        else if (rows >= 2 * PIECE_ROWS) rows = (rows + 1) / 2;
        else if (cols >= 2 * PIECE_COLS) cols = (cols + 1) / 2;
        else if (pieces < 4 && rows >= PIECE_ROWS / 2) rows = (rows + 1) / 2;
        else break;
        pieces *= 2;
    }
    grid g = {.rows = (rows + 15) / 16 * 16, .cols = (cols + 63) / 64 * 64};
    if (rows == p->m) g.rows = rows;
    if (cols == p->n) g.cols = cols;
    g.down = (p->m + g.rows - 1) / g.rows;
    g.across = (p->n + g.cols - 1) / g.cols;
    return g;
}

typedef struct piece {
    int64_t row, col, rows, cols;
    int     shape; /* bit 0: of the last row, bit 1: of the last column */
} piece;

static piece piece_at(const te_gemm_problem *p, const grid *g, int64_t index)
{
    int64_t i = index / g->across, j = index % g->across;
    piece x = {.row = i * g->rows, .col = j * g->cols, .rows = g->rows, .cols = g->cols};
    if (i == g->down - 1) x.rows = p->m - x.row;
    if (j == g->across - 1) x.cols = p->n - x.col;
    x.shape = (i == g->down - 1) + 2 * (j == g->across - 1);
    return x;
}
