/* comm.c - groups of processes: who is in them, and how they are joined, split and left.
 *
 * Between processes go bytes (src/kernels/messenger.h), and before each call a few that say which call it is
 * (comm_agree.c). On a device whose backend has collectives these move and add; the messenger then only makes them
 * known to each other.
 */
#include "comm_work.h"

#include "device_module.h"
#include "kernels/environment.h"
#include "tensor.h"

#include <dlfcn.h>
#include <stdlib.h>

static te_comm *new_comm(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = te_mem_zalloc(&ctx->mem, sizeof *comm);
    if (!comm) {
        te_fail_memory(ctx, "a group of processes");
        return NULL;
    }
    comm->ctx = ctx;
    comm->refs = 1;
    comm->messenger = messenger;
    comm->exec = (te_exec){.mem = &ctx->mem, .interrupt = &ctx->interrupted};
    te_context_retain(ctx);
    return comm;
}

/* What is said before each call has room from the beginning: a group of this size, or of fewer. */
static te_status make_room_for_calls(te_comm *comm, int size)
{
    size_t calls = ((size_t)size + 1) * sizeof(te_comm_call), bytes = calls + sizeof *comm->announced;
    comm->calls = te_mem_alloc(&comm->ctx->mem, bytes);
    if (!comm->calls) return te_fail_memory(comm->ctx, "a group of processes");
    comm->announced = (void *)((char *)comm->calls + calls);
    comm->bytes_of_calls = bytes;
    return TE_OK;
}

te_comm *te_comm_join(te_context *ctx, const te_messenger *messenger)
{
    const te_comm_call end = {.function = TE_COMM_END};
    te_comm           *comm = new_comm(ctx, messenger);
    if (!comm || !messenger) return comm;
    te_status status = messenger->join(&comm->exec, &end, sizeof end, &comm->peers);
    if (status != TE_OK) te_comm_fail_exec(comm, status, "join");
    else status = make_room_for_calls(comm, comm->peers->size);
    if (status == TE_OK) return comm;
    te_comm_release(comm);
    return NULL;
}

/* How many processes the starter says that it started; NULL: nothing. */
static const char *announcement(void)
{
    const char *size = te_environment(TE_ENV_OMPI_SIZE);
    if (!size) size = te_environment(TE_ENV_PMI_SIZE);
    if (!size && te_environment(TE_ENV_PMIX_RANK)) size = te_environment(TE_ENV_SLURM_SIZE);
    return size;
}

/* 1 also where nobody started it, 0 where there may be more, -1 where that is no number. */
static long announced_size(void)
{
    const char *size = announcement();
    char       *end;
    if (!size) return te_environment(TE_ENV_PMIX_RANK) ? 0 : 1;
    long n = strtol(size, &end, 10);
    return end == size || *end || n < 1 ? -1 : n;
}

bool te_comm_launched(void) { return announced_size() != 1; }

/* The library is never closed again: MPI is one for the process. */
static const te_messenger *open_messenger(te_context *ctx)
{
    te_exec                    exec = {.mem = &ctx->mem};
    te_messenger_get_function *get = NULL;
    void *library = te_module_library(&exec, "libtetrain_mpi.so", te_environment(TE_ENV_MPI_MODULE), "MPI");
    if (!library) {
        te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.distributed: started with other processes, but %s", exec.message);
        return NULL;
    }
    *(void **)&get = dlsym(library, TE_MESSENGER_ENTRY);
    const te_messenger *messenger = get ? get() : NULL;
    if (messenger && messenger->layout == TE_MESSENGER_LAYOUT) return messenger;
    te_fail(ctx, TE_ERROR_UNSUPPORTED, "te.distributed: the MPI module found is of another build of tetrain");
    return NULL;
}

/* Processes that each find themselves alone would do the same work side by side, and write the same files. */
static te_comm *join_all(te_context *ctx, const te_messenger *messenger)
{
    te_comm *comm = te_comm_join(ctx, messenger);
    long     size = announced_size();
    if (!comm || size == 0 || size == te_comm_size(comm)) return comm;
    te_fail(ctx, TE_ERROR_DEVICE,
            "te.distributed: %ld processes were started together, but only %d of them find each other: they want the "
            "mpirun of the MPI that tetrain was built with", size, te_comm_size(comm));
    te_comm_release(comm);
    return NULL;
}

