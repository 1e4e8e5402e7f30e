/* quantize.cu - matrices to quantized matrices and back, by the tiles of quantize_tile.cu. te_a is the source's
 * type. */

/* --- there ------------------------------------------------------------------------------------------------------- */

/* Whether the kernels that follow make the bytes, by one thread; what stays counts all the same. */
static __device__ bool te_decide(const te_quantize_args &a)
{
    float now = a.given ? *a.given : 1.0f;
    bool  make = a.force || (a.stale && *a.stale != 0) || te_f32_bits(now) != te_f32_bits(a.kept[0]);
    const float *amax = a.side[0].amax ? a.side[0].amax : a.side[1].amax;
    a.kept[0] = now;
    a.kept[1] = make;
    if (!make && a.seen && amax) te_raise(a.seen, *amax);
    return make;
}

static __device__ bool te_stays(const te_quantize_args &a) { return a.kept && a.kept[1] == 0; }

extern "C" __global__ void __launch_bounds__(256) te_quantize_clear(const __grid_constant__ te_quantize_args a)
{
    if (a.kept && TE_FIRST == 0 && !te_decide(a)) return;
    if (TE_FIRST < 2) te_amaxes(a)[TE_FIRST] = 0;
    for (int64_t i = TE_FIRST; i < a.rows && a.row_scaled && a.side[0].amax; i += TE_STEP) a.side[0].amax[i] = 0;
    for (int s = 0; s < 2 && a.needs_history && TE_FIRST == 0; s++)
        if (a.side[s].amax) *a.side[s].amax = 0;
}

extern "C" __global__ void __launch_bounds__(256) te_quantize_measure(const __grid_constant__ te_quantize_args a)
{
    TE_DYNAMIC_SHARED(char, shared);
    if (te_stays(a)) return;
    for (int64_t t = blockIdx.x; t < te_tile_count(a); t += gridDim.x) {
        te_tile x = te_tile_of(a, shared, t);
        te_tile_load(a, x);
        te_measure_tile(a, x);
    }
}

extern "C" __global__ void __launch_bounds__(256) te_quantize(const __grid_constant__ te_quantize_args a)
{
    TE_DYNAMIC_SHARED(char, shared);
    if (te_stays(a)) return;
    for (int64_t t = blockIdx.x; t < te_tile_count(a); t += gridDim.x) {
        te_tile x = te_tile_of(a, shared, t);
        te_tile_load(a, x);
        te_quantize_tile(a, x);
    }
    for (int s = 0; s < 2 && TE_FIRST == 0; s++) te_put_whole(a, s);
}

/* --- back -------------------------------------------------------------------------------------------------------- */

static __device__ float te_value_of(const te_quantize_args &a, const te_quantize_place &p, int64_t row, int64_t col)
{
    uint8_t code = a.element == TE_E2M1 ? (uint8_t)(p.data[row * p.row_stride + col / 2] >> (col % 2 * 4) & 15)
                                        : p.data[row * p.row_stride + col * p.col_stride];
    float x = a.element == TE_E4M3   ? te_f8e4m3_to_f32(code)
              : a.element == TE_E5M2 ? te_f8e5m2_to_f32(code)
                                     : te_e2m1_to_f32(code);
    int64_t at = a.block_rows ? (a.replicated ? row : row / a.block_rows) * p.scale_row_stride +
                                    col / a.block_cols * p.scale_col_stride
                              : 0;
    if (a.scale == TE_SCALE_F32) return x * ((const float *)p.scale_inv)[at];
    uint8_t factor = ((const uint8_t *)p.scale_inv)[at];
    if (a.scale == TE_SCALE_E8M0) return x * te_e8m0_to_f32(factor);
    return x * te_f8e4m3_to_f32(factor) * te_two_level_decode(p.amax[row * p.amax_stride], (float)a.scale_max);
}

