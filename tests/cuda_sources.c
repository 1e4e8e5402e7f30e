/* cuda_sources.c - writes the CUDA sources of a training step, generated and hand-written, into a folder, one file
 * each: for nvcc to compile and report on (target cuda_kernels). `cuda_sources FOLDER`, or `cuda_sources FOLDER rest`
 * for those alone that the build has not compiled and looked at (ready/make_ready.c). */
#include "core/program_build.h"
#include "kernels/cuda/ready.h"
#include "quantizers.h"
#include "test.h"

/* A program and the space it runs on; every operand is dense, or a row vector where named so. */
typedef struct sample {
    const char    *name, *text;
    int            n_inputs, n_params, n_outputs;
    const char    *inputs[6], *params[8], *outputs[5];
    te_rate        rates[6];
    uint8_t        vectors;    /* bit i: input i is a row vector */
    te_output_kind kinds[5];
    te_dtype       dtype;      /* of all operands */
    int64_t        rows, columns;
    enum { PLAIN, TURNED, QUANTIZED } how; /* input 0 is transposed; output 0 is left as FP8 */
    int            runs;
} sample;

#define ROW  TE_RATE_ROW
#define ELEM TE_RATE_ELEM

static const sample samples[] = {
    {"gelu", "y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x^3)))", 1, 0, 1, {"x"}, {0}, {"y"},
     {ELEM}, 0, {TE_OUT_ELEM}, TE_BF16, 4096, 3072, PLAIN, 1},
    {"gelu_backward_bias", "t = tanh(0.7978845608028654 * (x + 0.044715 * x^3)); dx = dy * (0.5 * (1 + t) + 0.5 * x * "
     "(1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)); db = dx",
     2, 0, 2, {"x", "dy"}, {0}, {"dx", "db"}, {ELEM, ELEM}, 0, {TE_OUT_ELEM, TE_OUT_COLSUM}, TE_BF16, 4096, 3072,
     PLAIN, 1},
    {"residual_dropout", "y = r + x * keep(p) / (1 - p)", 2, 1, 1, {"x", "r"}, {"p"}, {"y"}, {ELEM, ELEM}, 0,
     {TE_OUT_ELEM}, TE_BF16, 4096, 768, PLAIN, 1},
    {"layer_norm", "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * gamma + beta",
     3, 1, 3, {"x", "gamma", "beta"}, {"eps"}, {"y", "mean", "rstd"}, {ELEM, ELEM, ELEM}, 6,
     {TE_OUT_ELEM, TE_OUT_ROW, TE_OUT_ROW}, TE_BF16, 4096, 768, PLAIN, 1},
    {"layer_norm_wide",
     "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * gamma + beta",
     3, 1, 3, {"x", "gamma", "beta"}, {"eps"}, {"y", "mean", "rstd"}, {ELEM, ELEM, ELEM}, 6,
     {TE_OUT_ELEM, TE_OUT_ROW, TE_OUT_ROW}, TE_BF16, 4096, 12288, PLAIN, 1},
    {"layer_norm_shared",
     "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * gamma + beta",
     3, 1, 3, {"x", "gamma", "beta"}, {"eps"}, {"y", "mean", "rstd"}, {ELEM, ELEM, ELEM}, 6,
     {TE_OUT_ELEM, TE_OUT_ROW, TE_OUT_ROW}, TE_BF16, 2, 1 << 20, PLAIN, 1},
    {"layer_norm_backward", "h = (x - mean) * rstd; g = dy * gamma; dx = rstd * (g - rowmean(g) - h * rowmean(g * h)); "
     "dgamma = dy * h; dbeta = dy",
     5, 0, 3, {"x", "dy", "gamma", "mean", "rstd"}, {0}, {"dx", "dgamma", "dbeta"}, {ELEM, ELEM, ELEM, ROW, ROW}, 4,
     {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_COLSUM}, TE_BF16, 4096, 768, PLAIN, 1},
    {"layer_norm_backward_wide",
     "h = (x - mean) * rstd; g = dy * gamma; dx = rstd * (g - rowmean(g) - h * rowmean(g * h)); "
     "dgamma = dy * h; dbeta = dy",
     5, 0, 3, {"x", "dy", "gamma", "mean", "rstd"}, {0}, {"dx", "dgamma", "dbeta"}, {ELEM, ELEM, ELEM, ROW, ROW}, 4,
     {TE_OUT_ELEM, TE_OUT_COLSUM, TE_OUT_COLSUM}, TE_BF16, 4096, 12288, PLAIN, 1},
    {"softmax", "e = exp(x - rowmax(x)); y = e / rowsum(e)", 1, 0, 1, {"x"}, {0}, {"y"}, {ELEM}, 0, {TE_OUT_ELEM},
     TE_BF16, 4096, 1024, PLAIN, 1},
    {"softmax_shared", "e = exp(x - rowmax(x)); y = e / rowsum(e)", 1, 0, 1, {"x"}, {0}, {"y"}, {ELEM}, 0,
     {TE_OUT_ELEM}, TE_BF16, 2, 1 << 20, PLAIN, 1},
    {"sum_shared", "y = rowsum(x)", 1, 0, 1, {"x"}, {0}, {"y"}, {ELEM}, 0, {TE_OUT_ROW}, TE_F32, 1, 1 << 24, PLAIN, 1},
    {"cross_entropy", "m = rowmax(x); s = log(rowsum(exp(x - m))); "
     "loss = where(t >= 0, s - (rowsum(where(column() == t, x, 0)) - m), 0)",
     2, 0, 3, {"x", "t"}, {0}, {"loss", "m", "s"}, {ELEM, ROW}, 0, {TE_OUT_ROW, TE_OUT_ROW, TE_OUT_ROW}, TE_F32, 4096,
     50257, PLAIN, 1},
    {"cross_entropy_backward", "dx = where(t >= 0, dloss, 0) * (exp(x - m - s) - (column() == t))", 5, 0, 1,
     {"x", "t", "m", "s", "dloss"}, {0}, {"dx"}, {ELEM, ROW, ROW, ROW, ROW}, 0, {TE_OUT_ELEM}, TE_BF16, 4096, 50304,
     PLAIN, 1},
    {"transpose", "y = x", 1, 0, 1, {"x"}, {0}, {"y"}, {ELEM}, 0, {TE_OUT_ELEM}, TE_BF16, 4096, 768, TURNED, 1},
    {"adamw",
     "m2 = m * beta1 + g * fresh1; f = g * fresh2_root; v2 = v * beta2 + f * f; p2 = p * decay - m2 * step_size / "
     "(sqrt(v2) + eps)",
     4, 7, 3, {"p", "g", "m", "v"}, {"decay", "step_size", "beta1", "beta2", "fresh1", "fresh2_root", "eps"},
     {"p2", "m2", "v2"},
     {ELEM, ELEM, ELEM, ELEM}, 0, {TE_OUT_ELEM, TE_OUT_ELEM, TE_OUT_ELEM}, TE_F32, 1, 768 * 768, PLAIN, 148},
    {"gelu_backward_bias_quantized",
     "t = tanh(0.7978845608028654 * (x + 0.044715 * x^3)); dx = dy * (0.5 * (1 + t) + 0.5 * x * "
     "(1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)); db = dx",
     2, 0, 2, {"x", "dy"}, {0}, {"dx", "db"}, {ELEM, ELEM}, 0, {TE_OUT_ELEM, TE_OUT_COLSUM}, TE_BF16, 4096, 3072,
     QUANTIZED, 1},
    {"layer_norm_quantized", "mean = rowmean(x); d = x - mean; rstd = rsqrt(rowmean(d * d) + eps); y = d * rstd * "
                             "gamma + beta",
     3, 1, 3, {"x", "gamma", "beta"}, {"eps"}, {"y", "mean", "rstd"}, {ELEM, ELEM, ELEM}, 6,
     {TE_OUT_ELEM, TE_OUT_ROW, TE_OUT_ROW}, TE_BF16, 4096, 4096, QUANTIZED, 1},
    {"sum_squares", "y = x * x", 1, 0, 1, {"x"}, {0}, {"y"}, {ELEM}, 0, {TE_OUT_SUM}, TE_F32, 1, 768 * 768, PLAIN, 148},
};

