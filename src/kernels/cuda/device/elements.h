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

/* The first n of V elements `stride` apart; zeros behind them. */
template <class T, int V, class I> TE_HD static inline te_unit<T, V> te_unit_gather(const T *at, I stride, int n)
{
    te_unit<T, V> unit;
#pragma unroll
    for (int k = 0; k < V; k++) unit.e[k] = k < n ? at[k * stride] : (T)0;
    return unit;
}

/* What lies in memory as these words, the first element in the lowest bits. */
template <class T, int V, int N> TE_HD static inline te_unit<T, V> te_unit_of_words(const te_unit<uint32_t, N> &words)
{
    union {
        te_unit<uint32_t, N> words;
        te_unit<T, V>        unit;
    } both;
    both.words = words;
    return both.unit;
}

/* The first n of V elements, zeros behind them. Small ones are put together as words, which the compiler must not take
 * apart where that meets the load of all: each element would take one instruction more. */
template <class T, int V> TE_HD static inline te_unit<T, V> te_unit_load_part(const T *at, int n)
{
    constexpr int per_word = sizeof(T) < 4 && sizeof(T) * V % 4 == 0 ? (int)(4 / sizeof(T)) : 1;
    if constexpr (per_word == 1) {
        if (n == V) return te_unit_load<T, V>(at);
        return te_unit_gather<T, V>(at, 1, n);
    } else {
        te_unit<uint32_t, V / per_word> words = {};
        if (n == V) {
            words = te_unit_load<uint32_t, V / per_word>((const uint32_t *)at);
        } else {
#pragma unroll
            for (int k = 0; k < V; k++)
                if (k < n) words.e[k / per_word] |= (uint32_t)at[k] << k % per_word * 8 * (int)sizeof(T);
        }
#ifdef __CUDA_ARCH__
#pragma unroll
        for (int k = 0; k < V / per_word; k++) asm("" : "+r"(words.e[k]));
#endif
        return te_unit_of_words<T, V>(words);
    }
}

/* Where a column lies among columns in blocks that alternate with others. */
template <class I> TE_HD static inline I te_place(I column, I block) { return column + column / block * block; }

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

/* --- units of values --------------------------------------------------------------------------------------------- */

/* GPUs convert two values at a time, to the same codes: to nearest, ties to even, subnormal numbers kept. But every NaN
 * becomes the same one: of FP8 that is the only one there is. The first source of these instructions goes to the upper
 * half. */
TE_HD static inline uint32_t te_four_e4m3(float x, float y, float z, float w)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t codes;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(codes) : "f"(x), "f"(y), "f"(z), "f"(w));
    return codes;
#else
    return te_f32_to_f8e4m3(x) | (uint32_t)te_f32_to_f8e4m3(y) << 8 | (uint32_t)te_f32_to_f8e4m3(z) << 16 |
           (uint32_t)te_f32_to_f8e4m3(w) << 24;
#endif
}

TE_HD static inline uint32_t te_four_e5m2(float x, float y, float z, float w)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t codes;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(codes) : "f"(x), "f"(y), "f"(z), "f"(w));
    return codes;
#else
    return te_f32_to_f8e5m2(x) | (uint32_t)te_f32_to_f8e5m2(y) << 8 | (uint32_t)te_f32_to_f8e5m2(z) << 16 |
           (uint32_t)te_f32_to_f8e5m2(w) << 24;
#endif
}

/* Two codes in a word; only of numbers are they those of te_f32_to_bf16 and te_f32_to_f16. */
TE_HD static inline uint32_t te_pair_bf16(float x, float y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t codes;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(codes) : "f"(x), "f"(y));
    return codes;
#else
    return te_f32_to_bf16(x) | (uint32_t)te_f32_to_bf16(y) << 16;
#endif
}

TE_HD static inline uint32_t te_pair_f16(float x, float y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t codes;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(codes) : "f"(x), "f"(y));
    return codes;
#else
    return te_f32_to_f16(x) | (uint32_t)te_f32_to_f16(y) << 16;
#endif
}

/* te_unit_as_NAME: V values, each as te_as_NAME has it. */
#define TE_UNIT_AS(name, T)                                                                                            \
    template <int V> TE_HD static inline te_unit<T, V> te_unit_as_##name(const te_real (&x)[V])                        \
    {                                                                                                                  \
        te_unit<T, V> unit;                                                                                            \
        _Pragma("unroll") for (int k = 0; k < V; k++) unit.e[k] = te_as_##name(x[k]);                                  \
        return unit;                                                                                                   \
    }
