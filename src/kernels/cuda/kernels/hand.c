/* hand.c - plans of hand-written kernels: their launches, their source, what their fault words mean. */
#include "hand_internal.h"

#include <string.h>

extern const char te_cuda_program_prelude[], te_cuda_hand_device[], te_cuda_hand_index[], te_cuda_hand_select[],
    te_cuda_hand_move[], te_cuda_hand_add[], te_cuda_hand_attention_common[], te_cuda_hand_attention[],
    te_cuda_hand_mma[], te_cuda_hand_attention_mma[],
    te_cuda_hand_attention_mma_passes[], te_cuda_hand_attention_mma_decode[], te_cuda_hand_attention_rounded[],
    te_cuda_hand_attention_unseen[], te_cuda_hand_quantize[], te_cuda_hand_quantized[], te_cuda_hand_routes[],
    te_cuda_hand_product_few[], te_cuda_hand_order[]; /* made by the build */

/* --- views ------------------------------------------------------------------------------------------------------- */

te_cuda_view te_cuda_view_of(const te_view *view)
{
    te_cuda_view v = {.data = view->data, .ndim = view->ndim};
    memcpy(v.shape, view->shape, sizeof v.shape);
    memcpy(v.stride, view->stride, sizeof v.stride);
    return v;
}

int64_t te_row_count(const te_view *view)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < view->ndim; i++) n *= view->shape[i];
    return n;
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

void te_cuda_plan_open(te_cuda_plan *plan)
{
    plan->n_calls = plan->n_words = 0;
    plan->scratch_bytes = 0;
    plan->check = (te_cuda_check){TE_CUDA_CHECK_NONE, "", 0, 0};
}

te_cuda_call *te_cuda_plan_add(te_cuda_plan *plan, te_cuda_file file, const char *name, int64_t blocks, int threads,
                               const void *args, size_t bytes)
{
    te_cuda_call   *call = &plan->calls[plan->n_calls++];
    te_cuda_launch *launch = &call->launch;
    call->kernel = (te_cuda_kernel){.file = (uint8_t)file, .vector = 1};
    launch->name = name;
    launch->grid[0] = (uint32_t)(blocks < 1 ? 1 : blocks > INT32_MAX ? INT32_MAX : blocks);
    launch->grid[1] = launch->grid[2] = 1;
    launch->block[0] = (uint32_t)threads;
    launch->block[1] = launch->block[2] = 1;
    launch->shared = 0;
    launch->args_bytes = (uint32_t)bytes;
    launch->args = memcpy(plan->words + plan->n_words, args, bytes);
    plan->n_words += (int)(bytes / sizeof *plan->words);
    return call;
}

void te_cuda_plan_bind(te_cuda_plan *plan, void *scratch, uint64_t *fault)
{
    for (int i = 0, at = 0; i < plan->n_calls; i++) {
        plan->words[at] = (uint64_t)(uintptr_t)scratch;
        plan->words[at + 1] = (uint64_t)(uintptr_t)fault;
        at += (int)(plan->calls[i].launch.args_bytes / sizeof *plan->words);
    }
}

te_status te_cuda_check_fault(te_exec *exec, const te_cuda_check *check, uint64_t fault)
{
    static const char *const weights[4] = {"has a weight that is negative or NaN", "has weights whose sum is infinite",
                                           "has no positive weight",
                                           "has fewer positive weights than samples asked for"};
    if (check->kind == TE_CUDA_CHECK_NONE || fault == UINT64_MAX) return TE_OK;
    if (check->kind == TE_CUDA_CHECK_WEIGHTS)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: row %llu %s", check->operation,
                            (unsigned long long)(fault / 4) + 1, weights[fault % 4]);
    if (check->kind == TE_CUDA_CHECK_LENGTHS && (int64_t)(fault >> 32) == check->count)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: seq_lens add up to %ld of %lld tokens", check->operation,
                            (long)(int32_t)(uint32_t)fault, (long long)check->bound);
    if (check->kind == TE_CUDA_CHECK_LENGTHS)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: seq_lens[%lu] = %ld does not fit %lld tokens",
                            check->operation, (unsigned long)(fault >> 32) + 1, (long)(int32_t)(uint32_t)fault,
                            (long long)check->bound);
    static const char *const found[][2] = {[TE_CUDA_CHECK_IDS] = {"id", "outside"},
                                           [TE_CUDA_CHECK_INDEX] = {"index", "outside"},
                                           [TE_CUDA_CHECK_CLASSES] = {"target", "not a class from"}};
    uint64_t each = check->count > 1 ? (uint64_t)check->count : 1, place = (fault >> 32) / each;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: %s %ld at position %lu is %s 0 to %lld", check->operation,
                        found[check->kind][0], (long)(int32_t)(uint32_t)fault, (unsigned long)place + 1,
                        found[check->kind][1], (long long)check->bound - 1);
}

