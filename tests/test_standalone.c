/* test_standalone.c - copy, embedding, gather, scatter_add, arg_reduce, topk, cumsum and multinomial against naive
 * loops: random shapes, strides and dtypes, empty and one-element cases, wrong indices, every instruction set, several
 * threads. */
#include "test.h"

#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"
#include "kernels/philox.h"

enum { GUARD = 64 }; /* bytes on either side of a buffer that nobody may write */

/* --- views ------------------------------------------------------------------------------------------------------ */

/* A view on memory of its own; `memory` has `bytes` with a guard on each side. */
typedef struct array {
    te_view view;
    char   *memory;
    size_t  bytes;
} array;

static int64_t offset_of(const te_view *v, int64_t index)
{
    int64_t offset = 0;
    for (int i = v->ndim - 1; i >= 0; i--) {
        offset += index % v->shape[i] * v->stride[i];
        index /= v->shape[i];
    }
    return offset;
}

static double get(const te_view *v, int64_t index) { return te_load_f64(v->data, v->dtype, offset_of(v, index)); }
static void set(const te_view *v, int64_t index, double x) { te_store_f64(v->data, v->dtype, offset_of(v, index), x); }

/* Dimensions lie in memory in a random order, sometimes with gaps, when `seed` is given; row-major otherwise. */
static array array_new(te_dtype dtype, int ndim, const int64_t *shape, uint64_t *seed)
{
    array a = {.view = {.dtype = dtype, .ndim = ndim}};
    int order[TE_MAX_DIMS];
    for (int i = 0; i < ndim; i++) order[i] = ndim - 1 - i;
    for (int i = ndim - 1; seed && i > 0; i--) {
        int j = (int)(test_random(seed) % (uint32_t)(i + 1)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    int64_t stride = 1;
    for (int i = 0; i < ndim; i++) {
        if (seed && test_random(seed) % 4 == 0) stride = stride * 2 + 1;
        a.view.shape[order[i]] = shape[order[i]];
        a.view.stride[order[i]] = stride;
        stride *= shape[order[i]];
    }
    a.bytes = (size_t)stride * te_dtype_size(dtype);
    a.memory = malloc(a.bytes + 2 * GUARD);
    if (!a.memory) abort();
    memset(a.memory, 0x5a, a.bytes + 2 * GUARD);
    a.view.data = a.memory + GUARD;
    return a;
}

static void array_free(array *a)
{
    for (size_t i = 0; i < GUARD; i++)
        CHECK(a->memory[i] == 0x5a && a->memory[GUARD + a->bytes + i] == 0x5a);
    free(a->memory);
}

static double hostile(uint64_t *seed)
{
    static const double values[] = {NAN,   INFINITY, -INFINITY, 0.0, -0.0, 1e30,  -1e30,
                                    1e-40, 0x1p31,   -0x1p63,   0.5, 2.5,  255.9, -0.9};
    return values[test_random(seed) % (sizeof values / sizeof *values)];
}

static void fill(const te_view *v, uint64_t *seed, bool with_hostile)
{
    for (int64_t i = 0; i < te_view_numel(v); i++) {
        double x = test_uniform(seed, -300, 300);
        if (with_hostile && test_random(seed) % 8 == 0 && te_dtype_is_float(v->dtype)) x = hostile(seed);
        set(v, i, x);
    }
}

static bool same_bits(const te_view *a, const te_view *b)
{
    size_t size = te_dtype_size(a->dtype);
    for (int64_t i = 0; i < te_view_numel(a); i++) {
        const char *x = (const char *)a->data + (size_t)offset_of(a, i) * size;
        if (memcmp(x, (const char *)b->data + (size_t)offset_of(b, i) * size, size) != 0) return false;
    }
    return true;
}

static te_exec exec_on(int isa, int threads)
{
    te_exec exec = test_exec_open(threads);
    te_cpu(&exec)->isa = (te_cpu_isa)isa;
    return exec;
}

#define FOR_EACH_ISA(isa) for (int isa = 0; isa <= (int)te_cpu_isa_detect(); isa++)

#define CHECK_REFUSED(call, part)                                                              \
    do {                                                                                       \
        CHECK((call) == TE_ERROR_ARGUMENT);                                                    \
        CHECK_MSG(strstr(exec.message, part), "\"%s\" lacks \"%s\"", exec.message, part);      \
    } while (0)

/* --- copy ------------------------------------------------------------------------------------------------------- */

/* Conversion of one element as the kernels promise it: integers exactly, halves by way of the nearest float32. */
static void convert_one(const te_view *dst, const te_view *src, int64_t i)
{
    int64_t to = offset_of(dst, i), from = offset_of(src, i);
    if (src->dtype == TE_I64 && dst->dtype == TE_I64)
        ((int64_t *)dst->data)[to] = ((int64_t *)src->data)[from];
    else if (src->dtype == TE_I64 && te_dtype_is_float(dst->dtype) && dst->dtype != TE_F64)
        te_store_f64(dst->data, dst->dtype, to, (float)((int64_t *)src->data)[from]);
    else if (src->dtype == TE_I32 && te_dtype_is_float(dst->dtype) && dst->dtype != TE_F64)
        te_store_f64(dst->data, dst->dtype, to, (float)((int32_t *)src->data)[from]);
    else
        te_store_f64(dst->data, dst->dtype, to, te_load_f64(src->data, src->dtype, from));
}

static void check_copy(te_dtype to, te_dtype from, int ndim, const int64_t *shape, uint64_t *seed, bool strided)
{
    array src = array_new(from, ndim, shape, strided ? seed : NULL),
          dst = array_new(to, ndim, shape, strided ? seed : NULL);
    array expected = array_new(to, ndim, shape, NULL);
    fill(&src.view, seed, true);
    for (int64_t i = 0; i < te_view_numel(&src.view); i++) convert_one(&expected.view, &src.view, i);
    if (to == from)
        for (int64_t i = 0; i < te_view_numel(&src.view); i++)
            memcpy((char *)expected.view.data + (size_t)i * te_dtype_size(to),
                   (char *)src.view.data + (size_t)offset_of(&src.view, i) * te_dtype_size(to), te_dtype_size(to));
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads++) {
        te_exec exec = exec_on(isa, threads);
        for (int64_t i = 0; i < te_view_numel(&dst.view); i++) set(&dst.view, i, 77);
        CHECK(te_cpu_copy(&exec, &dst.view, &src.view) == TE_OK);
        CHECK_MSG(same_bits(&dst.view, &expected.view), "copy %s to %s, %d dimensions from %d", te_dtype_name(from),
                  te_dtype_name(to), ndim, (int)shape[0]);
        test_exec_close(&exec);
    }
    array_free(&src);
    array_free(&dst);
    array_free(&expected);
}

static void test_copy(void)
{
    uint64_t seed = 11;
    for (int to = 0; to < TE_DTYPE_COUNT; to++)
        for (int from = 0; from < TE_DTYPE_COUNT; from++) {
            int64_t line[1] = {600},
                    box[3] = {1 + test_random(&seed) % 9, 1 + test_random(&seed) % 70, 1 + test_random(&seed) % 70};
            check_copy((te_dtype)to, (te_dtype)from, 1, line, &seed, false);
            check_copy((te_dtype)to, (te_dtype)from, 3, box, &seed, true);
        }
    static const te_dtype moved[4] = {TE_F32, TE_BF16, TE_U8, TE_F64};
    for (int n = 0; n < 60; n++) {
        int64_t shape[5];
        int ndim = (int)(test_random(&seed) % 6);
        for (int i = 0; i < ndim; i++) shape[i] = test_random(&seed) % (ndim < 3 ? 150 : 12);
        check_copy(moved[n % 4], moved[n / 4 % 2 ? n % 4 : 0], ndim, shape, &seed, true);
    }
    int64_t large[2] = {333, 517}, a[2] = {2, 3}, b[2] = {3, 2};
    check_copy(TE_F32, TE_F32, 2, large, &seed, true);
    check_copy(TE_BF16, TE_F32, 2, large, &seed, true);
    check_copy(TE_F32, TE_F32, 2, large, &seed, false);
    float memory[6] = {0};
    te_view x = test_view(memory, TE_F32, 2, a), y = test_view(memory, TE_F32, 2, b);
    te_exec exec = exec_on(0, 1);
    CHECK_REFUSED(te_cpu_copy(&exec, &x, &y), "{3, 2}");
    test_exec_close(&exec);
}

/* A source that is broadcast by stride 0. */
static void test_copy_broadcast(void)
{
    float row[5] = {1, 2, 3, 4, 5}, out[4][5];
    int64_t shape[2] = {4, 5};
    te_view src = test_view(row, TE_F32, 2, shape), dst = test_view(out, TE_F32, 2, shape);
    src.stride[0] = 0;
    te_exec exec = exec_on((int)te_cpu_isa_detect(), 2);
    CHECK(te_cpu_copy(&exec, &dst, &src) == TE_OK);
    for (int i = 0; i < 20; i++) CHECK(out[i / 5][i % 5] == row[i % 5]);
    test_exec_close(&exec);
}

/* --- embedding -------------------------------------------------------------------------------------------------- */

static double sum_of_squares(const te_view *v)
{
    double sum = 0;
    for (int64_t i = 0; i < te_view_numel(v); i++) sum += get(v, i) * get(v, i);
    return sum;
}

/* The sum of squares of a table goes along with what is added to it. */
static void check_squares_of_embedding(te_exec *exec, array *table, const array *first, const array *once,
                                       const te_view *rows, const te_view *ids)
{
    double squares = sum_of_squares(&first->view), expected = sum_of_squares(&once->view), infinite = (double)INFINITY;
    memcpy(table->view.data, first->view.data, table->bytes);
    CHECK(te_cpu_embedding_backward(exec, &table->view, rows, ids, &squares) == TE_OK);
    CHECK(memcmp(once->view.data, table->view.data, table->bytes) == 0);
    CHECK_MSG(fabs(squares - expected) <= 1e-12 * expected, "sum of squares %.17g, not %.17g", squares, expected);
    if (te_view_numel(rows) == 0) return;
    memcpy(table->view.data, first->view.data, table->bytes);
    CHECK(te_cpu_embedding_backward(exec, &table->view, rows, ids, &infinite) == TE_OK);
    CHECK(isnan(infinite)); /* it may have been the elements that were added to */
}

static void check_embedding(te_dtype table_dtype, te_dtype row_dtype, int64_t vocab, int64_t n, int64_t m,
                            int64_t width, uint64_t *seed)
{
    int64_t table_shape[2] = {vocab, width}, id_shape[2] = {n, m}, row_shape[3] = {n, m, width};
    array table = array_new(table_dtype, 2, table_shape, NULL),
          ids = array_new(test_random(seed) % 2 ? TE_I32 : TE_I64, 2, id_shape, seed);
    array rows = array_new(row_dtype, 3, row_shape, NULL), first = array_new(table_dtype, 2, table_shape, NULL);
    bool crowded = test_random(seed) % 3 == 0; /* most positions hold one id */
    fill(&table.view, seed, false);
    for (int64_t i = 0; i < n * m; i++) set(&ids.view, i, crowded && i % 8 ? 0 : test_random(seed) % (uint32_t)vocab);
    memcpy(first.view.data, table.view.data, table.bytes);
    double *expected = calloc((size_t)(vocab * width) + 1, sizeof *expected);
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads++) {
        te_exec exec = exec_on(isa, threads);
        CHECK(te_cpu_embedding(&exec, &rows.view, &table.view, &ids.view) == TE_OK);
        int64_t wrong = 0;
        for (int64_t i = 0; i < n * m * width; i++) {
            double x = get(&table.view, (int64_t)get(&ids.view, i / width) * width + i % width);
            double rounded;
            te_store_f64(&rounded, row_dtype, 0, x);
            wrong += get(&rows.view, i) != te_load_f64(&rounded, row_dtype, 0);
        }
        CHECK_MSG(wrong == 0, "embedding: %d elements differ", (int)wrong);
        test_exec_close(&exec);
    }
    fill(&rows.view, seed, false);
    for (int64_t i = 0; i < vocab * width; i++) expected[i] = get(&first.view, i);
    for (int64_t i = 0; i < n * m * width; i++)
        expected[(int64_t)get(&ids.view, i / width) * width + i % width] += get(&rows.view, i);
    array once = array_new(table_dtype, 2, table_shape, NULL);
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads++) {
        te_exec exec = exec_on(isa, threads);
        memcpy(table.view.data, first.view.data, table.bytes);
        CHECK(te_cpu_embedding_backward(&exec, &table.view, &rows.view, &ids.view, NULL) == TE_OK);
        double unit = table_dtype == TE_F64 ? 1e-14 : table_dtype == TE_F32 ? 1e-6 : 0x1p-8;
        for (int64_t i = 0; i < vocab * width; i++)
            CHECK_MSG(fabs(get(&table.view, i) - expected[i]) <= unit * (fabs(expected[i]) + 3000),
                      "gradient %d: %g, not %g", (int)i, get(&table.view, i), expected[i]);
        if (isa == 0 && threads == 1) memcpy(once.view.data, table.view.data, table.bytes);
        CHECK(memcmp(once.view.data, table.view.data, table.bytes) == 0);
        if (table_dtype == TE_F32) check_squares_of_embedding(&exec, &table, &first, &once, &rows.view, &ids.view);
        test_exec_close(&exec);
    }
    free(expected);
    array_free(&table), array_free(&ids), array_free(&rows), array_free(&first), array_free(&once);
}

