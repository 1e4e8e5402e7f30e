/* attention_forward.h - out and lse of some queries of one head (a template; see attention_loops.h).
 *
 * Per block of keys: k is packed transposed, v for the right side; then tiles of queries go from scores to weights to
 * weighted values while their scores stay in L1. A tile is TE_ATTENTION_KEYS queries where all see all keys of the
 * block; where masks cut through it, tiles are low, so that little is computed in vain.
 *
 * A sequence of one query, as in generation with a cache, takes keys and values as they lie. So does each of a few
 * behind many keys, where guessed tokens are checked: then it has the bits that it has alone.
 *
 * One walk over the keys does: weights are relative to the largest score so far. Weights that are rounded take two
 * walks (attention_rounded.h), of which the first finds maxima and sums alone.
 */

/* Per-thread memory of one task, all carved from one block of scratch. */
typedef struct T(forward_state) {
    const te_attention     *a;
    const te_attention_seq *seq;
    int64_t head, dim, dim_v; /* padded */
    int64_t width, width_v;   /* of rows as loaded */
    REAL   *q;                /* [queries, width] */
    REAL   *k, *k_across;     /* [keys, width], [width, keys] */
    REAL   *v, *v_place;      /* rows, and room for them packed */
    REAL   *scores, *halves;  /* [tile, keys], and room for them rounded */
    REAL   *out;              /* [queries, dim_v], not yet divided by the sum */
    REAL   *sum;              /* [queries, lanes]: sums of weights, in as many parts */
    REAL   *top;              /* [queries]: maximum score so far */
    REAL   *total;            /* [queries]: the whole sum, at the end */
} T(forward_state);

static int64_t T(forward_layout)(T(forward_state) *s, const te_attention *a, int64_t queries, REAL *base)
{
    s->a = a;
    s->dim = te_attention_pad(a->q.shape[3]);
    s->dim_v = te_attention_pad(a->v.shape[3]);
    s->width = T(rows_width)(a->q.shape[3]);
    s->width_v = T(rows_width)(a->v.shape[3]);
    queries = te_attention_pad(queries);
    enum { KEYS = TE_ATTENTION_KEYS };
    int64_t at = 0;
    s->q = T(carve)(base, &at, queries * s->width);
    s->k = T(carve)(base, &at, KEYS * s->width);
    s->k_across = T(carve)(base, &at, KEYS * s->width);
    s->v = T(carve)(base, &at, KEYS * s->width_v);
    s->v_place = T(carve)(base, &at, T(right_size)(KEYS, s->dim_v));
    s->scores = T(carve)(base, &at, KEYS * KEYS);
    s->halves = T(carve)(base, &at, T(right_size)(KEYS, KEYS));
    s->out = T(carve)(base, &at, queries * s->dim_v);
    s->sum = T(carve)(base, &at, queries * TE_ATTENTION_LANES);
    s->top = T(carve)(base, &at, queries);
    s->total = T(carve)(base, &at, queries);
    return at;
}

static size_t T(forward_bytes)(const te_attention *a, int64_t queries)
{
    T(forward_state) s;
    return (size_t)T(forward_layout)(&s, a, queries, NULL) * sizeof(REAL);
}

/* Makes `most`, which a score of the row reaches, what its weights are relative to, and brings what was summed before
 * to that too. */
static void T(raise_top)(T(forward_state) *s, int64_t row, REAL most)
{
    REAL *sum = s->sum + row * TE_ATTENTION_LANES, *out = s->out + row * s->dim_v, top = s->top[row];
    s->top[row] = most;
    if (top == -(REAL)INFINITY) return; /* all of it is 0 */
    REAL shrink = REAL_EXP(top - most);
    for (int l = 0; l < TE_ATTENTION_LANES; l++) sum[l] *= shrink;
    for (int64_t d = 0; d < s->dim_v; d++) out[d] *= shrink;
}

/* Turns rows of scores into weights. They are relative to a score of the row that is at most `slack` below the largest
 * so far, so that few rows are brought to another one. */
