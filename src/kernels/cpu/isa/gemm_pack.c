/* gemm_pack.c - from strided matrices to panels.
 *
 * A panel interleaves `width` lines: word w of line i goes to panel[w * width + i]. Matrices come in two good layouts:
 * lines that lie side by side (one step of all lines is a contiguous run) and lines that are contiguous themselves,
 * which are transposed in blocks of SIDE x SIDE words in registers. Anything else is gathered word by word.
 */
#include "../../dtype.h"
#include "../gemm.h"

#include <string.h>
#if defined(TE_ISA_avx2) || defined(TE_ISA_avx512)
#include <immintrin.h>
#endif

#if defined(TE_ISA_avx512)
enum { SIDE = 8 };
#else
enum { SIDE = 4 };
#endif

typedef uint32_t words __attribute__((vector_size(4 * SIDE)));
typedef uint16_t halves __attribute__((vector_size(2 * SIDE)));

static inline words load_words(const char *p)
{
    words v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline words load_halves(const char *p)
{
#if defined(TE_ISA_avx2)
    return (words)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)); /* GCC converts one by one */
#else
    halves v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, words);
#endif
}

static inline uint32_t half_at(const char *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t f16_to_word(uint32_t h)
{
    float f = te_f16_to_f32((uint16_t)h);
    uint32_t w;
    memcpy(&w, &f, sizeof w);
    return w;
}

/* SIDE neighbouring elements as words. */
static inline __attribute__((always_inline)) words load_line(te_gemm_word word, const char *p)
{
    if (word == TE_GEMM_WORD_BF16) return load_halves(p) << 16;
    if (word == TE_GEMM_WORD_F32) return load_words(p);
#if defined(TE_ISA_avx512)
    return (words)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(TE_ISA_avx2)
    return (words)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p));
#else
    words v = load_halves(p);
    for (int i = 0; i < SIDE; i++) v[i] = f16_to_word(v[i]);
    return v;
#endif
}

static inline __attribute__((always_inline)) uint32_t load_one(te_gemm_word word, const char *p)
{
    if (word == TE_GEMM_WORD_BF16) return half_at(p) << 16;
    if (word == TE_GEMM_WORD_F16) return f16_to_word(half_at(p));
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline __attribute__((always_inline)) void transpose(words r[SIDE])
{
#if defined(TE_ISA_avx512)
    words a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    words a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    words c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
#endif
}

/* Steps [from, to) of lines [line, extent), element by element. */
static inline __attribute__((always_inline)) void pack_scattered(te_gemm_word word, const te_gemm_pack *p,
                                                                 uint32_t *panel, int line, int64_t from, int64_t to)
{
    for (int i = line; i < p->extent; i++)
        for (int64_t w = from; w < to; w++)
            panel[w * p->width + i] = load_one(word, p->src + i * p->line_stride + w * p->k_stride);
}

/* Contiguous lines: groups of SIDE lines by SIDE steps, then what is left of either. */
static inline __attribute__((always_inline)) void pack_along_k(te_gemm_word word, const te_gemm_pack *p,
                                                               uint32_t *panel)
{
    int64_t whole = p->k - p->k % SIDE;
    int line = 0;
    for (; line + SIDE <= p->extent; line += SIDE) {
        const char *src = p->src + line * p->line_stride;
        for (int64_t w = 0; w < whole; w += SIDE) {
            words block[SIDE];
            for (int i = 0; i < SIDE; i++) block[i] = load_line(word, src + i * p->line_stride + w * p->k_stride);
            transpose(block);
            for (int i = 0; i < SIDE; i++) memcpy(panel + (w + i) * p->width + line, &block[i], sizeof block[i]);
        }
    }
    te_gemm_pack lines = *p;
    lines.extent = line;
    pack_scattered(word, &lines, panel, 0, whole, p->k);
    pack_scattered(word, p, panel, line, 0, p->k);
}

/* Lines side by side: each step is a contiguous run. */
static inline __attribute__((always_inline)) void pack_across(te_gemm_word word, const te_gemm_pack *p, uint32_t *panel)
{
    int whole = p->extent - p->extent % SIDE;
    for (int64_t w = 0; w < p->k; w++) {
        const char *src = p->src + w * p->k_stride;
        uint32_t *dst = panel + w * p->width;
        for (int i = 0; i < whole; i += SIDE) {
            words v = load_line(word, src + i * p->line_stride);
            memcpy(dst + i, &v, sizeof v);
        }
        for (int i = whole; i < p->extent; i++) dst[i] = load_one(word, src + i * p->line_stride);
    }
}

static inline __attribute__((always_inline)) void pack_words(te_gemm_word word, int64_t unit, const te_gemm_pack *p,
                                                             uint32_t *panel)
{
    if (p->k_stride == unit) pack_along_k(word, p, panel);
    else if (p->line_stride == unit) pack_across(word, p, panel);
    else pack_scattered(word, p, panel, 0, 0, p->k);
}

#if defined(TE_ISA_avx512)
enum { GROUP = 32 }; /* lines of 16 bits in a vector */

/* Words of GROUP lines from two steps of k: lines 0 to 15 in out[0], the others in out[1]. Lines outside the mask, and
 * the second step where there is none, are 0. */
static inline __attribute__((always_inline)) void load_group(const char *src, int64_t next, __mmask32 lines, bool pair,
                                                             __m512i out[2])
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i front = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_or_si512(lane, _mm512_set1_epi32(32)), 16));
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    __m512i even = _mm512_maskz_loadu_epi16(lines, src), odd = _mm512_setzero_si512();
    if (pair) odd = _mm512_maskz_loadu_epi16(lines, src + next);
    out[0] = _mm512_permutex2var_epi16(even, front, odd);
    out[1] = _mm512_permutex2var_epi16(even, back, odd);
}

