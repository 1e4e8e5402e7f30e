/* quantized.cu - what else is done with quantized matrices, by kernels that serve all quantizers: what comes before
 * quantizing, the way back, operands of products, delayed scaling. te_a is the type of the plain matrix. */

/* --- before quantizing -------------------------------------------------------------------------------------------- */

/* Whether the kernels that follow make the bytes, by one thread; what stays counts all the same. */
static __device__ bool te_decide(const te_quantize_args &a)
{
    float now = a.given ? *a.given : 1.0f;
    bool  make = a.force || (a.stale && *a.stale != 0) || te_f32_bits(now) != te_f32_bits(a.kept[0]);
    const float *amax = a.side[0].amax ? a.side[0].amax : a.side[1].amax;
    a.kept[0] = now;
    a.kept[1] = make;
    a.kept[2] = 0;
    if (!make && a.seen && amax) te_raise(a.seen, *amax);
    return make;
}

extern "C" __global__ void __launch_bounds__(256) te_quantize_clear(const __grid_constant__ te_quantize_args a)
{
    if (a.kept && TE_FIRST == 0 && !te_decide(a)) return;
    if (TE_FIRST < 2) te_amaxes(a)[TE_FIRST] = 0;
    for (int64_t i = TE_FIRST; i < a.rows && a.row_scaled && a.side[0].amax; i += TE_STEP) a.side[0].amax[i] = 0;
    for (int s = 0; s < 2 && a.needs_history && TE_FIRST == 0; s++)
        if (a.side[s].amax) *a.side[s].amax = 0;
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
    enum { PITCH = TE_SQUARE + 1 };
    TE_DYNAMIC_SHARED(float, values);
    const te_quantize_place &p = a.side[a.from];
    int64_t across = (a.cols + TE_SQUARE - 1) / TE_SQUARE, tiles = (a.rows + TE_SQUARE - 1) / TE_SQUARE * across;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        int64_t first_row = t / across * TE_SQUARE, first_col = t % across * TE_SQUARE;
        for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
            int     line = p.col_stride == 1 ? i / TE_SQUARE : i % TE_SQUARE;
            int     place = p.col_stride == 1 ? i % TE_SQUARE : i / TE_SQUARE;
            int64_t row = (a.from ? first_col : first_row) + line, col = (a.from ? first_row : first_col) + place;
            values[a.from ? place * PITCH + line : line * PITCH + place] =
                row < p.rows && col < p.cols ? te_value_of(a, p, row, col) : 0.0f;
        }
        __syncthreads();
        for (int u = threadIdx.x; u < TE_SQUARE * 8 && a.from && a.hadamard; u += TE_QUANTIZE_THREADS) {
            float *at = values + u / TE_SQUARE * 16 * PITCH + u % TE_SQUARE, v[16];
            for (int k = 0; k < 16; k++) v[k] = at[k * PITCH];
            te_hadamard16(v);
            te_hadamard_signs(v);
            for (int k = 0; k < 16; k++) at[k * PITCH] = v[k];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
            int64_t row = first_row + i / TE_SQUARE, col = first_col + i % TE_SQUARE;
            if (row < a.rows && col < a.cols)
                ((te_a *)a.source)[row * a.source_stride + col] =
                    te_as_a(values[i / TE_SQUARE * PITCH + i % TE_SQUARE]);
        }
        __syncthreads();
    }
}

/* --- operands of products ----------------------------------------------------------------------------------------- */

/* Values of two codes of FP8, the first in the low byte. */
template <int ELEMENT> static __device__ void te_decode_two(uint32_t codes, float &x, float &y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if (ELEMENT == TE_E4M3)
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\ncvt.rn.f16x2.e4m3x2 both, %2;\nmov.b32 {low, high}, both;\n"
            "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(x), "=f"(y) : "h"((uint16_t)codes));
    else
        asm("{\n.reg .b16 low, high;\n.reg .b32 both;\ncvt.rn.f16x2.e5m2x2 both, %2;\nmov.b32 {low, high}, both;\n"
            "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
            : "=f"(x), "=f"(y) : "h"((uint16_t)codes));
#else
    x = ELEMENT == TE_E4M3 ? te_f8e4m3_to_f32((uint8_t)codes) : te_f8e5m2_to_f32((uint8_t)codes);
    y = ELEMENT == TE_E4M3 ? te_f8e4m3_to_f32((uint8_t)(codes >> 8)) : te_f8e5m2_to_f32((uint8_t)(codes >> 8));
#endif
}

