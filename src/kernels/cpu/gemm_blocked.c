/* gemm_blocked.c - our own matrix product: in which order packed panels meet, and which thread computes what.
 *
 *      a thread takes a unit: a block of rows x a group of panels of b
 *        for each chunk of k, which is as many slices as the second-level cache holds of the block of a
 *          packs the block of a                          where it is not fit as it lies
 *          for each panel of b in the group, for each slice of the chunk
 *            packs the panel's slice                     into its first-level cache; columns that lie side by side are
 *                                                        packed by the first tile while it multiplies
 *            for each panel of a: a tile of sums         after the last slice it is finished into c
 *
 * Nothing is shared and nothing waits: packing b takes a third of a cycle per word, half of one from memory, and a word
 * then serves all rows of the block, 16 cycles of multiplication where these are 256. Packing it once for all would
 * cost more, since it would be read again from the last-level cache. While the tiles of a slice run they prefetch what
 * is packed next, a line every few steps, which is worth 5 % of the time where weights come from memory. Where a chunk
 * is all of k, the units that a thread takes one after the other share what it packed of a block of a. With vectors and
 * small caches a chunk is one slice: that sums are kept for all panels costs them little.
 *
 * Units, slices and tiles depend on the shape alone (units on the number of threads, but k is not divided between
 * them), and a tile's sums are kept in full precision between slices; so the result does not depend on who computes
 * it.
 *
 * In a matrix unit short sums are done before c's lines come from a cache that is not near. There a unit packs all of
 * its panels, and rows are multiplied with one panel after the other, so that lines of c follow each other. The same
 * order serves longer sums where all of b fits the second-level cache: rows of a need not be packed, and follow each
 * other in memory, which gives them in time that way. Where words have to be made of numbers, a tile's rows are packed
 * while those before them are multiplied. That is hidden well enough to be done for several groups of panels; where the
 * cache holds too few panels for it, b is held for a chunk of k after the other, and all sums of the unit are kept.
 */
#include "../dtype.h"
#include "gemm_cache.h"
#include "gemm_plan.h"
#include "workers.h"

#include <math.h>
#include <string.h>

enum {
    STACK_BYTES = 32 << 10,
    KEEP_ROWS = 64,  /* up to here b is worth a packed copy, … */
    KEEP_ELEMENTS = 16 << 10, /* … unless looking for that takes as long as packing */
    STEPS_AHEAD = 24 /* that a tile which packs asks for before it is there: of 12 cycles, the last cache away */
};

/* Byte strides of a matrix. */
typedef struct gemm_source {
    const char *data;
    int64_t     row, col;
} gemm_source;

/* --- a unit ------------------------------------------------------------------------------------------------------- */

/* Rows of a, and where they are packed; where they are not, `room` is not used. */
typedef struct gemm_rows_packed {
    int64_t       row, rows;
    char         *room;
    te_gemm_range range; /* for kernels that mend */
} gemm_rows_packed;

/* One unit of one product, and where it is in it. */
typedef struct gemm_unit {
    te_exec *exec;
    const te_gemm_plan *plan;
    gemm_source    a, b;
    te_gemm_finish finish;
    int64_t row, rows;          /* of c */
    int64_t panel, panels;
    int64_t chunk;                /* its first word */
    int64_t first, words, filled; /* of the slice; filled: words with the zeros behind them */
    char   *b_room, *sums;
    gemm_rows_packed packed;      /* all of the unit's, or a tile's */
    te_gemm_range b_range;
    te_gemm_leaving leaving;
    const char **kept; /* where the rows of a, or columns of b, begin that the room holds from unit to unit; or NULL */
} gemm_unit;

static int columns_of(const gemm_unit *u, int64_t panel)
{
    int64_t width = u->plan->width;
    return (int)at_most(u->plan->p->n - panel * width, width);
}

static int vectors_of(const gemm_unit *u, int64_t panel)
{
    int lanes = u->plan->kernel->lanes;
    return (columns_of(u, panel) + lanes - 1) / lanes;
}

static te_gemm_pack pack_of_slice(const gemm_unit *u, const char *src, int64_t line_stride, int64_t k_stride)
{
    const te_gemm_plan *plan = u->plan;
    int64_t k0 = u->first * plan->kernel->k_per_word;
    return (te_gemm_pack){.word = plan->word, .src = src + k0 * k_stride, .line_stride = line_stride,
                          .k_stride = k_stride, .k = at_most(plan->p->k - k0, u->words * plan->kernel->k_per_word)};
}

/* Where the slice's panels of a are. */
static char *a_of_slice(const gemm_unit *u)
{
    int64_t rows = u->plan->beside ? u->plan->kernel->mr : u->plan->unit_rows;
    return u->packed.room + (u->first - u->chunk) * rows * u->plan->kernel->word_bytes;
}