static __mmask32 lines_from(const te_gemm_pack *p, int line)
{
    int n = p->extent - line;
    return n >= GROUP ? ~(__mmask32)0 : ((__mmask32)1 << n) - 1;
}

/* Steps of k that are far apart are in pages of their own, beyond which processors do not look ahead: the bytes that
 * come next in this one are asked for while it is at hand. */
enum { APART = 2048 };
static inline __attribute__((always_inline)) void fetch_beside(const char *src, const int bytes)
{
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(src + i, 0, 2);
}

/* GROUP lines from `line` on; `apart` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void pack_pairs_group(const te_gemm_pack *p, int line, const bool apart,
                                                                   uint32_t *dst, int64_t each)
{
    const char *src = p->src + 2 * line;
    __mmask32 mask = lines_from(p, line);
    int panels = (p->extent - line + 7) / 8;
    int64_t stride = p->k_stride, k = p->k;
    for (int64_t w = 0; 2 * w < k; w++, src += 2 * stride, dst += 8) {
        __m512i v[2];
        if (apart) fetch_beside(src + 64, 64), fetch_beside(src + 64 + stride, 64);
        load_group(src, stride, mask, 2 * w + 1 < k, v);
        _mm256_storeu_si256((__m256i *)dst, _mm512_castsi512_si256(v[0]));
        if (panels > 1) _mm256_storeu_si256((__m256i *)(dst + each), _mm512_extracti64x4_epi64(v[0], 1));
        if (panels > 2) _mm256_storeu_si256((__m256i *)(dst + 2 * each), _mm512_castsi512_si256(v[1]));
        if (panels > 3) _mm256_storeu_si256((__m256i *)(dst + 3 * each), _mm512_extracti64x4_epi64(v[1], 1));
    }
}

/* Pairs of lines side by side, as panels of 8: a cache line of the source serves four of them. */
static void pack_pairs_narrow(const te_gemm_pack *p, uint32_t *panel)
{
    int64_t each = (p->k + 1) / 2 * 8;
    for (int line = 0; line < p->extent; line += GROUP) {
        uint32_t *dst = panel + line / 8 * each;
        if (p->k_stride >= APART && line + GROUP < p->extent) pack_pairs_group(p, line, true, dst, each);
        else pack_pairs_group(p, line, false, dst, each);
    }
}

static inline __attribute__((always_inline)) void pack_floats_group(const te_gemm_pack *p, int line, const bool apart,
                                                                    float *dst, int64_t each)
{
    const char *src = p->src + 4 * line;
    int64_t next = p->k_stride;
    __mmask32 mask = lines_from(p, line);
    int panels = (p->extent - line + 7) / 8;
    for (int64_t w = 0; w < p->k; w++, src += next, dst += 8) {
        if (apart) fetch_beside(src + 128, 128);
        __m512 front = _mm512_maskz_loadu_ps((__mmask16)mask, src);
        __m512 back = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), src + 64);
        _mm256_storeu_ps(dst, _mm512_castps512_ps256(front));
        if (panels > 1) _mm256_storeu_ps(dst + each, _mm512_extractf32x8_ps(front, 1));
        if (panels > 2) _mm256_storeu_ps(dst + 2 * each, _mm512_castps512_ps256(back));
        if (panels > 3) _mm256_storeu_ps(dst + 3 * each, _mm512_extractf32x8_ps(back, 1));
    }
}

/* float32 lines side by side, as panels of 8: two cache lines of the source at a time serve four of them. */
static void pack_floats_narrow(const te_gemm_pack *p, float *panel)
{
    int64_t each = 8 * p->k;
    for (int line = 0; line < p->extent; line += GROUP) {
        float *dst = panel + line / 8 * each;
        if (p->k_stride >= APART / 2 && line + GROUP < p->extent) pack_floats_group(p, line, true, dst, each);
        else pack_floats_group(p, line, false, dst, each);
    }
}

/* Words of 16 lines. */
static inline __attribute__((always_inline)) __m512i load_half_group(const char *src, int64_t next, __mmask16 lines,
                                                                     bool pair)
{
    __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lines, src)), odd = _mm512_setzero_si512();
    if (pair) odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lines, src + next));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

