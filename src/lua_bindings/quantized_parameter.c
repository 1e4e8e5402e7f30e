/* quantized_parameter.c - parameters that are stored quantized, for lua/te/recipe/parameters.lua: te._core.*
 *
 *     quantized_parameter(state, t, columnwise)
 *                                          a leaf with t's values that is stored quantized
 *     is_quantized(t)
 *     quantized_writes(t)                  how often it was written since it was made
 *     quantized_parts(t)                   rowwise data, scale_inv, amax, column-wise data, scale_inv, amax; nil
 *                                          where absent
 *     set_quantized_parts(t, …)            takes over the like
 *     count_quantized(t)                   counts the amax of what was taken over in the history of t's product
 *     check_quantized_parts(name, t, …)    nil, or why it would not, beginning with the name
 *     quantized_on(t, device)              another with the same bytes there
 *     quantized_clone(t, states)           another with copies of the bytes
 *     quantized_as(t, dtype)               another leaf with the same bytes that stands for values of that dtype
 */
#include "bindings.h"

#include "core/quantized_parameter.h"

static int quantized_parameter(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "quantized_model_init");
    lua_settop(L, 3);
    te_lua_enter(rt, L, "quantized_model_init");
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor *t = te_tensor_retain(te_lua_check_tensor(L, 2, "quantized_model_init", "weight"));
    te_lua_call call = te_lua_begin(rt, L);
    result->t = te_quantized_parameter_new(t, state, lua_toboolean(L, 3));
    te_lua_end(rt, call);
    te_tensor_release(t);
    if (!result->t) return te_lua_raise(rt, L, "quantized_model_init", rt->ctx->status);
    te_lua_charge(rt, L);
    return 1;
}

static int is_quantized(lua_State *L)
{
    lua_pushboolean(L, te_tensor_is_quantized(te_lua_check_tensor(L, 1, "is_quantized", "t")));
    return 1;
}

static te_tensor *check_quantized(lua_State *L, const char *function)
{
    te_tensor *t = te_lua_check_tensor(L, 1, function, "t");
    if (!te_tensor_is_quantized(t)) te_lua_fail(L, function, "t: expected a parameter that is stored quantized");
    return t;
}

static int quantized_writes(lua_State *L)
{
    lua_pushnumber(L, (double)te_quantized_parameter_writes(check_quantized(L, "quantized_writes")));
    return 1;
}

enum { PARTS = 6 };

static te_tensor **part_of(te_quantized *copies, int i)
{
    te_quantized_part *part = &copies->side[i / 3];
    return i % 3 == 0 ? &part->data : i % 3 == 1 ? &part->scale_inv : &part->amax;
}

static int quantized_parts(lua_State *L)
{
    te_lua_tensors parts = te_lua_new_tensors(L, PARTS);
    te_quantized *copies = &check_quantized(L, "quantized_parts")->storage->quantized->copies;
    for (int i = 0; i < PARTS; i++) parts.t[i] = te_tensor_retain(*part_of(copies, i));
    for (int i = 0; i < PARTS; i++) te_lua_push_tensor(L, &parts.t[i]);
    te_lua_drop_tensors(&parts);
    return PARTS;
}

/* (t, …), into t, or where `who` is given to see whether they would go there. */
static int take_parts(lua_State *L, const char *who)
{
    te_lua *rt = te_lua_runtime(L);
    lua_settop(L, 1 + PARTS);
    te_lua_enter(rt, L, "load_state_dict");
    te_tensor *t = check_quantized(L, "load_state_dict");
    te_quantized from = t->storage->quantized->copies;
    for (int i = 0; i < PARTS; i++)
        *part_of(&from, i) = lua_isnil(L, 2 + i) ? NULL : te_lua_check_tensor(L, 2 + i, "load_state_dict", "part");
    for (int i = 0; i < PARTS; i++) te_tensor_retain(*part_of(&from, i));
    te_tensor_retain(t);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = who ? te_quantized_parameter_check(t, who, &from) : te_quantized_parameter_adopt(t, &from);
    te_lua_end(rt, call);
    te_tensor_release(t);
    for (int i = 0; i < PARTS; i++) te_tensor_release(*part_of(&from, i));
    if (status == TE_OK) return 0;
    if (!who) return te_lua_raise(rt, L, "load_state_dict", status);
    lua_pushstring(L, te_context_error(rt->ctx));
    return 1;
}

