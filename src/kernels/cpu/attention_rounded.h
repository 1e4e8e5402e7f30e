/* attention_rounded.h - forward with probabilities rounded to E4M3 (a template; see attention_loops.h).
 *
 * What is rounded is 448 times the probability, not a weight relative to the largest score so far: the result must not
 * depend on where the blocks of keys begin. So the maximum and the sum of a row are known before anything is rounded: one walk
 * over the keys finds them, a second weighs the values. Everything else is as in attention_forward.h.
 */

/* p[j] = exp(p[j] - top) times, to the nearest E4M3. Adding a number whose last place is that of E4M3 rounds, ties to
 * even; below 2^-6, where E4M3 is subnormal, its last place is fixed. */
static void T(round_row)(REAL *p, int n, REAL top, REAL times)
{
    for (int j = 0; j < n; j++) {
        float x = (float)(REAL_EXP(p[j] - top) * times);
        uint32_t exponent = te_f32_bits(x) & 0x7f800000u, least = 0x3c800000u;
        float place = te_f32_from_bits((exponent > least ? exponent : least) + (20u << 23)) * 1.5f;
        p[j] = (REAL)((x + place) - place);
    }
}

/* One tile of queries against one block of keys; v NULL: the first walk. s->total: what probabilities are made with. */
static void T(rounded_tile)(T(forward_state) *s, int64_t row, int rows, int64_t query, int64_t key,
                            const block_ranges *ranges, int at, const REAL *v, bool exact)
{
    T(tile_range) range = T(range_of)(ranges->low + at, ranges->high + at, rows);
    if (range.low >= range.high) return;
    REAL *scores = s->scores;
    float keep[TE_ATTENTION_KEYS];
    T(multiply_scores)(rows, scores, range, s->q + row * s->width, s->k_across, s->a->q.shape[3]);
    for (int r = 0; r < rows; r++) {
        REAL *p = scores + r * TE_ATTENTION_KEYS, top = s->top[row + r];
        int low = ranges->low[at + r], high = ranges->high[at + r];
        T(scale_scores)(p + range.column, range.columns, T(late_scale)(s->a));
        if (te_view_present(&s->a->bias)) T(add_bias)(p, s->a, s->seq, s->head, query + r, key, low, high);
        T(fill_outside)(p, range, low, high, -(REAL)INFINITY);
        if (!v) {
            T(softmax_row)(s, p + range.column, range.columns, row + r);
            continue;
        }
        T(round_row)(p + range.column, range.columns, top == -(REAL)INFINITY ? 0 : top, s->total[row + r]);
        if (s->a->dropout > 0) { /* what remains is scaled up at the end */
            dropout_row(s->a, s->seq, s->head, query + r, key + range.column, range.columns, keep);
            T(drop)(p + range.column, keep, range.columns, 0);
        }
        if (exact) T(add_exactly)(s->out + (row + r) * s->dim_v, s->dim_v, p, 1, low, high, v);
    }
    if (v && !exact) T(add_weighted)(rows, s->out + row * s->dim_v, s->dim_v, scores, s->halves, range, v);
}

/* All queries of the task against keys key … key + n of the sequence. */
static void T(rounded_block)(T(forward_state) *s, int64_t first, int64_t end, int64_t key, int n, bool weigh)
{
    const te_attention *a = s->a;
    const te_attention_seq *seq = s->seq;
    int64_t kv_head = s->head / (a->q.shape[1] / a->k.shape[1]);
    const REAL *v = NULL;
    bool finite = true;
    T(load_rows)(s->k, &a->k, seq->batch, kv_head, seq->kv_start + key, n, 1);
    T(transpose_tile)(s->k_across, s->k, s->width, n);
    if (weigh) {
        T(load_rows)(s->v, &a->v, seq->batch, kv_head, seq->kv_start + key, n, 1);
        finite = T(tile_finite)(s->v, n * s->width_v);
        v = T(pack_right)(s->v_place, s->v, s->dim_v, n);
    }
    for (int64_t query = first; query < end; query += TE_ATTENTION_KEYS) {
        block_ranges ranges;
        int queries = (int)(end - query < TE_ATTENTION_KEYS ? end - query : TE_ATTENTION_KEYS);
        find_ranges(&ranges, seq, query, queries, key, n);
        int tile = ranges.whole ? TE_ATTENTION_KEYS : TE_ATTENTION_TILE;
        for (int at = 0; at < queries; at += tile) {
            int rows = queries - at < tile ? queries - at : tile;
            T(rounded_tile)(s, query - first + at, rows, query + at, key, &ranges, at, v, !finite && !ranges.whole);
        }
    }
}

