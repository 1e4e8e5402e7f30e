/* ready_list.c - the kernels that the build compiles: those that a first training step, sampling and a recipe would
 * wait for longest. Embeddings, sampling from float32, attention by float32 arithmetic and on tensor cores with the
 * usual sizes of heads, there also of few queries; quantizing bfloat16. Each costs the build seconds and the module up
 * to 700 KB for all targets.
 */
#include "../ready.h"

#define END {TE_CUDA_FILE_COUNT, 0, {0, 0}, 0, {0, 0}, 0, 0}

const te_cuda_kernel te_cuda_ready_list[] = {
    {TE_CUDA_FILE_INDEX, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_INDEX, 0, {TE_BF16, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_INDEX, 0, {TE_I32, TE_I32}, 4, {0, 0}, 0, 0},
    {TE_CUDA_FILE_SELECT, 0, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_SELECT, 1, {TE_F32, TE_F32}, 1, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_F32, TE_F32}, 32, {0, 0}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {128, 128}, 0, 0},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 0, 1},
    {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {128, 128}, 0, 1},
    {TE_CUDA_FILE_QUANTIZE, 0, {TE_BF16, TE_BF16}, 1, {0, 0}, 0, 0},
    END,
};
