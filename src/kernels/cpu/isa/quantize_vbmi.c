/* quantize_vbmi.c - the loops of quantize_blocks.h that are faster where bytes can be permuted: codes of float32 and
 * bfloat16, and the way back. All others are those of AVX-512. */
#include "kernels/cpu/quantize_blocks.h"

#include "quantize_along.h"
#include "quantize_along_pairs.h"
#include "quantize_both.h"
#include "quantize_decode.h"
#include "quantize_loops.h"
#include "quantize_pairs.h"

#define DEFINE_DTYPE(dtype, type, LOAD)                                                                                \
    DEFINE_FORMAT(dtype, type, LOAD, e4m3, TE_E4M3_CODE)                                                               \
    DEFINE_FORMAT(dtype, type, LOAD, e5m2, TE_E5M2_CODE)                                                               \
    static void take_##dtype(te_quantize_loops *to)                                                                    \
    {                                                                                                                  \
        to->encode_along[TE_E4M3] = along_##dtype##_e4m3, to->encode_along[TE_E5M2] = along_##dtype##_e5m2;            \
        to->encode_whole[TE_E4M3] = whole_##dtype##_e4m3, to->encode_whole[TE_E5M2] = whole_##dtype##_e5m2;            \
        to->encode_down[TE_E4M3] = down_##dtype##_e4m3, to->encode_down[TE_E5M2] = down_##dtype##_e5m2;                \
        to->encode_both[TE_E4M3] = both_##dtype##_e4m3, to->encode_both[TE_E5M2] = both_##dtype##_e5m2;                \
        to->at_once[TE_E4M3] = at_once_##dtype##_e4m3, to->at_once[TE_E5M2] = at_once_##dtype##_e5m2;                  \
        to->pairs_along = pairs_along_##dtype, to->pairs_down = pairs_down_##dtype;                                    \
    }

DEFINE_DTYPE(f32, float, SAME)
DEFINE_DTYPE(bf16, uint16_t, te_bf16_to_f32)

void te_quantize_take_vbmi(te_quantize_blocks *to)
{
    take_f32(&to->of[0]);
    to->of[0].at_once[TE_E2M1] = at_once_f32_e2m1;
    take_bf16(&to->of[1]);
    to->decode_to[TE_E4M3] = decode_to_e4m3, to->decode_to[TE_E5M2] = decode_to_e5m2;
    to->decode_to[TE_E2M1] = decode_to_e2m1;
}
