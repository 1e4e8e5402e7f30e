/* quantize_tile.cu - tiles of 128 x 128 to their part of a quantized matrix.
 *
 * te_a is the type of a tile's values. A *line* is what blocks run along: a row of the tile on side 0, a column on
 * side 1. Each of 256 threads holds 8 x 8 values in registers, which on either side are a *chunk* of 8 places along 8
 * lines. Memory is read and written 16 or 8 bytes a thread; only codes that are stored transposed go through shared
 * memory, and so do amaxes of blocks that several threads share.
 *
 *      threads     0  1 … 15       rows 0 … 7        the columns of thread 1: 8 … 15
 *                 16 17 … 31       rows 8 … 15
 *                  …
 *
 * What the code depends on of a quantizer is its *variant* (args.h), a parameter of the templates. Bytes are the CPU's:
 * quant.h holds the arithmetic of both.
 *
 * Tiles are filled from a matrix in memory (quantize.cu) or by the kernel of a program (program_source_squares.c).
 */
enum {
    TE_SQUARE = 128,
    TE_PITCH = TE_SQUARE,   /* of a program's tile */
    TE_CHUNKS = 16,         /* of a line */
    TE_LINES_PITCH = 132,   /* of numbers per line, by chunks or blocks */
    TE_QUANTIZE_THREADS = 256
};

template <int VARIANT> struct te_variant {
    static constexpr te_element_kind element = (te_element_kind)(VARIANT & 3);
    static constexpr te_scale_kind   scale = (te_scale_kind)(VARIANT >> 2 & 3);
    static constexpr int  n = (VARIANT >> 4 & 15) ? 1 << ((VARIANT >> 4 & 15) - 1) : 0; /* a block's places; 0: all */
    static constexpr bool square = (VARIANT & TE_VARIANT_SQUARE) != 0;
    static constexpr bool transposed = (VARIANT & TE_VARIANT_TRANSPOSED) != 0; /* side 1 is stored so */
    static constexpr bool hadamard = (VARIANT & TE_VARIANT_HADAMARD) != 0;
    static constexpr bool stochastic = (VARIANT & TE_VARIANT_STOCHASTIC) != 0;
    static constexpr int  four_over_six = VARIANT >> TE_VARIANT_FOUR_BITS & 3;
    static constexpr int  chunks = n > 8 ? n / 8 : 1;         /* of a block, along a line */
    static constexpr int  parts = n > 0 && n < 8 ? 8 / n : 1; /* blocks of a chunk */
    static constexpr int  bytes = element == TE_E2M1 ? 4 : 8; /* of a chunk's codes */
};

/* --- tiles ------------------------------------------------------------------------------------------------------- */

struct te_tile {
    uint8_t *codes;    /* [line][chunk], see te_codes_place */
    float   *partial;  /* [chunk][line]: amaxes, then multipliers; behind them errors */
    int64_t  row, col; /* of the source */
};

/* Eight values of a row, as they lie in memory. */
struct __align__(16) te_eight {
    uint32_t word[2 * sizeof(te_a)];
};

static __device__ float te_value(const te_eight &x, int k)
{
    if (sizeof(te_a) == 4) return te_f32_from_bits(x.word[k]);
    return te_from_a((te_a)(x.word[k / 2] >> k % 2 * 16 & 0xffffu));
}

template <class T> static __device__ uint32_t te_bits_of(T x)
{
    union { T x; uint32_t bits; } v;
    v.bits = 0;
    v.x = x;
    return v.bits;
}

static __device__ void te_set_value(te_eight &x, int k, te_a value)
{
    if (sizeof(te_a) == 4) x.word[k] = te_bits_of(value);
    else x.word[k / 2] = (x.word[k / 2] & 0xffff0000u >> k % 2 * 16) | te_bits_of(value) << k % 2 * 16;
}

static __device__ int te_column_chunk() { return threadIdx.x % TE_CHUNKS; }
static __device__ int te_row_chunk() { return threadIdx.x / TE_CHUNKS; }

