/* test_cuda_kernels.c - the hand-written CUDA kernels, run by the simulator, against the CPU backend: to the bit where
 * the order of additions is the same. Every source is also compiled by NVRTC where that is installed. */
#include "cuda_twins.h"

#include "kernels/cpu/cpu.h"

/* --- embedding --------------------------------------------------------------------------------------------------- */

static void check_embedding(te_dtype out_dtype, te_dtype table_dtype, layout l, te_dtype id_dtype, int64_t width)
{
    enum { VOCABULARY = 37 };
    int64_t ids_shape[2] = {5, 60}, out_shape[3] = {5, 60, width}, table_shape[2] = {VOCABULARY, width};
    twins   ids = twins_new(id_dtype, l == SWAPPED ? SWAPPED : DENSE, 2, ids_shape);
    twins   out = twins_new(out_dtype, l, 3, out_shape), table = twins_new(table_dtype, l, 2, table_shape);
    each(&ids, NULL, VOCABULARY);
    CHECK_PLAN(te_cuda_plan_embedding(&cuda.exec, &plan, &out.gpu, &table.gpu, &ids.gpu));
    CHECK(te_cpu_embedding(&cuda.exec, &out.cpu, &table.cpu, &ids.cpu) == TE_OK);
    CHECK_MSG(same(&out, 0), "embedding %s from %s", te_dtype_name(out_dtype), te_dtype_name(table_dtype));
    CHECK_PLAN(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table.gpu, &out.gpu, &ids.gpu));
    CHECK(te_cpu_embedding_backward(&cuda.exec, &table.cpu, &out.cpu, &ids.cpu, NULL) == TE_OK);
    CHECK_MSG(same(&table, 0), "embedding backward %s to %s", te_dtype_name(out_dtype), te_dtype_name(table_dtype));
    te_store_f64(ids.gpu.data, id_dtype, 7, VOCABULARY);
    CHECK(te_cuda_plan_embedding(&cuda.exec, &plan, &out.gpu, &table.gpu, &ids.gpu) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, "outside 0 to 36"));
    te_store_f64(ids.gpu.data, id_dtype, 7, -1);
    CHECK(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table.gpu, &out.gpu, &ids.gpu) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT);
    twins_free(&ids), twins_free(&out), twins_free(&table);
}

static void check_embeddings(void)
{
    check_embedding(TE_F32, TE_F32, DENSE, TE_I64, 64);
    check_embedding(TE_BF16, TE_F32, DENSE, TE_I32, 320);
    check_embedding(TE_F32, TE_F32, PADDED, TE_I64, 5);
    check_embedding(TE_F16, TE_BF16, SWAPPED, TE_I32, 12);
    check_embedding(TE_F64, TE_F64, DENSE, TE_I64, 33);
}

/* Ids in groups of other kinds, across the borders of blocks, tiles and digits. */
typedef enum groups { ANY_ID, SAME_ID, ID_AT_ENDS, GROUPS, LONG_GROUPS } groups;

static void check_groups(int64_t n, int64_t vocabulary, int64_t width, groups kind)
{
    int64_t length = kind == GROUPS ? 8 : 32; /* as te_add_rows takes them */
    twins ids = twins_new(TE_I64, DENSE, 1, &n), dy = twins_new(TE_BF16, DENSE, 2, (int64_t[2]){n, width});
    twins table = twins_new(TE_F32, DENSE, 2, (int64_t[2]){vocabulary, width});
    for (int64_t i = 0; i < n; i++) {
        int64_t id = (int64_t)(test_random(&state) % (uint64_t)vocabulary);
        if (kind == SAME_ID) id = vocabulary - 1;
        if (kind == ID_AT_ENDS) id = id % 2 ? vocabulary - 1 : 0;
        if (kind >= GROUPS) { /* one less, that many, one more */
            int64_t at = i % (3 * length);
            id = (i / (3 * length) * 3 + (at < length - 1 ? 0 : at < 2 * length - 1 ? 1 : 2)) % vocabulary;
        }
        ((int64_t *)ids.gpu.data)[i] = ((int64_t *)ids.cpu.data)[i] = id;
    }
    CHECK_PLAN(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table.gpu, &dy.gpu, &ids.gpu));
    CHECK((plan.n_calls == 0) == (n == 0));
    CHECK(te_cpu_embedding_backward(&cuda.exec, &table.cpu, &dy.cpu, &ids.cpu, NULL) == TE_OK);
    CHECK_MSG(same(&table, 0), "%lld ids of %lld by %lld, kind %d", (long long)n, (long long)vocabulary,
              (long long)width, kind);
    twins_free(&ids), twins_free(&dy), twins_free(&table);
}

