/* quantize_tile.cu - tiles of 128 x 128 in shared memory to their part of a quantized matrix.
 *
 * te_a is the type of a tile's values. A *line* is what blocks run along: a row of the tile on side 0, a column on
 * side 1, and a thread takes the part of a line that belongs to one block. Codes gather in shared memory, so that
 * memory is written in the order in which it lies. Bytes are the CPU's: quant.h holds the arithmetic of both.
 *
 * Tiles are filled from a matrix in memory (quantize.cu) or by the kernel of a program (program_source_squares.c).
 */
enum { TE_SQUARE = 128, TE_PITCH = 129, TE_CODES_PITCH = 132, TE_QUANTIZE_THREADS = 256 };

/* --- tiles ------------------------------------------------------------------------------------------------------- */

struct te_tile {
    te_a    *values;
    uint8_t *codes;    /* [line][place along it] */
    float   *partial;  /* [block along the line][line]: amaxes, then two errors */
    int64_t  row, col; /* of the source */
};

static __device__ te_tile te_tile_of(const te_quantize_args &a, char *shared, int64_t t)
{
    int64_t across = (a.cols + TE_SQUARE - 1) / TE_SQUARE;
    te_tile x = {(te_a *)shared, (uint8_t *)shared + TE_SQUARE * TE_PITCH * sizeof(te_a), 0, t / across * TE_SQUARE,
                 t % across * TE_SQUARE};
    x.partial = (float *)(x.codes + TE_SQUARE * TE_CODES_PITCH);
    return x;
}

static __device__ int64_t te_tile_count(const te_quantize_args &a)
{
    return (a.rows + TE_SQUARE - 1) / TE_SQUARE * ((a.cols + TE_SQUARE - 1) / TE_SQUARE);
}

static __device__ void te_tile_load(const te_quantize_args &a, const te_tile &x)
{
    for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
        int64_t row = x.row + i / TE_SQUARE, col = x.col + i % TE_SQUARE;
        x.values[i / TE_SQUARE * TE_PITCH + i % TE_SQUARE] =
            row < a.rows && col < a.cols ? ((const te_a *)a.source)[row * a.source_stride + col] : te_as_a(0.0f);
    }
    __syncthreads();
}

static __device__ float te_tile_at(const te_tile &x, int side, int line, int place)
{
    return te_from_a(x.values[side ? place * TE_PITCH + line : line * TE_PITCH + place]);
}

/* The Hadamard transform down the columns, rounded to the source's type. */
static __device__ void te_tile_transform(const te_tile &x)
{
    for (int u = threadIdx.x; u < TE_SQUARE * 8; u += TE_QUANTIZE_THREADS) {
        te_a *at = x.values + u / TE_SQUARE * 16 * TE_PITCH + u % TE_SQUARE;
        float v[16];
        for (int k = 0; k < 16; k++) v[k] = te_from_a(at[k * TE_PITCH]);
        te_hadamard_signs(v);
        te_hadamard16(v);
        for (int k = 0; k < 16; k++) at[k * TE_PITCH] = te_as_a(v[k]);
    }
    __syncthreads();
}

/* --- amaxes ------------------------------------------------------------------------------------------------------ */

/* Those of the whole tensor: of the source, of what side 1 sees. */
static __device__ float *te_amaxes(const te_quantize_args &a) { return a.amaxes ? a.amaxes : (float *)a.bound.scratch; }

/* The bits of magnitudes are in the order of the magnitudes. */
static __device__ void te_raise(float *amax, float x) { atomicMax((int *)amax, (int)te_f32_bits(x)); }

static __device__ float te_tile_amax(const te_tile &x)
{
    float amax = 0;
    for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS)
        amax = te_amax(amax, te_tile_at(x, 0, i / TE_SQUARE, i % TE_SQUARE));
    return amax;
}

/* Over the block, to *amax. */
static __device__ void te_raise_all(float *amax, float x)
{
    __shared__ float most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    te_raise(&most, x);
    __syncthreads();
    if (threadIdx.x == 0) te_raise(amax, most);
    __syncthreads();
}

