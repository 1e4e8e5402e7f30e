/* attention_backward.h - dq, dk, dv (a template; see attention_loops.h).
 *
 * With S = scale q k^T + bias, P = exp(S - lse), Z the dropout factors (0 or 1 / (1 - p)), o = (P Z) v and
 * D = rowsum(do o):
 *
 *      dv = (P Z)^T do        dP = do v^T        dS = P (Z dP - D)        dq = scale dS k        dk = scale dS^T q
 *
 * The gradient of the bias is dS.
 *
 * A task visits its blocks of keys, and for each the blocks of queries that see it, which stay as they were loaded and
 * packed where a cache holds all of them. Where q is scaled when it is loaded, dk needs no further factor; dq gets it
 * when it is written.
 */

typedef struct T(backward_state) {
    const te_attention_grad *g;
    const te_attention_keys *keys;
    int64_t head, dim, dim_v;  /* padded */
    int64_t width, width_v;    /* of rows as loaded */
    REAL   *k, *v;             /* [keys, width], [keys, width_v] */
    REAL   *k_across, *v_across; /* [width, keys], [width_v, keys] */
    REAL   *q, *dout;          /* [queries, width], [queries, width_v], of the block at hand */
    REAL   *k_place, *q_place, *dout_place;             /* room for rows packed for the right side */
    const REAL *k_right, *q_right, *dout_right;         /* and where they are */
    REAL    *rooms;            /* for blocks of q and dout, with what is packed of them */
    int64_t  n_rooms;          /* one for every block of queries, or 1 */
    uint64_t loaded;           /* bits of those that hold a block of the head */
    REAL   *p, *ds;            /* [queries, keys] */
    REAL   *halves, *p_pairs, *ds_pairs;                /* room for them rounded */
    REAL   *lse, *d;           /* [n_q]; of one head */
    REAL   *dk, *dv;           /* keys from `base` on */
    int64_t base;
    REAL   *dq, *dq_sum;       /* [n_q, dim]: of the chunk at hand, of the chunks before */
} T(backward_state);

enum {
    T(most_rooms) = 64,         /* bits */
    T(kept_bytes) = 512 << 10   /* of a second-level cache */
};

/* Elements of a block of q and one of dout. */
static int64_t T(room_size)(const T(backward_state) *s)
{
    enum { BLOCK = TE_ATTENTION_KEYS };
    return BLOCK * (s->width + s->width_v) + T(right_size)(BLOCK, s->dim) + T(right_size)(BLOCK, s->dim_v);
}

/* Every block of keys meets most blocks of queries, so these stay where a cache holds all of them. */
static int64_t T(most_kept_queries)(const T(backward_state) *s)
{
    int64_t rooms = T(kept_bytes) / (T(room_size)(s) * (int64_t)sizeof(REAL));
    return (rooms < T(most_rooms) ? rooms : T(most_rooms)) * TE_ATTENTION_KEYS;
}

static int64_t T(rooms_for)(const T(backward_state) *s, int64_t queries)
{
    bool fit = queries <= T(most_kept_queries)(s);
    return fit && queries > 0 ? (queries + TE_ATTENTION_KEYS - 1) / TE_ATTENTION_KEYS : 1;
}

/* Makes room `index` that of the block at hand. */
static void T(take_room)(T(backward_state) *s, int64_t index)
{
    enum { BLOCK = TE_ATTENTION_KEYS };
    s->q = s->rooms + index * T(room_size)(s);
    s->dout = s->q + BLOCK * s->width;
    s->q_place = s->dout + BLOCK * s->width_v;
    s->dout_place = s->q_place + T(right_size)(BLOCK, s->dim);
}

