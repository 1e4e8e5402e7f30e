/* tensor.c - the userdata of tensors: its life, fields, indexing and the methods that are not operations. */
#include "bindings.h"
#include "host.h"

#include "core/quantized_parameter.h"

#include "core/autograd.h"

#include <math.h>
#include <stdio.h>

const char te_lua_tensor_tag[] = "te.Tensor", te_lua_collected_tag[] = "te.Tensor, collected";

static const char *const field_names[] = {
    "dtype", "device", "shape", "grad", "main_grad", "requires_grad", "is_leaf", NULL,
};

/* --- handles ------------------------------------------------------------------------------------------------------ */

const char te_lua_tensor_metatable[] = "te.Tensor", te_lua_tensor_methods[] = "te.Tensor.methods";

te_lua_tensor *te_lua_new_tensor(lua_State *L)
{
    te_lua_tensor *u = lua_newuserdata(L, sizeof *u);
    u->tag = te_lua_tensor_tag;
    u->t = NULL;
    te_lua_push_kept(L, te_lua_tensor_metatable);
    if (!lua_istable(L, -1)) luaL_error(L, "te: tensors have lost their metatable"); /* nobody would release them */
    lua_setmetatable(L, -2);
    return u;
}

void te_lua_push_tensor(lua_State *L, te_tensor *const *t)
{
    te_lua_tensor *u = te_lua_new_tensor(L);
    u->t = te_tensor_retain(*t);
    if (u->t) return;
    lua_pop(L, 1);
    lua_pushnil(L);
}

te_tensor *te_lua_check_tensor(lua_State *L, int index, const char *function, const char *argument)
{
    char           text[256];
    te_lua_tensor *u = te_lua_to_tensor(L, index);
    if (u && u->t) return u->t;
    if (u) te_lua_fail(L, function, "%s: tensor was released", argument);
    te_lua_fail(L, function, "%s: expected a tensor, got %s", argument, te_lua_describe(L, index, text, sizeof text));
    return NULL;
}

void te_lua_check_writable(lua_State *L, const char *function, const te_tensor *t)
{
    const char *why = te_tensor_unwritable(t);
    if (why) te_lua_fail(L, function, "%s", why);
}

static int release_handle(te_lua_tensor *u, const void *tag)
{
    te_tensor *t = u->t;
    *u = (te_lua_tensor){.tag = tag};
    te_tensor_release(t);
    return 0;
}

/* The tag goes with the handle: whatever lies in this memory next is no tensor. */
static int tensor_gc(lua_State *L)
{
    te_lua_tensor *u = te_lua_to_tensor(L, 1);
    return u ? release_handle(u, te_lua_collected_tag) : 0;
}

/* --- shapes ------------------------------------------------------------------------------------------------------- */

static const char shape_metatable[] = "te.shape";

/* "{2, 3}": a shape is a table like any other but for what it prints as, and getmetatable gives false. */
static int shape_tostring(lua_State *L)
{
    luaL_Buffer text;
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    int n = (int)lua_objlen(L, 1);
    luaL_buffinit(L, &text);
    luaL_addchar(&text, '{');
    for (int i = 1; i <= n; i++) {
        lua_rawgeti(L, 1, i);
        if (!lua_isnumber(L, -1)) { /* a script may write into its table */
            lua_pushstring(L, luaL_typename(L, -1));
            lua_replace(L, -2);
        }
        luaL_addvalue(&text);
        if (i < n) luaL_addstring(&text, ", ");
    }
    luaL_addchar(&text, '}');
    luaL_pushresult(&text);
    return 1;
}

static void make_shape_metatable(lua_State *L)
{
    lua_createtable(L, 0, 2);
    lua_pushcfunction(L, shape_tostring);
    lua_setfield(L, -2, "__tostring");
    lua_pushboolean(L, false);
    lua_setfield(L, -2, "__metatable");
    te_lua_keep(L, shape_metatable);
}

/* --- fields ------------------------------------------------------------------------------------------------------- */

