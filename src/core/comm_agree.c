/* comm_agree.c - what all processes of a group must do alike: before each call every one tells the others which it is,
 * so calls that do not fit together are an error in every process. */
#include "comm_work.h"

#include "tensor.h"

#include <stdio.h>

const char *te_comm_function_name(int64_t function)
{
    static const char *const names[] = {
        "split", "barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "end",
    };
    return names[function];
}

const char *te_comm_reduction_name(int64_t reduction)
{
    static const char *const names[] = {"sum", "average", "max", "min"};
    return names[reduction];
}

void te_comm_give_up(te_comm *comm) { comm->broken = comm->peers->over = true; }

/* The messenger moves bytes for a call and names how, which says nothing to whoever interrupts the call. */
te_status te_comm_fail_exec(te_comm *comm, te_status status, const char *call)
{
    if (comm->peers) te_comm_give_up(comm);
    comm->left_off = true;
    if (status == TE_ERROR_INTERRUPTED) return te_fail(comm->ctx, status, "te.distributed: %s: interrupted", call);
    return te_fail(comm->ctx, status, "te.distributed: %s", comm->exec.message);
}

te_status te_comm_check_group(te_comm *comm, te_comm_function f)
{
    if (!comm->broken) return TE_OK;
    if (comm->ended)
        return te_fail(comm->ctx, TE_ERROR_DEVICE, "te.distributed: %s: rank %d has ended", te_comm_function_name(f),
                       comm->ended - 1);
    return te_fail(comm->ctx, TE_ERROR_DEVICE, "te.distributed: %s: an earlier call of this group was left off",
                   te_comm_function_name(f));
}

static const char *call_text(const te_comm_call *c, char *text, size_t size)
{
    char shape[160];
    int  n = snprintf(text, size, "%s", te_comm_function_name(c->function));
    if (c->function <= TE_COMM_BARRIER) return text;
    n += snprintf(text + n, size - (size_t)n, " of %s%s %s", c->by_device ? "a device's " : "",
                  te_dtype_name((te_dtype)c->dtype), te_shape_text((int)c->ndim, c->shape, shape, sizeof shape));
    if (c->function == TE_COMM_BROADCAST) snprintf(text + n, size - (size_t)n, " from rank %d", (int)c->root);
    if (c->function == TE_COMM_ALL_REDUCE || c->function == TE_COMM_REDUCE_SCATTER)
        snprintf(text + n, size - (size_t)n, " (%s)", te_comm_reduction_name(c->reduction));
    return text;
}

static te_status compare_calls(te_comm *comm, const te_comm_call *all, int rank)
{
    char a[256], b[256];
    if (all[rank].failed)
        return te_fail(comm->ctx, (te_status)all[rank].failed,
                       "te.distributed: %s: the call failed on rank %d, whose message says why",
                       te_comm_function_name(all[rank].function), rank);
    if (memcmp(&all[rank], &all[0], offsetof(te_comm_call, failed)) == 0) return TE_OK;
    return te_fail(comm->ctx, TE_ERROR_ARGUMENT, "te.distributed: the processes differ: rank %d calls %s, rank 0 %s",
                   rank, call_text(&all[rank], a, sizeof a), call_text(&all[0], b, sizeof b));
}

/* Whoever sends is waited for. */
static te_status compare_partners(te_comm *comm, const te_comm_call *all, int rank)
{
    int64_t to = all[rank].to, from = all[rank].from;
    if (all[rank].function != TE_COMM_EXCHANGE) return TE_OK;
    if (to >= 0 && all[to].from != rank)
        return te_fail(comm->ctx, TE_ERROR_ARGUMENT,
                       "te.distributed: exchange: rank %d sends to rank %d, which expects rank %d", rank, (int)to,
                       (int)all[to].from);
    if (from >= 0 && all[from].to != rank)
        return te_fail(comm->ctx, TE_ERROR_ARGUMENT,
                       "te.distributed: exchange: rank %d expects rank %d, which sends to rank %d", rank, (int)from,
                       (int)all[from].to);
    return TE_OK;
}

/* Whoever has ended takes part in no call after this one. */
static void look_for_ends(te_comm *comm, const te_comm_call *all)
{
    for (int rank = 0; rank < te_comm_size(comm) && !comm->ended; rank++)
        if (all[rank].function == TE_COMM_END) comm->ended = rank + 1;
    if (comm->ended) te_comm_give_up(comm);
}

te_status te_comm_agree(te_comm *comm, const te_comm_call *own)
{
    int           size = te_comm_size(comm);
    te_comm_call *all = comm->calls, *sent = all + size; /* the group may be smaller than its room */
    *sent = *own;
    te_status status = comm->messenger->all_gather(&comm->exec, comm->peers, sent, all, sizeof *sent);
    if (status != TE_OK) return te_comm_fail_exec(comm, status, te_comm_function_name(own->function));
    look_for_ends(comm, all);
    if (own->failed) return (te_status)own->failed; /* and the message is there */
    status = te_comm_check_group(comm, (te_comm_function)own->function);
    for (int rank = 0; rank < size && status == TE_OK; rank++) status = compare_calls(comm, all, rank);
    for (int rank = 0; rank < size && status == TE_OK; rank++) status = compare_partners(comm, all, rank);
    return status;
}
