/* operations.c - every operation of the engine as a Lua function, from its declaration alone.
 *
 * One C function serves all of them; the operation is its second upvalue. Arguments are read along the parameters:
 *
 *     softmax(x, dim: dim = -1)             te.softmax(x)  te.softmax(x, 2)  te.softmax(x, {dim = 2})  x:softmax(2)
 *     view(x, shape: shape)                 x:view(2, 3)   x:view{2, 3}
 *
 * Positional arguments fill parameters in order; a table with text keys is the options and comes last. A list may be
 * given as numbers in a row when no parameter after it takes a number. Dimensions and positions count from 1 and are
 * handed to the engine from 0.
 *
 * An argument that is a table whose metatable has `__te_operation` takes the call over: that function gets the name of
 * the operation and all arguments. This is how te.pointwise sees what a function does.
 */
#include "bindings.h"

#include <stdio.h>

typedef te_lua_reader reader;

const char *te_lua_signature(const te_op *op, char *text, size_t size)
{
    static const char *const counted[] = {"dim = ", "index = "};
    snprintf(text, size, "%s", te_op_signature(op));
    for (int i = 0; i < 2; i++) {
        for (char *at = text; (at = strstr(at, counted[i]));) {
            at += strlen(counted[i]);
            if (*at >= '0' && *at < '9') ++*at;
        }
    }
    return text;
}

void te_lua_push_params(lua_State *L, const te_op *op)
{
    static const char *const types[] = {"tensor", "tensors", "number", "int",    "bool", "dim",   "index",
                                        "dims",   "shape",   "dtype",  "device", "text", "choice"};
    lua_createtable(L, op->n_params, 0);
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        lua_createtable(L, 0, 6);
        te_lua_text_entry(L, "name", p->name);
        te_lua_text_entry(L, "type", types[p->type]);
        te_lua_flag_entry(L, "optional", p->optional);
        te_lua_flag_entry(L, "by_name", p->by_name);
        if (p->has_default) te_lua_number_entry(L, "default", p->number);
        if (p->type == TE_TYPE_CHOICE) te_lua_text_entry(L, "choices", p->text);
        lua_rawseti(L, -2, i + 1);
    }
}

static bool takes_list(const te_param *p)
{
    return p->type == TE_TYPE_DIMS || p->type == TE_TYPE_SHAPE || p->type == TE_TYPE_TENSORS;
}

static bool takes_number(const te_param *p)
{
    return p->type == TE_TYPE_NUMBER || p->type == TE_TYPE_INT || p->type == TE_TYPE_DIM || p->type == TE_TYPE_INDEX ||
           p->type == TE_TYPE_DIMS || p->type == TE_TYPE_SHAPE;
}

static const char *wanted(const reader *r, const te_param *p)
{
    switch (p->type) {
    case TE_TYPE_TENSOR: return r->op->def->flags & TE_OP_NUMBERS ? "a tensor or number" : "a tensor";
    case TE_TYPE_TENSORS: return "a list of tensors";
    case TE_TYPE_NUMBER: return "a number";
    case TE_TYPE_INT: return "a whole number";
    case TE_TYPE_BOOL: return "true or false";
    case TE_TYPE_DIM: return "a dimension (a whole number from 1)";
    case TE_TYPE_INDEX: return "a position (a whole number from 1)";
    case TE_TYPE_DIMS: return "dimensions (whole numbers from 1)";
    case TE_TYPE_SHAPE: return "a shape (a table of whole numbers)";
    case TE_TYPE_DTYPE: return "the name of a dtype";
    case TE_TYPE_DEVICE: return "the name of a device";
    case TE_TYPE_TEXT: return "a string";
    case TE_TYPE_CHOICE: return p->text;
    }
    return "something else";
}

static int wrong_type(reader *r, const te_param *p, int index)
{
    char text[256];
    return te_lua_fail(r->L, r->name, "%s: expected %s, got %s", p->name, wanted(r, p),
                       te_lua_describe(r->L, index, text, sizeof text));
}

