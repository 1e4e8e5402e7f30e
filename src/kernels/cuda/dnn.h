/* dnn.h - graphs of cuDNN's backend interface: tensors and operations described one by one, and
 * the plan that runs them.
 *
 * cuDNN recognises an attention by the operations it is written as, and compiles one kernel for it. A graph can be made
 * for a device that is described, not present (te_dnn_device), so that tests on machines without one hear whether the
 * library takes it. Calls on a graph that has failed do nothing; the first failure is kept.
 */
#ifndef TE_KERNELS_CUDA_DNN_H
#define TE_KERNELS_CUDA_DNN_H

#include "../kernels.h"

#include <cudnn.h>

#define TE_CUDA_DNN(X)                                                                                                 \
    X(cudnnGetVersion) X(cudnnGetErrorString) X(cudnnGetLastErrorString) X(cudnnCreate) X(cudnnDestroy)                \
    X(cudnnSetStream) X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor) X(cudnnBackendSetAttribute)     \
    X(cudnnBackendGetAttribute) X(cudnnBackendFinalize) X(cudnnBackendExecute)

#define TE_CUDA_DNN_MEMBER(name) __typeof__(&name) name;
typedef struct te_cuda_dnn_library {
    TE_CUDA_DNN(TE_CUDA_DNN_MEMBER)
} te_cuda_dnn_library;
#undef TE_CUDA_DNN_MEMBER

/* Plans for described devices came with 9.8; 9.10.2 mended attention's gradient. */
enum { TE_DNN_OLDEST = 91002 };

enum { TE_DNN_RANK = 4, TE_DNN_TENSORS = 64, TE_DNN_OPERATIONS = 48, TE_DNN_DESCRIPTORS = 192, TE_DNN_REASON = 200 };

/* A tensor of a graph by its number; TE_DNN_NONE: absent. */
typedef int te_dnn_tensor;
#define TE_DNN_NONE (-1)

typedef struct te_dnn_description {
    cudnnDataType_t type;
    int64_t         dim[TE_DNN_RANK], stride[TE_DNN_RANK];
    te_dnn_tensor   ragged; /* offsets of each batch's first element, or TE_DNN_NONE */
} te_dnn_description;

typedef struct te_dnn_graph {
    const te_cuda_dnn_library *dnn;
    cudnnBackendDescriptor_t   made[TE_DNN_DESCRIPTORS];
    int                        n_made;
    te_dnn_description         tensors[TE_DNN_TENSORS];
    cudnnBackendDescriptor_t   handles[TE_DNN_TENSORS]; /* of the tensors */
    int                        n_tensors;
    cudnnBackendDescriptor_t   operations[TE_DNN_OPERATIONS];
    int                        n_operations;
    cudnnStatus_t              status;
    char                       reason[TE_DNN_REASON]; /* of the first failure */
} te_dnn_graph;

/* A plan with the configuration that it was made from, and the device memory it works in. */
typedef struct te_dnn_plan {
    cudnnBackendDescriptor_t plan, configuration;
    int64_t                  workspace;
} te_dnn_plan;

/* An engine by its number, with values for its knobs. */
enum { TE_DNN_KNOBS = 6 };
typedef struct te_dnn_engine {
    int64_t index;
    int     n_knobs;
    int32_t knob[TE_DNN_KNOBS]; /* cudnnBackendKnobType_t */
    int64_t value[TE_DNN_KNOBS];
} te_dnn_engine;

void te_dnn_open(te_dnn_graph *g, const te_cuda_dnn_library *dnn);
void te_dnn_close(te_dnn_graph *g);

/* A tensor in memory under the number that te_dnn_run knows it by (below TE_DNN_FIRST_VIRTUAL). */
enum { TE_DNN_FIRST_VIRTUAL = 1000 };
te_dnn_tensor te_dnn_add(te_dnn_graph *g, int64_t uid, const te_dnn_description *description);
/* One number that each run gives from the host's memory. */
te_dnn_tensor te_dnn_number(te_dnn_graph *g, int64_t uid, cudnnDataType_t type);
/* One that lives within the plan: dense in row-major order, or as described. */
te_dnn_tensor te_dnn_virtual(te_dnn_graph *g, cudnnDataType_t type, const int64_t dim[TE_DNN_RANK]);
te_dnn_tensor te_dnn_virtual_as(te_dnn_graph *g, const te_dnn_description *description);

/* y = mode(x, b, t) with b and t absent where the mode takes fewer; `math` is the type computed in, axis that of
 * CUDNN_POINTWISE_GEN_INDEX. */
void te_dnn_pointwise(te_dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t math, te_dnn_tensor x,
                      te_dnn_tensor b, te_dnn_tensor t, te_dnn_tensor y, int64_t axis);
void te_dnn_reduce(te_dnn_graph *g, cudnnReduceTensorOp_t operator, te_dnn_tensor x, te_dnn_tensor y);
/* c = a b; lengths: the m, n and k that count in each batch, or TE_DNN_NONE. */
void te_dnn_matmul(te_dnn_graph *g, te_dnn_tensor a, te_dnn_tensor b, te_dnn_tensor c, const te_dnn_tensor lengths[3]);
void te_dnn_reshape(te_dnn_graph *g, te_dnn_tensor x, te_dnn_tensor y);

/* Describes a device in JSON. Destroyed by the caller; NULL with the reason. */
cudnnBackendDescriptor_t te_dnn_device(const te_cuda_dnn_library *dnn, const char *json, char reason[TE_DNN_REASON]);
/* The plan of `engine`, or where that is NULL the first one of the library's choices, with `repeats` of those that give
 * the same bits every time; false with g's reason. For the device of `handle`, where it can be run, or for a described
 * one, where it cannot: one of the two is NULL. */
bool te_dnn_finish(te_dnn_graph *g, cudnnHandle_t handle, cudnnBackendDescriptor_t device, const te_dnn_engine *engine,
                   bool repeats, te_dnn_plan *plan);
void te_dnn_plan_close(const te_cuda_dnn_library *dnn, te_dnn_plan *plan);
/* Of a call that failed: the library's words. */
void te_dnn_describe(const te_cuda_dnn_library *dnn, const char *what, cudnnStatus_t status,
                     char reason[TE_DNN_REASON]);
/* Whether the failure is of what was asked for, not of the device. */
static inline bool te_dnn_declines(cudnnStatus_t status) { return status / 1000 == 2 || status / 1000 == 3; }
cudnnStatus_t te_dnn_run(const te_cuda_dnn_library *dnn, cudnnHandle_t handle, const te_dnn_plan *plan, int n,
                         const int64_t *uids, void *const *pointers, void *workspace);

#endif
