/* test_fuser.c - groups without Lua: a pre-norm block as one group against the same operations one by one, gradients
 * that are kept, consumed and refused; test_fuser_memory.c has every allocation failing in turn. */
#include "failing_context.h"
#include "fuser_block.h"

/* --- against the operations one by one ---------------------------------------------------------------------------- */

/* a b, and in *size the same of the magnitudes. */
static double dot(const double *a, const double *b, double *size)
{
    double sum = *size = 0;
    for (int d = 0; d < WIDTH / HEADS; d++) sum += a[d] * b[d], *size += fabs(a[d] * b[d]);
    return sum;
}

/* A constant on all keys adds the same to every score of a row, which softmax does not see: the gradient of their bias
 * is zero, and what comes out is rounding. sums: that gradient in float64, from attention as it ran; magnitudes: of the
 * terms that cancel in it, q_i p_ij (dout_i v_j - dout_i out_i). */
static void keys_bias(te_tensor *const out[4], double sums[WIDTH], double magnitudes[WIDTH])
{
    enum { DIM = WIDTH / HEADS, ROWS = BATCH * TOKENS };
    static double qkv[ROWS][3][WIDTH], attended[ROWS][WIDTH], dout[ROWS][WIDTH];
    te_context *ctx = te_tensor_context(out[0]);
    te_tensor *seeds[2] = {te_op_apply(ctx, "add", 2, (te_tensor *[]){out[0], out[0]}),
                           te_tensor_full(ctx, out[1]->dtype, out[1]->ndim, out[1]->shape, 1)};
    te_tensor *grad = NULL; /* of sum(y0^2) + sum(y1) */
    CHECK(te_autograd_grad(ctx, out, seeds, 2, &out[3], &grad, 1, true) == TE_OK && grad);
    CHECK(te_tensor_read(out[2], TE_F64, qkv) == TE_OK && te_tensor_read(out[3], TE_F64, attended) == TE_OK &&
          te_tensor_read(grad, TE_F64, dout) == TE_OK);
    for (int c = 0; c < WIDTH; c++) sums[c] = magnitudes[c] = 0;
    for (int i = 0; i < HEADS * ROWS; i++) {
        int row = i / HEADS, first = row / TOKENS * TOKENS, at = i % HEADS * DIM;
        const double *q = qkv[row][0] + at, *g = dout[row] + at;
        double p[TOKENS], all = 0, score_size, mean_size, size, mean = dot(g, attended[row] + at, &mean_size);
        for (int j = 0; j < TOKENS; j++) all += p[j] = exp(dot(q, qkv[first + j][1] + at, &score_size) / sqrt(DIM));
        for (int j = 0; j < TOKENS; j++) {
            double dp = dot(g, qkv[first + j][2] + at, &size), weight = p[j] / all / sqrt(DIM);
            for (int d = 0; d < DIM; d++) {
                sums[at + d] += q[d] * weight * (dp - mean);
                magnitudes[at + d] += fabs(q[d]) * weight * (size + mean_size);
            }
        }
    }
    te_tensor_release(grad);
    te_tensor_release(seeds[0]);
    te_tensor_release(seeds[1]);
}

