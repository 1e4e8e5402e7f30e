/* optim.c - optimizer passes over lists of tensors, for te.optim. */
#include "bindings.h"

#include "core/optim.h"

/* The field of the table at `group`. */
static double number_field(lua_State *L, int group, const char *function, const char *name, double otherwise)
{
    lua_getfield(L, group, name);
    double value = lua_isnil(L, -1) ? otherwise : te_lua_check_number(L, -1, function, name);
    lua_pop(L, 1);
    return value;
}

static int64_t int_field(lua_State *L, int group, const char *function, const char *name, int64_t otherwise)
{
    lua_getfield(L, group, name);
    int64_t value = lua_isnil(L, -1) ? otherwise : te_lua_check_int(L, -1, function, name);
    lua_pop(L, 1);
    return value;
}

static bool bool_field(lua_State *L, int group, const char *name)
{
    lua_getfield(L, group, name);
    bool value = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

enum { MAX_LISTS = 5 }; /* params, grads, two states, masters */

/* A step under way: one entry per group. Arrays of tensors stay on the Lua stack while it runs. */
typedef struct step_group {
    te_lua_tensors lists[MAX_LISTS];
    te_adamw       adamw;
    te_sgd         sgd;
} step_group;

/* List k of a group, n tensors (any number when n < 0); absent where allowed. */
static void list_field(lua_State *L, int group, const char *function, step_group *g, int k, const char *name, bool optional)
{
    int n = k ? g->lists[0].n : -1;
    lua_getfield(L, group, name);
    if (lua_isnil(L, -1) && optional) return;
    g->lists[k] = te_lua_check_tensors(L, lua_gettop(L), function, name);
    if (n >= 0 && g->lists[k].n != n) te_lua_fail(L, function, "%s: %d tensors for %d parameters", name, g->lists[k].n, n);
    for (int i = 0; k != 1 && i < g->lists[k].n; i++) te_lua_check_writable(L, function, g->lists[k].t[i]);
}

static void read_adamw(lua_State *L, int group, step_group *g)
{
    static const char *const options[] = {"params", "grads", "exp_avg", "exp_avg_sq", "masters", "lr", "beta1", "beta2", "eps",
                                          "weight_decay", "step", "grad_scale", NULL};
    const char *f = "adamw_step";
    te_lua_check_options(L, group, f, options);
    g->adamw = (te_adamw){.lr = number_field(L, group, f, "lr", 1e-3), .beta1 = number_field(L, group, f, "beta1", 0.9),
                          .beta2 = number_field(L, group, f, "beta2", 0.999), .eps = number_field(L, group, f, "eps", 1e-8),
                          .weight_decay = number_field(L, group, f, "weight_decay", 0),
                          .step = int_field(L, group, f, "step", 1),
                          .grad_scale = number_field(L, group, f, "grad_scale", 1)};
    list_field(L, group, f, g, 0, "params", false);
    list_field(L, group, f, g, 1, "grads", false);
    list_field(L, group, f, g, 2, "exp_avg", false);
    list_field(L, group, f, g, 3, "exp_avg_sq", false);
    list_field(L, group, f, g, 4, "masters", true);
}

static void read_sgd(lua_State *L, int group, step_group *g)
{
    static const char *const options[] = {"params", "grads", "momentum_buffers", "masters", "lr", "momentum", "dampening",
                                          "weight_decay", "nesterov", "first", "grad_scale", NULL};
    const char *f = "sgd_step";
    te_lua_check_options(L, group, f, options);
    g->sgd = (te_sgd){.lr = number_field(L, group, f, "lr", 1e-3), .momentum = number_field(L, group, f, "momentum", 0),
                      .dampening = number_field(L, group, f, "dampening", 0),
                      .weight_decay = number_field(L, group, f, "weight_decay", 0),
                      .grad_scale = number_field(L, group, f, "grad_scale", 1), .nesterov = bool_field(L, group, "nesterov"),
                      .first = bool_field(L, group, "first")};
    list_field(L, group, f, g, 0, "params", false);
    list_field(L, group, f, g, 1, "grads", false);
    list_field(L, group, f, g, 2, "momentum_buffers", g->sgd.momentum == 0);
    list_field(L, group, f, g, 4, "masters", true);
}

static te_status run_adamw(te_context *ctx, int n, const step_group *read, te_optim_group *groups)
{
    te_adamw *options = te_mem_alloc(&ctx->mem, (size_t)n * sizeof *options);
    if (!options) return te_fail_memory(ctx, "te.adamw_step");
    for (int i = 0; i < n; i++) options[i] = read[i].adamw;
    te_status status = te_adamw_step(ctx, n, options, groups);
    te_mem_free(&ctx->mem, options, (size_t)n * sizeof *options);
    return status;
}

static te_status run_sgd(te_context *ctx, int n, const step_group *read, te_optim_group *groups)
{
    te_sgd *options = te_mem_alloc(&ctx->mem, (size_t)n * sizeof *options);
    if (!options) return te_fail_memory(ctx, "te.sgd_step");
    for (int i = 0; i < n; i++) options[i] = read[i].sgd;
    te_status status = te_sgd_step(ctx, n, options, groups);
    te_mem_free(&ctx->mem, options, (size_t)n * sizeof *options);
    return status;
}

/* Reads the list of groups at 1, keeps every tensor while the engine works, and updates all groups at once. */
static int run_step(lua_State *L, const char *function, void (*read)(lua_State *, int, step_group *),
                    te_status (*step)(te_context *, int, const step_group *, te_optim_group *))
{
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    int             n = (int)lua_objlen(L, 1);
    step_group     *given = lua_newuserdata(L, ((size_t)n + 1) * sizeof *given);
    te_optim_group *groups = lua_newuserdata(L, ((size_t)n + 1) * sizeof *groups);
    memset(given, 0, ((size_t)n + 1) * sizeof *given);
    for (int i = 0; i < n; i++) {
        luaL_checkstack(L, MAX_LISTS * 2 + LUA_MINSTACK, "too many parameter groups");
        lua_rawgeti(L, 1, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        read(L, lua_gettop(L), &given[i]);
        const te_lua_tensors *l = given[i].lists;
        groups[i] = (te_optim_group){.n = l[0].n, .params = l[0].t, .grads = l[1].t, .states = {l[2].t, l[3].t}, .masters = l[4].t};
    }
    te_lua_enter(rt, L, function);
    for (int i = 0; i < n * MAX_LISTS; i++) te_lua_retain_tensors(&given[i / MAX_LISTS].lists[i % MAX_LISTS]);
    te_status status = step(rt->ctx, n, given, groups);
    for (int i = 0; i < n * MAX_LISTS; i++) te_lua_drop_tensors(&given[i / MAX_LISTS].lists[i % MAX_LISTS]);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, function, status);
}

/* adamw_step{ {params, grads, exp_avg, exp_avg_sq, masters, lr, beta1, beta2, eps, weight_decay, step, grad_scale}, … } */
static int adamw_step(lua_State *L) { return run_step(L, "adamw_step", read_adamw, run_adamw); }

/* sgd_step{ {params, grads, momentum_buffers, masters, lr, momentum, dampening, weight_decay, nesterov, first, grad_scale}, … } */
static int sgd_step(lua_State *L) { return run_step(L, "sgd_step", read_sgd, run_sgd); }

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