/* What of a tile goes into the amaxes of the whole; the tile is used up. */
static __device__ void te_measure_tile(const te_quantize_args &a, const te_tile &x)
{
    te_raise_all(&te_amaxes(a)[0], te_tile_amax(x));
    if (a.row_scaled && a.side[0].amax && threadIdx.x < TE_SQUARE && x.row + threadIdx.x < a.rows) {
        float amax = 0;
        for (int k = 0; k < TE_SQUARE; k++) amax = te_amax(amax, te_tile_at(x, 0, threadIdx.x, k));
        te_raise(&a.side[0].amax[x.row + threadIdx.x], amax);
    }
    __syncthreads();
    if (!a.side[1].data || !a.hadamard) return;
    te_tile_transform(x);
    te_raise_all(&te_amaxes(a)[1], te_tile_amax(x));
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

static __device__ te_factor te_factor_of(const te_quantize_args &a, int side, int64_t row, float amax, bool four)
{
    float max = te_element_max((te_element_kind)a.element);
    te_factor f = {1, 1, 0};
    if (a.scale == TE_SCALE_F32) {
        f.multiplier = te_scale_from_amax(amax, max, a.power_of_two, (float)a.epsilon, (float)a.overflow);
        f.stored = 1.0f / f.multiplier;
    } else if (a.scale == TE_SCALE_E8M0) {
        f.code = te_f32_to_e8m0(amax * (1.0f / max));
        f.multiplier = te_e8m0_inverse(f.code);
    } else {
        float encode = te_two_level_encode(te_side_amax_of(a, side, row), (float)a.scale_max);
        f.code = a.four_over_six ? te_two_level_candidate(amax, encode, four ? 1.5f : 1.0f)
                                 : te_two_level_block(amax, encode);
        f.multiplier = te_two_level_multiplier(f.code, encode);
    }
    return f;
}

/* Summed error of a part of a line, absolute or squared, from left to right. */
static __device__ float te_line_error(const te_quantize_args &a, const te_tile &x, int side, int line, int place, int n,
                                      te_factor f, float amax)
{
    float factor = te_f8e4m3_to_f32(f.code), sum = 0;
    for (int k = 0; k < n; k++) {
        float v = te_tile_at(x, side, line, place + k);
        float error =
            te_e2m1_to_f32(te_f32_to_e2m1(v * f.multiplier)) * factor * amax / (6.0f * (float)a.scale_max) - v;
        sum += a.four_over_six == 2 ? error * error : te_f32_from_bits(te_f32_bits(error) & 0x7fffffffu);
    }
    return sum;
}

/* --- one side of a tile ------------------------------------------------------------------------------------------ */

/* Blocks of the tile on a side: `n` places along `high` lines; unit u is the part of a line in one of them. */
struct te_blocks {
    int     side, n, high, units;
    int64_t line, col; /* first of the tile, in the side's matrix */
};

static __device__ te_blocks te_blocks_of(const te_quantize_args &a, const te_tile &x, int side)
{
    int n = a.block_rows ? (int)a.block_cols : 16;
    te_blocks b = {side, n, a.block_rows ? (int)a.block_rows : 1, TE_SQUARE / n * TE_SQUARE, x.row, x.col};
    if (side) b.line = x.col, b.col = x.row;
    return b;
}

/* Amaxes of units to `partial`, where blocks have several lines. */
static __device__ void te_measure_units(const te_quantize_args &a, const te_tile &x, const te_blocks &b)
{
    if (b.high == 1) return;
    for (int u = threadIdx.x; u < b.units; u += TE_QUANTIZE_THREADS) {
        float amax = 0;
        for (int k = 0; k < b.n; k++)
            amax = te_amax(amax, te_tile_at(x, b.side, u % TE_SQUARE, u / TE_SQUARE * b.n + k));
        x.partial[u] = amax;
    }
    __syncthreads();
}

static __device__ float te_unit_amax(const te_tile &x, const te_blocks &b, int u)
{
    float amax = 0;
    int   first = u - u % b.high;
    for (int i = 0; i < b.high && b.high > 1; i++) amax = te_amax(amax, x.partial[first + i]);
    for (int k = 0; k < b.n && b.high == 1; k++)
        amax = te_amax(amax, te_tile_at(x, b.side, u % TE_SQUARE, u / TE_SQUARE * b.n + k));
    return amax;
}

/* Errors of the two candidates of each unit, added by halves over the lines of a block: partial[units …] and
 * partial[2 units …]. */
static __device__ void te_compare_units(const te_quantize_args &a, const te_tile &x, const te_blocks &b)
{
    if (!a.four_over_six) return;
    for (int u = threadIdx.x; u < b.units; u += TE_QUANTIZE_THREADS) {
        int64_t row = b.line + u % TE_SQUARE;
        float   amax = te_unit_amax(x, b, u), tensor = te_side_amax_of(a, b.side, row);
        for (int four = 0; four < 2; four++)
            x.partial[(1 + four) * b.units + u] =
                te_line_error(a, x, b.side, u % TE_SQUARE, u / TE_SQUARE * b.n, b.n,
                              te_factor_of(a, b.side, row, amax, four), tensor);
    }
    for (int half = b.high / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int u = threadIdx.x; u < b.units; u += TE_QUANTIZE_THREADS)
            if (u % b.high < half) {
                x.partial[b.units + u] += x.partial[b.units + u + half];
                x.partial[2 * b.units + u] += x.partial[2 * b.units + u + half];
            }
    }
    __syncthreads();
}