static int set_quantized_parts(lua_State *L) { return take_parts(L, NULL); }

static int count_quantized(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "count_quantized");
    const struct te_quantized_storage *quantized = check_quantized(L, "count_quantized")->storage->quantized;
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_role_count_resident(quantized->state, &quantized->copies);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "count_quantized", status);
}

static int check_quantized_parts(lua_State *L)
{
    char who[160];
    snprintf(who, sizeof who, "%s", luaL_checkstring(L, 1));
    lua_remove(L, 1);
    return take_parts(L, who);
}

static int quantized_as(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    check_quantized(L, "to");
    te_dtype dtype = te_lua_check_dtype(L, 2, "to", "dtype");
    if (dtype != TE_F32 && dtype != TE_BF16 && dtype != TE_F16)
        return te_lua_fail(
            L, "to", "dtype: a parameter that is stored quantized stands for float32, bfloat16 or float16, not %s",
            te_dtype_name(dtype));
    te_lua_enter(rt, L, "to");
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor *t = te_tensor_retain(check_quantized(L, "to"));
    te_lua_call call = te_lua_begin(rt, L);
    result->t = te_quantized_parameter_as(t, dtype);
    te_lua_end(rt, call);
    te_tensor_release(t);
    return result->t ? 1 : te_lua_raise(rt, L, "to", rt->ctx->status);
}

static int quantized_on(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "to");
    check_quantized(L, "to");
    te_device *device = te_context_device(rt->ctx, luaL_checkstring(L, 2));
    if (!device) return te_lua_raise(rt, L, "to", rt->ctx->status);
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor *t = te_tensor_retain(check_quantized(L, "to"));
    te_lua_call call = te_lua_begin(rt, L);
    result->t = te_quantized_parameter_on(t, device);
    te_lua_end(rt, call);
    te_tensor_release(t);
    if (!result->t) return te_lua_raise(rt, L, "to", rt->ctx->status);
    te_lua_charge(rt, L);
    return 1;
}

/* (t, { state, its copy, … }): another with copies of the bytes, which belongs to the copy of its state. */
static int quantized_clone(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "clone");
    luaL_checktype(L, 2, LUA_TTABLE);
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor *t = check_quantized(L, "clone");
    te_recipe_state *state = t->storage->quantized->state, *copy = state;
    for (int i = 1, n = (int)lua_objlen(L, 2); i < n && copy == state; i += 2) {
        lua_rawgeti(L, 2, i), lua_rawgeti(L, 2, i + 1);
        if (te_lua_check_recipe_state(L, -2, "clone") == state) copy = te_lua_check_recipe_state(L, -1, "clone");
        lua_pop(L, 2);
    }
    te_tensor_retain(t);
    te_recipe_state_retain(copy);
    te_lua_call call = te_lua_begin(rt, L);
    result->t = te_quantized_parameter_clone(t, copy);
    te_lua_end(rt, call);
    te_recipe_state_release(copy);
    te_tensor_release(t);
    if (!result->t) return te_lua_raise(rt, L, "clone", rt->ctx->status);
    te_lua_charge(rt, L);
    return 1;
}

const luaL_Reg te_lua_quantized_parameter_functions[] = {
    {"quantized_parameter", quantized_parameter},
    {"is_quantized", is_quantized},
    {"quantized_writes", quantized_writes},
    {"quantized_parts", quantized_parts},
    {"set_quantized_parts", set_quantized_parts},
    {"count_quantized", count_quantized},
    {"check_quantized_parts", check_quantized_parts},
    {"quantized_as", quantized_as},
    {"quantized_on", quantized_on},
    {"quantized_clone", quantized_clone},
    {NULL, NULL},
};