/* The thread's part of a matrix; zeros beyond the edges. */
static __device__ void te_load_source(const te_quantize_args &a, const te_tile &x, te_eight (&v)[8])
{
    int64_t     row = x.row + 8 * te_row_chunk(), col = x.col + 8 * te_column_chunk();
    int64_t     rows = a.rows - row, cols = a.cols - col, stride = a.source_stride;
    const te_a *from = (const te_a *)a.source + row * stride + col;
    bool        aligned = ((uint64_t)from | (uint64_t)stride * sizeof(te_a)) % 16 == 0;
    if (aligned && rows >= 8 && cols >= 8) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = *(const te_eight *)(from + j * stride);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = te_eight{};
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (j < rows && k < cols) te_set_value(v[j], k, from[j * stride + k]);
    }
}

/* The Hadamard transform down the columns, rounded to the source's type: of 16 rows a thread has the upper or the lower
 * half, and lane + 16 the other one. */
static __device__ void te_transform(te_eight (&v)[8])
{
    bool     low = te_row_chunk() % 2 != 0;
    uint32_t signs = low ? 0xd7u : 0xe8u;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float t[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            t[j] = te_f32_from_bits(te_f32_bits(te_value(v[j], k)) ^ (signs >> j & 1u) << 31);
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j & distance) continue;
                float one = t[j], other = t[j + distance];
                t[j] = one + other;
                t[j + distance] = one - other;
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float other = __shfl_xor_sync(0xffffffffu, t[j], 16);
            te_set_value(v[j], k, te_as_a((low ? other - t[j] : t[j] + other) * 0.25f));
        }
    }
}

/* Place `place` of line `line` of the thread's eight. */
template <int SIDE> static __device__ float te_at(const te_eight (&v)[8], int line, int place)
{
    return SIDE ? te_value(v[place], line) : te_value(v[line], place);
}

/* Where the thread is on a side. */
template <int SIDE> struct te_part {
    int     chunk, line;        /* in the tile */
    int64_t tile_line, tile_place; /* of the tile, in the side's matrix */

    __device__ te_part(const te_tile &x)
        : chunk(SIDE ? te_row_chunk() : te_column_chunk()), line(8 * (SIDE ? te_column_chunk() : te_row_chunk())),
          tile_line(SIDE ? x.col : x.row), tile_place(SIDE ? x.row : x.col)
    {
    }
};

/* --- amaxes ------------------------------------------------------------------------------------------------------ */

/* te_amax, which GPUs have as one instruction: of a NaN and a number it takes the number. */
static __device__ float te_larger(float amax, float x)
{
#ifdef __CUDA_ARCH__
    return fmaxf(amax, fabsf(x));
#else
    return te_amax(amax, x);
#endif
}

/* Those of the whole tensor: of the source, of what side 1 sees. */
static __device__ float *te_amaxes(const te_quantize_args &a) { return a.amaxes ? a.amaxes : (float *)a.bound.scratch; }

/* The bits of magnitudes are in the order of the magnitudes. */
static __device__ void te_raise(float *amax, float x) { atomicMax((int *)amax, (int)te_f32_bits(x)); }

static __device__ float te_eights_amax(const te_eight (&v)[8])
{
    float amax = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int k = 0; k < 8; k++) amax = te_larger(amax, te_value(v[j], k));
    return amax;
}

/* Over the lanes that differ in the bits of first, 2 first, … below end. */
static __device__ float te_lanes_amax(float amax, int first, int end)
{
#pragma unroll
    for (int by = first; by < end; by *= 2) amax = te_larger(amax, __shfl_xor_sync(0xffffffffu, amax, by));
    return amax;
}

/* Over the block. */
static __device__ float te_block_amax(float amax)
{
    __shared__ float most[TE_QUANTIZE_THREADS / 32];
    amax = te_lanes_amax(amax, 1, 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < TE_QUANTIZE_THREADS / 32; w++) amax = te_larger(amax, most[w]);
    return amax;
}

/* What of a tile goes into the amaxes of the whole; the values are used up. */
template <int VARIANT>
static __device__ void te_measure_tile(const te_quantize_args &a, const te_tile &x, te_eight (&v)[8])
{
    float amax = te_block_amax(te_eights_amax(v));
    if (threadIdx.x == 0) te_raise(&te_amaxes(a)[0], amax);
    if (a.row_scaled && a.side[0].amax) {
        int64_t row = x.row + 8 * te_row_chunk();
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float most = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) most = te_larger(most, te_value(v[j], k));
            most = te_lanes_amax(most, 1, TE_CHUNKS);
            if (te_column_chunk() == 0 && row + j < a.rows) te_raise(&a.side[0].amax[row + j], most);
        }
    }
    if (!te_variant<VARIANT>::hadamard || !a.side[1].data) return;
    te_transform(v);
    amax = te_block_amax(te_eights_amax(v));
    if (threadIdx.x == 0) te_raise(&te_amaxes(a)[1], amax);
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