/* Pushes {2, 3}. */
static void push_shape(lua_State *L, const te_tensor *t)
{
    int     ndim = t->ndim;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, t->shape, sizeof shape); /* the table may cost the tensor */
    lua_createtable(L, ndim, 0);
    for (int i = 0; i < ndim; i++) {
        lua_pushnumber(L, (double)shape[i]);
        lua_rawseti(L, -2, i + 1);
    }
    te_lua_push_kept(L, shape_metatable);
    lua_setmetatable(L, -2);
}

/* The tensor whose field or row the key at 2 names. */
static te_tensor *check_self(lua_State *L)
{
    const te_lua_tensor *u = te_lua_to_tensor(L, 1);
    if (u && !u->t && lua_type(L, 2) == LUA_TSTRING)
        te_lua_fail(L, NULL, "t.%.40s: tensor was released", lua_tostring(L, 2));
    return te_lua_check_tensor(L, 1, NULL, "t[i]");
}

/* t.grad, t.main_grad */
static int push_grad(lua_State *L, te_tensor *grad_of(const te_tensor *t))
{
    te_lua_tensor *u = te_lua_new_tensor(L);
    u->t = te_tensor_retain(grad_of(check_self(L)));
    if (!u->t) lua_pushnil(L);
    return 1;
}

static int unknown_field(lua_State *L, const char *key)
{
    const char *names[512];
    int         n = 0;
    for (int i = 0; field_names[i]; i++) names[n++] = field_names[i];
    te_lua_push_kept(L, te_lua_tensor_methods);
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1))
        if (n < 512 && lua_type(L, -2) == LUA_TSTRING) names[n++] = lua_tostring(L, -2);
    const char *nearest = te_lua_nearest(key, names, n);
    if (!nearest) return te_lua_fail(L, NULL, "tensors have no field or method \"%.40s\"", key);
    return te_lua_fail(L, NULL, "tensors have no field or method \"%.40s\"; did you mean \"%s\"?", key, nearest);
}

/* t[i]: row i, from 1; negative ones count from the end. */
static int push_row(lua_State *L, te_lua *rt)
{
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor     *t = check_self(L);
    int64_t i = te_lua_check_int(L, 2, NULL, "t[i]: index");
    int64_t n = t->ndim ? t->shape[0] : 0;
    if (t->ndim == 0) return te_lua_fail(L, NULL, "t[i]: index %lld into a tensor without dimensions", (long long)i);
    if (i == 0 || i > n || i < -n)
        return te_lua_fail(L, NULL, "t[i]: index %lld out of range: t has shape %s, and positions count from 1",
                           (long long)i, TE_SHAPE_TEXT(t));
    const te_op *op = te_op_find(rt->ctx, "select");
    te_arg       args[3] = {{.kind = TE_ARG_TENSOR, .as.tensor = t}, {.kind = TE_ARG_NUMBER, .as.number = 0},
                            {.kind = TE_ARG_NUMBER, .as.number = (double)(i > 0 ? i - 1 : i)}};
    te_lua_enter(rt, L, "select");
    te_tensor_retain(t);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = op ? te_op_run(rt->ctx, op, args, 3, &result->t, 1) : TE_ERROR_INTERNAL;
    te_lua_end(rt, call);
    te_tensor_release(t);
    return status == TE_OK ? 1 : te_lua_raise(rt, L, "select", status);
}

