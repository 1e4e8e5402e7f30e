/* test_cuda_backend_quantize.c - quantized tensors on a CUDA device and their products, through the whole backend on
 * the machine that is made up: the bytes of the CPU, and the products of a linear layer within the rounding of their
 * sums, decoded or as bytes; which devices multiply which bytes; and what is kept of weights. */
#include "cuda_backend.h"

#include "core/product.h"
#include "core/quantized.h"
#include "core/recipe.h"
#include "quantizers.h"

static uint64_t seed = 0x9e3779b97f4a7c15u;

/* A tensor on the CPU and its copy on the device. */
static void make_pair(te_context *ctx, te_dtype dtype, int64_t rows, int64_t cols, te_tensor *pair[2])
{
    double *values = malloc((size_t)(rows * cols) * sizeof *values);
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = test_uniform(&seed, -2, 2) * exp2(test_uniform(&seed, -6, 0));
    pair[0] = te_tensor_empty(ctx, dtype, 2, (int64_t[]){rows, cols});
    if (!pair[0] || te_tensor_write(pair[0], TE_F64, values) != TE_OK) abort();
    pair[1] = te_tensor_on_device(pair[0], te_context_device(ctx, "cuda"));
    if (!pair[1]) abort();
    free(values);
}

static bool same_bytes(te_tensor *cpu, te_tensor *gpu)
{
    if (!cpu || !gpu) return cpu == gpu;
    te_tensor *back = te_tensor_on_device(gpu, cpu->storage->device);
    size_t bytes = (size_t)te_tensor_numel(cpu) * te_dtype_size(cpu->dtype);
    bool same = back && memcmp(te_tensor_data(back), te_tensor_data(cpu), bytes) == 0;
    te_tensor_release(back);
    return same;
}

static void quantize_pair(te_context *ctx, const char *name, const te_quantizer *q, int64_t rows, int64_t cols,
                          te_quantized out[2])
{
    te_tensor *x[2];
    uint64_t number = 3;
    te_quantize_options options = {.want = {true, true}, .scale = 11, .seed = &number};
    make_pair(ctx, TE_BF16, rows, cols, x);
    for (int i = 0; i < 2; i++)
        CHECK_MSG(te_quantize(x[i], q, &options, &out[i]) == TE_OK, "%s: %s", name, te_context_error(ctx));
    for (int s = 0; s < 2; s++) {
        CHECK_MSG(same_bytes(out[0].side[s].data, out[1].side[s].data), "%s: data of side %d", name, s);
        CHECK_MSG(same_bytes(out[0].side[s].scale_inv, out[1].side[s].scale_inv), "%s: factors of side %d", name, s);
        CHECK_MSG(same_bytes(out[0].side[s].amax, out[1].side[s].amax), "%s: amax of side %d", name, s);
        te_tensor *back[2] = {te_dequantize(ctx, &out[0], s), te_dequantize(ctx, &out[1], s)};
        CHECK_MSG(back[0] && same_bytes(back[0], back[1]), "%s: side %d back: %s", name, s, te_context_error(ctx));
        te_tensor_release(back[0]);
        te_tensor_release(back[1]);
    }
    te_tensor_release(x[0]);
    te_tensor_release(x[1]);
}

static bool fast_sums; /* of all products */
static double most_off = 1e-5; /* of sums, beside the largest */

static te_tensor *product(te_context *ctx, te_device *device, const char *name, te_view a, te_view b, te_dtype dtype)
{
    te_tensor *c = te_tensor_new(ctx, device, dtype, 2, (int64_t[]){a.shape[0], b.shape[1]});
    if (!c || te_tensor_fill(c, 0.25) != TE_OK) abort();
    te_gemm g = {.a = a, .b = b, .c = te_tensor_view(c), .alpha = -0.5f, .beta = 1, .fast_sums = fast_sums};
    CHECK_MSG(device->exec.backend->gemm(&device->exec, &g) == TE_OK, "%s on %s: %s", name, device->name,
              device->exec.message);
    return c;
}