ALWAYS_INLINE void T(softmax_rows)(const int rows, T(forward_state) *s, REAL *p, int n, REAL scale, REAL slack,
                                   int64_t row)
{
    REAL reference[TOGETHER];
    for (int r = 0; r < rows; r++) {
        REAL most = T(row_max)(p + r * TE_ATTENTION_KEYS, n) * scale;
        if (most > s->top[row + r] + slack) T(raise_top)(s, row + r, most);
        REAL top = s->top[row + r];
        reference[r] = top == -(REAL)INFINITY ? 0 : top;
    }
    T(exp_rows)(rows, p, n, scale, reference, s->sum + row * TE_ATTENTION_LANES);
}

static void T(softmax_tile)(T(forward_state) *s, int rows, REAL *p, int n, REAL scale, REAL slack, int64_t row)
{
    int r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER)
        T(softmax_rows)(TOGETHER, s, p + r * TE_ATTENTION_KEYS, n, scale, slack, row + r);
    for (; r < rows; r++) T(softmax_rows)(1, s, p + r * TE_ATTENTION_KEYS, n, scale, slack, row + r);
}

/* p[j] = exp(p[j] - top) times, to the nearest E4M3. Adding a number whose last place is that of E4M3 rounds, ties to
 * even; below 2^-6, where E4M3 is subnormal, its last place is fixed. */
static inline void T(round_rows)(const T(forward_state) *s, int rows, REAL *p, int n, int64_t row)
{
    for (int64_t i = row; i < row + rows; i++, p += TE_ATTENTION_KEYS) {
        REAL top = s->top[i] == -(REAL)INFINITY ? 0 : s->top[i], times = s->total[i];
        for (int j = 0; j < n; j++) {
            float x = (float)(REAL_EXP(p[j] - top) * times);
            uint32_t exponent = te_f32_bits(x) & 0x7f800000u, least = 0x3c800000u;
            float place = te_f32_from_bits((exponent > least ? exponent : least) + (20u << 23)) * 1.5f;
            p[j] = (REAL)((x + place) - place);
        }
    }
}

/* One tile of queries against one block of keys, whose values are v. row: first row of the tile within the task; query:
 * the same within the sequence. */
static void T(forward_tile)(T(forward_state) *s, attention_walk walk, int64_t row, int rows, int64_t query, int64_t key,
                            const block_ranges *ranges, int at, const REAL *v, bool exact)
{
    T(tile_range) range = T(range_of)(ranges->low + at, ranges->high + at, rows);
    if (range.low >= range.high) return;
    REAL *scores = s->scores;
    T(multiply_scores)(rows, scores, range, s->q + row * s->width, s->k_across, s->a->q.shape[3]);
    REAL scale = T(late_scale)(s->a);
    bool plain = ranges->whole && scale > 0 && walk != WALK_ROUNDED && !te_view_present(&s->a->bias);
    for (int r = 0; r < rows && !plain; r++) {
        REAL *p = scores + r * TE_ATTENTION_KEYS;
        int low = ranges->low[at + r], high = ranges->high[at + r];
        T(scale_scores)(p + range.column, range.columns, scale);
        if (te_view_present(&s->a->bias)) T(add_bias)(p, s->a, s->seq, s->head, query + r, key, low, high);
        T(fill_outside)(p, range, low, high, -(REAL)INFINITY);
    }
    if (walk == WALK_ROUNDED) T(round_rows)(s, rows, scores + range.column, range.columns, row);
    else T(softmax_tile)(s, rows, scores + range.column, range.columns, plain ? scale : 1, slack_of(walk), row);
    if (walk == WALK_SUMS) return;
    for (int r = 0; r < rows && s->a->dropout > 0; r++) { /* rounded ones that remain are scaled up at the end */
        float keep[TE_ATTENTION_KEYS];
        dropout_row(s->a, s->seq, s->head, query + r, key + range.column, range.columns, keep);
        T(drop)(scores + r * TE_ATTENTION_KEYS + range.column, keep, range.columns,
                walk == WALK_ROUNDED ? 0 : s->a->dropout);
    }
    for (int r = 0; r < rows && exact; r++)
        T(add_exactly)(s->out + (row + r) * s->dim_v, s->dim_v, scores + r * TE_ATTENTION_KEYS, 1, ranges->low[at + r],
                       ranges->high[at + r], v);
    if (!exact) T(round_weights)(rows, scores, s->halves, range);
    if (!exact) T(add_weighted)(rows, s->out + row * s->dim_v, s->dim_v, scores, s->halves, range, v);
}

