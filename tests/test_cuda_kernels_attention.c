/* test_cuda_kernels_attention.c - the blocked attention kernels, run by the simulator, against the CPU backend within
 * rounding: shapes, strides, masks, packing, grouped heads, bias, dropout, values that are not finite; and that they
 * repeat to the bit. */
#include "cuda_device.h"

#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"

static cuda_device  cuda;
static te_cuda_plan plan;
static uint64_t     state = 0x9e3779b97f4a7c15u;

/* --- problems ---------------------------------------------------------------------------------------------------- */

typedef struct extents {
    int64_t batch, heads, kv_heads, seq_q, seq_kv, dim, dim_v;
} extents;

static int64_t gap = 2; /* elements between rows: with 8, 16-byte accesses are aligned */

/* One operand [batch, heads, seq, dim] in memory [batch, seq, heads, dim + gap]: rows are strided. */
static te_view operand(te_dtype dtype, int64_t batch, int64_t heads, int64_t seq, int64_t dim, double size)
{
    int64_t shape[4] = {batch, heads, seq, dim}, n = batch * heads * seq * (dim + gap);
    te_view v = test_view(test_scratch(&cuda.exec, (size_t)n * te_dtype_size(dtype)), dtype, 4, shape);
    v.stride[1] = dim + gap;
    v.stride[2] = heads * (dim + gap);
    v.stride[0] = seq * v.stride[2];
    for (int64_t i = 0; i < n; i++) te_store_f64(v.data, dtype, i, test_uniform(&state, -size, size));
    return v;
}

static te_attention_grad problem(te_dtype dtype, extents e)
{
    te_attention_grad g = {0};
    te_attention     *a = &g.forward;
    int64_t           lse[3] = {e.batch, e.heads, e.seq_q};
    a->q = operand(dtype, e.batch, e.heads, e.seq_q, e.dim, 2);
    a->k = operand(dtype, e.batch, e.kv_heads, e.seq_kv, e.dim, 2);
    a->v = operand(dtype, e.batch, e.kv_heads, e.seq_kv, e.dim_v, 2);
    a->out = operand(dtype, e.batch, e.heads, e.seq_q, e.dim_v, 0);
    a->lse = test_view(test_scratch(&cuda.exec, (size_t)(e.batch * e.heads * e.seq_q) * 8),
                       dtype == TE_F64 ? TE_F64 : TE_F32, 3, lse);
    g.dout = operand(dtype, e.batch, e.heads, e.seq_q, e.dim_v, 2);
    g.dq = operand(dtype, e.batch, e.heads, e.seq_q, e.dim, 0);
    g.dk = operand(dtype, e.batch, e.kv_heads, e.seq_kv, e.dim, 0);
    g.dv = operand(dtype, e.batch, e.kv_heads, e.seq_kv, e.dim_v, 0);
    a->scale = 1 / sqrt((double)e.dim);
    a->window_left = a->window_right = -1;
    a->rng = (te_rng){12345, 7, 99, NULL};
    return g;
}

static void release(te_attention_grad *g)
{
    te_attention *a = &g->forward;
    void *memory[] = {a->q.data, a->k.data, a->v.data, a->out.data, a->lse.data, a->bias.data,
                      g->dout.data, g->dq.data, g->dk.data, g->dv.data, g->dbias.data};
    for (int i = 0; i < 11; i++) free(memory[i]);
}

/* The same, its results elsewhere. */
static te_view another(const te_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n += (v->shape[i] - 1) * v->stride[i];
    te_view copy = *v;
    copy.data = test_scratch(&cuda.exec, (size_t)n * te_dtype_size(v->dtype));
    memset(copy.data, 0xff, (size_t)n * te_dtype_size(v->dtype));
    return copy;
}

