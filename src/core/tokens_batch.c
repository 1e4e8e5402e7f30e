/* tokens_batch.c - batches of a token stream, prepared ahead by a thread.
 *
 * Batches live in a ring of prefetch + 1 slots; the extra one, before `head`, is the batch that the caller looks at:
 *
 *                 head                  being filled
 *                  |                         |
 *     [ caller's | ready | ready | ready | thread's | free ]
 *                 `---- filled = 3 -----'
 *
 * Only the thread writes slots, and never the caller's or a ready one; only the caller moves `head`. The fields of the
 * ring are guarded by the mutex, the contents of a slot by belonging to one side. Seeking raises `generation`: what the
 * thread was filling at that time is dropped. After a failure the thread waits until the caller has been told. In a
 * child of fork there is no thread, and whatever it was at counts for nothing: the caller fills.
 */
#include "kernels/cores.h"
#include "kernels/philox.h"
#include "tokens.h"

#include <pthread.h>
#include <signal.h>

typedef struct slot {
    void   *x, *y;
    int64_t index;
} slot;

struct te_tokens {
    const te_mem     *mem;
    te_token_stream  *stream;
    te_token_reader   reader; /* the thread's, where there is one */
    te_tokens_options options;
    int64_t           batches;
    void             *block;
    size_t            block_size;
    int32_t          *row; /* block + 1 ids */

    int64_t         position; /* the caller's: index of the batch that it gets next */

    bool            threaded;
    int             forks; /* as many as there were before the thread */
    pthread_t       thread;
    pthread_mutex_t mutex;
    pthread_cond_t  ready, room; /* something to take, or failed; something to do for the thread */

    slot        slots[TE_TOKENS_MAX_PREFETCH + 1];
    int         n_slots, head, filled;
    bool        failed, stop;
    uint64_t    generation;
    int64_t     next; /* index of the batch to fill */
    te_io_error error;
};

/* --- one batch -------------------------------------------------------------------------------------------------- */

/* The upper 64 bits of a product. */
static uint64_t multiply_high(uint64_t a, uint64_t b)
{
    uint64_t al = (uint32_t)a, ah = a >> 32, bl = (uint32_t)b, bh = b >> 32;
    uint64_t middle = ah * bl + (al * bl >> 32);
    uint64_t cross = al * bh + (uint32_t)middle;
    return ah * bh + (middle >> 32) + (cross >> 32);
}

static int64_t row_start(const te_tokens *t, int64_t index, int64_t row)
{
    const te_tokens_options *o = &t->options;
    if (o->sequential) return o->begin + (index % t->batches * o->batch + row) * o->block;
    te_philox_words w = te_rng_group(o->rng, (uint64_t)index * (uint64_t)o->batch + (uint64_t)row);
    uint64_t fraction = (uint64_t)w.word[1] << 32 | w.word[0];
    return o->begin + (int64_t)multiply_high(fraction, (uint64_t)(o->end - o->begin - o->block));
}

static void store_ids(void *to, int64_t at, const int32_t *ids, int64_t count, te_dtype dtype)
{
    if (dtype == TE_I32) {
        memcpy((int32_t *)to + at, ids, (size_t)count * sizeof *ids);
    } else {
        int64_t *wide = (int64_t *)to + at;
        for (int64_t i = 0; i < count; i++) wide[i] = ids[i];
    }
}

static te_status fill(te_tokens *t, slot *s, int64_t index, te_io_error *error)
{
    const te_tokens_options *o = &t->options;
    for (int64_t row = 0; row < o->batch; row++) {
        te_status status = te_token_reader_read(&t->reader, row_start(t, index, row), o->block + 1, t->row, error);
        if (status != TE_OK) return status;
        store_ids(s->x, row * o->block, t->row, o->block, o->dtype);
        store_ids(s->y, row * o->block, t->row + 1, o->block, o->dtype);
    }
    s->index = index;
    return TE_OK;
}

/* --- the thread ------------------------------------------------------------------------------------------------- */

