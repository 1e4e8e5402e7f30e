/* optim_prepared.c - steps of AdamW that are made again, for te.optim.
 *
 * adamw_step (optim.c) reads everything from tables, which costs more than updating a few small parameters. A step
 * that was made once can be prepared: adamw_prepare keeps the handles of its tensors, and adamw_again finds the
 * gradients in C. It does nothing but say so (false) where a handle was released, a gradient came or went, or a number
 * is none: adamw_step then finds the words. Who replaces a tensor by another one prepares anew.
 */
#include "bindings.h"

#include "core/optim.h"

static const char prepared_tag[] = "te.adamw";

enum { ADAMW_LISTS = 4, ADAMW_NUMBERS = 7 }; /* of a group: see adamw_prepare and adamw_again */

/* The environment of the userdata keeps the handles alive. They stand in the order of groups, in each by lists; those
 * of parameters that had no gradient stand behind them all. */
typedef struct prepared {
    const void     *tag;
    int             n_groups, n_grads, n_handles, n_idle;
    te_adamw       *options; /* n_groups */
    te_optim_group *groups;  /* n_groups, pointing into what follows */
    te_lua_tensor **handles; /* n_handles */
    te_tensor     **tensors; /* theirs, in a step */
    te_tensor     **grads;   /* n_grads */
    te_dtype       *dtypes;  /* of the parameters, n_grads: te.Module's to changes them */
} prepared;

static const char *const prepared_lists[ADAMW_LISTS] = {"params", "exp_avg", "exp_avg_sq", "masters"};

/* Pushes the list `name` of the table on top, or what stands in its place; its length. No metamethod runs. */
static int push_list(lua_State *L, const char *name)
{
    lua_pushstring(L, name);
    lua_rawget(L, -2);
    return lua_istable(L, -1) ? (int)lua_objlen(L, -1) : 0;
}

/* Pushes a userdata with room for the groups at index 1 and the list of idle parameters at 2. */
static prepared *new_prepared(lua_State *L)
{
    int n = (int)lua_objlen(L, 1), n_grads = 0, idle = (int)lua_objlen(L, 2), handles = idle;
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 1, i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        for (int k = 0; k < ADAMW_LISTS; k++) {
            int length = push_list(L, prepared_lists[k]);
            handles += length;
            if (k == 0) n_grads += length;
            lua_pop(L, 1);
        }
        lua_pop(L, 1);
    }
    size_t bytes = sizeof(prepared) + (size_t)n * (sizeof(te_optim_group) + sizeof(te_adamw)) +
                   (2 * (size_t)handles + (size_t)n_grads) * sizeof(void *) + (size_t)n_grads * sizeof(te_dtype);
    prepared *p = memset(te_lua_scratch(L, bytes), 0, bytes);
    *p = (prepared){.n_groups = n, .n_grads = n_grads, .n_handles = handles, .n_idle = idle};
    p->options = (te_adamw *)(p + 1);
    p->groups = (te_optim_group *)(p->options + n);
    p->handles = (te_lua_tensor **)(p->groups + n);
    p->tensors = (te_tensor **)(p->handles + handles);
    p->grads = p->tensors + handles;
    p->dtypes = (te_dtype *)(p->grads + n_grads);
    return p;
}

/* Takes the n handles of the list on top, which it pops, as those from `at` on. The table at `anchors` keeps them. */
static int take_handles(lua_State *L, prepared *p, int at, int n, int anchors)
{
    if (at + n > p->n_handles)
        te_lua_fail(L, "adamw_prepare", "a list changed meanwhile"); /* a finalizer can do that */
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, -1, i + 1);
        te_tensor *t = te_lua_check_tensor(L, -1, "adamw_prepare", "tensors");
        if (at + i < p->n_handles - p->n_idle) te_lua_check_writable(L, "adamw_prepare", t);
        p->handles[at + i] = te_lua_to_tensor(L, -1);
        lua_rawseti(L, anchors, at + i + 1);
    }
    lua_pop(L, 1);
    return at + n;
}

/* Takes the lists of the group on top; returns where the next group's handles stand. */
static int prepare_group(lua_State *L, prepared *p, te_optim_group *group, int at, int grads, int anchors)
{
    te_tensor **lists[ADAMW_LISTS] = {NULL};
    for (int k = 0; k < ADAMW_LISTS; k++) {
        const char *name = prepared_lists[k];
        int         n = push_list(L, name);
        bool        absent = n == 0 && k == ADAMW_LISTS - 1;
        if (k == 0) group->n = n;
        if (n != group->n && !absent)
            te_lua_fail(L, "adamw_prepare", "%s: %d tensors for %d parameters", name, n, group->n);
        if (!absent) lists[k] = p->tensors + at;
        at = take_handles(L, p, at, n, anchors);
        if (grads + group->n > p->n_grads) te_lua_fail(L, "adamw_prepare", "a list changed meanwhile");
        for (int i = 0; k == 0 && i < n; i++) p->dtypes[grads + i] = p->handles[at - n + i]->t->dtype;
    }
    *group = (te_optim_group){.n = group->n,
                              .params = lists[0],
                              .grads = p->grads + grads,
                              .states = {lists[1], lists[2]},
                              .masters = lists[3]};
    return at;
}

/* adamw_prepare(groups, idle): adamw_again's first argument, for the tensors of adamw_step's groups. `idle` lists
 * parameters without gradient. */
