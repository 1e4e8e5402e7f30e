/* quantize_whole.cu - what a program computes, in FP8 with one factor for all that is known beforehand.
 *
 * Codes are made where the values are, in registers, and the same ones go to both sides: row by row from there, and for
 * a side that is stored transposed as bytes to a tile in shared memory, of 128 x 128 or of 32 whole rows. From it a
 * thread takes 16 rows of four columns, and lanes that follow one another store neighbours:
 *
 *      lanes       0 …  7      columns 0 … 3       rows 0 … 15, 16 … 31, …
 *                  8 … 15      columns 4 … 7
 *                   …
 *
 * The columns of 16 rows stand elsewhere than those of the next 16, so that neither those lanes nor those that store
 * rows wait for a bank.
 */

/* Bytes of x (0 … 3) and y (4 … 7) as the selector's digits say, the last one first. */
static __device__ uint32_t te_bytes(uint32_t x, uint32_t y, uint32_t selector)
{
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, selector);
#else
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t bytes = 0;
    for (int k = 0; k < 4; k++) bytes |= (uint32_t)(both >> (selector >> 4 * k & 7u) * 8 & 255u) << 8 * k;
    return bytes;
#endif
}

/* Rows of four bytes become columns. */
static __device__ void te_turn_four(const uint32_t (&row)[4], uint32_t (&column)[4])
{
    uint32_t left[2], right[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        left[k] = te_bytes(row[2 * k], row[2 * k + 1], 0x5140u);
        right[k] = te_bytes(row[2 * k], row[2 * k + 1], 0x7362u);
    }
    column[0] = te_bytes(left[0], left[1], 0x5410u);
    column[1] = te_bytes(left[0], left[1], 0x7632u);
    column[2] = te_bytes(right[0], right[1], 0x5410u);
    column[3] = te_bytes(right[0], right[1], 0x7632u);
}

/* Amaxes, as values are packed in a word where they are bfloat16. */
struct te_running_amax {
    uint32_t pair;
    float    one;
};

/* Values as they are in te_a, of a NaN another one; the amax is raised to theirs. */
template <int V>
static __device__ void te_round_values(const float (&x)[V], float (&rounded)[V], te_running_amax &amax)
{
#if TE_A_IS_BF16
    if constexpr (V % 2 == 0) {
#pragma unroll
        for (int k = 0; k < V; k += 2) {
            uint32_t two = te_pair_bf16(x[k], x[k + 1]);
            rounded[k] = te_f32_from_bits(two << 16);
            rounded[k + 1] = te_f32_from_bits(two & 0xffff0000u);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
            asm("{\n.reg .b32 size;\nabs.bf16x2 size, %1;\nmax.bf16x2 %0, %0, size;\n}" : "+r"(amax.pair) : "r"(two));
#else
            amax.one = te_larger(te_larger(amax.one, rounded[k]), rounded[k + 1]);
#endif
        }
        return;
    }
#endif
#pragma unroll
    for (int k = 0; k < V; k++) {
        rounded[k] = te_from_a(te_as_a(x[k]));
        amax.one = te_larger(amax.one, rounded[k]);
    }
}

static __device__ float te_amax_so_far(const te_running_amax &amax)
{
    float one = te_larger(amax.one, te_f32_from_bits(amax.pair << 16));
    return te_larger(one, te_f32_from_bits(amax.pair & 0xffff0000u));
}

/* The codes of V neighbours, in words where they fill some; as bytes they would be taken apart to be put together. */
template <int V> struct te_row_codes {
    static constexpr bool words = V % 4 == 0;
    static constexpr int  n = words ? V / 4 : V;
    te_unit<uint32_t, n>  part;

    template <te_element_kind ELEMENT> __device__ void encode(const float (&x)[V])
    {
#pragma unroll
        for (int k = 0; k < n; k++) {
            if constexpr (words)
                part.e[k] = te_four_codes<ELEMENT>(x[4 * k % V], x[(4 * k + 1) % V], x[(4 * k + 2) % V],
                                                   x[(4 * k + 3) % V]);
            else part.e[k] = ELEMENT == TE_E4M3 ? te_f32_to_f8e4m3(x[k]) : te_f32_to_f8e5m2(x[k]);
        }
    }

    /* aligned: `to` is, to V bytes. */
    __device__ void store(uint8_t *to, bool aligned) const
    {
        if (words && aligned) {
            te_unit_store<uint32_t, n>((uint32_t *)to, part);
            return;
        }
#pragma unroll
        for (int k = 0; k < V; k++)
            to[k] = (uint8_t)(words ? part.e[k / 4 % n] >> k % 4 * 8 : part.e[k % n]);
    }
};

