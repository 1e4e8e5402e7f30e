/* sort.c - the order of every row: stable, by keys of 64 bits (select.h), a digit at a time from the lowest. Of short
 * rows of numbers that float32 holds, each is compared with all others, by vectors (isa/few.h). Of long keys that are
 * spread out the upper digits are enough, after which few records are not in their places. */
#include "select.h"
#include "workers.h"

#include <math.h>
#include <string.h>

typedef struct record {
    uint64_t key;
    int64_t  index;
} record;

typedef struct sort_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *src, *indices;
    record               *records; /* two rows for each thread */
    bool                  descending;
} sort_job;

enum { FEW = 24, WIDE_FROM = 1 << 13, MOST_BITS = 12 };

/* Keys that ascend in the wanted order, a NaN as the largest number, less the smallest of them. Those of numbers that
 * float32 holds differ in their upper bits only, which come down: returns how many bits are left. */
static int load_records(const sort_job *job, record *to, int64_t row)
{
    uint64_t       keys[TE_COPY_BLOCK];
    const te_view *src = job->src;
    int64_t        n = te_row_length(src);
    const char    *data = te_row_at(src, row);
    int            unused = te_value_class_of(src->dtype) == TE_CLASS_F32 ? 29 : 0, bits = 0;
    uint64_t       least = UINT64_MAX, most = 0;
    for (int64_t at = 0; at < n && !te_cpu_stopping(job->exec); at += TE_COPY_BLOCK) {
        int64_t count = n - at < TE_COPY_BLOCK ? n - at : TE_COPY_BLOCK;
        te_load_keys(job->blocks, keys, src, te_element(data, src->dtype, at * te_row_stride(src)), count, true);
        for (int64_t i = 0; i < count; i++) {
            uint64_t key = (job->descending ? ~keys[i] : keys[i]) >> unused;
            to[at + i] = (record){key, at + i};
            least = key < least ? key : least;
            most = key > most ? key : most;
        }
    }
    for (int64_t i = 0; i < n; i++) to[i].key -= least;
    while (bits < 64 && (most - least) >> bits != 0) bits++;
    return bits;
}

/* Whether a row is short, and then its order. */
static bool few_of_row(const sort_job *job, int64_t row, int64_t *index, int64_t step)
{
    float          v[TE_FEW_SORTED];
    int32_t        order[TE_FEW_SORTED];
    const te_view *src = job->src;
    int64_t        n = te_row_length(src);
    if (n > TE_FEW_SORTED || te_value_class_of(src->dtype) != TE_CLASS_F32) return false;
    job->blocks->load[src->dtype](v, te_row_at(src, row), te_row_stride(src), n);
    if (!job->blocks->few(order, n, v, n, job->descending ? 1.0f : -1.0f)) return false;
    for (int64_t i = 0; i < n; i++) index[i * step] = order[i];
    return true;
}

/* False: there were more than `most` moves to be made, and records are in an order that is only stable. */
static bool insert_records(record *r, int64_t n, int64_t most)
{
    for (int64_t i = 1; i < n; i++) {
        record  moving = r[i];
        int64_t k = i;
        for (; k > 0 && r[k - 1].key > moving.key; k--) r[k] = r[k - 1];
        r[k] = moving;
        most -= i - k;
        if (most < 0) return false;
    }
    return true;
}

/* Sorts by the digit of so many bits from `shift`; false where all records have the same one, and nothing was done. */
static bool pass(te_exec *exec, record *to, const record *from, int64_t n, int shift, int bits)
{
    int64_t  counts[1 << MOST_BITS], sum = 0;
    int      digits = 1 << bits;
    uint64_t mask = (uint64_t)digits - 1;
    memset(counts, 0, (size_t)digits * sizeof *counts);
    for (int64_t i = 0; i < n; i++) counts[from[i].key >> shift & mask]++;
    if (counts[from[0].key >> shift & mask] == n) return false;
    for (int d = 0; d < digits; d++) {
        int64_t count = counts[d];
        counts[d] = sum;
        sum += count;
    }
    for (int64_t i = 0; i < n && !(i % TE_SELECT_POLL == 0 && te_cpu_stopping(exec)); i++)
        to[counts[from[i].key >> shift & mask]++] = from[i];
    return true;
}

