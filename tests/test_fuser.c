/* test_fuser.c - groups without Lua: a pre-norm block as one group against the same operations one by one, gradients
 * that are kept, consumed and refused, and every allocation failing in turn. */
#include "failing_memory.h"
#include "test.h"

#include "core/autograd.h"
#include "core/fuser/describe.h"
#include "core/fuser/group.h"

#include <limits.h>

enum { BATCH = 2, TOKENS = 5, HEADS = 2, WIDTH = 8, HIDDEN = 12, N_PARAMS = 10, N_INPUTS = 1 + N_PARAMS };

/* x; norm weight, bias; qkv weight, bias; projection weight; norm weight; up weight, bias; down weight, bias */
static const int64_t shapes[N_INPUTS][4] = {
    {3, BATCH, TOKENS, WIDTH}, {1, WIDTH}, {1, WIDTH}, {2, 3 * WIDTH, WIDTH}, {1, 3 * WIDTH}, {2, WIDTH, WIDTH},
    {1, WIDTH}, {2, 2 * HIDDEN, WIDTH}, {1, 2 * HIDDEN}, {2, WIDTH, HIDDEN}, {1, WIDTH}};

typedef struct network {
    te_context *ctx;
    te_tensor  *in[N_INPUTS];
} network;

static bool network_open(network *net, te_context *ctx, te_dtype dtype)
{
    uint64_t state = 11;
    double values[3 * WIDTH * WIDTH + 2 * HIDDEN * WIDTH];
    *net = (network){.ctx = ctx};
    for (int i = 0; i < N_INPUTS; i++) {
        net->in[i] = te_tensor_empty(ctx, dtype, (int)shapes[i][0], shapes[i] + 1);
        if (!net->in[i]) return false;
        for (int64_t k = 0; k < te_tensor_numel(net->in[i]); k++) values[k] = test_uniform(&state, -1, 1);
        if (te_tensor_write(net->in[i], TE_F64, values) != TE_OK) return false;
        if (te_tensor_set_requires_grad(net->in[i], true) != TE_OK) return false;
    }
    return true;
}

static void network_close(network *net)
{
    for (int i = 0; i < N_INPUTS; i++) te_tensor_release(net->in[i]);
}

/* --- the block, described once and run in two ways ---------------------------------------------------------------- */

/* What a step of the description does: adds to a group, or runs. A value is an index into either's list. */
typedef struct builder {
    te_context *ctx;
    te_group   *group;     /* NULL: run */
    te_tensor  *made[32];  /* when running: results, owned */
    int         n;
    te_status   status;
} builder;

