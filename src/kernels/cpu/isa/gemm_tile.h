/* gemm_tile.h - a register tile of the matrix product, as a template: gemm_micro.c includes it once per arithmetic.
 *
 * Wanted:
 *      TILE(name)                  makes names
 *      TILE_WORD, TILE_SUM         a packed word, and a sum
 *      TILE_VECTOR, TILE_SUMS      vectors of TILE_LANES of them
 *      TILE_SPLAT(p)               the word at p in all lanes
 *      TILE_MADD(sums, a, b)       sums + a * b
 *      TILE_ROUND(p, sums)         stores sums rounded to bfloat16, or nothing
 *      TILE_STREAM(p, sums)        stores sums past the caches, or nothing
 *      TILE_TAKE(p, v, row)        vector v of a step of words from a b whose rows lie at p, `row` bytes apart
 *      TILE_FETCH(p, v, row)       asks for what this reads, or a part of it that makes the whole with those of others
 *      TILE_TARGET                 attributes for instructions beyond those of the file
 * and from the instruction set TILE_ROWS x TILE_VECTORS, the full tile, TILE_EACH(X), which is X(rows, vectors) for
 * all sizes up to it, and TILE_EACH_WIDTH(X), which is X(vectors) for those of all rows.
 *
 * Sizes are constants wherever the body is inlined, so its sums are registers. A full tile of 8 x 3 AVX-512 vectors
 * keeps 24 of the 32 registers as sums and three as a row of b; elements of a are broadcast by the multiplication's
 * memory operand.
 */
TILE_TARGET UNWATCHED INLINE void TILE(put)(te_gemm_way way, char *c, TILE_SUMS sums)
{
    if (way == TE_GEMM_OUT_ROUND) {
        TILE_ROUND(c, sums);
        return;
    }
    if (way == TE_GEMM_OUT_STREAM) {
        TILE_STREAM(c, sums);
        return;
    }
    TILE_SUMS old;
    if (way == TE_GEMM_OUT_ADD) {
        memcpy(&old, c, sizeof old);
        sums += old;
    }
    memcpy(c, &sums, sizeof sums);
}

/* What a tile with a panel touches. */
INLINE void TILE(touches)(int rows, int vectors, const char *a, int64_t a_row, int64_t a_step, const char *b,
                          int64_t words, const TILE_SUM *kept, bool first, const te_gemm_out *out)
{
    enum { NR = TILE_VECTORS * TILE_LANES };
    const int64_t word = sizeof(TILE_WORD), size = sizeof(TILE_SUMS);
    const bool rounded = out->way == TE_GEMM_OUT_ROUND;
    if (words > 0) te_touches(b, (words - 1) * NR * word + vectors * size);
    if (words > 0 && a_step > a_row) te_touches(a, (words - 1) * a_step + (rows - 1) * a_row + word); /* a panel */
    for (int r = 0; r < rows && words > 0 && a_step <= a_row; r++)
        te_touches(a + r * a_row, (words - 1) * a_step + word);
    for (int r = 0; r < rows; r++) {
        if (!first || out->way == TE_GEMM_OUT_KEEP) te_touches(kept + r * NR, vectors * size);
        for (int v = 0; v < vectors && out->way != TE_GEMM_OUT_KEEP; v++)
            te_touches(out->c + r * out->row + v * out->vector, rounded ? size / 2 : size);
    }
}

