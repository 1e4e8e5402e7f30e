/* kernel_ops.c - operations by hand-written kernels. */
#include "cuda_backend.h"

static te_status missing(te_exec *exec, const char *name)
{
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s is not available on CUDA devices", name);
}

te_status te_cuda_attention(te_exec *exec, const te_attention *attention)
{
    (void)attention;
    return missing(exec, "attention");
}

te_status te_cuda_attention_backward(te_exec *exec, const te_attention_grad *grad)
{
    (void)grad;
    return missing(exec, "attention");
}

te_status te_cuda_embedding(te_exec *exec, const te_view *out, const te_view *table, const te_view *ids)
{
    (void)out, (void)table, (void)ids;
    return missing(exec, "embedding");
}

te_status te_cuda_embedding_backward(te_exec *exec, const te_view *dtable, const te_view *dy, const te_view *ids)
{
    (void)dtable, (void)dy, (void)ids;
    return missing(exec, "embedding");
}

te_status te_cuda_gather(te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim)
{
    (void)out, (void)src, (void)index, (void)dim;
    return missing(exec, "gather");
}

te_status te_cuda_scatter_add(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    (void)dst, (void)src, (void)index, (void)dim;
    return missing(exec, "scatter_add");
}

te_status te_cuda_arg_reduce(te_exec *exec, const te_view *index, const te_view *src, bool largest)
{
    (void)index, (void)src, (void)largest;
    return missing(exec, "argmax");
}

te_status te_cuda_topk(te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool largest)
{
    (void)values, (void)indices, (void)src, (void)largest;
    return missing(exec, "topk");
}

te_status te_cuda_cumsum(te_exec *exec, const te_view *dst, const te_view *src, bool reverse)
{
    (void)dst, (void)src, (void)reverse;
    return missing(exec, "cumsum");
}

te_status te_cuda_multinomial(te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng)
{
    (void)out, (void)src, (void)replacement, (void)rng;
    return missing(exec, "multinomial");
}
