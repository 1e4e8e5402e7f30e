/* dnn_graph.c - see dnn.h. */
#include "dnn.h"

#include <stdio.h>
#include <string.h>

void te_dnn_open(te_dnn_graph *g, const te_cuda_dnn_library *dnn)
{
    memset(g, 0, sizeof *g);
    g->dnn = dnn;
}

void te_dnn_close(te_dnn_graph *g)
{
    while (g->n_made > 0)
        if (g->made[--g->n_made]) g->dnn->cudnnBackendDestroyDescriptor(g->made[g->n_made]);
}

/* --- descriptors -------------------------------------------------------------------------------------------------- */

void te_dnn_describe(const te_cuda_dnn_library *dnn, const char *what, cudnnStatus_t status, char reason[TE_DNN_REASON])
{
    char last[160] = "";
    dnn->cudnnGetLastErrorString(last, sizeof last);
    snprintf(reason, TE_DNN_REASON, "%s: %.60s%s%.100s", what, dnn->cudnnGetErrorString(status), *last ? ", " : "",
             last);
}

static bool good(te_dnn_graph *g, cudnnStatus_t status, const char *what)
{
    if (g->status == CUDNN_STATUS_SUCCESS && status != CUDNN_STATUS_SUCCESS) {
        g->status = status;
        te_dnn_describe(g->dnn, what, status, g->reason);
    }
    return g->status == CUDNN_STATUS_SUCCESS;
}

static cudnnBackendDescriptor_t make(te_dnn_graph *g, cudnnBackendDescriptorType_t type, const char *what)
{
    cudnnBackendDescriptor_t made = NULL;
    if (g->status != CUDNN_STATUS_SUCCESS) return NULL;
    if (!good(g, g->n_made < TE_DNN_DESCRIPTORS ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED, what)) return NULL;
    if (good(g, g->dnn->cudnnBackendCreateDescriptor(type, &made), what)) g->made[g->n_made++] = made;
    return made;
}

static void set(te_dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t n, const void *values)
{
    if (g->status == CUDNN_STATUS_SUCCESS)
        good(g, g->dnn->cudnnBackendSetAttribute(d, name, type, n, values), "an attribute");
}

static void set_tensor(te_dnn_graph *g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, te_dnn_tensor t)
{
    if (t != TE_DNN_NONE) set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &g->handles[t]);
}

static void finalize(te_dnn_graph *g, cudnnBackendDescriptor_t d, const char *what)
{
    if (g->status == CUDNN_STATUS_SUCCESS) good(g, g->dnn->cudnnBackendFinalize(d), what);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static te_dnn_tensor add(te_dnn_graph *g, int64_t uid, const te_dnn_description *description, bool by_value)
{
    /* the rest beside operands is factors, offsets and numbers of rows, which lie behind one another */
    int64_t alignment = description->type == CUDNN_DATA_FLOAT || description->type == CUDNN_DATA_INT32 ? 4 : 16;
    bool inside = uid >= TE_DNN_FIRST_VIRTUAL, room = g->n_tensors < TE_DNN_TENSORS;
    if (!good(g, room ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED, "a tensor")) return TE_DNN_NONE;
    cudnnBackendDescriptor_t d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "a tensor");
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &description->type);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, TE_DNN_RANK, description->dim);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, TE_DNN_RANK, description->stride);
    set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &inside);
    set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    set_tensor(g, d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, description->ragged);
    finalize(g, d, "a tensor");
    if (g->status != CUDNN_STATUS_SUCCESS) return TE_DNN_NONE;
    g->tensors[g->n_tensors] = *description;
    g->handles[g->n_tensors] = d;
    return g->n_tensors++;
}

te_dnn_tensor te_dnn_add(te_dnn_graph *g, int64_t uid, const te_dnn_description *description)
{
    return add(g, uid, description, false);
}

te_dnn_tensor te_dnn_number(te_dnn_graph *g, int64_t uid, cudnnDataType_t type)
{
    te_dnn_description one = {.type = type, .dim = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}, .ragged = TE_DNN_NONE};
    return add(g, uid, &one, true);
}

te_dnn_tensor te_dnn_virtual_as(te_dnn_graph *g, const te_dnn_description *description)
{
    return add(g, TE_DNN_FIRST_VIRTUAL + g->n_tensors, description, false);
}