static bool agree(const char *name, const te_view *a, const te_view *b, double tolerance)
{
    double  worst = 0, size = 0;
    int64_t n = te_view_numel(a);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = 0, rest = i;
        for (int d = a->ndim - 1; d >= 0; d--) at += rest % a->shape[d] * a->stride[d], rest /= a->shape[d];
        double x = te_load_f64(a->data, a->dtype, at), y = te_load_f64(b->data, b->dtype, at);
        if (isfinite(y)) size = fmax(size, fabs(y));
        if (x == y || (isnan(x) && isnan(y))) continue;
        worst = isfinite(x) && isfinite(y) ? fmax(worst, fabs(x - y)) : INFINITY;
    }
    if (worst > tolerance * (size + 1e-3)) fprintf(stderr, "%s: off by %g of %g\n", name, worst, size);
    return worst <= tolerance * (size + 1e-3);
}

static double tolerance_of(te_dtype dtype)
{
    return dtype == TE_F64 ? 1e-12 : dtype == TE_F32 ? 5e-6 : dtype == TE_F16 ? 3e-3 : 2e-2;
}

/* Kernel and CPU on the same operands, forward or both. What lies in rng.base the CPU is told as numbers. */
static void check_passes(te_attention_grad *g, const char *name, bool backward)
{
    te_attention_grad again = *g, cpu = *g;
    double            tolerance = tolerance_of(g->forward.q.dtype);
    te_rng           *rng = &cpu.forward.rng;
    te_view          *results[6] = {&g->forward.out, &g->forward.lse, &g->dq, &g->dk, &g->dv, &g->dbias};
    te_view          *wanted[6] = {&cpu.forward.out, &cpu.forward.lse, &cpu.dq, &cpu.dk, &cpu.dv, &cpu.dbias};
    te_view *repeated[6] = {&again.forward.out, &again.forward.lse, &again.dq, &again.dk, &again.dv, &again.dbias};
    static const char *const names[6] = {"out", "lse", "dq", "dk", "dv", "dbias"};
    int               n = !backward ? 2 : te_view_present(&g->dbias) ? 6 : 5;
    if (rng->base) *rng = (te_rng){rng->base[0], rng->stream, rng->offset + rng->base[1], NULL};
    for (int i = 0; i < n; i++) *wanted[i] = another(results[i]), *repeated[i] = another(results[i]);
    te_attention_grad *both[2] = {g, &again};
    for (int i = 0; i < 2; i++) {
        CHECK_MSG(te_cuda_plan_attention(&cuda.exec, &plan, &both[i]->forward) == TE_OK &&
                  cuda_plan_run(&cuda, &plan) == TE_OK, "%s: %s", name, cuda.exec.message);
        if (!backward) continue;
        CHECK_MSG(te_cuda_plan_attention_backward(&cuda.exec, &plan, both[i]) == TE_OK &&
                  cuda_plan_run(&cuda, &plan) == TE_OK, "%s: %s", name, cuda.exec.message);
    }
    te_status status = te_cpu_attention(&cuda.exec, &cpu.forward);
    if (status == TE_OK && backward) status = te_cpu_attention_backward(&cuda.exec, &cpu);
    CHECK_MSG(status == TE_OK, "%s", cuda.exec.message);
    for (int i = 0; i < n; i++) {
        CHECK_MSG(agree(names[i], results[i], wanted[i], tolerance), "%s: %s", name, names[i]);
        CHECK_MSG(agree(names[i], results[i], repeated[i], 0), "%s: %s does not repeat", name, names[i]);
        free(wanted[i]->data), free(repeated[i]->data);
    }
}

static void check(te_attention_grad *g, const char *name) { check_passes(g, name, true); }

/* --- cases ------------------------------------------------------------------------------------------------------- */

static void check_dtypes(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16, TE_F64};
    for (int i = 0; i < 4; i++) {
        te_attention_grad g = problem(dtypes[i], (extents){2, 2, 2, 50, 50, 24, 24});
        g.forward.window_right = i % 2 ? 0 : -1;
        check(&g, te_dtype_name(dtypes[i]));
        release(&g);
    }
}

static void check_masks(te_dtype dtype)
{
    te_attention_grad g = problem(dtype, (extents){1, 4, 2, 37, 70, 16, 40});
    te_attention     *a = &g.forward;
    a->window_right = 0;
    a->bottom_right = true;
    check(&g, "grouped heads, causal from the bottom right");
    a->window_left = 9;
    check(&g, "window");
    a->bottom_right = false;
    a->window_left = -1;
    release(&g);
    g = problem(dtype, (extents){1, 2, 1, 140, 12, 64, 8});
    g.forward.window_right = 0;
    g.forward.bottom_right = true; /* the first 128 queries see nothing */
    check(&g, "fully masked rows");
    release(&g);
}

