/* order.cu - rows in order: sort, and topk of many or of few long rows. By keys (keys.cu), a digit at a time from the
 * lowest, each time without changing the order of what has the same digit.
 *
 * A tile is what a block sorts in its shared memory, TE_ORDER_EACH elements for each thread. A row of one tile is
 * sorted by te_order_tile; the best k of a longer one are the best of the best k of its tiles. A long row is sorted by
 * several blocks: for each digit te_order_count counts the elements of each block's stretch, te_order_scan adds the
 * counts up, te_order_pass moves the elements from one half of the scratch memory to the other, and te_order_store
 * takes the positions at the end.
 *
 * What a tile has less than it could has the last key of all, behind everything in each pass, as it is at first.
 */
enum { TE_ORDER_WARPS = 16 /* at most */ };

typedef te_key_word te_order_keys[TE_ORDER_EACH];
typedef uint32_t    te_order_places[TE_ORDER_EACH];

TE_HD static inline te_key_word te_order_key(const te_order_args &a, te_a x)
{
    te_key_word key = te_key(x, a.largest != 0);
    return a.turned ? ~key : key;
}

/* Where a thread's k-th element lies in a tile. */
__device__ static inline unsigned te_order_index(int k)
{
    return threadIdx.x / 32 * (32 * TE_ORDER_EACH) + k * 32 + threadIdx.x % 32;
}

__device__ static inline unsigned te_order_digit(te_key_word key, int shift)
{
    return (unsigned)(key >> shift) & (TE_ORDER_DIGITS - 1);
}

/* The places of a tile's elements by one digit. counts[d] then is where those of digit d begin. */
__device__ static inline void te_order_rank(const te_order_keys &key, te_order_places &place, int shift,
                                            uint32_t *counts)
{
    unsigned  lane = threadIdx.x % 32, below = (1u << lane) - 1, warps = blockDim.x / 32;
    uint32_t *own = counts + threadIdx.x / 32 * TE_ORDER_DIGITS;
    for (unsigned d = lane; d < TE_ORDER_DIGITS; d += 32) own[d] = 0;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < TE_ORDER_EACH; k++) {
        unsigned d = te_order_digit(key[k], shift), alike = 0xffffffffu;
#pragma unroll
        for (int bit = 0; bit < TE_ORDER_BITS; bit++) {
            unsigned set = __ballot_sync(0xffffffffu, d >> bit & 1);
            alike &= d >> bit & 1 ? set : ~set;
        }
        uint32_t before = own[d];
        place[k] = before + (uint32_t)__popc(alike & below);
        __syncwarp();
        if ((alike & below) == 0) own[d] = before + (uint32_t)__popc(alike);
        __syncwarp();
    }
    __syncthreads();
    unsigned digits = blockDim.x < TE_ORDER_DIGITS ? TE_ORDER_DIGITS / blockDim.x : 1, first = threadIdx.x * digits;
    unsigned end = first < TE_ORDER_DIGITS ? first + digits : first;
    uint32_t total = 0;
    for (unsigned d = first; d < end; d++)
        for (unsigned w = 0; w < warps; w++) total += counts[w * TE_ORDER_DIGITS + d];
    uint32_t base = te_sum_before<TE_ORDER_WARPS>(total);
    for (unsigned d = first; d < end; d++)
        for (unsigned w = 0; w < warps; w++) {
            uint32_t count = counts[w * TE_ORDER_DIGITS + d];
            counts[w * TE_ORDER_DIGITS + d] = base;
            base += count;
        }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TE_ORDER_EACH; k++) place[k] += own[te_order_digit(key[k], shift)];
}

/* The bits in which keys of a tile differ. */
__device__ static inline te_key_word te_order_differ(const te_order_keys &key, int64_t count)
{
    __shared__ te_key_word held[TE_ORDER_WARPS], of_first;
    te_key_word            differ = 0;
    if (threadIdx.x == 0) of_first = key[0];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TE_ORDER_EACH; k++) differ |= te_order_index(k) < count ? key[k] ^ of_first : 0;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) differ |= __shfl_xor_sync(0xffffffffu, differ, by);
    if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = differ;
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / 32; w++) differ |= held[w];
    __syncthreads();
    return differ;
}

