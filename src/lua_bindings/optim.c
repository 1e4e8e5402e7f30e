/* optim.c - optimizer passes over lists of tensors, for te.optim; optim_prepared.c makes those again that were made. */
#include "bindings.h"

#include "core/optim.h"

/* The field of the table at `group`. */
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
    te_tensor     *numbers, *clip, *unmade; /* behind the last group, in a step whose numbers lie on the device */
} step_group;

/* List k of a group, n tensors (any number when n < 0); absent where allowed. */
static void list_field(lua_State *L, int group, const char *function, step_group *g, int k, const char *name,
                       bool optional)
{
    int n = k ? g->lists[0].n : -1;
    lua_getfield(L, group, name);
    if (lua_isnil(L, -1) && optional) return;
    g->lists[k] = te_lua_check_tensors(L, lua_gettop(L), function, name);
    if (n >= 0 && g->lists[k].n != n)
        te_lua_fail(L, function, "%s: %d tensors for %d parameters", name, g->lists[k].n, n);
    for (int i = 0; k != 1 && i < g->lists[k].n; i++) te_lua_check_writable(L, function, g->lists[k].t[i]);
}

static void read_adamw(lua_State *L, int group, step_group *g)
{
    static const char *const options[] = {"params", "grads", "exp_avg",      "exp_avg_sq", "masters",    "lr", "beta1",
                                          "beta2",  "eps",   "weight_decay", "step",       "grad_scale", "states",
                                          NULL};
    const char *f = "adamw_step";
    te_lua_check_options(L, group, f, options);
    g->adamw = (te_adamw){.lr = te_lua_number_field(L, group, f, "lr", 1e-3),
                          .beta1 = te_lua_number_field(L, group, f, "beta1", 0.9),
                          .beta2 = te_lua_number_field(L, group, f, "beta2", 0.999),
                          .eps = te_lua_number_field(L, group, f, "eps", 1e-8),
                          .weight_decay = te_lua_number_field(L, group, f, "weight_decay", 0),
                          .step = int_field(L, group, f, "step", 1),
                          .grad_scale = te_lua_number_field(L, group, f, "grad_scale", 1)};
    list_field(L, group, f, g, 0, "params", false);
    list_field(L, group, f, g, 1, "grads", false);
    list_field(L, group, f, g, 2, "exp_avg", false);
    list_field(L, group, f, g, 3, "exp_avg_sq", false);
    list_field(L, group, f, g, 4, "masters", true);
}

static void read_sgd(lua_State *L, int group, step_group *g)
{
    static const char *const options[] = {"params",   "grads",    "momentum_buffers", "masters",
                                          "lr",       "momentum", "dampening",        "weight_decay",
                                          "nesterov", "first",    "grad_scale",       "step",
                                          "states",   NULL};
    const char *f = "sgd_step";
    te_lua_check_options(L, group, f, options);
    g->sgd = (te_sgd){.lr = te_lua_number_field(L, group, f, "lr", 1e-3),
                      .momentum = te_lua_number_field(L, group, f, "momentum", 0),
                      .dampening = te_lua_number_field(L, group, f, "dampening", 0),
                      .weight_decay = te_lua_number_field(L, group, f, "weight_decay", 0),
                      .grad_scale = te_lua_number_field(L, group, f, "grad_scale", 1),
                      .nesterov = bool_field(L, group, "nesterov"),
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

static te_status run_adamw_on(te_context *ctx, int n, const step_group *read, te_optim_group *groups)
{
    return te_adamw_step_on(ctx, n, read[n].numbers, read[n].clip, read[n].unmade, groups);
}

void te_lua_count_step(lua_State *L, lua_Number step)
{
    int top = lua_gettop(L);
    lua_pushliteral(L, "states");
    lua_rawget(L, top);
    int n = lua_istable(L, -1) ? (int)lua_objlen(L, -1) : 0;
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, -1, i + 1);
        if (lua_istable(L, -1)) {
            lua_pushliteral(L, "step");
            lua_pushnumber(L, step);
            lua_rawset(L, -3);
        }
        lua_pop(L, 1);
    }
    lua_settop(L, top);
}

