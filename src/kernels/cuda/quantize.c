/* quantize.c - quantizing on a CUDA device. */
#include "cuda_backend.h"

#include "../quantize.h"

static te_status refuse(te_exec *exec, const char *what, const te_quantize_job *job)
{
    return te_exec_fail(exec, TE_ERROR_UNSUPPORTED, "%s: %lld x %lld elements on cuda; not supported on cuda yet", what,
                        (long long)job->rows, (long long)job->cols);
}

te_status te_cuda_quantize(te_exec *exec, const te_quantize_job *job) { return refuse(exec, "quantize", job); }

te_status te_cuda_dequantize(te_exec *exec, const te_quantize_job *job, int side)
{
    (void)side;
    return refuse(exec, "dequantize", job);
}
