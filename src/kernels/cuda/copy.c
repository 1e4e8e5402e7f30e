/* copy.c - strided copies with conversion: a row program of one load. Dense copies of one dtype are the driver's. */
#include "cuda_backend.h"

static bool needs_f64(te_dtype t) { return t == TE_F64 || t == TE_I64 || t == TE_I32; }

static te_program *copy_program(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    te_cuda_copier *c = d->copier;
    if (c) return &c->program;
    if (!(c = te_mem_zalloc(exec->mem, sizeof *c))) {
        te_exec_fail(exec, TE_ERROR_MEMORY, "copy: out of host memory");
        return NULL;
    }
    c->load = (te_insn){.op = TE_PW_LOAD, .rate = TE_RATE_ELEM, .arg = {-1, -1, -1}};
    c->rate = TE_RATE_ELEM;
    c->output = (struct te_program_output){TE_OUT_ELEM, 0};
    c->program = (te_program){.mem = exec->mem,
                              .name = "copy",
                              .insns = &c->load,
                              .outputs = &c->output,
                              .input_rates = &c->rate,
                              .n_insns = 1,
                              .n_outputs = 1,
                              .n_inputs = 1};
    d->copier = c;
    return &c->program;
}

void te_cuda_copier_close(te_exec *exec)
{
    te_cuda_copier *c = te_cuda(exec)->copier;
    if (!c) return;
    if (c->program.device_compiled) c->program.release_device_compiled(&c->program);
    te_mem_free(exec->mem, c, sizeof *c);
    te_cuda(exec)->copier = NULL;
}

te_status te_cuda_copy(te_exec *exec, const te_view *dst, const te_view *src)
{
    int64_t n = te_view_numel(dst);
    te_program *program = copy_program(exec);
    if (!program) return TE_ERROR_MEMORY;
    if (dst->ndim != src->ndim || memcmp(dst->shape, src->shape, (size_t)dst->ndim * sizeof *dst->shape) != 0)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "copy: the shapes differ");
    if (n == 0) return TE_OK;
    if (dst->dtype == src->dtype && te_view_dense(dst) && te_view_dense(src)) {
        te_cuda_note(exec, "copy");
        return te_cuda_memory_copy(exec, dst->data, src->data, (size_t)n * te_dtype_size(dst->dtype),
                                   TE_COPY_DEVICE_TO_DEVICE);
    }
    bool backwards = false;
    for (int i = 0; i < src->ndim; i++) backwards |= src->stride[i] < 0;
    if (backwards && dst->dtype == src->dtype) return te_cuda_turn(exec, dst, src);
    bool bits = dst->dtype == TE_I64 && src->dtype == TE_I64; /* a float64 is no int64 beyond 2^53, but moves as well */
    te_operand in = {.data = src->data, .dtype = bits ? TE_F64 : src->dtype};
    te_operand out = {.data = dst->data, .dtype = bits ? TE_F64 : dst->dtype};
    te_run run = {.ndim = dst->ndim ? dst->ndim : 1,
                  .inputs = &in,
                  .outputs = &out,
                  .compute_f64 = needs_f64(src->dtype) || needs_f64(dst->dtype)};
    run.shape[0] = in.stride[0] = out.stride[0] = 1;
    memcpy(run.shape, dst->shape, (size_t)dst->ndim * sizeof *dst->shape);
    memcpy(in.stride, src->stride, (size_t)dst->ndim * sizeof *in.stride);
    memcpy(out.stride, dst->stride, (size_t)dst->ndim * sizeof *out.stride);
    return te_cuda_program_run(exec, program, &run, 1);
}