/* What is neither a method nor present in the method table; upvalue 2 is that table. */
static int tensor_index(lua_State *L)
{
    lua_pushvalue(L, 2);
    lua_rawget(L, lua_upvalueindex(2));
    if (!lua_isnil(L, -1)) return 1;
    te_lua    *rt = te_lua_runtime(L);
    te_tensor *t = check_self(L);
    if (lua_type(L, 2) == LUA_TNUMBER) return push_row(L, rt);
    char        text[256];
    const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : NULL;
    if (!key)
        return te_lua_fail(L, NULL, "t[i]: index: expected a whole number or a name, got %s",
                           te_lua_describe(L, 2, text, sizeof text));
    if (strcmp(key, "shape") == 0)
        push_shape(L, t);
    else if (strcmp(key, "dtype") == 0)
        lua_pushstring(L, te_dtype_name(t->dtype));
    else if (strcmp(key, "device") == 0)
        lua_pushstring(L, te_tensor_device(t));
    else if (strcmp(key, "grad") == 0)
        return push_grad(L, te_tensor_grad);
    else if (strcmp(key, "main_grad") == 0)
        return push_grad(L, te_tensor_main_grad);
    else if (strcmp(key, "requires_grad") == 0)
        lua_pushboolean(L, te_tensor_requires_grad(t));
    else if (strcmp(key, "is_leaf") == 0)
        lua_pushboolean(L, t->node == NULL);
    else
        return unknown_field(L, key);
    return 1;
}

/* t[i] = value */
static int assign_row(lua_State *L, te_lua *rt)
{
    te_tensor *t = check_self(L), *value = NULL;
    const char *unwritable = te_tensor_unwritable(t);
    if (unwritable) return te_lua_fail(L, NULL, "t[i] = value: t: %s", unwritable);
    if (te_tensor_is_quantized(t))
        return te_lua_fail(L, NULL, "t[i] = value: a row of a parameter that is stored quantized cannot be assigned; "
                                    "use copy_ for the whole");
    bool truths = t->dtype == TE_BOOL; /* what allocates may run a finalizer, which may release t */
    lua_settop(L, 3);
    push_row(L, rt);
    te_tensor *row = te_lua_to_tensor(L, -1)->t;
    te_status  status;
    if (te_needs_grad(row) && te_context_grad_enabled(rt->ctx))
        return te_lua_fail(L, NULL, "t[i] = value: t takes part in gradients, which a write in place does not carry; "
                                    "use te.no_grad, or te.where");
    bool plain = lua_type(L, 3) == LUA_TNUMBER || (lua_isboolean(L, 3) && truths);
    char text[256];
    if (!plain && !te_lua_to_tensor(L, 3))
        return te_lua_fail(L, NULL, "t[i] = value: value: expected a tensor or a number, got %s",
                           te_lua_describe(L, 3, text, sizeof text));
    if (!plain) value = te_lua_check_tensor(L, 3, NULL, "t[i] = value");
    if (value && te_needs_grad(value) && te_context_grad_enabled(rt->ctx))
        return te_lua_fail(L, NULL, "t[i] = value: value takes part in gradients, which a write in place does not "
                                    "carry; use te.no_grad, value:detach(), or te.stack");
    te_tensor_retain(value);
    double number = lua_isboolean(L, 3) ? lua_toboolean(L, 3) : lua_tonumber(L, 3);
    te_lua_call call = te_lua_begin(rt, L);
    status = value ? te_tensor_copy_data(row, value) : te_tensor_fill(row, number);
    te_lua_end(rt, call);
    te_tensor_release(value);
    if (status == TE_ERROR_ARGUMENT && strncmp(te_context_error(rt->ctx), "copy_: ", 7) == 0)
        return te_lua_fail(L, NULL, "t[i] = value: %s", te_context_error(rt->ctx) + 7);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, NULL, status);
}

/* What `set` is: te_tensor_set_grad or te_tensor_set_main_grad. The gradient is at 3. */
static te_status set_grad(te_lua *rt, lua_State *L, te_tensor *t, const char *what,
                          te_status set(te_tensor *t, te_tensor *grad))
{
    te_tensor  *grad = lua_isnil(L, 3) ? NULL : te_lua_check_tensor(L, 3, NULL, what);
    te_lua_call call = te_lua_begin(rt, L);
    te_tensor_retain(t);
    te_tensor_retain(grad);
    te_status status = set(t, grad);
    te_tensor_release(grad);
    te_tensor_release(t);
    te_lua_end(rt, call);
    return status;
}