/* --- rows and parts of rows in one block ------------------------------------------------------------------------- */

/* Candidates of an earlier kernel in scratch memory: their keys, behind them their positions in the row. */
struct te_order_chosen {
    te_key_word *keys;
    uint32_t    *positions;
};

__device__ static inline te_order_chosen te_order_scratch(const te_order_args &a, int64_t offset, int64_t count)
{
    te_key_word *keys = (te_key_word *)(a.bound.scratch + (offset > 0 ? offset : 0));
    return te_order_chosen{keys, (uint32_t *)(keys + count)};
}

extern "C" __global__ void __launch_bounds__(512) te_order_tile(const __grid_constant__ te_order_args a)
{
    TE_DYNAMIC_SHARED(te_key_word, keys);
    int64_t         tile = (int64_t)blockDim.x * TE_ORDER_EACH, tiles = (a.n + tile - 1) / tile;
    uint16_t       *places = (uint16_t *)(keys + tile);
    uint32_t       *counts = (uint32_t *)(places + tile);
    int64_t         last = a.src.ndim - 1, stride = a.src.stride[last], kept = (tiles - 1) * a.k + a.k_last;
    te_order_chosen from = te_order_scratch(a, a.from, a.rows * a.n), to = te_order_scratch(a, a.to, a.rows * kept);
    for (int64_t b = blockIdx.x; b < a.rows * tiles; b += gridDim.x) {
        int64_t         r = b / tiles, t = b - r * tiles, begin = t * tile;
        int64_t         count = a.n - begin < tile ? a.n - begin : tile, wanted = t < tiles - 1 ? a.k : a.k_last;
        const te_a     *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        te_order_keys   key;
        te_order_places at, place;
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            at[k] = te_order_index(k);
            key[k] = ~(te_key_word)0;
            if (at[k] >= count) continue;
            key[k] = a.from < 0 ? te_order_key(a, row[(begin + at[k]) * stride]) : from.keys[r * a.n + begin + at[k]];
        }
        te_key_word differ = te_order_differ(key, count);
#pragma unroll 1
        for (int shift = 0; shift < (int)sizeof(te_key_word) * 8; shift += TE_ORDER_BITS) {
            if (te_order_digit(differ, shift) == 0) continue;
            te_order_rank(key, place, shift, counts);
#pragma unroll
            for (int k = 0; k < TE_ORDER_EACH; k++) {
                keys[place[k]] = key[k];
                places[place[k]] = (uint16_t)at[k];
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < TE_ORDER_EACH; k++) {
                key[k] = keys[te_order_index(k)];
                at[k] = places[te_order_index(k)];
            }
        }
        int64_t *indices = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        te_a    *values = (te_a *)a.out.data + (a.out.data ? te_offset(a.out, last, r) : 0);
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            int64_t j = te_order_index(k);
            if (j >= wanted) continue;
            int64_t position = a.from < 0 ? begin + at[k] : from.positions[r * a.n + begin + at[k]];
            if (a.to >= 0) {
                to.keys[r * kept + t * a.k + j] = key[k];
                to.positions[r * kept + t * a.k + j] = (uint32_t)position;
                continue;
            }
            indices[j * a.indices.stride[last]] = position;
            if (a.out.data) values[j * a.out.stride[last]] = row[position * stride];
        }
    }
}

/* --- long rows --------------------------------------------------------------------------------------------------- */

/* In scratch memory: keys[2][rows][n] and positions[2][rows][n]; counts[rows][digits][blocks], which te_order_scan
 * makes the counts of the blocks before; totals[rows][digits]; and halves[rows][1 + digits of a key], where a row's
 * elements are before each digit and at the end. */
struct te_order_memory {
    te_key_word *keys;
    uint32_t    *positions, *counts, *totals, *halves;
};

enum { TE_ORDER_PASSES = sizeof(te_key_word) * 8 / TE_ORDER_BITS };

__device__ static inline te_order_memory te_order_lay_out(const te_order_args &a)
{
    te_order_memory m;
    m.keys = (te_key_word *)a.bound.scratch;
    m.positions = (uint32_t *)(m.keys + 2 * a.rows * a.n);
    m.counts = m.positions + 2 * a.rows * a.n;
    m.totals = m.counts + a.rows * TE_ORDER_DIGITS * a.blocks;
    m.halves = m.totals + a.rows * TE_ORDER_DIGITS;
    return m;
}

