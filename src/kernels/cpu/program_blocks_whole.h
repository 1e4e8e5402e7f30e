/* program_blocks_whole.h - float64 from int64 and back. A part of program_blocks_body.h.
 *
 * Processors without AVX-512 have no instruction that converts several 64-bit integers. Those below 2^51 in magnitude
 * are converted by their bits: 1.5 * 2^52 + v has v in its lowest ones.
 */
#define MIDDLE    0x1.8p52 /* what negative ones are added to, and its bits */
#define MIDDLE_AT 0x4338000000000000u
#define ABOVE     0x1p52 /* what others are added to */
#define ABOVE_AT  0x4330000000000000u
#define LIMIT_AT  0x4320000000000000u /* the bits of 2^51 */
#define SIGN      0x8000000000000000u

static void load_i64(void *dst, const void *src, int64_t stride, size_t n)
{
    double        *d = dst;
    const int64_t *s = src;
    uint64_t       large = stride == 1 ? 0 : UINT64_MAX;
    if (stride == 1) {
        _Pragma("omp simd reduction(| : large)")
        for (size_t i = 0; i < n; i++) large |= (uint64_t)s[i] + (UINT64_C(1) << 51);
    }
    if (large >> 52 == 0) {
        TE_EACH d[i] = te_f64_from_bits((uint64_t)s[i] + MIDDLE_AT) - MIDDLE;
    } else {
        for (size_t i = 0; i < n; i++) d[i] = (double)s[(int64_t)i * stride];
    }
}

/* Without the fraction: the nearest whole number of the magnitude, and one less where that is larger. */
static inline int64_t toward_zero(double value)
{
    uint64_t x = te_f64_bits(value), minus = (uint64_t)0 - (x >> 63);
    double   size = te_f64_from_bits(x & ~SIGN), near = size + ABOVE;
    uint64_t v = te_f64_bits(near) - ABOVE_AT - (te_f64_bits(size - (near - ABOVE)) >> 63);
    return (int64_t)((v ^ minus) - minus);
}

static void store_i64(void *dst, int64_t stride, const void *src, size_t n)
{
    int64_t      *d = dst;
    const double *s = src;
    uint64_t      large = stride == 1 ? 0 : SIGN;
    if (stride == 1) {
        _Pragma("omp simd reduction(| : large)")
        for (size_t i = 0; i < n; i++) large |= (te_f64_bits(s[i]) & ~SIGN) + (SIGN - LIMIT_AT);
    }
    if (large < SIGN) {
        TE_EACH d[i] = toward_zero(s[i]);
    } else {
        for (size_t i = 0; i < n; i++) d[(int64_t)i * stride] = te_f64_to_i64(s[i]);
    }
}

#undef MIDDLE
#undef MIDDLE_AT
#undef ABOVE
#undef ABOVE_AT
#undef LIMIT_AT
#undef SIGN
