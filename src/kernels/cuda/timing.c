/* timing.c - how long work takes on the device, for choices between ways of doing the same. */
#include "cuda_backend.h"

enum { REPEATS = 3 };

static te_status record(te_exec *exec, CUevent event)
{
    te_cuda_device *d = te_cuda(exec);
    return te_cuda_result(exec, d->driver.cuEventRecord(event, d->stream), "timing");
}

static te_status time_between(te_exec *exec, te_cuda_work *run, void *work, int repeats, CUevent from, CUevent to,
                              float *ms)
{
    te_cuda_device *d = te_cuda(exec);
    te_status status = run(exec, work); /* what is made once, or read from afar, is not counted */
    if (status == TE_OK) status = record(exec, from);
    for (int i = 0; i < repeats && status == TE_OK; i++) status = run(exec, work);
    if (status == TE_OK) status = record(exec, to);
    if (status == TE_OK) status = te_cuda_await(exec, to);
    return status == TE_OK ? te_cuda_result(exec, d->driver.cuEventElapsedTime(ms, from, to), "timing") : status;
}

/* Milliseconds of one of them. */
static te_status time_runs(te_exec *exec, te_cuda_work *run, void *work, int repeats, float *ms)
{
    te_cuda_device *d = te_cuda(exec);
    CUevent events[2] = {NULL, NULL};
    te_status status = te_cuda_outside_graph(exec, "a measurement");
    for (int i = 0; i < 2 && status == TE_OK; i++)
        status = te_cuda_result(exec, d->driver.cuEventCreate(&events[i], CU_EVENT_DEFAULT), "timing");
    if (status == TE_OK) status = time_between(exec, run, work, repeats, events[0], events[1], ms);
    for (int i = 0; i < 2; i++)
        if (events[i]) d->driver.cuEventDestroy(events[i]);
    if (status == TE_OK) *ms /= (float)repeats;
    return status;
}

te_status te_cuda_time(te_exec *exec, te_cuda_work *run, void *work, float *ms)
{
    *ms = 0;
    return time_runs(exec, run, work, REPEATS, ms);
}

/* --- the fastest of several --------------------------------------------------------------------------------------- */

/* Those that may still win: the first way, and the fastest others so far, in order. */
enum { FINALISTS = 4, SHORT_TURNS = 2, WARMING_TURNS = 4, COUNTED_TURNS = 4, MOST_REPEATS = 50 };
typedef struct finalists {
    int n, index[FINALISTS];
    float ms[FINALISTS];
} finalists;

typedef struct contest {
    te_cuda_way *run;
    void *work;
    int index;
} contest;

static const float LONG_MS = 0.04f, TURN_MS = 2.0f;
static const float WORTH = 0.99f; /* another way's time over the first one's, below which it is taken */

static void enter_finals(finalists *f, int index, float ms)
{
    int place = f->n < FINALISTS ? f->n++ : FINALISTS;
    for (; place > 1 && f->ms[place - 1] > ms; place--)
        if (place < FINALISTS) {
            f->index[place] = f->index[place - 1];
            f->ms[place] = f->ms[place - 1];
        }
    if (place == FINALISTS) return;
    f->index[place] = index;
    f->ms[place] = ms;
}

static te_status run_one(te_exec *exec, void *work)
{
    const contest *c = work;
    return c->run(exec, c->work, c->index);
}

static te_status time_way(te_exec *exec, contest *c, int index, int repeats, float *ms)
{
    *ms = 0;
    c->index = index;
    return time_runs(exec, run_one, c, repeats, ms);
}

/* The clock moves meanwhile: the best time of each counts. */
static te_status short_finals(te_exec *exec, contest *c, finalists *f)
{
    te_status status = TE_OK;
    for (int turn = 0; turn < SHORT_TURNS; turn++)
        for (int i = 0; i < f->n && status == TE_OK; i++) {
            float ms;
            status = time_way(exec, c, f->index[i], REPEATS, &ms);
            if (status == TE_OK && ms < f->ms[i]) f->ms[i] = ms;
        }
    return status;
}

/* A device that works all the time lowers its clock to stay within its power, and the order is then another one than at
 * the clock of a short test. So the finalists run in turns, of which the first ones only warm. */
static te_status finals_under_load(te_exec *exec, contest *c, finalists *f)
{
    te_status status = TE_OK;
    float sum[FINALISTS] = {0}, ms;
    for (int turn = 0; turn < WARMING_TURNS + COUNTED_TURNS; turn++)
        for (int i = 0; i < f->n && status == TE_OK; i++) {
            float wanted = TURN_MS / f->ms[i]; /* of one that was too short to be timed: infinity */
            int repeats = wanted < 1 ? 1 : wanted < MOST_REPEATS ? (int)wanted : MOST_REPEATS;
            status = time_way(exec, c, f->index[i], repeats, &ms);
            if (turn >= WARMING_TURNS) sum[i] += ms;
        }
    for (int i = 0; i < f->n && status == TE_OK; i++) f->ms[i] = sum[i] / COUNTED_TURNS;
    return status;
}

te_status te_cuda_fastest(te_exec *exec, te_cuda_way *run, void *work, int n, int *best)
{
    contest c = {run, work, 0};
    finalists f = {.n = 0};
    te_status status = TE_OK;
    for (int i = 0; i < n && (status == TE_OK || status == TE_ERROR_UNSUPPORTED); i++) {
        float ms;
        status = time_way(exec, &c, i, REPEATS, &ms);
        if (status == TE_OK) enter_finals(&f, i, ms);
    }
    if (status == TE_ERROR_UNSUPPORTED && f.n > 0) status = TE_OK; /* of the last one that was timed */
    if (status == TE_OK && f.n > 1) status = (f.ms[0] < LONG_MS ? short_finals : finals_under_load)(exec, &c, &f);
    if (status == TE_OK && f.n == 0) return TE_ERROR_UNSUPPORTED;
    int winner = 0;
    for (int i = 1; i < f.n; i++)
        if (f.ms[i] < (winner ? f.ms[winner] : f.ms[0] * WORTH)) winner = i;
    *best = f.index[winner];
    return status;
}
