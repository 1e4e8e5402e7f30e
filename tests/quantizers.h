/* quantizers.h - the quantizers of every recipe, for tests in C. */
#ifndef TE_TEST_QUANTIZERS_H
#define TE_TEST_QUANTIZERS_H

#include "kernels/quantize.h"

#define WHOLE(kind)      .element = kind, .has_columnwise = true, .transposed = true
#define MX(kind, rows)                                                                                                 \
    .element = kind, .scale = TE_SCALE_E8M0, .block_rows = rows, .block_cols = 32, .has_columnwise = true,             \
    .replicated = rows > 1
#define BLOCKS(rows)                                                                                                   \
    .element = TE_E4M3, .block_rows = rows, .block_cols = 128, .has_columnwise = true, .transposed = true
#define FOUR(rows)                                                                                                     \
    .element = TE_E2M1, .scale = TE_SCALE_E4M3, .block_rows = rows, .block_cols = 16, .has_columnwise = true,          \
    .transposed = true, .replicated = rows > 1

/* What a recipe makes of the input, the weight and the gradient of the output. */
static const struct quantizer_recipe {
    const char *name;
    te_quantizer q[3];
} quantizer_recipes[] = {
    {"delayed",
     {{WHOLE(TE_E4M3), .needs_history = true},
      {WHOLE(TE_E4M3), .needs_history = true},
      {WHOLE(TE_E5M2), .needs_history = true}}},
    {"current", {{WHOLE(TE_E4M3)}, {WHOLE(TE_E4M3), .power_of_two = true}, {WHOLE(TE_E5M2)}}},
    {"mxfp8", {{MX(TE_E4M3, 1)}, {MX(TE_E4M3, 1)}, {MX(TE_E5M2, 1)}}},
    {"mxfp8, square weight", {{MX(TE_E4M3, 1)}, {MX(TE_E4M3, 32)}, {MX(TE_E4M3, 1)}}},
    {"blocks",
     {{BLOCKS(1), .power_of_two = true}, {BLOCKS(128), .power_of_two = true}, {BLOCKS(1), .power_of_two = true}}},
    {"blocks, float32 factors", {{BLOCKS(1)}, {BLOCKS(128)}, {BLOCKS(1)}}},
    {"nvfp4",
     {{FOUR(1), .scale_max = 448, .hadamard = true},
      {FOUR(16), .scale_max = 448},
      {FOUR(1), .scale_max = 448, .hadamard = true, .stochastic = true}}},
    {"nvfp4, amax per row",
     {{FOUR(1), .scale_max = 448, .row_scaled = true}, {FOUR(1), .scale_max = 448}, {FOUR(1), .scale_max = 448}}},
    {"nvfp4, four over six",
     {{FOUR(1), .scale_max = 448},
      {FOUR(16), .scale_max = 256, .four_over_six = TE_46_MAE},
      {FOUR(1), .scale_max = 448, .stochastic = true}}},
};

enum { QUANTIZER_RECIPES = sizeof quantizer_recipes / sizeof *quantizer_recipes };

#undef WHOLE
#undef MX
#undef BLOCKS
#undef FOUR

#endif
