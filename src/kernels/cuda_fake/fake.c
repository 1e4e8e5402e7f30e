/* fake.c - calls that fail on purpose, the queue of work, and the counted time. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct work {
    struct work *next;
    te_fake_function *run;
    uint64_t cost;
    size_t size;
    _Alignas(16) char bytes[];
} work;

typedef struct hold {
    struct hold *next;
    te_fake_function *release;
    void *what;
} hold;

struct te_fake_record {
    work *first, **last;
    hold *holds;
    int refs;
    bool spoilt, hasty;
};
static te_fake_record *recording;

enum { MAX_QUEUED = 2000, MAX_FUNCTIONS = 128 };

static work *first, **last = &first;
static int queued, live, failing_call, failing_code, work_countdown = -1, work_code, broken;
static char failing_function[64];
static struct {
    const char *name;
    uint64_t calls;
} counts[MAX_FUNCTIONS];
uint64_t te_fake_time; /* nanoseconds of work that has run */

/* --- for tests ---------------------------------------------------------------------------------------------------- */

TE_FAKE void te_fake_fail_call(const char *function, int n, int code)
{
    failing_call = n;
    failing_code = code;
    failing_function[0] = 0;
    if (function) strncat(failing_function, function, sizeof failing_function - 1);
}

TE_FAKE void te_fake_fail_work(int n, int code)
{
    work_countdown = code ? n : -1;
    work_code = code;
}

TE_FAKE void te_fake_reset(void)
{
    broken = 0;
    te_fake_fail_call(NULL, 0, 0);
    te_fake_fail_work(0, 0);
}

TE_FAKE int te_fake_live(void) { return live; }

TE_FAKE uint64_t te_fake_count(const char *function)
{
    uint64_t calls = 0;
    for (int i = 0; i < MAX_FUNCTIONS && counts[i].name; i++)
        if (strcmp(counts[i].name, function) == 0) calls += counts[i].calls;
    return calls;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

int te_fake_enter(const char *function)
{
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!counts[i].name) counts[i].name = function;
        if (counts[i].name != function) continue; /* a function has one name, in one place */
        counts[i].calls++;
        break;
    }
    if (!failing_function[0] || strcmp(function, failing_function) != 0) return 0;
    if (failing_call-- > 0) return 0;
    failing_function[0] = 0;
    return failing_code;
}

void te_fake_made(int change) { live += change; }

/* --- work --------------------------------------------------------------------------------------------------------- */

CUresult te_fake_status(void) { return (CUresult)broken; }
void te_fake_broken(int code) { broken = code; }

bool te_fake_idle(void)
{
    static int idle = -1;
    if (idle < 0) idle = getenv("TE_FAKE_IDLE") != NULL;
    return idle;
}

CUresult te_fake_queue(CUstream stream, te_fake_function *run, const void *bytes, size_t size, uint64_t cost)
{
    /* one queue keeps all streams' order, which is one that the streams allow */
    if (!te_fake_takes_work(stream)) return CUDA_ERROR_INVALID_CONTEXT;
    if (broken) return (CUresult)broken;
    if (te_fake_idle()) {
        te_fake_time += cost;
        return CUDA_SUCCESS;
    }
    if (queued == MAX_QUEUED && !recording) te_fake_flush();
    work *w = malloc(sizeof *w + size);
    if (!w) return CUDA_ERROR_OUT_OF_MEMORY;
    *w = (work){.run = run, .cost = cost, .size = size};
    memcpy(w->bytes, bytes, size);
    if (recording) {
        *recording->last = w;
        recording->last = &w->next;
        return CUDA_SUCCESS;
    }
    *last = w;
    last = &w->next;
    queued++;
    return CUDA_SUCCESS;
}

bool te_fake_queued(void) { return queued > 0; }

void te_fake_record_begin(void)
{
    recording = calloc(1, sizeof *recording);
    recording->last = &recording->first;
    recording->refs = 1;
}

te_fake_record *te_fake_record_end(void)
{
    te_fake_record *r = recording;
    recording = NULL;
    if (!r->spoilt) return r;
    te_fake_record_free(r);
    return NULL;
}

CUresult te_fake_record_queue(const te_fake_record *r)
{
    CUresult result = CUDA_SUCCESS;
    for (const work *w = r->first; w && result == CUDA_SUCCESS; w = w->next)
        result = te_fake_queue(NULL, w->run, w->bytes, w->size, w->cost);
    if (r->hasty) te_fake_poll();
    return result;
}

void te_fake_record_retain(te_fake_record *r) { r->refs++; }

bool te_fake_record_hold(te_fake_function *release, void *what)
{
    if (!recording) return false;
    hold *h = malloc(sizeof *h);
    if (!h) abort();
    *h = (hold){recording->holds, release, what};
    recording->holds = h;
    return true;
}

void te_fake_record_free(te_fake_record *r)
{
    if (--r->refs > 0) return;
    for (hold *h = r->holds; h;) {
        hold *next = h->next;
        h->release(h->what);
        free(h);
        h = next;
    }
    for (work *w = r->first; w;) {
        work *next = w->next;
        free(w);
        w = next;
    }
    free(r);
}

void te_fake_hasten(void)
{
    if (recording)
        recording->hasty = true;
    else
        te_fake_poll();
}

static bool stands;

void te_fake_stand_still(void) { stands = true; }

bool te_fake_recording(void) { return recording != NULL; }

CUresult te_fake_flush(void) { return te_fake_flush_until(NULL); }
CUresult te_fake_poll(void) { return te_fake_poll_until(NULL); }

CUresult te_fake_flush_until(const int *left)
{
    CUresult result = te_fake_poll_until(left);
    if (result != CUDA_ERROR_NOT_READY) return result;
    fprintf(stderr, "fake CUDA: a wait that has no end: a collective's other processes are gone\n");
    abort();
}

CUresult te_fake_poll_until(const int *left)
{
    if (recording) {
        recording->spoilt = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (!first) return (CUresult)broken;
    stands = false;
    te_fake_open_memory(true);
    while (first && !stands && !(left && *left == 0)) {
        work *w = first;
        if (!broken && work_countdown >= 0 && work_countdown-- == 0) broken = work_code;
        if (!broken) w->run(w->bytes);
        if (stands) break;
        te_fake_time += w->cost;
        first = w->next;
        queued--;
        free(w);
    }
    if (!first) last = &first;
    te_fake_open_memory(false);
    return stands ? CUDA_ERROR_NOT_READY : (CUresult)broken;
}