template <int SCALE> static __device__ float te_factor_at(const te_decode_args &a, int64_t at)
{
    if (SCALE == TE_SCALE_F32) return ((const float *)a.scale_inv)[at];
    uint8_t code = ((const uint8_t *)a.scale_inv)[at];
    return SCALE == TE_SCALE_E8M0 ? te_e8m0_to_f32(code) : te_f8e4m3_to_f32(code);
}

static __device__ int64_t te_block_of(const te_decode_args &a, int64_t line, int64_t place)
{
    return (line >> a.shift[0]) * a.scale_stride[0] + (place >> a.shift[1]) * a.scale_stride[1];
}

static __device__ float te_whole_factor(const te_decode_args &a, int64_t line, int64_t place)
{
    return te_two_level_decode(a.amax[line * a.amax_stride[0] + place * a.amax_stride[1]], (float)a.scale_max);
}

/* Up to eight places of a line, one by one. */
template <int ELEMENT, int SCALE>
static __device__ void te_decode_few(const te_decode_args &a, int64_t line, int64_t place)
{
    for (int64_t j = place; j < a.places && j < place + 8; j++) {
        int64_t at = line * a.stride[0] + j * a.stride[1];
        uint8_t code = ELEMENT == TE_E2M1 ? (uint8_t)(a.data[at / 2] >> (at % 2 * 4) & 15) : a.data[at];
        float   x = ELEMENT == TE_E4M3   ? te_f8e4m3_to_f32(code)
                    : ELEMENT == TE_E5M2 ? te_f8e5m2_to_f32(code)
                                         : te_e2m1_to_f32(code);
        if (a.scaled) x *= te_factor_at<SCALE>(a, te_block_of(a, line, j));
        if (SCALE == TE_SCALE_E4M3 && a.whole) x *= te_whole_factor(a, line, j);
        ((te_a *)a.to)[line * a.to_stride[0] + j * a.to_stride[1]] = te_as_a(x);
    }
}

/* A factor for each of eight places. */
template <int SCALE>
static __device__ void te_find_factors(const te_decode_args &a, int64_t line, int64_t place, float (&factor)[8])
{
    typedef te_unit<uint8_t, 8> bytes;
    int64_t at = (line >> a.shift[0]) * a.scale_stride[0] + place * a.scale_stride[1];
    bytes   codes = {};
    if (SCALE != TE_SCALE_F32 && a.scale_stride[1] == 1 && ((uint64_t)a.scale_inv + (uint64_t)at) % 8 == 0) {
        codes = *(const bytes *)((const uint8_t *)a.scale_inv + at);
#pragma unroll
        for (int k = 0; k < 8; k++)
            factor[k] = SCALE == TE_SCALE_E8M0 ? te_e8m0_to_f32(codes.e[k]) : te_f8e4m3_to_f32(codes.e[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) factor[k] = te_factor_at<SCALE>(a, at + k * a.scale_stride[1]);
}

/* In accesses of 16 bytes, which the compiler would split. */
static __device__ void te_store_eight(te_eight *to, const te_eight &x)
{
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int k = 0; k < (int)sizeof x / 4; k += 4)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to->word + k)),
                     "r"(x.word[k]), "r"(x.word[k + 1]), "r"(x.word[k + 2]), "r"(x.word[k + 3]) : "memory");
#else
    *to = x;
#endif
}

/* Eight codes to values. */
template <int ELEMENT>
static __device__ te_eight te_decode_eight(const te_unit<uint32_t, ELEMENT == TE_E2M1 ? 1 : 2> &codes, bool scaled,
                                           const float (&factor)[8], bool again, float whole)
{
    te_eight values = {};
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        float x, y;
        if constexpr (ELEMENT == TE_E2M1) {
            x = te_e2m1_to_f32((uint8_t)(codes.e[0] >> 4 * k & 15u));
            y = te_e2m1_to_f32((uint8_t)(codes.e[0] >> (4 * k + 4) & 15u));
        } else {
            te_decode_two<ELEMENT>(codes.e[k / 4] >> k % 4 * 8 & 0xffffu, x, y);
        }
        if (scaled) x *= factor[k], y *= factor[k + 1];
        if (again) x *= whole, y *= whole;
        te_set_two(values, k, x, y);
    }
    return values;
}

