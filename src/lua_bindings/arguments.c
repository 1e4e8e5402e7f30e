/* arguments.c - reading numbers, shapes, dtypes, lists and options from the Lua stack, with messages that say what was
 * expected, what was given, and which name was probably meant. */
#include "bindings.h"

#include "kernels/numerals.h"

#include <math.h>
#include <stddef.h>
#include <strings.h>

double te_lua_check_number(lua_State *L, int index, const char *function, const char *argument)
{
    char text[256];
    if (lua_type(L, index) != LUA_TNUMBER)
        te_lua_fail(L, function, "%s: expected a number, got %s", argument,
                    te_lua_describe(L, index, text, sizeof text));
    return lua_tonumber(L, index);
}

double te_lua_number_field(lua_State *L, int table, const char *function, const char *name, double otherwise)
{
    lua_getfield(L, table, name);
    double value = lua_isnil(L, -1) ? otherwise : te_lua_check_number(L, -1, function, name);
    lua_pop(L, 1);
    return value;
}

int64_t te_lua_check_int(lua_State *L, int index, const char *function, const char *argument)
{
    char   text[256];
    double value = lua_type(L, index) == LUA_TNUMBER ? lua_tonumber(L, index) : NAN;
    bool   large = isfinite(value) && fabs(value) > 0x1p53;
    if (!(fabs(value) <= 0x1p53) || value != floor(value))
        te_lua_fail(L, function, "%s: expected a whole number%s, got %s", argument, large ? " within 2^53" : "",
                    te_lua_describe(L, index, text, sizeof text));
    return (int64_t)value;
}

int64_t te_lua_check_range(lua_State *L, int index, const char *function, const char *argument, int64_t least,
                           int64_t most)
{
    int64_t value = te_lua_check_int(L, index, function, argument);
    if (value < least || value > most)
        te_lua_fail(L, function, "%s: %lld is not between %lld and %lld", argument, (long long)value, (long long)least,
                    (long long)most);
    return value;
}

const char *te_lua_check_text(lua_State *L, int index, const char *function, const char *argument)
{
    char text[256];
    if (lua_type(L, index) != LUA_TSTRING)
        te_lua_fail(L, function, "%s: expected a string, got %s", argument,
                    te_lua_describe(L, index, text, sizeof text));
    const char *value = lua_tostring(L, index);
    if (strlen(value) != lua_objlen(L, index))
        te_lua_fail(L, function, "%s: \"%.200s\" goes on after a zero byte", argument, value);
    return value;
}

/* What dtypes are called elsewhere, and here. */
static const char *const other_dtypes[][2] = {
    {"fp16", "float16"},     {"half", "float16"},     {"f16", "float16"},      {"bf16", "bfloat16"},
    {"fp32", "float32"},     {"float", "float32"},    {"f32", "float32"},      {"single", "float32"},
    {"fp64", "float64"},     {"double", "float64"},   {"f64", "float64"},      {"long", "int64"},
    {"i64", "int64"},        {"int", "int32"},        {"i32", "int32"},        {"byte", "uint8"},
    {"u8", "uint8"},         {"boolean", "bool"},     {"fp8", "float8_e4m3"},  {"float8", "float8_e4m3"},
    {"e4m3", "float8_e4m3"}, {"e5m2", "float8_e5m2"}, {"fp8_e4m3", "float8_e4m3"},
    {"fp8_e5m2", "float8_e5m2"}, {"float8_e4m3fn", "float8_e4m3"},
};

const char *te_lua_dtype_hint(const char *name, char *text, size_t size)
{
    const char *names[TE_DTYPE_COUNT], *meant = NULL;
    for (size_t i = 0; i < sizeof other_dtypes / sizeof *other_dtypes; i++)
        if (strcasecmp(other_dtypes[i][0], name) == 0) meant = other_dtypes[i][1];
    for (int i = 0; i < TE_DTYPE_COUNT; i++) names[i] = te_dtype_name((te_dtype)i);
    if (!meant) meant = te_lua_nearest(name, names, TE_DTYPE_COUNT);
    if (meant) {
        snprintf(text, size, "; did you mean \"%s\"?", meant);
        return text;
    }
    size_t n = (size_t)snprintf(text, size, "; known are %s", names[0]);
    for (int i = 1; i < TE_DTYPE_COUNT && n < size; i++) n += (size_t)snprintf(text + n, size - n, ", %s", names[i]);
    return text;
}