te_comm *te_comm_world(te_context *ctx)
{
    if (!ctx) return NULL;
    if (ctx->world) return te_comm_retain(ctx->world);
    const te_messenger *messenger = NULL;
    if (announced_size() < 0) {
        te_fail(ctx, TE_ERROR_ARGUMENT,
                "te.distributed: \"%.40s\" processes were started together, says the environment", announcement());
        return NULL;
    }
    if (te_comm_launched() && !(messenger = open_messenger(ctx))) return NULL;
    return ctx->world = join_all(ctx, messenger);
}

te_comm *te_comm_retain(te_comm *comm)
{
    if (comm) comm->refs++;
    return comm;
}

static void disconnect_devices(te_comm *comm)
{
    for (int i = 0; i < TE_MAX_DEVICES; i++) {
        te_exec *exec = &comm->ctx->devices[i].exec;
        if (comm->device_peers[i]) exec->backend->collectives->disconnect(exec, comm->device_peers[i]);
    }
}

void te_comm_release(te_comm *comm)
{
    if (!comm || --comm->refs > 0) return;
    te_context *ctx = comm->ctx;
    disconnect_devices(comm);
    if (comm->peers) comm->messenger->leave(&comm->exec, comm->peers);
    if (ctx->world == comm) ctx->world = NULL;
    if (!comm->left_off) te_mem_free(&ctx->mem, comm->calls, comm->bytes_of_calls);
    te_mem_free(&ctx->mem, comm, sizeof *comm);
    te_context_unref(ctx);
}

int te_comm_rank(const te_comm *comm) { return comm && comm->peers ? comm->peers->rank : 0; }
int te_comm_size(const te_comm *comm) { return comm && comm->peers ? comm->peers->size : 1; }
int te_comm_local_rank(const te_comm *comm) { return comm && comm->peers ? comm->peers->local_rank : 0; }
int te_comm_local_size(const te_comm *comm) { return comm && comm->peers ? comm->peers->local_size : 1; }

te_status te_comm_barrier(te_comm *comm)
{
    te_comm_call own = {.function = TE_COMM_BARRIER};
    if (!comm) return TE_ERROR_ARGUMENT;
    te_status status = te_comm_check_group(comm, TE_COMM_BARRIER);
    return status != TE_OK || te_comm_size(comm) == 1 ? status : te_comm_agree(comm, &own);
}

te_status te_comm_decline_split(te_comm *comm)
{
    te_comm_call own = {.function = TE_COMM_SPLIT, .failed = TE_ERROR_ARGUMENT};
    return comm->broken || te_comm_size(comm) == 1 ? TE_ERROR_ARGUMENT : te_comm_agree(comm, &own);
}

te_comm *te_comm_split(te_comm *comm, int color, int key)
{
    if (!comm) return NULL;
    comm->ctx->message[0] = 0;
    if (te_comm_size(comm) == 1) return color < 0 ? NULL : new_comm(comm->ctx, NULL);
    if (te_comm_check_group(comm, TE_COMM_SPLIT) != TE_OK) return NULL;
    te_comm  *part = new_comm(comm->ctx, comm->messenger);
    te_status status = part ? make_room_for_calls(part, te_comm_size(comm)) : comm->ctx->status;
    te_comm_call own = {.function = TE_COMM_SPLIT, .failed = status};
    status = te_comm_agree(comm, &own);
    if (status == TE_OK) {
        own.failed = comm->messenger->split(&comm->exec, comm->peers, color, key, &part->peers);
        if (own.failed) te_fail(comm->ctx, (te_status)own.failed, "te.distributed: %s", comm->exec.message);
        status = te_comm_agree(comm, &own); /* all have their parts, or none */
        if (status == TE_OK && part->peers) return part;
        if (status != TE_OK && part->peers) te_comm_give_up(part);
    }
    te_comm_release(part);
    return NULL;
}