static void check_all_groups(void)
{
    static const int64_t counts[] = {0, 1, 31, 32, 33, 287, 288, 289, 544, 2047, 2048, 2049, 4097};
    for (int i = 0; i < 13; i++)
        for (int kind = ANY_ID; kind <= LONG_GROUPS; kind++) check_groups(counts[i], 300, 2, (groups)kind);
    check_groups(3000, 1, 2, SAME_ID);
    check_groups(5000, 511, 2, ANY_ID);
    check_groups(5000, 512, 2, ID_AT_ENDS); /* digits change the halves of the scratch memory an even number of times */
    check_groups(5000, 300000, 1, ANY_ID);  /* three digits */
    check_groups(20000, 40, 1, ANY_ID);     /* more ids than blocks */
    check_groups(600, 5, 515, ANY_ID);
    for (int i = 0; i < 8; i++)
        check_groups((int64_t)(test_random(&state) % 7000), 1 + (int64_t)(test_random(&state) % 3000),
                     1 + (int64_t)(test_random(&state) % 6), ANY_ID);
}

/* Rows of fewer columns than a warp's threads have at a time, and of more than a block's. */
static void check_widths(void)
{
    check_embedding(TE_BF16, TE_F32, DENSE, TE_I64, 4);
    check_embedding(TE_F32, TE_F32, DENSE, TE_I64, 4200);
    for (int kind = ANY_ID; kind <= LONG_GROUPS; kind++) check_groups(700, 90, 132 + 128 * kind, (groups)kind);
}

/* Passes follow from the number of rows, and grids are within what a GPU takes; nothing is run. */
static void check_plans(void)
{
    static const struct {
        int64_t rows, n;
        int     calls;
    } sorts[] = {{511, 5000, 5},    {512, 5000, 7},    {50257, 5000, 7},
                 {300000, 5000, 9}, {300000, 2048, 4}, {300000, 127, 3}};
    for (size_t i = 0; i < sizeof sorts / sizeof sorts[0]; i++) {
        te_view table = test_view(NULL, TE_F32, 2, (int64_t[2]){sorts[i].rows, 4});
        te_view ids = test_view(NULL, TE_I64, 1, &sorts[i].n);
        te_view dy = test_view(NULL, TE_F32, 2, (int64_t[2]){sorts[i].n, 4});
        CHECK(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table, &dy, &ids) == TE_OK);
        CHECK_MSG(plan.n_calls == sorts[i].calls, "%d calls for %lld rows", plan.n_calls, (long long)sorts[i].rows);
    }
    int64_t n = INT64_C(1) << 31, width = INT64_C(1) << 25, most = n << 1;
    te_view table = test_view(NULL, TE_F32, 2, (int64_t[2]){4, width});
    te_view ids = test_view(NULL, TE_I64, 1, &n), dy = test_view(NULL, TE_F32, 2, (int64_t[2]){n, width});
    CHECK(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table, &dy, &ids) == TE_OK);
    for (int i = 0; i < plan.n_calls; i++)
        CHECK(plan.calls[i].launch.grid[0] < 65536 && plan.calls[i].launch.grid[1] < 65536);
    ids.shape[0] = dy.shape[0] = most;
    CHECK(te_cuda_plan_embedding_backward(&cuda.exec, &plan, &table, &dy, &ids) == TE_ERROR_UNSUPPORTED &&
          strstr(cuda.exec.message, "4294967296"));
}

/* --- classes ----------------------------------------------------------------------------------------------------- */