extern "C" __global__ void __launch_bounds__(256) te_dequantize(const __grid_constant__ te_quantize_args a)
{
    TE_DYNAMIC_SHARED(float, values);
    const te_quantize_place &p = a.side[a.from];
    for (int64_t t = blockIdx.x; t < te_tile_count(a); t += gridDim.x) {
        te_tile x = te_tile_of(a, (char *)values, t);
        for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
            int     line = p.col_stride == 1 ? i / TE_SQUARE : i % TE_SQUARE;
            int     place = p.col_stride == 1 ? i % TE_SQUARE : i / TE_SQUARE;
            int64_t row = (a.from ? x.col : x.row) + line, col = (a.from ? x.row : x.col) + place;
            values[a.from ? place * TE_PITCH + line : line * TE_PITCH + place] =
                row < p.rows && col < p.cols ? te_value_of(a, p, row, col) : 0.0f;
        }
        __syncthreads();
        for (int u = threadIdx.x; u < TE_SQUARE * 8 && a.from && a.hadamard; u += TE_QUANTIZE_THREADS) {
            float *at = values + u / TE_SQUARE * 16 * TE_PITCH + u % TE_SQUARE, v[16];
            for (int k = 0; k < 16; k++) v[k] = at[k * TE_PITCH];
            te_hadamard16(v);
            te_hadamard_signs(v);
            for (int k = 0; k < 16; k++) at[k * TE_PITCH] = v[k];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
            int64_t row = x.row + i / TE_SQUARE, col = x.col + i % TE_SQUARE;
            if (row < a.rows && col < a.cols)
                ((te_a *)a.source)[row * a.source_stride + col] =
                    te_as_a(values[i / TE_SQUARE * TE_PITCH + i % TE_SQUARE]);
        }
        __syncthreads();
    }
}

/* --- operands of products ----------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(256) te_decode(const __grid_constant__ te_decode_args a)
{
    for (int64_t u = TE_FIRST; u < a.rows * a.cols; u += TE_STEP) { /* neighbours in memory are neighbours here */
        bool    down = a.to_stride[0] == 1 && a.rows > 1;
        int64_t i = down ? u % a.rows : u / a.cols, j = down ? u / a.rows : u % a.cols;
        int64_t at = i * a.stride[0] + j * a.stride[1], factor = 0;
        uint8_t code = a.element == TE_E2M1 ? (uint8_t)(a.data[at / 2] >> (at % 2 * 4) & 15) : a.data[at];
        float x = a.element == TE_E4M3   ? te_f8e4m3_to_f32(code)
                  : a.element == TE_E5M2 ? te_f8e5m2_to_f32(code)
                                         : te_e2m1_to_f32(code);
        if (a.block[0]) factor = i / a.block[0] * a.scale_stride[0] + j / a.block[1] * a.scale_stride[1];
        if (a.scale == TE_SCALE_E8M0) {
            x *= te_e8m0_to_f32(((const uint8_t *)a.scale_inv)[factor]);
        } else if (a.scale == TE_SCALE_E4M3) {
            x *= te_f8e4m3_to_f32(((const uint8_t *)a.scale_inv)[factor]);
            if (a.whole)
                x *= te_two_level_decode(a.amax[i * a.amax_stride[0] + j * a.amax_stride[1]], (float)a.scale_max);
        } else if (a.block[0] || a.whole) {
            x *= ((const float *)a.scale_inv)[factor];
        }
        ((te_a *)a.to)[i * a.to_stride[0] + j * a.to_stride[1]] = te_as_a(x);
    }
}

extern "C" __global__ void te_product_scales(const __grid_constant__ te_scales_args a)
{
    double alpha = a.alpha;
    for (int i = 0; i < 2; i++)
        if (a.factor[i])
            alpha *= a.scale_max[i] > 0 ? te_two_level_decode(*a.factor[i], (float)a.scale_max[i]) : *a.factor[i];
    a.out[0] = (float)alpha;
    a.out[1] = (float)a.beta;
    a.out[2] = 0;
}