static void test_embedding(void)
{
    uint64_t seed = 21;
    check_embedding(TE_F32, TE_F32, 65, 12, 64, 128, &seed);
    check_embedding(TE_F32, TE_BF16, 5000, 2, 100, 300, &seed);
    check_embedding(TE_BF16, TE_BF16, 10, 7, 9, 33, &seed);
    check_embedding(TE_F64, TE_F64, 1, 3, 3, 1, &seed);
    check_embedding(TE_F32, TE_F32, 3000, 1, 1, 5, &seed);
    check_embedding(TE_F32, TE_F32, 10, 0, 4, 5, &seed);
    check_embedding(TE_F32, TE_F32, 10, 2, 4, 0, &seed);

    float table[6] = {0}, rows[8] = {0};
    int32_t ids[4] = {0, 2, 3, 1};
    int64_t table_shape[2] = {3, 2}, id_shape[1] = {4}, row_shape[2] = {4, 2};
    te_view t = test_view(table, TE_F32, 2, table_shape), i = test_view(ids, TE_I32, 1, id_shape),
            r = test_view(rows, TE_F32, 2, row_shape);
    te_exec exec = exec_on(0, 2);
    for (int k = 0; k < 8; k++) rows[k] = 9;
    CHECK_REFUSED(te_cpu_embedding(&exec, &r, &t, &i), "id 3 at position 3 is outside 0 to 2");
    for (int k = 0; k < 8; k++) CHECK(rows[k] == 9);
    ids[2] = 0;
    double squares = 9 * 9 * 6; /* of which so little is left that it says nothing */
    for (int k = 0; k < 6; k++) table[k] = k < 2 ? -17.9f : -9;
    CHECK(te_cpu_embedding_backward(&exec, &t, &r, &i, &squares) == TE_OK);
    CHECK(isnan(squares) && fabsf(table[1] - 0.1f) < 1e-5f && table[2] == 0 && table[5] == 0);
    for (int k = 0; k < 6; k++) table[k] = 0;
    ids[2] = -1;
    CHECK_REFUSED(te_cpu_embedding_backward(&exec, &t, &r, &i, NULL), "id -1 at position 3");
    for (int k = 0; k < 6; k++) CHECK(table[k] == 0);
    test_exec_close(&exec);
}

