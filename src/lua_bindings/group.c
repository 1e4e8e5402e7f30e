/* group.c - groups of operations for lua/te/fuser.lua: te._core.group_*.
 *
 *     group_new()                                   a group
 *     group_input(g, is_parameter)                  a value, a number from 0
 *     group_accepts(op)                             how many inputs an operation takes, by name or as a value; or
 *                                                   false and why groups cannot hold it
 *     group_op(g, label, op, values, attributes, numbers, recipe_state, cache_quantized, list, states)
 *                                                   the value of an operation's result; false in `values`: absent, or
 *                                                   the number at the same place in `numbers`; the state of a linear
 *                                                   operation that recipes quantize, or nil; whether backward gets the
 *                                                   first input in a byte a value; values of weights and biases of a
 *                                                   grouped linear operation, and the states of those products
 *     group_output(g, value)
 *     group_plans(g)                                how many plans are kept
 *     group_run(g, list)                            the outputs for a list of tensors; or nil and the reason when these
 *                                                   cannot be planned
 *     group_explain(g, list)                        lists of steps and of splits (fuser/describe.h); or nil and the
 *                                                   reason
 */
#include "bindings.h"

#include "core/fuser/describe.h"

static const char group_tag[] = "te.group";

typedef struct lua_group {
    const void *tag;
    te_group   *group;
} lua_group;

static lua_group *check_group(lua_State *L, const char *function)
{
    lua_group *u = te_lua_to_object(L, 1, group_tag, sizeof *u);
    if (!u || !u->group) te_lua_fail(L, function, "expected a group");
    return u;
}

static int collect(lua_State *L)
{
    lua_group *u = te_lua_to_object(L, 1, group_tag, sizeof *u);
    if (!u) return 0;
    te_group_release(u->group);
    *u = (lua_group){0};
    return 0;
}

static int group_new(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "group");
    lua_group *u = lua_newuserdata(L, sizeof *u);
    *u = (lua_group){.tag = group_tag};
    te_lua_set_collector(L, collect);
    te_lua_call call = te_lua_begin(rt, L);
    u->group = te_group_new(rt->ctx);
    te_lua_end(rt, call);
    if (!u->group) return te_lua_raise(rt, L, "group", rt->ctx->status);
    return 1;
}

