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
 * Tiles are filled from a matrix in memory (quantize.cu) or by the kernel of a program (program_source_squares.c). Here
 * are their values, amaxes and factors; quantize_codes.cu makes the bytes.
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

/* Two values as they lie in memory. A NaN may get another payload than te_as_a gives it. */
static __device__ void te_set_two(te_eight &to, int k, float x, float y)
{
#if TE_A_IS_BF16
    to.word[k / 2] = te_pair_bf16(x, y);
#else
    te_set_value(to, k, te_as_a(x));
    te_set_value(to, k + 1, te_as_a(y));
#endif
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
    float    side = low ? -1.0f : 1.0f; /* a product with it is exact */
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        float t[2][8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                t[i][j] = te_value(v[j], k + i) * (signs >> j & 1u ? -0.25f : 0.25f);
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j & distance) continue;
                    float one = t[i][j], other = t[i][j + distance];
                    t[i][j] = one + other;
                    t[i][j + distance] = one - other;
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float other = __shfl_xor_sync(0xffffffffu, t[i][j], 16);
                t[i][j] = TE_FMA(t[i][j], side, other);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) te_set_two(v[j], k, t[0][j], t[1][j]);
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
