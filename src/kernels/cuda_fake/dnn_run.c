/* dnn_run.c - running a plan of the fake cuDNN: the graph is computed operation by operation, in float32 with the
 * roundings of its tensors. So what runs is the graph as it was written.
 */
#include "dnn.h"

#include "kernels/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (cudnnStatus_t)code;                                                                          \
    } while (0)

enum { MAX_TENSORS = 96, MAX_BOUND = 64, RANK = 4 };

/* --- tensors of a run --------------------------------------------------------------------------------------------- */

typedef struct tensor {
    const descriptor *from;
    cudnnDataType_t type;
    int64_t dim[RANK], stride[RANK];
    char *memory;
    bool owned;
    const int32_t *offsets;
} tensor;

typedef struct machine {
    tensor tensors[MAX_TENSORS];
    int n;
    const int64_t *uids;
    void *const *pointers;
    int n_bound;
} machine;

static int width_of(cudnnDataType_t type)
{
    if (type == CUDNN_DATA_FP8_E4M3) return 1;
    return type == CUDNN_DATA_BFLOAT16 || type == CUDNN_DATA_HALF ? 2 : 4;
}

static int64_t number(const descriptor *d, int name)
{
    const attribute *a = te_fake_attribute(d, name);
    if (!a) return 0;
    return a->type == CUDNN_TYPE_INT64     ? ((const int64_t *)a->values)[0]
           : a->type == CUDNN_TYPE_BOOLEAN ? ((const bool *)a->values)[0]
                                           : ((const int32_t *)a->values)[0];
}

static void *bound(const machine *m, int64_t uid)
{
    for (int i = 0; i < m->n_bound; i++)
        if (m->uids[i] == uid) return m->pointers[i];
    return NULL;
}

static int64_t span_of(const tensor *t)
{
    int64_t span = 1;
    for (int i = 0; i < RANK; i++) span += (t->dim[i] - 1) * t->stride[i];
    return span;
}

static tensor *tensor_of(machine *m, const descriptor *d)
{
    if (!d) return NULL;
    for (int i = 0; i < m->n; i++)
        if (m->tensors[i].from == d) return &m->tensors[i];
    tensor *t = &m->tensors[m->n++];
    *t = (tensor){.from = d, .type = (cudnnDataType_t)number(d, CUDNN_ATTR_TENSOR_DATA_TYPE)};
    memcpy(t->dim, te_fake_attribute(d, CUDNN_ATTR_TENSOR_DIMENSIONS)->values, sizeof t->dim);
    memcpy(t->stride, te_fake_attribute(d, CUDNN_ATTR_TENSOR_STRIDES)->values, sizeof t->stride);
    tensor *offsets = tensor_of(m, te_fake_part(d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC));
    if (offsets) t->offsets = (const int32_t *)(const void *)offsets->memory;
    if (number(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL)) {
        t->memory = calloc((size_t)span_of(t), 4);
        t->owned = true;
    } else {
        t->memory = bound(m, number(d, CUDNN_ATTR_TENSOR_UNIQUE_ID));
        if (!t->memory) te_fake_broken(CUDA_ERROR_ILLEGAL_ADDRESS);
        if ((uintptr_t)t->memory % (uintptr_t)number(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT))
            te_fake_broken(CUDA_ERROR_MISALIGNED_ADDRESS);
    }
    return t;
}

/* The element's place, or -1 beyond the end of a packed sequence. A dimension of 1 repeats; heads may be shared. What
 * takes the element is watched by sanitizers. */
__attribute__((no_sanitize("address", "undefined"))) static int64_t place(const tensor *t, const int64_t at[RANK],
                                                                          int64_t group)
{
    int64_t place = 0, rows = t->stride[2] >= t->stride[3] ? 2 : 3;
    for (int i = 0; i < RANK; i++) {
        int64_t k = t->dim[i] == 1 ? 0 : i == 1 && group > 1 ? at[i] / group : at[i];
        if (i == 0 && t->offsets)
            place += t->offsets[k];
        else
            place += k * t->stride[i];
        if (t->offsets && i == rows && (k + 1) * t->stride[i] > t->offsets[at[0] + 1] - t->offsets[at[0]]) return -1;
    }
    return place;
}

static float get(const tensor *t, const int64_t at[RANK], int64_t group)
{
    int64_t i = place(t, at, group);
    uint16_t half;
    if (i < 0) return 0;
    if (t->type == CUDNN_DATA_INT32 || t->type == CUDNN_DATA_BOOLEAN)
        return (float)((const int32_t *)(const void *)t->memory)[i];
    if (width_of(t->type) == 4) return ((const float *)(const void *)t->memory)[i];
    if (width_of(t->type) == 1) return te_f8e4m3_to_f32((uint8_t)t->memory[i]);
    memcpy(&half, t->memory + 2 * i, 2);
    return t->type == CUDNN_DATA_BFLOAT16 ? te_bf16_to_f32(half) : te_f16_to_f32(half);
}