/* Where a factor goes. Tiles hold 128 lines by 4 blocks; within one the lines of a quarter are 16 bytes apart and
 * the quarters beside each other: byte (line % 32) 16 + (line / 32) 4 + block. Tiles of the same lines follow one
 * another. */
static __device__ int64_t te_arranged(const te_arrange_args &a, int64_t line, int64_t block)
{
    if (a.layout == TE_ARRANGE_BY_BLOCKS) return block * a.padded_lines + line;
    if (a.layout == TE_ARRANGE_BY_LINES) return line * a.padded_blocks + block;
    return (line / 128 * (a.padded_blocks / 4) + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}

extern "C" __global__ void __launch_bounds__(256) te_arrange_factors(const __grid_constant__ te_arrange_args a)
{
    for (int64_t i = TE_FIRST; i < a.padded_lines * a.padded_blocks; i += TE_STEP) {
        int64_t line = i / a.padded_blocks, block = i % a.padded_blocks, to = te_arranged(a, line, block);
        int64_t from = line * a.stride[0] + block * a.stride[1];
        bool    inside = line < a.lines && block < a.blocks;
        if (a.bytes == 4)
            ((float *)a.to)[to] = inside ? ((const float *)a.from)[from] : 0.0f;
        else
            ((uint8_t *)a.to)[to] = inside ? ((const uint8_t *)a.from)[from] : (uint8_t)0;
    }
}

extern "C" __global__ void __launch_bounds__(256) te_pad_lines(const __grid_constant__ te_pad_args a)
{
    struct alignas(16) te_sixteen {
        uint8_t byte[16];
    };
    int64_t across = a.padded_bytes / 16;
    for (int64_t i = TE_FIRST; i < a.padded_lines * across; i += TE_STEP) {
        int64_t        line = i / across, at = i % across * 16;
        const uint8_t *from = a.from + line * a.stride + at;
        te_sixteen     x = {};
        if (line < a.lines && at + 16 <= a.bytes && (uint64_t)from % 16 == 0)
            x = *(const te_sixteen *)from;
        else
            for (int k = 0; k < 16 && line < a.lines && at + k < a.bytes; k++) x.byte[k] = from[k];
        *(te_sixteen *)(a.to + line * a.padded_bytes + at) = x;
    }
}

/* --- delayed scaling --------------------------------------------------------------------------------------------- */

/* The largest of the earlier amaxes, in every thread. */
static __device__ float te_largest_amax(const te_delayed &t)
{
    __shared__ float most;
    float amax = 0;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    for (int64_t i = 1 + threadIdx.x; i < t.length; i += blockDim.x) amax = te_amax(amax, t.history[i]);
    te_raise(&most, amax);
    __syncthreads();
    return most;
}

/* Each piece reads the entries behind it before it is written. */
static __device__ void te_roll_history(const te_delayed &t, float last)
{
    for (int64_t first = 1; first < t.length; first += blockDim.x) {
        int64_t i = first + threadIdx.x;
        float   next = i + 1 < t.length ? t.history[i + 1] : last;
        __syncthreads();
        if (i < t.length) t.history[i] = next;
        __syncthreads();
    }
    if (threadIdx.x == 0) t.history[0] = 0;
}

extern "C" __global__ void __launch_bounds__(256) te_delayed_update(const __grid_constant__ te_delayed_args a)
{
    for (int64_t k = blockIdx.x; k < a.n; k += gridDim.x) {
        te_delayed t = a.tensors[k];
        float      last = t.history[0];
        __syncthreads();
        if (last == 0) continue;
        if (!(last > 0 && last <= TE_FLT_MAX)) {
            if (threadIdx.x == 0) t.history[0] = 0;
            if (threadIdx.x == 0) atomicAdd((unsigned long long *)a.skipped, 1ull);
            continue;
        }
        float amax = t.most_recent ? last : te_amax(te_largest_amax(t), last);
        te_roll_history(t, last);
        if (threadIdx.x == 0) *t.scale = te_delayed_scale(t.reach, amax, *t.scale);
    }
}