static int64_t T(backward_layout)(T(backward_state) *s, const te_attention_grad *g, int64_t queries, int64_t keys,
                                  bool whole, REAL *base)
{
    const te_attention *a = &g->forward;
    s->g = g;
    s->dim = te_attention_pad(a->q.shape[3]);
    s->dim_v = te_attention_pad(a->v.shape[3]);
    queries = te_attention_pad(queries);
    keys = te_attention_pad(keys);
    s->width = T(rows_width)(a->q.shape[3]);
    s->width_v = T(rows_width)(a->v.shape[3]);
    enum { BLOCK = TE_ATTENTION_KEYS };
    int64_t at = 0;
    s->k = T(carve)(base, &at, BLOCK * s->width);
    s->v = T(carve)(base, &at, BLOCK * s->width_v);
    s->k_across = T(carve)(base, &at, BLOCK * s->width);
    s->v_across = T(carve)(base, &at, BLOCK * s->width_v);
    s->k_place = T(carve)(base, &at, T(right_size)(BLOCK, s->dim));
    s->n_rooms = T(rooms_for)(s, queries);
    s->rooms = T(carve)(base, &at, s->n_rooms * T(room_size)(s));
    if (base) T(take_room)(s, 0);
    s->p = T(carve)(base, &at, BLOCK * BLOCK);
    s->ds = T(carve)(base, &at, BLOCK * BLOCK);
    s->halves = T(carve)(base, &at, T(right_size)(BLOCK, BLOCK));
    s->p_pairs = T(carve)(base, &at, T(right_size)(BLOCK, BLOCK));
    s->ds_pairs = T(carve)(base, &at, T(right_size)(BLOCK, BLOCK));
    s->lse = T(carve)(base, &at, queries);
    s->d = T(carve)(base, &at, queries);
    s->dk = T(carve)(base, &at, keys * s->dim);
    s->dv = T(carve)(base, &at, keys * s->dim_v);
    s->dq = T(carve)(base, &at, whole ? queries * s->dim : 0);
    s->dq_sum = T(carve)(base, &at, whole ? queries * s->dim : 0);
    return at;
}

static size_t T(backward_bytes)(const te_attention_grad *g, int64_t queries, int64_t keys, bool whole)
{
    T(backward_state) s;
    int64_t most = T(backward_layout)(&s, g, queries, keys, whole, NULL), kept = T(most_kept_queries)(&s);
    int64_t shorter = queries > kept ? T(backward_layout)(&s, g, kept, keys, whole, NULL) : 0; /* other sequences */
    return (size_t)(most > shorter ? most : shorter) * sizeof(REAL);
}

static REAL T(dot_halves)(const uint16_t *x, const uint16_t *y, int64_t dim)
{
    _Alignas(64) REAL lane[16] = {0};
    int64_t           j = 0;
    for (; j + 16 <= dim; j += 16)
        _Pragma("omp simd") for (int l = 0; l < 16; l++) lane[l] +=
            (REAL)te_bf16_to_f32(x[j + l]) * (REAL)te_bf16_to_f32(y[j + l]);
    for (; j < dim; j++) lane[j % 16] += (REAL)te_bf16_to_f32(x[j]) * (REAL)te_bf16_to_f32(y[j]);
    return T(join_lanes)(lane);
}

/* D of rows first … end of do and o of bfloat16, which are read where they lie. */
static void T(dots_of_halves)(T(backward_state) *s, int64_t first, int64_t end)
{
    enum { AHEAD = 16, LINE = 64 };
    const te_view *dout = &s->g->dout, *out = &s->g->forward.out;
    const te_attention_seq *seq = &s->keys->seq;
    int64_t x_step, y_step, bytes = 2 * out->shape[3];
    const char *x = T(rows_at)(dout, seq->batch, s->head, seq->q_start + first, &x_step);
    const char *y = T(rows_at)(out, seq->batch, s->head, seq->q_start + first, &y_step);
    for (int64_t i = first; i < end; i++, x += x_step, y += y_step) {
        for (int64_t b = 0; b < bytes && i + AHEAD < end; b += LINE) {
            __builtin_prefetch(x + AHEAD * x_step + b);
            __builtin_prefetch(y + AHEAD * y_step + b);
        }
        s->d[i] = T(dot_halves)((const uint16_t *)x, (const uint16_t *)y, out->shape[3]);
    }
}