/* c on both devices; `plain` stands for a where a is NULL. */
static void check_product(te_context *ctx, const char *name, const te_quantized *a, int side_a, te_tensor *const *plain,
                          const te_quantized *b, int side_b, te_dtype dtype)
{
    te_tensor *c[2];
    for (int i = 0; i < 2; i++) {
        te_quant quant[2];
        te_device *device = te_context_device(ctx, i ? "cuda" : "cpu");
        te_view va = a ? te_quantized_operand(&a[i], side_a, false, &quant[0]) : te_tensor_view(plain[i]);
        c[i] = product(ctx, device, name, va, te_quantized_operand(&b[i], side_b, true, &quant[1]), dtype);
    }
    int64_t n = te_tensor_numel(c[0]);
    double *values[2] = {malloc((size_t)n * sizeof(double)), malloc((size_t)n * sizeof(double))}, worst = 0, size = 0;
    for (int i = 0; i < 2; i++)
        if (te_tensor_read(c[i], TE_F64, values[i]) != TE_OK) abort();
    for (int64_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs(values[0][i] - values[1][i]));
        size = fmax(size, fabs(values[0][i]));
        if (isnan(values[1][i])) worst = INFINITY;
    }
    double most = size * fmax(most_off, dtype == TE_BF16 ? 0x1p-7 : dtype == TE_F16 ? 0x1p-10 : 0);
    CHECK_MSG(worst <= most, "%s into %s: off by %g of %g", name, te_dtype_name(dtype), worst, size);
    for (int i = 0; i < 2; i++) {
        free(values[i]);
        te_tensor_release(c[i]);
    }
}

static void close_pair(te_quantized z[2])
{
    te_quantized_close(&z[0]);
    te_quantized_close(&z[1]);
}

/* The products of a linear layer; how many were of bytes. */
static int count_narrow(te_context *ctx, const struct quantizer_recipe *r, int64_t tokens, int64_t in, int64_t out)
{
    te_quantized x[2], w[2], dy[2];
    uint64_t before = fake.count("narrow product");
    quantize_pair(ctx, r->name, &r->q[0], tokens, in, x);
    quantize_pair(ctx, r->name, &r->q[1], out, in, w);
    quantize_pair(ctx, r->name, &r->q[2], tokens, out, dy);
    check_product(ctx, r->name, x, 0, NULL, w, 0, TE_BF16);
    check_product(ctx, r->name, x, 0, NULL, w, 0, TE_F16);
    check_product(ctx, r->name, dy, 0, NULL, w, 1, TE_F32);
    check_product(ctx, r->name, dy, 1, NULL, x, 1, TE_F32);
    close_pair(x);
    close_pair(w);
    close_pair(dy);
    return (int)(fake.count("narrow product") - before);
}

static const char *const narrow_kinds[] = {"delayed", "current", "mxfp8", "mxfp8, square weight", "blocks", "nvfp4",
                                           "nvfp4, amax per row"};

/* Of four products each, how many a device of this compute capability takes as bytes, whatever the sizes are. Where the
 * sum must lie together MXFP8's column-wise copies do not go. */
static const struct narrow_device {
    int capability;
    int taken[sizeof narrow_kinds / sizeof *narrow_kinds];
} narrow_devices[] = {
    {80, {0}},
    {89, {4, 4}},
    {90, {4, 4, 0, 0, 4}},
    {100, {4, 4, 4, 4, 0, 4, 2}},
    {120, {4, 4, 2, 2, 0, 4, 2}},
};

/* Tokens, inputs and outputs: of blocks of 128, of 16 and of nothing. */
static const int64_t narrow_sizes[][3] = {{128, 128, 128}, {144, 128, 96}, {37, 50, 21}, {3, 130, 67}, {16, 33, 1}};

