/* optim_quantized.c - updates of parameters that are stored quantized.
 *
 * What is updated is the master; the parameter is quantized from it. Where rows can be quantized before the others are
 * known, both happen stripe by stripe: a stripe of the master is still in cache when its codes are made. Current
 * scaling and NVFP4 wait for the amax of the whole master, and on devices one kernel over everything is worth more than
 * cache; there, a pass of its own follows the update. Both give the same bytes. */
#include "optim_internal.h"

#include "fuser/emit.h"
#include "quantized_parameter.h"

enum { STRIPE_BYTES = 1 << 20, STRIPE_ROWS = 128 }; /* of each thread; what a stripe is a multiple of */

static int64_t width_of(const te_tensor *t) { return t->ndim ? t->shape[t->ndim - 1] : 1; }

static int64_t stripe_rows(const te_exec *exec, const te_tensor *master)
{
    int64_t bytes = STRIPE_BYTES * (int64_t)(exec->threads > 1 ? exec->threads : 1);
    int64_t rows = bytes / (int64_t)te_dtype_size(master->dtype) / (width_of(master) ? width_of(master) : 1);
    return rows < STRIPE_ROWS ? STRIPE_ROWS : rows - rows % STRIPE_ROWS;
}

static bool goes_in_stripes(const te_tensor *param)
{
    return te_tensor_is_quantized(param) && param->storage->device->exec.backend->host_memory &&
           te_tensor_numel(param) > 0 &&
           te_quantizer_is_local(&param->storage->quantized->copies.quantizer);
}

te_status te_optim_stripes_open(te_context *ctx, int n_groups, const te_optim_group *groups, te_run *runs,
                                te_optim_stripes *s)
{
    int n = 0;
    *s = (te_optim_stripes){NULL, 0, 0};
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++) n += goes_in_stripes(groups[k].params[i]);
    if (n == 0) return TE_OK;
    s->bytes = (size_t)n * sizeof *s->entries;
    s->entries = te_mem_zalloc(&ctx->mem, s->bytes);
    if (!s->entries) return te_fail_memory(ctx, "optimizer step");
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++, runs++) {
            if (!goes_in_stripes(groups[k].params[i])) continue;
            te_optim_striped *e = &s->entries[s->n];
            te_status status = te_quantized_parameter_open(groups[k].params[i], &e->copies);
            if (status != TE_OK) return status;
            e->param = groups[k].params[i];
            e->master = groups[k].masters[i];
            e->run = *runs;
            runs->shape[0] = 0; /* nothing is left of it for the others' pass */
            s->n++;
        }
    return TE_OK;
}

void te_optim_stripes_close(te_context *ctx, te_optim_stripes *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->entries[i].copies.side[0].data) te_quantized_parameter_close(s->entries[i].param, &s->entries[i].copies);
    te_mem_free(&ctx->mem, s->entries, s->bytes);
}

bool te_optim_stripes_have(const te_optim_stripes *s, const te_tensor *param)
{
    for (int i = 0; i < s->n; i++)
        if (s->entries[i].param == param) return true;
    return false;
}

/* Elements from `first` on. */
static void narrow(te_operand *to, const te_operand *from, int n, int64_t first)
{
    for (int i = 0; i < n; i++) {
        to[i] = from[i];
        if (to[i].data) to[i].data = (char *)to[i].data + first * to[i].stride[0] * (int64_t)te_dtype_size(to[i].dtype);
    }
}

/* n elements of the master as the quantizer reads them: themselves, or converted in `room`. */
static void *as_source(te_exec *exec, const te_optim_striped *e, int64_t first, int64_t n, void *room,
                       te_status *status)
{
    te_operand from = te_optim_flat(e->master), at;
    narrow(&at, &from, 1, first);
    if (e->master->dtype == e->param->dtype) return at.data;
    te_view given = {.data = at.data, .dtype = e->master->dtype, .ndim = 1, .shape = {n}, .stride = {1}},
            wanted = given;
    wanted.data = room;
    wanted.dtype = e->param->dtype;
    *status = exec->backend->copy(exec, &wanted, &given);
    return room;
}

static te_status run_striped(te_exec *exec, te_program *program, te_optim_striped *e, int n_inputs, int n_outputs,
                             void *room)
{
    int64_t width = width_of(e->param), rows = te_tensor_numel(e->param) / width, step = stripe_rows(exec, e->master);
    float scale, amax = 0;
    te_operand operands[TE_OPTIM_OPERANDS];
    te_status status = te_role_resident_scale(e->param->storage->quantized->state, &e->copies.quantizer, &scale);
    for (int64_t row = 0; row < rows && status == TE_OK; row += step) {
        int64_t n = rows - row < step ? rows - row : step;
        te_run part = e->run;
        part.shape[0] = n * width;
        part.inputs = operands;
        part.outputs = operands + n_inputs;
        narrow(operands, e->run.inputs, n_inputs, row * width);
        narrow(operands + n_inputs, e->run.outputs, n_outputs, row * width);
        status = exec->backend->program_run(exec, program, &part, 1);
        void *source = status == TE_OK ? as_source(exec, e, row * width, n * width, room, &status) : NULL;
        if (status == TE_OK) status = te_quantize_rows(&e->copies, row, n, source, scale, &amax);
    }
    return status == TE_OK ? te_quantized_parameter_written(e->param, &e->copies) : status;
}

te_status te_optim_stripes_run(te_exec *exec, te_program *program, te_optim_stripes *s, int n_inputs, int n_outputs)
{
    te_status status = TE_OK;
    size_t bytes = 0;
    for (int i = 0; i < s->n; i++) {
        const te_optim_striped *e = &s->entries[i];
        size_t size = (size_t)(stripe_rows(exec, e->master) * width_of(e->master)) * te_dtype_size(e->param->dtype);
        if (e->master->dtype != e->param->dtype && size > bytes) bytes = size;
    }
    void *room = bytes ? exec->scratch(exec, bytes) : NULL;
    if (bytes && !room) return TE_ERROR_MEMORY;
    for (int i = 0; i < s->n && status == TE_OK; i++)
        status = run_striped(exec, program, &s->entries[i], n_inputs, n_outputs, room);
    if (room) exec->scratch_free(exec, room);
    return status;
}
