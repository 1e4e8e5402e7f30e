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

static int64_t rows_of(const te_tensor *t) { return width_of(t) ? te_tensor_numel(t) / width_of(t) : 0; }

/* At most those of the master. */
static int64_t stripe_rows(const te_exec *exec, const te_tensor *master)
{
    int64_t bytes = STRIPE_BYTES * (int64_t)(exec->threads > 1 ? exec->threads : 1), all = rows_of(master);
    int64_t rows = bytes / (int64_t)te_dtype_size(master->dtype) / (width_of(master) ? width_of(master) : 1);
    rows = rows < STRIPE_ROWS ? STRIPE_ROWS : rows - rows % STRIPE_ROWS;
    return rows < all ? rows : all;
}

static bool goes_in_stripes(const te_tensor *param)
{
    return te_tensor_is_quantized(param) && param->storage->device->exec.backend->host_memory &&
           te_tensor_numel(param) > 0 &&
           te_quantizer_is_local(&param->storage->quantized->copies.quantizer);
}

static te_status open_stored(te_tensor *param, te_tensor *master, te_run *run, te_optim_stored *e)
{
    te_status status = te_quantized_parameter_open(param, &e->copies);
    if (status != TE_OK) return status;
    e->param = param;
    e->master = master;
    e->run = *run;
    e->striped = goes_in_stripes(param);
    if (e->striped) run->shape[0] = 0; /* nothing is left of it for the others' pass */
    return TE_OK;
}

static bool is_converted(const te_optim_stored *e) { return e->master->dtype != e->param->dtype; }

/* What stripes are converted in. */
static te_status open_room(te_context *ctx, te_optim_quantizing *z)
{
    size_t bytes = 0;
    for (int i = 0; i < z->n; i++) {
        const te_optim_stored *e = &z->entries[i];
        if (!e->striped || !is_converted(e)) continue;
        size_t size = (size_t)(stripe_rows(z->exec, e->master) * width_of(e->master)) * te_dtype_size(e->param->dtype);
        if (size > bytes) bytes = size;
    }
    if (bytes) z->room = z->exec->scratch(z->exec, bytes);
    return z->room || !bytes ? TE_OK : te_fail_exec(ctx, TE_ERROR_MEMORY, z->exec, "optimizer step");
}

te_status te_optim_quantizing_open(te_context *ctx, int n_groups, const te_optim_group *groups, te_run *runs,
                                   te_optim_quantizing *z)
{
    int n = 0;
    *z = (te_optim_quantizing){.entries = NULL};
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++) n += te_tensor_is_quantized(groups[k].params[i]);
    if (n == 0) return TE_OK;
    z->bytes = (size_t)n * sizeof *z->entries;
    z->entries = te_mem_zalloc(&ctx->mem, z->bytes);
    if (!z->entries) return te_fail_memory(ctx, "optimizer step");
    for (int k = 0; k < n_groups; k++)
        for (int i = 0; i < groups[k].n; i++, runs++) {
            te_tensor *param = groups[k].params[i];
            if (!te_tensor_is_quantized(param)) continue;
            te_status status = open_stored(param, groups[k].masters[i], runs, &z->entries[z->n]);
            if (status != TE_OK) return status;
            z->exec = &param->storage->device->exec;
            z->n++;
        }
    return open_room(ctx, z);
}

/* Takes what one parameter needs and gives it back, so that it is there when its turn comes. */
static te_status reserve(te_context *ctx, const te_optim_stored *e)
{
    te_device *device = e->param->storage->device;
    te_tensor *cast = NULL;
    int64_t rows = e->striped ? stripe_rows(&device->exec, e->master) : rows_of(e->param);
    te_status status = te_role_settle_resident(e->param->storage->quantized->state, &e->copies.quantizer, device);
    if (status == TE_OK && !e->striped && is_converted(e)) {
        cast = te_tensor_new(ctx, device, e->param->dtype, e->param->ndim, e->param->shape);
        if (!cast) return ctx->status;
    }
    if (status == TE_OK) status = te_quantize_prepare(&e->copies, rows);
    te_tensor_release(cast);
    return status;
}

te_status te_optim_quantizing_reserve(te_context *ctx, const te_optim_quantizing *z)
{
    te_status status = TE_OK;
    for (int i = 0; i < z->n && status == TE_OK; i++) status = reserve(ctx, &z->entries[i]);
    return status;
}

void te_optim_quantizing_close(te_context *ctx, te_optim_quantizing *z)
{
    for (int i = 0; i < z->n; i++) te_quantized_parameter_close(z->entries[i].param, &z->entries[i].copies);
    if (z->room) z->exec->scratch_free(z->exec, z->room);
    te_mem_free(&ctx->mem, z->entries, z->bytes);
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
static void *as_source(te_exec *exec, const te_optim_stored *e, int64_t first, int64_t n, void *room,
                       te_status *status)
{
    te_operand from = te_optim_flat(e->master), at;
    narrow(&at, &from, 1, first);
    if (!is_converted(e)) return at.data;
    te_view given = {.data = at.data, .dtype = e->master->dtype, .ndim = 1, .shape = {n}, .stride = {1}},
            wanted = given;
    wanted.data = room;
    wanted.dtype = e->param->dtype;
    *status = exec->backend->copy(exec, &wanted, &given);
    return room;
}

static te_status run_striped(te_exec *exec, te_program *program, te_optim_stored *e, int n_inputs, int n_outputs,
                             void *room)
{
    int64_t width = width_of(e->param), rows = rows_of(e->param), step = stripe_rows(exec, e->master);
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
    if (status != TE_OK) return status;
    te_quantized_parameter_written(e->param, &e->copies);
    return te_role_count_resident(e->param->storage->quantized->state, &e->copies);
}

/* The whole parameter from its master, which was updated. */
static te_status store(te_optim_stored *e)
{
    te_tensor *cast = te_tensor_cast(e->master, e->param->dtype);
    te_quantized over;
    if (!cast) return e->param->ctx->status;
    te_quantized_share(&e->copies, true, true, &over); /* a failure closes them */
    te_status status = te_role_quantize_resident(e->param->storage->quantized->state, &e->copies.quantizer, cast, true,
                                                 true, &over);
    te_quantized_close(&over);
    te_tensor_release(cast);
    if (status == TE_OK) te_quantized_parameter_written(e->param, &e->copies);
    return status;
}

te_status te_optim_quantizing_run(te_exec *exec, te_program *program, te_optim_quantizing *z, int n_inputs,
                                  int n_outputs)
{
    te_status status = TE_OK;
    for (int i = 0; i < z->n && status == TE_OK; i++) {
        te_optim_stored *e = &z->entries[i];
        status = e->striped ? run_striped(exec, program, e, n_inputs, n_outputs, z->room) : store(e);
    }
    return status;
}
