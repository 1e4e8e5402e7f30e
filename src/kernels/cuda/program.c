/* program.c - running row programs: one compiled kernel per shape, remembered with the program. */
#include "cuda_backend.h"

#include "../quantize.h"

/* What a program was compiled to, for one device and shape. */
typedef struct compiled {
    const te_cuda_device *device;
    te_cuda_program_shape shape;
    te_cuda_code *code; /* the device's */
} compiled;

typedef struct compiled_list {
    compiled *entries;
    size_t n, capacity;
} compiled_list;

static void release_list(te_program *program)
{
    compiled_list *list = program->device_compiled;
    te_mem_free(program->mem, list->entries, list->capacity * sizeof *list->entries);
    te_mem_free(program->mem, list, sizeof *list);
    program->device_compiled = NULL;
}

static compiled_list *list_of(te_program *program)
{
    if (!program->device_compiled) {
        program->device_compiled = te_mem_zalloc(program->mem, sizeof(compiled_list));
        program->release_device_compiled = release_list;
    }
    return program->device_compiled;
}

static te_status compile_shape(te_exec *exec, const te_program *program, const te_cuda_program_shape *shape,
                               te_cuda_code **code)
{
    te_text source;
    te_text_open(&source, exec->mem);
    te_status status = te_cuda_program_source(program, shape, &source);
    if (status == TE_OK)
        status = te_cuda_compile(exec, program->name, source.data, source.length, code);
    else
        te_exec_fail(exec, status, "%s: out of host memory for its source", program->name);
    te_text_close(&source);
    return status;
}

static te_status find_code(te_exec *exec, te_program *program, const te_cuda_program_shape *shape, te_cuda_code **code)
{
    compiled_list *list = list_of(program);
    for (size_t i = 0; list && i < list->n; i++) {
        compiled *c = &list->entries[i];
        if (c->device != te_cuda(exec) || memcmp(&c->shape, shape, sizeof *shape) != 0) continue;
        *code = c->code;
        return TE_OK;
    }
    bool room =
        list && te_mem_grow(program->mem, &list->entries, &list->capacity, list->n + 1, sizeof *list->entries);
    if (!room) return te_exec_fail(exec, TE_ERROR_MEMORY, "%s: out of host memory", program->name);
    te_status status = compile_shape(exec, program, shape, code);
    if (status == TE_OK) list->entries[list->n++] = (compiled){te_cuda(exec), *shape, *code};
    return status;
}

/* Blocks raise the amax of a tensor with a history, in whatever order. */
static te_status clear_amaxes(te_exec *exec, const te_program *program, const te_run *run)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = TE_OK;
    for (int o = 0; o < program->n_outputs; o++) {
        const te_quantize_job *job = run->outputs[o].quantized;
        for (int s = 0; job && s < 2 && status == TE_OK; s++)
            if (job->quantizer->needs_history && job->side[s].data && job->side[s].amax)
                status = te_cuda_result(exec,
                                        d->driver.cuMemsetD8Async(te_cuda_address(job->side[s].amax), 0,
                                                                  sizeof(float), d->stream),
                                        program->name);
    }
    return status;
}

static te_status launch_batch(te_exec *exec, te_program *program, const te_cuda_program_shape *shape,
                              const te_run *runs, int n)
{
    te_cuda_code *code;
    te_cuda_launch launches[TE_CUDA_LAUNCHES];
    te_status status = find_code(exec, program, shape, &code);
    if (status != TE_OK) return status;
    size_t bytes = te_cuda_program_parts(program, shape, runs, n);
    void *parts = bytes ? exec->scratch(exec, bytes) : NULL;
    if (bytes && !parts) return TE_ERROR_MEMORY;
    if (te_program_leaves_quantized(program, &runs[0])) status = clear_amaxes(exec, program, &runs[0]);
    te_cuda_device *d = te_cuda(exec);
    int n_launches = te_cuda_program_launch(program, shape, runs, n, d->multiprocessors, parts, d->args, launches);
    for (int i = 0; i < n_launches && status == TE_OK; i++)
        status = te_cuda_launch_code(exec, code, &launches[i], program->name);
    if (parts) exec->scratch_free(exec, parts); /* its next user comes later on the stream */
    return status;
}

/* Whether the tiles of results that a kernel leaves quantized have room in the shared memory of a block. */
static bool tiles_fit(const te_cuda_device *d, const te_program *program, const te_cuda_program_shape *shape,
                      const te_run *run)
{
    uint32_t variables = shape->kind == TE_CUDA_ROWS ? TE_CUDA_BAND_VARIABLES : TE_CUDA_SQUARE_VARIABLES;
    if (shape->tables) variables += TE_CUDA_TABLE_VARIABLES;
    return !te_program_leaves_quantized(program, run) ||
           te_cuda_program_shared(program, shape, run) + variables <= (uint32_t)d->shared_most;
}

/* Output o dense in memory of its own, for its job to read. */
static bool store_output(te_exec *exec, const te_run *run, te_operand *output, te_quantize_job *job)
{
    int64_t step = 1;
    *job = *output->quantized;
    *output = (te_operand){.dtype = job->dtype};
    for (int i = run->ndim - 1; i >= 0; step *= run->shape[i--]) output->stride[i] = step;
    output->data = exec->scratch(exec, (size_t)step * te_dtype_size(job->dtype));
    job->source = output->data;
    job->source_stride = job->cols;
    return output->data != NULL;
}

/* Results are stored and then quantized, one after the other. */
static te_status run_stored(te_exec *exec, te_program *program, const te_run *run)
{
    te_operand outputs[TE_CUDA_MAX_OPERANDS];
    te_quantize_job jobs[TE_CUDA_MAX_OPERANDS];
    te_run stored = *run;
    int n = 0;
    te_status status = TE_OK;
    memcpy(outputs, run->outputs, (size_t)program->n_outputs * sizeof *outputs);
    stored.outputs = outputs;
    for (int o = 0; o < program->n_outputs && status == TE_OK; o++) {
        if (!outputs[o].quantized) continue;
        if (store_output(exec, run, &outputs[o], &jobs[n]))
            n++;
        else
            status = TE_ERROR_MEMORY;
    }
    if (status == TE_OK) status = te_cuda_program_run(exec, program, &stored, 1);
    for (int i = 0; i < n && status == TE_OK; i++) status = te_cuda_quantize(exec, &jobs[i]);
    while (n > 0) exec->scratch_free(exec, jobs[--n].source);
    return status;
}

te_status te_cuda_program_run(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_cuda_program_shape shape;
    te_status status = te_cuda_enter(exec);
    for (int i = n_runs - 1; i >= 0 && status == TE_OK; i--) /* all are checked before anything is written */
        status = te_cuda_program_shape_make(exec, program, &runs[i], &shape);
    for (int i = 0; i < n_runs && status == TE_OK;) {
        if (i > 0) status = te_cuda_program_shape_make(exec, program, &runs[i], &shape);
        if (status != TE_OK) break;
        if (!tiles_fit(te_cuda(exec), program, &shape, &runs[i])) {
            status = run_stored(exec, program, &runs[i++]);
            continue;
        }
        int n = te_cuda_program_batch(exec, program, &shape, &runs[i], n_runs - i);
        status = launch_batch(exec, program, &shape, &runs[i], n);
        i += n;
    }
    return status;
}