/* --- gather and scatter_add ------------------------------------------------------------------------------------- */

/* Row-major index into `whole` of element i of `part`, coordinate dim replaced. */
static int64_t replaced(const te_view *whole, const te_view *part, int64_t i, int dim, int64_t by)
{
    int64_t coordinates[TE_MAX_DIMS], result = 0;
    for (int d = part->ndim - 1; d >= 0; d--) {
        coordinates[d] = d == dim ? by : i % part->shape[d];
        i /= part->shape[d];
    }
    for (int d = 0; d < whole->ndim; d++) result = result * whole->shape[d] + coordinates[d];
    return result;
}

static void check_index(te_dtype dtype, int ndim, uint64_t *seed, int64_t most)
{
    int64_t whole_shape[4], part_shape[4];
    int dim = (int)(test_random(seed) % (uint32_t)ndim);
    for (int d = 0; d < ndim; d++) {
        part_shape[d] = test_random(seed) % (uint32_t)most;
        whole_shape[d] = d == dim ? 1 + test_random(seed) % (uint32_t)most : part_shape[d] + test_random(seed) % 3;
    }
    array whole = array_new(dtype, ndim, whole_shape, seed), part = array_new(dtype, ndim, part_shape, seed);
    array index = array_new(test_random(seed) % 2 ? TE_I32 : TE_I64, ndim, part_shape, seed);
    int64_t n = te_view_numel(&part.view), total = te_view_numel(&whole.view);
    for (int64_t i = 0; i < n; i++) set(&index.view, i, test_random(seed) % (uint32_t)whole_shape[dim]);
    double *expected = calloc((size_t)total + 1, sizeof *expected);
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads++) {
        te_exec exec = exec_on(isa, threads);
        for (int64_t i = 0; i < total; i++) set(&whole.view, i, (double)(i * 7 % 13));
        CHECK(te_cpu_gather(&exec, &part.view, &whole.view, &index.view, dim) == TE_OK);
        for (int64_t i = 0; i < n; i++)
            CHECK(get(&part.view, i) ==
                  get(&whole.view, replaced(&whole.view, &part.view, i, dim, (int64_t)get(&index.view, i))));
        for (int64_t i = 0; i < n; i++) set(&part.view, i, (double)(i % 3)); /* sums of small integers are exact */
        for (int64_t i = 0; i < total; i++) expected[i] = get(&whole.view, i);
        for (int64_t i = 0; i < n; i++)
            expected[replaced(&whole.view, &part.view, i, dim, (int64_t)get(&index.view, i))] += get(&part.view, i);
        CHECK(te_cpu_scatter_add(&exec, &whole.view, &part.view, &index.view, dim) == TE_OK);
        for (int64_t i = 0; i < total; i++)
            CHECK_MSG(get(&whole.view, i) == expected[i] || expected[i] > 200, "scatter_add[%d]: %g, not %g", (int)i,
                      get(&whole.view, i), expected[i]);
        test_exec_close(&exec);
    }
    if (n > 0) {
        te_exec exec = exec_on(0, 2);
        set(&index.view, n - 1, (double)whole_shape[dim]);
        char text[80];
        snprintf(text, sizeof text, "index %d at position %d is outside 0 to %d", (int)whole_shape[dim], (int)n,
                 (int)whole_shape[dim] - 1);
        CHECK_REFUSED(te_cpu_gather(&exec, &part.view, &whole.view, &index.view, dim), text);
        CHECK_REFUSED(te_cpu_scatter_add(&exec, &whole.view, &part.view, &index.view, dim), text);
        test_exec_close(&exec);
    }
    free(expected);
    array_free(&whole), array_free(&part), array_free(&index);
}