/* The place and the value of the first fault, and of those that are none. */
static void check_classes(te_dtype dtype, layout l, double ignored)
{
    enum { CLASSES = 19, ROWS = 7, COLUMNS = 61 };
    int64_t shape[2] = {ROWS, COLUMNS};
    twins t = twins_new(dtype, l, 2, shape);
    each(&t, NULL, CLASSES);
    int64_t place[] = {5 * COLUMNS + 3, 2 * COLUMNS + 60}, at[2];
    for (int i = 0; i < 2; i++)
        at[i] = place[i] / COLUMNS * t.gpu.stride[0] + place[i] % COLUMNS * t.gpu.stride[1];
    te_store_f64(t.gpu.data, dtype, at[0], ignored);
    CHECK_PLAN(te_cuda_plan_check_classes(&cuda.exec, &plan, &t.gpu, CLASSES, ignored));
    te_store_f64(t.gpu.data, dtype, at[0], CLASSES + 1);
    te_store_f64(t.gpu.data, dtype, at[1], CLASSES);
    CHECK(te_cuda_plan_check_classes(&cuda.exec, &plan, &t.gpu, CLASSES, ignored) == TE_OK);
    CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT &&
                  strcmp(cuda.exec.message, "cross_entropy: target 19 at position 183 is not a class from 0 to 18") ==
                      0,
              "%s: %s", te_dtype_name(dtype), cuda.exec.message);
    twins_free(&t);
}

static void check_all_classes(void)
{
    check_classes(TE_I64, DENSE, -100);
    check_classes(TE_I32, SWAPPED, -1);
    check_classes(TE_I64, PADDED, 19 + 100);
    check_classes(TE_U8, DENSE, 255);
    int64_t shape[1] = {4};
    twins t = twins_new(TE_F32, DENSE, 1, shape);
    CHECK(te_cuda_plan_check_classes(&cuda.exec, &plan, &t.gpu, 3, -100) == TE_ERROR_ARGUMENT);
    twins_free(&t);
}

/* --- gather and scatter_add -------------------------------------------------------------------------------------- */

static void check_index(te_dtype dtype, layout l, te_dtype index_dtype, int dim, const int64_t *whole_shape,
                        const int64_t *part_shape)
{
    twins whole = twins_new(dtype, l, 3, whole_shape), part = twins_new(dtype, l, 3, part_shape);
    twins index = twins_new(index_dtype, DENSE, 3, part_shape);
    each(&index, NULL, (double)whole_shape[dim]);
    CHECK_PLAN(te_cuda_plan_gather(&cuda.exec, &plan, &part.gpu, &whole.gpu, &index.gpu, dim));
    CHECK(te_cpu_gather(&cuda.exec, &part.cpu, &whole.cpu, &index.cpu, dim) == TE_OK);
    CHECK_MSG(same(&part, 0), "gather of %s along %d", te_dtype_name(dtype), dim);
    if (dtype != TE_BOOL) {
        CHECK_PLAN(te_cuda_plan_scatter_add(&cuda.exec, &plan, &whole.gpu, &part.gpu, &index.gpu, dim));
        CHECK(te_cpu_scatter_add(&cuda.exec, &whole.cpu, &part.cpu, &index.cpu, dim) == TE_OK);
        CHECK_MSG(same(&whole, 0), "scatter_add of %s along %d", te_dtype_name(dtype), dim);
    }
    te_store_f64(index.gpu.data, index_dtype, 3, (double)whole_shape[dim]);
    CHECK(te_cuda_plan_gather(&cuda.exec, &plan, &part.gpu, &whole.gpu, &index.gpu, dim) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT && strstr(cuda.exec.message, "position 4 "));
    twins_free(&whole), twins_free(&part), twins_free(&index);
}

static void check_indices(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_I32, TE_U8, TE_F16, TE_BOOL};
    for (int i = 0; i < 8; i++)
        check_index(dtypes[i], (layout)(i % 3), i % 2 ? TE_I32 : TE_I64, i % 3, (int64_t[3]){6, 9, 20},
                    (int64_t[3]){6, 9, 20});
    check_index(TE_F32, DENSE, TE_I64, 2, (int64_t[3]){2, 3, 11}, (int64_t[3]){2, 3, 900}); /* few long lines: sorted */
    check_index(TE_BF16, PADDED, TE_I64, 0, (int64_t[3]){40, 2, 3}, (int64_t[3]){300, 2, 3});
    check_index(TE_F32, DENSE, TE_I64, 2, (int64_t[3]){1, 1, 2}, (int64_t[3]){1, 1, 2500}); /* several tiles */
    check_index(TE_I32, DENSE, TE_I32, 0, (int64_t[3]){5, 30, 20}, (int64_t[3]){70, 30, 20});
}