/* A row's elements before a digit: before the first one they are the source. */
struct te_order_row {
    const te_a        *row;
    int64_t            stride;
    const te_key_word *keys;
    const uint32_t    *positions;
    uint32_t           half;
};

__device__ static inline te_order_row te_order_row_of(const te_order_args &a, const te_order_memory &m, int64_t r)
{
    te_order_row x;
    int64_t      last = a.src.ndim - 1;
    x.half = a.pass ? m.halves[r * (TE_ORDER_PASSES + 1) + a.pass] : 0;
    x.row = (const te_a *)a.src.data + te_offset(a.src, last, r);
    x.stride = a.src.stride[last];
    x.keys = m.keys + (x.half * a.rows + r) * a.n;
    x.positions = m.positions + (x.half * a.rows + r) * a.n;
    return x;
}

extern "C" __global__ void __launch_bounds__(512) te_order_count(const __grid_constant__ te_order_args a)
{
    __shared__ uint32_t counts[TE_ORDER_DIGITS];
    te_order_memory     m = te_order_lay_out(a);
    int64_t             r = blockIdx.x / a.blocks, block = blockIdx.x - r * a.blocks, begin = block * a.stretch;
    int64_t             end = begin + a.stretch < a.n ? begin + a.stretch : a.n;
    int64_t             tile = (int64_t)blockDim.x * TE_ORDER_EACH;
    int                 shift = (int)a.pass * TE_ORDER_BITS;
    te_order_row        x = te_order_row_of(a, m, r);
    for (unsigned d = threadIdx.x; d < TE_ORDER_DIGITS; d += blockDim.x) counts[d] = 0;
    __syncthreads();
    for (int64_t first = begin + threadIdx.x; first < end; first += tile) {
        te_order_keys key;
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            int64_t i = first + k * (int64_t)blockDim.x;
            if (i < end) key[k] = a.pass ? x.keys[i] : te_order_key(a, x.row[i * x.stride]);
        }
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++)
            if (first + k * (int64_t)blockDim.x < end) atomicAdd(&counts[te_order_digit(key[k], shift)], 1u);
    }
    __syncthreads();
    for (unsigned d = threadIdx.x; d < TE_ORDER_DIGITS; d += blockDim.x)
        m.counts[(r * TE_ORDER_DIGITS + d) * a.blocks + block] = counts[d];
}

/* A warp for each value of a row's digit. */
extern "C" __global__ void __launch_bounds__(256) te_order_scan(const __grid_constant__ te_order_args a)
{
    te_order_memory m = te_order_lay_out(a);
    unsigned        lane = threadIdx.x % 32;
    for (int64_t i = TE_FIRST / 32; i < a.rows * TE_ORDER_DIGITS; i += TE_STEP / 32) {
        uint32_t *counts = m.counts + i * a.blocks, before = 0;
        for (int64_t first = 0; first < a.blocks; first += 32) {
            uint32_t count = first + lane < a.blocks ? counts[first + lane] : 0, sum = count;
#pragma unroll
            for (unsigned by = 1; by < 32; by *= 2) {
                uint32_t below = __shfl_up_sync(0xffffffffu, sum, by);
                if (lane >= by) sum += below;
            }
            if (first + lane < a.blocks) counts[first + lane] = before + sum - count;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) m.totals[i] = before;
    }
}