/* Of the groups at 1, each its own `step`. */
static void count_groups(lua_State *L, int n)
{
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 1, i + 1);
        lua_pushliteral(L, "step");
        if (lua_istable(L, -2)) lua_rawget(L, -2);
        lua_Number step = lua_tonumber(L, -1);
        lua_pop(L, 1);
        if (lua_istable(L, -1)) te_lua_count_step(L, step);
        lua_pop(L, 1);
    }
}

/* Reads the list of groups at 1, keeps every tensor while the engine works, and updates all groups at once. */
static int run_step(lua_State *L, const char *function, void (*read)(lua_State *, int, step_group *),
                    te_status (*step)(te_context *, int, const step_group *, te_optim_group *))
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_stack(rt, L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 4);
    int             n = (int)lua_objlen(L, 1);
    step_group     *given = te_lua_scratch(L, ((size_t)n + 1) * sizeof *given);
    te_optim_group *groups = te_lua_scratch(L, ((size_t)n + 1) * sizeof *groups);
    memset(given, 0, ((size_t)n + 1) * sizeof *given);
    for (int i = 0; i < n; i++) {
        luaL_checkstack(L, MAX_LISTS * 2 + LUA_MINSTACK, "too many parameter groups");
        lua_rawgeti(L, 1, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        read(L, lua_gettop(L), &given[i]);
        const te_lua_tensors *l = given[i].lists;
        groups[i] = (te_optim_group){
            .n = l[0].n, .params = l[0].t, .grads = l[1].t, .states = {l[2].t, l[3].t}, .masters = l[4].t};
    }
    te_lua_enter(rt, L, function);
    step_group *last = &given[n];
    if (step == run_adamw_on) last->numbers = te_lua_check_tensor(L, 2, function, "numbers");
    if (step == run_adamw_on && !lua_isnil(L, 3)) last->clip = te_lua_check_tensor(L, 3, function, "clip");
    if (last->clip) last->unmade = te_lua_check_tensor(L, 4, function, "unmade");
    te_tensor_retain(last->numbers), te_tensor_retain(last->clip), te_tensor_retain(last->unmade);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = step(rt->ctx, n, given, groups);
    te_lua_end(rt, call);
    te_tensor_release(last->numbers), te_tensor_release(last->clip), te_tensor_release(last->unmade);
    for (int i = 0; i < n * MAX_LISTS; i++) te_lua_drop_tensors(&given[i / MAX_LISTS].lists[i % MAX_LISTS]);
    if (status != TE_OK) return te_lua_raise(rt, L, function, status);
    count_groups(L, n);
    return 0;
}

/* adamw_step{ {params, grads, exp_avg, exp_avg_sq, masters, lr, beta1, beta2, eps, weight_decay, step, grad_scale,
 * states}, … }; states: nil, or tables whose field `step` becomes that of the group. */
static int adamw_step(lua_State *L) { return run_step(L, "adamw_step", read_adamw, run_adamw); }

/* sgd_step{ {params, grads, momentum_buffers, masters, lr, momentum, dampening, weight_decay, nesterov, first,
 * grad_scale, step, states}, … } */
static int sgd_step(lua_State *L) { return run_step(L, "sgd_step", read_sgd, run_sgd); }

/* adamw_step_on(groups, numbers[, clip, unmade]): adamw_step with its coefficients in `numbers`, see adamw_send; clip:
 * grad_clip's; unmade: float64 {1} that counts the steps which clip did not allow. */
static int adamw_step_on(lua_State *L) { return run_step(L, "adamw_step_on", read_adamw, run_adamw_on); }

/* --- gradients and masters ---------------------------------------------------------------------------------------- */

/* grad_clip(list, loss or nil, scale, max): float64 {3}: norm, factor, whether the step is allowed. */
static int grad_clip(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    lua_settop(L, 4);
    te_lua_tensors list = te_lua_check_tensors(L, 1, "grad_clip", "tensors");
    double scale = te_lua_check_number(L, 3, "grad_clip", "scale"), max = te_lua_check_number(L, 4, "grad_clip", "max");
    te_lua_enter(rt, L, "grad_clip");
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_tensor     *loss = lua_isnil(L, 2) ? NULL : te_lua_check_tensor(L, 2, "grad_clip", "loss");
    te_tensor_retain(loss);
    te_lua_call call = te_lua_begin(rt, L);
    u->t = te_grad_clip(rt->ctx, list.n, list.t, loss, scale, max);
    te_lua_end(rt, call);
    te_tensor_release(loss);
    te_lua_drop_tensors(&list);
    return u->t ? 1 : te_lua_raise(rt, L, "optim.grad_clip", rt->ctx->status);
}