static void *prefetch(void *arg)
{
    te_tokens *t = arg;
    te_io_error error;
    pthread_mutex_lock(&t->mutex);
    while (!t->stop) {
        if (t->failed || t->filled == t->n_slots - 1) { /* one slot stays with the caller */
            pthread_cond_wait(&t->room, &t->mutex);
            continue;
        }
        uint64_t generation = t->generation;
        int64_t index = t->next;
        slot *s = &t->slots[(t->head + t->filled) % t->n_slots];
        pthread_mutex_unlock(&t->mutex);
        te_status status = fill(t, s, index, &error);
        pthread_mutex_lock(&t->mutex);
        if (generation != t->generation) continue;
        if (status == TE_OK) {
            t->filled++;
            t->next++;
        } else {
            t->failed = true;
            t->error = error;
        }
        pthread_cond_signal(&t->ready);
    }
    pthread_mutex_unlock(&t->mutex);
    return NULL;
}

/* Signals are the host's: its handlers must not run on this thread. */
static int start_thread(te_tokens *t)
{
    int code = pthread_mutex_init(&t->mutex, NULL);
    if (code) return code;
    if ((code = pthread_cond_init(&t->ready, NULL)) != 0) goto no_ready;
    if ((code = pthread_cond_init(&t->room, NULL)) != 0) goto no_room;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(&t->thread, NULL, prefetch, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    t->threaded = code == 0;
    t->forks = te_cores_forks();
    if (code == 0) return 0;
    pthread_cond_destroy(&t->room);
no_room:
    pthread_cond_destroy(&t->ready);
no_ready:
    pthread_mutex_destroy(&t->mutex);
    return code;
}

static void stop_thread(te_tokens *t)
{
    pthread_mutex_lock(&t->mutex);
    t->stop = true;
    pthread_cond_signal(&t->room);
    pthread_mutex_unlock(&t->mutex);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->room);
    pthread_cond_destroy(&t->ready);
    pthread_mutex_destroy(&t->mutex);
}

static void open_reader(te_tokens *t, const te_io *io)
{
    te_token_reader_open(&t->reader, t->stream, io);
    t->reader.vocab_size = t->options.vocab_size;
}

/* What the thread had open in the parent stays open: it may have been closing it. */
static bool has_thread(te_tokens *t)
{
    if (!t->threaded || t->forks == te_cores_forks()) return t->threaded;
    t->threaded = false;
    t->next = t->position;
    te_io io = t->reader.io;
    open_reader(t, &io);
    return false;
}

/* --- opening ---------------------------------------------------------------------------------------------------- */

static te_status check_options(const te_tokens_options *o, int64_t length, te_io_error *error)
{
    const int64_t most = SIZE_MAX >> 8; /* ids in a batch: a ring of them still fits a size_t */
    if (o->begin < 0 || o->end > length || o->begin > o->end)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "tokens %lld to %lld of a stream of %lld",
                          (long long)o->begin, (long long)o->end, (long long)length);
    if (o->batch < 1 || o->block < 1 || o->batch > most / o->block)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "batches of %lld rows of %lld tokens",
                          (long long)o->batch, (long long)o->block);
    if (o->dtype != TE_I32 && o->dtype != TE_I64)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "token ids are int32 or int64");
    if (o->vocab_size < 0)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "vocab_size: %lld is negative", (long long)o->vocab_size);
    if (o->prefetch < 0 || o->prefetch > TE_TOKENS_MAX_PREFETCH)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "prefetch of %d batches (0 to %d)", o->prefetch,
                          (int)TE_TOKENS_MAX_PREFETCH);
    int64_t needed = (o->sequential ? o->batch * o->block : o->block) + 1;
    if (o->end - o->begin < needed)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL,
                          "%lld tokens from %lld to %lld are too few: %s of block %lld needs %lld",
                          (long long)(o->end - o->begin), (long long)o->begin, (long long)o->end,
                          o->sequential ? "a batch of rows" : "a row", (long long)o->block, (long long)needed);
    return TE_OK;
}