/* --- select ------------------------------------------------------------------------------------------------------ */

static void check_select(te_dtype dtype, layout l, int64_t n, bool largest)
{
    int64_t shape[2] = {7, n}, k = n < 40 ? n : 9, top_shape[2] = {7, k}, arg_shape[1] = {7};
    twins   src = twins_new(dtype, l, 2, shape), values = twins_new(dtype, DENSE, 2, top_shape);
    twins   indices = twins_new(TE_I64, l, 2, top_shape), arg = twins_new(TE_I64, DENSE, 1, arg_shape);
    CHECK_PLAN(te_cuda_plan_arg_reduce(&cuda.exec, &plan, &arg.gpu, &src.gpu, largest));
    CHECK(te_cpu_arg_reduce(&cuda.exec, &arg.cpu, &src.cpu, largest) == TE_OK);
    CHECK_MSG(same(&arg, 0), "arg_reduce of %lld %s", (long long)n, te_dtype_name(dtype));
    CHECK_PLAN(te_cuda_plan_topk(&cuda.exec, &plan, &values.gpu, &indices.gpu, &src.gpu, largest));
    CHECK(te_cpu_topk(&cuda.exec, &values.cpu, &indices.cpu, &src.cpu, largest) == TE_OK);
    CHECK_MSG(same(&values, 0) && same(&indices, 0), "topk of %lld %s", (long long)n, te_dtype_name(dtype));
    twins_free(&src), twins_free(&values), twins_free(&indices), twins_free(&arg);
}

static double finite_or_zero(double x) { return isfinite(x) ? x : 0; }

static void check_cumsum(te_dtype from, te_dtype to, layout l, int64_t n, bool reverse)
{
    int64_t shape[2] = {5, n};
    twins   src = twins_new(from, l, 2, shape), dst = twins_new(to, l, 2, shape);
    each(&src, finite_or_zero, 0);
    CHECK_PLAN(te_cuda_plan_cumsum(&cuda.exec, &plan, &dst.gpu, &src.gpu, reverse));
    CHECK(te_cpu_cumsum(&cuda.exec, &dst.cpu, &src.cpu, reverse) == TE_OK);
    CHECK_MSG(same(&dst, te_dtype_is_integer(to) ? 0 : to == TE_F64 ? 1e-10 : 1e-2), "cumsum of %lld %s to %s",
              (long long)n, te_dtype_name(from), te_dtype_name(to));
    twins_free(&src), twins_free(&dst);
}

/* Rows of ties and of other kinds, with lengths about those where blocks become larger; their best one too. */
typedef enum ranking { ANY_VALUE, FEW_VALUES, ONE_VALUE, ASCENDING, ONE_THREAD } ranking;

