/* test_quantize_panels.c - whole matrices, longer and wider than panels: what this machine's instruction sets and two
 * threads make of them against the bytes that every machine makes with one. */
#include "core/quantizer.h"
#include "kernels/cpu/cpu.h"
#include "quantizers.h"
#include "test.h"

enum { ROOM = 1 << 21 };

static _Alignas(64) uint8_t data[2][2][ROOM], factors[2][2][ROOM];
static float amaxes[2][2];
static float floats[ROOM];
static uint64_t state = 0x9e3779b97f4a7c15u;

/* Of a thousand values, `wild` are any bits. */
static void fill(te_dtype dtype, int64_t n, int wild)
{
    uint16_t *halves = (uint16_t *)(void *)floats;
    for (int64_t i = 0; i < n; i++) {
        float x = (float)test_uniform(&state, -4, 4);
        bool any = test_random(&state) % 1000 < (uint64_t)wild;
        uint32_t bits = (uint32_t)test_random(&state);
        if (dtype == TE_F32)
            floats[i] = any ? te_f32_from_bits(bits) : x;
        else
            halves[i] = any ? (uint16_t)bits : dtype == TE_BF16 ? te_f32_to_bf16(x) : te_f32_to_f16(x);
    }
}

static void quantize(te_exec *exec, te_quantize_job job, int to, int sides)
{
    for (int s = 0; s < 2; s++) {
        const te_quantizer *q = job.quantizer;
        te_quantized_layout l = te_quantizer_layout(q, s, job.rows, job.cols);
        memset(data[to][s], 0xa5, ROOM);
        memset(factors[to][s], 0xa5, ROOM);
        amaxes[to][s] = 0;
        if (!(sides >> s & 1)) continue;
        job.side[s] = (te_quantized_side){
            .data = data[to][s], .rows = l.rows, .cols = l.cols, .row_stride = l.row_stride, .col_stride = l.col_stride,
            .scale_inv = factors[to][s], .scale_row_stride = l.scale_row_stride, .scale_col_stride = l.scale_col_stride,
            .amax = l.amaxes < 0 ? NULL : &amaxes[to][s], .rng = {.seed = 7, .offset = s ? 1u << 20 : 0}};
    }
    CHECK(te_backend_cpu.quantize(exec, &job) == TE_OK);
}

static void check(te_exec *exec, te_cpu_isa isa, bool vbmi, te_quantize_job job, const char *what)
{
    te_cpu_device *device = te_cpu(exec);
    for (int sides = 1; sides < 4; sides++) {
        device->isa = TE_CPU_PORTABLE;
        device->has_vbmi = false;
        exec->threads = 1;
        quantize(exec, job, 1, sides);
        for (int way = 0; way < 3; way++) { /* two threads, without the latest extensions, AVX2 */
            device->isa = way == 2 && isa == TE_CPU_AVX512 ? TE_CPU_AVX2 : isa;
            device->has_vbmi = way == 0 && vbmi;
            exec->threads = way == 0 ? 2 : 1;
            quantize(exec, job, 0, sides);
            for (int s = 0; s < 2; s++)
                CHECK_MSG(memcmp(data[0][s], data[1][s], ROOM) == 0 &&
                              memcmp(factors[0][s], factors[1][s], ROOM) == 0 &&
                              memcmp(&amaxes[0][s], &amaxes[1][s], sizeof(float)) == 0,
                          "%s, %lld x %lld, dtype %d, sides %d, side %d, way %d", what, (long long)job.rows,
                          (long long)job.cols, (int)job.dtype, sides, s, way);
        }
    }
}

static void check_apart(te_exec *exec, const te_quantize_job *job, const char *what)
{
    for (exec->threads = 1; exec->threads <= 2; exec->threads++) {
        quantize(exec, *job, 0, 3);
        for (int s = 0; s < 2; s++) {
            quantize(exec, *job, 1, 1 << s);
            CHECK_MSG(memcmp(data[0][s], data[1][s], ROOM) == 0 && memcmp(factors[0][s], factors[1][s], ROOM) == 0,
                      "%s, %lld x %lld, dtype %d, side %d, %d threads", what, (long long)job->rows,
                      (long long)job->cols, (int)job->dtype, s, exec->threads);
        }
    }
}

/* Sides made together have the bytes of sides made apart, also where codes that serve both are kept on their way. */
static void test_apart(te_exec *exec)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    static const int64_t shapes[][2] = {{2053, 576}, {1100, 1024}, {300, 4992}, {1031, 1088}, {260, 5000}};
    te_cpu(exec)->quantize_keeps_from = 0; /* as of tensors that no cache holds */
    for (int k = 0; k < 5; k++)
        for (int r = 0; r < QUANTIZER_RECIPES; r++) {
            const struct quantizer_recipe *recipe = &quantizer_recipes[r];
            te_quantize_job job = {.quantizer = &recipe->q[k % 3], .source = floats, .dtype = dtypes[(k + r) % 3],
                                   .rows = shapes[k][0], .cols = shapes[k][1], .source_stride = shapes[k][1],
                                   .scale = 64};
            if (job.quantizer->row_scaled) continue;
            fill(job.dtype, job.rows * job.cols, k % 2);
            check_apart(exec, &job, recipe->name);
        }
}

/* The same where both factors lose about as much: the sides add the errors of a square in another order, and in one of
 * several hundreds of these they choose different factors. */
static void test_close_errors(te_exec *exec)
{
    int checked = 0;
    for (int k = 0; k < 3 * QUANTIZER_RECIPES; k++) {
        te_quantize_job job = {.quantizer = &quantizer_recipes[k / 3].q[k % 3], .source = floats, .dtype = TE_F32,
                               .rows = 515, .cols = 1090, .source_stride = 1090};
        if (job.quantizer->four_over_six == TE_46_NONE || job.quantizer->block_rows != 16) continue;
        for (int64_t i = 0; i < job.rows * job.cols; i++) {
            int steps = (int)(test_random(&state) % 49) - 24;
            bool corner = i / job.cols % 16 == 0 && i % job.cols % 16 == 0;
            floats[i] = 0.2f * (float)(corner ? 24 : test_random(&state) % 16 == 0 ? steps : 0);
        }
        check_apart(exec, &job, quantizer_recipes[k / 3].name);
        checked++;
    }
    CHECK(checked > 0);
}

int main(void)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    static const int64_t shapes[][2] = {{258, 5200}, {131, 9217}, {129, 1111}, {523, 384}};
    te_exec exec = test_exec_open(2);
    te_cpu_isa isa = te_cpu(&exec)->isa;
    bool vbmi = te_cpu(&exec)->has_vbmi;
    for (int k = 0; k < 12; k++)
        for (int r = 0; r < QUANTIZER_RECIPES; r++) {
            const struct quantizer_recipe *recipe = &quantizer_recipes[r];
            const te_quantizer *q = &recipe->q[(k + k / 3 + r) % 3];
            te_quantize_job job = {.quantizer = q, .source = floats, .dtype = dtypes[k % 3], .rows = shapes[k / 3][0],
                                   .cols = shapes[k / 3][1], .source_stride = shapes[k / 3][1], .scale = 64};
            if (q->row_scaled) continue;
            fill(job.dtype, job.rows * job.cols, (k + r) % 2 * (k < 9 ? 1 : 20));
            check(&exec, isa, vbmi, job, recipe->name);
        }
    test_apart(&exec);
    test_close_errors(&exec);
    test_exec_close(&exec);
    return TEST_END();
}
