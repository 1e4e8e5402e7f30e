/* gemm_finish.c - what follows a product where cuBLASLt has no epilogue for it: a row program over the dense product.
 *
 *      p (+ bias) -> c, added to what is there when accumulating
 */
#include "gemm.h"

#include <stdio.h>

enum { MAX_INSNS = 3 };

/* Appends an instruction of one value per element; returns its value. */
static int add(te_program *p, te_opcode op, int slot, int a, int b)
{
    p->insns[p->n_insns] =
        (te_insn){.op = (uint8_t)op, .rate = (uint8_t)TE_RATE_ELEM, .slot = (int16_t)slot, .arg = {a, b, -1}};
    return p->n_insns++;
}

static void build(te_program *p, bool bias)
{
    int x = add(p, TE_PW_LOAD, 0, -1, -1);
    p->n_inputs = bias ? 2 : 1;
    p->input_rates[0] = p->input_rates[1] = TE_RATE_ELEM;
    if (bias) x = add(p, TE_PW_ADD, 0, x, add(p, TE_PW_LOAD, 1, -1, -1));
    p->outputs[0] = (struct te_program_output){TE_OUT_ELEM, x};
    p->n_outputs = 1;
    snprintf(p->name, sizeof p->name, "matrix product's end");
}

/* A program and its arrays, in one block. */
typedef struct finish {
    te_program program;
    te_insn insns[MAX_INSNS];
    struct te_program_output outputs[1];
    uint8_t rates[2];
} finish;

static te_program *finish_of(te_exec *exec, te_cuda_blas *blas, const te_gemm *g)
{
    bool bias = te_view_present(&g->bias);
    te_program **slot = &blas->finish[bias];
    if (*slot) return *slot;
    finish *f = te_mem_zalloc(exec->mem, sizeof *f);
    if (!f) {
        te_exec_fail(exec, TE_ERROR_MEMORY, "matrix product: out of host memory");
        return NULL;
    }
    f->program = (te_program){.mem = exec->mem, .insns = f->insns, .outputs = f->outputs, .input_rates = f->rates};
    build(&f->program, bias);
    return *slot = &f->program;
}

void te_cuda_finishes_close(te_exec *exec, te_cuda_blas *blas)
{
    for (int i = 0; i < TE_CUDA_FINISHES; i++) {
        te_program *p = blas->finish[i];
        if (p && p->device_compiled) p->release_device_compiled(p);
        te_mem_free(exec->mem, p, sizeof(finish)); /* the program is the block's first member */
        blas->finish[i] = NULL;
    }
}

static te_operand operand(const te_view *v)
{
    te_operand o = {.data = v->data, .dtype = v->dtype};
    memcpy(o.stride, v->stride, sizeof o.stride);
    return o;
}

te_status te_cuda_gemm_finish(te_exec *exec, const te_gemm *g, const te_view *product)
{
    te_cuda_blas *blas;
    te_status status = te_cuda_blas_open(exec, &blas);
    te_program *program = status == TE_OK ? finish_of(exec, blas, g) : NULL;
    if (!program) return status == TE_OK ? TE_ERROR_MEMORY : status;
    te_operand inputs[2] = {operand(product)}, output = operand(&g->c);
    inputs[1] = (te_operand){.data = g->bias.data, .dtype = g->bias.dtype};
    inputs[1].stride[g->c.ndim - 1] = g->bias.stride[0];
    output.accumulate = g->beta != 0;
    te_run run = {.ndim = g->c.ndim, .inputs = inputs, .outputs = &output, .compute_f64 = g->c.dtype == TE_F64};
    memcpy(run.shape, g->c.shape, sizeof run.shape);
    return te_cuda_program_run(exec, program, &run, 1);
}