/* `vectors` is a constant where this is inlined. All of a step at once: it is one or two cache lines. */
static inline __attribute__((always_inline)) void pack_pairs_vectors(const int vectors, const te_gemm_pack *p,
                                                                     uint32_t *panel)
{
    const char *src = p->src;
    int64_t next = p->k_stride, k = p->k, width = p->width;
    __mmask32 front = lines_from(p, 0);
    __mmask16 last = (__mmask16)lines_from(p, 16 * (vectors - 1));
    for (int64_t i = 0; i < k; i += 2, src += 2 * next, panel += width) {
        __m512i v[2];
        bool pair = i + 1 < k;
        if (vectors > 1) {
            load_group(src, next, front, pair, v);
            _mm512_storeu_si512(panel, v[0]);
            _mm512_storeu_si512(panel + 16, v[1]);
        }
        if (vectors == 2) continue;
        _mm512_storeu_si512(panel + 16 * (vectors - 1), load_half_group(src + 32 * (vectors - 1), next, last, pair));
    }
}

/* Pairs of lines side by side, as one panel, filled to one to three vectors. */
static void pack_pairs_wide(const te_gemm_pack *p, uint32_t *panel)
{
    if (p->filled == 16) pack_pairs_vectors(1, p, panel);
    else if (p->filled == 32) pack_pairs_vectors(2, p, panel);
    else pack_pairs_vectors(3, p, panel);
}
#endif

/* Pairs of bfloat16. Along contiguous lines a pair is a word as it stands; otherwise two steps are interleaved. */
static void pack_pairs(const te_gemm_pack *p, uint32_t *panel)
{
    int64_t pairs = p->k / 2, next = p->k_stride;
    te_gemm_pack whole = *p;
    whole.k = pairs;
    whole.k_stride = 2 * p->k_stride;
    if (p->k_stride == 2) pack_along_k(TE_GEMM_WORD_F32, &whole, panel);
    else
        for (int64_t w = 0; w < pairs; w++) {
            const char *src = p->src + w * whole.k_stride;
            for (int i = 0; i < p->extent; i++)
                panel[w * p->width + i] =
                    half_at(src + i * p->line_stride) | half_at(src + i * p->line_stride + next) << 16;
        }
    if (p->k % 2)
        for (int i = 0; i < p->extent; i++)
            panel[pairs * p->width + i] = half_at(p->src + i * p->line_stride + (p->k - 1) * p->k_stride);
}

static void pack_f64(const te_gemm_pack *p, double *panel)
{
    for (int64_t w = 0; w < p->k; w++)
        for (int i = 0; i < p->extent; i++)
            memcpy(panel + w * p->width + i, p->src + i * p->line_stride + w * p->k_stride, sizeof(double));
}

/* A few words. */
static inline void fill_zeros(char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 4) memset(p + i, 0, 4);
}

static void pack_panel(const te_gemm_pack *p, void *panel)
{
    int64_t steps = p->word == TE_GEMM_WORD_BF16PAIR ? (p->k + 1) / 2 : p->k;
    size_t word = p->word == TE_GEMM_WORD_F64 ? 8 : 4;
    if (p->extent < p->filled)
        for (int64_t w = 0; w < steps; w++)
            fill_zeros((char *)panel + (w * p->width + p->extent) * word, (p->filled - p->extent) * word);
    switch (p->word) {
    case TE_GEMM_WORD_F32: pack_words(TE_GEMM_WORD_F32, 4, p, panel); break;
    case TE_GEMM_WORD_BF16: pack_words(TE_GEMM_WORD_BF16, 2, p, panel); break;
    case TE_GEMM_WORD_F16: pack_words(TE_GEMM_WORD_F16, 2, p, panel); break;
    case TE_GEMM_WORD_BF16PAIR: pack_pairs(p, panel); break;
    case TE_GEMM_WORD_F64: pack_f64(p, panel); break;
    case TE_GEMM_WORD_F32PARTS: break; /* never here: the kernel packs it */
    }
}

void TE_ISA_NAME(te_gemm_pack_panels)(const te_gemm_pack *p, void *panels)
{
#if defined(TE_ISA_avx512)
    bool side_by_side = p->word == TE_GEMM_WORD_BF16PAIR && p->line_stride == 2;
    if (p->word == TE_GEMM_WORD_F32 && p->line_stride == 4 && p->width == 8 && p->filled == 0) {
        pack_floats_narrow(p, panels);
        return;
    }
    if (side_by_side && p->width == 8 && p->filled == 0) {
        pack_pairs_narrow(p, panels);
        return;
    }
    if (side_by_side && p->filled % 16 == 0 && p->filled <= 48 && p->extent <= p->filled) {
        pack_pairs_wide(p, panels);
        return;
    }
#endif
    int64_t steps = p->word == TE_GEMM_WORD_BF16PAIR ? (p->k + 1) / 2 : p->k;
    int64_t bytes = steps * p->width * (p->word == TE_GEMM_WORD_F64 ? 8 : 4);
    te_gemm_pack one = *p;
    for (int line = 0; line < p->extent; line += p->width) {
        one.src = p->src + line * p->line_stride;
        one.extent = p->extent - line < p->width ? p->extent - line : p->width;
        pack_panel(&one, (char *)panels + line / p->width * bytes);
    }
}
