/* keys.cu - keys by which elements are compared: they order as the values do, any type, NaN above everything (below
 * everything when the smallest is wanted, so it is always the extreme), -0 equal to +0.
 */

#define TE_HAS_SHORT_KEY (TE_REAL_IS_F32 && !TE_A_IS_INT64)

#if TE_HAS_SHORT_KEY /* of few GPUs arithmetic in float64 is quick, and of none that in int64 as quick as in int32 */
typedef uint32_t te_key_word;

TE_HD static inline uint32_t te_key(te_a x, bool largest)
{
# if TE_A_IS_INTEGER
    uint32_t key = (uint32_t)(int32_t)x ^ (uint32_t)1 << 31;
# else
    float value = te_from_a(x);
    if (value != value) return ~(uint32_t)0;
    uint32_t bits = te_f32_bits(value + 0.0f), key = bits >> 31 ? ~bits : bits | (uint32_t)1 << 31;
# endif
    return largest ? key : ~key;
}
#else
typedef uint64_t te_key_word;

TE_HD static inline uint64_t te_key(te_a x, bool largest)
{
# if TE_A_IS_INTEGER
    uint64_t key = (uint64_t)(int64_t)x ^ (uint64_t)1 << 63;
# else
    double value = (double)te_from_a(x);
    if (value != value) return ~(uint64_t)0;
    uint64_t bits = te_f64_bits(value + 0.0), key = bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
# endif
    return largest ? key : ~key;
}
#endif
