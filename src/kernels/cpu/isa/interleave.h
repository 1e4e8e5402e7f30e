/* interleave.h - turning squares in registers: of N vectors k and k + N/2 are interleaved, log2 N times over.
 *
 * Element j of row k ends as element k of row j. Wider vectors turn a square in each of their quarters.
 */
#ifndef TE_KERNELS_CPU_INTERLEAVE_H
#define TE_KERNELS_CPU_INTERLEAVE_H

#define TE_DEFINE_INTERLEAVE(name, vector, N, LOW, HIGH)                                                               \
    static inline __attribute__((always_inline)) void name(vector a[N])                                                \
    {                                                                                                                  \
        vector b[N];                                                                                                   \
        _Pragma("GCC unroll 4") for (int round = 1; round < (N); round *= 2)                                           \
        {                                                                                                              \
            _Pragma("GCC unroll 8") for (int k = 0; k < (N) / 2; k++)                                                  \
            {                                                                                                          \
                b[2 * k] = LOW(a[k], a[k + (N) / 2]);                                                                  \
                b[2 * k + 1] = HIGH(a[k], a[k + (N) / 2]);                                                             \
            }                                                                                                          \
            _Pragma("GCC unroll 16") for (int k = 0; k < (N); k++) a[k] = b[k];                                        \
        }                                                                                                              \
    }

#endif
