/* comm_calls.c - the collective calls: what include/tetrain/comm.h promises of each. */
#include "comm_work.h"

#include "quantized_parameter.h"
#include "tensor.h"

static bool adds(te_comm_function f) { return f == TE_COMM_ALL_REDUCE || f == TE_COMM_REDUCE_SCATTER; }
static bool splits_rows(te_comm_function f) { return f == TE_COMM_REDUCE_SCATTER || f == TE_COMM_ALL_TO_ALL; }
static bool takes_rows(te_comm_function f) { return f == TE_COMM_ALL_GATHER || splits_rows(f); }

static te_status refuse(const te_comm_work *w, const char *why)
{
    return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s", te_comm_function_name(w->function), why);
}

/* What requires a gradient would lose it. A leaf may be written over: what it was then counts for nothing. */
static bool loses_gradient(const te_comm_work *w)
{
    if (!w->comm->ctx->grad_enabled || !te_tensor_requires_grad(w->given)) return false;
    return w->function != TE_COMM_BROADCAST || w->given->node;
}

static bool can_add(te_dtype dtype, te_reduction reduction)
{
    if (te_dtype_has_gradient(dtype)) return true;
    if (dtype == TE_I64 || dtype == TE_I32 || dtype == TE_U8) return reduction != TE_REDUCE_AVERAGE;
    return dtype == TE_BOOL && reduction >= TE_REDUCE_MAX;
}

static te_status check_rank(const te_comm_work *w, const char *name, int rank, int least)
{
    if (rank >= least && rank < te_comm_size(w->comm)) return TE_OK;
    return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s is %d in a group of %d",
                   te_comm_function_name(w->function), name, rank, te_comm_size(w->comm));
}

static te_status check_tensor(const te_comm_work *w)
{
    te_tensor *x = w->given;
    char       text[160];
    if (!x) return refuse(w, "x is NULL");
    if (x->ctx != w->comm->ctx) return refuse(w, "x belongs to another context");
    if (te_tensor_is_quantized(x)) return refuse(w, "x is a parameter that is stored quantized");
    if (loses_gradient(w))
        return refuse(w, "x requires a gradient, which this does not carry; use x:detach(), te.no_grad or the modules "
                         "AllReduce, AllGather and ReduceScatter");
    if (adds(w->function) && !can_add(x->dtype, w->reduction))
        return te_fail(w->comm->ctx, TE_ERROR_UNSUPPORTED, "te.distributed: %s: %s of %s",
                       te_comm_function_name(w->function), te_comm_reduction_name(w->reduction),
                       te_dtype_name(x->dtype));
    te_shape_text(x->ndim, x->shape, text, sizeof text);
    if (takes_rows(w->function) && x->ndim == 0) return refuse(w, "x has no first dimension");
    if (splits_rows(w->function) && x->shape[0] % te_comm_size(w->comm))
        return te_fail(w->comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: %s: %s cannot be split between %d processes",
                       te_comm_function_name(w->function), text, te_comm_size(w->comm));
    const char *why = w->in_place ? te_tensor_unwritable(x) : NULL;
    if (why) return refuse(w, why);
    return TE_OK;
}

static te_status check(const te_comm_work *w)
{
    te_status status = te_comm_check_group(w->comm, w->function);
    if (status == TE_OK && (unsigned)w->reduction > TE_REDUCE_MIN) status = refuse(w, "no such reduction");
    if (status == TE_OK) status = check_tensor(w);
    if (status == TE_OK && w->function == TE_COMM_BROADCAST) status = check_rank(w, "root", w->root, 0);
    if (status == TE_OK && w->function == TE_COMM_EXCHANGE) status = check_rank(w, "to", w->to, -1);
    if (status == TE_OK && w->function == TE_COMM_EXCHANGE) status = check_rank(w, "from", w->from, -1);
    return status;
}

/* --- the course of a call ----------------------------------------------------------------------------------------- */

/* x where the call can be run: on the host, or on a device with collectives; contiguous. A new reference. */
static te_tensor *bring(te_comm_work *w)
{
    te_device *device = w->given->storage->device;
    w->device = device->exec.backend->collectives ? device : NULL;
    if (w->device || device->exec.backend->host_memory) return te_tensor_contiguous_copy(w->given);
    return te_tensor_on_device(w->given, te_context_device(w->comm->ctx, "cpu"));
}

static te_tensor *new_result(const te_comm_work *w)
{
    int64_t shape[TE_MAX_DIMS] = {0};
    int     ranks = te_comm_size(w->comm);
    memcpy(shape, w->x->shape, (size_t)w->x->ndim * sizeof *shape);
    if (w->function == TE_COMM_ALL_GATHER) shape[0] *= ranks;
    if (w->function == TE_COMM_REDUCE_SCATTER) shape[0] /= ranks;
    te_tensor *out = te_tensor_new(w->comm->ctx, w->x->storage->device, w->x->dtype, w->x->ndim, shape);
    if (!out || w->function != TE_COMM_EXCHANGE || w->from >= 0 || te_tensor_fill(out, 0) == TE_OK) return out;
    te_tensor_release(out);
    return NULL;
}

