/* optim_sgd.c - stochastic gradient descent, with momentum and Nesterov's (Sutskever et al. 2013) or without. */
#include "optim_internal.h"

static const te_utility sgd_program = {
    .name = "sgd",
    .inputs = "p g b",
    .params = "lr momentum carry fresh nesterov weight_decay grad_scale",
    .outputs = "p2 b2 copy",
    .formula = "h = g * grad_scale + weight_decay * p; b2 = carry * b + fresh * h; p2 = p - lr * where(nesterov, h + "
               "momentum * b2, b2); copy = p2",
};

static const te_utility plain_sgd_program = {
    .name = "sgd",
    .inputs = "p g",
    .params = "lr weight_decay grad_scale",
    .outputs = "p2 copy",
    .formula = "p2 = p - lr * (g * grad_scale + weight_decay * p); copy = p2",
};

/* Groups with and without momentum are different programs, so each has a run of its own; the first one begins when all
 * are bound. */
typedef struct sgd_group {
    te_optim_pending pending;
    double values[1][TE_OPTIM_VALUES];
} sgd_group;

static te_status open_sgd_group(te_context *ctx, sgd_group *g, const te_sgd *o, const te_optim_group *group)
{
    bool plain = o->momentum == 0;
    const double with_momentum[TE_OPTIM_VALUES] = {o->lr, o->momentum, o->first ? 0 : o->momentum,
                                              o->first ? 1 : 1 - o->dampening, o->nesterov, o->weight_decay,
                                              o->grad_scale};
    const double without[TE_OPTIM_VALUES] = {o->lr, o->weight_decay, o->grad_scale};
    memcpy(g->values[0], plain ? without : with_momentum, sizeof without);
    te_optim_work work = {.program = plain ? &plain_sgd_program : &sgd_program, .n_states = plain ? 0 : 1,
                          .n_groups = 1, .groups = group, .values = (const double(*)[TE_OPTIM_VALUES])g->values};
    return te_optim_open(ctx, &g->pending, &work);
}

te_status te_sgd_step(te_context *ctx, int n_groups, const te_sgd *options, const te_optim_group *groups)
{
    if (n_groups < 1) return TE_OK;
    size_t bytes = (size_t)n_groups * sizeof(sgd_group);
    sgd_group *all = te_mem_zalloc(&ctx->mem, bytes);
    te_status status = all ? TE_OK : te_fail_memory(ctx, "sgd");
    for (int k = 0; k < n_groups && status == TE_OK; k++)
        status = open_sgd_group(ctx, &all[k], &options[k], &groups[k]);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = te_optim_settle(ctx, &all[k].pending);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = te_optim_reserve(ctx, &all[k].pending);
    for (int k = 0; k < n_groups && status == TE_OK; k++) status = te_optim_run(ctx, &all[k].pending);
    for (int k = 0; all && k < n_groups; k++) te_optim_close(ctx, &all[k].pending);
    if (all) te_mem_free(&ctx->mem, all, bytes);
    return status;
}
