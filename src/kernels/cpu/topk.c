/* topk.c - the largest or smallest of every row, best first.
 *
 * Few of a short row of numbers that float32 holds: those that reach a bound, which at least so many do, are hardly
 * more, and are compared with each other. Else a heap of the best so far.
 */
#include "select.h"
#include "workers.h"

#include "kernels/elementary.h"

#include <string.h>

typedef struct candidate {
    uint64_t key;
    int64_t  index;
} candidate;

typedef struct rows_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *src, *values, *indices;
    candidate            *heaps; /* a row's for each thread */
    bool                  largest;
} rows_job;

/* --- by a heap -------------------------------------------------------------------------------------------------- */

static bool worse(candidate a, candidate b) { return a.key < b.key || (a.key == b.key && a.index > b.index); }

/* Restores the heap with the worst candidate on top, below position i. */
static void sift_down(candidate *heap, int64_t n, int64_t i)
{
    candidate moving = heap[i];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && worse(heap[child + 1], heap[child])) child++;
        if (!worse(heap[child], moving)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moving;
}

/* The next candidate: the first k make the heap, which others enter in place of the worst. */
static void take_candidate(te_exec *exec, candidate *heap, int64_t k, candidate c)
{
    if (c.index < k) {
        heap[c.index] = c;
        if (c.index < k - 1) return;
        for (int64_t j = k / 2; j-- > 0 && !(j % TE_SELECT_POLL == 0 && te_cpu_stopping(exec));) sift_down(heap, k, j);
    } else if (worse(heap[0], c)) {
        heap[0] = c;
        sift_down(heap, k, 0);
    }
}

/* The number behind a key of one that is larger the larger it is. */
static float float_of_key(uint64_t key)
{
    if (key == UINT64_MAX) return TE_NAN;
    union {
        uint64_t bits;
        double   value;
    } u = {key >> 63 ? key & ~((uint64_t)1 << 63) : ~key};
    return (float)u.value;
}

/* Whether some of the n values are not below or at `worst`; a NaN is not, nor is any of them where that is NaN. */
static bool any_above(const float *v, int64_t n, float worst)
{
    int above = 0;
    _Pragma("omp simd reduction(| : above)") for (int64_t i = 0; i < n; i++) above |= !(v[i] <= worst);
    return above != 0;
}

/* Elements `at` and following, whose sign is turned where the smallest are wanted. Once there is a heap hardly any of
 * them enters it, so they are looked through as numbers, some at a time. */
static void take_floats(te_exec *exec, candidate *heap, int64_t k, float *v, int64_t at, int64_t n, bool largest)
{
    enum { GROUP = 32 };
    float sign = largest ? 1.0f : -1.0f;
    for (int64_t i = 0; i < n; i++) v[i] *= sign;
    for (int64_t i = 0; i < n; i += GROUP) {
        int64_t end = n - i < GROUP ? n : i + GROUP, j = i;
        for (; j < end && at + j < k; j++)
            take_candidate(exec, heap, k, (candidate){te_key_of_double(v[j], true), at + j});
        if (j == end) continue;
        float worst = float_of_key(heap[0].key);
        if (!any_above(v + j, end - j, worst)) continue;
        for (; j < end; j++) {
            if (v[j] <= worst) continue;
            take_candidate(exec, heap, k, (candidate){te_key_of_double(v[j], true), at + j});
            worst = float_of_key(heap[0].key);
        }
    }
}

/* Puts the elements of a row into the heap. */
static void take_row(te_exec *exec, const te_copy_blocks *blocks, candidate *heap, int64_t k, const te_view *src,
                     int64_t row, bool largest)
{
    union {
        uint64_t keys[TE_COPY_BLOCK];
        float    values[TE_COPY_BLOCK];
    } block;
    int64_t     n = te_row_length(src);
    const char *data = te_row_at(src, row);
    bool        floats = te_value_class_of(src->dtype) == TE_CLASS_F32;
    for (int64_t at = 0; at < n && !te_cpu_stopping(exec); at += TE_COPY_BLOCK) {
        int64_t     count = n - at < TE_COPY_BLOCK ? n - at : TE_COPY_BLOCK;
        const char *from = te_element(data, src->dtype, at * te_row_stride(src));
        if (floats) {
            blocks->load[src->dtype](block.values, from, te_row_stride(src), count);
            take_floats(exec, heap, k, block.values, at, count, largest);
            continue;
        }
        te_load_keys(blocks, block.keys, src, from, count, largest);
        for (int64_t i = 0; i < count; i++) take_candidate(exec, heap, k, (candidate){block.keys[i], at + i});
    }
}

/* Leaves the k best of a row in heap, best first; false when it was interrupted, with anything there. */
static bool topk_row(te_exec *exec, const te_copy_blocks *blocks, candidate *heap, int64_t k, const te_view *src,
                     int64_t row, bool largest)
{
    take_row(exec, blocks, heap, k, src, row, largest);
    for (int64_t left = k - 1; left > 0; left--) {
        if (left % TE_SELECT_POLL == 0 && te_cpu_stopping(exec)) return false;
        candidate worst = heap[0];
        heap[0] = heap[left];
        heap[left] = worst;
        sift_down(heap, left, 0);
    }
    return !te_cpu_stopped(exec);
}

/* --- few of a short row ----------------------------------------------------------------------------------------- */

enum { COLUMNS = 32, FEW = COLUMNS / 2, ROOM = 64, SHORT = 4096 };

static bool is_short(const te_view *src, int64_t k)
{
    int64_t n = te_row_length(src);
    return te_value_class_of(src->dtype) == TE_CLASS_F32 && n <= SHORT && (n <= COLUMNS || k <= FEW);
}