static void test_index(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_I32, TE_U8, TE_F16};
    uint64_t seed = 5;
    for (int n = 0; n < 80; n++)
        check_index(dtypes[n % 7], 1 + n % 4, &seed, n % 4 == 1 ? 200 : n % 4 == 0 ? 30000 : 14);
}

/* --- arg_reduce, topk, cumsum ----------------------------------------------------------------------------------- */

/* Whether x comes before y: NaN first, then by size. */
static bool before(double x, double y, bool largest)
{
    if (isnan(x) || isnan(y)) return isnan(x) && !isnan(y);
    return largest ? x > y : x < y;
}

static void check_select(te_dtype dtype, int64_t rows, int64_t n, int64_t k, bool largest, uint64_t *seed)
{
    int64_t shape[2] = {rows, n}, top[2] = {rows, k};
    array src = array_new(dtype, 2, shape, seed), values = array_new(dtype, 2, top, seed),
          indices = array_new(TE_I64, 2, top, seed);
    array best = array_new(TE_I64, 1, shape, seed);
    fill(&src.view, seed, true);
    for (int64_t i = 0; i < rows * n / 3; i++) set(&src.view, test_random(seed) % (uint32_t)(rows * n), 5); /* ties */
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads += 2) {
        te_exec exec = exec_on(isa, threads);
        CHECK(te_cpu_topk(&exec, &values.view, &indices.view, &src.view, largest) == TE_OK);
        CHECK(te_cpu_arg_reduce(&exec, &best.view, &src.view, largest) == TE_OK);
        for (int64_t r = 0; r < rows; r++) {
            char *taken = calloc((size_t)n, 1);
            for (int64_t d = 0; d < k; d++) {
                int64_t first = -1;
                for (int64_t i = 0; i < n; i++)
                    if (!taken[i] &&
                        (first < 0 || before(get(&src.view, r * n + i), get(&src.view, r * n + first), largest)))
                        first = i;
                taken[first] = 1;
                CHECK_MSG(get(&indices.view, r * k + d) == (double)first, "topk row %d draw %d: %g, not %d", (int)r,
                          (int)d, get(&indices.view, r * k + d), (int)first);
                double x = get(&values.view, r * k + d), y = get(&src.view, r * n + first);
                CHECK(x == y || (isnan(x) && isnan(y)));
                if (d == 0) CHECK(get(&best.view, r) == (double)first);
            }
            free(taken);
        }
        test_exec_close(&exec);
    }
    array_free(&src), array_free(&values), array_free(&indices), array_free(&best);
}

