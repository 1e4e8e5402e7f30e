/* fuser_block.h - a pre-norm block for tests of groups: described once, run as one group or as its operations. */
#ifndef TE_TEST_FUSER_BLOCK_H
#define TE_TEST_FUSER_BLOCK_H

#include "test.h"

#include "core/autograd.h"
#include "core/fuser/describe.h"
#include "core/fuser/group.h"

enum { BATCH = 2, TOKENS = 5, HEADS = 2, WIDTH = 8, HIDDEN = 12, N_PARAMS = 10, N_INPUTS = 1 + N_PARAMS };

/* x; norm weight, bias; qkv weight, bias; projection weight; norm weight; up weight, bias; down weight, bias */
static const int64_t shapes[N_INPUTS][4] = {
    {3, BATCH, TOKENS, WIDTH}, {1, WIDTH}, {1, WIDTH}, {2, 3 * WIDTH, WIDTH}, {1, 3 * WIDTH}, {2, WIDTH, WIDTH},
    {1, WIDTH}, {2, 2 * HIDDEN, WIDTH}, {1, 2 * HIDDEN}, {2, WIDTH, HIDDEN}, {1, WIDTH}};

typedef struct network {
    te_context *ctx;
    te_tensor  *in[N_INPUTS];
} network;

static inline bool network_open(network *net, te_context *ctx, te_dtype dtype)
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

static inline void network_close(network *net)
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

static inline int step(builder *b, const char *name, const int *values, int n_values, double attribute, int at)
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

static inline int param_index(const char *op, const char *name, te_context *ctx)
{
    const te_op *o = te_op_find(ctx, op);
    for (int i = 0; o && i < o->n_params; i++)
        if (strcmp(o->params[i].name, name) == 0) return i;
    return -1;
}

/* The result, the sum in the middle, what attention takes and what it gives. Values 0 … N_INPUTS - 1 are the inputs. */
static inline void describe_block(builder *b, int results[4])
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

static inline te_group *make_group(te_context *ctx)
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

static inline te_status run_singly(network *net, te_tensor *out[4])
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
static inline te_status backward_of(te_tensor **out, bool retain)
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

static inline void drop(te_tensor **out)
{
    for (int i = 0; i < 2; i++) te_tensor_release(out[i]);
}

static inline void read_grads(network *net, double grads[N_INPUTS][256])
{
    for (int i = 0; i < N_INPUTS; i++) {
        te_tensor *g = te_tensor_grad(net->in[i]);
        CHECK_MSG(g && te_tensor_read(g, TE_F64, grads[i]) == TE_OK, "input %d has no gradient", i);
        te_tensor_set_grad(net->in[i], NULL);
    }
}

#endif
