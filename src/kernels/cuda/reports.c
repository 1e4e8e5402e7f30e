/* reports.c - what operations find wrong with their operands while they run, such as ids out of range.
 *
 * Nobody waits for that. An operation is lent a word on the device, all ones, which its kernel lowers to where the
 * first fault is and what was found there; kernels skip what is wrong, so no foreign memory is reached. Where the host
 * waits next, the words used since come along, and the first operation that reported becomes an error with its name,
 * as a failed kernel does.
 */
#include "cuda_backend.h"
#include "kernels/hand.h"

enum { REPORTS = 128 };

struct te_cuda_reports {
    uint64_t *words, *seen; /* on the device, and pinned */
    te_cuda_check checks[REPORTS];
    int n;      /* words that are lent */
    bool coming; /* copied to `seen` before the wait that is under way */
};

static te_status clear_words(te_exec *exec, struct te_cuda_reports *r)
{
    te_cuda_device *d = te_cuda(exec);
    return te_cuda_result(
        exec, d->driver.cuMemsetD8Async(te_cuda_address(r->words), 0xff, REPORTS * sizeof *r->words, d->stream),
        "clearing the reports of kernels");
}

static void discard(te_exec *exec, struct te_cuda_reports *r)
{
    te_cuda_device *d = te_cuda(exec);
    if (r->seen) d->driver.cuMemFreeHost(r->seen);
    if (r->words) te_cuda_memory_free(exec, r->words, REPORTS * sizeof *r->words);
    te_mem_free(exec->mem, r, sizeof *r);
}

static te_status open_reports(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    struct te_cuda_reports *r = te_mem_zalloc(exec->mem, sizeof *r);
    if (!r) return te_exec_fail(exec, TE_ERROR_MEMORY, "out of host memory for reports of kernels");
    void *pinned = NULL;
    te_status status = TE_OK;
    if (!(r->words = te_cuda_memory_alloc(exec, REPORTS * sizeof *r->words)))
        status = te_exec_fail(exec, TE_ERROR_MEMORY, "out of memory on the device");
    if (status == TE_OK)
        status =
            te_cuda_result(exec, d->driver.cuMemHostAlloc(&pinned, REPORTS * sizeof *r->seen, 0), "memory for reports");
    r->seen = pinned;
    if (status == TE_OK) status = clear_words(exec, r);
    if (status == TE_OK)
        d->reports = r;
    else
        discard(exec, r);
    return status;
}

te_status te_cuda_report(te_exec *exec, const te_cuda_check *check, uint64_t **word)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = d->reports ? TE_OK : open_reports(exec);
    if (status == TE_OK && d->reports->n == REPORTS) status = te_cuda_synchronize(exec); /* all are lent */
    if (status != TE_OK) return status;
    struct te_cuda_reports *r = d->reports;
    r->checks[r->n] = *check;
    *word = &r->words[r->n++];
    return TE_OK;
}

te_status te_cuda_reports_fetch(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    struct te_cuda_reports *r = d->reports;
    if (!r || r->n == 0) return TE_OK;
    CUresult result =
        d->driver.cuMemcpyDtoHAsync(r->seen, te_cuda_address(r->words), (size_t)r->n * sizeof *r->seen, d->stream);
    r->coming = result == CUDA_SUCCESS;
    return te_cuda_result(exec, result, "reports of kernels");
}

te_status te_cuda_reports_read(te_exec *exec)
{
    struct te_cuda_reports *r = te_cuda(exec)->reports;
    if (!r || !r->coming) return TE_OK;
    int n = r->n, first = 0;
    r->n = 0;
    r->coming = false;
    while (first < n && r->seen[first] == UINT64_MAX) first++;
    if (first == n) return TE_OK;
    te_status status = clear_words(exec, r);
    return status == TE_OK ? te_cuda_check_fault(exec, &r->checks[first], r->seen[first]) : status;
}

void te_cuda_reports_close(te_exec *exec)
{
    if (te_cuda(exec)->reports) discard(exec, te_cuda(exec)->reports);
    te_cuda(exec)->reports = NULL;
}