/* sum_squares(list): a table with the sum of squares of each tensor, and their total. */
static int sum_squares(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    te_lua_tensors list = te_lua_check_tensors(L, 1, "sum_squares", "tensors");
    double        *squares = te_lua_scratch(L, ((size_t)list.n + 1) * sizeof *squares), total = 0;
    te_lua_enter(rt, L, "sum_squares");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_sum_squares(rt->ctx, list.n, list.t, squares);
    te_lua_end(rt, call);
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

/* gradient(parameter): its main_grad where it has one, else its grad, or nil. */
static int gradient(lua_State *L)
{
    te_lua_tensor *u = te_lua_new_tensor(L);
    u->t = te_tensor_retain(te_tensor_gradient(te_lua_check_tensor(L, 1, "gradient", "parameter")));
    if (!u->t) lua_pushnil(L);
    return 1;
}

/* zero_gradient(parameter): what zero_grad does to each. */
static int zero_gradient(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "zero_grad");
    te_tensor *t = te_tensor_retain(te_lua_check_tensor(L, 1, "zero_grad", "parameter"));
    te_lua_call call = te_lua_begin(rt, L);
    te_status  status = te_tensor_zero_gradient(t);
    te_lua_end(rt, call);
    te_tensor_release(t);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "zero_grad", status);
}

/* A master and its parameter, n of each. */
static void read_masters(lua_State *L, te_lua_tensors *masters, te_lua_tensors *params)
{
    *masters = te_lua_check_tensors(L, 1, "step", "masters");
    *params = te_lua_check_tensors(L, 2, "step", "params");
    if (masters->n != params->n) te_lua_fail(L, "step", "%d masters for %d parameters", masters->n, params->n);
}

/* catch_up(masters, params): has masters take over what others wrote to their parameters; each pair on one device. */
static int catch_up(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    te_lua_tensors masters, params;
    te_status      status = TE_OK;
    read_masters(L, &masters, &params);
    te_lua_enter(rt, L, "step");
    te_lua_call call = te_lua_begin(rt, L);
    for (int i = 0; i < params.n && status == TE_OK; i++) {
        status = te_optim_check(rt->ctx, "step", i, params.t[i], masters.t[i]);
        if (status == TE_OK) status = te_optim_catch_up(masters.t[i], params.t[i]);
    }
    te_lua_end(rt, call);
    te_lua_drop_tensors(&masters), te_lua_drop_tensors(&params);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "step", status);
}

/* follow(masters, params): from here on each master holds what its parameter does. */
static int follow(lua_State *L)
{
    te_lua_tensors masters, params;
    read_masters(L, &masters, &params);
    for (int i = 0; i < params.n; i++) te_optim_follow(masters.t[i], params.t[i]);
    te_lua_drop_tensors(&masters), te_lua_drop_tensors(&params);
    return 0;
}

/* forget(masters): nobody knows whether they hold what their parameters do. */
static int forget(lua_State *L)
{
    te_lua_tensors masters = te_lua_check_tensors(L, 1, "load_state_dict", "masters");
    for (int i = 0; i < masters.n; i++) te_optim_forget(masters.t[i]);
    te_lua_drop_tensors(&masters);
    return 0;
}

const luaL_Reg te_lua_optim_functions[] = {
    {"adamw_step", adamw_step},     {"adamw_step_on", adamw_step_on},   {"sgd_step", sgd_step},
    {"grad_clip", grad_clip},       {"sum_squares", sum_squares},       {"gradient", gradient},
    {"zero_gradient", zero_gradient}, {"catch_up_masters", catch_up},   {"follow_masters", follow},
    {"forget_masters", forget},     {NULL, NULL},
};
