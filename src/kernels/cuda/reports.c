/* reports.c - what operations find wrong with their operands while they run, such as ids out of range.
 *
 * Nobody waits for that. An operation is lent a word on the device, all ones, which its kernel lowers to where the
 * first fault is and what was found there; kernels skip what is wrong, so no foreign memory is reached. Where the host
 * waits next, the words used since come along, and the first operation that reported becomes an error with its name,
 * as a failed kernel does.
 *
 * Where it does not wait for long, words run out. They are lent from two halves in turn: a half whose last word has
 * been lent is copied to the host behind its kernels, and read before its words are lent again. By then the host is a
 * whole half ahead of what it waits for.
 */
#include "cuda_backend.h"
#include "kernels/hand.h"

enum { HALF = 64 };

typedef struct half {
    uint64_t *words, *seen; /* on the device, and pinned */
    te_cuda_check checks[HALF];
    int n, sent;     /* words that are lent; of which so many are on their way to `seen` */
    CUevent arrived; /* of the copy that a full half has made */
} half;

struct te_cuda_reports {
    half halves[2];
    int current; /* the one that words are lent from; the other one's are older */
};

enum { BYTES = 2 * HALF * sizeof(uint64_t) };

static te_status clear(te_exec *exec, const half *h)
{
    te_cuda_device *d = te_cuda(exec);
    CUresult r = d->driver.cuMemsetD8Async(te_cuda_address(h->words), 0xff, HALF * sizeof *h->words, d->stream);
    return te_cuda_result(exec, r, "clearing the reports of kernels");
}

static void discard(te_exec *exec, struct te_cuda_reports *r)
{
    te_cuda_device *d = te_cuda(exec);
    for (int i = 0; i < 2; i++)
        if (r->halves[i].arrived) d->driver.cuEventDestroy(r->halves[i].arrived);
    if (r->halves[0].seen) d->driver.cuMemFreeHost(r->halves[0].seen);
    if (r->halves[0].words) te_cuda_memory_free(exec, r->halves[0].words, BYTES);
    te_mem_free(exec->mem, r, sizeof *r);
}

static te_status open_reports(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    struct te_cuda_reports *r = te_mem_zalloc(exec->mem, sizeof *r);
    if (!r) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for reports of kernels");
    half *h = r->halves;
    void *pinned = NULL;
    te_status status = TE_OK;
    if (!(h[0].words = te_cuda_memory_alloc(exec, BYTES)))
        status = te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory on the device");
    if (status == TE_OK)
        status = te_cuda_result(exec, d->driver.cuMemHostAlloc(&pinned, BYTES, 0), "memory for reports");
    h[0].seen = pinned;
    for (int i = 0; i < 2 && status == TE_OK; i++) {
        h[i].words = h[0].words + i * HALF;
        h[i].seen = h[0].seen + i * HALF;
        status = te_cuda_result(exec, d->driver.cuEventCreate(&h[i].arrived, CU_EVENT_DISABLE_TIMING),
                                "an event for reports");
        if (status == TE_OK) status = clear(exec, &h[i]);
    }
    if (status == TE_OK)
        d->reports = r;
    else
        discard(exec, r);
    return status;
}

static te_status send(te_exec *exec, half *h)
{
    te_cuda_device *d = te_cuda(exec);
    if (h->sent == h->n) return TE_OK;
    CUresult result =
        d->driver.cuMemcpyDtoHAsync(h->seen, te_cuda_address(h->words), (size_t)h->n * sizeof *h->seen, d->stream);
    if (result == CUDA_SUCCESS) h->sent = h->n;
    return te_cuda_result(exec, result, "reports of kernels");
}

/* What has arrived, after which its words are to be lent again. */
static te_status read_half(te_exec *exec, half *h)
{
    int n = h->sent, first = 0;
    h->n = h->sent = 0;
    while (first < n && h->seen[first] == UINT64_MAX) first++;
    if (first == n) return TE_OK;
    te_status status = clear(exec, h);
    return status == TE_OK ? te_cuda_check_fault(exec, &h->checks[first], h->seen[first]) : status;
}

/* Makes the other half the current one. */
static te_status turn(te_exec *exec, struct te_cuda_reports *r)
{
    te_cuda_device *d = te_cuda(exec);
    half *full = &r->halves[r->current], *next = &r->halves[1 - r->current];
    te_status status = send(exec, full);
    if (status == TE_OK) status = te_cuda_result(exec, d->driver.cuEventRecord(full->arrived, d->stream), "reports");
    if (status == TE_OK && next->sent > 0) status = te_cuda_await(exec, next->arrived);
    if (status != TE_OK) return status;
    r->current = 1 - r->current;
    return read_half(exec, next);
}

te_status te_cuda_report(te_exec *exec, const te_cuda_check *check, uint64_t **word)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = d->reports ? TE_OK : open_reports(exec);
    if (status == TE_OK && d->reports->halves[d->reports->current].n == HALF) status = turn(exec, d->reports);
    if (status != TE_OK) return status;
    half *h = &d->reports->halves[d->reports->current];
    h->checks[h->n] = *check;
    *word = &h->words[h->n++];
    return TE_OK;
}

te_status te_cuda_reports_fetch(te_exec *exec)
{
    struct te_cuda_reports *r = te_cuda(exec)->reports;
    return r ? send(exec, &r->halves[r->current]) : TE_OK; /* the other half is on its way already */
}

te_status te_cuda_reports_read(te_exec *exec)
{
    struct te_cuda_reports *r = te_cuda(exec)->reports;
    if (!r) return TE_OK;
    half *older = &r->halves[1 - r->current], *newer = &r->halves[r->current];
    te_status status = read_half(exec, older);
    if (status == TE_OK) return read_half(exec, newer);
    char message[sizeof exec->message];
    memcpy(message, exec->message, sizeof message);
    read_half(exec, newer); /* what came after the first fault is forgotten */
    memcpy(exec->message, message, sizeof message);
    return status;
}

void te_cuda_reports_close(te_exec *exec)
{
    if (te_cuda(exec)->reports) discard(exec, te_cuda(exec)->reports);
    te_cuda(exec)->reports = NULL;
}
