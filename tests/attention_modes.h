/* attention_modes.h - what attention's loops are chosen by: every instruction set up to the machine's own; behind them
 * the best one with products of bfloat16 pairs, in vectors and in a matrix unit, where there are such. With
 * TEST_TILED_ATTENTION that is a unit in software. */
#ifndef TE_TESTS_ATTENTION_MODES_H
#define TE_TESTS_ATTENTION_MODES_H

#include "kernels/cpu/attention.h"
#include "kernels/cpu/gemm.h"

enum { MODE_BEHIND_VECTORS = 1, MODE_BEHIND_TILES };

#ifdef TEST_TILED_ATTENTION
extern const te_attention_blocks TEST_TILED_ATTENTION;
#endif

static const te_attention_blocks *attention_tiles(te_exec *exec)
{
    te_gemm_state_get(exec);
#ifdef TEST_TILED_ATTENTION
    return te_cpu(exec)->has_bf16 ? &TEST_TILED_ATTENTION : NULL;
#else
    return te_cpu(exec)->tiled_attention;
#endif
}

static inline int attention_mode_count(void)
{
    te_exec exec = test_exec_open(1);
    int     count = (int)te_cpu(&exec)->isa + 1 + te_cpu(&exec)->has_bf16 + (attention_tiles(&exec) != NULL);
    test_exec_close(&exec);
    return count;
}

static inline bool attention_mode_pairs(int mode) { return mode > (int)te_cpu_isa_detect(); }

static inline const char *attention_mode_name(int mode)
{
    if (!attention_mode_pairs(mode)) return te_cpu_isa_name((te_cpu_isa)mode);
    return mode == (int)te_cpu_isa_detect() + MODE_BEHIND_VECTORS ? "avx512bf16" : "a matrix unit";
}

static inline void attention_mode_set(te_exec *exec, int mode)
{
    bool pairs = attention_mode_pairs(mode), tiles = mode == (int)te_cpu_isa_detect() + MODE_BEHIND_TILES;
    const te_attention_blocks *all = attention_tiles(exec);
    te_cpu(exec)->tiled_attention = tiles ? all : NULL;
    te_cpu(exec)->isa = pairs ? te_cpu_isa_detect() : (te_cpu_isa)mode;
    te_cpu(exec)->has_bf16 = pairs;
}

#endif