static int write_text(const char *folder, const char *name, const te_text *text)
{
    char  path[512];
    snprintf(path, sizeof path, "%s/%s.cu", folder, name);
    FILE *out = fopen(path, "w");
    if (!out || fwrite(text->data, 1, text->length, out) != text->length || fclose(out) != 0) {
        fprintf(stderr, "cannot write %s\n", path);
        return 1;
    }
    return 0;
}

static int write_sample(te_exec *exec, const char *folder, const sample *s)
{
    te_formula     formula = {.text = s->text,
                              .n_inputs = s->n_inputs,
                              .n_params = s->n_params,
                              .n_outputs = s->n_outputs,
                              .input_names = s->inputs,
                              .input_rates = s->rates,
                              .param_names = s->params,
                              .output_names = s->outputs};
    te_build_error error;
    te_program    *program = te_formula_compile(&te_mem_libc, s->name, &formula, &error);
    te_operand     in[6], out[5];
    double         params[9] = {0};
    te_rng         rngs[4] = {{0}};
    te_run         runs[160];
    te_text        text;
    te_cuda_program_shape shape;
    if (!program) {
        fprintf(stderr, "%s does not compile\n", s->name);
        return 1;
    }
    /* a run is only described: addresses need but be aligned */
    for (int i = 0; i < s->n_inputs; i++) {
        in[i] = (te_operand){.data = (void *)(uintptr_t)4096, .dtype = s->dtype, .stride = {s->columns, 1}};
        if (s->vectors >> i & 1) in[i].stride[0] = 0;
        if (s->rates[i] == ROW) in[i] = (te_operand){.data = in[i].data, .dtype = TE_F32, .stride = {1, 0}};
    }
    if (s->how == TURNED) in[0].stride[0] = 1, in[0].stride[1] = s->rows;
    for (int o = 0; o < s->n_outputs; o++) {
        program->outputs[o].kind = (uint8_t)s->kinds[o];
        out[o] = (te_operand){.data = (void *)(uintptr_t)4096, .dtype = s->kinds[o] == TE_OUT_ELEM ? s->dtype : TE_F32,
                              .stride = {s->kinds[o] == TE_OUT_ELEM ? s->columns : 1, 1}};
    }
    const te_quantizer quantizer = {.element = TE_E4M3, .needs_history = true};
    te_quantize_job job = {.quantizer = &quantizer, .dtype = s->dtype, .rows = s->rows, .cols = s->columns};
    if (s->how == QUANTIZED) out[0] = (te_operand){.quantized = &job};
    for (int r = 0; r < s->runs; r++)
        runs[r] = (te_run){.ndim = 2, .shape = {s->rows, s->columns}, .inputs = in, .outputs = out,
                           .params = params, .rngs = rngs};
    te_text_open(&text, &te_mem_libc);
    te_status status = te_cuda_program_shape_make(exec, program, runs, &shape);
    te_cuda_program_batch(exec, program, &shape, runs, s->runs);
    if (status == TE_OK) status = te_cuda_program_source(program, &shape, &text);
    if (status != TE_OK) fprintf(stderr, "%s: %s\n", s->name, exec->message);
    int result = status == TE_OK ? write_text(folder, s->name, &text) : 1;
    te_text_close(&text);
    te_program_free(program);
    return result;
}