/* From Lua's count to the engine's. */
static int64_t from_one(reader *r, const te_param *p, int64_t position)
{
    bool is_dim = p->type == TE_TYPE_DIM || p->type == TE_TYPE_DIMS;
    if (position == 0) te_lua_fail(r->L, r->name, "%s: 0 given, but dimensions and positions count from 1", p->name);
    if (is_dim && (position > TE_MAX_DIMS + 1 || position < -TE_MAX_DIMS - 1))
        te_lua_fail(r->L, r->name, "%s: %lld given, but tensors have at most %d dimensions", p->name,
                    (long long)position, TE_MAX_DIMS);
    return position > 0 ? position - 1 : position;
}

static void read_choice(reader *r, const te_param *p, te_arg *arg, int index)
{
    char        copy[sizeof p->text];
    const char *names[16], *given = lua_tostring(r->L, index);
    int         n = 0;
    memcpy(copy, p->text, sizeof copy);
    for (char *at = copy; at && n < 16; n++) {
        names[n] = at;
        if ((at = strchr(at, '|'))) *at++ = 0;
    }
    for (int i = 0; i < n; i++) {
        if (strcmp(names[i], given) != 0) continue;
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = i};
        return;
    }
    const char *nearest = te_lua_nearest(given, names, n);
    te_lua_fail(r->L, r->name, "%s: \"%.40s\" is none of %s%s%s%s", p->name, given, p->text,
                nearest ? "; did you mean \"" : "", nearest ? nearest : "", nearest ? "\"?" : "");
}

static void read_ints(reader *r, const te_param *p, te_arg *arg, int index, int count)
{
    int64_t *ints = r->ints[p - r->op->params];
    int      n = count;
    if (lua_type(r->L, index) == LUA_TTABLE) {
        n = te_lua_check_ints(r->L, index, r->name, p->name, ints);
    } else {
        if (count > TE_MAX_DIMS)
            te_lua_fail(r->L, r->name, "%s: %d entries, at most %d are possible", p->name, count, TE_MAX_DIMS);
        for (int i = 0; i < count; i++) ints[i] = te_lua_check_int(r->L, index + i, r->name, p->name);
    }
    if (p->type == TE_TYPE_DIMS)
        for (int i = 0; i < n; i++) ints[i] = from_one(r, p, ints[i]);
    *arg = (te_arg){.kind = TE_ARG_INTS, .n = n, .as.ints = ints};
}

static void read_tensor(reader *r, const te_param *p, te_arg *arg, int index)
{
    te_lua_tensor *u = te_lua_to_tensor(r->L, index);
    const int      test = TE_OP_NUMBERS | TE_OP_BOOL;
    if (u && u->t)
        *arg = (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = u->t};
    else if (u)
        te_lua_fail(r->L, r->name, "%s: tensor was released", p->name);
    else if (lua_type(r->L, index) == LUA_TNUMBER && (r->op->def->flags & TE_OP_NUMBERS))
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = lua_tonumber(r->L, index)};
    else if (lua_isboolean(r->L, index) && (r->op->def->flags & test) == test)
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = lua_toboolean(r->L, index)};
    else
        wrong_type(r, p, index);
}

/* Reads the value at `index`; `count` numbers of a list in a row. */
static void read_value(reader *r, const te_param *p, int index, int count)
{
    te_arg *arg = &r->args[p - r->op->params];
    int     type = lua_type(r->L, index);
    switch (p->type) {
    case TE_TYPE_TENSOR: read_tensor(r, p, arg, index); return;
    case TE_TYPE_TENSORS: {
        te_lua_tensors list = te_lua_check_tensors(r->L, index, r->name, p->name); /* stays on the stack */
        *arg = (te_arg){.kind = TE_ARG_TENSORS, .n = list.n, .as.tensors = list.t};
        return;
    }
    case TE_TYPE_DIMS:
    case TE_TYPE_SHAPE:
        if (type != LUA_TTABLE && type != LUA_TNUMBER) break;
        read_ints(r, p, arg, index, count);
        return;
    case TE_TYPE_NUMBER:
        if (type != LUA_TNUMBER) break;
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = lua_tonumber(r->L, index)};
        return;
    case TE_TYPE_INT:
    case TE_TYPE_INDEX:
    case TE_TYPE_DIM: {
        if (type != LUA_TNUMBER) break;
        int64_t value = te_lua_check_int(r->L, index, r->name, p->name);
        if (p->type != TE_TYPE_INT) value = from_one(r, p, value);
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = (double)value};
        return;
    }
    case TE_TYPE_BOOL:
        if (type != LUA_TBOOLEAN) break;
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = lua_toboolean(r->L, index)};
        return;
    case TE_TYPE_DTYPE:
        *arg = (te_arg){.kind = TE_ARG_NUMBER, .as.number = te_lua_check_dtype(r->L, index, r->name, p->name)};
        return;
    case TE_TYPE_CHOICE:
        if (type != LUA_TSTRING) break;
        read_choice(r, p, arg, index);
        return;
    case TE_TYPE_DEVICE:
    case TE_TYPE_TEXT:
        if (type != LUA_TSTRING) break;
        *arg = (te_arg){.kind = TE_ARG_TEXT, .as.text = lua_tostring(r->L, index)};
        return;
    }
    wrong_type(r, p, index);
}