static void check_packed(te_dtype dtype)
{
    static const int32_t q[] = {2, 20, 20, 55}, kv[] = {0, 33, 40, 60};
    te_attention_grad g = problem(dtype, (extents){1, 2, 1, 60, 64, 16, 16});
    g.forward.cu_seqlens_q = q;
    g.forward.cu_seqlens_kv = kv;
    g.forward.n_seqs = 3;
    g.forward.window_right = 0;
    check(&g, "packed sequences");
    release(&g);
}

/* Keys whose scores overflow, but in float16, and values whose products with dout do. */
static void make_huge(te_attention *a, int64_t head, int64_t key)
{
    double huge = a->k.dtype == TE_F16 ? 6e4 : 3e38;
    for (int64_t b = 0; b < a->k.shape[0]; b++) {
        const te_view *k = &a->k, *v = &a->v;
        int64_t to_k = b * k->stride[0] + head * k->stride[1] + key * k->stride[2];
        int64_t to_v = b * v->stride[0] + head * v->stride[1] + key * v->stride[2];
        for (int64_t d = 0; d < k->shape[3]; d++) te_store_f64(k->data, k->dtype, to_k + d, d % 2 ? huge : -huge);
        for (int64_t d = 0; d < v->shape[3]; d++) te_store_f64(v->data, v->dtype, to_v + d, huge);
    }
}

static void check_bias_and_dropout(te_dtype dtype)
{
    te_attention_grad g = problem(dtype, (extents){2, 3, 3, 20, 45, 16, 16});
    te_attention     *a = &g.forward;
    int64_t           shape[4] = {1, 3, 1, 45};
    double            sinks[3];
    a->bias = test_view(test_scratch(&cuda.exec, 3 * 45 * 2), TE_BF16, 4, shape);
    for (int i = 0; i < 3 * 45; i++) {
        te_store_f64(a->bias.data, TE_BF16, i, i % 11 == 0 ? -INFINITY : test_uniform(&state, -1, 1));
        if (i % 11 == 0) make_huge(a, i / 45, i % 45);
    }
    a->bias.shape[0] = 2, a->bias.stride[0] = 0;
    a->bias.shape[2] = 20, a->bias.stride[2] = 0;
    int64_t scores[4] = {2, a->q.shape[1], a->q.shape[2], a->k.shape[2]},
            n = scores[0] * scores[1] * scores[2] * scores[3];
    te_dtype wide = dtype == TE_F64 ? TE_F64 : TE_F32;
    g.dbias = test_view(test_scratch(&cuda.exec, (size_t)n * te_dtype_size(wide)), wide, 4, scores);
    memset(g.dbias.data, 0xff, (size_t)n * te_dtype_size(wide)); /* what nobody sees stays as it is */
    check(&g, "bias");
    for (int h = 0; h < 3; h++) te_store_f64(sinks, wide, h, h == 1 ? -INFINITY : 0.5 * h);
    a->sinks = test_view(sinks, wide, 1, &g.forward.q.shape[1]);
    check(&g, "bias and sinks");
    a->dropout = 0.3;
    check(&g, "bias and dropout");
    a->dropout = 1;
    check(&g, "everything dropped");
    te_attention_grad without = g;
    without.forward.bias = (te_view){0};
    CHECK(te_cuda_plan_attention_backward(&cuda.exec, &plan, &without) == TE_ERROR_ARGUMENT);
    release(&g);
}

/* Dropout without a bias, in heads and lengths that fill tiles; rows that begin with the first word of a generator call
 * and others; packed; from a base on the device. */
