/* autograd.c - backward, te.grad and the two settings that te.no_grad and te.autocast scope (in lua/te/scopes.lua). */
#include "bindings.h"

#include "core/autograd.h"

static const char *const backward_options[] = {"retain_graph", NULL};
static const char *const grad_options[] = {"grad_outputs", "retain_graph", NULL};

static bool read_flag(lua_State *L, int options, const char *function, const char *name)
{
    char text[256];
    if (!lua_istable(L, options)) return false;
    lua_getfield(L, options, name);
    if (!lua_isnil(L, -1) && !lua_isboolean(L, -1))
        te_lua_fail(L, function, "%s: expected true or false, got %s", name, te_lua_describe(L, -1, text, sizeof text));
    bool on = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return on;
}

/* loss:backward([grad], {retain_graph = false}) */
static int backward(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_tensor(L, 1, "backward", "self");
    bool given = te_lua_to_tensor(L, 2) != NULL;
    int  options = given || lua_isnoneornil(L, 2) ? 3 : 2;
    te_lua_check_count(L, options, "backward");
    if (options == 2 && !lua_istable(L, 2)) te_lua_check_tensor(L, 2, "backward", "grad");
    te_lua_check_options(L, options, "backward", backward_options);
    bool retain = read_flag(L, options, "backward", "retain_graph");
    te_lua_enter(rt, L, "backward");
    te_tensor *loss = te_lua_check_tensor(L, 1, "backward", "self");
    te_tensor *grad = given ? te_lua_check_tensor(L, 2, "backward", "grad") : NULL;
    te_tensor_retain(loss);
    te_tensor_retain(grad);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_backward(loss, grad, retain);
    te_lua_end(rt, call);
    te_tensor_release(loss);
    te_tensor_release(grad);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "backward", status);
}

/* Replaces a single tensor at `index` by a list of it; says whether it was one. */
static bool make_list(lua_State *L, int index)
{
    if (!te_lua_to_tensor(L, index)) return false;
    lua_createtable(L, 1, 0);
    lua_pushvalue(L, index);
    lua_rawseti(L, -2, 1);
    lua_replace(L, index);
    return true;
}

/* grad and replayed_grad with outputs, inputs and options on the stack. since: 0, or the first node of a stretch that
 * was computed again. */
static int run_grad(lua_State *L, uint64_t since)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_options(L, 3, "grad", grad_options);
    bool retain = read_flag(L, 3, "grad", "retain_graph");
    make_list(L, 1);
    bool           single = make_list(L, 2);
    te_lua_tensors outputs = te_lua_check_tensors(L, 1, "grad", "outputs");
    te_lua_tensors inputs = te_lua_check_tensors(L, 2, "grad", "inputs"), seeds = {0};
    if (lua_istable(L, 3)) {
        lua_getfield(L, 3, "grad_outputs");
        make_list(L, lua_gettop(L));
        if (!lua_isnil(L, -1)) seeds = te_lua_check_tensors(L, lua_gettop(L), "grad", "grad_outputs");
        if (seeds.t && seeds.n != outputs.n)
            return te_lua_fail(L, "grad", "grad_outputs: %d for %d outputs", seeds.n, outputs.n);
    }
    if (!inputs.n && !since) return te_lua_fail(L, "grad", "inputs: the list is empty");
    te_lua_enter(rt, L, "grad");
    te_tensor **grads = te_lua_scratch(L, (size_t)inputs.n * sizeof *grads);
    memset(grads, 0, (size_t)inputs.n * sizeof *grads);
    lua_createtable(L, inputs.n,
                    0); /* the result: userdata to take the gradients, since making them later could raise */
    for (int i = 0; i < inputs.n; i++) {
        te_lua_new_tensor(L);
        lua_rawseti(L, -2, i + 1);
    }
    te_lua_call call = te_lua_begin(rt, L);
    te_status status =
        since ? te_autograd_replayed(rt->ctx, since, outputs.t, seeds.t, outputs.n, inputs.t, grads, inputs.n)
              : te_autograd_grad(rt->ctx, outputs.t, seeds.t, outputs.n, inputs.t, grads, inputs.n, retain);
    te_lua_end(rt, call);
    te_lua_drop_tensors(&outputs);
    te_lua_drop_tensors(&inputs);
    te_lua_drop_tensors(&seeds);
    if (status != TE_OK) return te_lua_raise(rt, L, "grad", status);
    for (int i = 0; i < inputs.n; i++) {
        lua_rawgeti(L, -1, i + 1);
        te_lua_to_tensor(L, -1)->t = grads[i];
        lua_pop(L, 1);
        if (grads[i]) continue;
        lua_pushboolean(L, false);
        lua_rawseti(L, -2, i + 1);
    }
    if (!single) return 1;
    lua_rawgeti(L, -1, 1);
    if (!lua_toboolean(L, -1)) lua_pushnil(L);
    return 1;
}

/* te.grad(outputs, inputs, {grad_outputs =, retain_graph =}): gradients of outputs with respect to inputs, leaving
 * every .grad alone; a list like `inputs` with false where there is no path, or a tensor (or nil) for a single
 * input. */
