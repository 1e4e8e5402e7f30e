/* test_rotate.c - pairs turned by angles: on every instruction set and with any number of threads the bits of the
 * formula, operation by operation, for rows of every length, side by side and scattered. */
#include "kernels/cpu/cpu.h"
#include "kernels/dtype.h"
#include "test.h"

enum { BATCH = 2, TOKENS = 7, HEADS = 3, MOST = 70, ROWS = BATCH * TOKENS * HEADS, ROOM = ROWS * 4 * MOST };

static char     x[ROOM * sizeof(float)], y[ROOM * sizeof(float)];
static float    cosines[TOKENS * MOST], sines[TOKENS * MOST];
static uint64_t seed = 31;

/* What stands `at` elements from there, rounded to dtype and back. */
static float value(const void *data, te_dtype dtype, int64_t at)
{
    return (float)te_load_f64(data, dtype, at);
}

static float rounded(te_dtype dtype, float v)
{
    if (dtype == TE_BF16) return te_bf16_to_f32(te_f32_to_bf16(v));
    return dtype == TE_F16 ? te_f16_to_f32(te_f32_to_f16(v)) : v;
}

static bool same(float a, float b) { return te_f32_bits(a) == te_f32_bits(b) || (a != a && b != b); }

/* A part of rows {batch, tokens, heads, 2 n}, every so many elements from `first` on. */
static te_view part(void *data, te_dtype dtype, int64_t n, int64_t first, int64_t every)
{
    int64_t row = 2 * n;
    te_view v = {.data = (char *)data + first * (int64_t)te_dtype_size(dtype), .dtype = dtype, .ndim = 4,
                 .shape = {BATCH, TOKENS, HEADS, n},
                 .stride = {TOKENS * HEADS * row, HEADS * row, row, every}};
    return v;
}

static te_view table(float *data, int64_t n)
{
    return (te_view){.data = data, .dtype = TE_F32, .ndim = 4, .shape = {BATCH, TOKENS, HEADS, n},
                     .stride = {0, n, 0, 1}};
}

static void check(te_exec *exec, te_dtype dtype, int64_t n, bool interleaved, bool back)
{
    int64_t second = interleaved ? 1 : n, every = interleaved ? 2 : 1;
    te_rotation r = {part(x, dtype, n, 0, every), part(x, dtype, n, second, every), part(y, dtype, n, 0, every),
                     part(y, dtype, n, second, every), table(cosines, n), table(sines, n), back};
    for (int64_t i = 0; i < 2 * n * ROWS; i++) te_store_f64(x, dtype, i, test_uniform(&seed, -3, 3));
    for (int64_t i = 0; i < TOKENS * n; i++) {
        cosines[i] = (float)test_uniform(&seed, -1, 1);
        sines[i] = (float)test_uniform(&seed, -1, 1);
    }
    if (n > 2) te_store_f64(x, dtype, 1, NAN), te_store_f64(x, dtype, 2, INFINITY);
    memset(y, 0x77, sizeof y);
    CHECK(te_cpu_rotate(exec, &r) == TE_OK);
    int wrong = 0;
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = row * 2 * n + k * every, other = at + second, angle = row / HEADS % TOKENS * n + k;
            float   a = value(x, dtype, at), b = value(x, dtype, other), c = cosines[angle];
            float   s = back ? -sines[angle] : sines[angle], ac = a * c, bs = b * s, bc = b * c, as = a * s;
            wrong += !same(value(y, dtype, at), rounded(dtype, ac - bs));
            wrong += !same(value(y, dtype, other), rounded(dtype, bc + as));
        }
    CHECK_MSG(wrong == 0, "%s, %d threads, %s: %d of %lld pairs%s%s", te_cpu_isa_name(te_cpu(exec)->isa), exec->threads,
              te_dtype_name(dtype), wrong, (long long)n, interleaved ? ", interleaved" : "", back ? ", back" : "");
}

int main(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    te_exec exec = test_exec_open(1);
    te_cpu_isa best = te_cpu(&exec)->isa;
    for (int isa = 0; isa <= (int)best; isa++) {
        te_cpu(&exec)->isa = (te_cpu_isa)isa;
        for (int d = 0; d < 3; d++)
            for (int64_t n = 0; n <= MOST; n++) {
                exec.threads = 1 + (int)n % 3;
                check(&exec, dtypes[d], n, false, n % 2);
                check(&exec, dtypes[d], n, true, n % 3 == 0);
            }
    }
    te_cpu(&exec)->isa = best;
    te_view odd = part(x, TE_F64, 4, 0, 1);
    te_rotation refused = {odd, odd, odd, odd, table(cosines, 4), table(sines, 4), false};
    CHECK(te_cpu_rotate(&exec, &refused) == TE_ERROR_UNSUPPORTED);
    test_exec_close(&exec);
    return TEST_END();
}