/* lse and D of the queries first … end of the head. */
static void T(prepare_head)(T(backward_state) *s, int64_t first, int64_t end)
{
    const te_attention *a = &s->g->forward;
    const te_attention_seq *seq = &s->keys->seq;
    for (int64_t i = first; i < end; i++) {
        const void *lse = lse_at(a, seq->batch, s->head, seq->q_start + i);
        s->lse[i] = a->lse.dtype == TE_F64 ? (REAL)*(const double *)lse : (REAL)*(const float *)lse;
    }
#ifndef PAIRS
    bool halves = s->g->dout.dtype == TE_BF16 && a->out.dtype == TE_BF16;
    for (int64_t i = first; i < end && !halves; i++) {
        T(load_tile)(s->dout, s->dim_v, &s->g->dout, seq->batch, s->head, seq->q_start + i, 1, 1);
        T(load_tile)(s->v, s->dim_v, &a->out, seq->batch, s->head, seq->q_start + i, 1, 1);
        _Alignas(64) REAL lane[16] = {0};
        for (int64_t j = 0; j < s->dim_v; j += 16)
            for (int l = 0; l < 16; l++) lane[l] += s->dout[j + l] * s->v[j + l];
        s->d[i] = T(join_lanes)(lane);
    }
    if (!halves) return;
#endif
    T(dots_of_halves)(s, first, end);
}

/* dS of one query, which is the gradient of its bias. Every task has queries and keys of its own. */
static void T(store_dbias)(const T(backward_state) *s, const REAL *ds, int64_t query, int64_t key, int low, int high)
{
    const te_attention_seq *seq = &s->keys->seq;
    const te_view *b = &s->g->dbias;
    REAL *to = (REAL *)b->data + seq->batch * b->stride[0] + s->head * b->stride[1] +
               (seq->q_start + query) * b->stride[2] + (seq->kv_start + key) * b->stride[3];
    for (int j = low; j < high; j++) to[j * b->stride[3]] = ds[j];
}

/* From scores in p and Z do v^T in ds to P in p and dS in ds, rows side by side (see exp_rows). Where a bias hides
 * scores, those of minus infinity have gradients of 0, whatever lse, do v^T and D are. */
ALWAYS_INLINE void T(weigh_rows)(const int rows, const bool hides, REAL *restrict p, REAL *restrict ds, int n,
                                 const REAL *lse, const REAL *d)
{
    enum { KEYS = TE_ATTENTION_KEYS };
    for (int j = 0; j < n / 16 * 16; j++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            REAL less = ds[r * KEYS + j] - d[r], score = p[r * KEYS + j], power = score - lse[r];
            if (hides) {
                power = score == -(REAL)INFINITY ? score : power;
                less = score == -(REAL)INFINITY ? 0 : less;
            }
            REAL weight = REAL_EXP(power);
            p[r * KEYS + j] = weight;
            ds[r * KEYS + j] = weight * less;
        }
}

/* From scores in p and do v^T in ds to P Z in p and dS in ds, columns key … key + n of a tile. */
static void T(weigh_tile)(const T(backward_state) *s, int rows, REAL *p, REAL *ds, int64_t query, int64_t key, int n)
{
    enum { KEYS = TE_ATTENTION_KEYS };
    const te_attention *a = &s->g->forward;
    const REAL *lse = s->lse + query, *d = s->d + query;
    bool drops = a->dropout > 0, hides = te_view_present(&a->bias);
    int r = 0; /* rows that hide scores go one by one, which takes as long here and is less code */
    for (; !drops && !hides && r + TOGETHER <= rows; r += TOGETHER)
        T(weigh_rows)(TOGETHER, false, p + r * KEYS, ds + r * KEYS, n, lse + r, d + r);
    for (; r < rows; r++) {
        float keep[KEYS];
        if (drops) dropout_row(a, &s->keys->seq, s->head, query + r, key, n, keep);
        if (drops) T(drop)(ds + r * KEYS, keep, n, a->dropout);
        T(weigh_rows)(1, hides, p + r * KEYS, ds + r * KEYS, n, lse + r, d + r);
        if (drops) T(drop)(p + r * KEYS, keep, n, a->dropout);
    }
}