static int adamw_prepare(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    prepared *p = new_prepared(L);
    lua_newtable(L);
    int anchors = lua_gettop(L), at = 0, grads = 0;
    for (int g = 0; g < p->n_groups; g++) {
        lua_rawgeti(L, 1, g + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        at = prepare_group(L, p, &p->groups[g], at, grads, anchors);
        grads += p->groups[g].n;
        lua_pop(L, 1);
    }
    lua_pushvalue(L, 2);
    at = take_handles(L, p, at, p->n_idle, anchors);
    if (at != p->n_handles || grads != p->n_grads) te_lua_fail(L, "adamw_prepare", "a list changed meanwhile");
    lua_setfenv(L, 3);
    p->tag = prepared_tag;
    return 1;
}

/* Finds tensors and gradients; false when they are not what was prepared. */
static bool resolve(prepared *p)
{
    for (int i = 0; i < p->n_handles; i++)
        if (!(p->tensors[i] = p->handles[i]->t)) return false;
    for (int i = p->n_handles - p->n_idle; i < p->n_handles; i++)
        if (te_tensor_gradient(p->tensors[i])) return false;
    for (int g = 0, k = 0; g < p->n_groups; g++)
        for (int i = 0; i < p->groups[g].n; i++, k++) {
            const te_tensor *param = p->groups[g].params[i];
            if (param->dtype != p->dtypes[k] || !(p->grads[k] = te_tensor_gradient(param))) return false;
        }
    return true;
}

static bool read_numbers(lua_State *L, prepared *p)
{
    double values[ADAMW_NUMBERS];
    for (int g = 0; g < p->n_groups; g++) {
        for (int i = 0; i < ADAMW_NUMBERS; i++) {
            lua_rawgeti(L, 2, g * ADAMW_NUMBERS + i + 1);
            if (lua_type(L, -1) != LUA_TNUMBER) return false;
            values[i] = lua_tonumber(L, -1);
            lua_pop(L, 1);
        }
        p->options[g] =
            (te_adamw){values[0], values[1], values[2], values[3], values[4], (int64_t)values[5], values[6]};
    }
    return true;
}

/* Of the group on top. */
static void count_again(lua_State *L, lua_Number step)
{
    lua_pushliteral(L, "step");
    lua_pushnumber(L, step);
    lua_rawset(L, -3);
    te_lua_count_step(L, step);
}

/* adamw_again(prepared, numbers, groups): whether the step was made. `numbers` holds, for one group after the other,
 * lr, beta1, beta2, eps, weight_decay, step, grad_scale; `groups` tables with `states` as in adamw_step, and the same
 * field `step` of their own. */
static int adamw_again(lua_State *L)
{
    te_lua   *rt = te_lua_runtime(L);
    prepared *p = te_lua_to_object(L, 1, prepared_tag, sizeof *p);
    if (!p) return te_lua_fail(L, "adamw_again", "expected what adamw_prepare returns");
    luaL_checktype(L, 2, LUA_TTABLE);
    luaL_checktype(L, 3, LUA_TTABLE);
    te_lua_enter(rt, L, "adamw_step");
    lua_settop(L, 3);
    if (!resolve(p) || !read_numbers(L, p)) {
        lua_pushboolean(L, 0);
        return 1;
    }
    for (int i = 0; i < p->n_handles; i++) te_tensor_retain(p->tensors[i]);
    for (int i = 0; i < p->n_grads; i++) te_tensor_retain(p->grads[i]);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_adamw_step(rt->ctx, p->n_groups, p->options, p->groups);
    te_lua_end(rt, call);
    for (int i = 0; i < p->n_handles; i++) te_tensor_release(p->tensors[i]);
    for (int i = 0; i < p->n_grads; i++) te_tensor_release(p->grads[i]);
    if (status != TE_OK) return te_lua_raise(rt, L, "adamw_step", status);
    for (int g = 0; g < p->n_groups; g++) {
        lua_rawgeti(L, 3, g + 1);
        if (lua_istable(L, -1)) count_again(L, (lua_Number)p->options[g].step);
        lua_pop(L, 1);
    }
    lua_pushboolean(L, 1);
    return 1;
}

/* adamw_send(tensor, numbers, unmade): coefficients of a step from `numbers`, which are adamw_again's; unmade: how many
 * steps that were not made their counts leave out. */
static int adamw_send(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_tensor(L, 1, "adamw_send", "tensor");
    luaL_checktype(L, 2, LUA_TTABLE);
    double unmade = te_lua_check_number(L, 3, "adamw_send", "unmade");
    int       n = (int)lua_objlen(L, 2) / ADAMW_NUMBERS;
    te_adamw *options = te_lua_scratch(L, ((size_t)n + 1) * sizeof *options);
    double    values[ADAMW_NUMBERS];
    for (int g = 0; g < n; g++) {
        for (int i = 0; i < ADAMW_NUMBERS; i++) {
            lua_rawgeti(L, 2, g * ADAMW_NUMBERS + i + 1);
            values[i] = te_lua_check_number(L, -1, "adamw_send", "numbers");
            lua_pop(L, 1);
        }
        options[g] = (te_adamw){values[0], values[1], values[2], values[3], values[4], (int64_t)values[5], values[6]};
    }
    te_lua_enter(rt, L, "adamw_send");
    te_tensor *t = te_tensor_retain(te_lua_check_tensor(L, 1, "adamw_send", "tensor"));
    te_lua_call call = te_lua_begin(rt, L);
    te_status  status = te_adamw_send(rt->ctx, n, options, unmade, t);
    te_lua_end(rt, call);
    te_tensor_release(t);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "adamw_send", status);
}

const luaL_Reg te_lua_optim_prepared_functions[] = {
    {"adamw_prepare", adamw_prepare}, {"adamw_again", adamw_again}, {"adamw_send", adamw_send}, {NULL, NULL}};