static te_gemm_range range_from(te_gemm_range range, int64_t line)
{
    return (te_gemm_range){range.largest + line, range.smallest + line};
}

/* Of a panel's columns of b. */
static te_gemm_range b_range(const gemm_unit *u, int64_t panel)
{
    return range_from(u->b_range, (panel - u->panel) * u->plan->kernel->nr);
}

/* Where the largest magnitudes of `lines` lines are noted, begun anew with the first slice; NULL: nobody wants them. */
static uint32_t *note_largest(const gemm_unit *u, te_gemm_range range, int64_t lines)
{
    if (!u->plan->kernel->mend) return NULL;
    if (u->first == 0) {
        memset(range.largest, 0, lines * sizeof *range.largest);
        memset(range.smallest, 0, lines * sizeof *range.smallest);
    }
    return range.largest;
}

static void pack_a(const gemm_unit *u)
{
    te_gemm_pack pack = pack_of_slice(u, u->a.data + u->packed.row * u->a.row, u->a.row, u->a.col);
    pack.extent = (int)u->packed.rows;
    pack.width = u->plan->kernel->mr;
    if (te_gemm_is_low(u->plan)) pack.filled = pack.width;
    pack.largest = note_largest(u, u->packed.range, u->packed.rows);
    if (u->plan->kernel->pack_a) u->plan->kernel->pack_a(&pack, a_of_slice(u));
    else u->plan->isa->pack(&pack, a_of_slice(u));
}

static void pack_b(const gemm_unit *u, int64_t panel, char *to)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    te_gemm_pack pack = pack_of_slice(u, u->b.data + panel * u->plan->width * u->b.col, u->b.col, u->b.row);
    pack.extent = columns_of(u, panel);
    pack.width = kernel->nr;
    pack.filled = vectors_of(u, panel) * kernel->lanes;
    pack.largest = note_largest(u, b_range(u, panel), kernel->nr);
    if (kernel->pack_b) {
        kernel->pack_b(&pack, to);
        return;
    }
    u->plan->isa->pack(&pack, to);
    size_t row = (size_t)kernel->nr * kernel->word_bytes;
    if (u->filled > u->words) memset(to + u->words * row, 0, (u->filled - u->words) * row);
}

/* Where the slice is in a panel of a packed b. */
static char *packed_slice(const gemm_unit *u, const char *packed, int64_t panel)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    return (char *)packed + (panel * u->plan->words + u->first) * kernel->nr * kernel->word_bytes;
}

/* The panels whose rows are fetched together are, by those before them, each slice of which fetches its part. */
static te_gemm_ahead panels_after(const gemm_unit *u, int64_t panel)
{
    const te_gemm_plan *plan = u->plan;
    int64_t near = plan->near_panels, at = panel - u->panel, group = at / near * near, next = group + near;
    int64_t chunk = u->chunk, words = at_most(plan->words - chunk, plan->chunk_words);
    int64_t slices = divide_up(words, plan->slice_words), parts = at_most(u->panels - group, near) * slices;
    int64_t part = (at - group) * slices + (u->first - chunk) / plan->slice_words;
    if (next >= u->panels) { /* of the next chunk, the first ones */
        next = 0, chunk += plan->chunk_words;
        words = at_most(plan->words - chunk, plan->chunk_words);
    }
    if (words <= 0) return (te_gemm_ahead){0};
    int64_t k0 = chunk * plan->kernel->k_per_word, k = at_most(plan->p->k - k0, words * plan->kernel->k_per_word);
    int64_t col = (u->panel + next) * plan->width, row = k0 + k * part / parts, end = k0 + k * (part + 1) / parts;
    int64_t cols = at_most(plan->p->n - col, at_most(u->panels - next, near) * plan->width);
    return (te_gemm_ahead){u->b.data + row * u->b.row + col * u->b.col, end - row, u->b.row, cols * u->b.col, 0};
}

/* What of b the unit packs after this slice of panel `panel`. */
static te_gemm_ahead after(const gemm_unit *u, int64_t panel)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t size = plan->p->b.size, word = u->first + u->words, end = u->chunk + plan->chunk_words;
    int64_t row = (int64_t)kernel->nr * kernel->word_bytes;
    if (plan->packed_b) {
        const char *next = packed_slice(u, plan->packed_b, panel) + u->words * row;
        return (te_gemm_ahead){next, at_most(plan->slice_words, plan->words), row, row, 0};
    }
    if (plan->near_panels > 1) return panels_after(u, panel);
    if (word < plan->words && word < end) { /* the panel's next slice */
    } else if (++panel < u->panel + u->panels) {
        word = u->chunk;
    } else {
        panel = u->panel;
        word = end;
    }
    if (word >= plan->words) return (te_gemm_ahead){0};
    int64_t k0 = word * kernel->k_per_word, cols = columns_of(u, panel);
    int64_t k = at_most(plan->p->k - k0, plan->slice_words * kernel->k_per_word);
    const char *data = u->b.data + k0 * u->b.row + panel * plan->width * u->b.col;
    if (u->b.row == size) return (te_gemm_ahead){data, cols, u->b.col, k * size, 0};
    if (u->b.col == size) return (te_gemm_ahead){data, k, u->b.row, cols * size, 0};
    return (te_gemm_ahead){0};
}