/* A thread has eight places of TE_DECODE_LINES lines. Where each place has a factor of its own, their blocks are that
 * high; else one serves all eight. What is not so, or not aligned, is decoded one by one. */
enum { TE_DECODE_LINES = 4 };
template <int ELEMENT, int SCALE> static __device__ void te_decode_all(const te_decode_args &a)
{
    typedef te_unit<uint32_t, ELEMENT == TE_E2M1 ? 1 : 2> words;
    int     across = 1 << a.across_bits, rows = (TE_QUANTIZE_THREADS >> a.across_bits) * TE_DECODE_LINES;
    int64_t first = (int64_t)blockIdx.x * rows + (threadIdx.x >> a.across_bits) * TE_DECODE_LINES;
    int64_t beside = ((int64_t)blockIdx.y * across + threadIdx.x % across) * 8;
    int64_t pitch = ELEMENT == TE_E2M1 ? a.stride[0] / 2 : a.stride[0];
    bool    again = SCALE == TE_SCALE_E4M3 && a.whole, scaled = a.scaled, each = scaled && a.shift[1] == 0;
    bool    regular = a.stride[1] == 1 && a.to_stride[1] == 1 && !(again && a.amax_stride[1]) &&
                   (!scaled || a.shift[1] >= 3 || (each && a.shift[0] >= 2)) &&
                   ((uint64_t)a.data | (uint64_t)pitch) % sizeof(words) == 0 &&
                   ((uint64_t)a.to | (uint64_t)a.to_stride[0] * sizeof(te_a)) % 16 == 0;
    for (int64_t line = first; line < a.lines; line += (int64_t)gridDim.x * rows)
        for (int64_t place = beside; place < a.places; place += (int64_t)gridDim.y * across * 8) {
            int            lines = a.lines - line < TE_DECODE_LINES ? (int)(a.lines - line) : TE_DECODE_LINES;
            const uint8_t *from = a.data + line * pitch + (ELEMENT == TE_E2M1 ? place / 2 : place);
            te_a          *to = (te_a *)a.to + line * a.to_stride[0] + place;
            words          codes[TE_DECODE_LINES];
            float          factor[8] = {}, one[TE_DECODE_LINES] = {};
            if (!regular || place + 8 > a.places) {
                for (int i = 0; i < lines; i++) te_decode_few<ELEMENT, SCALE>(a, line + i, place);
                continue;
            }
#pragma unroll
            for (int i = 0; i < TE_DECODE_LINES; i++)
                if (i < lines) codes[i] = *(const words *)(from + i * pitch);
            if (each) te_find_factors<SCALE>(a, line, place, factor);
#pragma unroll
            for (int i = 0; i < TE_DECODE_LINES; i++)
                if (i < lines && scaled && !each) one[i] = te_factor_at<SCALE>(a, te_block_of(a, line + i, place));
#pragma unroll
            for (int i = 0; i < TE_DECODE_LINES; i++) {
                if (i >= lines) break;
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (!each) factor[k] = one[i];
                te_eight values = te_decode_eight<ELEMENT>(codes[i], scaled, factor, again,
                                                           again ? te_whole_factor(a, line + i, place) : 1.0f);
                te_store_eight((te_eight *)(to + i * a.to_stride[0]), values);
            }
        }
}

/* Four blocks to a processor: without a number ptxas aims at five on sm_89, and spills. */
extern "C" __global__ void __launch_bounds__(256, 4) te_decode(const __grid_constant__ te_decode_args a)
{
    bool five = a.element == TE_E5M2;
    if (a.element == TE_E2M1) {
        if (a.scale == TE_SCALE_F32) te_decode_all<TE_E2M1, TE_SCALE_F32>(a);
        else if (a.scale == TE_SCALE_E8M0) te_decode_all<TE_E2M1, TE_SCALE_E8M0>(a);
        else te_decode_all<TE_E2M1, TE_SCALE_E4M3>(a);
    } else if (a.scale == TE_SCALE_F32) {
        if (five) te_decode_all<TE_E5M2, TE_SCALE_F32>(a);
        else te_decode_all<TE_E4M3, TE_SCALE_F32>(a);
    } else if (five) {
        te_decode_all<TE_E5M2, TE_SCALE_E8M0>(a);
    } else {
        te_decode_all<TE_E4M3, TE_SCALE_E8M0>(a);
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