static void check_cumsum(te_dtype to, te_dtype from, int64_t rows, int64_t n, bool reverse, uint64_t *seed)
{
    int64_t shape[2] = {rows, n};
    array src = array_new(from, 2, shape, seed), dst = array_new(to, 2, shape, seed);
    for (int64_t i = 0; i < rows * n; i++) set(&src.view, i, (double)(test_random(seed) % 5));
    FOR_EACH_ISA(isa)
    for (int threads = 1; threads <= 3; threads += 2) {
        te_exec exec = exec_on(isa, threads);
        CHECK(te_cpu_cumsum(&exec, &dst.view, &src.view, reverse) == TE_OK);
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++) {
                int64_t at = r * n + (reverse ? n - 1 - i : i);
                double rounded;
                sum += get(&src.view, at);
                te_store_f64(&rounded, to, 0, sum);
                CHECK_MSG(get(&dst.view, at) == te_load_f64(&rounded, to, 0), "cumsum[%d]: %g of %g", (int)at,
                          get(&dst.view, at), sum);
            }
        }
        test_exec_close(&exec);
    }
    array_free(&src), array_free(&dst);
}

static void test_rows(void)
{
    uint64_t seed = 6;
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_F16, TE_I32};
    for (int n = 0; n < 42; n++) {
        int64_t length = 1 + test_random(&seed) % (n % 5 ? 60 : 700), k = 1 + test_random(&seed) % (uint32_t)length;
        check_select(dtypes[n % 7], 1 + test_random(&seed) % 40, length, k, n % 2, &seed);
        check_cumsum(dtypes[n / 2 % 7], dtypes[n % 7], 1 + test_random(&seed) % 40, test_random(&seed) % 700,
                     n % 3 == 0, &seed);
    }
    float x[4] = {0};
    int64_t i[4], none[2] = {2, 0}, two[1] = {2}, four[1] = {4};
    te_view src = test_view(x, TE_F32, 2, none), index = test_view(i, TE_I64, 1, two),
            row = test_view(x, TE_F32, 1, two);
    te_view values = test_view(x, TE_F32, 1, four), indices = test_view(i, TE_I64, 1, four);
    te_exec exec = exec_on(0, 2);
    CHECK_REFUSED(te_cpu_arg_reduce(&exec, &index, &src, true), "{2, 0}");
    CHECK_REFUSED(te_cpu_topk(&exec, &values, &indices, &row, true), "4 values");
    src.shape[0] = index.shape[0] = 0;
    CHECK(te_cpu_arg_reduce(&exec, &index, &src, true) == TE_OK);
    test_exec_close(&exec);
}