/* A row whose sign is turned where the smallest are wanted; false when there is a NaN. */
static bool load_row(const rows_job *job, float *v, int64_t row)
{
    const te_view *src = job->src;
    int64_t        n = te_row_length(src);
    float          sign = job->largest ? 1.0f : -1.0f;
    int            is_nan = 0;
    job->blocks->load[src->dtype](v, te_row_at(src, row), te_row_stride(src), n);
    _Pragma("omp simd reduction(| : is_nan)") for (int64_t i = 0; i < n; i++)
    {
        v[i] *= sign;
        is_nan |= v[i] != v[i];
    }
    return !is_nan;
}

/* A number that at least k of the n values reach: the k-th among the largest of every COLUMNS-th value, equal ones
 * taken for one. */
static float reached_by(const float *v, int64_t n, int64_t k)
{
    float most[COLUMNS], bound = -TE_INFINITY;
    memcpy(most, v, sizeof most);
    for (int64_t i = COLUMNS; i < n; i += COLUMNS) {
        int64_t count = n - i < COLUMNS ? n - i : COLUMNS;
        _Pragma("omp simd") for (int64_t j = 0; j < count; j++) most[j] = v[i + j] > most[j] ? v[i + j] : most[j];
    }
    for (int64_t left = k; left > 0; left--) {
        bound = -TE_INFINITY;
        _Pragma("omp simd reduction(max : bound)") for (int j = 0; j < COLUMNS; j++)
            bound = most[j] > bound ? most[j] : bound;
        _Pragma("omp simd") for (int j = 0; j < COLUMNS; j++) most[j] = most[j] == bound ? -TE_INFINITY : most[j];
    }
    return bound;
}

/* Positions of the values that reach it, in their order, and how many these are: more than ROOM are not counted. */
static int find_reaching(int32_t where[ROOM + 1], const float *v, int64_t n, float bound)
{
    enum { GROUP = 16 };
    int m = 0;
    for (int64_t i = 0; i < n && m <= ROOM; i += GROUP) {
        int64_t end = n - i < GROUP ? n : i + GROUP;
        int     any = 0;
        _Pragma("omp simd reduction(| : any)") for (int64_t j = i; j < end; j++) any |= v[j] >= bound;
        for (int64_t j = i; j < end && any && m <= ROOM; j++) {
            where[m] = (int32_t)j;
            m += v[j] >= bound;
        }
    }
    return m;
}

/* The k best of a row, best first; false where it takes the heap. Candidates are so few that each is compared with all
 * others. */
static bool few_of_row(const rows_job *job, candidate *best, int64_t k, int64_t row)
{
    float   v[SHORT], value[ROOM];
    int32_t where[ROOM + 1];
    int64_t n = te_row_length(job->src);
    if (!load_row(job, v, row)) return false;
    int m = find_reaching(where, v, n, n > COLUMNS ? reached_by(v, n, k) : -TE_INFINITY);
    if (m > ROOM) return false;
    for (int c = 0; c < m; c++) value[c] = v[where[c]];
    for (int c = 0; c < m; c++) {
        int before = 0;
        _Pragma("omp simd reduction(+ : before)") for (int j = 0; j < m; j++)
            before += (value[j] > value[c]) | ((value[j] == value[c]) & (j < c));
        if (before < k) best[before].index = where[c];
    }
    return true;
}

/* --- all rows --------------------------------------------------------------------------------------------------- */

static void copy_element(void *to, const void *from, size_t size)
{
    if (size == 4)
        memcpy(to, from, 4);
    else if (size == 2)
        memcpy(to, from, 2);
    else
        memcpy(to, from, size);
}

static void take_topk(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    const te_view  *src = job->src;
    int64_t         k = te_row_length(job->values);
    candidate      *heap = job->heaps + thread * k;
    bool            few = is_short(src, k);
    for (int64_t row = first; row < end && !te_cpu_stopping(job->exec); row++) {
        bool found = few && few_of_row(job, heap, k, row);
        if (!found && !topk_row(job->exec, job->blocks, heap, k, src, row, job->largest)) continue;
        const char *from = te_row_at(src, row);
        char       *to = te_row_at(job->values, row);
        int64_t    *index = te_row_at(job->indices, row);
        for (int64_t i = 0; i < k; i++) {
            index[i * te_row_stride(job->indices)] = heap[i].index;
            copy_element(te_element(to, src->dtype, i * te_row_stride(job->values)),
                         te_element(from, src->dtype, heap[i].index * te_row_stride(src)), te_dtype_size(src->dtype));
        }
    }
}

te_status te_cpu_topk(te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool largest)
{
    te_status status = te_check_rows(exec, "topk", values, src);
    if (status == TE_OK) status = te_check_rows(exec, "topk", indices, src);
    if (status != TE_OK) return status;
    int64_t rows = te_rows_of(src), k = te_row_length(values);
    int64_t n = te_row_length(src), places = te_row_length(indices);
    if (places != k || k > n || indices->dtype != TE_I64 || values->dtype != src->dtype)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT,
                            "topk: %lld values and %lld indices of %lld elements; indices must be int64, values of the "
                            "source's dtype", (long long)k, (long long)places, (long long)n);
    if (rows == 0 || k == 0) return TE_OK;
    int threads = te_threads_for_rows(exec, rows, rows * n);
    candidate *heaps = exec->scratch(exec, (size_t)threads * (size_t)k * sizeof(candidate));
    if (!heaps) return TE_ERROR_MEMORY;
    rows_job job = {exec, te_copy_blocks_of(exec), src, values, indices, heaps, largest};
    te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), take_topk, &job);
    exec->scratch_free(exec, heaps);
    return te_cpu_finish(exec, TE_OK);
}