/* What tiles fetch in each of their steps. */
static void plan_fetches(const gemm_unit *u, int64_t row_panels, te_gemm_ahead *next, te_gemm_out *out)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    int64_t steps = at_least(u->filled / kernel->step, 1), tile_bytes = kernel->mr * kernel->nr * kernel->sum_bytes;
    bool    ends = u->first + u->words == u->plan->words;
    out->ahead = next;
    out->lines = (int)divide_up(te_gemm_lines_of(next), row_panels * steps);
    if (u->plan->words > u->plan->slice_words) out->sums = (int)divide_up(tile_bytes / 64, steps);
    out->rows = ends && !u->plan->squares ? (int)divide_up(kernel->mr, steps) : 0;
}

/* Writes what no tile follows. */
static void drain(gemm_unit *u)
{
    if (u->plan->kernel->drain) u->plan->kernel->drain(&u->leaving);
}

/* Whether the first tile of a slice can pack it: whole vectors of whole words that lie side by side. */
static bool is_packed_by_tile(const gemm_unit *u, int64_t panel)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    bool words = plan->word == TE_GEMM_WORD_F32 || plan->word == TE_GEMM_WORD_F64 ||
                 (plan->word == TE_GEMM_WORD_BF16PAIR && plan->p->k % 2 == 0);
    bool high = u->rows >= kernel->mr || te_gemm_is_low(plan);
    return kernel->packing && words && !plan->packed_b && plan->p->b.cs == 1 && high &&
           columns_of(u, panel) % kernel->lanes == 0;
}

/* What that tile asks for is what comes next of the panel; only the first rows of another one are left to the tiles
 * before it. */
static te_gemm_lying lying_of(const gemm_unit *u, int64_t panel, te_gemm_ahead *next)
{
    int64_t row = u->b.row, words = u->plan->kernel->k_per_word, ahead = u->plan->near_panels == 1 ? STEPS_AHEAD : 0;
    const char *data = u->b.data + panel * u->plan->width * u->b.col + u->first * words * row;
    if (ahead && next->data == data + u->words * words * row) next->runs = 0;
    else if (ahead) next->runs = at_most(next->runs, ahead * words);
    return (te_gemm_lying){data, row, words * row, ahead * words * row, u->b_room};
}

/* The slice's rows of a as tiles read them: packed, or where they lie. */
typedef struct gemm_rows {
    const char *data;
    int64_t row, step, panel; /* bytes from row to row, from step to step, and to the rows of the next tile */
} gemm_rows;

static gemm_rows rows_of_slice(const gemm_unit *u)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    int64_t mr = kernel->mr, word = kernel->word_bytes, step = kernel->step * word;
    if (!u->plan->direct_a) return (gemm_rows){a_of_slice(u), step, mr * step, mr * u->filled * word};
    const char *data = u->a.data + u->row * u->a.row + u->first * word;
    return (gemm_rows){data, u->a.row, step, mr * u->a.row};
}

static te_gemm_origin origin_of(const gemm_unit *u, int64_t row, int64_t panel)
{
    int64_t k = u->plan->p->k;
    return (te_gemm_origin){.a = u->a.data + row * u->a.row, .b = u->b.data + panel * u->plan->width * u->b.col,
                            .a_row = u->a.row, .a_step = u->a.col, .b_col = u->b.col, .b_step = u->b.row, .k = k,
                            .a_range = range_from(u->packed.range, row - u->packed.row), .b_range = b_range(u, panel),
                            .least = (float)k * 0x1p-98f};
}

/* What leaves the tile of `rows` rows from `row` on, and where to. */
static void aim(const gemm_unit *u, te_gemm_out *out, int64_t row, int rows, int64_t panel)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t col = panel * plan->width;
    bool ends = u->first + u->words == plan->words, whole = columns_of(u, panel) % kernel->lanes == 0;
    out->c = te_gemm_element(&u->finish.c, row, col);
    out->way = ends && whole && rows % kernel->row_group == 0 ? plan->way : TE_GEMM_OUT_KEEP;
    if (ends && kernel->mend) out->origin = origin_of(u, row, panel);
    out->squares = NULL;
    if (ends && plan->squares)
        out->squares = plan->squares + row / kernel->mr * plan->square_cols + col / kernel->lanes;
}