static void check_topk(te_dtype dtype, int64_t rows, int64_t n, int64_t k, ranking kind)
{
    int64_t shape[2] = {rows, n}, top_shape[2] = {rows, k};
    twins   src = twins_new(dtype, DENSE, 2, shape), values = twins_new(dtype, DENSE, 2, top_shape);
    twins   indices = twins_new(TE_I64, DENSE, 2, top_shape), best = twins_new(TE_I64, DENSE, 1, shape);
    for (int64_t i = 0; i < rows * n && kind != ANY_VALUE; i++) {
        double  x = 1;
        int64_t at = i % n;
        if (kind == FEW_VALUES) x = (double)(test_random(&state) % 3);
        if (kind == ASCENDING) x = (double)(at % 2048);
        if (kind == ONE_THREAD) x = at % 32 == 5 ? (double)(at * 7 % 199) : -1;
        te_store_f64(src.gpu.data, dtype, i, x);
    }
    memcpy(src.cpu.data, src.gpu.data, src.bytes);
    for (int largest = 0; largest < 2; largest++) {
        CHECK_PLAN(te_cuda_plan_topk(&cuda.exec, &plan, &values.gpu, &indices.gpu, &src.gpu, largest));
        CHECK(te_cpu_topk(&cuda.exec, &values.cpu, &indices.cpu, &src.cpu, largest) == TE_OK);
        CHECK_MSG(same(&values, 0) && same(&indices, 0), "topk %lld of %lld %s, kind %d", (long long)k, (long long)n,
                  te_dtype_name(dtype), kind);
        CHECK_PLAN(te_cuda_plan_arg_reduce(&cuda.exec, &plan, &best.gpu, &src.gpu, largest));
        CHECK(te_cpu_arg_reduce(&cuda.exec, &best.cpu, &src.cpu, largest) == TE_OK);
        CHECK_MSG(same(&best, 0), "best of %lld %s, kind %d", (long long)n, te_dtype_name(dtype), kind);
    }
    twins_free(&src), twins_free(&values), twins_free(&indices), twins_free(&best);
}

/* The best of rows in dense views of three dimensions, along each; `kind` as for topk, and the best in several places
 * where a part of a row or a unit begins or ends. */
static void check_best(te_dtype dtype, const int64_t *shape, int dim, ranking kind)
{
    twins src = twins_new(dtype, DENSE, 3, shape), best = twins_new(TE_I64, DENSE, 3, shape);
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2] && kind != ANY_VALUE; i++) {
        bool edge = i % 8192 == 8191 || i % 64 == 0 || i % 512 == 511;
        te_store_f64(src.gpu.data, dtype, i,
                     kind == ONE_VALUE    ? 1.0
                     : kind == FEW_VALUES ? (double)(test_random(&state) % 2)
                     : edge               ? (dtype == TE_F32 && test_random(&state) % 2 ? -(double)NAN : 3.0)
                                          : (double)(test_random(&state) % 3));
    }
    memcpy(src.cpu.data, src.gpu.data, src.bytes);
    te_view *views[] = {&src.gpu, &src.cpu, &best.gpu, &best.cpu};
    for (int v = 0; v < 4; v++) {
        int64_t extent = shape[dim], stride = views[v]->stride[dim];
        for (int i = dim; i < 2; i++) {
            views[v]->shape[i] = views[v]->shape[i + 1];
            views[v]->stride[i] = views[v]->stride[i + 1];
        }
        views[v]->shape[2] = extent;
        views[v]->stride[2] = stride;
        if (v >= 2) views[v]->ndim = 2;
    }
    for (int largest = 0; largest < 2; largest++) {
        CHECK_PLAN(te_cuda_plan_arg_reduce(&cuda.exec, &plan, &best.gpu, &src.gpu, largest));
        CHECK(te_cpu_arg_reduce(&cuda.exec, &best.cpu, &src.cpu, largest) == TE_OK);
        CHECK_MSG(same(&best, 0), "best of %s along %d of {%lld, %lld, %lld}, kind %d", te_dtype_name(dtype), dim,
                  (long long)shape[0], (long long)shape[1], (long long)shape[2], kind);
    }
    twins_free(&src), twins_free(&best);
}

static void check_all_best(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_F16, TE_I32, TE_BOOL, TE_F8E4M3,
                                      TE_F8E5M2};
    static const int64_t shapes[][3] = {{1, 1, 70001}, {1, 3, 32768}, {2, 1, 255}, {1, 5, 33},   {1, 700, 40},
                                        {2, 513, 9},   {9, 2, 3},     {1, 1, 1},   {2100, 1, 33}, {1, 40000, 8}};
    for (int d = 0; d < 10; d++)
        for (int s = 0; s < 10; s++)
            for (int dim = 0; dim < 3; dim++)
                if (d < 3 || s != 9) check_best(dtypes[d], shapes[s], dim, (ranking)((d + s + dim) % 4));
    for (int kind = ANY_VALUE; kind <= ASCENDING; kind++)
        for (int s = 0; s < 10; s += 4) check_best(TE_F32, shapes[s], s == 4 ? 1 : 2, (ranking)kind);
    CHECK(plan.n_calls == 1);
    te_view long_row = test_view(NULL, TE_F32, 1, &(int64_t){INT64_C(1) << 33});
    te_view one = test_view(NULL, TE_I64, 0, NULL);
    CHECK(te_cuda_plan_arg_reduce(&cuda.exec, &plan, &one, &long_row, true) == TE_OK);
    CHECK(plan.n_calls == 2 && plan.calls[0].launch.grid[0] == 1024 && plan.scratch_bytes == 16384);
}

