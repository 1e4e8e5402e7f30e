/* shares.h - joining what the blocks that share a row left of its reductions: n parts, one behind another. Every block
 * of THREADS that needs the result joins them itself, all in the same order. */
template <int THREADS> __device__ static inline te_real te_shares_rowsum(const te_real *parts, int n, te_real *places)
{
    te_real x = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) x += parts[i];
    return te_row_rowsum<THREADS>(x, places);
}

template <int THREADS> __device__ static inline te_real te_shares_rowmax(const te_real *parts, int n, te_real *places)
{
    te_real x = -(te_real)TE_INFINITY;
    for (int i = threadIdx.x; i < n; i += THREADS) x = te_row_max(x, parts[i]);
    return te_row_rowmax<THREADS>(x, places);
}

template <int THREADS> __device__ static inline te_real te_shares_rowmin(const te_real *parts, int n, te_real *places)
{
    te_real x = (te_real)TE_INFINITY;
    for (int i = threadIdx.x; i < n; i += THREADS) x = te_op_join_rowmin(x, parts[i]);
    return te_row_rowmin<THREADS>(x, places);
}

/* Sums of exponentials below a maximum of each part's own, to one below the row's. A part of nothing but -infinity has
 * the sum 0; a row of nothing else makes NaN, as its maximum is subtracted from itself. */
template <int THREADS>
__device__ static inline te_real te_shares_below(const te_real *parts, const te_real *maxima, te_real maximum, int n,
                                                 te_real *places)
{
    te_real x = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) x += parts[i] * te_row_exp(maxima[i] - maximum);
    return te_row_rowsum<THREADS>(x, places);
}