/* One block of memory for the slots, x and y, and the row. */
static bool make_slots(te_tokens *t)
{
    const te_tokens_options *o = &t->options;
    size_t part = (size_t)(o->batch * o->block) * (o->dtype == TE_I32 ? 4 : 8);
    t->n_slots = o->prefetch + 1;
    t->block_size = part * 2 * (size_t)t->n_slots + (size_t)(o->block + 1) * sizeof *t->row;
    t->block = te_mem_alloc(t->mem, t->block_size);
    if (!t->block) return false;
    char *at = t->block;
    for (int i = 0; i < t->n_slots; i++, at += 2 * part) t->slots[i] = (slot){.x = at, .y = at + part};
    t->row = (int32_t *)(void *)at;
    return true;
}

te_status te_tokens_open(te_tokens **out, const te_io *io, const te_mem *mem, te_token_stream *stream,
                         const te_tokens_options *options, te_io_error *error)
{
    *out = NULL;
    te_status status = check_options(options, te_token_stream_length(stream), error);
    if (status != TE_OK) return status;
    te_tokens *t = te_mem_zalloc(mem, sizeof *t);
    if (!t) return te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory");
    t->mem = mem;
    t->options = *options;
    t->stream = stream;
    te_token_stream_retain(stream);
    open_reader(t, io);
    if (options->sequential)
        t->batches = (options->end - options->begin - 1) / (options->batch * options->block);
    if (!make_slots(t))
        status = te_io_fail(error, TE_ERROR_MEMORY, NULL, "out of memory for %d batches of %lld x %lld tokens",
                            t->n_slots, (long long)options->batch, (long long)options->block);
    int code = status == TE_OK && options->prefetch > 0 ? start_thread(t) : 0;
    if (code) status = te_io_fail_errno(error, -code, NULL, "cannot start the thread that prepares batches");
    if (status == TE_OK) *out = t;
    else te_tokens_close(t);
    return status;
}

void te_tokens_close(te_tokens *t)
{
    if (!t) return;
    const te_mem *mem = t->mem;
    if (has_thread(t)) stop_thread(t);
    te_token_reader_close(&t->reader);
    te_token_stream_close(t->stream);
    te_mem_free(mem, t->block, t->block_size);
    te_mem_free(mem, t, sizeof *t);
}

/* --- using ------------------------------------------------------------------------------------------------------ */

static te_tokens_batch as_batch(const slot *s) { return (te_tokens_batch){.index = s->index, .x = s->x, .y = s->y}; }

te_status te_tokens_next(te_tokens *t, te_tokens_batch *batch, te_io_error *error)
{
    if (!has_thread(t)) {
        te_status status = fill(t, &t->slots[0], t->next, error);
        if (status != TE_OK) return status;
        t->position = ++t->next;
        *batch = as_batch(&t->slots[0]);
        return TE_OK;
    }
    te_status status = TE_OK;
    pthread_mutex_lock(&t->mutex);
    while (t->filled == 0 && !t->failed) pthread_cond_wait(&t->ready, &t->mutex);
    if (t->filled > 0) {
        *batch = as_batch(&t->slots[t->head]);
        t->head = (t->head + 1) % t->n_slots;
        t->filled--;
        t->position++;
    } else {
        *error = t->error;
        status = error->status;
        t->failed = false;
    }
    pthread_cond_signal(&t->room);
    pthread_mutex_unlock(&t->mutex);
    return status;
}

te_status te_tokens_seek(te_tokens *t, int64_t index, te_io_error *error)
{
    if (index < 0)
        return te_io_fail(error, TE_ERROR_ARGUMENT, NULL, "no batch %lld: they count from 0", (long long)index);
    bool threaded = has_thread(t);
    if (threaded) pthread_mutex_lock(&t->mutex);
    t->generation++;
    t->next = t->position = index;
    t->filled = 0;
    t->failed = false;
    if (threaded) {
        pthread_cond_signal(&t->room);
        pthread_mutex_unlock(&t->mutex);
    }
    return TE_OK;
}

int64_t te_tokens_position(te_tokens *t) { return t->position; }

int64_t te_tokens_batches(const te_tokens *t) { return t->batches; }