/* Writes complete sums that a tile kept. */
static void finish(const gemm_unit *u, const te_gemm_out *out, char *sums, int64_t row, int rows, int64_t panel)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    if (kernel->mend) kernel->mend(&out->origin, sums, rows, vectors_of(u, panel));
    kernel->finish(&u->finish, sums, kernel->nr, row, panel * u->plan->width, rows, columns_of(u, panel));
}

/* Packs a slice of a panel of b, and multiplies the unit's rows with it. */
static void run_tiles(gemm_unit *u, int64_t panel)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    int64_t mr = kernel->mr, tile_bytes = mr * kernel->nr * kernel->sum_bytes;
    int64_t col = panel * plan->width, row_panels = divide_up(u->rows, mr);
    gemm_rows a = rows_of_slice(u);
    int cols = columns_of(u, panel), vectors = vectors_of(u, panel);
    bool begins = u->first == 0, ends = u->first + u->words == plan->words;
    bool kept = plan->words > plan->slice_words, chunks = plan->words > plan->chunk_words;
    char *sums = u->sums + (chunks ? (panel - u->panel) * row_panels * tile_bytes : 0);
    bool  by_near = ends && plan->squares && !kernel->drain;
    char  *near = u->sums + plan->sums_bytes - tile_bytes;
    int64_t c_row = u->finish.c.rs * u->finish.c.size;
    te_gemm_out out = {.row = by_near ? kernel->nr * kernel->sum_bytes : c_row,
                       .vector = kernel->lanes * u->finish.c.size, .leaving = &u->leaving};
    te_gemm_ahead next = after(u, panel);
    bool packs = is_packed_by_tile(u, panel);
    te_gemm_lying lying = {0};
    const char *b = plan->packed_b ? packed_slice(u, plan->packed_b, panel) : u->b_room;
    if (packs) lying = lying_of(u, panel, &next);
    else if (!plan->packed_b) pack_b(u, panel, u->b_room);
    if (kernel->fetch) te_gemm_plan_asking(&out, &next, at_least(u->rows / mr - packs, 0), u->filled);
    else plan_fetches(u, row_panels, &next, &out);
    for (int64_t i = 0; i < row_panels; i++, a.data += a.panel, sums += kept ? tile_bytes : 0) {
        int64_t row = u->row + i * mr;
        int rows = (int)at_most(u->rows - i * mr, mr);
        aim(u, &out, row, rows, panel);
        if (kernel->fetch && ends && out.way != TE_GEMM_OUT_STREAM)
            kernel->fetch(&u->finish.c, row, col, rows, cols);
        char *c = out.c;
        if (by_near) out.c = near, out.way = TE_GEMM_OUT_STORE;
        else if (packs && rows < mr) out.way = TE_GEMM_OUT_KEEP;
        te_gemm_tile *tile = kernel->tile[(rows - 1) / kernel->row_group][vectors - 1];
        if (packs && i == 0) kernel->packing[vectors - 1](a.data, a.row, a.step, &lying, u->filled, sums, begins, &out);
        else tile(a.data, a.row, a.step, b, u->filled, sums, begins, &out);
        if (by_near) kernel->stream_squares(c, c_row, near, kernel->nr, rows, vectors, out.squares);
        else if (ends && out.way == TE_GEMM_OUT_KEEP) finish(u, &out, sums, row, rows, panel);
    }
}

/* Columns of b become rows, which takes less time one by one where there are few elements. */
static void turn_b(const gemm_unit *u, int64_t k, int64_t n)
{
    int size = u->plan->p->b.size;
    char *to = u->b_room;
    for (int64_t w = 0; w < k; w++)
        for (int64_t j = 0; j < n; j++, to += size) {
            const char *from = u->b.data + w * u->b.row + j * u->b.col;
            if (size == 4) memcpy(to, from, 4);
            else memcpy(to, from, 2);
        }
}

static void pack_small(const gemm_unit *u, te_gemm_small *s)
{
    const te_gemm_plan *plan = u->plan;
    bool widened = s->in == TE_BF16 && !s->pairs;
    te_gemm_pack pack = {.word = widened ? TE_GEMM_WORD_BF16 : plan->word, .src = u->b.data, .line_stride = u->b.col,
                         .k_stride = u->b.row, .k = s->k, .extent = s->n, .width = (int)round_up(s->n, 16)};
    if (s->pairs) pack.filled = pack.width, s->a_step *= 2;
    s->b = u->b_room;
    s->b_row = plan->small_turned ? s->n * plan->p->b.size : pack.width * (int64_t)sizeof(float);
    s->panel = !plan->small_turned;
    if (plan->small_turned) turn_b(u, s->k, s->n);
    else plan->isa->pack(&pack, u->b_room);
}

