/* attention_dnn_rules.c - what cuDNN gets wrong or does not do, by its version and the device's compute capability, as
 * NVIDIA's front end has it (FE: cudnn-frontend 1.23, sdpa_support_surface.h and scaled_dot_product_flash_attention.h).
 * Where it is not sure that a rule concerns our graphs, it is taken to: own kernels do what is declined.
 */
#include "attention_dnn.h"

#include <string.h>

/* On an H200 (9.19, bfloat16) cuDNN's gradients take as long with a window as without: all of the causal half, at 290
 * TFLOP/s with heads of 64 and about 400 with 128. Own kernels leave out what no row of a tile sees, at 60 and 96: so
 * they are asked where the keys of a row, with what tiles of 64 rows and 32 keys hold beside them, are few enough, by a
 * margin of a quarter. Lengths of packed sequences are not known here. */
static bool window_is_narrow(int major, const te_dnn_attention *key)
{
    int64_t widest = key->dim > key->dim_v ? key->dim : key->dim_v;
    if (major != 9 || !key->causal || key->window < 0 || key->packed || widest > 128) return false;
    double own = widest <= 64 ? 60 : 96, library = widest <= 64 ? 290 : 400;
    double seen = (double)key->window + 1 + 64 + 32, half = (double)key->shift + (double)key->seq_q / 2;
    return 1.25 * seen / own < half / library;
}

/* Of gradients. Without any_order our graph is FE's deterministic one; the numbers of rows of packed sequences lie
 * without holes. */
static const char *backward_fault(size_t version, int major, const te_dnn_attention *key)
{
    bool same_as_deepseek = key->dim == 192 && key->dim_v == 128, narrow = key->dim <= 128 && key->dim_v <= 128;
    bool near_deepseek = key->dim > 128 && key->dim <= 192 && key->dim_v > 64 && key->dim_v <= 128;
    if (window_is_narrow(major, key)) return "own kernels skip what is outside of so narrow a window";
    /* 9.20 on an H200 (PyTorch's issue 196678): the last half of a tile of 128 keys counts as scores of 0, and an lse
     * below -88 makes infinity of them */
    if (key->bias_dim[0] && major == 10 && !key->any_order) /* 9.19: the engine's kernel does not compile */
        return "gradients with a bias do not repeat their bits on this device";
    if (key->bias_dim[0] && key->seq_kv % 128 == 64) return "gradients with a bias are no numbers at such lengths";
    if (key->seq_q == 1) return "gradients of one query may be no numbers"; /* 9.26: cudnn-frontend's issue 1072 */
    if (version <= 91500 && !key->packed && key->seq_kv % 128 != 0)
        return "until 9.15.0 gradients of such lengths are wrong";
    if (major == 9 && version >= 91100 && version < 91300 && near_deepseek && !same_as_deepseek)
        return "before 9.13 no gradients of such heads";
    if (major == 10 && version < 91800 && !key->any_order)
        return "before 9.18 gradients do not repeat their bits on this device";
    if (major != 9 && !narrow && !(major == 10 && same_as_deepseek)) return "no gradients of such heads on this device";
    if (key->packed && (major == 8 || major == 12)) return "no gradients of packed sequences on this device";
    if (key->packed && (key->dim % 16 || key->dim_v % 16))
        return "gradients of packed sequences are wrong where heads are no multiple of 16";
    return NULL;
}

static const char *quantized_fault(size_t version, int major, const te_dnn_attention *key)
{
    bool narrow = key->dim <= 128 && key->dim_v <= 128;
    bool same_as_deepseek = version >= 91900 && key->dim == 192 && key->dim_v == 128;
    if (key->shift > 0 && major < 10) return "no fp8 with alignment at the last position on this device";
    if (major >= 10 && !narrow && !same_as_deepseek) return "no fp8 with such heads on this device";
    if (key->packed && major == 9) /* 9.14 on an H200: illegal instructions and wrong rows where sequences are short */
        return "fp8 of packed sequences is wrong on this device";
    return key->packed && major == 12 ? "no fp8 of packed sequences on this device" : NULL;
}

/* Other numbers of rows are written wrongly in forward (cudnn-frontend, pull request 642). */
static bool rows_are_dense(const te_dnn_attention *key)
{
    const int64_t *stride = key->stride[TE_DNN_LSE];
    return stride[2] == 1 && stride[1] == key->seq_q && stride[0] == key->heads * key->seq_q;
}

const char *te_dnn_attention_fault(size_t version, int capability, const te_dnn_attention *key)
{
    int major = capability / 10;
    if (version == 91400 && key->window >= 0 && !key->causal && key->seq_kv > 1024)
        return "9.14.0 errs in such windows";
    if (version < 92600 && !key->packed && key->lse && !rows_are_dense(key)) return "before 9.26 no lse with gaps";
    if (key->sinks && version < 91301) return "before 9.13.1 no sinks";
    if (key->packed && capability < 90 && version < 91801) return "before 9.18.1 no packed sequences on this device";
    if (key->type == CUDNN_DATA_FP8_E4M3) return quantized_fault(version, major, key);
    return key->backward ? backward_fault(version, major, key) : NULL;
}

/* Its headers have had these only of late. */
enum { KNOB_STREAM_K = 38, KNOB_TILE_M = 40, KNOB_TILE_N = 41 };

bool te_dnn_attention_engine(size_t version, int capability, const te_dnn_attention *key, te_dnn_engine *engine)
{
    if (capability / 10 != 10 || !key->backward || key->any_order) return false;
    *engine = (te_dnn_engine){.index = capability > 103 ? 17 : 5, .n_knobs = 2,
                              .knob = {CUDNN_KNOB_TYPE_KERNEL_CFG, CUDNN_KNOB_TYPE_STAGES}, .value = {31, 2}};
    if (version < 92300) return true;
    engine->n_knobs = 6;
    memcpy(engine->knob, (int32_t[]){KNOB_TILE_M, KNOB_TILE_N, CUDNN_KNOB_TYPE_KERNEL_CFG, KNOB_STREAM_K,
                                     CUDNN_KNOB_TYPE_TILE_CGA_M, CUDNN_KNOB_TYPE_STAGES}, sizeof engine->knob);
    memcpy(engine->value, (int64_t[]){3, 2, 2, 0, 0, 2}, sizeof engine->value);
    return true;
}