static void check_all_topk(void)
{
    static const int64_t lengths[] = {31, 512, 513, 8192, 8193};
    for (int i = 0; i < 5; i++)
        for (int kind = ANY_VALUE; kind <= ONE_THREAD; kind++)
            check_topk(kind % 2 ? TE_F32 : TE_BF16, 3, lengths[i], i < 3 ? 30 : 12, (ranking)kind);
    check_topk(TE_F32, 2, 300, 300, FEW_VALUES);
    check_topk(TE_BF16, 2, 40000, 1, FEW_VALUES);
    check_topk(TE_F16, 2, 40004, 2, ANY_VALUE);
    check_topk(TE_I64, 2, 700, 650, ANY_VALUE);
    check_topk(TE_F32, 8200, 3, 2, FEW_VALUES); /* more rows than blocks */
    /* whole tiles in order: of one and of several, with the last one short, in two and three rounds, and whole rows */
    static const int64_t sizes[][3] = {{3, 4096, 33},    {2, 4096, 4096},  {1, 4097, 65},
                                       {3, 33000, 10},   {2, 12289, 1000}, {1, 20000, 1024},
                                       {1, 9000, 1025},  {1, 70000, 900},  {300, 257, 40}};
    for (int i = 0; i < 9; i++)
        for (int kind = ANY_VALUE; kind <= ONE_THREAD; kind += 1 + i % 2)
            check_topk(kind % 2 ? TE_F32 : TE_F16, sizes[i][0], sizes[i][1], sizes[i][2], (ranking)kind);
    check_topk(TE_I64, 2, 5000, 100, FEW_VALUES);
    check_topk(TE_F64, 2, 5000, 3000, ANY_VALUE);
    check_topk(TE_U8, 2, 5000, 1030, ANY_VALUE);
    check_topk(TE_BOOL, 2, 5000, 100, FEW_VALUES);
    for (int i = 0; i < 6; i++) {
        int64_t n = 1 + (int64_t)(test_random(&state) % 9000), k = 1 + (int64_t)(test_random(&state) % 20);
        check_topk(i % 2 ? TE_F16 : TE_F64, 2, n, k < n ? k : n, i % 3 ? ANY_VALUE : FEW_VALUES);
        check_cumsum(TE_I32, TE_I64, DENSE, n, i % 2);
    }
}

/* Bits of every kind: no digit of a key is the same for all. */
static double any_number(double x) { return x * exp2((double)(int)(test_random(&state) % 60) - 30); }

static void check_order(te_dtype dtype, layout l, int64_t rows, int64_t n, ranking kind)
{
    int64_t shape[2] = {rows, n};
    twins   src = twins_new(dtype, l, 2, shape), order = twins_new(TE_I64, l, 2, shape);
    twins   values = twins_new(dtype, l, 2, shape);
    int64_t all = (int64_t)(src.bytes / te_dtype_size(dtype));
    if (kind == ANY_VALUE) each(&src, any_number, 0);
    for (int64_t i = 0; i < all && kind != ANY_VALUE; i++)
        te_store_f64(src.gpu.data, dtype, i,
                     kind == ONE_VALUE    ? 1.0
                     : kind == FEW_VALUES ? (test_random(&state) % 2 ? -0.0 : 0.0)
                     : kind == ASCENDING  ? (double)(i % 100)
                     : i % 7 == 0         ? (double)NAN
                                          : (double)(test_random(&state) % 3));
    memcpy(src.cpu.data, src.gpu.data, src.bytes);
    for (int descending = 0; descending < 2; descending++) {
        CHECK_PLAN(te_cuda_plan_order(&cuda.exec, &plan, descending ? &values.gpu : NULL, &order.gpu, &src.gpu,
                                      descending));
        CHECK(te_cpu_sort(&cuda.exec, NULL, &order.cpu, &src.cpu, descending) == TE_OK);
        if (descending && n > 0)
            CHECK(te_cpu_gather(&cuda.exec, &values.cpu, &src.cpu, &order.cpu, 1) == TE_OK);
        CHECK_MSG(same(&order, 0) && same(&values, 0), "order of {%lld, %lld} %s, kind %d", (long long)rows,
                  (long long)n, te_dtype_name(dtype), kind);
    }
    twins_free(&src), twins_free(&order), twins_free(&values);
}

