/* optim.c - optimizer passes over lists of tensors, for te.optim. */
#include "bindings.h"

#include "core/optim.h"

static double number_field(lua_State *L, const char *function, const char *name, double otherwise)
{
    lua_getfield(L, 1, name);
    double value = lua_isnil(L, -1) ? otherwise : te_lua_check_number(L, -1, function, name);
    lua_pop(L, 1);
    return value;
}

static int64_t int_field(lua_State *L, const char *function, const char *name, int64_t otherwise)
{
    lua_getfield(L, 1, name);
    int64_t value = lua_isnil(L, -1) ? otherwise : te_lua_check_int(L, -1, function, name);
    lua_pop(L, 1);
    return value;
}

static bool bool_field(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    bool value = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

/* A list of n tensors (any number when n < 0); absent where allowed. The array stays on the stack. */
static te_lua_tensors list_field(lua_State *L, const char *function, const char *name, int n, bool optional)
{
    te_lua_tensors list = {0};
    lua_getfield(L, 1, name);
    if (lua_isnil(L, -1) && optional) return list;
    list = te_lua_check_tensors(L, lua_gettop(L), function, name);
    if (n >= 0 && list.n != n) te_lua_fail(L, function, "%s: %d tensors for %d parameters", name, list.n, n);
    return list;
}

static void check_lists_writable(lua_State *L, const char *function, const te_lua_tensors *list)
{
    for (int i = 0; i < list->n; i++) te_lua_check_writable(L, function, list->t[i]);
}

/* Runs `step` with every list retained. */
typedef te_status (*step_function)(te_lua *rt, const void *options, const te_lua_tensors *lists);

static int run_step(te_lua *rt, lua_State *L, const char *function, step_function step, const void *options, const te_lua_tensors *lists,
                    int n_lists)
{
    for (int i = 0; i < n_lists; i++) check_lists_writable(L, function, &lists[i]);
    te_lua_enter(rt, L, function);
    for (int i = 0; i < n_lists; i++) te_lua_retain_tensors(&lists[i]);
    te_status status = step(rt, options, lists);
    for (int i = 0; i < n_lists; i++) te_lua_drop_tensors(&lists[i]);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, function, status);
}

static te_status run_adamw(te_lua *rt, const void *options, const te_lua_tensors *l)
{
    return te_adamw_step(rt->ctx, options, l[0].n, l[0].t, l[1].t, l[2].t, l[3].t, l[4].t);
}

/* adamw_step{params, grads, exp_avg, exp_avg_sq, masters, lr, beta1, beta2, eps, weight_decay, step, grad_scale} */
static int adamw_step(lua_State *L)
{
    static const char *const options[] = {"params", "grads", "exp_avg", "exp_avg_sq", "masters", "lr", "beta1", "beta2", "eps",
                                          "weight_decay", "step", "grad_scale", NULL};
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    te_lua_check_options(L, 1, "adamw_step", options);
    te_adamw o = {.lr = number_field(L, "adamw_step", "lr", 1e-3), .beta1 = number_field(L, "adamw_step", "beta1", 0.9),
                  .beta2 = number_field(L, "adamw_step", "beta2", 0.999), .eps = number_field(L, "adamw_step", "eps", 1e-8),
                  .weight_decay = number_field(L, "adamw_step", "weight_decay", 0),
                  .step = int_field(L, "adamw_step", "step", 1),
                  .grad_scale = number_field(L, "adamw_step", "grad_scale", 1)};
    te_lua_tensors lists[5];
    lists[0] = list_field(L, "adamw_step", "params", -1, false);
    lists[1] = list_field(L, "adamw_step", "grads", lists[0].n, false);
    lists[2] = list_field(L, "adamw_step", "exp_avg", lists[0].n, false);
    lists[3] = list_field(L, "adamw_step", "exp_avg_sq", lists[0].n, false);
    lists[4] = list_field(L, "adamw_step", "masters", lists[0].n, true);
    return run_step(rt, L, "adamw_step", run_adamw, &o, lists, 5);
}

static te_status run_sgd(te_lua *rt, const void *options, const te_lua_tensors *l)
{
    return te_sgd_step(rt->ctx, options, l[0].n, l[0].t, l[1].t, l[2].t, l[3].t);
}

/* sgd_step{params, grads, momentum_buffers, masters, lr, momentum, dampening, weight_decay, nesterov, first, grad_scale} */
static int sgd_step(lua_State *L)
{
    static const char *const options[] = {"params", "grads", "momentum_buffers", "masters", "lr", "momentum", "dampening",
                                          "weight_decay", "nesterov", "first", "grad_scale", NULL};
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    te_lua_check_options(L, 1, "sgd_step", options);
    te_sgd o = {.lr = number_field(L, "sgd_step", "lr", 1e-3), .momentum = number_field(L, "sgd_step", "momentum", 0),
                .dampening = number_field(L, "sgd_step", "dampening", 0), .weight_decay = number_field(L, "sgd_step", "weight_decay", 0),
                .grad_scale = number_field(L, "sgd_step", "grad_scale", 1), .nesterov = bool_field(L, "nesterov"),
                .first = bool_field(L, "first")};
    te_lua_tensors lists[4];
    lists[0] = list_field(L, "sgd_step", "params", -1, false);
    lists[1] = list_field(L, "sgd_step", "grads", lists[0].n, false);
    lists[2] = list_field(L, "sgd_step", "momentum_buffers", lists[0].n, o.momentum == 0);
    lists[3] = list_field(L, "sgd_step", "masters", lists[0].n, true);
    return run_step(rt, L, "sgd_step", run_sgd, &o, lists, 4);
}

/* sum_squares(list): a table with the sum of squares of each tensor, and their total. */
static int sum_squares(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    te_lua_tensors list = te_lua_check_tensors(L, 1, "sum_squares", "tensors");
    double        *squares = lua_newuserdata(L, ((size_t)list.n + 1) * sizeof *squares), total = 0;
    te_lua_enter(rt, L, "sum_squares");
    te_lua_retain_tensors(&list);
    te_status status = te_sum_squares(rt->ctx, list.n, list.t, squares);
    te_lua_drop_tensors(&list);
    if (status != TE_OK) return te_lua_raise(rt, L, "sum_squares", status);
    lua_createtable(L, list.n, 0);
    for (int i = 0; i < list.n; i++) {
        lua_pushnumber(L, squares[i]);
        lua_rawseti(L, -2, i + 1);
        total += squares[i];
    }
    lua_pushnumber(L, total);
    return 2;
}

const luaL_Reg te_lua_optim_functions[] = {
    {"adamw_step", adamw_step}, {"sgd_step", sgd_step}, {"sum_squares", sum_squares}, {NULL, NULL},
};
