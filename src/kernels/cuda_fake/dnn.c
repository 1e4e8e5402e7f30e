/* dnn.c - cuDNN's backend interface: descriptors, and the engines that a graph is offered. The first of them says that
 * its bits do not repeat, and must not be taken; there are more of them than anybody asks for. Whether the real library
 * takes a graph is another test's question (test_cuda_dnn.c).
 */
#include "dnn.h"

#include <stdlib.h>
#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code = te_fake_enter(__func__);                                                                            \
        if (code) return (cudnnStatus_t)code;                                                                          \
    } while (0)

/* --- descriptors -------------------------------------------------------------------------------------------------- */

static size_t size_of(cudnnBackendAttributeType_t type)
{
    switch ((int)type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
        return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        return 8;
    default:
        return 4;
    }
}

const attribute *te_fake_attribute(const descriptor *d, int name)
{
    for (int i = 0; i < d->n; i++)
        if ((int)d->attributes[i].name == name) return &d->attributes[i];
    return NULL;
}

descriptor *te_fake_part(const descriptor *d, int name)
{
    const attribute *a = te_fake_attribute(d, name);
    return a ? ((descriptor **)a->values)[0] : NULL;
}

static void release(descriptor *d)
{
    if (--d->refs > 0) return;
    for (int i = 0; i < d->n; i++) {
        attribute *a = &d->attributes[i];
        for (int64_t k = 0; a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR && k < a->n; k++)
            release(((descriptor **)a->values)[k]);
        free(a->values);
    }
    free(d);
    te_fake_made(-1);
}

TE_FAKE size_t cudnnGetVersion(void) { return 91900; }
TE_FAKE const char *cudnnGetErrorString(cudnnStatus_t status)
{
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_FAKED";
}
TE_FAKE void cudnnGetLastErrorString(char *message, size_t size) { message[0] = size ? 0 : message[0]; }

TE_FAKE cudnnStatus_t cudnnCreate(cudnnHandle_t *handle)
{
    ENTER();
    *handle = calloc(1, 8);
    te_fake_made(1);
    return CUDNN_STATUS_SUCCESS;
}

TE_FAKE cudnnStatus_t cudnnDestroy(cudnnHandle_t handle)
{
    ENTER();
    te_fake_flush();
    free(handle);
    te_fake_made(-1);
    return CUDNN_STATUS_SUCCESS;
}

TE_FAKE cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    (void)handle;
    ENTER();
    return stream ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

TE_FAKE cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out)
{
    ENTER();
    descriptor *d = calloc(1, sizeof *d);
    *d = (descriptor){.type = type, .refs = 1};
    *out = d;
    te_fake_made(1);
    return CUDNN_STATUS_SUCCESS;
}

/* A plan's kernels go with it: nothing may be under way. */
TE_FAKE cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t handle)
{
    descriptor *d = handle;
    ENTER();
    if (d->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && d->final && te_fake_queued())
        te_fake_broken(CUDA_ERROR_LAUNCH_FAILED);
    d->dropped = true;
    release(d);
    return CUDNN_STATUS_SUCCESS;
}

TE_FAKE cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                               cudnnBackendAttributeType_t type, int64_t n, const void *values)
{
    descriptor *d = handle;
    ENTER();
    if (d->final || d->n == MAX_ATTRIBUTES || n < 0 || te_fake_attribute(d, name)) return CUDNN_STATUS_BAD_PARAM;
    size_t bytes = (size_t)n * size_of(type);
    void *copy = malloc(bytes + 1);
    memcpy(copy, values, bytes);
    for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < n; i++) {
        descriptor *other = ((descriptor **)copy)[i];
        if (!other->final) {
            free(copy);
            return CUDNN_STATUS_BAD_PARAM;
        }
    }
    for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < n; i++) ((descriptor **)copy)[i]->refs++;
    d->attributes[d->n++] = (attribute){name, type, n, copy};
    return CUDNN_STATUS_SUCCESS;
}

static bool is_handle(const attribute *a)
{
    return a && a->type == CUDNN_TYPE_HANDLE && a->n == 1 && *(cudnnHandle_t *)a->values;
}