/* --- source ------------------------------------------------------------------------------------------------------ */

static void write_type(te_text *out, char name, te_dtype dtype)
{
    static const char *const types[TE_DTYPE_COUNT] =
        {[TE_F32] = "float",      [TE_BF16] = "uint16_t", [TE_F16] = "uint16_t", [TE_F64] = "double",
         [TE_I64] = "int64_t",    [TE_I32] = "int32_t",   [TE_U8] = "uint8_t",   [TE_BOOL] = "uint8_t",
         [TE_F8E4M3] = "uint8_t", [TE_F8E5M2] = "uint8_t"};
    char capital = (char)(name - 'a' + 'A');
    te_text_print(out, "typedef %s te_%c;\n#define te_from_%c te_from_%s\n#define te_as_%c te_as_%s\n"
                       "#define TE_%c_IS_INTEGER %d\n#define TE_%c_IS_INT64 %d\n#define TE_%c_IS_BF16 %d\n"
                       "#define TE_%c_IS_FP8 %d\n#define TE_%c_IS_E5M2 %d\n",
                  types[dtype], name, name, te_dtype_name(dtype), name, te_dtype_name(dtype), capital,
                  te_is_whole(dtype), capital, dtype == TE_I64, capital, dtype == TE_BF16, capital,
                  dtype == TE_F8E4M3 || dtype == TE_F8E5M2, capital, dtype == TE_F8E5M2);
}

te_status te_cuda_kernel_source(const te_cuda_kernel *kernel, te_text *out)
{
    static const char *const files[TE_CUDA_FILE_COUNT] = {te_cuda_hand_index, te_cuda_hand_select,
                                                          te_cuda_hand_attention_common,
                                                          te_cuda_hand_quantized, te_cuda_hand_routes,
                                                          te_cuda_hand_mma, te_cuda_hand_order, te_cuda_hand_move,
                                                          te_cuda_hand_add};
    bool tiles = kernel->file == TE_CUDA_FILE_QUANTIZE && kernel->dim[0];
    const char *text = tiles ? te_cuda_hand_quantize : files[kernel->file];
    te_text_write(out, te_cuda_program_prelude, strlen(te_cuda_program_prelude));
    te_text_print(out,
                  "\ntypedef %s te_real;\n#define TE_REAL_IS_F32 %d\n#define TE_VECTOR %d\n#define TE_SAME_TYPE %d\n"
                  "#define TE_DIM %d\n#define TE_DIM_V %d\n",
                  kernel->wide ? "double" : "float", !kernel->wide, kernel->vector,
                  kernel->dtype[0] == kernel->dtype[1], kernel->dim[0], kernel->dim[1]);
    te_text_write(out, te_cuda_hand_device, strlen(te_cuda_hand_device));
    write_type(out, 'a', (te_dtype)kernel->dtype[0]);
    write_type(out, 'b', (te_dtype)kernel->dtype[1]);
    if (kernel->file == TE_CUDA_FILE_ATTENTION)
        te_text_print(out, "#define TE_HAS_BIAS %d\n#define TE_DECODE_WARPS %d\n", kernel->third > 0, kernel->decode);
    if (kernel->third) write_type(out, 'c', (te_dtype)(kernel->third - 1));
    te_text_write(out, text, strlen(text));
    if (kernel->file == TE_CUDA_FILE_ATTENTION) {
        const char *parts[3] = {te_cuda_hand_attention, "", ""};
        if (kernel->dim[0]) {
            parts[0] = te_cuda_hand_mma;
            parts[1] = te_cuda_hand_attention_mma;
            parts[2] = kernel->decode ? te_cuda_hand_attention_mma_decode : te_cuda_hand_attention_mma_passes;
        } else if (kernel->vector == 0) {
            parts[0] = te_cuda_hand_attention_unseen;
        } else if (kernel->dtype[0] == TE_F8E4M3) {
            parts[1] = te_cuda_hand_attention_rounded;
        }
        for (int i = 0; i < 3; i++) te_text_write(out, parts[i], strlen(parts[i]));
    } else if (kernel->file == TE_CUDA_FILE_PRODUCT) {
        te_text_write(out, te_cuda_hand_product_few, strlen(te_cuda_hand_product_few));
    }
    return out->failed ? TE_ERROR_MEMORY : TE_OK;
}