static void T(walk_rounded)(T(forward_state) *s, int64_t first, int64_t end, bool weigh)
{
    const te_attention_seq *seq = s->seq;
    int64_t key = te_attention_first_key(seq, first, 0, seq->n_kv) & -TE_ATTENTION_KEYS;
    int64_t end_key = te_attention_end_key(seq, end - 1, 0, seq->n_kv);
    for (; key < end_key && !te_cpu_stopping(seq->exec); key += TE_ATTENTION_KEYS) {
        int64_t n = seq->n_kv - key < TE_ATTENTION_KEYS ? seq->n_kv - key : TE_ATTENTION_KEYS;
        T(rounded_block)(s, first, end, key, (int)n, weigh);
    }
}

/* Writes lse; what exp(score - maximum) is multiplied by takes the place of the sums. */
static void T(close_sums)(const T(forward_state) *s, int64_t first, int64_t end)
{
    const te_attention *a = s->a;
    for (int64_t i = 0; i < end - first; i++) {
        VECTOR sum = V_LOAD(s->sum + i * TE_ATTENTION_LANES);
        for (int l = VLEN; l < TE_ATTENTION_LANES; l += VLEN) sum = sum + V_LOAD(s->sum + i * TE_ATTENTION_LANES + l);
        REAL total = V_SUM(sum);
        if (te_view_present(&a->lse)) {
            void *to = lse_at(a, s->seq->batch, s->head, s->seq->q_start + first + i);
            REAL lse = total == 0 ? -(REAL)INFINITY : s->top[i] + REAL_LOG(total);
            if (a->lse.dtype == TE_F64)
                *(double *)to = (double)lse;
            else
                *(float *)to = (float)lse;
        }
        s->total[i] = total == 0 ? 0 : TE_ATTENTION_ONE / total;
    }
}

/* Rows first … end of the result as E4M3. */
static void T(store_codes)(const T(forward_state) *s, int64_t first, int64_t end, float times)
{
    const te_view *v = &s->a->out;
    for (int64_t i = 0; i < end - first; i++) {
        uint8_t *row = (uint8_t *)v->data + s->seq->batch * v->stride[0] + s->head * v->stride[1] +
                       (s->seq->q_start + first + i) * v->stride[2];
        const REAL *sum = s->out + i * s->dim_v;
        for (int64_t d = 0; d < v->shape[3]; d++) row[d] = te_f32_to_f8e4m3((float)sum[d] * times);
    }
}

static void T(forward_rounded)(const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t first,
                               int64_t end, float times, void *scratch)
{
    T(forward_state) s;
    T(forward_layout)(&s, a, end - first, scratch);
    s.seq = seq;
    s.head = head;
    T(load_rows)(s.q, &a->q, seq->batch, head, seq->q_start + first, end - first, T(load_scale)(a));
    memset(s.out, 0, (size_t)((end - first) * s.dim_v) * sizeof(REAL));
    memset(s.sum, 0, (size_t)((end - first) * TE_ATTENTION_LANES) * sizeof(REAL));
    for (int64_t i = 0; i < end - first; i++) s.top[i] = -(REAL)INFINITY;
    T(walk_rounded)(&s, first, end, false);
    T(close_sums)(&s, first, end);
    T(walk_rounded)(&s, first, end, true);
    if (a->out.dtype == TE_F8E4M3)
        T(store_codes)(&s, first, end, times);
    else
        T(store_tile)(&a->out, seq->batch, head, seq->q_start + first, end - first, s.out, s.dim_v,
                      times);
}