static int step(builder *b, const char *name, const int *values, int n_values, double attribute, int at)
{
    const te_op *op = te_op_find(b->ctx, name);
    te_arg args[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
    int result = b->n;
    if (b->status != TE_OK || !op) return 0;
    if (at >= 0) args[at] = (te_arg){.kind = TE_ARG_NUMBER, .as.number = attribute};
    if (b->group) {
        te_group_call call = {.op = op, .args = args, .n_args = op->n_params, .label = result};
        for (int i = 0; i < TE_OP_MAX_INPUTS; i++) call.values[i] = i < n_values ? values[i] : TE_NO_VALUE;
        b->status = te_group_op(b->group, &call, &result);
        return result;
    }
    for (int i = 0; i < n_values; i++)
        if (values[i] >= 0) args[i] = (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = b->made[values[i]]};
    b->status = te_op_run(b->ctx, op, args, op->n_params, &b->made[b->n], 1);
    return b->n++;
}

#define STEP(name, ...) step(b, name, (int[]){__VA_ARGS__}, (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)), 0, -1)

static int param_index(const char *op, const char *name, te_context *ctx)
{
    const te_op *o = te_op_find(ctx, op);
    for (int i = 0; o && i < o->n_params; i++)
        if (strcmp(o->params[i].name, name) == 0) return i;
    return -1;
}

/* The result, the sum in the middle, what attention takes and what it gives. Values 0 … N_INPUTS - 1 are the inputs. */
static void describe_block(builder *b, int results[4])
{
    int h = STEP("layer_norm", 0, 1, 2);
    results[2] = h = STEP("linear", h, 3, 4);
    results[3] = h =
        step(b, "self_attention", (int[]){h}, 1, HEADS, param_index("self_attention", "heads", b->ctx));
    h = STEP("linear", h, 5);
    h = step(b, "dropout", (int[]){h}, 1, 0.25, param_index("dropout", "p", b->ctx));
    int middle = STEP("add", 0, h);
    h = STEP("rms_norm", middle, 6);
    h = STEP("linear", h, 7, 8);
    h = STEP("swiglu", h);
    h = STEP("linear", h, 9, 10);
    results[0] = STEP("add", middle, h);
    results[1] = middle;
}

static te_group *make_group(te_context *ctx)
{
    builder b = {.ctx = ctx, .group = te_group_new(ctx)};
    int results[4];
    if (!b.group) return NULL;
    for (int i = 0; i < N_INPUTS && b.status == TE_OK; i++)
        if (te_group_input(b.group, i > 0) == TE_NO_VALUE) b.status = TE_ERROR_MEMORY;
    describe_block(&b, results);
    for (int i = 0; i < 2 && b.status == TE_OK; i++) b.status = te_group_output(b.group, results[i]);
    if (b.status == TE_OK) return b.group;
    te_group_release(b.group);
    return NULL;
}

static te_status run_singly(network *net, te_tensor *out[4])
{
    builder b = {.ctx = net->ctx, .n = N_INPUTS};
    int results[4];
    for (int i = 0; i < N_INPUTS; i++) b.made[i] = te_tensor_retain(net->in[i]);
    describe_block(&b, results);
    for (int i = 0; i < 4 && b.status == TE_OK; i++) out[i] = te_tensor_retain(b.made[results[i]]);
    for (int i = 0; i < b.n; i++) te_tensor_release(b.made[i]);
    return b.status;
}

/* sum(y0^2) + sum(y1), backwards. */
static te_status backward_of(te_tensor **out, bool retain)
{
    te_context *ctx = te_tensor_context(out[0]);
    te_tensor *square = te_op_apply(ctx, "mul", 2, (te_tensor *[]){out[0], out[0]});
    te_tensor *total = square ? te_op_apply(ctx, "add", 2, (te_tensor *[]){square, out[1]}) : NULL;
    te_tensor *loss = total ? te_op_apply(ctx, "sum", 1, &total) : NULL;
    te_status status = loss ? te_backward(loss, NULL, retain) : TE_ERROR_MEMORY;
    te_tensor_release(square);
    te_tensor_release(total);
    te_tensor_release(loss);
    return status;
}

static void drop(te_tensor **out)
{
    for (int i = 0; i < 2; i++) te_tensor_release(out[i]);
}

/* --- against the operations one by one ---------------------------------------------------------------------------- */

static void read_grads(network *net, double grads[N_INPUTS][256])
{
    for (int i = 0; i < N_INPUTS; i++) {
        te_tensor *g = te_tensor_grad(net->in[i]);
        CHECK_MSG(g && te_tensor_read(g, TE_F64, grads[i]) == TE_OK, "input %d has no gradient", i);
        te_tensor_set_grad(net->in[i], NULL);
    }
}

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
    failing_memory f = {.countdown = -1};
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
    te_context *ctx = te_context_open(&options);
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

/* --- memory that runs out ----------------------------------------------------------------------------------------- */

static bool block_step(network *net)
{
    te_tensor *out[2] = {NULL, NULL};
    te_group *group = make_group(net->ctx);
    bool ok = group && te_group_run(group, net->in, out) == TE_OK && backward_of(out, false) == TE_OK;
    drop(out);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* A node with one or two activations and, where a width is given, a shape {-1, width}; -1 on failure. */
static int add_node(te_context *ctx, te_group *group, const char *name, int first, int second, int64_t width,
                    const int *list)
{
    const int64_t shape[] = {-1, width};
    te_arg args[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
    te_group_call call = {.op = te_op_find(ctx, name),
                          .values = {first, second, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE, TE_NO_VALUE},
                          .list = list,
                          .n_list = list ? 2 : 0,
                          .args = args};
    int result;
    if (width) args[1] = (te_arg){.kind = TE_ARG_INTS, .n = 2, .as.ints = shape};
    call.n_args = call.op ? call.op->n_params : 0;
    return call.op && group && first >= 0 && te_group_op(group, &call, &result) == TE_OK ? result : -1;
}

/* ids -> embedding -> reshape to half the width -> rms_norm -> reshape back -> stochastic depth -> grouped_linear */
static bool rows_step(network *net)
{
    te_context *ctx = net->ctx;
    te_group *group = te_group_new(ctx);
    te_tensor *out[2] = {NULL, NULL}, *ids = te_tensor_full(ctx, TE_I64, 1, (int64_t[]){6}, 3);
    te_tensor *sizes = te_tensor_full(ctx, TE_I32, 1, (int64_t[]){2}, 3);
    int x = group ? te_group_input(group, false) : -1, n = group ? te_group_input(group, false) : -1, p[3];
    for (int i = 0; i < 3; i++) p[i] = group ? te_group_input(group, true) : -1;
    int rows = p[2] < 0 ? -1 : add_node(ctx, group, "embedding", p[0], x, 0, NULL);
    rows = add_node(ctx, group, "reshape", rows, TE_NO_VALUE, WIDTH / 2, NULL);
    rows = add_node(ctx, group, "rms_norm", rows, TE_NO_VALUE, 0, NULL);
    rows = add_node(ctx, group, "reshape", rows, TE_NO_VALUE, WIDTH, NULL);
    int kept = add_node(ctx, group, "stochastic_depth_mask", rows, TE_NO_VALUE, 0, NULL);
    rows = kept < 0 ? -1 : add_node(ctx, group, "stochastic_depth_rows", rows, kept, 0, NULL);
    rows = add_node(ctx, group, "grouped_linear", rows, n, 0, p + 1);
    te_tensor *in[] = {ids, sizes, net->in[5], net->in[3], net->in[7]};
    bool ok =
        ids && sizes && rows >= 0 && te_group_output(group, rows) == TE_OK && te_group_run(group, in, out) == TE_OK;
    te_tensor *seed = ok ? te_tensor_full(ctx, TE_F32, out[0]->ndim, out[0]->shape, 1) : NULL;
    ok = seed && te_backward(out[0], seed, false) == TE_OK;
    te_tensor_release(seed);
    drop(out);
    te_tensor_release(ids);
    te_tensor_release(sizes);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* E4M3 with one factor a tensor, for every operand. */
static bool open_states(te_context *ctx, te_recipe_state **states, int n)
{
    te_product_recipe description = {.history_length = {1, 1, 1}}, *recipe;
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        description.quantized[r] = true;
        description.quantizers[r] =
            (te_quantizer){.element = TE_E4M3, .scale = TE_SCALE_F32, .has_columnwise = true, .transposed = true};
    }
    bool ok = (recipe = te_product_recipe_new(ctx, &description)) != NULL;
    for (int i = 0; i < n && ok; i++)
        ok = (states[i] = te_recipe_state_new(ctx)) && te_recipe_state_use(states[i], recipe) == TE_OK;
    te_product_recipe_release(recipe);
    return ok;
}

/* grouped_linear under a recipe, and the biases of its groups: in memory of their own, since plans keep their lists */
static bool groups_step(network *net)
{
    te_context *ctx = net->ctx;
    te_group *group = te_group_new(ctx);
    te_recipe_state *states[2] = {NULL, NULL};
    te_tensor *out[1] = {NULL}, *sizes = te_tensor_full(ctx, TE_I32, 1, (int64_t[]){2}, 1);
    te_tensor *scale = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){BATCH, TOKENS}, 2);
    int v[7], y = -1, biases = -1, sum = -1;
    bool ok = group && sizes && scale && open_states(ctx, states, 2);
    for (int i = 0; i < 7 && ok; i++) ok = (v[i] = te_group_input(group, i > 2)) >= 0;
    if (ok) {
        te_arg none[TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS] = {{.kind = TE_ARG_ABSENT}};
        te_group_call calls[] = {
            {.op = te_op_find(ctx, "grouped_linear"),
             .values = {v[0], v[1]},
             .list = v + 3,
             .n_list = 2,
             .states = states,
             .n_states = 2},
            {.op = te_op_find(ctx, "grouped_biases"), .values = {v[2], v[1]}, .list = v + 5, .n_list = 2},
            {.op = te_op_find(ctx, "addcmul_rows"), .values = {0, v[2], 0}}};
        int *results[] = {&y, &biases, &sum};
        for (int i = 0; i < 3 && ok; i++) {
            calls[i].args = none;
            calls[i].n_args = calls[i].op->n_params;
            if (i == 2) calls[i].values[0] = y;
            if (i == 2) calls[i].values[2] = biases;
            ok = te_group_op(group, &calls[i], results[i]) == TE_OK;
        }
    }
    te_tensor *in[] = {net->in[0], sizes, scale, net->in[5], net->in[5], net->in[6], net->in[10]};
    ctx->recipe_enabled = true;
    ok = ok && te_group_output(group, sum) == TE_OK && te_group_run(group, in, out) == TE_OK;
    te_tensor *seed = ok ? te_tensor_full(ctx, TE_F32, out[0]->ndim, out[0]->shape, 1) : NULL;
    ok = seed && te_backward(out[0], seed, false) == TE_OK;
    ctx->recipe_enabled = false;
    te_tensor_release(seed);
    te_tensor_release(out[0]);
    te_tensor_release(scale);
    te_tensor_release(sizes);
    for (int i = 0; i < 2; i++) te_recipe_state_release(states[i]);
    te_group_release(group);
    for (int i = 0; i < N_INPUTS; i++) te_tensor_set_grad(net->in[i], NULL);
    return ok;
}

/* Returns whether the step got by without reaching allocation n. */
static bool step_with_failure(long n, bool (*take_step)(network *))
{
    failing_memory f = {.countdown = -1};
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
    te_context *ctx = te_context_open(&options);
    network net;
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    f.countdown = n;
    bool ok = take_step(&net), reached = f.countdown < 0;
    f.countdown = -1;
    CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", n);
    CHECK_MSG(take_step(&net), "after allocation %ld failed: %s", n, te_context_error(ctx));
    network_close(&net);
    te_context_release(ctx);
    CHECK_MSG(f.live == 0, "allocation %ld: %zu bytes leaked", n, f.live);
    return !reached;
}

/* Allocation n fails on the way back: a gradient is whole or not there, and the next pass gives all of them. Returns
 * whether it was not reached; want is filled where nothing failed. */
static bool backward_with_failure(long n, double want[N_INPUTS][256])
{
    static double got[N_INPUTS][256];
    failing_memory f = {.countdown = -1};
    te_context_options options = {
        .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
    te_context *ctx = te_context_open(&options);
    network net;
    te_tensor *out[2] = {NULL, NULL};
    CHECK(ctx && network_open(&net, ctx, TE_F32));
    te_group *group = make_group(ctx);
    CHECK(group && te_group_run(group, net.in, out) == TE_OK);
    f.countdown = n;
    bool ok = backward_of(out, true) == TE_OK, reached = f.countdown < 0;
    f.countdown = -1;
    if (ok && !reached) read_grads(&net, want);
    for (int i = 0; i < N_INPUTS; i++) {
        te_tensor *grad = te_tensor_grad(net.in[i]);
        size_t bytes = (size_t)te_tensor_numel(net.in[i]) * sizeof(double);
        if (grad) CHECK(te_tensor_read(grad, TE_F64, got[i]) == TE_OK);
        CHECK_MSG(!grad || memcmp(got[i], want[i], bytes) == 0, "allocation %ld: gradient %d is none", n, i);
        te_tensor_set_grad(net.in[i], NULL);
    }
    CHECK_MSG(backward_of(out, true) == TE_OK, "after allocation %ld failed: %s", n, te_context_error(ctx));
    read_grads(&net, got);
    for (int i = 0; i < N_INPUTS; i++)
        CHECK_MSG(memcmp(got[i], want[i], (size_t)te_tensor_numel(net.in[i]) * sizeof(double)) == 0,
                  "after allocation %ld: gradient %d", n, i);
    drop(out);
    te_group_release(group);
    network_close(&net);
    te_context_release(ctx);
    return !reached;
}

static void test_failing_backward(void)
{
    static double want[N_INPUTS][256];
    long n = 0;
    CHECK(backward_with_failure(LONG_MAX, want));
    while (!backward_with_failure(n, want) && n < 20000) n++;
    CHECK_MSG(n > 20 && n < 20000, "%ld allocations in backward", n);
}

/* Memory that runs out while a group is planned says nothing about the group. */
static void test_failing_plan(void)
{
    for (long n = 0; n < 1000; n++) {
        failing_memory f = {.countdown = -1};
        te_context_options options = {
            .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &f};
        te_context *ctx = te_context_open(&options);
        network net;
        te_tensor *out[2] = {NULL, NULL};
        CHECK(ctx && network_open(&net, ctx, TE_F32));
        te_group *group = make_group(ctx);
        f.countdown = n;
        te_status status = te_group_run(group, net.in, out);
        bool reached = f.countdown < 0;
        f.countdown = -1;
        CHECK_MSG(status == TE_OK || status == TE_ERROR_MEMORY, "allocation %ld: %s", n, te_context_error(ctx));
        drop(out);
        CHECK_MSG(te_group_run(group, net.in, out) == TE_OK, "after allocation %ld: %s", n, te_context_error(ctx));
        drop(out);
        te_group_release(group);
        network_close(&net);
        te_context_release(ctx);
        if (!reached) return;
    }
    CHECK(false);
}

static void test_failing_allocations(bool (*take_step)(network *))
{
    long n = 0;
    while (!step_with_failure(n, take_step) && n < 20000) n++;
    CHECK_MSG(n > 20 && n < 20000, "%ld allocations in a step", n);
}

int main(void)
{
    compare(TE_F64, 0x1p-53, 1e-12);
    compare(TE_F32, 0x1p-24, 1e-5);
    compare(TE_BF16, 0x1p-9, 0.3);
    test_retain_and_changes();
    test_refusals();
    test_scales();
    test_halves_of_parameters();
    test_public();
    test_no_outputs();
    test_failing_plan();
    test_failing_backward();
    test_failing_allocations(block_step);
    test_failing_allocations(rows_step);
    test_failing_allocations(groups_step);
    return TEST_END();
}