/* Of a row: the records, and room for as many. */
typedef struct record_rows {
    record *now, *other;
} record_rows;

static void passes(te_exec *exec, record_rows *row, int64_t n, int shift, int bits, int digit)
{
    for (; shift < bits && !te_cpu_stopped(exec); shift += digit) {
        if (!pass(exec, row->other, row->now, n, shift, digit)) continue;
        record *sorted = row->other;
        row->other = row->now;
        row->now = sorted;
    }
}

/* Whether few of the keys are the same from bit `shift` on, by a sample of sqrt(n), in which two pairs stand for 4 n of
 * all. */
static bool is_spread(const record_rows *row, int64_t n, int shift)
{
    int64_t step = (int64_t)sqrt((double)n), m = 0, same = 0;
    for (int64_t i = 0; i < n; i += step) row->other[m++] = (record){row->now[i].key >> shift, 0};
    insert_records(row->other, m, INT64_MAX);
    for (int64_t i = 1; i < m; i++) same += row->other[i].key == row->other[i - 1].key;
    return same <= 2;
}

/* Long keys that are spread out are nearly sorted by as many of their upper digits as tell n of them apart. */
static void sort_long(te_exec *exec, record_rows *row, int64_t n, int bits)
{
    int digit = n < WIDE_FROM ? 8 : MOST_BITS, upper = digit;
    while (n >> upper != 0) upper += digit;
    if (upper < bits && is_spread(row, n, bits - upper)) {
        passes(exec, row, n, bits - upper, bits, digit);
        if (te_cpu_stopped(exec) || insert_records(row->now, n, 4 * n)) return;
    }
    passes(exec, row, n, 0, bits, digit);
}

static void sort_rows(void *context, int64_t first, int64_t end, int thread)
{
    const sort_job *job = context;
    int64_t         n = te_row_length(job->src), step = te_row_stride(job->indices);
    for (int64_t row = first; row < end && !te_cpu_stopping(job->exec); row++) {
        record  *records = job->records + 2 * n * thread;
        record_rows pair = {records, records + n};
        int64_t *index = te_row_at(job->indices, row);
        if (few_of_row(job, row, index, step)) continue;
        int bits = load_records(job, records, row);
        if (n <= FEW) insert_records(records, n, INT64_MAX);
        else sort_long(job->exec, &pair, n, bits);
        if (te_cpu_stopped(job->exec)) return; /* what is there may be no positions */
        for (int64_t i = 0; i < n; i++) index[i * step] = pair.now[i].index;
    }
}

te_status te_cpu_sort(te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool descending)
{
    (void)values; /* NULL */
    te_status status = te_check_rows(exec, "sort", indices, src);
    if (status != TE_OK) return status;
    int64_t rows = te_rows_of(src), n = te_row_length(src);
    if (te_row_length(indices) != n || indices->dtype != TE_I64)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "sort: %lld indices of %s for %lld elements; int64 is needed",
                            (long long)te_row_length(indices), te_dtype_name(indices->dtype), (long long)n);
    if (rows == 0 || n == 0) return TE_OK;
    int     threads = te_threads_for_rows(exec, rows, rows * n);
    if (threads > rows) threads = (int)rows;
    record *records = exec->scratch(exec, (size_t)threads * 2 * (size_t)n * sizeof(record));
    if (!records) return TE_ERROR_MEMORY;
    sort_job job = {exec, te_copy_blocks_of(exec), src, indices, records, descending};
    te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sort_rows, &job);
    exec->scratch_free(exec, records);
    return te_cpu_finish(exec, TE_OK);
}
