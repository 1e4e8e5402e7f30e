/* group.h - a group: neighbouring operations planned and run as one.
 *
 * A group is a small graph. Its inputs are x, extra inputs and parameters; its nodes apply declared operations; its
 * outputs are values of either kind:
 *
 *      int x = te_group_input(g, false), w = te_group_input(g, true);
 *      te_group_op(g, &(te_group_call){.op = layer_norm, .values = {x, w, TE_NO_VALUE}}, &h);
 *      te_group_output(g, h);
 *      te_group_run(g, inputs, outputs);
 *
 * The first run with inputs of a new kind makes a *plan* (plan.h): which nodes share a kernel, forward and backward.
 * Plans are kept by dtypes, widths, compute dtype, recipes and wanted gradients; the number of tokens is free. Those
 * used longest ago go when they are many. One node of the tape stands for the whole run.
 *
 * Not everything can be planned: an operation that mixes tokens in a way the planner does not know, shapes that
 * broadcast in several dimensions. Then te_group_run fails with TE_ERROR_UNSUPPORTED before anything ran, the message
 * says why, and the caller runs the operations one by one.
 */
#ifndef TE_CORE_FUSER_GROUP_H
#define TE_CORE_FUSER_GROUP_H

#include "../op.h"
#include "../recipe.h"

enum { TE_GROUP_MAX_OUTPUTS = TE_OP_MAX_OUTPUTS };

/* The functions of te.h, and what hosts do without. */

/* One application of an operation. `values` by position of the operation's tensor parameters, TE_NO_VALUE where absent;
 * `args` are the operation's arguments in the order of its signature, of which those that are no tensors count. `label`
 * says which of the caller's operations it belongs to, for describe.h. */
typedef struct te_group_call {
    const te_op  *op;
    int           values[TE_OP_MAX_INPUTS];
    const te_arg *args;
    int           n_args, label;
    const int    *list; /* grouped_linear: values of its weights, then of its biases, if any; grouped_biases: of
                           those */
    int           n_list;
    te_recipe_state *const *states; /* grouped_linear: of each weight, as recipe_state is of a product; or none */
    int           n_states;
    bool          cache_quantized; /* backward gets its first input as E4M3 with one factor holds it: a byte for
                                      a value */
    te_recipe_state *recipe_state; /* of a product or an attention, which then runs under the recipe that is active; or
                                      NULL */
} te_group_call;

te_status te_group_op(te_group *group, const te_group_call *call, int *result);

#endif