static __device__ float te_side_amax_of(const te_quantize_args &a, int side, int64_t row)
{
    if (side == 0 && a.row_scaled) return a.side[0].amax[row < a.side[0].rows ? row : 0];
    return te_amaxes(a)[side && a.hadamard];
}

/* The factor of the whole tensor. */
static __device__ float te_whole_scale(const te_quantize_args &a)
{
    if (a.given) return *a.given;
    return a.needs_history ? (float)a.factor
                           : te_scale_from_amax(te_amaxes(a)[0], te_element_max((te_element_kind)a.element),
                                                a.power_of_two, (float)a.epsilon, TE_FLT_MAX);
}

struct te_factor {
    float   multiplier, stored;
    uint8_t code;
};

template <int VARIANT>
static __device__ te_factor te_factor_of(const te_quantize_args &a, int side, int64_t row, float amax, bool four)
{
    typedef te_variant<VARIANT> variant;
    float     max = te_element_max(variant::element);
    te_factor f = {1, 1, 0};
    if (variant::scale == TE_SCALE_F32) {
        f.multiplier = te_scale_from_amax(amax, max, a.power_of_two, (float)a.epsilon, (float)a.overflow);
        f.stored = 1.0f / f.multiplier;
    } else if (variant::scale == TE_SCALE_E8M0) {
        f.code = te_f32_to_e8m0(amax * (1.0f / max));
        f.multiplier = te_e8m0_inverse(f.code);
    } else {
        float encode = te_two_level_encode(te_side_amax_of(a, side, row), (float)a.scale_max);
        f.code = variant::four_over_six ? te_two_level_candidate(amax, encode, four ? 1.5f : 1.0f)
                                        : te_two_level_block(amax, encode);
        f.multiplier = te_two_level_multiplier(f.code, encode);
    }
    return f;
}

/* By the thread of a block's first chunk, for each line of it. */
template <int VARIANT>
static __device__ void te_put_factor(const te_quantize_args &a, int side, int64_t line, int64_t place,
                                     const te_factor &f)
{
    typedef te_variant<VARIANT> variant;
    constexpr uint64_t         n = variant::n ? variant::n : 1;
    const te_quantize_place   &p = a.side[side];
    bool                       once = variant::square && !a.replicated;
    if (line >= p.rows || place >= p.cols || (once && (uint64_t)line % n)) return;
    int64_t at = (int64_t)((uint64_t)line / (once ? n : 1)) * p.scale_row_stride +
                 (int64_t)((uint64_t)place / n) * p.scale_col_stride;
    if (variant::scale == TE_SCALE_F32)
        ((float *)p.scale_inv)[at] = f.stored;
    else
        ((uint8_t *)p.scale_inv)[at] = f.code;
}

/* Amaxes of the parts of blocks that lie in the thread's chunk. */
template <int VARIANT, int SIDE>
static __device__ void te_chunk_amaxes(const te_eight (&v)[8], float (&amax)[8][te_variant<VARIANT>::parts])
{
    constexpr int parts = te_variant<VARIANT>::parts;
#pragma unroll
    for (int line = 0; line < 8; line++)
#pragma unroll
        for (int part = 0; part < parts; part++) {
            amax[line][part] = 0;
#pragma unroll
            for (int k = 0; k < 8 / parts; k++)
                amax[line][part] = te_larger(amax[line][part], te_at<SIDE>(v, line, part * (8 / parts) + k));
        }
}

/* The amax of the square block that the thread's values belong to, for blocks of 8 x 8 and larger. */
template <int VARIANT> static __device__ float te_square_amax(const te_tile &x, const te_eight (&v)[8])
{
    constexpr int chunks = te_variant<VARIANT>::chunks, warps = chunks / 2;
    float         amax = te_lanes_amax(te_eights_amax(v), 1, chunks);
    if (chunks > 1) amax = te_lanes_amax(amax, 16, 32);
    if (warps <= 1) return amax;
    int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 < TE_CHUNKS) x.partial[warp * TE_CHUNKS + te_column_chunk()] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; w++)
        amax = te_larger(amax, x.partial[(warp - warp % warps + w) * TE_CHUNKS + te_column_chunk()]);
    return amax;
}