/* Of the table of options at `index`. What the call gives already is not what was meant. */
static int unknown_option(reader *r, const char *name, int index)
{
    const char *names[TE_LUA_MAX_ARGS];
    int         n = 0;
    for (int i = 0; i < r->op->n_params; i++) {
        lua_pushstring(r->L, r->op->params[i].name);
        lua_rawget(r->L, index);
        if (r->args[i].kind == TE_ARG_ABSENT && lua_isnil(r->L, -1)) names[n++] = r->op->params[i].name;
        lua_pop(r->L, 1);
    }
    const char *nearest = te_lua_nearest(name, names, n);
    if (nearest) return te_lua_fail(r->L, r->name, "unknown option \"%.40s\"; did you mean \"%s\"?", name, nearest);
    char signature[512];
    return te_lua_fail(r->L, r->name, "unknown option \"%.40s\"; it takes %s", name,
                       te_lua_signature(r->op, signature, sizeof signature));
}

static int find_param(const te_op *op, const char *name)
{
    int i = 0;
    while (i < op->n_params && strcmp(op->params[i].name, name) != 0) i++;
    return i;
}

/* A parameter by its name among the options at `index`, or by the one that it has in PyTorch. */
static int param_called(reader *r, const char *name, int index)
{
    static const char *const theirs[][2] = {{"is_causal", "causal"}, {"dropout_p", "dropout"}};
    int i = find_param(r->op, name);
    for (size_t k = 0; i == r->op->n_params && k < sizeof theirs / sizeof *theirs; k++)
        if (strcmp(name, theirs[k][0]) == 0) i = find_param(r->op, theirs[k][1]);
    return i < r->op->n_params ? i : unknown_option(r, name, index);
}

static void read_options(reader *r, int index)
{
    char text[256];
    for (lua_pushnil(r->L); lua_next(r->L, index); lua_pop(r->L, 1)) {
        if (lua_type(r->L, -2) != LUA_TSTRING)
            te_lua_fail(r->L, r->name, "options: names are expected as keys, got %s",
                        te_lua_describe(r->L, -2, text, sizeof text));
        int             i = param_called(r, lua_tostring(r->L, -2), index);
        const te_param *p = &r->op->params[i];
        if (r->args[i].kind != TE_ARG_ABSENT) te_lua_fail(r->L, r->name, "%s: given twice", p->name);
        if (p->type == TE_TYPE_TENSORS)
            te_lua_fail(r->L, r->name, "%s: give the list as an argument of its own, not as an option", p->name);
        read_value(r, p, lua_gettop(r->L), 1);
    }
}

void te_lua_read_attributes(te_lua_reader *r, int index)
{
    for (int i = 0; i < r->op->n_params; i++) r->args[i].kind = TE_ARG_ABSENT;
    if (!lua_isnoneornil(r->L, index)) read_options(r, index);
}

/* How many numbers from `index` on belong to list p, the `at`-th parameter. */
static int count_numbers(const reader *r, int at, int index, int top)
{
    int n = 0;
    for (int i = at + 1; i < r->op->n_params && !r->op->params[i].by_name; i++)
        if (takes_number(&r->op->params[i])) return 1;
    while (index + n <= top && lua_type(r->L, index + n) == LUA_TNUMBER) n++;
    return n > 1 ? n : 1;
}