static int group_input(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_group *u = check_group(L, "group_input");
    te_lua_call call = te_lua_begin(rt, L);
    int        value = te_group_input(u->group, lua_toboolean(L, 2));
    te_lua_end(rt, call);
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
    const te_op *op = check_op(rt, L, 1);
    if (te_group_accepts(rt->ctx, op)) {
        lua_pushinteger(L, op->n_inputs);
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

/* The number of a value, at `index`. */
static int check_value(lua_State *L, int index, const char *function)
{
    return (int)te_lua_check_range(L, index, function, "value", 0, INT32_MAX);
}

static int group_op(lua_State *L)
{
    te_lua       *rt = te_lua_runtime(L);
    lua_group    *u = check_group(L, "group_op");
    te_lua_reader r = {.L = L};
    te_group_call call = {.label = (int)te_lua_check_range(L, 2, "group_op", "label", INT32_MIN, INT32_MAX)};
    int           result;
    lua_settop(L, 10);
    call.cache_quantized = lua_toboolean(L, 8);
    if (!lua_isnil(L, 7)) call.recipe_state = te_lua_check_recipe_state(L, 7, "group_op");
    call.op = r.op = check_op(rt, L, 3);
    r.name = r.op->name;
    if (lua_istable(L, 9)) { /* numbers of values in memory that is the collector's */
        call.n_list = (int)lua_objlen(L, 9);
        int *list = te_lua_scratch(L, (size_t)(call.n_list + 1) * sizeof *list);
        for (int i = 0; i < call.n_list; i++) {
            lua_rawgeti(L, 9, i + 1);
            list[i] = check_value(L, -1, "group_op");
            lua_pop(L, 1);
        }
        call.list = list;
    }
    if (lua_istable(L, 10)) {
        call.n_states = (int)lua_objlen(L, 10);
        te_recipe_state **states = te_lua_scratch(L, (size_t)(call.n_states + 1) * sizeof *states);
        for (int i = 0; i < call.n_states; i++) {
            lua_rawgeti(L, 10, i + 1);
            states[i] = te_lua_check_recipe_state(L, -1, "group_op");
            lua_pop(L, 1);
        }
        call.states = states;
    }
    /* nothing is made from here on: a finalizer could take texts out of the attributes */
    luaL_checktype(L, 4, LUA_TTABLE);
    te_lua_read_attributes(&r, 5);
    read_numbers(L, 6, &r);
    for (int i = 0; i < TE_OP_MAX_INPUTS; i++) {
        lua_rawgeti(L, 4, i + 1);
        call.values[i] = lua_isnumber(L, -1) ? check_value(L, -1, "group_op") : TE_NO_VALUE;
        lua_pop(L, 1);
    }
    call.args = r.args;
    call.n_args = r.op->n_params;
    te_lua_call entered = te_lua_begin(rt, L);
    te_status   status = te_group_op(u->group, &call, &result);
    te_lua_end(rt, entered);
    if (status != TE_OK) return te_lua_raise(rt, L, r.name, status);
    lua_pushinteger(L, result);
    return 1;
}

static int group_output(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_group *u = check_group(L, "group_output");
    int         value = check_value(L, 2, "group_output");
    te_lua_call call = te_lua_begin(rt, L);
    te_status   status = te_group_output(u->group, value);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "group", status);
}

static int group_plans(lua_State *L)
{
    lua_pushinteger(L, te_group_n_plans(check_group(L, "group_plans")->group));
    return 1;
}

static int refused(te_lua *rt, lua_State *L)
{
    lua_pushnil(L);
    lua_pushstring(L, rt->ctx->message);
    return 2;
}

/* The tensors of the list at 2, one per input, of which none is missing where it is `complete`: there may be more of
 * them than Lua's stack takes. */
static te_lua_tensors check_inputs(te_lua *rt, lua_State *L, const lua_group *u, const char *function, bool complete)
{
    int n = te_group_n_inputs(u->group);
    te_lua_enter(rt, L, function);
    luaL_checktype(L, 2, LUA_TTABLE);
    luaL_checkstack(L, TE_GROUP_MAX_OUTPUTS + LUA_MINSTACK, "te.group");
    te_lua_tensors in = te_lua_new_tensors(L, n);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 2, i + 1);
        if (complete || !lua_isnil(L, -1)) in.t[i] = te_tensor_retain(te_lua_check_tensor(L, -1, "Sequential", "x"));
        lua_pop(L, 1);
    }
    return in;
}

/* Raises where a finalizer has changed the group since its inputs and outputs were counted. */
static void check_unchanged(lua_State *L, const lua_group *u, int n_inputs, int n_outputs, const char *function)
{
    if (!u->group || te_group_n_inputs(u->group) != n_inputs || te_group_n_outputs(u->group) != n_outputs)
        te_lua_fail(L, function, "the group was changed meanwhile");
}

/* --- explaining --------------------------------------------------------------------------------------------------- */

/* The engine tells of steps and splits in the middle of its own functions, through which no error of Lua may jump: each
 * is put into its list by a protected call, and after one that failed none is made. */
typedef struct explaining {
    lua_State *L;
    te_group  *group;
    int        steps, splits; /* stack indices: a function, then its list */
    bool       failed;        /* the error is on top */
} explaining;

/* What is told of, as the function of a list gets it. */
typedef struct told {
    te_group                   *group;
    const te_step_description  *step;
    const te_split_description *split;
} told;

static void append(lua_State *L, int list) { lua_rawseti(L, list, (int)lua_objlen(L, list) + 1); }

/* (told, list) */
static int append_step(lua_State *L)
{
    static const char *const   kinds[] = {"program", "gemm", "attention", "quantize", "gather"};
    const told                *what = lua_touserdata(L, 1);
    const te_step_description *step = what->step;
    lua_newtable(L);
    te_lua_text_entry(L, "kind", kinds[step->what]);
    te_lua_text_entry(L, "kernel", step->kernel);
    te_lua_text_entry(L, "pass", step->backward ? "backward" : "forward");
    te_lua_number_entry(L, "reads", step->read_bytes);
    te_lua_number_entry(L, "writes", step->written_bytes);
    te_lua_number_entry(L, "flops", step->flops);
    lua_createtable(L, step->n_nodes, 0);
    lua_createtable(L, step->n_nodes, 0);
    for (int i = 0; i < step->n_nodes; i++) {
        lua_pushinteger(L, te_group_node_label(what->group, step->nodes[i]));
        lua_rawseti(L, -3, i + 1);
        lua_pushstring(L, te_group_node_name(what->group, step->nodes[i]));
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -3, "names");
    lua_setfield(L, -2, "labels");
    append(L, 2);
    return 0;
}

