/* tables.h - functions of one bfloat16 number, looked up: their values for either sign of 2^-12 <= |x| < 2^4, which is
 * nearly every activation. Sixteen powers of two times 128 numbers, first those above 0. */
enum { TE_TABLE_FIRST = (127 - 12) << 7, TE_TABLE_SIGNED = 16 << 7, TE_TABLE = 2 * TE_TABLE_SIGNED };

/* The number whose values are at a place. */
TE_HD static inline uint16_t te_table_code(int at)
{
    return (uint16_t)((at % TE_TABLE_SIGNED + TE_TABLE_FIRST) | at / TE_TABLE_SIGNED << 15);
}

/* Where a unit's numbers are, and whether all have a place. Two are gone through at a time: less the first code, the
 * bits between the sign and those of a place are 0 in each that has one. In one below the first they are not, whatever
 * its sign, and what it borrows from its neighbour does not matter then. */
template <int V> TE_HD static inline bool te_table_places(const te_unit<uint16_t, V> &x, uint32_t (&at)[V])
{
    static_assert(V % 2 == 0, "numbers come in pairs");
    uint32_t any = 0;
#pragma unroll
    for (int k = 0; k < V; k += 2) {
        const uint32_t pair = (x.e[k] | (uint32_t)x.e[k + 1] << 16) - TE_TABLE_FIRST * 0x10001u;
        const uint32_t both = (pair & 0x07ff07ffu) | (pair >> 4 & 0x08000800u);
        any |= pair;
        at[k] = both & 0xffffu;
        at[k + 1] = both >> 16;
    }
    return (any & 0x78007800u) == 0;
}