static void check_device(const struct narrow_device *device)
{
    fake.set_devices(1, device->capability);
    te_context *ctx = te_context_open(NULL);
    for (size_t k = 0; k < sizeof narrow_kinds / sizeof *narrow_kinds; k++)
        for (int r = 0; r < QUANTIZER_RECIPES; r++) {
            if (strcmp(quantizer_recipes[r].name, narrow_kinds[k]) != 0) continue;
            for (size_t s = 0; s < sizeof narrow_sizes / sizeof *narrow_sizes; s++) {
                const int64_t *size = narrow_sizes[s];
                int taken = count_narrow(ctx, &quantizer_recipes[r], size[0], size[1], size[2]);
                CHECK_MSG(taken == device->taken[k], "%s on %d, %lld tokens: %d products of bytes, expected %d",
                          narrow_kinds[k], device->capability, (long long)size[0], taken, device->taken[k]);
            }
        }
    te_context_release(ctx);
}

/* Products as Hopper's tensor cores add them up, which keep 13 bits behind the leading one. */
static void check_short_sums(void)
{
    fake.set_short_sums(true);
    most_off = 2e-3;
    check_device(&narrow_devices[2]);
    most_off = 1e-5;
    fake.set_short_sums(false);
}

/* A library that wants whole blocks of 128 gets them; one that wants no bytes of a shape, or says so when they are to
 * run, decoded operands. */
