/* program_chain_tables.h - links that look values up in the tables of program_lookup.c. A part of
 * program_chain_links.h. */
/* Each value by a load of its own: on most processors gathering instructions take twice as long. */
TE_PART table_values(const uint16_t *codes, const te_real *table)
{
    te_real values[LANES];
#if defined(TE_ISA_avx512) || defined(TE_ISA_avx2)
    __m128 four[LANES / 4];
    for (int i = 0; i < LANES / 4; i++) {
        uint64_t at;
        memcpy(&at, codes + 4 * i, sizeof at);
        __m128 low = _mm_load_ss(table + (at & 0xffff)), high = _mm_load_ss(table + (at >> 32 & 0xffff));
        low = _mm_insert_ps(low, _mm_load_ss(table + (at >> 16 & 0xffff)), 0x10);
        high = _mm_insert_ps(high, _mm_load_ss(table + (at >> 48)), 0x10);
        four[i] = _mm_movelh_ps(low, high);
    }
#endif
#if defined(TE_ISA_avx512)
    (void)values;
    __m512 low = _mm512_insertf32x4(_mm512_castps128_ps512(four[0]), four[1], 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(low, four[2], 2), four[3], 3);
#elif defined(TE_ISA_avx2)
    (void)values;
    return _mm256_insertf128_ps(_mm256_castps128_ps256(four[0]), four[1], 1);
#else
    te_strip_part x;
    for (int i = 0; i < LANES; i++) values[i] = table[codes[i]];
    memcpy(&x, values, sizeof x);
    return x;
#endif
}

/* Of numbers that bfloat16 holds. */
static void op_look_up(void *dst, const void *pa, const void *pb, const void *pc, size_t n)
{
    te_real       *d = dst;
    const te_real *a = pa, *table = pb;
    (void)pc;
    for (size_t i = 0; i < n; i++) d[i] = table[te_f32_bits(a[i]) >> 16];
}

/* Of a strip; those that are no tensor's come seldom. */
static __attribute__((noinline)) void strip_values(te_strip_part *x, const uint16_t *codes, const te_real *table)
{
#pragma GCC unroll 1
    for (int i = 0; i < 4; i++) x[i] = table_values(codes + i * LANES, table);
}

#define LINK_LOOK_UP(A)                                                                       \
    static void link_look_up_##A##_NUMBER(LINK_PARAMETERS)                                    \
    {                                                                                         \
        FROM_##A(x, 0)                                                                        \
        te_strip_part x[4] = {x0, x1, x2, x3};                                                \
        te_real       a[STRIP];                                                               \
        uint16_t      codes[STRIP];                                                           \
        memcpy(a, x, sizeof a);                                                               \
        for (int i = 0; i < STRIP; i++) codes[i] = (uint16_t)(te_f32_bits(a[i]) >> 16);       \
        strip_values(x, codes, (const te_real *)(const void *)link->arg[1].block);            \
        a0 = x[0], a1 = x[1], a2 = x[2], a3 = x[3];                                           \
        NEXT_LINK;                                                                            \
    }

LINK_LOOK_UP(ACC) LINK_LOOK_UP(BLOCK)

#define LINK_OF_TABLE(name, values_of)                                                            \
    static void link_##name##_HALF_NUMBER(LINK_PARAMETERS)                                        \
    {                                                                                             \
        const uint16_t *codes = (const uint16_t *)(const void *)(link->arg[0].block + at / 2);    \
        const te_real  *table = (const te_real *)(const void *)link->arg[1].block;                \
        a0 = values_of(codes, table), a1 = values_of(codes + LANES, table);                       \
        a2 = values_of(codes + 2 * LANES, table), a3 = values_of(codes + 3 * LANES, table);       \
        NEXT_LINK;                                                                                \
    }

LINK_OF_TABLE(look_up, table_values)

#ifdef TE_ISA_avx512
TE_PART gathered_values(const uint16_t *codes, const te_real *table)
{
    return _mm512_i32gather_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)codes)), table, 4);
}

LINK_OF_TABLE(gather, gathered_values)
#endif