te_dtype te_lua_check_dtype(lua_State *L, int index, const char *function, const char *argument)
{
    char text[256];
    if (lua_type(L, index) != LUA_TSTRING)
        te_lua_fail(L, function, "%s: expected the name of a dtype, got %s", argument,
                    te_lua_describe(L, index, text, sizeof text));
    const char *name = te_lua_check_text(L, index, function, argument);
    for (int i = 0; i < TE_DTYPE_COUNT; i++)
        if (strcmp(te_dtype_name((te_dtype)i), name) == 0) return (te_dtype)i;
    te_lua_fail(L, function, "%s: no dtype \"%.40s\"%s", argument, name, te_lua_dtype_hint(name, text, sizeof text));
    return TE_F32;
}

size_t te_lua_check_list(lua_State *L, int index, const char *function, const char *argument)
{
    char   text[256];
    size_t n = lua_objlen(L, index);
    if (index < 0) index += lua_gettop(L) + 1;
    if (n > INT32_MAX / 2) te_lua_fail(L, function, "%s: too many entries", argument);
    if (n) /* entries follow one another; after the last comes what is no part of the list, if anything */
        lua_pushinteger(L, (lua_Integer)n);
    else
        lua_pushnil(L);
    for (; lua_next(L, index); lua_pop(L, 1)) {
        double key = lua_type(L, -2) == LUA_TNUMBER ? lua_tonumber(L, -2) : NAN;
        if (key >= 1 && key <= (double)n && key == floor(key)) continue; /* where Lua keeps some entries elsewhere */
        if (key > (double)n && key == floor(key))
            te_lua_fail(L, function, "%s: entry %d is nil, but there is one at %.14g", argument, (int)n + 1, key);
        te_lua_fail(L, function, "%s: a list has no entry %s; options stand in a table of their own", argument,
                    te_lua_describe(L, -2, text, sizeof text));
    }
    return n;
}

int te_lua_check_ints(lua_State *L, int index, const char *function, const char *argument, int64_t *ints)
{
    char text[256];
    if (lua_type(L, index) != LUA_TTABLE)
        te_lua_fail(L, function, "%s: expected a table of whole numbers, got %s", argument,
                    te_lua_describe(L, index, text, sizeof text));
    size_t n = te_lua_check_list(L, index, function, argument);
    if (n > TE_MAX_DIMS)
        te_lua_fail(L, function, "%s: %d entries, at most %d are possible", argument, (int)n, TE_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, index, (int)i + 1);
        ints[i] = te_lua_check_int(L, -1, function, argument);
        lua_pop(L, 1);
    }
    return (int)n;
}

int te_lua_check_shape(lua_State *L, int index, const char *function, const char *argument, int *ndim, int64_t *shape)
{
    char text[256];
    int  taken = 1;
    if (lua_type(L, index) == LUA_TTABLE) {
        *ndim = te_lua_check_ints(L, index, function, argument, shape);
    } else {
        if (lua_type(L, index) != LUA_TNUMBER)
            te_lua_fail(L, function, "%s: expected a table of whole numbers, got %s", argument,
                        te_lua_describe(L, index, text, sizeof text));
        for (taken = 0; lua_type(L, index + taken) == LUA_TNUMBER; taken++) {
            if (taken == TE_MAX_DIMS) te_lua_fail(L, function, "%s: more than %d dimensions", argument, TE_MAX_DIMS);
            shape[taken] = te_lua_check_int(L, index + taken, function, argument);
        }
        *ndim = taken;
    }
    for (int i = 0; i < *ndim; i++)
        if (shape[i] < 0) te_lua_fail(L, function, "%s: negative size %lld", argument, (long long)shape[i]);
    return taken;
}

bool te_lua_is_options(lua_State *L, int index, bool empty)
{
    if (lua_type(L, index) != LUA_TTABLE) return false;
    lua_pushnil(L);
    if (!lua_next(L, index)) return empty;
    bool text_key = lua_type(L, -2) == LUA_TSTRING;
    lua_pop(L, 2);
    return text_key;
}