static __device__ void te_put_factor(const te_quantize_args &a, const te_blocks &b, int u, const te_factor &f)
{
    const te_quantize_place &p = a.side[b.side];
    int64_t row = b.line + u % TE_SQUARE, col = b.col + u / TE_SQUARE * b.n;
    if (row >= p.rows || col >= p.cols || (!a.replicated && u % b.high)) return;
    int64_t at = (a.replicated ? row : row / b.high) * p.scale_row_stride + col / b.n * p.scale_col_stride;
    if (a.scale == TE_SCALE_F32)
        ((float *)p.scale_inv)[at] = f.stored;
    else
        ((uint8_t *)p.scale_inv)[at] = f.code;
}

static __device__ void te_encode_unit(const te_quantize_args &a, const te_tile &x, const te_blocks &b, int u,
                                      float multiplier)
{
    const te_quantize_place &p = a.side[b.side];
    int      line = u % TE_SQUARE, place = u / TE_SQUARE * b.n;
    uint8_t *codes = x.codes + line * TE_CODES_PITCH + place;
    uint64_t group = (uint64_t)((b.line + line) * p.line_groups + (b.col + place) / 16);
    te_rng   rng = {p.rng[0], p.rng[1], p.rng[2], (const uint64_t *)p.rng[3]};
    te_philox_words w = {{0, 0, 0, 0}};
    for (int k = 0; k < b.n; k++) {
        float v = te_tile_at(x, b.side, line, place + k) * multiplier;
        if (a.stochastic && k % 16 == 0) w = te_rng_group(rng, group + k / 16);
        codes[k] = a.element == TE_E4M3   ? te_f32_to_f8e4m3(v)
                   : a.element == TE_E5M2 ? te_f32_to_f8e5m2(v)
                   : a.stochastic         ? te_f32_to_e2m1_stochastic(v, w.word[k % 16 / 4] >> k % 4 * 8 & 255u)
                                          : te_f32_to_e2m1(v);
    }
}

static __device__ void te_store_codes(const te_quantize_args &a, const te_tile &x, const te_blocks &b)
{
    const te_quantize_place &p = a.side[b.side];
    int64_t lines = p.rows - b.line, places = p.cols - b.col;
    bool    pairs = a.element == TE_E2M1;
    for (int i = threadIdx.x; i < TE_SQUARE * TE_SQUARE; i += TE_QUANTIZE_THREADS) {
        int line = p.col_stride == 1 ? i / TE_SQUARE : i % TE_SQUARE;
        int place = p.col_stride == 1 ? i % TE_SQUARE : i / TE_SQUARE;
        const uint8_t *code = x.codes + line * TE_CODES_PITCH + place;
        if (line >= lines || place >= places || (pairs && place % 2)) continue;
        if (pairs)
            p.data[(b.line + line) * p.row_stride + (b.col + place) / 2] = (uint8_t)(code[0] | code[1] << 4);
        else
            p.data[(b.line + line) * p.row_stride + (b.col + place) * p.col_stride] = *code;
    }
    __syncthreads();
}

static __device__ void te_quantize_side(const te_quantize_args &a, const te_tile &x, int side)
{
    te_blocks b = te_blocks_of(a, x, side);
    float     whole = a.block_rows ? 1.0f : te_whole_scale(a);
    if (a.block_rows) te_measure_units(a, x, b);
    if (a.block_rows) te_compare_units(a, x, b);
    for (int u = threadIdx.x; u < b.units; u += TE_QUANTIZE_THREADS) {
        te_factor f = {whole, 1, 0};
        int       first = u - u % b.high;
        if (a.block_rows) {
            bool four = a.four_over_six && x.partial[2 * b.units + first] < x.partial[b.units + first];
            f = te_factor_of(a, side, b.line + u % TE_SQUARE, te_unit_amax(x, b, u), four);
            te_put_factor(a, b, u, f);
        }
        te_encode_unit(a, x, b, u, f.multiplier);
    }
    __syncthreads();
    te_store_codes(a, x, b);
}

/* A tile to both sides, or to the amaxes alone; the amax of a tensor with a history is raised. */
static __device__ void te_quantize_tile(const te_quantize_args &a, const te_tile &x)
{
    if (a.measures) {
        te_measure_tile(a, x);
        return;
    }
    float amax = a.needs_history ? te_tile_amax(x) : 0.0f;
    if (a.seen) te_raise_all(a.seen, amax);
    for (int s = 0; s < 2; s++)
        if (a.needs_history && a.side[s].amax) te_raise_all(a.side[s].amax, amax);
    if (a.side[0].data) te_quantize_side(a, x, 0);
    if (!a.side[1].data) return;
    if (a.hadamard) te_tile_transform(x);
    te_quantize_side(a, x, 1);
}

/* What stands once for the whole tensor, by one thread. */
static __device__ void te_put_whole(const te_quantize_args &a, int side)
{
    const te_quantize_place &p = a.side[side];
    if (a.measures) return;
    if (!a.block_rows && p.scale_inv) *(float *)p.scale_inv = 1.0f / te_whole_scale(a);
    if (p.amax && !a.needs_history && !(side == 0 && a.row_scaled)) *p.amax = te_amaxes(a)[side && a.hadamard];
}
