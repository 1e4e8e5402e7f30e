/* few.h - the few largest of a short row, for topk. A part of copy_blocks.c.
 *
 * Those that reach a bound, which at least so many do, are hardly more, and are compared with each other.
 */
#include "kernels/elementary.h"

enum { ROOM = TE_FEW_SORTED, STEP = 16 };

/* Turns signs; whether there is a NaN. */
static bool turn_signs(float *v, int64_t n, float sign)
{
    int is_nan = 0;
    _Pragma("omp simd reduction(| : is_nan)") for (int64_t i = 0; i < n; i++)
    {
        v[i] *= sign;
        is_nan |= v[i] != v[i];
    }
    return is_nan != 0;
}

/* A number that at least k of the n values reach: the k-th among the largest of every TE_FEW-th value. */
static float reached_by(const float *v, int64_t n, int64_t k)
{
    float   most[TE_FEW], bound = TE_INFINITY;
    int32_t larger[TE_FEW] = {0};
    memcpy(most, v, sizeof most);
    int64_t whole = n / TE_FEW * TE_FEW;
    for (int64_t i = TE_FEW; i < whole; i += TE_FEW)
        _Pragma("omp simd") for (int64_t j = 0; j < TE_FEW; j++) most[j] = v[i + j] > most[j] ? v[i + j] : most[j];
    for (int64_t i = whole; i < n; i++) most[i - whole] = v[i] > most[i - whole] ? v[i] : most[i - whole];
    for (int i = 0; i < TE_FEW; i++) {
        float x = most[i];
        _Pragma("omp simd") for (int j = 0; j < TE_FEW; j++) larger[j] += x > most[j];
    }
    for (int j = 0; j < TE_FEW; j++) {
        float x = larger[j] < (int32_t)k ? most[j] : TE_INFINITY;
        bound = x < bound ? x : bound;
    }
    return bound;
}

/* Positions of the values that reach it, in their order, and how many these are: more than ROOM are not counted. */
static int find_reaching(int32_t where[ROOM + 1], const float *v, int64_t n, float bound)
{
    int m = 0;
    for (int64_t i = 0; i < n && m <= ROOM; i += STEP) {
        int64_t end = n - i < STEP ? n : i + STEP;
        int     any = 0;
        _Pragma("omp simd reduction(| : any)") for (int64_t j = i; j < end; j++) any |= v[j] >= bound;
        for (int64_t j = i; j < end && any && m <= ROOM; j++) {
            where[m] = (int32_t)j;
            m += v[j] >= bound;
        }
    }
    return m;
}

typedef float   some_values __attribute__((vector_size(64)));
typedef int32_t some_counts __attribute__((vector_size(64)));

/* The candidates' order, the largest first. */
static __attribute__((noinline)) void rank(int32_t order[ROOM], const float value[ROOM], int m)
{
    for (int at = 0; at < m; at += STEP) {
        some_values others, all = {0};
        some_counts before = {0}, none = {0}, place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        memcpy(&others, value + at, sizeof others);
        place += none + at;
        _Pragma("GCC unroll 1") for (int j = 0; j < m; j++) {
            some_values x = all + value[j];
            before -= (x > others) | ((x == others) & (place > none + j));
        }
        for (int c = at; c < m && c < at + STEP; c++) order[before[c - at]] = c;
    }
}

static bool few_of(int32_t *best, int64_t k, float *v, int64_t n, float sign)
{
    float   value[ROOM];
    int32_t where[ROOM + 1], order[ROOM];
    if (turn_signs(v, n, sign)) return false;
    if (n <= TE_FEW || k == n) {
        for (int c = (int)n; c % STEP != 0; c++) value[c] = -TE_INFINITY;
        memcpy(value, v, (size_t)n * sizeof *v);
        rank(order, value, (int)n);
        memcpy(best, order, (size_t)k * sizeof *best);
        return true;
    }
    int m = find_reaching(where, v, n, reached_by(v, n, k));
    if (m > ROOM) return false;
    for (int c = 0; c < m || c % STEP != 0; c++) value[c] = c < m ? v[where[c]] : -TE_INFINITY;
    rank(order, value, m);
    for (int64_t i = 0; i < k; i++) best[i] = where[order[i]];
    return true;
}