extern "C" __global__ void __launch_bounds__(512) te_order_pass(const __grid_constant__ te_order_args a)
{
    __shared__ uint32_t base[TE_ORDER_DIGITS];
    __shared__ int      all_alike;
    TE_DYNAMIC_SHARED(te_key_word, keys);
    int64_t         tile = (int64_t)blockDim.x * TE_ORDER_EACH;
    uint32_t       *positions = (uint32_t *)(keys + tile), *counts = positions + tile;
    te_order_memory m = te_order_lay_out(a);
    int64_t         r = blockIdx.x / a.blocks, block = blockIdx.x - r * a.blocks, begin = block * a.stretch;
    int64_t         end = begin + a.stretch < a.n ? begin + a.stretch : a.n;
    int             shift = (int)a.pass * TE_ORDER_BITS;
    te_order_row    x = te_order_row_of(a, m, r);
    unsigned        digits = TE_ORDER_DIGITS / blockDim.x ? TE_ORDER_DIGITS / blockDim.x : 1, d0 = threadIdx.x * digits;
    uint32_t        total = 0;
    if (threadIdx.x == 0) all_alike = 0;
    __syncthreads();
    for (unsigned d = d0; d < d0 + digits && d < TE_ORDER_DIGITS; d++) {
        uint32_t count = m.totals[r * TE_ORDER_DIGITS + d];
        if (count == a.n) all_alike = 1;
        total += count;
    }
    uint32_t before = te_sum_before<TE_ORDER_WARPS>(total); /* has barriers */
    bool     stays = all_alike && a.pass > 0;
    uint32_t half = stays ? x.half : a.pass ? 1 - x.half : 0;
    if (block == 0 && threadIdx.x == 0) m.halves[r * (TE_ORDER_PASSES + 1) + a.pass + 1] = half;
    if (stays) return;
    for (unsigned d = d0; d < d0 + digits && d < TE_ORDER_DIGITS; d++) {
        base[d] = before + m.counts[(r * TE_ORDER_DIGITS + d) * a.blocks + block];
        before += m.totals[r * TE_ORDER_DIGITS + d];
    }
    te_key_word *keys_to = m.keys + (half * a.rows + r) * a.n;
    uint32_t    *positions_to = m.positions + (half * a.rows + r) * a.n;
    for (int64_t first = begin; first < end; first += tile) {
        te_order_keys   key;
        te_order_places position, place;
        int64_t         count = end - first < tile ? end - first : tile;
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            int64_t at = te_order_index(k), i = first + at;
            key[k] = ~(te_key_word)0;
            position[k] = (uint32_t)i;
            if (at >= count) continue;
            key[k] = a.pass ? x.keys[i] : te_order_key(a, x.row[i * x.stride]);
            if (a.pass) position[k] = x.positions[i];
        }
        te_order_rank(key, place, shift, counts);
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            keys[place[k]] = key[k];
            positions[place[k]] = position[k];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) { /* neighbours of one digit to neighbouring places */
            unsigned i = threadIdx.x + k * blockDim.x;
            if (i >= count) continue;
            te_key_word moved = keys[i];
            unsigned    d = te_order_digit(moved, shift);
            uint32_t    to = base[d] + (i - counts[d]);
            keys_to[to] = moved;
            positions_to[to] = positions[i];
        }
        __syncthreads();
        for (unsigned d = d0; d < d0 + digits && d < TE_ORDER_DIGITS; d++)
            base[d] += (d + 1 < TE_ORDER_DIGITS ? counts[d + 1] : (uint32_t)tile) - counts[d];
        __syncthreads();
    }
}

/* The first k of each row to where they are wanted. */
extern "C" __global__ void __launch_bounds__(256) te_order_store(const __grid_constant__ te_order_args a)
{
    te_order_memory m = te_order_lay_out(a);
    int64_t         last = a.src.ndim - 1, tile = (int64_t)blockDim.x * TE_ORDER_EACH, tiles = (a.k + tile - 1) / tile;
    for (int64_t b = blockIdx.x; b < a.rows * tiles; b += gridDim.x) {
        int64_t         r = b / tiles, begin = (b - r * tiles) * tile;
        const te_a     *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        uint32_t        half = m.halves[r * (TE_ORDER_PASSES + 1) + TE_ORDER_PASSES];
        const uint32_t *positions = m.positions + (half * a.rows + r) * a.n;
        int64_t        *indices = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        te_a           *values = (te_a *)a.out.data + (a.out.data ? te_offset(a.out, last, r) : 0);
#pragma unroll
        for (int k = 0; k < TE_ORDER_EACH; k++) {
            int64_t j = begin + k * (int64_t)blockDim.x + threadIdx.x;
            if (j >= a.k) continue;
            int64_t position = positions[j];
            indices[j * a.indices.stride[last]] = position;
            if (a.out.data) values[j * a.out.stride[last]] = row[position * a.src.stride[last]];
        }
    }
}