/* Scores, P and dS of the block, tile by tile, and each tile's share of dq. */
static void T(backward_scores)(T(backward_state) *s, const block_ranges *ranges, int64_t query, int queries,
                               int64_t key, bool exact)
{
    enum { KEYS = TE_ATTENTION_KEYS };
    const te_attention *a = &s->g->forward;
    int step = exact ? 1 : ranges->whole ? KEYS : T(few);
    if (!ranges->whole || queries < KEYS) {
        T(clear_pairs)(s->p_pairs);
        T(clear_pairs)(s->ds_pairs);
    }
    for (int at = 0; at < queries; at += step) {
        int rows = queries - at < step ? queries - at : step;
        T(tile_range) range = T(range_of)(ranges->low + at, ranges->high + at, rows);
        if (range.low >= range.high) continue;
        REAL *p = s->p + at * KEYS, *ds = s->ds + at * KEYS;
        T(multiply_scores)(rows, p, range, s->q + at * s->width, s->k_across, a->q.shape[3]);
        T(multiply_scores)(rows, ds, range, s->dout + at * s->width_v, s->v_across, a->v.shape[3]);
        for (int r = 0; r < rows; r++) {
            T(scale_scores)(p + r * KEYS + range.column, range.columns, T(late_scale)(a));
            if (te_view_present(&a->bias))
                T(add_bias)(p + r * KEYS, a, &s->keys->seq, s->head, query + at + r, key, ranges->low[at + r],
                            ranges->high[at + r]);
        }
        T(weigh_tile)(s, rows, p + range.column, ds + range.column, query + at, key + range.column, range.columns);
        for (int r = 0; r < rows; r++) {
            int low = ranges->low[at + r], high = ranges->high[at + r];
            if (s->lse[query + at + r] == -(REAL)INFINITY) low = high = KEYS;
            T(fill_outside)(p + r * KEYS, range, low, high, 0);
            T(fill_outside)(ds + r * KEYS, range, low, high, 0);
            if (te_view_present(&s->g->dbias)) T(store_dbias)(s, ds + r * KEYS, query + at + r, key, low, high);
        }
        REAL *dq = s->dq + (query + at) * s->dim;
        if (exact) {
            T(add_exactly)(dq, s->dim, ds, 1, range.low, range.high, s->k_right);
        } else {
            T(round_weights)(rows, ds, s->halves, range);
            T(pair_weights)(s->p_pairs, at, p, rows, range);
            T(pair_weights)(s->ds_pairs, at, ds, rows, range);
            T(add_weighted)(rows, dq, s->dim, ds, s->halves, range, s->k_right);
        }
    }
}

/* The block's share of dk and dv, by tiles of keys: the queries that see some key of a tile are one range. */
static void T(backward_keys)(T(backward_state) *s, const block_ranges *ranges, int queries, REAL *dk, REAL *dv,
                             int keys, bool exact)
{
    enum { KEYS = TE_ATTENTION_KEYS };
    int step = exact ? 1 : ranges->whole ? KEYS : T(few);
    int first = 0; /* what a tile's keys are not seen by, those of later tiles are not either */
    for (int key = 0; key < keys; key += step) {
        int rows = keys - key < step ? keys - key : step, end = queries;
        while (first < end && (ranges->high[first] <= key || ranges->low[first] >= ranges->high[first])) first++;
        while (first < end && (ranges->low[end - 1] >= key + rows || ranges->low[end - 1] >= ranges->high[end - 1]))
            end--;
        if (first == end) continue;
        REAL *dk_row = dk + key * s->dim, *dv_row = dv + key * s->dim_v;
        if (exact) {
            T(add_exactly)(dv_row, s->dim_v, s->p + key, KEYS, first, end, s->dout_right);
            T(add_exactly)(dk_row, s->dim, s->ds + key, KEYS, first, end, s->q_right);
        } else {
            T(add_transposed)(rows, dv_row, s->dim_v, s->p, s->p_pairs, key, first, end, s->dout_right);
            T(add_transposed)(rows, dk_row, s->dim, s->ds, s->ds_pairs, key, first, end, s->q_right);
        }
    }
}

/* Loads a block of queries, unless it is there; one that sees nothing at all must add nothing, whatever stands in its
 * rows. */