TE_UNIT_AS(float32, float)
TE_UNIT_AS(float64, double)
TE_UNIT_AS(int64, int64_t)
TE_UNIT_AS(int32, int32_t)
TE_UNIT_AS(uint8, uint8_t)
TE_UNIT_AS(bool, uint8_t)
#if TE_REAL_IS_F32
/* Whether there is a NaN is asked once for all. */
#define TE_UNIT_AS_PAIRS(name, type)                                                                                   \
    template <int V> TE_HD static inline te_unit<uint16_t, V> te_unit_as_##name(const float (&x)[V])                   \
    {                                                                                                                  \
        if constexpr (V % 2 != 0) {                                                                                    \
            te_unit<uint16_t, V> unit;                                                                                 \
            _Pragma("unroll") for (int k = 0; k < V; k++) unit.e[k] = te_as_##name(x[k]);                              \
            return unit;                                                                                               \
        } else {                                                                                                       \
            te_unit<uint32_t, V / 2> words;                                                                            \
            bool                     none = false;                                                                     \
            _Pragma("unroll") for (int k = 0; k < V; k += 2)                                                           \
            {                                                                                                          \
                words.e[k / 2] = te_pair_##type(x[k], x[k + 1]);                                                       \
                none |= (x[k] != x[k]) | (x[k + 1] != x[k + 1]);                                                   \
            }                                                                                                          \
            if (none) {                                                                                                \
                _Pragma("unroll") for (int k = 0; k < V; k += 2)                                                       \
                    words.e[k / 2] = te_f32_to_##type(x[k]) | (uint32_t)te_f32_to_##type(x[k + 1]) << 16;              \
            }                                                                                                          \
            return te_unit_of_words<uint16_t, V>(words);                                                               \
        }                                                                                                              \
    }
TE_UNIT_AS_PAIRS(bfloat16, bf16)
TE_UNIT_AS_PAIRS(float16, f16)
#define TE_UNIT_AS_FOURS(name, type)                                                                                   \
    template <int V> TE_HD static inline te_unit<uint8_t, V> te_unit_as_##name(const float (&x)[V])                    \
    {                                                                                                                  \
        if constexpr (V % 4 != 0) {                                                                                    \
            te_unit<uint8_t, V> unit;                                                                                  \
            _Pragma("unroll") for (int k = 0; k < V; k++) unit.e[k] = te_as_##name(x[k]);                              \
            return unit;                                                                                               \
        } else {                                                                                                       \
            te_unit<uint32_t, V / 4> words;                                                                            \
            _Pragma("unroll") for (int k = 0; k < V; k += 4)                                                           \
                words.e[k / 4] = te_four_##type(x[k], x[k + 1], x[k + 2], x[k + 3]);                                   \
            return te_unit_of_words<uint8_t, V>(words);                                                                \
        }                                                                                                              \
    }
TE_UNIT_AS_FOURS(float8_e4m3, e4m3)
TE_UNIT_AS_FOURS(float8_e5m2, e5m2)
#else
TE_UNIT_AS(bfloat16, uint16_t)
TE_UNIT_AS(float16, uint16_t)
TE_UNIT_AS(float8_e4m3, uint8_t)
TE_UNIT_AS(float8_e5m2, uint8_t)
#endif

/* --- random numbers ---------------------------------------------------------------------------------------------- */

/* With what a graph's base adds to it, which then is not read again for every unit. */
TE_HD static inline te_rng te_rng_begin(te_rng rng)
{
    te_rng begun = {rng.seed, rng.stream, rng.offset, 0};
    if (rng.base) {
        begun.seed = rng.base[0];
        begun.offset += rng.base[1];
    }
    return begun;
}

/* Whether the word is at least the threshold: one comparison of 32 bits, and one for all words. */
TE_HD static inline bool te_rng_keeps(uint32_t word, uint64_t threshold)
{
    return (word >= (uint32_t)threshold) & (threshold >> 32 == 0);
}

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

/* Standard normals of those elements; two share what their two words give. */
template <int V> TE_HD static inline te_unit<float, V> te_unit_normals(te_rng rng, uint64_t first)
{
    te_unit<float, V> normals;
    if (V % 4 == 0 && first % 4 == 0) {
        te_unit<uint32_t, V> words = te_unit_words<V>(rng, first);
#pragma unroll
        for (int k = 0; k < V; k++)
            normals.e[k] = te_rng_normal(words.e[k & ~1], words.e[(k | 1) % V], k & 1);
        return normals;
    }
#pragma unroll
    for (int k = 0; k < V; k++) {
        te_philox_words four = te_rng_group(rng, (first + k) / 4);
        bool            odd = (first + k) & 1, upper = (first + k) & 2;
        normals.e[k] = te_rng_normal(upper ? four.word[2] : four.word[0], upper ? four.word[3] : four.word[1], odd);
    }
    return normals;
}