/* roundoff: of the dtype, half the distance from 1 to the next number. */
static void compare(te_dtype dtype, double roundoff, double tolerance)
{
    te_context *ctx = te_context_open(NULL);
    static double want[N_INPUTS][256], got[N_INPUTS][256], a[256], b[256];
    double keys[WIDTH], magnitudes[WIDTH];
    network net;
    te_tensor *out[4];
    CHECK(network_open(&net, ctx, dtype));
    te_context_set_rng_state(ctx, 5, 0);
    CHECK_MSG(run_singly(&net, out) == TE_OK, "%s", te_context_error(ctx));
    te_tensor_read(out[0], TE_F64, a);
    keys_bias(out, keys, magnitudes);
    CHECK(backward_of(out, false) == TE_OK);
    drop(out);
    drop(out + 2);
    read_grads(&net, want);
    te_group *group = make_group(ctx);
    te_context_set_rng_state(ctx, 5, 0);
    CHECK_MSG(group && te_group_run(group, net.in, out) == TE_OK, "%s", te_context_error(ctx));
    te_tensor_read(out[0], TE_F64, b);
    CHECK_MSG(memcmp(a, b, BATCH * TOKENS * WIDTH * sizeof *a) == 0, "results differ");
    CHECK_MSG(backward_of(out, false) == TE_OK, "%s", te_context_error(ctx));
    read_grads(&net, got);
    for (int c = 0; c < WIDTH; c++) { /* errors of either sign: a quarter of this was seen */
        double most = 2 * roundoff * magnitudes[c], *both[2] = {&want[4][WIDTH + c], &got[4][WIDTH + c]};
        CHECK_MSG(fabs(keys[c]) <= most, "bias of keys [%d]: %g in float64, which can be %g", c, keys[c], most);
        for (int i = 0; i < 2; i++) {
            CHECK_MSG(fabs(*both[i]) <= most, "bias of keys [%d]: %g, which can be %g", c, *both[i], most);
            *both[i] = 0;
        }
    }
    for (int i = 0; i < N_INPUTS; i++)
        for (int64_t k = 0; k < te_tensor_numel(net.in[i]); k++)
            CHECK_MSG(fabs(got[i][k] - want[i][k]) <= tolerance * (1 + fabs(want[i][k])), "gradient %d[%d]: %g, not %g",
                      i, (int)k, got[i][k], want[i][k]);
    CHECK(backward_of(out, false) != TE_OK && strstr(te_context_error(ctx), "retain_graph"));
    drop(out);
    te_group_release(group);
    network_close(&net);
    te_context_release(ctx);
}

/* --- what is kept ------------------------------------------------------------------------------------------------- */

static void test_retain_and_changes(void)
{
    te_context *ctx = te_context_open(NULL);
    static double once[N_INPUTS][256], twice[N_INPUTS][256];
    network net;
    te_tensor *out[2];
    CHECK(network_open(&net, ctx, TE_F64));
    te_group *group = make_group(ctx);
    CHECK(te_group_run(group, net.in, out) == TE_OK);
    te_group_release(group); /* the graph keeps what it needs */
    CHECK(backward_of(out, true) == TE_OK);
    read_grads(&net, once);
    CHECK(backward_of(out, false) == TE_OK);
    read_grads(&net, twice);
    for (int i = 0; i < N_INPUTS; i++)
        CHECK(memcmp(once[i], twice[i], (size_t)te_tensor_numel(net.in[i]) * sizeof(double)) == 0);
    drop(out);

    group = make_group(ctx);
    CHECK(te_group_run(group, net.in, out) == TE_OK);
    te_tensor *grad = NULL, *seed = te_tensor_full(ctx, TE_F64, 3, (int64_t[]){BATCH, TOKENS, WIDTH}, 1);
    CHECK(te_autograd_grad(ctx, out, &seed, 1, &net.in[7], &grad, 1, true) == TE_OK && grad); /* of one input alone */
    for (int i = 0; i < N_INPUTS; i++) CHECK(te_tensor_grad(net.in[i]) == NULL);
    te_tensor_release(grad);
    te_tensor_release(seed);

    te_context_set_grad_enabled(ctx, false); /* a saved weight changes */
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = net.in[7]}, {.kind = TE_ARG_NUMBER, .as.number = 2}};
    CHECK(te_op_run_inplace(ctx, te_op_find(ctx, "mul"), args, 2) == TE_OK);
    te_context_set_grad_enabled(ctx, true);
    CHECK(backward_of(out, false) != TE_OK && strstr(te_context_error(ctx), "changed in place"));
    drop(out);
    te_group_release(group);
    network_close(&net);
    te_context_release(ctx);
}