#ifdef IN_PLACE
/* Whether keys and values can be taken as they lie: rows need no padding. */
static bool T(lie_well)(const te_attention *a)
{
    const int64_t whole = TE_ATTENTION_LANES * (int64_t)sizeof(REAL) / (int64_t)te_dtype_size(IN_PLACE);
    return a->k.dtype == IN_PLACE && a->v.dtype == IN_PLACE && a->k.shape[3] % whole == 0 &&
           a->v.shape[3] % whole == 0;
}

/* Whether each query of a sequence is multiplied by itself: rearranging the keys would take longer. */
static bool T(goes_alone)(const te_attention *a, const te_attention_seq *seq)
{
    bool few = seq->n_q == 1 || (seq->n_q <= TE_ATTENTION_ALONE && seq->n_q < seq->n_kv);
    return few && T(lie_well)(a);
}

/* A query, row `row` of the task, against keys key … key + n. */
static void T(forward_alone)(T(forward_state) *s, int64_t row, int64_t query, int64_t key, int n)
{
    const te_attention *a = s->a;
    const te_attention_seq *seq = s->seq;
    int64_t kv_head = s->head / (a->q.shape[1] / a->k.shape[1]), k_row, v_row;
    block_ranges ranges;
    find_ranges(&ranges, seq, query, 1, key, n);
    int low = ranges.low[0], high = ranges.high[0];
    T(tile_range) range = T(range_of)(&low, &high, 1);
    if (low >= high) return;
    int64_t first = seq->kv_start + key + low;
    const char *k = T(rows_at)(&a->k, seq->batch, kv_head, first, &k_row);
    const char *v = T(rows_at)(&a->v, seq->batch, kv_head, first, &v_row);
    REAL *p = s->scores;
    for (int j = range.column; j < range.column + range.columns; j++) p[j] = -(REAL)INFINITY;
    T(dot_rows)(p + low, s->q + row * s->width, s->width, k, k_row, high - low, T(late_scale)(a));
    if (te_view_present(&a->bias)) T(add_bias)(p, a, seq, s->head, query, key, low, high);
    T(softmax_tile)(s, 1, p + range.column, range.columns, 1, slack_of(WALK_ONCE), row);
    if (a->dropout > 0) {
        float keep[TE_ATTENTION_KEYS];
        dropout_row(a, seq, s->head, query, key + range.column, range.columns, keep);
        T(drop)(p + range.column, keep, range.columns, a->dropout);
    }
    T(add_rows)(s->out + row * s->dim_v, s->dim_v, p + low, v, v_row, high - low);
}
#endif

/* All queries of the task against keys key … key + n of the sequence. */
static void T(forward_block)(T(forward_state) *s, attention_walk walk, int64_t first, int64_t end, int64_t key, int n)
{
    const te_attention *a = s->a;
    const te_attention_seq *seq = s->seq;
    int64_t kv_head = s->head / (a->q.shape[1] / a->k.shape[1]);
    const REAL *v = NULL;
    bool finite = true;
#ifdef IN_PLACE
    if (walk == WALK_ONCE && T(goes_alone)(a, seq)) {
        for (int64_t query = first; query < end; query++) T(forward_alone)(s, query - first, query, key, n);
        return;
    }
#endif
    T(load_rows)(s->k, &a->k, seq->batch, kv_head, seq->kv_start + key, n, 1);
    T(transpose_tile)(s->k_across, s->k, s->width, n);
    if (walk != WALK_SUMS) {
        T(load_rows)(s->v, &a->v, seq->batch, kv_head, seq->kv_start + key, n, 1);
        finite = T(tile_finite)(s->v, n * s->width_v);
        T(pack_right)(s->v_place, s->v, s->dim_v, n);
        v = T(right_of)(s->v_place, s->v);
    }
    for (int64_t query = first; query < end; query += TE_ATTENTION_KEYS) {
        block_ranges ranges;
        int queries = (int)(end - query < TE_ATTENTION_KEYS ? end - query : TE_ATTENTION_KEYS);
        find_ranges(&ranges, seq, query, queries, key, n);
        int tile = ranges.whole ? TE_ATTENTION_KEYS : T(few);
        for (int at = 0; at < queries; at += tile) {
            int rows = queries - at < tile ? queries - at : tile;
            T(forward_tile)(s, walk, query - first + at, rows, query + at, key, &ranges, at, v,
                            !finite && !ranges.whole);
        }
    }
}

