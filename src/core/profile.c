/* profile.c - measuring by standing in for a device's table of functions. */
#include "profile.h"

#include "quantizer.h"

#include <stdio.h>
#include <time.h>

typedef struct profiled_device {
    te_device        *device;
    const te_backend *real;
    te_backend        table; /* the real one with the measured functions replaced */
} profiled_device;

struct te_profiler {
    profiled_device   devices[TE_MAX_DEVICES];
    te_mem            mem; /* of the events */
    te_profile_event *events;
    size_t            n, capacity;
    double            begin;
    te_status         before; /* of what ran before the kernel in progress and is only known now */
    te_status         status;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct te_profiler *profiler_of(te_exec *exec) { return ((te_device *)exec->owner)->ctx->profiler; }

static const te_backend *real_of(te_exec *exec)
{
    const te_device *device = exec->owner;
    return device->ctx->profiler->devices[device - device->ctx->devices].real;
}

static te_profile_event begin(te_exec *exec, const char *kind)
{
    te_profile_event event = {.bytes = 0};
    snprintf(event.kind, sizeof event.kind, "%s", kind);
    snprintf(event.device, sizeof event.device, "%s", ((te_device *)exec->owner)->name);
    profiler_of(exec)->before = real_of(exec)->synchronize(exec);
    event.start = now();
    return event;
}

static te_status end(te_exec *exec, te_profile_event *event, te_status status)
{
    struct te_profiler *p = profiler_of(exec);
    te_status late = real_of(exec)->synchronize(exec);
    event->seconds = now() - event->start;
    event->start -= p->begin;
    if (te_mem_grow(&p->mem, &p->events, &p->capacity, p->n + 1, sizeof *p->events)) {
        p->events[p->n++] = *event;
    } else {
        p->status = TE_ERROR_MEMORY;
    }
    if (p->before != TE_OK) return p->before;
    return status == TE_OK ? late : status;
}

/* --- what kernels move and compute -------------------------------------------------------------------------------- */

/* Elements of an operand's memory that a run touches: broadcast ones count once. */
static double operand_bytes(const te_operand *o, const te_run *run)
{
    double n = 1;
    if (!o->data) return 0;
    for (int i = 0; i < run->ndim; i++)
        if (o->stride[i]) n *= (double)run->shape[i];
    return n * (double)te_dtype_size(o->dtype) * (o->accumulate ? 2 : 1);
}

/* Values and their factors. */
static double view_bytes(const te_view *v)
{
    static const double factor[] = {4, 1, 1};
    const te_quant *q = v->quant;
    double n = te_view_present(v) ? (double)te_view_numel(v) : 0;
    if (!q || !n) return n * (double)te_dtype_size(v->dtype);
    double block = q->block[0] ? (double)q->block[0] * q->block[1] : n;
    return n * (q->element == TE_E2M1 ? 0.5 : 1) + n / block * factor[q->scale];
}

/* Of what is read: broadcast elements count once. */
static double read_bytes(const te_view *v)
{
    double bytes = view_bytes(v);
    for (int i = 0; i < v->ndim && !v->quant; i++)
        if (!v->stride[i] && v->shape[i]) bytes /= (double)v->shape[i];
    return bytes;
}

static double copies_bytes(const te_view *dst, const te_view *src, int n)
{
    double bytes = 0;
    for (int i = 0; i < n; i++) bytes += view_bytes(&dst[i]) + read_bytes(&src[i]);
    return bytes;
}

static const char *view_type(const te_view *v)
{
    return v->quant ? te_element_names[v->quant->element] : te_dtype_name(v->dtype);
}

/* Data and factors of a stored copy. */
static double side_bytes(const te_quantizer *q, const te_quantized_side *s)
{
    static const double factor[] = {4, 1, 1};
    double n = s->data ? (double)s->rows * (double)s->cols : 0;
    double rows = q->replicated ? 1 : q->block_rows, block = q->block_rows ? rows * q->block_cols : n;
    return n * (q->element == TE_E2M1 ? 0.5 : 1) + (n ? n / block * factor[q->scale] : 0);
}

/* What an output is stored as; nothing of it where it is measured alone. */
static double output_bytes(const te_operand *o, const te_run *run)
{
    const te_quantize_job *job = o->quantized;
    if (!job || job->step == TE_QUANTIZE_MEASURE) return operand_bytes(o, run);
    return side_bytes(job->quantizer, &job->side[0]) + side_bytes(job->quantizer, &job->side[1]);
}

/* An input may give the shape alone, as that of a draw. */
static bool reads_input(const te_program *program, int slot)
{
    for (int i = 0; i < program->n_insns; i++)
        if (program->insns[i].op == TE_PW_LOAD && program->insns[i].slot == slot) return true;
    return false;
}

static void count_program(te_profile_event *event, const te_program *program, const te_run *run)
{
    double elements = 1, work = 0;
    for (int i = 0; i < run->ndim; i++) elements *= (double)run->shape[i];
    for (int i = 0; i < program->n_inputs; i++)
        if (reads_input(program, i)) event->bytes += operand_bytes(&run->inputs[i], run);
    for (int i = 0; i < program->n_outputs; i++) event->bytes += output_bytes(&run->outputs[i], run);
    for (int i = 0; i < program->n_insns; i++)
        work += program->insns[i].rate == TE_RATE_ELEM && program->insns[i].arg[0] >= 0;
    event->flops += work * elements;
}

static double source_bytes(const te_quantize_job *job)
{
    return (double)job->rows * (double)job->cols * (double)te_dtype_size(job->dtype);
}

/* Entries that a mask hides are counted, too. */
static double attention_flops(const te_attention *a)
{
    return 4.0 * (double)a->q.shape[0] * (double)a->q.shape[1] * (double)a->q.shape[2] * (double)a->k.shape[2] *
           (double)a->q.shape[3];
}

/* --- the stand-ins ------------------------------------------------------------------------------------------------ */

static te_status program_run(te_exec *exec, te_program *program, const te_run *runs, int n_runs)
{
    te_profile_event event = begin(exec, "program");
    te_status status = real_of(exec)->program_run(exec, program, runs, n_runs);
    snprintf(event.name, sizeof event.name, "%s", program->name);
    for (int i = 0; i < n_runs; i++) count_program(&event, program, &runs[i]);
    return end(exec, &event, status);
}

static te_status gemm(te_exec *exec, const te_gemm *g)
{
    te_profile_event event = begin(exec, "gemm");
    te_status status = real_of(exec)->gemm(exec, g);
    int d = g->c.ndim;
    double m = (double)g->c.shape[d - 2], n = (double)g->c.shape[d - 1], k = (double)g->a.shape[d - 1];
    snprintf(event.name, sizeof event.name, "gemm %.0fx%.0fx%.0f %s", m, n, k, view_type(&g->a));
    event.bytes = view_bytes(&g->a) + view_bytes(&g->b) + view_bytes(&g->c) * (g->beta == 1 ? 2 : 1) +
                  view_bytes(&g->bias);
    event.flops = 2 * (double)te_view_numel(&g->c) * k;
    return end(exec, &event, status);
}

static te_status attention(te_exec *exec, const te_attention *a)
{
    te_profile_event event = begin(exec, "attention");
    te_status status = real_of(exec)->attention(exec, a);
    snprintf(event.name, sizeof event.name, "attention %s", view_type(&a->q));
    event.bytes = view_bytes(&a->q) + view_bytes(&a->k) + view_bytes(&a->v) + view_bytes(&a->out);
    event.flops = attention_flops(a);
    return end(exec, &event, status);
}

static te_status attention_backward(te_exec *exec, const te_attention_grad *g)
{
    te_profile_event event = begin(exec, "attention");
    te_status status = real_of(exec)->attention_backward(exec, g);
    const te_attention *a = &g->forward;
    snprintf(event.name, sizeof event.name, "attention.backward %s", view_type(&a->q));
    event.bytes = 2 * (view_bytes(&a->q) + view_bytes(&a->k) + view_bytes(&a->v) + view_bytes(&a->out));
    event.flops = 2.5 * attention_flops(a);
    return end(exec, &event, status);
}

static te_status quantize(te_exec *exec, const te_quantize_job *job)
{
    bool measures = job->step == TE_QUANTIZE_MEASURE;
    if (job->step == TE_QUANTIZE_PREPARE) return real_of(exec)->quantize(exec, job); /* no work */
    te_profile_event event = begin(exec, "other");
    te_status status = real_of(exec)->quantize(exec, job);
    snprintf(event.name, sizeof event.name, "%s", measures ? "quantize amax" : "quantize");
    event.bytes = source_bytes(job);
    for (int s = 0; s < 2 && !measures; s++) event.bytes += side_bytes(job->quantizer, &job->side[s]);
    return end(exec, &event, status);
}

/* The others move what they are given once. */
#define TE_KERNEL_COUNTED(name, parameters, arguments)
#define TE_KERNEL(OP, parameters, arguments, moved)          \
    static te_status OP parameters                           \
    {                                                        \
        te_profile_event event = begin(exec, "other");       \
        te_status status = real_of(exec)->OP arguments;      \
        snprintf(event.name, sizeof event.name, "%s", #OP);  \
        event.bytes = moved;                                 \
        return end(exec, &event, status);                    \
    }
#include "kernels/kernel_list.h"

/* --- start and stop ----------------------------------------------------------------------------------------------- */

static void stand_in(profiled_device *p, te_device *device)
{
    p->device = device;
    p->real = device->exec.backend;
    p->table = *p->real;
#define TE_KERNEL(name, parameters, arguments, moved) \
    if (p->real->name) p->table.name = name;
#include "kernels/kernel_list.h"
    device->exec.backend = &p->table;
}

void te_profile_device(te_device *device)
{
    te_context *ctx = device->ctx;
    if (ctx->profiler) stand_in(&ctx->profiler->devices[device - ctx->devices], device);
}

te_status te_profile_start(te_context *ctx, te_mem mem)
{
    if (ctx->profiler) return te_fail(ctx, TE_ERROR_ARGUMENT, "te.profile: a profile is running already");
    te_status status = te_context_synchronize(ctx, NULL);
    if (status != TE_OK) return status;
    struct te_profiler *p = te_mem_zalloc(&ctx->mem, sizeof *p);
    if (!p) return te_fail_memory(ctx, "te.profile");
    ctx->profiler = p;
    p->mem = mem;
    for (int i = 0; i < TE_MAX_DEVICES; i++)
        if (ctx->devices[i].open) te_profile_device(&ctx->devices[i]);
    p->begin = now();
    return TE_OK;
}

te_profile_event *te_profile_stop(te_context *ctx, size_t *n, size_t *capacity, te_status *status)
{
    struct te_profiler *p = ctx->profiler;
    for (int i = 0; i < TE_MAX_DEVICES; i++)
        if (p->devices[i].device) p->devices[i].device->exec.backend = p->devices[i].real;
    te_profile_event *events = p->events;
    *n = p->n;
    *capacity = p->capacity;
    *status = p->status == TE_OK ? TE_OK : te_fail_memory(ctx, "te.profile");
    te_mem_free(&ctx->mem, p, sizeof *p);
    ctx->profiler = NULL;
    return events;
}