/* Where squares are smaller than the thread's. */
template <int N> static __device__ void te_join_small_squares(float (&amax)[8][8 / N])
{
#pragma unroll
    for (int first = 0; first < 8; first += N)
#pragma unroll
        for (int part = 0; part < 8 / N; part++) {
            float most = 0;
#pragma unroll
            for (int j = 0; j < N; j++) most = te_larger(most, amax[first + j][part]);
#pragma unroll
            for (int j = 0; j < N; j++) amax[first + j][part] = most;
        }
}

/* Of lines' blocks that several threads share: chunks' amaxes become the multipliers of the blocks, whose factors are
 * stored; under four_over_six the amaxes of the blocks. */
template <int VARIANT, int SIDE>
static __device__ void te_join_chunks(const te_quantize_args &a, const te_tile &x, float (&number)[8][1])
{
    typedef te_variant<VARIANT> variant;
    typedef te_unit<float, 4>   quarter;
    constexpr int n = variant::n ? variant::n : TE_SQUARE;
    te_part<SIDE> at(x);
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 8; q += 4)
        *(quarter *)(x.partial + at.chunk * TE_LINES_PITCH + at.line + q) =
            quarter{{number[q][0], number[q + 1][0], number[q + 2][0], number[q + 3][0]}};
    __syncthreads();
#pragma unroll 1
    for (int u = threadIdx.x; u < TE_SQUARE / n * TE_SQUARE; u += TE_QUANTIZE_THREADS) {
        int    line = u % TE_SQUARE, block = u / TE_SQUARE;
        float *own = x.partial + block * variant::chunks * TE_LINES_PITCH + line, amax = 0;
#pragma unroll
        for (int k = 0; k < variant::chunks; k++) amax = te_larger(amax, own[k * TE_LINES_PITCH]);
        if (!variant::four_over_six) {
            te_factor f = te_factor_of<VARIANT>(a, SIDE, at.tile_line + line, amax, false);
            te_put_factor<VARIANT>(a, SIDE, at.tile_line + line, at.tile_place + block * n, f);
            amax = f.multiplier;
        }
        *own = amax;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 8; q += 4) {
        quarter four =
            *(quarter *)(x.partial + (at.chunk - at.chunk % variant::chunks) * TE_LINES_PITCH + at.line + q);
#pragma unroll
        for (int k = 0; k < 4; k++) number[q + k][0] = four.e[k];
    }
}

/* --- the choice between two factors ------------------------------------------------------------------------------- */

template <int VARIANT>
static __device__ float te_error_of(const te_quantize_args &a, float v, const te_factor &f, float amax)
{
    float error = te_e2m1_to_f32(te_f32_to_e2m1(v * f.multiplier)) * te_f8e4m3_to_f32(f.code) * amax /
                      (6.0f * (float)a.scale_max) - v;
    return te_variant<VARIANT>::four_over_six == 2 ? error * error : te_f32_from_bits(te_f32_bits(error) & 0x7fffffffu);
}

/* Errors of the two candidates, absolute or squared: along each line from left to right, a chunk after the other, then
 * by halves over the lines of a block. four: whether the second one's is smaller. */