/* --- multinomial ------------------------------------------------------------------------------------------------ */

static void test_multinomial(void)
{
    enum { N = 5, DRAWS = 20000 };
    float weights[3][N] = {{1, 0, 3, 0, 4}, {0, 0, 1e-30f, 0, 0}, {5, 5, 5, 5, 5}};
    static int64_t out[3][DRAWS];
    int64_t shape[2] = {3, N}, drawn[2] = {3, DRAWS}, few[2] = {3, 4};
    te_view src = test_view(weights, TE_F32, 2, shape), samples = test_view(out, TE_I64, 2, drawn);
    te_exec exec = exec_on((int)te_cpu_isa_detect(), 2);
    te_rng rng = {.seed = 3, .stream = 1, .offset = 10};
    CHECK(te_cpu_multinomial(&exec, &samples, &src, true, rng) == TE_OK);
    for (int r = 0; r < 3; r++) {
        double count[N] = {0}, total = 0;
        for (int d = 0; d < DRAWS; d++) count[out[r][d]]++;
        for (int i = 0; i < N; i++) total += weights[r][i];
        for (int i = 0; i < N; i++) {
            double p = weights[r][i] / total;
            CHECK_MSG(fabs(count[i] - p * DRAWS) <= 5 * sqrt(p * (1 - p) * DRAWS) + (p > 0 && p < 1),
                      "row %d: %d drawn %g times", r, i, count[i]);
        }
    }
    double share = te_rng_word(rng, 2 * DRAWS + 7) / 4294967296.0; /* draw 7 of row 2 */
    CHECK(out[2][7] == (int64_t)(share * N));

    weights[0][1] = 2, weights[1][0] = 1, weights[1][1] = 1, weights[1][4] = 1e-20f;
    samples = test_view(out, TE_I64, 2, few);
    for (uint64_t t = 0; t < 200; t++) {
        rng.offset = 1000 * t;
        CHECK(te_cpu_multinomial(&exec, &samples, &src, false, rng) == TE_OK);
        for (int r = 0; r < 3; r++)
            for (int d = 0; d < 4; d++) {
                int64_t *row = &out[0][0] + r * 4;
                CHECK(weights[r][row[d]] > 0);
                for (int e = 0; e < d; e++) CHECK(row[e] != row[d]);
            }
    }
    weights[2][3] = weights[2][1] = 0;
    CHECK_REFUSED(te_cpu_multinomial(&exec, &samples, &src, false, rng), "row 3 has fewer positive weights");
    weights[1][3] = -1;
    CHECK_REFUSED(te_cpu_multinomial(&exec, &samples, &src, true, rng), "row 2 has a weight that is negative or NaN");
    weights[1][3] = INFINITY;
    CHECK_REFUSED(te_cpu_multinomial(&exec, &samples, &src, true, rng), "row 2 has weights whose sum is infinite");
    memset(weights[0], 0, sizeof weights[0]);
    CHECK_REFUSED(te_cpu_multinomial(&exec, &samples, &src, true, rng), "row 1 has no positive weight");
    src.shape[1] = 0;
    CHECK_REFUSED(te_cpu_multinomial(&exec, &samples, &src, true, rng), "row 1 has no positive weight");
    test_exec_close(&exec);
}

int main(void)
{
    test_copy();
    test_copy_broadcast();
    test_embedding();
    test_index();
    test_rows();
    test_multinomial();
    return TEST_END();
}
