/* hand_packed.c - plans for packed sequences whose lengths lie on the device: offsets for our kernels and for cuDNN. */
#include "hand_internal.h"

enum { THREADS = 256 };

static void set_types(te_cuda_call *call) /* of no account; those of the embeddings that the build compiles */
{
    call->kernel.dtype[0] = call->kernel.dtype[1] = TE_F32;
    call->kernel.vector = 1;
}

te_status te_cuda_plan_pack(te_exec *exec, te_cuda_plan *plan, int32_t *offsets, const te_view *lens, int64_t tokens)
{
    te_cuda_plan_open(plan);
    te_packed_args args = {.lens = te_cuda_view_of(lens), .n = te_view_numel(lens), .wide = lens->dtype == TE_I64,
                           .tokens = tokens, .offsets = offsets};
    if (lens->ndim != 1 || (lens->dtype != TE_I64 && lens->dtype != TE_I32) || tokens > INT32_MAX)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                            "packed sequences: lengths %s of %s for %lld tokens; {n} of int32 or int64 for less than "
                            "2^31 are needed",
                            te_describe_view(lens).text, te_dtype_name(lens->dtype), (long long)tokens);
    plan->check = (te_cuda_check){TE_CUDA_CHECK_LENGTHS, "self_attention", tokens, args.n};
    set_types(te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_pack", 1, THREADS, &args, sizeof args));
    return TE_OK;
}

void te_cuda_plan_ragged(te_cuda_plan *plan, const te_packed_args *args)
{
    te_cuda_plan_open(plan);
    set_types(te_cuda_plan_add(plan, TE_CUDA_FILE_INDEX, "te_ragged", 1, THREADS, args, sizeof *args));
}