template <int VARIANT, int SIDE>
static __device__ void te_choose_factors(const te_quantize_args &a, const te_tile &x, const te_eight (&v)[8],
                                         const float (&amax)[8][te_variant<VARIANT>::parts],
                                         bool (&four)[8][te_variant<VARIANT>::parts])
{
    typedef te_variant<VARIANT> variant;
    constexpr int n = variant::n ? variant::n : TE_SQUARE, parts = variant::parts, blocks = TE_SQUARE / n;
    te_part<SIDE> at(x);
    float        *errors = x.partial + TE_CHUNKS * TE_LINES_PITCH; /* [candidate][block along the line][line] */
    __syncthreads();
    for (int turn = 0; turn < variant::chunks; turn++) {
        if (at.chunk % variant::chunks == turn) {
#pragma unroll
            for (int line = 0; line < 8; line++)
#pragma unroll
                for (int i = 0; i < 2 * parts; i++) {
                    int       part = i % parts, block = at.chunk * 8 / n + part;
                    int64_t   row = at.tile_line + at.line + line;
                    te_factor f = te_factor_of<VARIANT>(a, SIDE, row, amax[line][part], i >= parts);
                    float    *sum = errors + (i / parts * blocks + block) * TE_LINES_PITCH + at.line + line;
                    float     error = turn ? *sum : 0.0f, tensor = te_side_amax_of(a, SIDE, row);
#pragma unroll
                    for (int k = 0; k < 8 / parts; k++)
                        error += te_error_of<VARIANT>(a, te_at<SIDE>(v, line, part * (8 / parts) + k), f, tensor);
                    *sum = error;
                }
        }
        __syncthreads();
    }
    for (int half = variant::square ? n / 2 : 0; half > 0; half /= 2) {
        for (int u = threadIdx.x; u < 2 * blocks * TE_SQUARE; u += TE_QUANTIZE_THREADS) {
            float *sum = errors + u / TE_SQUARE * TE_LINES_PITCH + u % TE_SQUARE;
            if (u % n < half) *sum += sum[half];
        }
        __syncthreads();
    }
#pragma unroll
    for (int line = 0; line < 8; line++)
#pragma unroll
        for (int part = 0; part < parts; part++) {
            int          first = variant::square ? (at.line + line) / n * n : at.line + line;
            const float *sum = errors + (at.chunk * 8 / n + part) * TE_LINES_PITCH + first;
            four[line][part] = sum[blocks * TE_LINES_PITCH] < *sum;
        }
}

/* What the thread's values are multiplied by; the factors of their blocks are stored. `square`: te_square_amax. */
template <int VARIANT, int SIDE>
static __device__ void te_find_multipliers(const te_quantize_args &a, const te_tile &x, const te_eight (&v)[8],
                                           float square, float (&m)[8][te_variant<VARIANT>::parts])
{
    typedef te_variant<VARIANT> variant;
    constexpr int  n = variant::n, parts = variant::parts;
    constexpr bool shared = variant::square && n >= 8; /* one block for all */
    te_part<SIDE>  at(x);
    bool           four[8][parts] = {};
    te_factor      f = {1, 1, 0};
    if constexpr (!shared) te_chunk_amaxes<VARIANT, SIDE>(v, m);
    if constexpr (shared)
        for (int line = 0; line < 8; line++) m[line][0] = square;
    if constexpr (variant::square && n < 8) te_join_small_squares<n>(m);
    if constexpr (!variant::square && n > 8) te_join_chunks<VARIANT, SIDE>(a, x, m);
    if (!variant::square && n > 8 && !variant::four_over_six) return;
    if constexpr (variant::four_over_six != 0) te_choose_factors<VARIANT, SIDE>(a, x, v, m, four);
#pragma unroll
    for (int line = 0; line < 8; line++)
#pragma unroll
        for (int part = 0; part < parts; part++) {
            int64_t row = at.tile_line + at.line + line, place = at.tile_place + at.chunk * 8 + part * (8 / parts);
            if (!shared || line == 0) f = te_factor_of<VARIANT>(a, SIDE, row, m[line][part], four[line][part]);
            if (at.chunk % variant::chunks == 0 && (!shared || line == 0 || a.replicated))
                te_put_factor<VARIANT>(a, SIDE, row, place, f);
            m[line][part] = f.multiplier;
        }
}

/* --- codes ------------------------------------------------------------------------------------------------------- */

/* GPUs convert two at a time, to the same codes: to nearest, ties to even, saturating; the first source goes to the
 * upper half. Their one NaN is 0x7f. */
template <te_element_kind ELEMENT> static __device__ uint32_t te_four_codes(float x, float y, float z, float w)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t codes;
    if (ELEMENT == TE_E4M3)
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
            : "=r"(codes) : "f"(x), "f"(y), "f"(z), "f"(w));
    else
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
            : "=r"(codes) : "f"(x), "f"(y), "f"(z), "f"(w));
    return codes;