static void check_dropout(te_dtype dtype)
{
    static const int32_t  q[] = {0, 33, 70}, kv[] = {1, 40, 66};
    static const uint64_t base[2] = {77, 1000};
    static const int64_t  keys[] = {64, 66};
    for (int i = 0; i < 2; i++) {
        te_attention_grad g = problem(dtype, (extents){1, 2, 1, 70, keys[i], 64, 64});
        g.forward.dropout = 0.4;
        if (i == 0) g.forward.rng.base = base;
        check(&g, i ? "dropout, rows of 66" : "dropout from a base, rows of 64");
        g.forward.window_right = 0;
        g.forward.cu_seqlens_q = q;
        g.forward.cu_seqlens_kv = kv;
        g.forward.n_seqs = 2;
        if (i == 1) check(&g, "dropout of packed sequences");
        release(&g);
    }
}

/* Few queries: more than 512 keys are split among blocks, by shapes alone, and a second kernel merges them. Blocks have
 * many threads where they are few and their tiles small. */
static void check_decoding(te_dtype dtype)
{
    static const extents cases[] = {{1, 4, 1, 1, 128, 64, 64},  {2, 2, 2, 1, 255, 64, 64},  {1, 6, 2, 3, 256, 64, 64},
                                    {1, 2, 1, 1, 257, 64, 64},  {1, 20, 1, 1, 512, 64, 64}, {1, 3, 1, 16, 513, 64, 64},
                                    {1, 8, 2, 1, 1100, 64, 64}, {1, 2, 2, 2, 300, 40, 80},
                                    {1, 2, 1, 1, 600, 128, 96}, {64, 4, 4, 1, 140, 16, 24}};
    static const unsigned blocks[] = {1, 4, 2, 1, 2, 9, 10, 2, 3, 256};
    static const unsigned threads[] = {512, 512, 512, 512, 512, 512, 512, 512, 256, 128};
    int     widest = 1;
    int64_t before = gap;
    for (int i = 0; i < 10; i++) {
        gap = i % 3 ? 8 : before;
        te_attention_grad g = problem(dtype, cases[i]);
        te_attention     *a = &g.forward;
        double            sinks[20];
        int64_t           shape[4] = {cases[i].batch, cases[i].heads, cases[i].seq_q, cases[i].seq_kv};
        CHECK(te_cuda_plan_attention(&cuda.exec, &plan, a) == TE_OK);
        int calls = cases[i].seq_kv > 512 ? 2 : 1;
        CHECK_MSG(strcmp(plan.calls[0].launch.name, "te_attention_decode") == 0 && plan.n_calls == calls,
                  "case %d: %s, %d calls", i, plan.calls[0].launch.name, plan.n_calls);
        CHECK_MSG(plan.calls[0].launch.grid[0] == blocks[i] && plan.calls[0].launch.block[0] == threads[i],
                  "case %d: %u blocks of %u threads", i, plan.calls[0].launch.grid[0], plan.calls[0].launch.block[0]);
        CHECK(plan.calls[0].launch.shared <= 96 << 10);
        check_passes(&g, "few queries", false);
        for (int d = 0; d < 3; d++) /* no stride of an extent of 1 keeps rows from being read by units */
            if (a->q.shape[d] == 1) a->q.stride[d] = 1;
        int unit = plan.calls[0].kernel.vector;
        CHECK(te_cuda_plan_attention(&cuda.exec, &plan, a) == TE_OK && plan.calls[0].kernel.vector == unit);
        widest = unit > widest ? unit : widest;
        a->window_right = 0;
        a->bottom_right = true;
        check_passes(&g, "few queries, causal from the bottom right", false);
        a->window_left = 70;
        for (int h = 0; h < 20; h++) te_store_f64(sinks, TE_F32, h, h == 1 ? -INFINITY : 0.5 * h - 1);
        a->sinks = test_view(sinks, TE_F32, 1, &a->q.shape[1]);
        int64_t hidden = (cases[i].seq_kv - cases[i].seq_q - 70) / 16 * 16 - 1; /* in a tile that nobody looks at */
        for (int64_t j = 0; j < a->k.shape[0] * a->k.shape[1] && hidden >= 0; j++)
            te_store_f64(a->v.data, dtype, j / a->k.shape[1] * a->v.stride[0] + j % a->k.shape[1] * a->v.stride[1] +
                         hidden * a->v.stride[2], NAN);
        check_passes(&g, "few queries, window and sinks", false);
        for (int64_t head = 0; head < cases[i].kv_heads && hidden >= 0; head++) make_huge(a, head, hidden);
        a->window_left = -1;
        a->bias = test_view(test_scratch(&cuda.exec, (size_t)cases[i].seq_kv * 4), TE_F32, 4, shape);
        a->bias.stride[0] = a->bias.stride[1] = a->bias.stride[2] = 0;
        for (int64_t j = 0; j < cases[i].seq_kv; j++)
            te_store_f64(a->bias.data, TE_F32, j, j % 5 == 0 || j == hidden ? -INFINITY : test_uniform(&state, -1, 1));
        for (int64_t j = 0; j < cases[i].seq_kv; j += 5)
            for (int64_t head = 0; head < cases[i].kv_heads; head++) make_huge(a, head, j);
        if (i % 2) check_passes(&g, "few queries, bias", false);
        for (int64_t j = 0; j < cases[i].seq_kv; j++) te_store_f64(a->bias.data, TE_F32, j, -INFINITY);
        a->sinks = (te_view){0};
        if (i == 3) check_passes(&g, "few queries that see nothing", false);
        release(&g);
    }
    gap = before;
    CHECK_MSG(widest == 8, "units of %d elements at most", widest);
    te_attention_grad g = problem(dtype, (extents){1, 2, 1, 1, 127, 64, 64});
    for (int i = 0; i < 2; i++) {
        g.forward.dropout = 0.5 * i;
        CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &g.forward) == TE_OK);
        CHECK_MSG(strcmp(plan.calls[0].launch.name, "te_attention_mma") == 0, "%s", plan.calls[0].launch.name);
        release(&g);
        g = problem(dtype, (extents){1, 2, 1, 1, 300, 64, 64});
    }
    g.forward.dropout = 0.5;
    check(&g, "one query with dropout");
    release(&g);
}