/* Queries first … end against all keys that some of them sees. */
static void T(forward_walk)(T(forward_state) *s, attention_walk walk, int64_t first, int64_t end)
{
    const te_attention_seq *seq = s->seq;
    int64_t key = te_attention_first_key(seq, first, 0, seq->n_kv) & -TE_ATTENTION_KEYS;
    int64_t end_key = te_attention_end_key(seq, end - 1, 0, seq->n_kv);
    for (; key < end_key && !te_cpu_stopping(seq->exec); key += TE_ATTENTION_KEYS) {
        int64_t n = seq->n_kv - key < TE_ATTENTION_KEYS ? seq->n_kv - key : TE_ATTENTION_KEYS;
        T(forward_block)(s, walk, first, end, key, (int)n);
    }
}

/* The score beside those of keys in a row of this head. */
static REAL T(sink_of)(const te_attention *a, int64_t head)
{
    if (!te_view_present(&a->sinks)) return -(REAL)INFINITY;
    if (a->sinks.dtype == TE_F64) return (REAL)((const double *)a->sinks.data)[head];
    return (REAL)((const float *)a->sinks.data)[head];
}

/* The state of a task before its first walk. */
static void T(forward_open)(T(forward_state) *s, const te_attention *a, const te_attention_seq *seq, int64_t head,
                            int64_t first, int64_t end, void *scratch)
{
    T(forward_layout)(s, a, end - first, scratch);
    s->seq = seq;
    s->head = head;
    T(load_rows)(s->q, &a->q, seq->batch, head, seq->q_start + first, end - first, T(load_scale)(a));
    memset(s->out, 0, (size_t)((end - first) * s->dim_v) * sizeof(REAL));
    memset(s->sum, 0, (size_t)((end - first) * TE_ATTENTION_LANES) * sizeof(REAL));
    REAL sink = T(sink_of)(a, head);
    for (int64_t i = 0; i < end - first; i++) {
        s->top[i] = sink;
        if (sink != -(REAL)INFINITY) s->sum[i * TE_ATTENTION_LANES] = 1;
    }
}

/* Sums of weights to s->total, and lse from them. */
static void T(close_sums)(const T(forward_state) *s, int64_t first, int64_t end)
{
    const te_view *to = &s->a->lse;
    REAL *lse = s->sum; /* whose parts are joined by then */
    int64_t n = end - first;
    for (int64_t i = 0; i < n; i++) s->total[i] = T(join_lanes)(s->sum + i * TE_ATTENTION_LANES);
    if (!te_view_present(to)) return;
    for (int64_t i = 0; i < n; i++) {
        REAL whole = REAL_LOG(s->total[i]);
        lse[i] = s->total[i] == 0 ? -(REAL)INFINITY : s->top[i] + whole;
    }
    for (int64_t i = 0; i < n; i++) {
        void *at = lse_at(s->a, s->seq->batch, s->head, s->seq->q_start + first + i);
        if (to->dtype == TE_F64)
            *(double *)at = (double)lse[i];
        else
            *(float *)at = (float)lse[i];
    }
}

static void T(forward)(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t first, int64_t end,
                       void *scratch)
{
    T(forward_state) s;
    T(forward_open)(&s, a, seq, head, first, end, scratch);
    ENTER();
    T(forward_walk)(&s, WALK_ONCE, first, end);
    LEAVE();
    T(close_sums)(&s, first, end);
    for (int64_t i = 0; i < end - first; i++) {
        if (s.total[i] == 0) /* 0 times NaN may be among them */
            memset(s.out + i * s.dim_v, 0, (size_t)s.dim_v * sizeof(REAL));
        else
            s.total[i] = 1 / s.total[i];
    }
    T(store_tile)(&a->out, seq->batch, head, seq->q_start + first, end - first, s.out, s.dim_v, s.total, 1);
}