static void put(const tensor *t, const int64_t at[RANK], float value)
{
    int64_t i = place(t, at, 1);
    if (i < 0) return;
    if (t->type == CUDNN_DATA_INT32 || t->type == CUDNN_DATA_BOOLEAN)
        ((int32_t *)(void *)t->memory)[i] = (int32_t)value;
    else if (width_of(t->type) == 4)
        ((float *)(void *)t->memory)[i] = value;
    else if (width_of(t->type) == 1)
        t->memory[i] = (char)te_f32_to_f8e4m3(value);
    else {
        uint16_t half = t->type == CUDNN_DATA_BFLOAT16 ? te_f32_to_bf16(value) : te_f32_to_f16(value);
        memcpy(t->memory + 2 * i, &half, 2);
    }
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static bool next(int64_t at[RANK], const int64_t dim[RANK])
{
    for (int i = RANK - 1; i >= 0; i--) {
        if (++at[i] < dim[i]) return true;
        at[i] = 0;
    }
    return false;
}

static float apply(int mode, float x, float b, float t, int64_t index)
{
    switch (mode) {
    case CUDNN_POINTWISE_ADD:
        return x + b;
    case CUDNN_POINTWISE_SUB:
        return x - b;
    case CUDNN_POINTWISE_MUL:
        return x * b;
    case CUDNN_POINTWISE_MAX:
        return fmaxf(x, b);
    case CUDNN_POINTWISE_DIV:
        return x / b;
    case CUDNN_POINTWISE_IDENTITY:
        return x;
    case CUDNN_POINTWISE_EXP:
        return expf(x);
    case CUDNN_POINTWISE_LOG:
        return logf(x);
    case CUDNN_POINTWISE_CMP_GE:
        return x >= b;
    case CUDNN_POINTWISE_CMP_GT:
        return x > b;
    case CUDNN_POINTWISE_CMP_LT:
        return x < b;
    case CUDNN_POINTWISE_LOGICAL_AND:
        return x != 0 && b != 0;
    case CUDNN_POINTWISE_GEN_INDEX:
        return (float)index;
    case CUDNN_POINTWISE_BINARY_SELECT:
        return t != 0 ? x : b;
    default:
        te_fake_broken(CUDA_ERROR_NOT_SUPPORTED);
        return 0;
    }
}

static void run_pointwise(machine *m, const descriptor *d)
{
    const descriptor *kind = te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const tensor *x = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC));
    const tensor *b = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    const tensor *t = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC));
    const tensor *y = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC));
    int mode = (int)number(kind, CUDNN_ATTR_POINTWISE_MODE);
    int64_t axis = number(kind, CUDNN_ATTR_POINTWISE_AXIS), at[RANK] = {0};
    do {
        put(y, at, apply(mode, get(x, at, 1), b ? get(b, at, 1) : 0, t ? get(t, at, 1) : 0, at[axis]));
    } while (next(at, y->dim));
}

/* Over every dimension that the result has fewer of: the last one, groups of heads, or all. */
static void run_reduction(machine *m, const descriptor *d)
{
    int64_t operator = number(te_fake_part(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC), CUDNN_ATTR_REDUCTION_OPERATOR);
    bool size = operator== CUDNN_REDUCE_TENSOR_AMAX, largest = size || operator== CUDNN_REDUCE_TENSOR_MAX;
    const tensor *x = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC));
    const tensor *y = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC));
    int64_t at[RANK] = {0}, group[RANK];
    for (int i = 0; i < RANK; i++) group[i] = x->dim[i] / y->dim[i];
    do {
        int64_t inner[RANK] = {0}, from[RANK];
        float sum = largest ? -INFINITY : 0;
        do {
            for (int i = 0; i < RANK; i++) from[i] = at[i] * group[i] + inner[i];
            float value = size ? fabsf(get(x, from, 1)) : get(x, from, 1);
            sum = largest ? fmaxf(sum, value) : sum + value;
        } while (next(inner, group));
        put(y, at, sum);
    } while (next(at, y->dim));
}

static int64_t length_at(machine *m, const descriptor *d, int name, int64_t batch, int64_t full)
{
    const tensor *t = tensor_of(m, te_fake_part(d, name));
    return t ? (int64_t)get(t, (int64_t[RANK]){batch, 0, 0, 0}, 1) : full;
}