static te_status prepare(te_comm_work *w)
{
    te_context *ctx = w->comm->ctx;
    te_status   status = check(w);
    if (status != TE_OK || te_comm_size(w->comm) == 1) return status;
    w->x = bring(w);
    if (w->x && w->function == TE_COMM_ALL_REDUCE && !w->in_place && w->x->storage == w->given->storage) {
        te_tensor *copy = te_tensor_clone_data(w->x);
        te_tensor_release(w->x);
        w->x = copy;
    }
    if (!w->x) return ctx->status;
    if (!w->in_place && w->function != TE_COMM_ALL_REDUCE && !(w->out = new_result(w))) return ctx->status;
    int64_t room = w->device ? 0 : te_comm_room(w);
    if (room == 0) return TE_OK;
    w->room = te_tensor_new(ctx, te_context_device(ctx, "cpu"), w->x->dtype, 1, &room);
    return w->room ? TE_OK : ctx->status;
}

static te_status agree_on(const te_comm_work *w, te_status prepared)
{
    te_comm_call own = {.function = w->function, .failed = prepared};
    if (prepared != TE_OK) return te_comm_agree(w->comm, &own);
    own = (te_comm_call){.function = w->function, .dtype = w->x->dtype, .by_device = w->device != NULL,
                         .reduction = w->reduction, .root = w->root, .ndim = w->x->ndim, .to = w->to,
                         .from = w->from};
    memcpy(own.shape, w->x->shape, (size_t)w->x->ndim * sizeof *own.shape);
    if (w->device) own.connection = w->comm->connection[w->device - w->comm->ctx->devices];
    return te_comm_agree(w->comm, &own);
}

/* What a call that was left off may still be written to stays until the group is given up. */
static void leave_off(te_comm_work *w)
{
    te_tensor *left[] = {w->x, w->out, w->room};
    for (int i = 0; i < 3; i++)
        if (!w->comm->left[i]) w->comm->left[i] = te_tensor_retain(left[i]);
}

static te_status run(te_comm_work *w)
{
    te_status status = prepare(w);
    if (te_comm_size(w->comm) == 1 || w->comm->broken) return status;
    status = agree_on(w, status);
    if (status == TE_OK) status = w->device ? te_comm_on_device(w) : te_comm_on_host(w);
    if (w->comm->broken) leave_off(w);
    return status;
}

static void finish(te_comm_work *w)
{
    te_tensor_release(w->x);
    te_tensor_release(w->out);
    te_tensor_release(w->room);
}

static te_status in_place(te_comm_work w)
{
    if (!w.comm) return TE_ERROR_ARGUMENT;
    w.in_place = true;
    te_status status = run(&w);
    bool      there = w.x && w.x->storage == w.given->storage;
    if (status == TE_OK && w.x && !there) status = te_tensor_copy_across(w.given, w.x);
    if (there) te_tensor_written(w.given); /* also of what was left off half-way */
    finish(&w);
    return status;
}

/* The result in a group of one. */
static te_tensor *alone(const te_comm_work *w)
{
    te_tensor *result = te_tensor_clone_data(w->given);
    bool       nothing_comes = w->function == TE_COMM_EXCHANGE && w->from < 0;
    if (!result || !nothing_comes || te_tensor_fill(result, 0) == TE_OK) return result;
    te_tensor_release(result);
    return NULL;
}

static te_tensor *to_new(te_comm_work w)
{
    if (!w.comm) return NULL;
    te_tensor *result = NULL;
    te_status  status = run(&w);
    if (status == TE_OK && !w.x) result = alone(&w);
    else if (status == TE_OK) result = te_tensor_on_device(w.out ? w.out : w.x, w.given->storage->device);
    finish(&w);
    return result;
}

te_status te_comm_broadcast(te_comm *comm, te_tensor *x, int root)
{
    return in_place((te_comm_work){.comm = comm, .function = TE_COMM_BROADCAST, .given = x, .root = root});
}

te_status te_comm_all_reduce_in_place(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return in_place((te_comm_work){.comm = comm, .function = TE_COMM_ALL_REDUCE, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_reduce(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return to_new((te_comm_work){.comm = comm, .function = TE_COMM_ALL_REDUCE, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_gather(te_comm *comm, te_tensor *x)
{
    return to_new((te_comm_work){.comm = comm, .function = TE_COMM_ALL_GATHER, .given = x});
}

te_tensor *te_comm_reduce_scatter(te_comm *comm, te_tensor *x, te_reduction reduction)
{
    return to_new((te_comm_work){.comm = comm, .function = TE_COMM_REDUCE_SCATTER, .given = x, .reduction = reduction});
}

te_tensor *te_comm_all_to_all(te_comm *comm, te_tensor *x)
{
    return to_new((te_comm_work){.comm = comm, .function = TE_COMM_ALL_TO_ALL, .given = x});
}

te_tensor *te_comm_exchange(te_comm *comm, te_tensor *x, int to, int from)
{
    return to_new((te_comm_work){.comm = comm, .function = TE_COMM_EXCHANGE, .given = x, .to = to, .from = from});
}