#else
    if (ELEMENT == TE_E4M3)
        return te_f32_to_f8e4m3(x) | (uint32_t)te_f32_to_f8e4m3(y) << 8 | (uint32_t)te_f32_to_f8e4m3(z) << 16 |
               (uint32_t)te_f32_to_f8e4m3(w) << 24;
    return te_f32_to_f8e5m2(x) | (uint32_t)te_f32_to_f8e5m2(y) << 8 | (uint32_t)te_f32_to_f8e5m2(z) << 16 |
           (uint32_t)te_f32_to_f8e5m2(w) << 24;
#endif
}

/* te_f32_to_e2m1 as the conversions of dtype.h work, in fewer instructions than it compares. */
static __device__ uint32_t te_e2m1_code(float x)
{
    uint32_t u = te_f32_bits(x);
    float    size = te_f32_from_bits(u & 0x7fffffffu);
    size = size < 6.0f ? size : 6.0f; /* of a NaN, too */
    uint32_t bits = te_f32_bits(size), small = te_f32_bits(size + 0x1p22f) - 0x4a800000u;
    uint32_t normal = (bits + 0x1fffffu + (bits >> 22 & 1u) - (126u << 23)) >> 22;
    return (size < 1.0f ? small : normal) | (x == x ? u >> 28 & 8u : 0u);
}

/* te_f32_to_e2m1_stochastic without branches. */
static __device__ uint32_t te_e2m1_stochastic_code(float x, uint32_t random)
{
    float    t = te_f32_from_bits(te_f32_bits(x) & 0x7fffffffu);
    float    step = t < 2.0f ? 0.5f : t < 4.0f ? 1.0f : 2.0f, raised = t + step * ((float)(int32_t)random * 0x1p-8f);
    uint32_t low = (uint32_t)(int32_t)(t < 4.0f ? raised * (t < 2.0f ? 2.0f : 1.0f) : 0.0f) + (t < 2.0f ? 0u : 2u);
    uint32_t high = raised >= 6.0f || x != x ? 7u : 6u;
    return (t < 4.0f ? low : high) | (x == x ? te_f32_bits(x) >> 28 & 8u : 0u);
}

/* Eight codes of two a byte, the first in the lowest bits. */
static __device__ uint32_t te_eight_pairs(const float (&x)[8])
{
    uint32_t codes = 0;
#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000
    asm("{\n.reg .b8 b0, b1, b2, b3;\ncvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\ncvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\nmov.b32 %0, {b0, b1, b2, b3};\n}"
        : "=r"(codes) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#else
#pragma unroll
    for (int k = 0; k < 8; k++) codes |= te_e2m1_code(x[k]) << 4 * k;
#endif
    return codes;
}

/* The codes of a chunk. */
template <int VARIANT> struct te_codes {
    te_unit<uint32_t, te_variant<VARIANT>::bytes / 4> word;
};

/* random: the eight bytes that stochastic rounding takes. */
template <int VARIANT>
static __device__ te_codes<VARIANT> te_encode(const float (&x)[8], const uint32_t (&random)[2])
{
    typedef te_variant<VARIANT> variant;
    te_codes<VARIANT> codes = {};
    if constexpr (variant::element != TE_E2M1) {
        codes.word.e[0] = te_four_codes<variant::element>(x[0], x[1], x[2], x[3]);
        codes.word.e[1] = te_four_codes<variant::element>(x[4], x[5], x[6], x[7]);
    } else if (!variant::stochastic) {
        codes.word.e[0] = te_eight_pairs(x);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++)
            codes.word.e[0] |= te_e2m1_stochastic_code(x[k], random[k / 4] >> k % 4 * 8 & 255u) << 4 * k;
    }
    return codes;
}

/* Random bytes of the thread's lines: a group of 16 places takes the bytes of a counter in order, so two threads share
 * one. Each makes those of every second line for both. */
template <int VARIANT, int SIDE>
static __device__ void te_find_random(const te_quantize_args &a, const te_tile &x, uint32_t (&random)[8][2])
{
    const te_quantize_place &p = a.side[SIDE];
    te_part<SIDE>            at(x);
    te_rng                   rng = {p.rng[0], p.rng[1], p.rng[2], (const uint64_t *)p.rng[3]};
    int                      half = at.chunk % 2;
    uint64_t group = (uint64_t)((at.tile_line + at.line) * p.line_groups + (at.tile_place + at.chunk * 8) / 16);
    if (rng.base) rng = te_rng{rng.base[0], rng.stream, rng.offset + rng.base[1], 0};
#pragma unroll
    for (int line = 0; line < 8; line += 2) {
        te_philox_words made = te_rng_group(rng, group + (uint64_t)((line + half) * p.line_groups));
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t mine = half ? made.word[2 + k] : made.word[k], theirs = half ? made.word[k] : made.word[2 + k];
            theirs = __shfl_xor_sync(0xffffffffu, theirs, SIDE ? 16 : 1);
            random[line][k] = half ? theirs : mine;
            random[line + 1][k] = half ? mine : theirs;
        }
    }
}

