/* move.cu - elements that are only moved: many copies at once, rows or columns by index, turned round, cut to a
 * triangle. te_a is the unsigned type of a unit's elements, of which it has TE_VECTOR.
 */

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

/* --- gather of lines --------------------------------------------------------------------------------------------- */

/* Of `run` elements side by side for each index; 1 << a.lanes_bits threads, neighbours, take a line. */
extern "C" __global__ void __launch_bounds__(256) te_gather_rows(const __grid_constant__ te_lines_args a)
{
    enum { AHEAD = 4 };
    int     bits = (int)a.lanes_bits, lanes = 1 << bits, across = (int)threadIdx.x & (lanes - 1);
    int64_t rows = blockDim.x >> bits, units = a.run / TE_VECTOR, ndim = a.index.ndim;
    for (int64_t i = blockIdx.x * rows + (threadIdx.x >> bits); i < a.n; i += gridDim.x * rows) {
        int64_t id = te_whole_at(a.index, a.index_wide, te_offset(a.index, ndim, i));
        if (id < 0 || id >= a.whole.shape[a.dim]) {
            if (across == 0) te_report_id(a.bound, i * a.run, id);
            continue;
        }
        const te_a *from = (const te_a *)a.whole.data + id * a.whole.stride[a.dim] +
            te_offset_without(a.index.shape, a.whole.stride, ndim, i, a.dim);
        te_a *to = (te_a *)a.part.data + te_offset(a.part, ndim, i);
        for (int64_t u = across; u < units; u += AHEAD * lanes) {
            te_unit<te_a, TE_VECTOR> x[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (u + k * lanes < units) x[k] = te_unit_load<te_a, TE_VECTOR>(from + (u + k * lanes) * TE_VECTOR);
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (u + k * lanes < units) te_unit_store<te_a, TE_VECTOR>(to + (u + k * lanes) * TE_VECTOR, x[k]);
        }
    }
}

/* --- scatter of lines -------------------------------------------------------------------------------------------- */

/* Scratch memory has a number for each position along dim: of the last index that names it, -1 for none. */
extern "C" __global__ void __launch_bounds__(256) te_scatter_clear(const __grid_constant__ te_lines_args a)
{
    for (int64_t i = TE_FIRST; i < a.whole.shape[a.dim]; i += TE_STEP) ((long long *)a.bound.scratch)[i] = -1;
}

extern "C" __global__ void __launch_bounds__(256) te_scatter_claim(const __grid_constant__ te_lines_args a)
{
    for (int64_t i = TE_FIRST; i < a.index.shape[a.dim]; i += TE_STEP) {
        int64_t id = te_whole_at(a.index, a.index_wide, i * a.index.stride[a.dim]);
        if (id < 0 || id >= a.whole.shape[a.dim]) te_report_id(a.bound, i * a.run * a.inner, id);
        else atomicMax((long long *)a.bound.scratch + id, (long long)i);
    }
}

/* As te_gather_rows, the other way. */
extern "C" __global__ void __launch_bounds__(256) te_scatter_rows(const __grid_constant__ te_lines_args a)
{
    enum { AHEAD = 4 };
    int     bits = (int)a.lanes_bits, lanes = 1 << bits, across = (int)threadIdx.x & (lanes - 1);
    int64_t rows = blockDim.x >> bits, units = a.run / TE_VECTOR, ndim = a.index.ndim, extent = a.index.shape[a.dim];
    for (int64_t i = blockIdx.x * rows + (threadIdx.x >> bits); i < a.n; i += gridDim.x * rows) {
        int64_t line = te_quotient(i, a.inner), at = line - te_quotient(line, extent) * extent;
        int64_t id = te_whole_at(a.index, a.index_wide, at * a.index.stride[a.dim]);
        if (id < 0 || id >= a.whole.shape[a.dim] || ((const long long *)a.bound.scratch)[id] != at) continue;
        const te_a *from = (const te_a *)a.part.data + te_offset(a.part, ndim, i);
        te_a       *to = (te_a *)a.whole.data + id * a.whole.stride[a.dim] +
            te_offset_without(a.index.shape, a.whole.stride, ndim, i, a.dim);
        for (int64_t u = across; u < units; u += AHEAD * lanes) {
            te_unit<te_a, TE_VECTOR> x[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (u + k * lanes < units) x[k] = te_unit_load<te_a, TE_VECTOR>(from + (u + k * lanes) * TE_VECTOR);
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (u + k * lanes < units) te_unit_store<te_a, TE_VECTOR>(to + (u + k * lanes) * TE_VECTOR, x[k]);
        }
    }
}

/* --- gather of columns ------------------------------------------------------------------------------------------- */

/* The same elements of every row: each row of `whole` comes to shared memory in one piece, since its elements are
 * wanted in any order, and the block's indices stay in registers for all of its rows. */
extern "C" __global__ void __launch_bounds__(512) te_gather_columns(const __grid_constant__ te_lines_args a)
{
    enum { UNITS = TE_COLUMN_IDS / TE_VECTOR };
    TE_DYNAMIC_SHARED(te_a, line);
    int64_t ndim = a.index.ndim - 1, bound = a.whole.shape[ndim];
    int64_t base = (int64_t)blockIdx.y * (TE_COLUMN_IDS * TE_COLUMN_THREADS) + threadIdx.x * TE_VECTOR;
    int     id[UNITS][TE_VECTOR], outside = 0; /* bit u: unit u is not whole */
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int v = 0; v < TE_VECTOR; v++) {
            int64_t i = base + u * (TE_COLUMN_THREADS * TE_VECTOR) + v, at = -1;
            if (i < a.run) {
                at = te_whole_at(a.index, a.index_wide, i * a.index.stride[ndim]);
                if (at < 0 || at >= bound) {
                    te_report_id(a.bound, i, at);
                    at = -1;
                }
            }
            id[u][v] = (int)at;
            outside |= at < 0 ? 1 << u : 0;
        }
    for (int64_t row = blockIdx.x; row < a.n; row += gridDim.x) {
        const te_a *from =
            (const te_a *)a.whole.data + te_offset_without(a.index.shape, a.whole.stride, ndim, row, -1);
        te_a *to = (te_a *)a.part.data + te_offset(a.part, ndim, row) + base;
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < (int)bound / TE_VECTOR; i += TE_COLUMN_THREADS)
            te_unit_store<te_a, TE_VECTOR>(line + i * TE_VECTOR, te_unit_load<te_a, TE_VECTOR>(from + i * TE_VECTOR));
        for (int i = (int)bound / TE_VECTOR * TE_VECTOR + threadIdx.x; i < (int)bound; i += TE_COLUMN_THREADS)
            line[i] = from[i];
        __syncthreads();
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            te_a *unit = to + u * (TE_COLUMN_THREADS * TE_VECTOR);
            if (!(outside >> u & 1)) {
                te_unit<te_a, TE_VECTOR> x;
#pragma unroll
                for (int v = 0; v < TE_VECTOR; v++) x.e[v] = line[id[u][v]];
                te_unit_store<te_a, TE_VECTOR>(unit, x);
            } else {
#pragma unroll
                for (int v = 0; v < TE_VECTOR; v++)
                    if (id[u][v] >= 0) unit[v] = line[id[u][v]];
            }
        }
    }
}