/* b is a panel; or `from` is where its words are taken from, which leaves the panel there. */
TILE_TARGET UNWATCHED INLINE void TILE(body)(const int rows, const int vectors, const char *a, int64_t a_row,
                                             int64_t a_step, const char *b, const te_gemm_lying *from, int64_t words,
                                             TILE_SUM *kept, bool first, const te_gemm_out *out)
{
    enum { NR = TILE_VECTORS * TILE_LANES };
    TILE_SUMS sums[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            if (first) sums[r][v] = (TILE_SUMS){0};
            else memcpy(&sums[r][v], kept + r * NR + v * TILE_LANES, sizeof(TILE_SUMS));
    const char *lying = from ? from->data : NULL;
    char *panel = from ? from->panel : NULL;
    const int64_t asking = rows == TILE_ROWS && !from ? out->asking : 0, apart = out->apart - 1;
    for (int64_t w = 0; w < words; w++) {
        TILE_VECTOR row[TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++)
            if (!from) {
                memcpy(&row[v], b + v * sizeof(TILE_VECTOR), sizeof(TILE_VECTOR));
            } else {
                row[v] = TILE_TAKE(lying, v, from->row);
                TILE_FETCH(lying + from->ahead, v, from->row);
                memcpy(panel + v * sizeof(TILE_VECTOR), &row[v], sizeof(TILE_VECTOR));
            }
        UNROLL for (int r = 0; r < rows; r++) {
            TILE_VECTOR x = TILE_SPLAT(a + r * a_row);
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = TILE_MADD(sums[r][v], x, row[v]);
        }
        a += a_step;
        if (from) lying += from->step, panel += NR * sizeof(TILE_WORD);
        else b += NR * sizeof(TILE_WORD);
        if (w < asking && (w & apart) == 0) te_gemm_ask(out->ahead, out->lines);
    }
    const te_gemm_way way = out->way;
    if (way == TE_GEMM_OUT_KEEP) {
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++)
                memcpy(kept + r * NR + v * TILE_LANES, &sums[r][v], sizeof(TILE_SUMS));
        return;
    }
    const int64_t down = out->row, right = out->vector;
    char *c = out->c;
    UNROLL for (int r = 0; r < rows; r++, c += down)
        UNROLL for (int v = 0; v < vectors; v++) TILE(put)(way, c + v * right, sums[r][v]);
}

#define TILE_DEFINE(rows, vectors)                                                                                     \
    TILE_TARGET UNWATCHED static void TILE(rows##x##vectors)(const char *a, int64_t a_row, int64_t a_step,             \
                                                             const char *b, int64_t words, void *kept, bool first,     \
                                                             const te_gemm_out *out)                                   \
    {                                                                                                                  \
        TILE(touches)(rows, vectors, a, a_row, a_step, b, words, kept, first, out);                                    \
        TILE(body)(rows, vectors, a, a_row, a_step, b, NULL, words, kept, first, out);                                 \
    }
TILE_EACH(TILE_DEFINE)

#define TILE_DEFINE_PACKING(vectors)                                                                                   \
    TILE_TARGET static void TILE(packing_##vectors)(const char *a, int64_t a_row, int64_t a_step,                      \
                                                    const te_gemm_lying *from, int64_t words, void *kept, bool first,  \
                                                    const te_gemm_out *out)                                            \
    {                                                                                                                  \
        TILE(body)(TILE_ROWS, vectors, a, a_row, a_step, NULL, from, words, kept, first, out);                         \
    }
TILE_EACH_WIDTH(TILE_DEFINE_PACKING)

#define TILE_ENTRY(rows, vectors) [rows - 1][vectors - 1] = TILE(rows##x##vectors),
static te_gemm_tile *const TILE(table)[TE_GEMM_MAX_ROWS][TE_GEMM_MAX_VECTORS] = {TILE_EACH(TILE_ENTRY)};

#define TILE_ENTRY_PACKING(vectors) [vectors - 1] = TILE(packing_##vectors),
static te_gemm_packing_tile *const TILE(packing)[TE_GEMM_MAX_VECTORS] = {TILE_EACH_WIDTH(TILE_ENTRY_PACKING)};

#undef TILE_DEFINE
#undef TILE_DEFINE_PACKING
#undef TILE_ENTRY
#undef TILE_ENTRY_PACKING
#undef TILE
#undef TILE_WORD
#undef TILE_SUM
#undef TILE_VECTOR
#undef TILE_SUMS
#undef TILE_LANES
#undef TILE_SPLAT
#undef TILE_MADD
#undef TILE_ROUND
#undef TILE_STREAM
#undef TILE_TAKE
#undef TILE_FETCH
#undef TILE_TARGET