/* As many of a chunk's codes as there are places left; whole: `to` is aligned, and all are. */
template <int VARIANT>
static __device__ void te_store_chunk(uint8_t *to, const te_codes<VARIANT> &codes, int64_t places, bool whole)
{
    constexpr int bytes = te_variant<VARIANT>::bytes;
    if (whole) {
        te_unit_store<uint32_t, bytes / 4>((uint32_t *)to, codes.word);
        return;
    }
    int64_t n = bytes == 8 ? places : (places + 1) / 2;
#pragma unroll
    for (int k = 0; k < bytes; k++)
        if (k < n) to[k] = (uint8_t)(codes.word.e[k / 4] >> k % 4 * 8);
}

/* Codes that lie as the source does: lines of side 0, places of a side 1 that is not transposed. */
template <int VARIANT, int SIDE>
static __device__ void te_store_straight(const te_quantize_args &a, const te_tile &x, const te_eight (&v)[8],
                                         const float (&m)[8][te_variant<VARIANT>::parts],
                                         const uint32_t (&random)[8][2])
{
    typedef te_variant<VARIANT> variant;
    const te_quantize_place &p = a.side[SIDE];
    int64_t  row = x.row + 8 * te_row_chunk(), col = x.col + 8 * te_column_chunk();
    int64_t  rows = (SIDE ? p.cols : p.rows) - row, cols = (SIDE ? p.rows : p.cols) - col;
    int64_t  pitch = SIDE ? p.col_stride : p.row_stride;
    uint8_t *to = p.data + row * pitch + (variant::bytes == 8 ? col : col / 2);
    bool     whole = cols >= 8 && ((uint64_t)to | (uint64_t)pitch) % variant::bytes == 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float scaled[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            scaled[k] = te_value(v[j], k) *
                        (SIDE ? m[k][j / (8 / variant::parts)] : m[j][k / (8 / variant::parts)]);
        te_codes<VARIANT> codes = te_encode<VARIANT>(scaled, random[j]);
        if (j < rows) te_store_chunk<VARIANT>(to + j * pitch, codes, cols, whole);
    }
}

/* Chunks of neighbouring columns are apart in shared memory, so that neither a warp that writes a line of each nor one
 * that reads lines waits for a bank. */
template <int VARIANT> static __device__ int te_codes_place(int line, int chunk)
{
    return (line * TE_CHUNKS + (chunk ^ line / 8)) * te_variant<VARIANT>::bytes;
}

/* Codes of side 1, transposed. */
template <int VARIANT>
static __device__ void te_store_turned(const te_quantize_args &a, const te_tile &x, const te_eight (&v)[8],
                                       const float (&m)[8][te_variant<VARIANT>::parts], const uint32_t (&random)[8][2])
{
    typedef te_variant<VARIANT>                       variant;
    typedef te_unit<uint32_t, variant::bytes / 4>     words;
    constexpr int bytes = variant::bytes, per_piece = 16 / bytes, pieces = TE_CHUNKS / per_piece;
    const te_quantize_place &p = a.side[1];
    te_part<1>               at(x);
    __syncthreads();
#pragma unroll
    for (int line = 0; line < 8; line++) {
        float scaled[8];
#pragma unroll
        for (int k = 0; k < 8; k++) scaled[k] = te_at<1>(v, line, k) * m[line][k / (8 / variant::parts)];
        *(words *)(x.codes + te_codes_place<VARIANT>(at.line + line, at.chunk)) =
            te_encode<VARIANT>(scaled, random[line]).word;
    }
    __syncthreads();
    bool aligned = ((uint64_t)p.data | (uint64_t)p.row_stride) % 16 == 0;
#pragma unroll 2
    for (int i = 0; i < TE_SQUARE * pieces / TE_QUANTIZE_THREADS; i++) {
        int      u = threadIdx.x + i * TE_QUANTIZE_THREADS, line = u / pieces, chunk = u % pieces * per_piece;
        int64_t  places = p.cols - at.tile_place - chunk * 8;
        uint8_t *to = p.data + (at.tile_line + line) * p.row_stride + (at.tile_place / 8 + chunk) * bytes;
        if (at.tile_line + line >= p.rows) continue;
        union {
            te_codes<VARIANT>    codes[per_piece];
            te_unit<uint32_t, 4> all;
        } piece;
#pragma unroll
        for (int k = 0; k < per_piece; k++)
            piece.codes[k].word = *(const words *)(x.codes + te_codes_place<VARIANT>(line, chunk + k));
        if (aligned && places >= 8 * per_piece) {
            te_unit_store<uint32_t, 4>((uint32_t *)to, piece.all);
            continue;
        }
#pragma unroll
        for (int k = 0; k < per_piece; k++)
            te_store_chunk<VARIANT>(to + k * bytes, piece.codes[k], places - 8 * k, false);
    }
}