static void check_all_orders(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_F16, TE_I32, TE_BOOL, TE_F8E4M3,
                                      TE_F8E5M2};
    static const int64_t sizes[][2] = {{3, 1}, {5, 31}, {4, 256}, {2, 257}, {2, 1000}, {1, 4096}, {2, 4097}, {1, 9001}};
    for (int d = 0; d < 10; d++)
        for (int s = 0; s < 8; s++)
            check_order(dtypes[d], (layout)((d + s) % 3), sizes[s][0], sizes[s][1], (ranking)((d + s) % 5));
    for (int kind = ANY_VALUE; kind <= ONE_THREAD; kind++)
        for (int s = 2; s < 8; s += 2) check_order(TE_F32, DENSE, sizes[s][0], sizes[s][1], (ranking)kind);
    check_order(TE_F32, DENSE, 0, 5, ANY_VALUE);
    check_order(TE_F32, DENSE, 5, 0, ANY_VALUE);
    check_order(TE_I32, DENSE, 3, 6200, ANY_VALUE); /* several tiles of several rows */
    te_view src = test_view(NULL, TE_I64, 1, &(int64_t){UINT32_MAX}), order = src; /* nothing is run */
    CHECK(te_cuda_plan_order(&cuda.exec, &plan, NULL, &order, &src, false) == TE_OK && plan.n_calls == 25);
    CHECK(plan.n_words <= TE_CUDA_PLAN_WORDS);
    order.shape[0] = ++src.shape[0];
    CHECK(te_cuda_plan_order(&cuda.exec, &plan, NULL, &order, &src, false) == TE_ERROR_UNSUPPORTED);
}

static void check_multinomial(te_dtype dtype, layout l, int64_t n, int64_t draws, bool replacement)
{
    int64_t shape[2] = {6, n}, out_shape[2] = {6, draws};
    te_rng  rng = {77, 5, 1234567, NULL};
    twins   src = twins_new(dtype, l, 2, shape), out = twins_new(TE_I64, DENSE, 2, out_shape);
    each(&src, finite_or_zero, 0);
    each(&src, fabs, 0);
    CHECK_PLAN(te_cuda_plan_multinomial(&cuda.exec, &plan, &out.gpu, &src.gpu, replacement, rng));
    CHECK(te_cpu_multinomial(&cuda.exec, &out.cpu, &src.cpu, replacement, rng) == TE_OK);
    CHECK_MSG(same(&out, 0), "multinomial of %lld %s", (long long)n, te_dtype_name(dtype));
    te_store_f64(src.gpu.data, dtype, src.gpu.stride[0] * 2, -1);
    CHECK(te_cuda_plan_multinomial(&cuda.exec, &plan, &out.gpu, &src.gpu, replacement, rng) == TE_OK);
    CHECK(cuda_plan_run(&cuda, &plan) == TE_ERROR_ARGUMENT &&
          strstr(cuda.exec.message, "row 3 has a weight that is neg"));
    twins_free(&src), twins_free(&out);
}