/* A gated operation halves rows; a parameter has none. */
static void test_halves_of_parameters(void)
{
    static const char *const names[] = {"swiglu", "geglu", "scaled_swiglu", "scaled_situglu"};
    te_context *ctx = te_context_open(NULL);
    for (int i = 0; i < 4; i++) {
        for (int ndim = 0; ndim < 2; ndim++) {
            te_group *group = te_group_new(ctx);
            int x = te_group_input(group, false), p = te_group_input(group, true), y, sum;
            te_group_call gate = {
                .op = te_op_find(ctx, names[i]),
                .values = {p, i < 2 ? TE_NO_VALUE : x, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE}};
            CHECK(te_group_op(group, &gate, &y) == TE_OK);
            te_group_call add = {.op = te_op_find(ctx, "add"),
                                 .values = {x, y, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE}};
            CHECK(te_group_op(group, &add, &sum) == TE_OK && te_group_output(group, sum) == TE_OK);
            te_tensor *in[2] = {te_tensor_full(ctx, TE_F32, 2, (int64_t[]){3, 4}, 1),
                                te_tensor_full(ctx, TE_F32, ndim, (int64_t[]){8}, 1)};
            te_tensor *out = NULL;
            CHECK(te_group_run(group, in, &out) == TE_ERROR_UNSUPPORTED && te_group_refused(group) && !out);
            te_tensor_release(in[0]);
            te_tensor_release(in[1]);
            te_group_release(group);
        }
    }
    te_context_release(ctx);
}

static void test_refusals(void)
{
    te_context *ctx = te_context_open(NULL);
    te_group *group = te_group_new(ctx);
    int x = te_group_input(group, false), y = te_group_input(group, false), sum;
    te_group_call call = {.op = te_op_find(ctx, "add"),
                          .values = {x, y, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE}};
    CHECK(te_group_op(group, &call, &sum) == TE_OK && te_group_output(group, sum) == TE_OK);
    te_tensor *in[2] = {te_tensor_full(ctx, TE_F32, 3, (int64_t[]){2, 3, 4}, 1),
                        te_tensor_full(ctx, TE_F32, 2, (int64_t[]){3, 1}, 1)};
    te_tensor *out;
    CHECK(te_group_run(group, in, &out) == TE_ERROR_UNSUPPORTED && te_group_refused(group) && !out);
    CHECK(strstr(te_context_error(ctx), "te.add: cannot be planned") != NULL);
    te_tensor *fits[2] = {in[0], te_tensor_retain(in[0])};
    CHECK(te_group_run(group, fits, &out) == TE_OK && !te_group_refused(group));
    te_tensor_release(out);
    CHECK(!te_group_accepts(ctx, te_op_find(ctx, "cat")) && !te_group_accepts(ctx, te_op_find(ctx, "gather")));
    call.values[0] = 77;
    CHECK(te_group_op(group, &call, &sum) != TE_OK && strstr(te_context_error(ctx), "no value 77"));
    te_group_release(group);
    te_tensor_release(fits[1]);
    te_tensor_release(in[0]);
    te_tensor_release(in[1]);
    te_context_release(ctx);
}