/* --- a tile ------------------------------------------------------------------------------------------------------ */

template <int VARIANT, int SIDE>
static __device__ void te_quantize_side(const te_quantize_args &a, const te_tile &x, const te_eight (&v)[8],
                                        float square)
{
    typedef te_variant<VARIANT> variant;
    float    m[8][variant::parts];
    uint32_t random[8][2] = {};
    if constexpr (variant::n != 0) {
        te_find_multipliers<VARIANT, SIDE>(a, x, v, square, m);
    } else {
        float whole = te_whole_scale(a);
        for (int line = 0; line < 8; line++) m[line][0] = whole;
    }
    if constexpr (variant::stochastic) te_find_random<VARIANT, SIDE>(a, x, random);
    if constexpr (SIDE == 0 || !variant::transposed)
        te_store_straight<VARIANT, SIDE>(a, x, v, m, random);
    else
        te_store_turned<VARIANT>(a, x, v, m, random);
}

/* A tile to both sides; the amax of a tensor with a history is raised. */
template <int VARIANT>
static __device__ void te_quantize_values(const te_quantize_args &a, const te_tile &x, te_eight (&v)[8])
{
    typedef te_variant<VARIANT> variant;
    constexpr bool squares = variant::square && variant::n >= 8;
    float          square = 0;
    if (variant::n == 0 && a.needs_history) {
        float amax = te_block_amax(te_eights_amax(v));
        if (threadIdx.x == 0 && a.seen) te_raise(a.seen, amax);
        for (int s = 0; s < 2 && threadIdx.x == 0; s++)
            if (a.side[s].amax) te_raise(a.side[s].amax, amax);
    }
    if constexpr (squares) square = te_square_amax<VARIANT>(x, v);
    if (a.side[0].data) te_quantize_side<VARIANT, 0>(a, x, v, square);
    if (!a.side[1].data) return;
    if constexpr (variant::hadamard) {
        te_transform(v);
        if constexpr (squares) square = te_square_amax<VARIANT>(x, v);
    }
    te_quantize_side<VARIANT, 1>(a, x, v, square);
}

/* A tile that a program has left in shared memory, which may be written again afterwards, to both sides, or to the
 * amaxes alone. */
template <int VARIANT>
static __device__ void te_quantize_tile(const te_quantize_args &a, const te_tile &x, const te_a *values)
{
    te_eight v[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = *(const te_eight *)(values + (8 * te_row_chunk() + j) * TE_PITCH + 8 * te_column_chunk());
    if (a.measures) te_measure_tile<VARIANT>(a, x, v);
    else te_quantize_values<VARIANT>(a, x, v);
    __syncthreads();
}

/* What stands once for the whole tensor, by one thread. */
static __device__ void te_put_whole(const te_quantize_args &a, int side)
{
    const te_quantize_place &p = a.side[side];
    if (a.measures) return;
    if (!a.block_rows && p.scale_inv) *(float *)p.scale_inv = 1.0f / te_whole_scale(a);
    if (p.amax && !a.needs_history && !(side == 0 && a.row_scaled)) *p.amax = te_amaxes(a)[side && a.hadamard];
}
