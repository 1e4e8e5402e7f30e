/* quantize_codes.cu - values of a tile (quantize_tile.cu), times their factors, as codes in memory on both sides. */

/* --- codes ------------------------------------------------------------------------------------------------------- */

template <te_element_kind ELEMENT> static __device__ uint32_t te_four_codes(float x, float y, float z, float w)
{
    return ELEMENT == TE_E4M3 ? te_four_e4m3(x, y, z, w) : te_four_e5m2(x, y, z, w);
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

/* The magnitude's code of te_f32_to_e2m1 in the lowest three bits, 7 for a NaN. Adding a number whose last place is the
 * distance of neighbouring values rounds, and leaves in the low bits how many such distances the value is away from 0;
 * the even part of it that lies beyond the larger distance is compensated for. */
static __device__ uint32_t te_e2m1_magnitude(float x)
{
    float size = te_size(x), t = size < 6.0f ? size : 6.0f;
    return te_f32_bits(t + (t < 2.0f ? 0x1p22f : t < 4.0f ? 0x1p23f + 2.0f : 0x1p24f + 8.0f));
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
    bool none = false;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint32_t code = te_e2m1_magnitude(x[k]);
        codes |= (code << 4 * k & 7u << 4 * k) | (te_f32_bits(x[k]) >> (28 - 4 * k) & 8u << 4 * k);
        none |= x[k] != x[k];
    }
    if (none) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (x[k] != x[k]) codes &= ~(8u << 4 * k); /* they have 7 already */
    }
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