static bool leaves_ready; /* kernels that the build has compiled are left out */

/* Whether the build has compiled this source (kernels/ready_list.c). */
static bool is_ready(const te_text *text)
{
    bool found = false;
    for (const te_cuda_kernel *k = te_cuda_ready_list; k->file != TE_CUDA_FILE_COUNT && !found; k++) {
        te_text source;
        te_text_open(&source, &te_mem_libc);
        found = te_cuda_kernel_source(k, &source) == TE_OK && source.length == text->length &&
                memcmp(source.data, text->data, text->length) == 0;
        te_text_close(&source);
    }
    return found;
}

static int write_kernel(const char *folder, const char *name, te_cuda_kernel kernel)
{
    te_text text;
    te_text_open(&text, &te_mem_libc);
    int result = te_cuda_kernel_source(&kernel, &text) != TE_OK;
    if (!result && !(leaves_ready && is_ready(&text))) result = write_text(folder, name, &text);
    te_text_close(&text);
    return result;
}

/* Those of every recipe: of bfloat16, and the weight's of float32. Recipes share variants, by which files are named. */
static int write_quantizer(const char *folder, int recipe, int role)
{
    char     name[64];
    uint16_t variant = te_cuda_quantize_variant(&quantizer_recipes[recipe].q[role]);
    snprintf(name, sizeof name, "quantize_%04x", variant);
    int failed = write_kernel(folder, name,
                              (te_cuda_kernel){TE_CUDA_FILE_QUANTIZE, 0, {TE_BF16, TE_BF16}, 1, {variant, 0}, 0, 0});
    snprintf(name, sizeof name, "quantize_%04x_float32", variant);
    if (role == 1)
        failed += write_kernel(folder, name,
                               (te_cuda_kernel){TE_CUDA_FILE_QUANTIZE, 0, {TE_F32, TE_F32}, 1, {variant, 0}, 0, 0});
    return failed;
}