/* --- turned round ------------------------------------------------------------------------------------------------ */

/* Offsets of unit u in both views, whose last dimension counts units. */
static __device__ inline void te_move_offsets(const te_move_args &a, int64_t u, int64_t *to, int64_t *from)
{
    int64_t i = a.dst.ndim - 1;
    *to = *from = 0;
#pragma unroll 1
    for (; i > 0; i--) {
        int64_t rest = te_quotient(u, a.dst.shape[i]), at = u - rest * a.dst.shape[i];
        *to += at * a.dst.stride[i];
        *from += at * a.src.stride[i];
        u = rest;
    }
    *to += u * a.dst.stride[0];
    *from += u * a.src.stride[0];
}

/* A copy from memory that is walked backwards along some dimensions; a.back: within units too. */
extern "C" __global__ void __launch_bounds__(256) te_turn(const __grid_constant__ te_move_args a)
{
    int64_t first = (int64_t)blockIdx.x * (TE_COPY_THREADS * TE_COPY_EACH) + threadIdx.x, to[TE_COPY_EACH], from;
    te_unit<te_a, TE_VECTOR> x[TE_COPY_EACH];
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++) {
        if (first + k * TE_COPY_THREADS >= a.n) break;
        te_move_offsets(a, first + k * TE_COPY_THREADS, &to[k], &from);
        x[k] = te_unit_load<te_a, TE_VECTOR>((const te_a *)a.src.data + from);
    }
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++) {
        if (first + k * TE_COPY_THREADS >= a.n) break;
        te_unit<te_a, TE_VECTOR> y;
#pragma unroll
        for (int v = 0; v < TE_VECTOR; v++) y.e[v] = a.back ? x[k].e[TE_VECTOR - 1 - v] : x[k].e[v];
        te_unit_store<te_a, TE_VECTOR>((te_a *)a.dst.data + to[k], y);
    }
}

/* --- triangles --------------------------------------------------------------------------------------------------- */

/* See te_backend.triangle. Zeros are not read. */
extern "C" __global__ void __launch_bounds__(256) te_triangle(const __grid_constant__ te_move_args a)
{
    int64_t first = (int64_t)blockIdx.x * (TE_COPY_THREADS * TE_COPY_EACH) + threadIdx.x, last = a.dst.ndim - 1;
    int64_t at[TE_COPY_EACH], to[TE_COPY_EACH], from; /* at: how far the unit's first column is from the diagonal */
    te_unit<te_a, TE_VECTOR> x[TE_COPY_EACH];
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++) {
        int64_t u = first + k * TE_COPY_THREADS;
        if (u >= a.n) break;
        int64_t row = te_quotient(u, a.dst.shape[last]), column = u - row * a.dst.shape[last];
        row -= te_quotient(row, a.dst.shape[last - 1]) * a.dst.shape[last - 1];
        at[k] = column * TE_VECTOR - row - a.diagonal;
        te_move_offsets(a, u, &to[k], &from);
        if (a.upper ? at[k] + TE_VECTOR > 0 : at[k] <= 0)
            x[k] = te_unit_load<te_a, TE_VECTOR>((const te_a *)a.src.data + from);
    }
#pragma unroll
    for (int k = 0; k < TE_COPY_EACH; k++) {
        if (first + k * TE_COPY_THREADS >= a.n) break;
        te_unit<te_a, TE_VECTOR> y;
#pragma unroll
        for (int v = 0; v < TE_VECTOR; v++)
            y.e[v] = (a.upper ? at[k] + v >= 0 : at[k] + v <= 0) ? x[k].e[v] : (te_a)0;
        te_unit_store<te_a, TE_VECTOR>((te_a *)a.dst.data + to[k], y);
    }
}