/* Many sequences have few tiles beside those of their rows; blocks that no grid can have are refused
 * before anything is touched. */
static void check_grids(void)
{
    static const int32_t at[] = {0, 0, 1, 40, 40, 50};
    te_attention_grad g = problem(TE_BF16, (extents){1, 2, 1, 50, 50, 16, 16});
    g.forward.cu_seqlens_q = g.forward.cu_seqlens_kv = at;
    g.forward.n_seqs = 5;
    CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &g.forward) == TE_OK);
    CHECK_MSG(plan.calls[0].launch.grid[0] == 2 * (50 / 64 + 7), "%u blocks", plan.calls[0].launch.grid[0]);
    g.forward.window_right = 0;
    check(&g, "short sequences");
    g.forward.cu_seqlens_q = g.forward.cu_seqlens_kv = NULL;
    te_view *batched[] = {&g.forward.q, &g.forward.k, &g.forward.v, &g.forward.out, &g.forward.lse};
    for (int i = 0; i < 5; i++) batched[i]->shape[0] = (int64_t)1 << 31, batched[i]->stride[0] = 0;
    CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &g.forward) == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(cuda.exec.message, "4294967296 heads of all sequences"), "%s", cuda.exec.message);
    release(&g);
}

static void check_hostile(void)
{
    te_attention_grad g = problem(TE_F32, (extents){1, 1, 1, 40, 40, 8, 8});
    te_attention     *a = &g.forward;
    a->window_right = 0;
    ((float *)a->v.data)[39 * a->v.stride[2]] = INFINITY; /* seen by the last query alone */
    ((float *)a->k.data)[38 * a->k.stride[2]] = NAN;
    check(&g, "infinite value, NaN key");
    release(&g);
    g = problem(TE_F64, (extents){1, 1, 1, 5, 9, 300, 512});
    check(&g, "large heads");
    release(&g);
    g = problem(TE_BF16, (extents){3, 2, 2, 1, 33, 128, 128});
    check(&g, "one query");
    release(&g);
    te_attention wrong = {0};
    CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &wrong) == TE_ERROR_ARGUMENT);
}