static void run_matmul(machine *m, const descriptor *d)
{
    const tensor *a = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC));
    const tensor *b = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_MATMUL_BDESC));
    const tensor *c = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_MATMUL_CDESC));
    int64_t at[RANK] = {0};
    do {
        int64_t left[RANK] = {at[0], at[1], at[2], 0}, right[RANK] = {at[0], at[1], 0, at[3]};
        int64_t k = length_at(m, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, at[0], a->dim[3]);
        if (at[2] >= length_at(m, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, at[0], c->dim[2]) ||
            at[3] >= length_at(m, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, at[0], c->dim[3]))
            continue;
        float sum = 0;
        for (int64_t i = 0; i < k; i++) {
            left[3] = right[2] = i;
            sum += get(a, left, c->dim[1] / a->dim[1]) * get(b, right, c->dim[1] / b->dim[1]);
        }
        put(c, at, sum);
    } while (next(at, c->dim));
}

/* The same memory under other extents and strides; numbers inside the plan take the new type. */
static void run_reshape(machine *m, const descriptor *d)
{
    const tensor *x = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC));
    tensor *y = tensor_of(m, te_fake_part(d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC));
    if (!x->owned) {
        free(y->memory);
        y->memory = x->memory;
        y->owned = false;
        return;
    }
    tensor from = *x, to = *y;
    int64_t at[RANK] = {0}, flat[RANK] = {1, 1, 1, span_of(x)};
    memcpy(from.dim, flat, sizeof flat);
    memcpy(to.dim, flat, sizeof flat);
    from.stride[3] = to.stride[3] = 1;
    do {
        put(&to, at, get(&from, at, 1));
    } while (next(at, flat));
}

static void run_graph(machine *m, const descriptor *graph)
{
    const attribute *operations = te_fake_attribute(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    for (int64_t i = 0; i < operations->n; i++) {
        const descriptor *d = ((descriptor **)operations->values)[i];
        if (d->type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
            run_pointwise(m, d);
        else if (d->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
            run_reduction(m, d);
        else if (d->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
            run_matmul(m, d);
        else
            run_reshape(m, d);
    }
}

/* --- running ------------------------------------------------------------------------------------------------------ */

typedef struct execution {
    descriptor *plan;
    int n;
    int64_t uids[MAX_BOUND];
    void *pointers[MAX_BOUND]; /* device memory; NULL: the number beside it */
    float numbers[MAX_BOUND];
} execution;

static void run_execution(void *work)
{
    execution *e = work;
    machine m = {.uids = e->uids, .pointers = e->pointers, .n_bound = e->n};
    for (int i = 0; i < e->n; i++)
        if (!e->pointers[i]) e->pointers[i] = &e->numbers[i];
    const descriptor *configuration = te_fake_part(e->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG),
                     *engine = te_fake_part(configuration, CUDNN_ATTR_ENGINECFG_ENGINE);
    run_graph(&m, te_fake_part(engine ? engine : configuration, CUDNN_ATTR_ENGINE_OPERATION_GRAPH));
    for (int i = 0; i < m.n; i++)
        if (m.tensors[i].owned) free(m.tensors[i].memory);
    for (int i = 0; i < e->n; i++)
        if (e->pointers[i] == &e->numbers[i]) e->pointers[i] = NULL;
}

/* Numbers lie in the host's memory: they are read now. */
TE_FAKE cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                          cudnnBackendDescriptor_t pack)
{
    const attribute *uids = te_fake_attribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const attribute *pointers = te_fake_attribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    const attribute *workspace = te_fake_attribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    execution e = {.plan = plan, .n = (int)uids->n};
    (void)handle;
    ENTER();
    if (te_fake_part(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->dropped) return CUDNN_STATUS_BAD_PARAM;
    if (uids->n != pointers->n || uids->n > MAX_BOUND ||
        !te_fake_contains((CUdeviceptr)(uintptr_t) * (void **)workspace->values, 1000))
        return CUDNN_STATUS_BAD_PARAM;
    for (int i = 0; i < e.n; i++) {
        void *pointer = ((void **)pointers->values)[i];
        e.uids[i] = ((const int64_t *)uids->values)[i];
        if (te_fake_owns((CUdeviceptr)(uintptr_t)pointer))
            e.pointers[i] = pointer;
        else
            memcpy(&e.numbers[i], pointer, sizeof e.numbers[i]);
    }
    return te_fake_queue(NULL, run_execution, &e, sizeof e, 5000) == CUDA_SUCCESS ? CUDNN_STATUS_SUCCESS
                                                                                  : CUDNN_STATUS_EXECUTION_FAILED;
}
