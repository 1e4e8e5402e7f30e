/* describe.h - a plan in numbers: its steps, what each moves and computes, and why neighbours are not one step. */
#ifndef TE_CORE_FUSER_DESCRIBE_H
#define TE_CORE_FUSER_DESCRIBE_H

#include "group.h"

typedef enum te_step_what {
    TE_STEP_ROW_PROGRAM, TE_STEP_PRODUCT, TE_STEP_CALLED, TE_STEP_QUANTIZE, TE_STEP_GATHER
} te_step_what;

typedef struct te_step_description {
    te_step_what what;
    const char  *kernel; /* "layer_norm", "fused.backward", "linear", "dgrad", "wgrad", "self_attention",
                         "quantize input to float8_e4m3, row-wise and column-wise" */
    int          n_nodes;
    const int   *nodes;  /* of the group, in order */
    double       read_bytes, written_bytes, flops;
    bool         backward;
} te_step_description;

/* An edge of the graph that crosses steps. */
typedef struct te_split_description {
    int         from, to; /* nodes */
    const char *reason; /* valid during the call */
} te_split_description;

/* Calls `step` for every step, forward in order and then backward in order, and `split` for every edge between steps.
 * Nothing runs. TE_ERROR_UNSUPPORTED with the reason when there is no plan for these inputs. */
te_status te_group_describe(te_group *group, te_tensor *const *inputs,
                            void (*step)(void *user, const te_step_description *),
                            void (*split)(void *user, const te_split_description *), void *user);
/* The caller's label and the operation of a node. */
int         te_group_node_label(const te_group *group, int node);
const char *te_group_node_name(const te_group *group, int node);

#endif