/* The engine's messages on a field begin with its name. */
static int raise_field(te_lua *rt, lua_State *L, const char *key, te_status status)
{
    const char *text = te_context_error(rt->ctx);
    size_t      n = strlen(key);
    if (status == TE_ERROR_ARGUMENT && strncmp(text, key, n) == 0 && text[n] == ':')
        return te_lua_fail(L, NULL, "t.%s = value%s", key, text + n);
    return te_lua_raise(rt, L, NULL, status);
}

static int tensor_newindex(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_tensor  *t = check_self(L);
    const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
    te_status   status;
    char        text[256];
    te_lua_enter(rt, L, NULL);
    if (lua_type(L, 2) == LUA_TNUMBER) return assign_row(L, rt);
    if (lua_type(L, 2) != LUA_TSTRING)
        return te_lua_fail(L, NULL, "t[i] = value: i: expected a whole number, which names a row, got %s; t[i][j] = "
                                    "value names one in it, te.where and masked_fill choose elements",
                           te_lua_describe(L, 2, text, sizeof text));
    if (strcmp(key, "requires_grad") == 0) {
        if (!lua_isboolean(L, 3))
            return te_lua_fail(L, NULL, "t.requires_grad = value: expected true or false, got %s",
                               te_lua_describe(L, 3, text, sizeof text));
        te_lua_call call = te_lua_begin(rt, L);
        te_tensor_retain(t);
        status = te_tensor_set_requires_grad(t, lua_toboolean(L, 3));
        te_tensor_release(t);
        te_lua_end(rt, call);
    } else if (strcmp(key, "grad") == 0) {
        status = set_grad(rt, L, t, "t.grad = value", te_tensor_set_grad);
    } else if (strcmp(key, "main_grad") == 0) {
        status = set_grad(rt, L, t, "t.main_grad = value", te_tensor_set_main_grad);
    } else {
        return te_lua_fail(L, NULL, "tensors have no field \"%.40s\" that can be set", key);
    }
    return status == TE_OK ? 0 : raise_field(rt, L, key, status);
}

/* --- methods ------------------------------------------------------------------------------------------------------ */

static int tensor_size(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, "size", "self");
    te_lua_check_count(L, 2, "size");
    if (lua_isnoneornil(L, 2)) {
        push_shape(L, t);
        return 1;
    }
    int64_t dim = te_lua_check_int(L, 2, "size", "dim");
    if (dim == 0 || dim > t->ndim || dim < -t->ndim)
        return te_lua_fail(L, "size", "dim: %lld out of range for %d dimensions, counted from 1", (long long)dim,
                           t->ndim);
    lua_pushnumber(L, (double)t->shape[dim > 0 ? dim - 1 : dim + t->ndim]);
    return 1;
}

static int tensor_dim(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, "dim", "self");
    te_lua_check_count(L, 1, "dim");
    lua_pushinteger(L, t->ndim);
    return 1;
}

static int tensor_numel(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, "numel", "self");
    te_lua_check_count(L, 1, "numel");
    lua_pushnumber(L, (double)te_tensor_numel(t));
    return 1;
}

static int tensor_len(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, NULL, "length");
    if (t->ndim == 0) return te_lua_fail(L, NULL, "length of a tensor without dimensions");
    lua_pushnumber(L, (double)t->shape[0]);
    return 1;
}

static int tensor_eq(lua_State *L)
{
    te_lua_tensor *a = te_lua_to_tensor(L, 1), *b = te_lua_to_tensor(L, 2);
    lua_pushboolean(L, a && b && a->t && a->t == b->t);
    return 1;
}

static int tensor_contiguous(lua_State *L)
{
    lua_pushboolean(L, te_tensor_contiguous(te_lua_check_tensor(L, 1, "is_contiguous", "self")));
    return 1;
}

static void push_value(lua_State *L, te_dtype dtype, double value)
{
    if (dtype == TE_BOOL)
        lua_pushboolean(L, value != 0);
    else
        lua_pushnumber(L, value);
}