/* What is read once per row is one number, or one for every row. */
static void test_scales(void)
{
    static const struct {
        int       ndim;
        int64_t   shape[2];
        te_status status;
    } scales[] = {{1, {6}, TE_OK}, {1, {1}, TE_OK}, {0, {0}, TE_OK}, {1, {4}, TE_ERROR_UNSUPPORTED},
                  {2, {6, 4}, TE_ERROR_UNSUPPORTED}, {2, {1, 1}, TE_ERROR_UNSUPPORTED}};
    te_context *ctx = te_context_open(NULL);
    te_tensor *x = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){6, 4}, 1);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        te_group *group = te_group_new(ctx);
        int rows = te_group_input(group, false), scale = te_group_input(group, false), y;
        CHECK(te_group_apply(group, te_op_find(ctx, "scaled_srelu"), (int[]){rows, scale}, 2, NULL, 0, &y) == TE_OK);
        te_tensor *in[2] = {x, te_tensor_full(ctx, TE_F32, scales[i].ndim, scales[i].shape, 3)}, *out = NULL;
        CHECK(te_group_output(group, y) == TE_OK && te_group_run(group, in, &out) == scales[i].status);
        double values[24] = {0};
        if (out) CHECK(te_tensor_read(out, TE_F64, values) == TE_OK && values[0] == 3 && values[23] == 3);
        te_tensor_release(out);
        te_tensor_release(in[1]);
        te_group_release(group);
    }
    te_tensor_release(x);
    te_context_release(ctx);
}

/* With the functions of te.h alone: what operations one by one give, forward and backward, and mistakes. */
static void test_public(void)
{
    te_context *ctx = te_context_open(NULL);
    te_group *group = te_group_new(ctx);
    const te_op *norm = te_op_find(ctx, "rms_norm"), *silu = te_op_find(ctx, "silu");
    const te_arg attributes[] = {
        {.kind = TE_ARG_ABSENT}, {.kind = TE_ARG_ABSENT}, {.kind = TE_ARG_NUMBER, .as.number = 0.5}};
    int x = te_group_input(group, false), w = te_group_input(group, true), normed, y;
    CHECK(te_group_apply(group, norm, (int[]){x, w}, 2, attributes, 3, &normed) == TE_OK);
    CHECK(te_group_apply(group, silu, &normed, 1, NULL, 0, &y) == TE_OK && te_group_output(group, y) == TE_OK);
    CHECK(te_group_n_inputs(group) == 2 && te_group_n_outputs(group) == 1 && te_group_n_plans(group) == 0);
    te_tensor *in[2] = {te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){5, 24}),
                        te_tensor_full(ctx, TE_F32, 1, (int64_t[]){24}, 1.5)};
    te_tensor *apart = NULL, *sums[2] = {NULL, NULL}, *grad = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){5, 24}, 0.25);
    for (int i = 0; i < 120; i++) ((float *)te_tensor_data(in[0]))[i] = (float)(i * 37 % 41 - 20) / 8;
    float gradients[2][24];
    for (int i = 0; i < 2; i++) te_tensor_set_requires_grad(in[i], true);
    te_arg args[] = {
        {.kind = TE_ARG_TENSOR, .as.tensor = in[0]}, {.kind = TE_ARG_TENSOR, .as.tensor = in[1]}, attributes[2]};
    CHECK(te_op_run(ctx, norm, args, 3, &apart, 1) == TE_OK);
    args[0].as.tensor = apart;
    CHECK(te_op_run(ctx, silu, args, 1, &sums[0], 1) == TE_OK && te_group_run(group, in, &sums[1]) == TE_OK);
    CHECK(te_group_n_plans(group) == 1 && !te_group_refused(group));
    for (int i = 0; i < 2; i++) {
        te_tensor_set_grad(in[1], NULL);
        CHECK(te_backward(sums[i], grad, false) == TE_OK &&
              te_tensor_read(te_tensor_grad(in[1]), TE_F32, gradients[i]) == TE_OK);
    }
    for (int i = 0; i < 24; i++)
        CHECK(fabsf(gradients[0][i] - gradients[1][i]) <= 1e-5f * fabsf(gradients[0][i]) + 1e-6f);
    for (int i = 0; i < 120; i++)
        CHECK(fabsf(((float *)te_tensor_data(sums[0]))[i] - ((float *)te_tensor_data(sums[1]))[i]) <= 1e-6f);
    CHECK(te_group_apply(group, NULL, NULL, 0, NULL, 0, &y) == TE_ERROR_ARGUMENT && y == TE_NO_VALUE);
    CHECK(te_group_apply(group, silu, (int[]){x, w}, 2, NULL, 0, &y) == TE_ERROR_ARGUMENT &&
          strstr(te_context_error(ctx), "2 values"));
    CHECK(te_group_apply(group, silu, NULL, 0, NULL, 0, &y) == TE_ERROR_ARGUMENT &&
          strstr(te_context_error(ctx), "x is missing"));
    CHECK(te_group_apply(group, te_op_find(ctx, "grouped_biases"), &x, 1, NULL, 0, &y) == TE_ERROR_ARGUMENT);
    CHECK(te_group_apply(group, silu, (int[]){99}, 1, NULL, 0, &y) != TE_OK &&
          te_group_output(group, 99) == TE_ERROR_ARGUMENT);
    te_tensor *all[] = {in[0], in[1], apart, sums[0], sums[1], grad};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) te_tensor_release(all[i]);
    te_group_release(group);
    te_context_release(ctx);
}

