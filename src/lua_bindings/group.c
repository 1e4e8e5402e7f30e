/* group.c - groups of operations for lua/te/fuser.lua: te._core.group_*.
 *
 *     group_new()                                   a group
 *     group_input(g, is_parameter)                  a value, a number from 0
 *     group_accepts(op)                             whether groups can hold an operation, by name or as a value; or false and why
 *     group_op(g, label, op, values, attributes, numbers)
 *                                                   the value of an operation's result; false in `values`: absent, or the
 *                                                   number at the same place in `numbers`
 *     group_output(g, value)
 *     group_run(g, tensors…)                        the outputs; or nil and the reason when these inputs cannot be planned
 */
#include "bindings.h"

#include "core/fuser/group.h"

static const char group_tag[] = "te.group";

typedef struct lua_group {
    const void *tag;
    te_group   *group;
} lua_group;

static lua_group *check_group(lua_State *L, const char *function)
{
    lua_group *u = lua_type(L, 1) == LUA_TUSERDATA && lua_objlen(L, 1) >= sizeof *u ? lua_touserdata(L, 1) : NULL;
    if (!u || u->tag != group_tag || !u->group) te_lua_fail(L, function, "expected a group");
    return u;
}

static int collect(lua_State *L)
{
    lua_group *u = lua_touserdata(L, 1);
    te_group_release(u->group);
    u->group = NULL;
    return 0;
}

static int group_new(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "group");
    lua_group *u = lua_newuserdata(L, sizeof *u);
    *u = (lua_group){.tag = group_tag};
    lua_createtable(L, 0, 1);
    te_lua_push_anchor(L);
    lua_pushcclosure(L, collect, 1);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    u->group = te_group_new(rt->ctx);
    if (!u->group) return te_lua_raise(rt, L, "group", rt->ctx->status);
    return 1;
}

static int group_input(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_group *u = check_group(L, "group_input");
    int        value = te_group_input(u->group, lua_toboolean(L, 2));
    if (value == TE_NO_VALUE) return te_lua_raise(rt, L, "group", rt->ctx->status);
    lua_pushinteger(L, value);
    return 1;
}

/* The operation at `index`: a name, or a value from te._core.define. */
static const te_op *check_op(te_lua *rt, lua_State *L, int index)
{
    const te_op *op = te_lua_to_operation(L, index);
    if (!op) op = te_op_find(rt->ctx, luaL_checkstring(L, index));
    if (!op) te_lua_raise(rt, L, "group", rt->ctx->status);
    return op;
}

static int group_accepts(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    if (te_group_accepts(rt->ctx, check_op(rt, L, 1))) {
        lua_pushboolean(L, 1);
        return 1;
    }
    lua_pushboolean(L, 0);
    lua_pushstring(L, rt->ctx->message);
    return 2;
}

/* Numbers in place of tensors. */
static void read_numbers(lua_State *L, int index, te_lua_reader *r)
{
    for (int i = 0; i < r->op->n_params && lua_istable(L, index); i++) {
        const te_param *p = &r->op->params[i];
        if (p->type != TE_TYPE_TENSOR) continue;
        lua_rawgeti(L, index, p->slot + 1);
        if (lua_isnumber(L, -1)) r->args[i] = (te_arg){.kind = TE_ARG_NUMBER, .as.number = lua_tonumber(L, -1)};
        lua_pop(L, 1);
    }
}

static int group_op(lua_State *L)
{
    te_lua       *rt = te_lua_runtime(L);
    lua_group    *u = check_group(L, "group_op");
    te_lua_reader r = {.L = L};
    te_group_call call = {.label = (int)luaL_checkinteger(L, 2)};
    int           result;
    lua_settop(L, 6);
    call.op = r.op = check_op(rt, L, 3);
    r.name = r.op->name;
    luaL_checktype(L, 4, LUA_TTABLE);
    te_lua_read_attributes(&r, 5);
    read_numbers(L, 6, &r);
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) {
        lua_rawgeti(L, 4, i + 1);
        call.values[i] = lua_isnumber(L, -1) ? (int)lua_tointeger(L, -1) : TE_NO_VALUE;
        lua_pop(L, 1);
    }
    call.args = r.args;
    call.n_args = r.op->n_params;
    te_status status = te_group_op(u->group, &call, &result);
    if (status != TE_OK) return te_lua_raise(rt, L, r.name, status);
    lua_pushinteger(L, result);
    return 1;
}

static int group_output(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_group *u = check_group(L, "group_output");
    te_status  status = te_group_output(u->group, (int)luaL_checkinteger(L, 2));
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "group", status);
}

static int refused(te_lua *rt, lua_State *L)
{
    lua_pushnil(L);
    lua_pushstring(L, rt->ctx->message);
    return 2;
}

static int group_run(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    lua_group     *u = check_group(L, "group_run");
    int            n_in = te_group_n_inputs(u->group), n_out = te_group_n_outputs(u->group);
    te_tensor     *out[TE_GROUP_MAX_OUTPUTS];
    te_lua_tensor *results[TE_GROUP_MAX_OUTPUTS];
    te_lua_enter(rt, L, "group_run");
    if (lua_gettop(L) > n_in + 1) return te_lua_fail(L, "group_run", "%d tensors for %d inputs", lua_gettop(L) - 1, n_in);
    lua_settop(L, n_in + 1);
    luaL_checkstack(L, n_out + 2, "te.group_run");
    te_tensor **in = lua_newuserdata(L, (size_t)(n_in ? n_in : 1) * sizeof *in);
    for (int i = 0; i < n_in; i++) in[i] = lua_isnil(L, i + 2) ? NULL : te_lua_check_tensor(L, i + 2, "sequential", "x");
    for (int i = 0; i < n_out; i++) results[i] = te_lua_new_tensor(rt, L);
    for (int i = 0; i < n_in; i++) te_tensor_retain(in[i]);
    te_status status = te_group_run(u->group, in, out);
    for (int i = 0; i < n_in; i++) te_tensor_release(in[i]);
    if (status != TE_OK && te_group_refused(u->group)) return refused(rt, L);
    if (status != TE_OK) return te_lua_raise(rt, L, "sequential", status);
    for (int i = 0; i < n_out; i++) results[i]->t = out[i];
    te_lua_charge(rt, L);
    return n_out;
}

const luaL_Reg te_lua_group_functions[] = {{"group_new", group_new},       {"group_input", group_input}, {"group_op", group_op},
                                           {"group_accepts", group_accepts},
                                           {"group_output", group_output}, {"group_run", group_run},     {NULL, NULL}};