static void T(load_queries)(T(backward_state) *s, int64_t query, int queries)
{
    const te_attention *a = &s->g->forward;
    const te_attention_seq *seq = &s->keys->seq;
    int64_t  room = s->n_rooms > 1 ? query / TE_ATTENTION_KEYS : 0;
    uint64_t bit = (uint64_t)1 << room;
    T(take_room)(s, room);
    bool there = s->n_rooms > 1 && (s->loaded & bit);
    s->loaded |= bit;
    s->q_right = T(right_of)(s->q_place, s->q);
    s->dout_right = T(right_of)(s->dout_place, s->dout);
    if (there) return;
    T(load_rows)(s->q, &a->q, seq->batch, s->head, seq->q_start + query, queries, T(load_scale)(a));
    T(load_rows)(s->dout, &s->g->dout, seq->batch, s->head, seq->q_start + query, queries, 1);
    for (int i = 0; i < queries; i++) {
        if (s->lse[query + i] != -(REAL)INFINITY) continue;
        memset(s->q + i * s->width, 0, (size_t)s->width * sizeof(REAL));
        memset(s->dout + i * s->width_v, 0, (size_t)s->width_v * sizeof(REAL));
    }
    T(pack_right)(s->q_place, s->q, s->dim, queries);
    T(pack_right)(s->dout_place, s->dout, s->dim_v, queries);
}

/* Keys key … key + n against all queries of the head that see them. */
static void T(backward_block)(T(backward_state) *s, int64_t key, int n)
{
    const te_attention *a = &s->g->forward;
    const te_attention_seq *seq = &s->keys->seq;
    T(load_rows)(s->k, &a->k, seq->batch, s->keys->kv_head, seq->kv_start + key, n, 1);
    T(load_rows)(s->v, &a->v, seq->batch, s->keys->kv_head, seq->kv_start + key, n, 1);
    T(transpose_tile)(s->k_across, s->k, s->width, n);
    T(transpose_tile)(s->v_across, s->v, s->width_v, n);
    s->k_right = T(right_of)(s->k_place, s->k);
    T(pack_right)(s->k_place, s->k, s->dim, n);
    bool keys_finite = T(tile_finite)(s->k, n * s->width);
    REAL *dk = s->dk + (key - s->base) * s->dim, *dv = s->dv + (key - s->base) * s->dim_v;
    int64_t query = te_attention_first_query(seq, key) & -TE_ATTENTION_KEYS, end = te_attention_end_query(seq, key + n);
    for (; query < end && !te_cpu_stopping(seq->exec); query += TE_ATTENTION_KEYS) {
        block_ranges ranges;
        int queries = (int)(seq->n_q - query < TE_ATTENTION_KEYS ? seq->n_q - query : TE_ATTENTION_KEYS);
        T(load_queries)(s, query, queries);
        find_ranges(&ranges, seq, query, queries, key, n);
        bool exact = !ranges.whole && !(keys_finite && T(tile_finite)(s->q, queries * s->width) &&
                                        T(tile_finite)(s->dout, queries * s->width_v));
        T(backward_scores)(s, &ranges, query, queries, key, exact);
        T(backward_keys)(s, &ranges, queries, dk, dv, n, exact);
    }
}

/* Keys chunk … chunk_end against the head: dk and dv are added to, dq of the chunk is made and goes to its part or sum.
 */
static void T(backward_chunk)(T(backward_state) *s, int64_t chunk, int64_t chunk_end)
{
    const te_attention_seq *seq = &s->keys->seq;
    int64_t low = te_attention_first_query(seq, chunk), high = te_attention_end_query(seq, chunk_end);
    if (low >= high) return;
    low &= -T(few); /* whole tiles are added to */
    high = te_attention_clamp((high + T(few) - 1) & -T(few), 0, seq->n_q);
    memset(s->dq + low * s->dim, 0, (size_t)((high - low) * s->dim) * sizeof(REAL));
    for (int64_t key = chunk; key < chunk_end; key += TE_ATTENTION_KEYS)
        T(backward_block)(s, key, (int)(chunk_end - key < TE_ATTENTION_KEYS ? chunk_end - key : TE_ATTENTION_KEYS));
    if (!s->keys->dq_part)
        for (int64_t i = low * s->dim; i < high * s->dim; i++) s->dq_sum[i] += s->dq[i];
}

/* All keys of the task against query head number `index` of the group. The first head of a group starts dk and dv, the
 * last one writes them; where it is the only one, memory for one chunk is enough. */