/* All of the unit, without tiles. */
static void run_small(const gemm_unit *u)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_problem *p = plan->p;
    int64_t c_row = p->c.rs * p->c.size;
    te_gemm_small s = {.in = p->a.dtype, .out = p->c.dtype, .a = u->a.data + u->row * u->a.row, .b = u->b.data,
                       .c = u->finish.c.data + u->row * c_row, .bias = u->finish.bias, .a_row = u->a.row,
                       .a_step = u->a.col, .b_row = u->b.row, .c_row = c_row, .m = u->rows, .n = (int)p->n,
                       .k = (int)p->k, .pairs = plan->small_pairs, .add = p->accumulate};
    if (plan->small_panel) pack_small(u, &s);
    if (s.pairs) plan->isa->small_pairs(&s);
    else plan->isa->small(&s);
}

/* Makes the slice that begins at word `first` of the chunk the unit's. */
static void begin_slice(gemm_unit *u, int64_t first)
{
    int64_t end = at_most(u->plan->words, u->chunk + u->plan->chunk_words);
    u->first = first;
    u->words = at_most(end - first, u->plan->slice_words);
    u->filled = round_up(u->words, u->plan->kernel->step);
}

/* Where the slice of a panel is, where all of the unit's are packed: slice after slice. */
static char *b_of_slice(const gemm_unit *u, int64_t panel)
{
    const te_gemm_kernel *kernel = u->plan->kernel;
    int64_t words = (u->first - u->chunk) * u->panels + (panel - u->panel) * u->filled;
    return u->b_room + words * kernel->nr * kernel->word_bytes;
}

static int64_t end_of_chunk(const gemm_unit *u)
{
    return at_most(u->plan->words, u->chunk + u->plan->chunk_words);
}

/* All of the unit's panels, if the room does not hold them; a panel's columns of all slices of the chunk, which follow
 * each other in memory or lie in the same lines. */
static void pack_all_of_b(gemm_unit *u)
{
    const te_gemm_plan *plan = u->plan;
    const char *columns = u->b.data + u->panel * plan->width * u->b.col;
    if (u->kept && !plan->held_words && *u->kept == columns) return;
    for (int64_t panel = u->panel; panel < u->panel + u->panels; panel++)
        for (int64_t first = u->chunk; first < end_of_chunk(u); first += plan->slice_words) {
            begin_slice(u, first);
            pack_b(u, panel, b_of_slice(u, panel));
        }
    if (u->kept) *u->kept = columns;
}

/* The rows of a that come after those of the tiles at row `i` of the unit, if tiles are long enough to ask for them;
 * where these are packed beside multiplying, those after them. */
static te_gemm_ahead rows_after(const gemm_unit *u, int64_t i)
{
    const te_gemm_plan *plan = u->plan;
    int64_t next = u->row + i + (plan->beside ? 2 : 1) * plan->kernel->mr, end = u->row + u->rows;
    if (!plan->held || next >= end) return (te_gemm_ahead){0};
    int64_t rows = at_most(end - next, plan->kernel->mr), k0 = u->chunk * plan->kernel->k_per_word;
    int64_t k = at_most(plan->p->k - k0, plan->chunk_words * plan->kernel->k_per_word) * plan->p->a.size;
    return (te_gemm_ahead){u->a.data + next * u->a.row + k0 * u->a.col, rows, u->a.row, k, 0};
}

/* A slice of one tile's rows, from row `i` of the unit on, with all panels. */
static void run_row_of_tiles(gemm_unit *u, int64_t i, te_gemm_out *out)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    gemm_rows a = rows_of_slice(u);
    int64_t mr = kernel->mr, row = u->row + i;
    int rows = (int)at_most(u->rows - i, mr);
    const char *rows_at = a.data + (row - u->packed.row) / mr * a.panel;
    char *sums = u->sums + (plan->held_words ? i / mr * u->panels * mr * kernel->nr * kernel->sum_bytes : 0);
    for (int64_t panel = u->panel; panel < u->panel + u->panels; panel++) {
        aim(u, out, row, rows, panel);
        te_gemm_tile *tile = kernel->tile[(rows - 1) / kernel->row_group][vectors_of(u, panel) - 1];
        tile(rows_at, a.row, a.step, b_of_slice(u, panel), u->filled, sums, u->first == 0, out);
        if (out->way == TE_GEMM_OUT_KEEP && u->first + u->words == plan->words)
            finish(u, out, sums, row, rows, panel);
        if (plan->words > plan->slice_words) sums += mr * kernel->nr * kernel->sum_bytes;
    }
}