int main(int argc, char **argv)
{
    if (argc != 2 && !(argc == 3 && strcmp(argv[2], "rest") == 0)) {
        fprintf(stderr, "usage: cuda_sources FOLDER [rest]\n");
        return 2;
    }
    leaves_ready = argc == 3;
    te_exec exec = test_exec_open(1);
    int     failed = 0;
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) failed += write_sample(&exec, argv[1], &samples[i]);
    failed += write_kernel(argv[1], "index_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_INDEX, 0, {TE_F32, TE_F32}, 4, {0}, 0, 0});
    failed += write_kernel(argv[1], "index_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_INDEX, 0, {TE_BF16, TE_F32}, 4, {0}, 0, 0});
    failed += write_kernel(argv[1], "move_int32",
                           (te_cuda_kernel){TE_CUDA_FILE_MOVE, 0, {TE_I32, TE_I32}, 4, {0}, 0, 0});
    failed += write_kernel(argv[1], "move_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_MOVE, 0, {TE_BF16, TE_BF16}, 8, {0}, 0, 0});
    failed += write_kernel(argv[1], "add_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_ADD, 0, {TE_F32, TE_F32}, 4, {0}, 0, 0});
    failed += write_kernel(argv[1], "add_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_ADD, 0, {TE_BF16, TE_F32}, 4, {0}, 0, 0});
    failed += write_kernel(argv[1], "add_float64",
                           (te_cuda_kernel){TE_CUDA_FILE_ADD, 1, {TE_F64, TE_F64}, 2, {0}, 0, 0});
    failed += write_kernel(argv[1], "select_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_SELECT, 1, {TE_F32, TE_F32}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "select_int64",
                           (te_cuda_kernel){TE_CUDA_FILE_SELECT, 1, {TE_I64, TE_I64}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "select_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_SELECT, 0, {TE_BF16, TE_BF16}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "order_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_ORDER, 0, {TE_F32, TE_F32}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "order_int64",
                           (te_cuda_kernel){TE_CUDA_FILE_ORDER, 0, {TE_I64, TE_I64}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "routes_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_ROUTES, 0, {TE_BF16, TE_BF16}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "product_few_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_PRODUCT, 0, {TE_BF16, TE_BF16}, 8, {0}, 1 + TE_BF16, 0});
    failed += write_kernel(argv[1], "product_few_float8",
                           (te_cuda_kernel){TE_CUDA_FILE_PRODUCT, 0, {TE_F8E4M3, TE_F8E5M2}, 16, {0}, 1 + TE_F32, 0});
    failed += write_kernel(argv[1], "attention_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_F32, TE_F32}, 32, {0}, 0, 0});
    failed += write_kernel(argv[1], "attention_rounded",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_F8E4M3, TE_F8E4M3}, 32, {0}, 0, 0});
    failed += write_kernel(argv[1], "attention_mma_64",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 0, 0});
    failed += write_kernel(argv[1], "attention_mma_128",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_F16, TE_F16}, 8, {128, 128}, 0, 0});
    failed += write_kernel(argv[1], "attention_mma_bias",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 1 + TE_F32, 0});
    failed += write_kernel(argv[1], "attention_unseen",
                           (te_cuda_kernel){TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 0, {0}, 1 + TE_F16, 0});
    for (int warps = 4; warps <= 16; warps *= 2) {
        te_cuda_kernel decode = {TE_CUDA_FILE_ATTENTION, 0, {TE_BF16, TE_BF16}, 8, {64, 64}, 1 + TE_BF16, 0};
        char           name[32];
        decode.decode = (uint8_t)warps;
        if (warps == 8) decode.dim[0] = decode.dim[1] = 128;
        snprintf(name, sizeof name, "attention_decode_%d", warps);
        failed += write_kernel(argv[1], name, decode);
    }
    failed += write_kernel(argv[1], "quantize_bfloat16",
                           (te_cuda_kernel){TE_CUDA_FILE_QUANTIZE, 0, {TE_BF16, TE_BF16}, 1, {0}, 0, 0});
    failed += write_kernel(argv[1], "quantize_float32",
                           (te_cuda_kernel){TE_CUDA_FILE_QUANTIZE, 0, {TE_F32, TE_F32}, 1, {0}, 0, 0});
    for (int r = 0; r < QUANTIZER_RECIPES; r++)
        for (int q = 0; q < 3; q++) failed += write_quantizer(argv[1], r, q);
    test_exec_close(&exec);
    CHECK(failed == 0);
    return TEST_END();
}