static void check_declined(void)
{
    enum { DECLINES = 15, BLOCKS = 4 }; /* CUBLAS_STATUS_NOT_SUPPORTED */
    static const char *const calls[] = {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"};
    fake.set_devices(1, 90);
    for (int i = 0; i < 2; i++) {
        te_context *ctx = te_context_open(NULL);
        for (int r = 0; r < QUANTIZER_RECIPES; r++) {
            bool blocks = strcmp(quantizer_recipes[r].name, narrow_kinds[BLOCKS]) == 0;
            if (!blocks && strcmp(quantizer_recipes[r].name, "current") != 0) continue;
            fake.fail_call(calls[i], 0, DECLINES);
            /* two of the four are one product, padded */
            int taken = count_narrow(ctx, &quantizer_recipes[r], 37, 50, 21);
            CHECK_MSG(taken == (blocks ? 4 : 2), "%s, %s declines: %d products of bytes", quantizer_recipes[r].name,
                      calls[i], taken);
        }
        fake.reset();
        te_context_release(ctx);
    }
}

/* --- what else a product of bytes has to do ----------------------------------------------------------------------- */

/* How the result lies: its strides in a tensor of {48, 53} or {32, 61}. */
typedef enum result_layout { DENSE, ODD_LINES, TURNED } result_layout;

/* c {32, 48} = x {32, 64} w^T (+ bias) (+ c), as doubles. */
static void narrow_case(te_context *ctx, int device, const te_quantized *x, const te_quantized *w, te_tensor *bias,
                        te_dtype dtype, result_layout layout, float beta, double *values)
{
    te_device *where = te_context_device(ctx, device ? "cuda" : "cpu");
    te_tensor *room = te_tensor_new(ctx, where, dtype, 1, (int64_t[]){3200});
    if (!room || te_tensor_fill(room, 0.25) != TE_OK) abort();
    int64_t stride[2] = {layout == DENSE ? 48 : layout == ODD_LINES ? 61 : 1, layout == TURNED ? 40 : 1};
    te_tensor *c = te_tensor_alias(room, 2, (int64_t[]){32, 48}, stride, 0);
    te_quant quant[2];
    te_gemm g = {.a = te_quantized_operand(&x[device], 0, false, &quant[0]),
                 .b = te_quantized_operand(&w[device], 0, true, &quant[1]),
                 .c = te_tensor_view(c),
                 .alpha = 0.5f,
                 .beta = beta};
    if (bias) g.bias = te_tensor_view(bias);
    CHECK_MSG(where->exec.backend->gemm(&where->exec, &g) == TE_OK, "%s", where->exec.message);
    if (te_tensor_read(c, TE_F64, values) != TE_OK) abort();
    te_tensor_release(c);
    te_tensor_release(room);
}

static void check_narrow_cases(int capability, const struct quantizer_recipe *r)
{
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    fake.set_devices(1, capability);
    te_context *ctx = te_context_open(NULL);
    te_quantized x[2], w[2];
    te_tensor *bias[2];
    double values[2][32 * 48];
    quantize_pair(ctx, r->name, &r->q[0], 32, 64, x);
    quantize_pair(ctx, r->name, &r->q[1], 48, 64, w);
    bias[0] = te_tensor_empty(ctx, TE_F32, 1, (int64_t[]){48});
    if (!bias[0] || te_tensor_fill(bias[0], 1.375) != TE_OK) abort();
    bias[1] = te_tensor_on_device(bias[0], te_context_device(ctx, "cuda"));
    uint64_t before = fake.count("narrow product");
    for (int k = 0; k < 36; k++) {
        te_dtype dtype = dtypes[k % 3];
        double worst = 0;
        for (int device = 0; device < 2; device++)
            narrow_case(ctx, device, x, w, k / 3 % 2 ? bias[device] : NULL, dtype, (result_layout)(k / 6 % 3),
                        (float)(k / 18), values[device]);
        for (int i = 0; i < 32 * 48; i++) worst = fmax(worst, fabs(values[0][i] - values[1][i]));
        double most = dtype == TE_F32 ? 2e-5 : dtype == TE_F16 ? 2e-2 : 0.13;
        CHECK_MSG(worst <= most, "%s, case %d: off by %g", r->name, k, worst);
    }
    CHECK(fake.count("narrow product") == before + 36);
    te_tensor_release(bias[0]);
    te_tensor_release(bias[1]);
    close_pair(x);
    close_pair(w);
    te_context_release(ctx);
}

/* The algorithm for a product that is worth it is measured once, by this process or another. */
static void check_kept_choices(void)
{
    int counted[2];
    fake.set_devices(1, 90);
    for (int i = 0; i < 2; i++) {
        te_context *ctx = te_context_open(NULL);
        counted[i] = count_narrow(ctx, &quantizer_recipes[0], 128, 256, 160);
        te_context_release(ctx);
    }
    CHECK_MSG(counted[0] > 4 && counted[1] == 4, "%d products, then %d", counted[0], counted[1]);
}

/* --- copies of weights that are kept ------------------------------------------------------------------------------ */

/* Kernels of a product with the weight on the device, whose result is compared with the CPU's. */
static int keyed_kernels(te_context *ctx, const te_quantized *x, const te_quantized *w)
{
    int64_t shape[2] = {x[0].shape[0], w[0].shape[0]}, n = shape[0] * shape[1];
    double *values[2], worst = 0;
    uint64_t launches = 0;
    for (int i = 0; i < 2; i++) {
        te_device *where = te_context_device(ctx, i ? "cuda" : "cpu");
        te_tensor *c = te_tensor_new(ctx, where, TE_BF16, 2, shape);
        te_quant quant[2];
        te_gemm g = {.a = te_quantized_operand(&x[i], 0, false, &quant[0]),
                     .b = te_quantized_operand(&w[i], 0, true, &quant[1]),
                     .c = te_tensor_view(c),
                     .alpha = 1,
                     .b_key = te_content_key(w[i].side[0].data)};
        launches = fake.count("cuLaunchKernel");
        CHECK_MSG(where->exec.backend->gemm(&where->exec, &g) == TE_OK, "%s", where->exec.message);
        launches = fake.count("cuLaunchKernel") - launches;
        values[i] = malloc((size_t)n * sizeof(double));
        if (te_tensor_read(c, TE_F64, values[i]) != TE_OK) abort();
        te_tensor_release(c);
    }
    for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs(values[0][i] - values[1][i]) / (1 + fabs(values[0][i])));
    CHECK_MSG(worst <= 0x1p-7, "off by %g", worst);
    free(values[0]);
    free(values[1]);
    return (int)launches;
}

/* The same weight with other values, in the memory it had. */
static void change_weight(te_quantized w[2])
{
    for (int i = 0; i < 2; i++) {
        te_tensor *data = w[i].side[0].data;
        size_t bytes = (size_t)te_tensor_numel(data);
        uint8_t *codes = malloc(bytes);
        if (te_tensor_read(data, TE_U8, codes) != TE_OK) abort();
        for (size_t k = 0; k < bytes; k++) codes[k] ^= 0x80; /* all of the other sign */
        if (te_tensor_write(data, TE_U8, codes) != TE_OK) abort();
        free(codes);
    }
}