/* Packs rows of all slices of the chunk. */
static void pack_rows(gemm_unit *u)
{
    for (int64_t first = u->chunk; first < end_of_chunk(u); first += u->plan->slice_words) {
        begin_slice(u, first);
        pack_a(u);
    }
}

/* Where a thread notes the range of lines of a, and, from `line` on, of b. */
static te_gemm_range range_of(const te_gemm_plan *plan, char *room, int64_t line)
{
    uint32_t *largest = (uint32_t *)(void *)(room + plan->b_bytes + plan->sums_bytes + plan->a_bytes);
    return (te_gemm_range){largest + line, largest + plan->range_bytes / sizeof *largest / 2 + line};
}

/* The rows of the tiles at row `i` of the unit, in a room that takes turns with another. */
static gemm_rows_packed rows_in_turn(const gemm_unit *u, int64_t i)
{
    const te_gemm_plan *plan = u->plan;
    int64_t mr = plan->kernel->mr, tile = i / mr;
    char   *rooms = u->b_room + plan->b_bytes + plan->sums_bytes;
    return (gemm_rows_packed){u->row + i, at_most(u->rows - i, mr), rooms + tile % 2 * (plan->a_bytes / 2),
                              range_from(range_of(plan, u->b_room, 0), i)};
}

/* Has tiles at row `i` pack the rows of those that follow, if all of a tile's are there; else, and for the first ones,
 * rows are packed when it is their turn. */
static void take_turn(gemm_unit *u, int64_t i, te_gemm_beside *beside, te_gemm_out *out)
{
    const te_gemm_plan *plan = u->plan;
    int64_t mr = plan->kernel->mr;
    bool there = i > 0 && i + mr <= u->rows;
    u->packed = rows_in_turn(u, i);
    if (!there) pack_rows(u);
    out->beside = NULL;
    if (i + 2 * mr > u->rows) return;
    gemm_rows_packed next = rows_in_turn(u, i + mr);
    begin_slice(u, u->chunk);
    *beside = (te_gemm_beside){.panels = next.room, .to = next.room};
    beside->pack = pack_of_slice(u, u->a.data + next.row * u->a.row, u->a.row, u->a.col);
    int64_t k_per_word = plan->kernel->k_per_word;
    beside->pack.k = at_most(plan->p->k - u->chunk * k_per_word, plan->chunk_words * k_per_word);
    beside->pack.extent = (int)mr;
    beside->pack.largest = note_largest(u, next.range, mr);
    out->beside = beside;
    out->pieces = (int)divide_up(mr, plan->kernel->times * u->panels);
}

/* The chunk of the unit, one tile's rows after the other. */
static void run_chunk_across(gemm_unit *u)
{
    const te_gemm_plan *plan = u->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    te_gemm_beside beside;
    pack_all_of_b(u);
    if (!plan->direct_a && !plan->beside) pack_rows(u);
    te_gemm_out out = {.row = u->finish.c.rs * u->finish.c.size, .vector = kernel->lanes * u->finish.c.size,
                       .leaving = &u->leaving, .b_passes = plan->held};
    for (int64_t i = 0; i < u->rows; i += kernel->mr) {
        if (plan->beside) take_turn(u, i, &beside, &out);
        te_gemm_ahead next = rows_after(u, i);
        for (int64_t first = u->chunk; first < end_of_chunk(u); first += plan->slice_words) {
            begin_slice(u, first);
            plan_fetches(u, divide_up(end_of_chunk(u) - first, plan->slice_words) * u->panels, &next, &out);
            run_row_of_tiles(u, i, &out);
        }
        if (out.beside) kernel->pack_rest(&beside);
    }
}

static void run_across(gemm_unit *u)
{
    for (; u->chunk < u->plan->words && !te_cpu_stopping(u->exec); u->chunk += u->plan->chunk_words)
        run_chunk_across(u);
    drain(u);
}

/* Where k is 0 there is a chunk of one slice, without words. */
static void run_chunk(gemm_unit *u)
{
    const te_gemm_plan *plan = u->plan;
    int64_t end = at_most(plan->words, u->chunk + plan->chunk_words);
    const char *rows = u->a.data + u->row * u->a.row;
    bool there = plan->direct_a || (u->kept && *u->kept == rows);
    for (int64_t first = u->chunk; first < end && !there; first += plan->slice_words) {
        begin_slice(u, first);
        pack_a(u);
    }
    if (u->kept) *u->kept = rows;
    for (int64_t panel = u->panel; panel < u->panel + u->panels; panel++)
        for (int64_t first = u->chunk; first == u->chunk || first < end; first += plan->slice_words) {
            begin_slice(u, first);
            run_tiles(u, panel);
        }
}

