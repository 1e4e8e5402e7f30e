/* quantize.cu - matrices to quantized matrices, by the tiles of quantize_tile.cu. TE_DIM is the variant of the
 * quantizer. */

static __device__ bool te_stays(const te_quantize_args &a) { return a.kept && a.kept[1] == 0; }

/* Whether the factor is another one than that of the bytes which are there (te_quantize_args.decides). Blocks compare
 * for themselves; when all have, the last one to end writes the factor down. */
static __device__ bool te_has_changed(const te_quantize_args &a)
{
    return te_f32_bits(a.given ? *a.given : 1.0f) != te_f32_bits(a.kept[0]);
}

static __device__ void te_keep_factor(const te_quantize_args &a)
{
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd((uint32_t *)&a.kept[2], 1u) != gridDim.x - 1) return;
    a.kept[0] = a.given ? *a.given : 1.0f;
    a.kept[2] = 0;
}

static __device__ te_tile te_tile_of(const te_quantize_args &a, char *shared, uint32_t t)
{
    uint32_t across = (uint32_t)((a.cols + TE_SQUARE - 1) / TE_SQUARE);
    return te_tile{(uint8_t *)shared, (float *)(shared + TE_SQUARE * TE_SQUARE), (int64_t)(t / across) * TE_SQUARE,
                   (int64_t)(t % across) * TE_SQUARE};
}

static __device__ uint32_t te_tile_count(const te_quantize_args &a)
{
    return (uint32_t)((a.rows + TE_SQUARE - 1) / TE_SQUARE * ((a.cols + TE_SQUARE - 1) / TE_SQUARE));
}

extern "C" __global__ void __launch_bounds__(256) te_quantize_measure(const __grid_constant__ te_quantize_args a)
{
    if (te_stays(a)) return;
    for (uint32_t t = blockIdx.x, n = te_tile_count(a); t < n; t += gridDim.x) {
        te_tile  x = te_tile_of(a, 0, t);
        te_eight v[8];
        te_load_source(a, x, v);
        te_measure_tile<TE_DIM>(a, x, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) te_quantize(const __grid_constant__ te_quantize_args a)
{
    TE_DYNAMIC_SHARED(char, shared);
    if (a.decides ? !te_has_changed(a) : te_stays(a)) {
        const float *amax = a.side[0].amax ? a.side[0].amax : a.side[1].amax;
        if (a.decides && a.seen && amax && TE_FIRST == 0) te_raise(a.seen, *amax); /* what stays counts all the same */
        return;
    }
    for (uint32_t t = blockIdx.x, n = te_tile_count(a); t < n; t += gridDim.x) {
        te_tile  x = te_tile_of(a, shared, t);
        te_eight v[8];
        te_load_source(a, x, v);
        te_quantize_values<TE_DIM>(a, x, v);
    }
    for (int s = 0; s < 2 && TE_FIRST == 0; s++) te_put_whole(a, s);
    if (a.decides) te_keep_factor(a);
}