te_dnn_tensor te_dnn_virtual(te_dnn_graph *g, cudnnDataType_t type, const int64_t dim[TE_DNN_RANK])
{
    te_dnn_description d = {.type = type, .ragged = TE_DNN_NONE};
    int64_t step = 1;
    for (int i = TE_DNN_RANK - 1; i >= 0; step *= dim[i--]) {
        d.dim[i] = dim[i];
        d.stride[i] = step;
    }
    return te_dnn_virtual_as(g, &d);
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static void add_operation(te_dnn_graph *g, cudnnBackendDescriptor_t operation, const char *what)
{
    finalize(g, operation, what);
    if (good(g, g->n_operations < TE_DNN_OPERATIONS ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED, what))
        g->operations[g->n_operations++] = operation;
}

void te_dnn_pointwise(te_dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t math, te_dnn_tensor x,
                      te_dnn_tensor b, te_dnn_tensor t, te_dnn_tensor y, int64_t axis)
{
    cudnnBackendDescriptor_t kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "a pointwise operation");
    set(g, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &math);
    if (mode == CUDNN_POINTWISE_GEN_INDEX) set(g, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finalize(g, kind, "a pointwise operation");
    cudnnBackendDescriptor_t d = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "a pointwise operation");
    set(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &kind);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_operation(g, d, "a pointwise operation");
}

void te_dnn_reduce(te_dnn_graph *g, cudnnReduceTensorOp_t operator, te_dnn_tensor x, te_dnn_tensor y)
{
    cudnnDataType_t math = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "a reduction");
    set(g, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &operator);
    set(g, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    finalize(g, kind, "a reduction");
    cudnnBackendDescriptor_t d = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "a reduction");
    set(g, d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &kind);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(g, d, "a reduction");
}

void te_dnn_matmul(te_dnn_graph *g, te_dnn_tensor a, te_dnn_tensor b, te_dnn_tensor c, const te_dnn_tensor lengths[3])
{
    cudnnDataType_t math = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, "a product");
    set(g, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    finalize(g, kind, "a product");
    cudnnBackendDescriptor_t d = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "a product");
    set(g, d, CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &kind);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, lengths[0]);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, lengths[1]);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, lengths[2]);
    add_operation(g, d, "a product");
}

void te_dnn_reshape(te_dnn_graph *g, te_dnn_tensor x, te_dnn_tensor y)
{
    cudnnBackendDescriptor_t d = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "a reshape");
    set_tensor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_tensor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(g, d, "a reshape");
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

cudnnBackendDescriptor_t te_dnn_device(const te_cuda_dnn_library *dnn, const char *json, char reason[TE_DNN_REASON])
{
    cudnnBackendDescriptor_t device = NULL;
    cudnnStatus_t status = dnn->cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &device);
    if (status == CUDNN_STATUS_SUCCESS)
        status = dnn->cudnnBackendSetAttribute(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                               (int64_t)strlen(json), json);
    if (status == CUDNN_STATUS_SUCCESS) status = dnn->cudnnBackendFinalize(device);
    if (status == CUDNN_STATUS_SUCCESS) return device;
    te_dnn_describe(dnn, "the device's description", status, reason);
    if (device) dnn->cudnnBackendDestroyDescriptor(device);
    return NULL;
}

enum { MAX_CHOICES = 8 };

static bool repeats_bits(te_dnn_graph *g, cudnnBackendDescriptor_t choice)
{
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    cudnnBackendDescriptor_t engine = make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR, "an engine");
    int64_t n = 0;
    if (!engine) return false;
    cudnnStatus_t status = g->dnn->cudnnBackendGetAttribute(choice, CUDNN_ATTR_ENGINECFG_ENGINE,
                                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine);
    if (status == CUDNN_STATUS_SUCCESS)
        status = g->dnn->cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                                  CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n, notes);
    if (status != CUDNN_STATUS_SUCCESS) n = 0; /* an engine without notes */
    if (n > CUDNN_NUMERICAL_NOTE_TYPE_COUNT) n = CUDNN_NUMERICAL_NOTE_TYPE_COUNT; /* it has more than fit */
    for (int64_t i = 0; i < n; i++)
        if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    return true;
}

/* NULL where this choice cannot be had. */
static cudnnBackendDescriptor_t plan_choice(te_dnn_graph *g, cudnnBackendDescriptor_t choice, cudnnHandle_t handle,
                                            cudnnBackendDescriptor_t device)
{
    const te_cuda_dnn_library *dnn = g->dnn;
    cudnnBackendDescriptor_t plan = NULL;
    cudnnStatus_t status = dnn->cudnnBackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan);
    if (status == CUDNN_STATUS_SUCCESS)
        status = dnn->cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &choice);
    if (status == CUDNN_STATUS_SUCCESS && handle)
        status = dnn->cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    if (status == CUDNN_STATUS_SUCCESS && device)
        status = dnn->cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    if (status == CUDNN_STATUS_SUCCESS) status = dnn->cudnnBackendFinalize(plan);
    if (status == CUDNN_STATUS_SUCCESS) return plan;
    te_dnn_describe(dnn, "a plan", status, g->reason);
    if (plan) dnn->cudnnBackendDestroyDescriptor(plan);
    return NULL;
}

static cudnnBackendDescriptor_t finish_operations(te_dnn_graph *g, cudnnHandle_t handle)
{
    cudnnBackendDescriptor_t all = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "the graph");
    set(g, all, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->n_operations, g->operations);
    if (handle) set(g, all, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    finalize(g, all, "the graph");
    return all;
}