static void run_unit(gemm_unit *u)
{
    if (u->plan->small) {
        run_small(u);
        return;
    }
    u->chunk = 0;
    if (u->plan->across) {
        run_across(u);
        return;
    }
    do {
        run_chunk(u);
        u->chunk += u->plan->chunk_words;
    } while (u->chunk < u->plan->words && !te_cpu_stopping(u->exec));
    drain(u);
}

/* --- all units ---------------------------------------------------------------------------------------------------- */

static gemm_source source_of(const te_gemm_matrix *m)
{
    return (gemm_source){m->data, m->rs * m->size, m->cs * m->size};
}

/* Where a thread notes whose rows of a, or columns of b, its room holds: behind them. */
static const char **kept_of(const te_gemm_plan *plan, char *room)
{
    return (const char **)(void *)(room + te_gemm_thread_bytes(plan) - plan->note_bytes);
}

/* Unit `index` of all products. */
static gemm_unit unit_make(te_exec *exec, const te_gemm_plan *plan, int64_t index, char *room)
{
    const te_gemm_problem *p = plan->p;
    int64_t group = 0, block = 0;
    if (plan->blocks_first) block = index % plan->blocks, index /= plan->blocks;
    if (plan->groups > 1) group = index % plan->groups, index /= plan->groups;
    if (plan->blocks > 1 && !plan->blocks_first) block = index % plan->blocks, index /= plan->blocks;
    te_gemm_product t = te_gemm_product_of(p, index);
    gemm_unit u = {.exec = exec, .plan = plan, .a = source_of(&t.a), .b = source_of(&t.b),
                   .row = block * plan->unit_rows, .panel = group * plan->unit_panels,
                   .b_room = room, .sums = room + plan->b_bytes,
                   .kept = plan->note_bytes ? kept_of(plan, room) : NULL,
                   .finish = te_gemm_finish_of(p, &t, plan->bias)};
    u.rows = at_most(p->m - u.row, plan->unit_rows);
    u.packed = (gemm_rows_packed){u.row, u.rows, room + plan->b_bytes + plan->sums_bytes, range_of(plan, room, 0)};
    u.b_range = range_of(plan, room, plan->unit_rows);
    u.panels = at_most(plan->panels - u.panel, plan->unit_panels);
    return u;
}

typedef struct gemm_units {
    te_exec *exec;
    const te_gemm_plan *plan;
    char *work; /* a part per thread */
} gemm_units;

/* Products that are one unit each differ in where their operands lie, and that alone is set anew: there may be
 * thousands, of some multiplications each. */
static void run_whole_products(gemm_unit *u, int64_t first, int64_t end)
{
    const te_gemm_problem *p = u->plan->p;
    for (int64_t i = first;;) {
        run_unit(u);
        if (++i == end || te_cpu_stopping(u->exec)) return;
        int64_t offsets[3];
        te_gemm_offsets_of(p, i, offsets);
        u->a.data = p->a.data + offsets[0];
        u->b.data = p->b.data + offsets[1];
        u->finish.c.data = p->c.data + offsets[2];
    }
}

static void run_units(void *context, int64_t first, int64_t end, int thread)
{
    const gemm_units *units = context;
    const te_gemm_plan *plan = units->plan;
    const te_gemm_kernel *kernel = plan->kernel;
    char *room = units->work + (size_t)thread * te_gemm_thread_bytes(plan);
    bool whole = plan->blocks * plan->groups == 1;
    if (kernel->enter) kernel->enter();
    for (int64_t i = first; i < end && !te_cpu_stopping(units->exec); i = whole ? end : i + 1) {
        gemm_unit u = unit_make(units->exec, plan, i, room);
        if (whole) run_whole_products(&u, i, end);
        else run_unit(&u);
    }
    if (kernel->leave) kernel->leave();
}

enum { PIECE_MACS = 16 << 10, PIECE_PRODUCT = 256 /* multiplications that take as long as all else about a product */ };

/* Units that a thread takes at once. */
static int64_t grain_of(const te_gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    if (plan->blocks * plan->groups > 1) return 1;
    double macs = (double)p->m * (double)p->n * (double)p->k + PIECE_PRODUCT;
    return macs < PIECE_MACS ? (int64_t)(PIECE_MACS / macs) : 1;
}

size_t te_gemm_bias_bytes(const te_gemm_problem *p, bool wide)
{
    return te_view_present(&p->bias) ? align_up(p->bias.shape[0] * (wide ? sizeof(double) : sizeof(float))) : 0;
}

