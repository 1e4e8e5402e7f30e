/* plus.cu - the sum of two elements, of integers modulo 2^64. */

TE_HD static inline te_a te_plus(te_a x, te_a y)
{
#if TE_A_IS_INTEGER
    return (te_a)((uint64_t)x + (uint64_t)y);
#else
    return te_as_a(te_from_a(x) + te_from_a(y));
#endif
}
