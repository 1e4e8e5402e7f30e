/* elements.h - elements in memory: units of several, conversion to and from te_real, random words. */

/* V elements that one or two 16-byte accesses move. */
template <class T, int V> struct __align__(sizeof(T) * V < 16 ? sizeof(T) * V : 16) te_unit {
    T e[V];
};

template <class T, int V> TE_HD static inline te_unit<T, V> te_unit_load(const T *at)
{
    return *(const te_unit<T, V> *)at;
}

template <class T, int V> TE_HD static inline void te_unit_store(T *at, const te_unit<T, V> &unit)
{
    *(te_unit<T, V> *)at = unit;
}

/* Where a column lies among columns in blocks that alternate with others. */
template <class I> TE_HD static inline I te_place(I column, I block) { return column + column / block * block; }

/* The first n of V elements `stride` apart; zeros behind them. */
template <class T, int V, class I> TE_HD static inline te_unit<T, V> te_unit_gather(const T *at, I stride, int n)
{
    te_unit<T, V> unit;
#pragma unroll
    for (int k = 0; k < V; k++) unit.e[k] = k < n ? at[k * stride] : (T)0;
    return unit;
}

template <class T, int V, class I>
TE_HD static inline void te_unit_scatter(T *at, I stride, int n, const te_unit<T, V> &unit)
{
#pragma unroll
    for (int k = 0; k < V; k++)
        if (k < n) at[k * stride] = unit.e[k];
}

/* By dtype: te_from_NAME to a value, te_as_NAME from one. Rounded once. */
TE_HD static inline te_real te_from_float32(float x) { return (te_real)x; }
TE_HD static inline te_real te_from_float64(double x) { return (te_real)x; }
TE_HD static inline te_real te_from_bfloat16(uint16_t x) { return (te_real)te_bf16_to_f32(x); }
TE_HD static inline te_real te_from_float16(uint16_t x) { return (te_real)te_f16_to_f32(x); }
TE_HD static inline te_real te_from_int64(int64_t x) { return (te_real)x; }
TE_HD static inline te_real te_from_int32(int32_t x) { return (te_real)x; }
TE_HD static inline te_real te_from_uint8(uint8_t x) { return (te_real)x; }
TE_HD static inline te_real te_from_bool(uint8_t x) { return (te_real)(x != 0); }
TE_HD static inline te_real te_from_float8_e4m3(uint8_t x) { return (te_real)te_f8e4m3_to_f32(x); }
TE_HD static inline te_real te_from_float8_e5m2(uint8_t x) { return (te_real)te_f8e5m2_to_f32(x); }

#if TE_REAL_IS_F32
#define TE_NARROW(type) te_f32_to_##type
#else
#define TE_NARROW(type) te_f64_to_##type
#endif
TE_HD static inline float    te_as_float32(te_real x) { return (float)x; }
TE_HD static inline double   te_as_float64(te_real x) { return (double)x; }
TE_HD static inline uint16_t te_as_bfloat16(te_real x) { return TE_NARROW(bf16)(x); }
TE_HD static inline uint16_t te_as_float16(te_real x) { return TE_NARROW(f16)(x); }
TE_HD static inline int64_t  te_as_int64(te_real x) { return TE_NARROW(i64)(x); }
TE_HD static inline int32_t  te_as_int32(te_real x) { return TE_NARROW(i32)(x); }
TE_HD static inline uint8_t  te_as_uint8(te_real x) { return TE_NARROW(u8)(x); }
TE_HD static inline uint8_t  te_as_bool(te_real x) { return x != 0; }
TE_HD static inline uint8_t  te_as_float8_e4m3(te_real x) { return TE_NARROW(f8e4m3)(x); }
TE_HD static inline uint8_t  te_as_float8_e5m2(te_real x) { return TE_NARROW(f8e5m2)(x); }

/* --- random numbers ---------------------------------------------------------------------------------------------- */

/* The words of elements first … first + V - 1: one generator call for four of them where they begin on a multiple. */
template <int V> TE_HD static inline te_unit<uint32_t, V> te_unit_words(te_rng rng, uint64_t first)
{
    te_unit<uint32_t, V> words;
    if (V % 4 == 0 && first % 4 == 0) {
#pragma unroll
        for (int k = 0; k < V / 4; k++) {
            te_philox_words four = te_rng_group(rng, first / 4 + k);
            words.e[(4 * k) % V] = four.word[0];
            words.e[(4 * k + 1) % V] = four.word[1];
            words.e[(4 * k + 2) % V] = four.word[2];
            words.e[(4 * k + 3) % V] = four.word[3];
        }
    } else {
#pragma unroll
        for (int k = 0; k < V; k++) {
            te_philox_words four = te_rng_group(rng, (first + k) / 4);
            uint32_t        at = (uint32_t)(first + k) % 4;
            words.e[k] = at < 2 ? (at == 0 ? four.word[0] : four.word[1]) : (at == 2 ? four.word[2] : four.word[3]);
        }
    }
    return words;
}

/* Standard normals of those elements. */
template <int V> TE_HD static inline te_unit<float, V> te_unit_normals(te_rng rng, uint64_t first)
{
    te_unit<float, V> normals;
#pragma unroll
    for (int k = 0; k < V; k++) {
        te_philox_words four = te_rng_group(rng, (first + k) / 4);
        bool            odd = (first + k) & 1, upper = (first + k) & 2;
        normals.e[k] = te_rng_normal(upper ? four.word[2] : four.word[0], upper ? four.word[3] : four.word[1], odd);
    }
    return normals;
}