const void *te_gemm_bias_array(const te_gemm_problem *p, bool wide, void *buffer)
{
    const te_view *bias = &p->bias;
    if (!te_view_present(bias)) return NULL;
    if (bias->dtype == (wide ? TE_F64 : TE_F32) && bias->stride[0] == 1) return bias->data;
    for (int64_t i = 0; i < bias->shape[0]; i++) {
        double x = te_load_f64(bias->data, bias->dtype, i * bias->stride[0]);
        if (wide) ((double *)buffer)[i] = x;
        else ((float *)buffer)[i] = (float)x;
    }
    return buffer;
}

/* Of all of c, in an order that follows from the shape alone. */
static double sum_of_squares(const te_gemm_plan *plan)
{
    enum { SIDE_BY_SIDE = 8 };
    int64_t n = plan->square_rows * plan->square_cols;
    double  sums[SIDE_BY_SIDE] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++) sums[i % SIDE_BY_SIDE] += (double)plan->squares[i];
    for (int i = 0; i < SIDE_BY_SIDE; i++) sum += sums[i];
    return sum;
}

/* --- a b that comes again ----------------------------------------------------------------------------------------- */

typedef struct gemm_keeping {
    te_exec *exec;
    const te_gemm_plan *plan;
    char *room;
} gemm_keeping;

static void pack_panels(void *context, int64_t first, int64_t end, int thread)
{
    const gemm_keeping *keeping = context;
    const te_gemm_plan *plan = keeping->plan;
    gemm_unit u = {.exec = keeping->exec, .plan = plan, .b = source_of(&plan->p->b)};
    (void)thread;
    for (int64_t panel = first; panel < end; panel++)
        for (int64_t word = 0; word < plan->words; word += plan->slice_words) {
            u.first = word;
            u.words = u.filled = at_most(plan->words - word, plan->slice_words);
            pack_b(&u, panel, packed_slice(&u, keeping->room, panel));
        }
}

/* Few rows take hardly longer than packing what they are multiplied with; so where that comes again it is kept. Its
 * panels are those that would be packed, so bits are the same. */
static void find_packed_b(te_exec *exec, te_gemm_state *state, te_gemm_plan *plan)
{
    const te_gemm_problem *p = plan->p;
    const te_gemm_kernel *kernel = plan->kernel;
    bool large = p->k * p->n >= KEEP_ELEMENTS;
    if (!p->b_key || p->m > KEEP_ROWS || !large || plan->small || p->batches > 1 || kernel->step > 1) return;
    if (!state->packed) state->packed = te_gemm_cache_new(exec->mem);
    if (!state->packed) return;
    te_gemm_packed_id id = {.key = p->b_key, .form = {(int64_t)(intptr_t)p->b.data, p->n, p->k, p->b.rs, p->b.cs,
                                                      plan->width, plan->word, -1}};
    void *room;
    size_t bytes = (size_t)(plan->panels * plan->words * kernel->nr * kernel->word_bytes);
    plan->packed_b = te_gemm_cache_find(state->packed, &id, bytes, &room);
    if (!room) return;
    gemm_keeping keeping = {exec, plan, room};
    te_cpu_loop(exec, plan->threads, plan->panels, 1, pack_panels, &keeping);
    plan->packed_b = room;
}

te_status te_gemm_blocked_run(te_exec *exec, const te_gemm_problem *problem)
{
    te_gemm_state *state = te_gemm_state_get(exec);
    if (!state) return TE_ERROR_MEMORY;
    te_gemm_plan plan;
    te_gemm_plan_make(exec, state, problem, &plan);
    find_packed_b(exec, state, &plan);
    bool wide = plan.kernel->sum_bytes == sizeof(double);
    size_t squares = align_up((size_t)(plan.square_rows * plan.square_cols) * sizeof *plan.squares);
    size_t shared = squares + te_gemm_bias_bytes(problem, wide);
    size_t bytes = shared + plan.threads * te_gemm_thread_bytes(&plan);
    _Alignas(64) char stack[STACK_BYTES];
    char *work = bytes <= sizeof stack ? stack : exec->scratch(exec, bytes);
    if (!work) return TE_ERROR_MEMORY;
    plan.squares = squares ? (float *)(void *)work : NULL;
    plan.bias = te_gemm_bias_array(problem, wide, work + squares);
    gemm_units units = {exec, &plan, work + shared};
    for (int t = 0; t < plan.threads && plan.note_bytes; t++)
        *kept_of(&plan, units.work + t * te_gemm_thread_bytes(&plan)) = NULL;
    te_cpu_loop(exec, plan.threads, plan.blocks * plan.groups * problem->batches, grain_of(&plan), run_units, &units);
    if (problem->squares) *problem->squares += squares ? sum_of_squares(&plan) : (double)NAN;
    if (work != stack) exec->scratch_free(exec, work);
    return TE_OK;
}