/* To the last element of dtypes of 8, 4 and 1 bytes, and nothing behind it. */
static void check_integers(te_dtype dtype, int64_t n, int64_t low, uint64_t range)
{
    int64_t     shape[1] = {n + 1};
    twins       got = twins_new(dtype, DENSE, 1, shape), want = twins_new(TE_I64, DENSE, 1, shape);
    te_integers drawn = {{77, 5, 0xfffffffeu, NULL}, low, range};
    int64_t    *whole = want.cpu.data;
    CHECK_PLAN(te_cuda_plan_integers(&plan, got.gpu.data, dtype, n, &drawn));
    CHECK(te_cpu_integers(&cuda.exec, whole, n, &drawn) == TE_OK);
    for (int64_t i = 0; i < n; i++) {
        if (dtype == TE_I64) ((int64_t *)got.cpu.data)[i] = whole[i];
        if (dtype == TE_I32) ((int32_t *)got.cpu.data)[i] = (int32_t)whole[i];
        if (dtype == TE_U8 || dtype == TE_BOOL) ((uint8_t *)got.cpu.data)[i] = (uint8_t)whole[i];
    }
    CHECK_MSG(memcmp(got.gpu.data, got.cpu.data, got.bytes) == 0, "%lld whole numbers of %s", (long long)n,
              te_dtype_name(dtype));
    twins_free(&got), twins_free(&want);
}

static void check_all_integers(void)
{
    static const uint64_t ranges[] = {1, 2, 50257, UINT32_MAX, (uint64_t)1 << 32, ((uint64_t)1 << 54) + 1};
    static const int64_t  counts[] = {0, 1, 2, 3, 511, 512, 1025};
    for (int c = 0; c < 7; c++) {
        for (int r = 0; r < 6; r++) check_integers(TE_I64, counts[c], r % 2 ? -((int64_t)1 << 53) : 3, ranges[r]);
        check_integers(TE_I32, counts[c], INT32_MIN, (uint64_t)1 << 32);
        check_integers(TE_I32, counts[c], -7, 15);
        check_integers(TE_U8, counts[c], 0, 256);
        check_integers(TE_BOOL, counts[c], 0, 2);
    }
}

static void check_selects(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F64, TE_I64, TE_U8, TE_F16};
    for (int i = 0; i < 6; i++) check_select(dtypes[i], (layout)(i % 3), i % 2 ? 1000 : 17, i % 2 == 0);
    check_select(TE_F32, DENSE, 1, false);
    check_cumsum(TE_F32, TE_F32, DENSE, 700, false);
    check_cumsum(TE_BF16, TE_F64, PADDED, 300, true);
    check_cumsum(TE_I64, TE_I64, SWAPPED, 513, true);
    check_cumsum(TE_U8, TE_I32, DENSE, 5, false);
    for (int n = 2047; n <= 2049; n++) check_cumsum(TE_I32, TE_I64, DENSE, n, n % 2);
    for (int n = 255; n <= 257; n++) check_cumsum(TE_U8, TE_I64, DENSE, n, n % 2);
    check_cumsum(TE_F32, TE_F64, DENSE, 9001, true);
    check_cumsum(TE_I64, TE_I64, PADDED, 513, false);
    check_all_best();
    check_all_topk();
    check_all_integers();
    check_all_orders();
    check_multinomial(TE_F32, DENSE, 1000, 20, true);
    check_multinomial(TE_F32, DENSE, 1000, 64, true);
    for (int n = 255; n <= 257; n++) check_multinomial(n == 256 ? TE_BF16 : TE_F16, (layout)(n % 3), n, 32, true);
    check_multinomial(TE_F32, DENSE, 50304, 1, false);
    check_multinomial(TE_F64, SWAPPED, 3000, 1, false);
    check_multinomial(TE_F32, PADDED, 8193, 30, true);
    CHECK(plan.calls[0].launch.shared == 64 * 2 * sizeof(double));
    check_multinomial(TE_BF16, DENSE, 600000, 2, true); /* more leaves than its tree has room for */
    CHECK(plan.calls[0].launch.shared == 0);
    check_multinomial(TE_BF16, SWAPPED, 300, 20, false);
    check_multinomial(TE_F64, PADDED, 33, 1, false);
    check_multinomial(TE_F32, DENSE, 1, 3, true);
    check_multinomial(TE_F32, DENSE, 9001, 40, true);
    check_multinomial(TE_F32, PADDED, 8193, 5, false);
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_embeddings();
    check_all_groups();
    check_plans();
    check_all_classes();
    check_indices();
    check_selects();
    check_widths();
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
