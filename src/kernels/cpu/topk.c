/* topk.c - the largest or smallest of every row, best first.
 *
 * Few of a short row of numbers that float32 holds, whole ones that are small among them, are found by vectors
 * (isa/few.h); else a heap has the best so far.
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

/* Where a branch cannot be foretold, comparing twice takes less time. */
static bool is_worse(candidate a, candidate b) { return (a.key < b.key) | ((a.key == b.key) & (a.index > b.index)); }

/* Of a small heap, where most stop early. */
static void sift_down_few(candidate *heap, int64_t n, int64_t i)
{
    candidate moving = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && worse(heap[child + 1], heap[child])) child++;
        if (!worse(heap[child], moving)) break;
        heap[i] = heap[child];
    }
    heap[i] = moving;
}

/* Restores the heap with the worst candidate on top, below position i. What stands there mostly belongs near the
 * leaves, so the way down goes there along the worse children, and then up to its place. */
static void sift_down(candidate *heap, int64_t n, int64_t i)
{
    enum { FEW = 64 };
    if (n <= FEW) {
        sift_down_few(heap, n, i);
        return;
    }
    candidate moving = heap[i];
    int64_t   top = i, child = 2 * i + 2;
    for (; child < n; child = 2 * i + 2) {
        child -= is_worse(heap[child - 1], heap[child]);
        heap[i] = heap[child];
        i = child;
    }
    if (child == n) {
        heap[i] = heap[n - 1];
        i = n - 1;
    }
    for (; i > top && is_worse(moving, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
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
        int64_t i = 0;
        for (; i < count && at + i < k; i++) take_candidate(exec, heap, k, (candidate){block.keys[i], at + i});
        for (; i < count; i++)
            if (block.keys[i] > heap[0].key) take_candidate(exec, heap, k, (candidate){block.keys[i], at + i});
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

static bool is_short(const te_view *src, int64_t k)
{
    int64_t n = te_row_length(src);
    return te_value_class_of(src->dtype) != TE_CLASS_F64 && n <= TE_FEW_OF && (n <= TE_FEW || k <= TE_FEW / 2);
}

/* The n numbers of a row; false where they are whole and float32 may not hold one. */
static bool load_floats(const rows_job *job, float *v, int64_t row, int64_t n)
{
    const te_view *src = job->src;
    int            large = 0;
    te_convert(job->blocks, v, TE_F32, 1, te_row_at(src, row), src->dtype, te_row_stride(src), n);
    if (te_value_class_of(src->dtype) == TE_CLASS_F32) return true;
    for (int64_t i = 0; i < n; i++) large |= !(v[i] > -0x1p24f && v[i] < 0x1p24f);
    return !large;
}

/* Leaves the k best of a row in heap, best first; false where it takes that. */
static bool few_of_row(const rows_job *job, candidate *heap, int64_t k, int64_t row)
{
    float          v[TE_FEW_OF];
    int32_t        best[TE_FEW];
    int64_t        n = te_row_length(job->src);
    if (!load_floats(job, v, row, n) || !job->blocks->few(best, k, v, n, job->largest ? 1.0f : -1.0f)) return false;
    for (int64_t i = 0; i < k; i++) heap[i].index = best[i];
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
    size_t          size = te_dtype_size(src->dtype);
    for (int64_t row = first; row < end && !te_cpu_stopping(job->exec); row++) {
        bool found = few && few_of_row(job, heap, k, row);
        if (!found && !topk_row(job->exec, job->blocks, heap, k, src, row, job->largest)) continue;
        const char *from = te_row_at(src, row);
        char       *to = te_row_at(job->values, row);
        int64_t    *index = te_row_at(job->indices, row);
        int64_t     step = (int64_t)size * te_row_stride(src), value_step = (int64_t)size * te_row_stride(job->values);
        for (int64_t i = 0; i < k; i++) {
            index[i * te_row_stride(job->indices)] = heap[i].index;
            copy_element(to + i * value_step, from + heap[i].index * step, size);
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