/* A weight that comes again is padded, and its factors are arranged, at the first and at the second sight; never while
 * a graph is recorded; again when it has changed; and its copy goes with it. */
static void check_kept_copies(int capability, const char *name, int64_t in, int copies)
{
    fake.set_devices(1, capability);
    te_context *ctx = te_context_open(NULL);
    te_device *device = te_context_device(ctx, "cuda");
    te_exec *exec = &device->exec;
    size_t before = device->allocator.current;
    const struct quantizer_recipe *r = quantizer_recipes;
    while (strcmp(r->name, name) != 0) r++;
    te_quantized x[2], w[2];
    void *graph;
    quantize_pair(ctx, r->name, &r->q[0], 32, in, x);
    quantize_pair(ctx, r->name, &r->q[1], 21, in, w);
    size_t held = device->allocator.current;
    int first = keyed_kernels(ctx, x, w), second = keyed_kernels(ctx, x, w);
    CHECK_MSG(first == second && device->allocator.current > held, "%s: %d kernels, then %d", name, first, second);
    for (int i = 0; i < 3; i++)
        CHECK_MSG(keyed_kernels(ctx, x, w) == first - copies, "%s: the copies were not kept", name);
    change_weight(w);
    CHECK(keyed_kernels(ctx, x, w) == first && device->allocator.current == held);
    CHECK(keyed_kernels(ctx, x, w) == first && keyed_kernels(ctx, x, w) == first - copies);
    CHECK(exec->backend->capture_begin(exec) == TE_OK);
    te_quant quant[2];
    te_tensor *c = te_tensor_new(ctx, device, TE_BF16, 2, (int64_t[]){32, 21});
    te_gemm g = {.a = te_quantized_operand(&x[1], 0, false, &quant[0]),
                 .b = te_quantized_operand(&w[1], 0, true, &quant[1]),
                 .c = te_tensor_view(c), .alpha = 1, .b_key = te_content_key(w[1].side[0].data)};
    uint64_t launches = fake.count("cuLaunchKernel");
    CHECK(exec->backend->gemm(exec, &g) == TE_OK && fake.count("cuLaunchKernel") == launches + (uint64_t)first);
    CHECK(exec->backend->capture_end(exec, false, &graph) == TE_OK);
    te_tensor_release(c);
    close_pair(w);
    close_pair(x);
    CHECK_MSG(device->allocator.current == before, "%s: %zu bytes outlive the weight", name,
              device->allocator.current - before);
    te_context_release(ctx);
}

/* --- delayed scaling ---------------------------------------------------------------------------------------------- */

enum { STATES = 24, STEPS = 6 };

static te_tensor *floats_on(te_context *ctx, const char *device, int64_t n, const float *values)
{
    te_tensor *t = te_tensor_new(ctx, te_context_device(ctx, device), TE_F32, 1, &n);
    if (!t || te_tensor_write(t, TE_F32, values) != TE_OK) abort();
    return t;
}

/* Nothing, what is no number, and sizes up to those whose factor is too large for float32. */
static float random_amax(void)
{
    double draw = test_uniform(&seed, 0, 1);
    if (draw < 0.2) return 0;
    if (draw < 0.3) return INFINITY;
    if (draw < 0.4) return NAN;
    return (float)exp2(test_uniform(&seed, -140, 120));
}

/* The same state on the CPU and on the device. */
static void make_states(te_context *ctx, te_product_recipe *recipe, int64_t length, te_recipe_state *pair[2])
{
    float history[512], scale = 3;
    for (int64_t i = 0; i < length; i++) history[i] = i == 0 || random_amax() <= TE_FLT_MAX ? (float)i + 0.5f : 0;
    for (int i = 0; i < 2; i++) {
        pair[i] = te_recipe_state_new(ctx);
        if (!pair[i] || te_recipe_state_use(pair[i], recipe) != TE_OK) abort();
        te_tensor_release(pair[i]->scale[TE_ROLE_INPUT]);
        te_tensor_release(pair[i]->history[TE_ROLE_INPUT]);
        pair[i]->scale[TE_ROLE_INPUT] = floats_on(ctx, i ? "cuda" : "cpu", 1, &scale);
        pair[i]->history[TE_ROLE_INPUT] = floats_on(ctx, i ? "cuda" : "cpu", length, history);
    }
}