/* (told, list) */
static int append_split(lua_State *L)
{
    const told                 *what = lua_touserdata(L, 1);
    const te_split_description *split = what->split;
    lua_newtable(L);
    te_lua_number_entry(L, "from", te_group_node_label(what->group, split->from));
    te_lua_number_entry(L, "to", te_group_node_label(what->group, split->to));
    te_lua_text_entry(L, "from_name", te_group_node_name(what->group, split->from));
    te_lua_text_entry(L, "to_name", te_group_node_name(what->group, split->to));
    te_lua_text_entry(L, "reason", split->reason);
    append(L, 2);
    return 0;
}

static void tell(explaining *e, int index, const te_step_description *step, const te_split_description *split)
{
    told what = {e->group, step, split};
    if (e->failed) return;
    lua_pushvalue(e->L, index); /* neither this nor what follows allocates */
    lua_pushlightuserdata(e->L, &what);
    lua_pushvalue(e->L, index + 1);
    e->failed = lua_pcall(e->L, 2, 0, 0) != 0;
}

static void explain_step(void *user, const te_step_description *step)
{
    explaining *e = user;
    tell(e, e->steps, step, NULL);
}

static void explain_split(void *user, const te_split_description *split)
{
    explaining *e = user;
    tell(e, e->splits, NULL, split);
}

/* Pushes a function and a new list; the function's index. */
static int push_list(lua_State *L, lua_CFunction function)
{
    lua_pushcfunction(L, function);
    lua_newtable(L);
    return lua_gettop(L) - 1;
}

static int group_explain(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    lua_group     *u = check_group(L, "explain");
    te_lua_tensors in = check_inputs(rt, L, u, "explain", false);
    explaining     e = {.L = L, .group = u->group};
    e.steps = push_list(L, append_step);
    e.splits = push_list(L, append_split);
    luaL_checkstack(L, LUA_MINSTACK, "te.explain");
    check_unchanged(L, u, in.n, te_group_n_outputs(u->group), "explain");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_group_describe(u->group, in.t, explain_step, explain_split, &e);
    te_lua_end(rt, call);
    te_lua_drop_tensors(&in);
    if (e.failed) return lua_error(L);
    if (status == TE_ERROR_UNSUPPORTED) return refused(rt, L);
    if (status != TE_OK) return te_lua_raise(rt, L, "explain", status);
    lua_pushvalue(L, e.steps + 1);
    lua_pushvalue(L, e.splits + 1);
    return 2;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static int group_run(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    lua_group     *u = check_group(L, "group_run");
    int            n_out = te_group_n_outputs(u->group);
    te_lua_tensors in = check_inputs(rt, L, u, "group_run", true);
    te_tensor     *out[TE_GROUP_MAX_OUTPUTS];
    te_lua_tensor *results[TE_GROUP_MAX_OUTPUTS];
    for (int i = 0; i < n_out; i++) results[i] = te_lua_new_tensor(L);
    check_unchanged(L, u, in.n, n_out, "group_run");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_group_run(u->group, in.t, out);
    te_lua_end(rt, call);
    te_lua_drop_tensors(&in);
    if (status != TE_OK && te_group_refused(u->group)) return refused(rt, L);
    if (status != TE_OK) return te_lua_raise(rt, L, "Sequential", status);
    for (int i = 0; i < n_out; i++) results[i]->t = out[i];
    te_lua_charge(rt, L);
    return n_out;
}

const luaL_Reg te_lua_group_functions[] = {
    {"group_new", group_new},         {"group_input", group_input},     {"group_op", group_op},
    {"group_accepts", group_accepts}, {"group_explain", group_explain}, {"group_plans", group_plans},
    {"group_output", group_output},   {"group_run", group_run},         {NULL, NULL}};