static int64_t choices_for(te_dnn_graph *g, cudnnBackendDescriptor_t all, cudnnBackendDescriptor_t device,
                           cudnnBackendDescriptor_t choices[MAX_CHOICES])
{
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t n = 0;
    cudnnBackendDescriptor_t heuristics = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "the choice of an engine");
    set(g, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &all);
    set(g, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (device) set(g, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    finalize(g, heuristics, "the choice of an engine");
    for (int i = 0; i < MAX_CHOICES; i++) choices[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "an engine");
    if (g->status == CUDNN_STATUS_SUCCESS)
        good(g,
             g->dnn->cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                              MAX_CHOICES, &n, choices),
             "the choice of an engine");
    if (n > MAX_CHOICES) n = MAX_CHOICES; /* there are more than were asked for */
    return g->status == CUDNN_STATUS_SUCCESS ? n : 0;
}

static cudnnBackendDescriptor_t configure(te_dnn_graph *g, cudnnBackendDescriptor_t all,
                                          cudnnBackendDescriptor_t device, const te_dnn_engine *e)
{
    cudnnBackendDescriptor_t knobs[TE_DNN_KNOBS];
    cudnnBackendDescriptor_t engine = make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR, "an engine");
    set(g, engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &all);
    set(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &e->index);
    if (device) set(g, engine, CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    finalize(g, engine, "an engine");
    for (int i = 0; i < e->n_knobs; i++) {
        knobs[i] = make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, "a knob");
        set(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &e->knob[i]);
        set(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &e->value[i]);
        finalize(g, knobs[i], "a knob");
    }
    cudnnBackendDescriptor_t made = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "an engine with knobs");
    set(g, made, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    set(g, made, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, e->n_knobs, knobs);
    finalize(g, made, "an engine with knobs");
    return g->status == CUDNN_STATUS_SUCCESS ? made : NULL;
}

void te_dnn_plan_close(const te_cuda_dnn_library *dnn, te_dnn_plan *plan)
{
    if (plan->plan) dnn->cudnnBackendDestroyDescriptor(plan->plan);
    if (plan->configuration) dnn->cudnnBackendDestroyDescriptor(plan->configuration);
    *plan = (te_dnn_plan){.plan = NULL};
}

/* The plan lives longer than the graph, and so must what it was made from. */
static void keep_configuration(te_dnn_graph *g, cudnnBackendDescriptor_t configuration, te_dnn_plan *plan)
{
    for (int i = 0; i < g->n_made; i++)
        if (g->made[i] == configuration) g->made[i] = NULL;
    plan->configuration = configuration;
}

bool te_dnn_finish(te_dnn_graph *g, cudnnHandle_t handle, cudnnBackendDescriptor_t device, const te_dnn_engine *engine,
                   bool repeats, te_dnn_plan *plan)
{
    cudnnBackendDescriptor_t choices[MAX_CHOICES], all = finish_operations(g, handle);
    int64_t n = 1, got = 0;
    *plan = (te_dnn_plan){.plan = NULL};
    if (engine)
        choices[0] = configure(g, all, device, engine);
    else
        n = choices_for(g, all, device, choices);
    if (g->status != CUDNN_STATUS_SUCCESS) return false;
    snprintf(g->reason, sizeof g->reason, n > 0 && repeats ? "no engine that repeats its bits" : "no engine");
    for (int64_t i = 0; i < n && !plan->plan; i++) {
        if (engine || !repeats || repeats_bits(g, choices[i])) plan->plan = plan_choice(g, choices[i], handle, device);
        if (plan->plan) keep_configuration(g, choices[i], plan);
    }
    if (!plan->plan) return false;
    cudnnStatus_t status = g->dnn->cudnnBackendGetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                            CUDNN_TYPE_INT64, 1, &got, &plan->workspace);
    if (status == CUDNN_STATUS_SUCCESS) return true;
    te_dnn_describe(g->dnn, "a plan's workspace", status, g->reason);
    te_dnn_plan_close(g->dnn, plan);
    return false;
}

cudnnStatus_t te_dnn_run(const te_cuda_dnn_library *dnn, cudnnHandle_t handle, const te_dnn_plan *plan, int n,
                         const int64_t *uids, void *const *pointers, void *workspace)
{
    cudnnBackendDescriptor_t pack = NULL;
    cudnnStatus_t status = dnn->cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (status == CUDNN_STATUS_SUCCESS)
        status = dnn->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids);
    if (status == CUDNN_STATUS_SUCCESS)
        status = dnn->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n,
                                               pointers);
    if (status == CUDNN_STATUS_SUCCESS)
        status =
            dnn->cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    if (status == CUDNN_STATUS_SUCCESS) status = dnn->cudnnBackendFinalize(pack);
    if (status == CUDNN_STATUS_SUCCESS) status = dnn->cudnnBackendExecute(handle, plan->plan, pack);
    if (pack) dnn->cudnnBackendDestroyDescriptor(pack);
    return status;
}