/* A run that nobody can go back from keeps nothing. */
static void test_no_outputs(void)
{
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    te_group *group = te_group_new(ctx);
    te_tensor *t = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){2, 3}, 1);
    int x = te_group_input(group, false), y;
    CHECK(te_tensor_set_requires_grad(t, true) == TE_OK);
    CHECK(te_group_apply(group, te_op_find(ctx, "silu"), &x, 1, NULL, 0, &y) == TE_OK &&
          te_group_run(group, &t, NULL) == TE_OK);
    te_tensor_release(t);
    te_group_release(group);
    te_context_release(ctx);
    CHECK_MSG(f.live == 0, "%zu bytes leaked", f.live);
}

/* A group that has run and gets more of everything. */
static void test_extension(void)
{
    te_context *ctx = te_context_open(NULL);
    te_group *group = te_group_new(ctx);
    te_tensor *in[2] = {te_tensor_full(ctx, TE_F32, 2, (int64_t[]){3, 4}, 2),
                        te_tensor_full(ctx, TE_F32, 2, (int64_t[]){3, 4}, 5)};
    te_tensor *out[3] = {NULL};
    int x = te_group_input(group, false), y, z;
    CHECK(te_group_apply(group, te_op_find(ctx, "square"), &x, 1, NULL, 0, &y) == TE_OK);
    CHECK(te_group_output(group, y) == TE_OK && te_group_run(group, in, out) == TE_OK);
    te_tensor_release(out[0]);
    CHECK(te_group_apply(group, te_op_find(ctx, "add"), (int[]){y, te_group_input(group, false)}, 2, NULL, 0, &z) ==
              TE_OK &&
          te_group_output(group, z) == TE_OK && te_group_run(group, in, out) == TE_OK);
    for (int i = 0; i < 2; i++) {
        const float *values = out[i] ? te_tensor_data(out[i]) : NULL;
        CHECK_MSG(values && values[11] == (i ? 9 : 4), "output %d", i);
        te_tensor_release(out[i]);
    }
    CHECK(te_group_output(group, y) == TE_OK && te_group_run(group, in, out) == TE_OK);
    for (int i = 0; i < 3; i++) {
        CHECK(out[i] && ((const float *)te_tensor_data(out[i]))[0] == (i == 1 ? 9 : 4));
        te_tensor_release(out[i]);
    }
    CHECK(te_group_n_plans(group) == 1);
    for (int i = 0; i < 2; i++) te_tensor_release(in[i]);
    te_group_release(group);
    te_context_release(ctx);
}

int main(void)
{
    test_extension();
    compare(TE_F64, 0x1p-53, 1e-12);
    compare(TE_F32, 0x1p-24, 1e-5);
    compare(TE_BF16, 0x1p-9, 0.3);
    test_retain_and_changes();
    test_refusals();
    test_scales();
    test_halves_of_parameters();
    test_public();
    test_no_outputs();
    return TEST_END();
}