static int unknown_option(lua_State *L, const char *function, const char *const *known)
{
    char text[256];
    if (lua_type(L, -2) != LUA_TSTRING)
        return te_lua_fail(L, function, "options: names are expected as keys, got %s",
                           te_lua_describe(L, -2, text, sizeof text));
    const char *name = lua_tostring(L, -2), *nearest = te_lua_nearest(name, known, -1);
    if (nearest) return te_lua_fail(L, function, "unknown option \"%.40s\"; did you mean \"%s\"?", name, nearest);
    size_t at = 0;
    for (int i = 0; known[i] && at < sizeof text; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i ? ", " : "", known[i]);
    return te_lua_fail(L, function, "unknown option \"%.40s\"; known are %s", name, text);
}

void te_lua_check_options(lua_State *L, int index, const char *function, const char *const *known)
{
    char text[256];
    if (lua_isnoneornil(L, index)) return;
    te_lua_check_stack(te_lua_runtime(L), L); /* fields may run scripts */
    if (lua_type(L, index) != LUA_TTABLE)
        te_lua_fail(L, function, "options: expected a table, got %s", te_lua_describe(L, index, text, sizeof text));
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        int i = 0;
        if (lua_type(L, -2) == LUA_TSTRING)
            while (known[i] && strcmp(known[i], lua_tostring(L, -2)) != 0) i++;
        if (lua_type(L, -2) != LUA_TSTRING || !known[i]) unknown_option(L, function, known);
    }
}

void te_lua_check_count(lua_State *L, int n, const char *function)
{
    char text[256];
    if (lua_gettop(L) > n && !lua_isnil(L, n + 1))
        te_lua_fail(L, function, "argument %d, %s, is too much", n + 1, te_lua_describe(L, n + 1, text, sizeof text));
}

/* Also the key of its metatable. */
static const char held_tag[] = "te.tensors";

typedef struct held_tensors {
    const void *tag;
    int         n;
    te_tensor  *t[];
} held_tensors;

static void drop(held_tensors *held)
{
    for (int i = 0; i < held->n; i++) {
        te_tensor *t = held->t[i];
        held->t[i] = NULL;
        te_tensor_release(t);
    }
}

static int collect(lua_State *L)
{
    held_tensors *held = te_lua_to_object(L, 1, held_tag, sizeof *held);
    if (held) drop(held);
    return 0;
}

te_lua_tensors te_lua_new_tensors(lua_State *L, int n)
{
    size_t        size = sizeof(held_tensors) + (size_t)n * sizeof(te_tensor *);
    held_tensors *held = memset(te_lua_scratch(L, size), 0, size);
    *held = (held_tensors){.tag = held_tag, .n = n};
    if (te_lua_push_metatable(L, held_tag)) {
        lua_pushcfunction(L, collect);
        lua_setfield(L, -2, "__gc");
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, "__metatable");
        te_lua_keep_copy(L, held_tag);
    }
    lua_setmetatable(L, -2);
    return (te_lua_tensors){.n = n, .t = held->t};
}

te_lua_tensors te_lua_check_tensors(lua_State *L, int index, const char *function, const char *argument)
{
    char text[256], entry[64];
    if (lua_type(L, index) != LUA_TTABLE)
        te_lua_fail(L, function, "%s: expected a list of tensors, got %s", argument,
                    te_lua_describe(L, index, text, sizeof text));
    size_t         n = te_lua_check_list(L, index, function, argument);
    te_lua_tensors list = te_lua_new_tensors(L, (int)n);
    for (int i = 0; i < list.n; i++) {
        lua_rawgeti(L, index, i + 1);
        te_lua_tensor *u = te_lua_to_tensor(L, -1);
        if (!u || !u->t) {
            te_snprintf(entry, sizeof entry, "%s[%d]", argument, i + 1);
            te_lua_drop_tensors(&list);
            te_lua_check_tensor(L, -1, function, entry);
        }
        list.t[i] = te_tensor_retain(u->t);
        lua_pop(L, 1);
    }
    return list;
}

void te_lua_drop_tensors(const te_lua_tensors *list)
{
    if (list->t) drop((held_tensors *)(void *)((char *)list->t - offsetof(held_tensors, t)));
}
