/* test_integers.c - whole numbers drawn at random: what kernels.h says of each, on every instruction set, with one
 * thread and with several. */
#include "program_hand.h"

#include "kernels/philox.h"

enum { MOST = 70001 };

__extension__ typedef unsigned __int128 product;

static int64_t expected(const te_integers *drawn, uint64_t i)
{
    uint64_t bits = (uint64_t)te_rng_word(drawn->rng, 2 * i) << 32 | te_rng_word(drawn->rng, 2 * i + 1);
    return drawn->low + (int64_t)((product)bits * drawn->range >> 64);
}

int main(void)
{
    static int64_t got[MOST + 1];
    static const uint64_t ranges[] = {1, 2, 10, 50257, UINT32_MAX, (uint64_t)1 << 32, ((uint64_t)1 << 54) + 1};
    static const int64_t counts[] = {0, 1, 2, 7, 127, 128, 129, 1000, 16385, MOST};
    open_devices();
    for (int d = 0; d < n_devices; d++)
        for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                te_integers drawn = {{.seed = 77, .offset = 0xfffffffeu}, r % 2 ? -((int64_t)1 << 53) : 3, ranges[r]};
                int         wrong = 0;
                got[counts[c]] = 42;
                CHECK(te_cpu_integers(&devices[d], got, counts[c], &drawn) == TE_OK);
                for (int64_t i = 0; i < counts[c]; i++) wrong += got[i] != expected(&drawn, (uint64_t)i);
                CHECK_MSG(wrong == 0 && got[counts[c]] == 42, "%d of %d from %llu are wrong, %s, %d threads", wrong,
                          (int)counts[c], (unsigned long long)ranges[r], te_cpu_isa_name(te_cpu(&devices[d])->isa),
                          devices[d].threads);
            }
    close_devices();
    return TEST_END();
}