static int grad(lua_State *L)
{
    te_lua_check_count(L, 3, "grad");
    lua_settop(L, 3);
    return run_grad(L, 0);
}

/* replayed_grad(outputs, inputs, {grad_outputs =}, since): te.grad in backward of a stretch that was computed again,
 * whose first node is `since`. The pass around it gets the gradients of everything else that the stretch met. */
static int replayed_grad(lua_State *L)
{
    uint64_t since = (uint64_t)luaL_checknumber(L, 4);
    lua_settop(L, 3);
    return run_grad(L, since);
}

/* next_node(): the number of the next node of the graph. */
static int next_node(lua_State *L)
{
    lua_pushnumber(L, (lua_Number)te_lua_runtime(L)->ctx->next_node);
    return 1;
}

static int set_grad_enabled(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TBOOLEAN);
    te_lua_enter(rt, L, "set_grad_enabled");
    lua_pushboolean(L, te_context_set_grad_enabled(rt->ctx, lua_toboolean(L, 1)));
    return 1;
}

static int grad_enabled(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "grad_enabled");
    lua_pushboolean(L, te_context_grad_enabled(rt->ctx));
    return 1;
}

/* gradient_uses(…): how often operations have met tensors that take part in gradients so far, these among them. */
static int gradient_uses(lua_State *L)
{
    te_context *ctx = te_lua_runtime(L)->ctx;
    for (int i = 1; i <= lua_gettop(L); i++) {
        const te_lua_tensor *u = te_lua_to_tensor(L, i);
        if (u && u->t) ctx->gradient_uses += te_tensor_requires_grad(u->t);
    }
    lua_pushnumber(L, (lua_Number)ctx->gradient_uses);
    return 1;
}

/* set_recompute_width(columns): returns the setting before. */
static int set_recompute_width(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    double  columns = luaL_checknumber(L, 1);
    te_lua_enter(rt, L, "set_recompute");
    lua_pushnumber(L, (double)rt->ctx->recompute_width);
    rt->ctx->recompute_width = columns < 0x1p53 ? (int64_t)columns : (int64_t)1 << 53;
    return 1;
}

/* writing_time(): the time by the writes in place. */
static int writing_time(lua_State *L)
{
    lua_pushnumber(L, (double)te_lua_runtime(L)->ctx->clock);
    return 1;
}

const char te_lua_settle[] = "te.settle";

/* settle_with(fn): fn puts back what scopes set, after a call of the host that failed. For the library alone, which
 * calls it when it loads. */
static int settle_with(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    te_lua_push_kept(L, te_lua_settle);
    if (!lua_isnil(L, -1)) return te_lua_fail(L, NULL, "settle_with: the function is given once");
    lua_settop(L, 1);
    te_lua_keep(L, te_lua_settle);
    return 0;
}

static void push_time(lua_State *L, uint64_t time)
{
    if (time == UINT64_MAX)
        lua_pushnil(L);
    else
        lua_pushnumber(L, (double)time);
}

static uint64_t check_time(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? UINT64_MAX : (uint64_t)luaL_checknumber(L, index);
}

/* replay_since(since or nil, began): from now on nothing may be read that is older than `since` and was written between
 * then and `began`; returns the setting before. */
static int replay_since(lua_State *L)
{
    te_context *ctx = te_lua_runtime(L)->ctx;
    uint64_t    since = ctx->replayed_since, began = ctx->replay_began;
    ctx->replayed_since = check_time(L, 1);
    ctx->replay_began = check_time(L, 2);
    push_time(L, since);
    push_time(L, began);
    return 2;
}

static void push_compute_dtype(lua_State *L, te_dtype dtype)
{
    if (dtype == TE_DTYPE_COUNT)
        lua_pushnil(L);
    else
        lua_pushstring(L, te_dtype_name(dtype));
}

/* set_compute_dtype(name or nil): returns the one before. */
static int set_compute_dtype(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    te_dtype dtype = TE_DTYPE_COUNT;
    te_lua_enter(rt, L, "autocast");
    if (!lua_isnoneornil(L, 1)) dtype = te_lua_check_dtype(L, 1, "autocast", "dtype");
    if (dtype != TE_DTYPE_COUNT && dtype != TE_F32 && dtype != TE_BF16 && dtype != TE_F16)
        return te_lua_fail(L, "autocast", "dtype: %s is no compute dtype; use float32, bfloat16 or float16",
                           te_dtype_name(dtype));
    push_compute_dtype(L, te_context_set_compute_dtype(rt->ctx, dtype));
    return 1;
}

static int compute_dtype(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "autocast");
    push_compute_dtype(L, rt->ctx->compute_dtype);
    return 1;
}

const luaL_Reg te_lua_autograd_functions[] = {
    {"backward", backward},
    {"grad", grad},
    {"replayed_grad", replayed_grad},
    {"next_node", next_node},
    {"set_grad_enabled", set_grad_enabled},
    {"grad_enabled", grad_enabled},
    {"gradient_uses", gradient_uses},
    {"set_compute_dtype", set_compute_dtype},
    {"compute_dtype", compute_dtype},
    {"set_recompute_width", set_recompute_width},
    {"writing_time", writing_time},
    {"replay_since", replay_since},
    {"settle_with", settle_with},
    {NULL, NULL},
};
