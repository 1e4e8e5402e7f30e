/* move.cu - elements that are only moved: many copies at once. te_a is an unsigned type of a unit's elements, of which
 * it has TE_VECTOR.
 */

/* x / by; most numbers fit 32 bits, whose division takes a quarter of the instructions. */
TE_HD static inline int64_t te_quotient(int64_t x, int64_t by)
{
    if (((uint64_t)x | (uint64_t)by) >> 32 == 0) return (int64_t)((uint32_t)x / (uint32_t)by);
    return x / by;
}

/* --- many copies ------------------------------------------------------------------------------------------------- */

/* A block has TE_COPY_EACH units a thread of one piece. */
extern "C" __global__ void __launch_bounds__(256) te_copy_pieces(const __grid_constant__ te_copy_args a)
{
    int low = 0, high = (int)a.n;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (a.piece[middle].first <= (int64_t)blockIdx.x) low = middle;
        else high = middle;
    }
    int64_t run = a.piece[low].run, units = a.piece[low].units;
    int64_t first = ((int64_t)blockIdx.x - a.piece[low].first) * (TE_COPY_THREADS * TE_COPY_EACH) + threadIdx.x;
    const te_a *from = (const te_a *)a.piece[low].src;
    te_a       *to = (te_a *)a.piece[low].dst;
    int64_t     src_pitch = a.piece[low].src_pitch, dst_pitch = a.piece[low].dst_pitch, at[TE_COPY_EACH];
    te_unit<te_a, TE_VECTOR> x[TE_COPY_EACH];
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++) {
        int64_t u = first + k * TE_COPY_THREADS;
        if (u >= units) break;
        int64_t row = te_quotient(u, run), column = u - row * run;
        at[k] = row * dst_pitch + column;
        x[k] = te_unit_load<te_a, TE_VECTOR>(from + (row * src_pitch + column) * TE_VECTOR);
    }
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++)
        if (first + k * TE_COPY_THREADS < units) te_unit_store<te_a, TE_VECTOR>(to + at[k] * TE_VECTOR, x[k]);
}

/* Pieces of equal short rows that alternate in the result, as of a stack along the last dimension: a thread makes a
 * unit of it, so that no sector is written in parts. */
extern "C" __global__ void __launch_bounds__(256) te_copy_mixed(const __grid_constant__ te_copy_args a)
{
    __shared__ const te_a *from[TE_COPY_PIECES];
    __shared__ int64_t     pitch[TE_COPY_PIECES];
    if (threadIdx.x < a.n) {
        from[threadIdx.x] = (const te_a *)a.piece[threadIdx.x].src;
        pitch[threadIdx.x] = a.piece[threadIdx.x].src_pitch;
    }
    __syncthreads();
    int64_t run = a.piece[0].run, all = a.n * run, end = a.n * a.piece[0].units;
    te_a   *to = (te_a *)a.piece[0].dst;
    for (int64_t e = TE_FIRST * TE_VECTOR; e < end; e += TE_STEP * TE_VECTOR) {
        int64_t row = te_quotient(e, all), rest = e - row * all, k = te_quotient(rest, run), column = rest - k * run;
        int     n = end - e < TE_VECTOR ? (int)(end - e) : TE_VECTOR;
        te_unit<te_a, TE_VECTOR> x;
#pragma unroll
        for (int v = 0; v < TE_VECTOR; v++) {
            if (v >= n) break;
            x.e[v] = from[k][row * pitch[k] + column];
            if (++column < run) continue;
            column = 0;
            if (++k < a.n) continue;
            k = 0;
            row++;
        }
        if (n == TE_VECTOR) te_unit_store<te_a, TE_VECTOR>(to + e, x);
        else te_unit_scatter<te_a, TE_VECTOR>(to + e, 1, n, x);
    }
}