static void T(backward_head)(T(backward_state) *s, int64_t index, int64_t group)
{
    const te_attention_grad *g = s->g;
    const te_attention_keys *keys = s->keys;
    const te_attention_seq *seq = &keys->seq;
    int64_t first = te_attention_first_query(seq, keys->key_first) & -TE_ATTENTION_KEYS;
    s->head = keys->kv_head * group + index;
    s->loaded = 0;
    if (keys->dq_part) s->dq = (REAL *)keys->dq_part + index * seq->n_q * s->dim;
    T(prepare_head)(s, first, te_attention_end_query(seq, keys->key_end));
    if (!keys->dq_part) memset(s->dq_sum, 0, (size_t)(seq->n_q * s->dim) * sizeof(REAL));
    for (int64_t chunk = keys->key_first; chunk < keys->key_end; chunk += keys->chunk) {
        int64_t end = chunk + keys->chunk < keys->key_end ? chunk + keys->chunk : keys->key_end, n = end - chunk;
        if (group == 1) s->base = chunk;
        REAL *dk = s->dk + (chunk - s->base) * s->dim, *dv = s->dv + (chunk - s->base) * s->dim_v;
        if (index == 0) memset(dk, 0, (size_t)(n * s->dim) * sizeof(REAL));
        if (index == 0) memset(dv, 0, (size_t)(n * s->dim_v) * sizeof(REAL));
        T(backward_chunk)(s, chunk, end);
        if (index + 1 < group) continue;
        T(store_tile)(&g->dk, seq->batch, keys->kv_head, seq->kv_start + chunk, n, dk, s->dim,
                      &(REAL){T(late_scale)(&g->forward)}, 0);
        T(store_tile)(&g->dv, seq->batch, keys->kv_head, seq->kv_start + chunk, n, dv, s->dim_v, &(REAL){1}, 0);
    }
    if (!keys->dq_part)
        T(store_tile)(&g->dq, seq->batch, s->head, seq->q_start, seq->n_q, s->dq_sum, s->dim,
                      &(REAL){(REAL)g->forward.scale}, 0);
}

static void T(zero_keys)(const te_view *v, const te_attention_keys *keys)
{
    static const REAL zeros[TE_ATTENTION_MAX_DIM];
    for (int64_t i = keys->key_first; i < keys->key_end; i++)
        T(store_tile)(v, keys->seq.batch, keys->kv_head, keys->seq.kv_start + i, 1, zeros, 0, &(REAL){1}, 0);
}

static void T(backward)(const te_attention_grad *g, const te_attention_keys *keys, void *scratch)
{
    T(backward_state) s;
    int64_t group = g->forward.q.shape[1] / g->forward.k.shape[1];
    T(backward_layout)(&s, g, keys->seq.n_q, group == 1 ? keys->chunk : keys->key_end - keys->key_first,
                       !keys->dq_part, scratch);
    s.keys = keys;
    s.base = keys->key_first;
    ENTER();
    for (int64_t i = 0; i < group; i++) T(backward_head)(&s, i, group);
    LEAVE();
    if (group > 0) return;
    T(zero_keys)(&g->dk, keys);
    T(zero_keys)(&g->dv, keys);
}

static void T(sum_dq)(const te_attention_grad *g, const te_attention_seq *seq, int64_t head, int64_t first, int64_t end,
                      int64_t chunk, const void *parts, int64_t part_stride)
{
    REAL sum[TE_ATTENTION_MAX_DIM];
    int64_t dim = te_attention_pad(g->forward.q.shape[3]);
    for (int64_t i = first; i < end; i++) {
        memset(sum, 0, (size_t)dim * sizeof(REAL));
        for (int64_t key = 0, part = 0; key < seq->n_kv; key += chunk, part++) {
            int64_t key_end = key + chunk < seq->n_kv ? key + chunk : seq->n_kv;
            if (i < te_attention_first_query(seq, key) || i >= te_attention_end_query(seq, key_end)) continue;
            const REAL *row = (const REAL *)parts + part * part_stride + i * dim;
            for (int64_t d = 0; d < dim; d++) sum[d] += row[d];
        }
        T(store_tile)(&g->dq, seq->batch, head, seq->q_start + i, 1, sum, dim,
                      &(REAL){(REAL)g->forward.scale}, 0);
    }
}