TE_FAKE cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t handle)
{
    descriptor *d = handle;
    ENTER();
    if (d->final) return CUDNN_STATUS_BAD_PARAM;
    if (d->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR &&
        !is_handle(te_fake_attribute(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE)))
        return CUDNN_STATUS_BAD_PARAM;
    if (d->type == CUDNN_BACKEND_ENGINE_DESCRIPTOR) te_fake_enter("an engine that was named");
    if (d->type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR &&
        !is_handle(te_fake_attribute(d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE)))
        return CUDNN_STATUS_BAD_PARAM;
    d->final = true;
    return CUDNN_STATUS_SUCCESS;
}

static int32_t enumerator(const descriptor *d, int name)
{
    return ((const int32_t *)te_fake_attribute(d, name)->values)[0];
}

static bool is_host_number(const descriptor *tensor)
{
    return tensor && ((const bool *)te_fake_attribute(tensor, CUDNN_ATTR_TENSOR_IS_BY_VALUE)->values)[0];
}

/* Of fp8 operands the real library knows on Hopper: attention with the amaxes of its probabilities and its result,
 * which is fp8 as well, and with lse. Here all factors but the scale have to lie on the device. */
static bool is_known(const descriptor *graph)
{
    const attribute *operations = te_fake_attribute(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    bool fp8 = false;
    int amaxes = 0, results = 0, rows = 0, host_factors = 0;
    for (int64_t i = 0; i < operations->n; i++) {
        const descriptor *d = ((descriptor **)operations->values)[i];
        if (d->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
            fp8 |= enumerator(te_fake_part(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC), CUDNN_ATTR_TENSOR_DATA_TYPE) ==
                   CUDNN_DATA_FP8_E4M3;
        if (d->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
            amaxes += enumerator(te_fake_part(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC), CUDNN_ATTR_REDUCTION_OPERATOR) ==
                      CUDNN_REDUCE_TENSOR_AMAX;
        if (d->type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) continue;
        const descriptor *y = te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC),
                         *kind = te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
        if (enumerator(kind, CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_MUL)
            host_factors += is_host_number(te_fake_part(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
        if (((const bool *)te_fake_attribute(y, CUDNN_ATTR_TENSOR_IS_VIRTUAL)->values)[0]) continue;
        results += enumerator(y, CUDNN_ATTR_TENSOR_DATA_TYPE) == CUDNN_DATA_FP8_E4M3;
        rows += enumerator(y, CUDNN_ATTR_TENSOR_DATA_TYPE) == CUDNN_DATA_FLOAT;
    }
    return !fp8 || (amaxes == 2 && results == 1 && rows == 1 && host_factors == 1);
}

static cudnnStatus_t offer_engines(const descriptor *heuristics, int64_t wanted, int64_t *n, descriptor **engines)
{
    descriptor *graph = te_fake_part(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    int64_t most = is_known(graph) ? wanted : 0;
    for (*n = 0; *n < most && *n < wanted; ++*n) {
        descriptor *engine = engines[*n];
        engine->choice = (int)*n;
        graph->refs++;
        descriptor **kept = malloc(sizeof *kept);
        *kept = graph;
        engine->attributes[engine->n++] =
            (attribute){CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, kept};
        engine->final = true;
    }
    if (most > 0) *n = 100;
    return CUDNN_STATUS_SUCCESS;
}

TE_FAKE cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const handle, cudnnBackendAttributeName_t name,
                                               cudnnBackendAttributeType_t type, int64_t wanted, int64_t *n,
                                               void *values)
{
    const descriptor *d = handle;
    (void)type;
    ENTER();
    *n = 0;
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) return offer_engines(d, wanted, n, values);
    if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
        (*(descriptor **)values)->choice = d->choice;
        *n = 1;
    } else if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && d->choice == 0) {
        *(cudnnBackendNumericalNote_t *)values = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
        *n = 1;
    } else if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
        for (int64_t i = 0; i < wanted; i++)
            ((cudnnBackendNumericalNote_t *)values)[i] = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
        *n = 100; /* more than there is room for */
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        *(int64_t *)values = 1000;
        *n = 1;
    }
    return CUDNN_STATUS_SUCCESS;
}