/* From the stack up to `top`; lists stay above. */
static void read_arguments(reader *r, int top)
{
    lua_State *L = r->L;
    int        index = 1;
    for (int i = 0; i < r->op->n_params; i++) r->args[i].kind = TE_ARG_ABSENT;
    for (int i = 0; i < r->op->n_params && index <= top; i++) {
        const te_param *p = &r->op->params[i];
        if (p->by_name) break;
        if (te_lua_is_options(L, index, !takes_list(p))) break;
        int count = takes_list(p) ? count_numbers(r, i, index, top) : 1;
        if (!lua_isnil(L, index)) read_value(r, p, index, count);
        index += lua_type(L, index) == LUA_TTABLE ? 1 : count;
    }
    if (index == top && te_lua_is_options(L, index, true)) read_options(r, index++);
    while (index <= top && lua_isnil(L, index)) index++;
    if (index <= top) {
        char text[256], signature[512];
        te_lua_fail(L, r->name, "argument %d, %s, is too much: it takes %s", index,
                    te_lua_describe(L, index, text, sizeof text), te_lua_signature(r->op, signature, sizeof signature));
    }
}

/* Lists hold their tensors from the beginning. */
static void retain(const reader *r)
{
    for (int i = 0; i < r->op->n_params; i++)
        if (r->args[i].kind == TE_ARG_TENSOR) te_tensor_retain(r->args[i].as.tensor);
}

static void release(const reader *r)
{
    for (int i = 0; i < r->op->n_params; i++) {
        const te_arg  *a = &r->args[i];
        te_lua_tensors list = {a->n, (te_tensor **)(uintptr_t)a->as.tensors};
        if (a->kind == TE_ARG_TENSOR) te_tensor_release(a->as.tensor);
        if (a->kind == TE_ARG_TENSORS) te_lua_drop_tensors(&list);
    }
}

/* Whether one of n arguments takes the call over; then its results are all that is on the stack. */
static bool taken_over(lua_State *L, const char *name, int n)
{
    for (int i = 1; i <= n; i++) {
        if (lua_type(L, i) != LUA_TTABLE || !luaL_getmetafield(L, i, "__te_operation")) continue;
        lua_insert(L, 1);
        lua_settop(L, n + 1);
        lua_pushstring(L, name);
        lua_insert(L, 2);
        lua_call(L, n + 1, LUA_MULTRET);
        return true;
    }
    return false;
}

/* The short way for what most calls are: one tensor for every parameter, whose handles it takes. */
static bool take_handles(const reader *r, int n, te_lua_tensor *handles[TE_OP_MAX_INPUTS])
{
    if (n != r->op->n_inputs || n != r->op->n_params || r->op->takes_list) return false;
    for (int i = 0; i < n; i++) {
        handles[i] = te_lua_to_tensor(r->L, i + 1);
        if (!handles[i] || r->op->params[i].by_name) return false;
    }
    return true;
}

/* Nothing was read when it is false: one was released. */
static bool read_handles(reader *r, int n, te_lua_tensor *const *handles)
{
    for (int i = 0; i < n; i++) {
        if (!handles[i]->t) return false;
        r->args[i].kind = TE_ARG_TENSOR;
        r->args[i].as.tensor = handles[i]->t;
    }
    return true;
}

int te_lua_run_operation(te_lua *rt, lua_State *L, const te_op *op, int n)
{
    te_tensor     *out[TE_OP_MAX_OUTPUTS];
    te_lua_tensor *handles[TE_OP_MAX_INPUTS];
    reader         r; /* large, and filled as far as it is used */
    r.L = L;
    r.op = op;
    r.name = op->name;
    bool direct = take_handles(&r, n, handles);
    if (!direct && taken_over(L, op->name, n)) return lua_gettop(L);
    te_lua_enter(rt, L, r.name);
    int            n_out = r.op->n_outputs, top = lua_gettop(L) + n_out;
    te_lua_tensor *results[TE_OP_MAX_OUTPUTS];
    for (int i = 0; i < n_out; i++) results[i] = te_lua_new_tensor(L);
    if (!direct || !read_handles(&r, n, handles)) read_arguments(&r, n);
    retain(&r);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_op_run(rt->ctx, r.op, r.args, r.op->n_params, out, n_out);
    te_lua_end(rt, call);
    release(&r);
    if (status != TE_OK) return te_lua_raise(rt, L, r.name, status);
    lua_settop(L, top);
    for (int i = 0; i < n_out; i++) results[i]->t = out[i];
    te_lua_charge(rt, L);
    return n_out;
}