static void set_step(te_recipe_state *const pair[2], float amax)
{
    for (int i = 0; i < 2; i++) {
        te_tensor *history = pair[i]->history[TE_ROLE_INPUT];
        te_tensor *first = te_tensor_alias(history, 1, (int64_t[]){1}, (int64_t[]){1}, 0);
        if (!first || te_tensor_write(first, TE_F32, &amax) != TE_OK) abort();
        te_tensor_release(first);
    }
}

/* All in one kernel a step, with the bits of the rule on the host. */
static void check_delayed_updates(te_context *ctx)
{
    static const int64_t lengths[] = {1, 2, 3, 16, 257, 512};
    te_recipe_state *states[STATES][2];
    te_recipe_update updates[2 * STATES];
    for (int i = 0; i < STATES; i++) {
        te_product_recipe recipe = {.history_length = {lengths[i % 6]}, .quantized = {true}};
        recipe.quantizers[TE_ROLE_INPUT] = quantizer_recipes[0].q[i % 2 ? 2 : 0];
        te_product_recipe *made = te_product_recipe_new(ctx, &recipe);
        make_states(ctx, made, lengths[i % 6], states[i]);
        te_product_recipe_release(made);
        for (int k = 0; k < 2; k++)
            updates[2 * i + k] = (te_recipe_update){states[i][k], TE_ROLE_INPUT,
                                                    i % 4 < 2 ? TE_AMAX_MAX : TE_AMAX_MOST_RECENT, i % 3, NULL};
    }
    int skipped = 0;
    uint64_t launches = fake.count("cuLaunchKernel"), counted = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < STATES; i++) {
            float amax = random_amax();
            skipped += !(amax <= TE_FLT_MAX);
            set_step(states[i], amax);
        }
        CHECK(te_recipe_states_update(ctx, updates, 2 * STATES) == TE_OK);
    }
    CHECK(fake.count("cuLaunchKernel") == launches + STEPS);
    CHECK(te_recipe_skipped_amaxes(ctx, &counted) == TE_OK && counted == (uint64_t)(2 * skipped));
    for (int i = 0; i < STATES; i++) {
        te_recipe_state **s = states[i];
        CHECK_MSG(same_bytes(s[0]->scale[TE_ROLE_INPUT], s[1]->scale[TE_ROLE_INPUT]), "scale %d", i);
        CHECK_MSG(same_bytes(s[0]->history[TE_ROLE_INPUT], s[1]->history[TE_ROLE_INPUT]), "history %d", i);
        te_recipe_state_release(s[0]);
        te_recipe_state_release(s[1]);
    }
}

/* Copies are made again only where the factor that lies on the device is another one; their
 * amax counts all the same. */