/* Tiles keep 32 rows as long as shared memory that a device gives on request holds them. */
static void check_tiles(void)
{
    te_attention_grad g = problem(TE_F32, (extents){1, 2, 1, 40, 70, 128, 128});
    g.forward.window_right = 0;
    CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &g.forward) == TE_OK);
    CHECK_MSG(plan.calls[0].kernel.vector == 32 && plan.calls[0].launch.shared > 48 << 10 &&
                  plan.calls[0].launch.shared <= 96 << 10, "%u rows, %u bytes", plan.calls[0].kernel.vector,
              plan.calls[0].launch.shared);
    check(&g, "heads of 128 in float32");
    release(&g);
    g = problem(TE_F32, (extents){1, 1, 1, 70, 70, 6, 10}); /* rows end within a unit */
    g.forward.dropout = 0.2;
    check(&g, "heads of no whole units");
    release(&g);
}

/* E4M3 operands: where exp or a sum differ in the last place a probability may be rounded to the next number. */
static void check_quantized(te_dtype dtype, const te_attention *options)
{
    te_attention_grad g = problem(TE_F8E4M3, (extents){1, 4, 2, 37, 70, 16, 40});
    te_attention     *a = &g.forward, cpu;
    float             factors[3] = {0.3f, 0.7f, 1.9f};
    te_quant          quants[3];
    te_view          *views[3] = {&a->q, &a->k, &a->v};
    for (int i = 0; i < 3; i++) {
        quants[i] = (te_quant){.element = TE_E4M3, .scale = TE_SCALE_F32, .scale_inv = &factors[i]};
        views[i]->quant = &quants[i];
    }
    free(a->out.data);
    a->out = operand(dtype, 1, 4, 37, 40, 0);
    a->window_right = options->window_right;
    a->dropout = options->dropout;
    a->bottom_right = options->bottom_right;
    cpu = *a;
    cpu.out = another(&a->out);
    cpu.lse = another(&a->lse);
    CHECK_MSG(te_cuda_plan_attention(&cuda.exec, &plan, a) == TE_OK && cuda_plan_run(&cuda, &plan) == TE_OK, "%s",
              cuda.exec.message);
    CHECK_MSG(te_cpu_attention(&cuda.exec, &cpu) == TE_OK, "%s", cuda.exec.message);
    CHECK(agree("quantized", &a->out, &cpu.out, dtype == TE_F32 ? 1e-5 : 0.08)); /* a step of the largest numbers */
    CHECK(agree("quantized: lse", &a->lse, &cpu.lse, 5e-6));
    free(cpu.out.data), free(cpu.lse.data);
    release(&g);
}

static void check_all_quantized(void)
{
    check_quantized(TE_F8E4M3, &(te_attention){.window_right = -1});
    check_quantized(TE_F8E4M3, &(te_attention){.window_right = 0, .bottom_right = true});
    check_quantized(TE_F32, &(te_attention){.window_right = -1, .dropout = 0.2});
    te_attention_grad g = problem(TE_F8E4M3, (extents){1, 1, 1, 4, 4, 8, 8});
    te_quant          blocks = {.element = TE_E4M3, .scale = TE_SCALE_E8M0};
    g.forward.out.dtype = TE_F32; /* nothing is written */
    g.forward.q.quant = g.forward.k.quant = g.forward.v.quant = &blocks;
    CHECK(te_cuda_plan_attention(&cuda.exec, &plan, &g.forward) == TE_ERROR_UNSUPPORTED);
    CHECK(te_cpu_attention(&cuda.exec, &g.forward) == TE_ERROR_UNSUPPORTED);
    release(&g);
}

