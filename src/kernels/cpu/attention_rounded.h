/* attention_rounded.h - forward with probabilities rounded to E4M3 (a template; see attention_loops.h).
 *
 * What is rounded is 448 times the probability, not a weight relative to the largest score so far: the result must not
 * depend on where the blocks of keys begin. So the maximum and the sum of a row are known before anything is rounded:
 * one walk over the keys finds them, a second weighs the values. Everything else is as in attention_forward.h.
 */

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
    T(forward_open)(&s, a, seq, head, first, end, scratch);
    ENTER();
    T(forward_walk)(&s, WALK_SUMS, first, end);
    T(close_sums)(&s, first, end);
    for (int64_t i = 0; i < end - first; i++) s.total[i] = s.total[i] == 0 ? 0 : TE_ATTENTION_ONE / s.total[i];
    T(forward_walk)(&s, WALK_ROUNDED, first, end);
    LEAVE();
    if (a->out.dtype == TE_F8E4M3)
        T(store_codes)(&s, first, end, times);
    else
        T(store_tile)(&a->out, seq->batch, head, seq->q_start + first, end - first, s.out, s.dim_v, &(REAL){times}, 0);
}