static void check_kept(te_context *ctx)
{
    const te_quantizer *q = &quantizer_recipes[0].q[1];
    te_device *gpu = te_context_device(ctx, "cuda");
    te_tensor *x[2];
    te_quantized z[2], fresh;
    float more, factor = 7;
    make_pair(ctx, TE_BF16, 300, 200, x); /* several tiles */
    te_tensor *given = floats_on(ctx, "cuda", 1, &factor), *seen = floats_on(ctx, "cuda", 2, (float[]){0, 0});
    te_quantize_options options = {.want = {true, true}, .factor = given, .seen = seen};
    options.kept = floats_on(ctx, "cuda", 3, (float[]){7, 0, 1});
    CHECK(te_quantize(x[1], q, &options, &z[1]) == TE_OK);
    te_quantize_options plain = {.want = {true, true}, .scale = 7};
    CHECK(te_quantize(x[0], q, &plain, &z[0]) == TE_OK);
    CHECK(same_bytes(z[0].side[0].data, z[1].side[0].data)); /* the first time they are made whatever was kept */
    options.again = true;
    for (int i = 0; i < 4; i++) {
        float now[2], word = i < 2 ? 7.0f : 5.0f - (float)i;
        CHECK(te_tensor_write(given, TE_F32, &word) == TE_OK &&
              te_tensor_write(seen, TE_F32, (float[]){0, 0}) == TE_OK);
        CHECK(te_tensor_fill(z[1].side[0].data, 1) == TE_OK && te_tensor_fill(z[0].side[0].data, 1) == TE_OK);
        uint64_t launches = fake.count("cuLaunchKernel");
        CHECK(te_quantize(x[1], q, &options, &z[1]) == TE_OK);
        CHECK(fake.count("cuLaunchKernel") == launches + 1);
        CHECK(te_tensor_read(seen, TE_F32, now) == TE_OK);
        CHECK(te_tensor_read(z[0].side[0].amax, TE_F32, &more) == TE_OK && now[0] == more && more > 0);
        plain.scale = word;
        CHECK(te_quantize(x[0], q, &plain, &fresh) == TE_OK);
        CHECK(same_bytes(i < 2 ? z[0].side[0].data : fresh.side[0].data, z[1].side[0].data));
        CHECK(same_bytes(fresh.side[1].data, z[1].side[1].data) &&
              same_bytes(fresh.side[0].scale_inv, z[1].side[0].scale_inv));
        te_quantized_close(&fresh);
    }
    CHECK(gpu->exec.message[0] == 0);
    te_tensor *const all[] = {x[0], x[1], given, seen, options.kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) te_tensor_release(all[i]);
    close_pair(z);
}

/* Products by blocks promote their sums whatever is allowed. */
static void check_fast_sums(void)
{
    fake.set_devices(1, 90);
    te_context *ctx = te_context_open(NULL);
    fast_sums = true;
    uint64_t before = fake.count("fast product");
    CHECK(count_narrow(ctx, &quantizer_recipes[0], 128, 128, 128) == 0 && fake.count("fast product") == before + 4);
    CHECK(count_narrow(ctx, &quantizer_recipes[4], 128, 128, 128) == 4 && fake.count("fast product") == before + 4);
    fast_sums = false;
    te_context_release(ctx);
}

static void check_recipe(te_context *ctx, const struct quantizer_recipe *r, int number)
{
    te_quantized x[2], w[2], dy[2];
    te_tensor *plain[2];
    quantize_pair(ctx, r->name, &r->q[0], 37, 50, x);
    quantize_pair(ctx, r->name, &r->q[1], 21, 50, w);
    quantize_pair(ctx, r->name, &r->q[2], 37, 21, dy);
    check_product(ctx, r->name, x, 0, NULL, w, 0, TE_BF16);
    check_product(ctx, r->name, x, 0, NULL, w, 0, TE_F16);
    check_product(ctx, r->name, dy, 0, NULL, w, 1, TE_F32);
    check_product(ctx, r->name, dy, 1, NULL, x, 1, TE_F32);
    make_pair(ctx, (te_dtype[]){TE_F32, TE_BF16, TE_F16}[number % 3], 9, 50, plain);
    check_product(ctx, r->name, NULL, 0, plain, w, 0, TE_F32);
    te_tensor_release(plain[0]);
    te_tensor_release(plain[1]);
    close_pair(x);
    close_pair(w);
    close_pair(dy);
}

int main(void)
{
    fake_open();
    te_context *ctx = te_context_open(NULL);
    for (int r = 0; r < QUANTIZER_RECIPES; r++) check_recipe(ctx, &quantizer_recipes[r], r);
    check_delayed_updates(ctx);
    check_kept(ctx);
    te_context_release(ctx);
    for (size_t i = 0; i < sizeof narrow_devices / sizeof *narrow_devices; i++) check_device(&narrow_devices[i]);
    check_short_sums();
    check_declined();
    check_narrow_cases(90, &quantizer_recipes[1]);
    check_narrow_cases(100, &quantizer_recipes[2]);
    check_fast_sums();
    check_kept_choices();
    check_kept_copies(90, "current", 64, 1);
    check_kept_copies(90, "blocks", 130, 2);
    check_kept_copies(100, "mxfp8", 64, 2);
    fake_close();
    return TEST_END();
}