/* Rows that see nothing, whatever a library has made of them; other rows keep even what is no number. */
static void check_unseen(void)
{
    const float made[] = {NAN, -INFINITY, INFINITY, 0, -3.0e38f};
    const int64_t queries = 23, keys = 70;
    te_attention_grad g = problem(TE_BF16, (extents){2, 3, 1, queries, keys, 16, 24});
    te_attention *a = &g.forward;
    int64_t shape[4] = {1, 3, queries, keys};
    float *lse = a->lse.data, raised[2 * 3 * 23];
    a->bias = test_view(test_scratch(&cuda.exec, 3 * 23 * 70 * 4), TE_F32, 4, shape);
    a->bias.shape[0] = 2;
    a->bias.stride[0] = 0;
    a->window_left = 4;
    a->window_right = 3;
    a->bottom_right = true; /* row i sees the keys i + 43 to i + 50 */
    for (int64_t row = 0; row < 3 * queries; row++)
        for (int64_t key = 0; key < keys; key++) {
            bool visible = key >= row % queries + 43 && key <= row % queries + 50;
            /* of every fifth row nothing, of the one after it the first key alone, and all that nobody looks at */
            bool shown = row % 5 == 0 ? !visible : row % 5 == 1 ? key == row % queries + 43 || !visible : true;
            /* and of the next all by large numbers, two of them least */
            ((float *)a->bias.data)[row * keys + key] =
                row % 5 == 2 ? key % 4 == 1 ? -2.0e38f : -3.0e38f : shown ? 0.5f : -INFINITY;
        }
    for (size_t k = 0; k < sizeof made / sizeof *made; k++) {
        memset(a->out.data, 0x7f, (size_t)(2 * queries * a->out.stride[2]) * 2);
        for (int64_t row = 0; row < 2 * 3 * queries; row++) lse[row] = row % (3 * queries) % 5 < 3 ? made[k] : 1.5f;
        te_cuda_plan_attention_unseen(&plan, a);
        CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message);
        te_cuda_plan_attention_raised(&plan, &a->lse, raised);
        CHECK_MSG(cuda_plan_run(&cuda, &plan) == TE_OK, "%s", cuda.exec.message);
        for (int64_t row = 0; row < 2 * 3 * queries; row++) {
            int kind = (int)(row % (3 * queries) % 5);
            bool unseen = kind == 0, mean = kind == 2 && !(fabsf(made[k]) <= 3.0e38f);
            float wanted = unseen ? -INFINITY : mean ? -2.0e38f : kind < 3 ? made[k] : 1.5f;
            const uint16_t *out = (uint16_t *)a->out.data + row / queries / 3 * a->out.stride[0] +
                                  row / queries % 3 * a->out.stride[1] + row % queries * a->out.stride[2];
            CHECK_MSG(memcmp(&lse[row], &wanted, 4) == 0, "%g in row %d", (double)lse[row], (int)row);
            CHECK_MSG(isnan(wanted) || raised[row] == (wanted < -1e8f ? 1e30f : wanted), "%g raised in row %d",
                      (double)raised[row], (int)row);
            for (int64_t d = 0; d < 24; d++) {
                const uint16_t *v = (uint16_t *)a->v.data + row / queries / 3 * a->v.stride[0] + d;
                int64_t key = row % queries + 43, end = key + 8 < keys ? key + 8 : keys;
                double sum = 0, n = 0;
                for (; key < end; key++)
                    if (key % 4 == 1) sum += te_bf16_to_f32(v[key * a->v.stride[2]]), n++;
                double off = mean ? fabs(te_bf16_to_f32(out[d]) - sum / n) : 0;
                CHECK_MSG(mean ? off < 0.01 : out[d] == (unseen ? 0 : 0x7f7f), "%g off in row %d", off, (int)row);
            }
            CHECK(out[24] == 0x7f7f); /* between rows */
        }
    }
    release(&g);
}

int main(void)
{
    cuda = (cuda_device){.exec = test_exec_open(1), .multiprocessors = 2};
    nvrtc_open(&cuda.nvrtc);
    check_dtypes();
    for (int i = 0; i < 3; i++) {
        static const te_dtype dtypes[3] = {TE_F32, TE_BF16,
                                           TE_F16}; /* the 16-bit ones take the tensor cores' kernels */
        gap = i < 2 ? 2 : 8;
        check_masks(dtypes[i]);
        check_packed(dtypes[i]);
        check_bias_and_dropout(dtypes[i]);
        check_dropout(dtypes[i]);
        if (i > 0) check_decoding(dtypes[i]);
    }
    check_all_quantized();
    check_hostile();
    check_grids();
    check_tiles();
    check_unseen();
    fprintf(stderr, "%d sources through NVRTC\n", cuda.nvrtc.compiled);
    test_exec_close(&cuda.exec);
    return TEST_END();
}
