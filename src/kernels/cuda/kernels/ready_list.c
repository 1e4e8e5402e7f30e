/* ready_list.c - the kernels that the build compiles: those that a first training step, sampling and a recipe would
 * wait for longest. Embeddings, sampling from float32, attention by float32 arithmetic and on tensor cores with the
 * usual sizes of heads, there also of few queries; products of few rows; quantizing bfloat16 to FP8 by one factor a
 * tensor and by blocks. Each costs the build seconds and the module up to 700 KB for all targets.
 */
#include "../ready.h"

/* te_cuda_quantize_variant as a constant. */
#define VARIANT(element, scale, length, flags)                                                                         \
    (uint16_t)((int)(element) | (int)(scale) << 2 | (length) << 4 | (flags) | TE_VARIANT_ANY)
#define QUANTIZE(element, scale, length, flags)                                                                        \
    {TE_CUDA_FILE_QUANTIZE, 0, {TE_BF16, TE_BF16}, 1, {VARIANT(element, scale, length, flags), 0}, 0, 0}
#define END {TE_CUDA_FILE_COUNT, 0, {0, 0}, 0, {0, 0}, 0, 0}

const te_cuda_kernel te_cuda_ready_list[] = {
    {TE_CUDA_FILE_INDEX, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_INDEX, 0, {TE_BF16, TE_F32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_INDEX, 0, {TE_I32, TE_I32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_MOVE, 0, {TE_I32, TE_I32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ADD, 0, {TE_F32, TE_F32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ADD, 0, {TE_BF16, TE_F32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_SELECT, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_SELECT, 1, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ORDER, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_F32, TE_F32}, 32, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {128, 128}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 0, 16},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 1 + TE_BF16, 16}, /* tokens of a recorded step */
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {128, 128}, 0, 8},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {128, 128}, 1 + TE_BF16, 8},
    {TE_CUDA_FILE_PRODUCT, 0, {TE_BF16, TE_BF16}, 8, {0, 0}, 1 + TE_BF16, 0},
    {TE_CUDA_FILE_PRODUCT, 0, {TE_BF16, TE_BF16}, 16, {0, 0}, 1 + TE_BF16, 0},
    {TE_CUDA_FILE_QUANTIZE, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_QUANTIZE, 0, {TE_BF16, TE_BF16}, 1, {0, 0}, 0, 0},
    QUANTIZE(TE_E4M3, TE_SCALE_F32, 0, TE_VARIANT_TRANSPOSED),
    QUANTIZE(TE_E5M2, TE_SCALE_F32, 0, TE_VARIANT_TRANSPOSED),
    QUANTIZE(TE_E4M3, TE_SCALE_E8M0, 6, 0), /* blocks of 32 */
    QUANTIZE(TE_E4M3, TE_SCALE_F32, 8, TE_VARIANT_TRANSPOSED), /* of 128 */
    QUANTIZE(TE_E4M3, TE_SCALE_F32, 8, TE_VARIANT_TRANSPOSED | TE_VARIANT_SQUARE),
    END,
};