static int tensor_item(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    te_tensor *t = te_lua_check_tensor(L, 1, "item", "self");
    te_lua_check_count(L, 1, "item");
    double     value = 0;
    char       shape[160];
    if (te_tensor_numel(t) != 1)
        return te_lua_fail(L, "item", "tensor has %lld elements, shape %s, not one", (long long)te_tensor_numel(t),
                           te_shape_text(t->ndim, t->shape, shape, sizeof shape));
    te_lua_enter(rt, L, "item");
    te_dtype dtype = t->dtype;
    te_tensor_retain(t);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_tensor_read(t, TE_F64, &value);
    te_lua_end(rt, call);
    te_tensor_release(t);
    if (status != TE_OK) return te_lua_raise(rt, L, "item", status);
    push_value(L, dtype, value);
    return 1;
}

static const double *push_nested(lua_State *L, const te_tensor *t, int dim, const double *values)
{
    luaL_checkstack(L, 4, "totable");
    if (dim == t->ndim) {
        push_value(L, t->dtype, *values);
        return values + 1;
    }
    lua_createtable(L, t->shape[dim] < INT32_MAX ? (int)t->shape[dim] : INT32_MAX, 0);
    for (int64_t i = 0; i < t->shape[dim]; i++) {
        values = push_nested(L, t, dim + 1, values);
        lua_rawseti(L, -2, (int)(i + 1));
    }
    return values;
}

/* A table of nested rows, numbers (booleans) at the bottom; a number for a tensor without dimensions. */
static int tensor_totable(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_tensor(L, 1, "totable", "self");
    te_lua_check_count(L, 1, "totable");
    te_lua_tensors held = te_lua_new_tensors(L, 1);
    te_tensor     *t = held.t[0] = te_tensor_retain(te_lua_check_tensor(L, 1, "totable", "self"));
    int64_t        n = te_tensor_numel(t);
    if (n > 1 << 27) return te_lua_fail(L, "totable", "%lld elements are too many for a table", (long long)n);
    double *values = te_lua_scratch(L, (size_t)(n ? n : 1) * sizeof *values);
    te_lua_enter(rt, L, "totable");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_tensor_read(t, TE_F64, values);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "totable", status);
    push_nested(L, t, 0, values);
    te_lua_drop_tensors(&held);
    return 1;
}

static int tensor_release(lua_State *L)
{
    te_lua_tensor *u = te_lua_to_tensor(L, 1);
    if (!u) te_lua_check_tensor(L, 1, "release", "self");
    return release_handle(u, te_lua_tensor_tag);
}

static int tensor_storage_id(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, "storage_id", "self");
    lua_pushnumber(L, (double)t->storage->id);
    lua_pushnumber(L, (double)te_storage_writes(t->storage));
    return 2;
}

static const luaL_Reg methods[] = {
    {"size", tensor_size},         {"dim", tensor_dim},         {"numel", tensor_numel},
    {"item", tensor_item},         {"totable", tensor_totable}, {"release", tensor_release},
    {"is_contiguous", tensor_contiguous}, {"storage_id", tensor_storage_id},
    {NULL, NULL},
};

static const luaL_Reg metamethods[] = {
    {"__gc", tensor_gc}, {"__newindex", tensor_newindex}, {"__len", tensor_len}, {"__eq", tensor_eq},
    {"__tostring", te_lua_tensor_tostring}, {NULL, NULL},
};

void te_lua_open_tensor(te_lua *rt, lua_State *L)
{
    lua_newtable(L); /* the metatable */
    te_lua_register(rt, L, metamethods);
    lua_newtable(L); /* the methods */
    te_lua_register(rt, L, methods);
    te_lua_push_anchor(L);
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, tensor_index, 2);
    lua_setfield(L, -3, "__index");
    te_lua_keep(L, te_lua_tensor_methods);
    lua_pushliteral(L, "te.Tensor");
    lua_setfield(L, -2, "__metatable");
    lua_pushliteral(L, "te.Tensor");
    lua_setfield(L, -2, "__name");
    te_lua_keep(L, te_lua_tensor_metatable);
    make_shape_metatable(L);
    te_lua_open_collection(rt, L);
}