/* te.NAME(…) */
static int run(lua_State *L)
{
    return te_lua_run_operation(te_lua_runtime(L), L, lua_touserdata(L, lua_upvalueindex(2)), lua_gettop(L));
}

/* x:NAME_(…): upvalue 3 is the name with its underscore. */
static int run_inplace(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    reader  r = {.L = L};
    r.op = lua_touserdata(L, lua_upvalueindex(2));
    r.name = lua_tostring(L, lua_upvalueindex(3));
    if (taken_over(L, r.name, lua_gettop(L))) return lua_gettop(L);
    te_lua_enter(rt, L, r.name);
    te_lua_check_writable(L, r.name, te_lua_check_tensor(L, 1, r.name, r.op->params[0].name));
    read_arguments(&r, lua_gettop(L));
    retain(&r);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_op_run_inplace(rt->ctx, r.op, r.args, r.op->n_params);
    te_lua_end(rt, call);
    release(&r);
    if (status != TE_OK) return te_lua_raise(rt, L, r.name, status);
    te_lua_charge(rt, L);
    lua_settop(L, 1);
    return 1;
}

/* Metamethods: Lua hands a second operand to unary minus as well, and tables are never options. */
static int run_operator(lua_State *L)
{
    const te_op *op = lua_touserdata(L, lua_upvalueindex(2));
    char         text[256];
    lua_settop(L, op->n_inputs);
    if (te_lua_to_tensor(L, 1) && te_lua_to_tensor(L, op->n_inputs)) return run(L);
    if (taken_over(L, op->name, op->n_inputs)) return lua_gettop(L);
    for (int i = 1; i <= op->n_inputs; i++)
        if (lua_type(L, i) != LUA_TNUMBER && !te_lua_to_tensor(L, i))
            return te_lua_fail(L, op->name, "operand %d: expected a tensor or number, got %s", i,
                               te_lua_describe(L, i, text, sizeof text));
    return run(L);
}

/* Sets table[name] in the table at `table`, and where it is not 0 in `other`, to a closure over op: one, since a cycle
 * of the collector visits them all. */
static void bind(lua_State *L, int table, int other, const char *name, const te_op *op, lua_CFunction function)
{
    te_lua_push_anchor(L);
    lua_pushlightuserdata(L, (void *)(uintptr_t)op);
    lua_pushstring(L, name);
    lua_pushcclosure(L, function, 3);
    if (other) lua_pushvalue(L, -1);
    if (other) lua_setfield(L, other, name);
    lua_setfield(L, table, name);
}

static const struct {
    const char *event, *op;
} operators[] = {{"__add", "add"}, {"__sub", "sub"}, {"__mul", "mul"},
                 {"__div", "div"}, {"__pow", "pow"}, {"__mod", "remainder"}, {"__unm", "neg"}};

void te_lua_open_operations(te_lua *rt, lua_State *L)
{
    int library = lua_gettop(L), methods = library + 1, metatable = library + 2;
    te_lua_push_kept(L, te_lua_tensor_methods);
    te_lua_push_kept(L, te_lua_tensor_metatable);
    const te_op *op;
    for (int i = 0; (op = te_op_at(rt->ctx, i)); i++) {
        char inplace[sizeof op->name + 1];
        if (op->def->flags & TE_OP_HIDDEN) continue;
        bind(L, library, op->def->flags & TE_OP_METHOD ? methods : 0, op->name, op, run);
        if (!(op->def->flags & TE_OP_INPLACE)) continue;
        snprintf(inplace, sizeof inplace, "%s_", op->name);
        bind(L, library, methods, inplace, op, run_inplace);
    }
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if ((op = te_op_find(rt->ctx, operators[i].op))) bind(L, metatable, 0, operators[i].event, op, run_operator);
    lua_settop(L, library);
}