/* A tile of ROWS x COLUMNS; these are a multiple of 128. */
template <int VARIANT, int ROWS, int COLUMNS> struct te_whole {
    typedef te_variant<VARIANT> variant;
    static constexpr int groups = ROWS / 16;
    uint8_t        *codes; /* the tile's */
    float           scale;
    te_running_amax amax; /* of the values this thread has had */

    __device__ te_whole(const te_quantize_args &a, uint8_t *tile)
        : codes(tile), scale(a.measures ? 1.0f : te_whole_scale(a)), amax{0, 0}
    {
    }

    static __device__ bool turns(const te_quantize_args &a)
    {
        return variant::transposed && a.side[1].data && !a.measures;
    }

    static __device__ int place(int y, int x) { return y * COLUMNS + (x ^ y / 16 * (128 / groups)); }

    template <int V>
    static __device__ void put_row(uint8_t *data, int64_t stride, int64_t row, int64_t column,
                                   const te_row_codes<V> &unit)
    {
        unit.store(data + row * stride + column, ((uint64_t)data | (uint64_t)stride) % V == 0);
    }

    /* Values of neighbours in a row; (y, x) is the place of the first in the tile. */
    template <int V>
    __device__ void put(const te_quantize_args &a, int64_t row, int64_t column, int y, int x, const float (&value)[V])
    {
        float v[V];
        te_round_values<V>(value, v, amax);
        if (a.measures) return;
#pragma unroll
        for (int k = 0; k < V; k++) v[k] *= scale;
        te_row_codes<V> unit;
        unit.template encode<variant::element>(v);
        if (a.side[0].data) put_row<V>(a.side[0].data, a.side[0].row_stride, row, column, unit);
        if (!a.side[1].data) return;
        if constexpr (variant::transposed) unit.store(codes + place(y, x), true);
        else put_row<V>(a.side[1].data, a.side[1].col_stride, row, column, unit);
    }

    /* The tile to the transposed side, when all its values have been put and before others are. */
    template <int THREADS> __device__ void turn(const te_quantize_args &a, int64_t down, int64_t right) const
    {
        if (!turns(a)) return;
#pragma unroll 1
        for (int u = threadIdx.x; u < groups * COLUMNS / 4; u += THREADS)
            turn_part(a.side[1], down, right, u % groups * 16, u / groups * 4);
    }

    __device__ void turn_part(const te_quantize_place &p, int64_t down, int64_t right, int y, int x) const
    {
        int64_t  places = p.cols - down - y;
        uint8_t *to = p.data + (right + x) * p.row_stride + down + y;
        te_unit<uint32_t, 4> line[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t row[4], column[4];
#pragma unroll
            for (int k = 0; k < 4; k++) row[k] = *(const uint32_t *)(codes + place(y + 4 * n + k, x));
            te_turn_four(row, column);
#pragma unroll
            for (int k = 0; k < 4; k++) line[k].e[n] = column[k];
        }
        bool whole = ((uint64_t)p.data | (uint64_t)p.row_stride) % 16 == 0 && places >= 16;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (right + x + k >= p.rows) break;
            if (whole) {
                te_unit_store<uint32_t, 4>((uint32_t *)(to + k * p.row_stride), line[k]);
                continue;
            }
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (j < places) to[k * p.row_stride + j] = (uint8_t)(line[k].e[j / 4] >> j % 4 * 8);
        }
    }

    /* The amaxes that want it are raised to that of all values. */
    template <int THREADS> __device__ void finish(const te_quantize_args &a) const
    {
        __shared__ float places[32];
        if (!a.measures && !a.needs_history) return;
        float most = te_block_amax<THREADS>(te_amax_so_far(amax), places);
        if (threadIdx.x != 0) return;
        if (a.measures) {
            te_raise(&te_amaxes(a)[0], most);
            return;
        }
        if (a.seen) te_raise(a.seen, most);
        for (int s = 0; s < 2; s++)
            if (a.side[s].amax) te_raise(a.side[s].amax, most);
    }
};
