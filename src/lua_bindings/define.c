/* define.c - operations as values: te._core.define makes one from a formula, te._core.operation looks one up;
 * te._core.operation_modules lists those of the tables that name a module.
 *
 *     local mish = te._core.define("mish(x)", "y = x * tanh(log(1 + exp(x)))", {compute = true})
 *     mish(x)  mish.formula  mish.params
 *
 * Both give a userdata that is called like every other operation. It holds a reference of an operation that was
 * defined; so does every graph node of a call, hence it may be collected while gradients are still to come.
 */
#include "bindings.h"

typedef struct te_lua_operation {
    const void *tag;
    const te_op *op;
} te_lua_operation;

static const char operation_tag[] = "te.operation"; /* also the key of the metatable */

const te_op *te_lua_to_operation(lua_State *L, int index)
{
    te_lua_operation *u = te_lua_to_object(L, index, operation_tag, sizeof *u);
    return u ? u->op : NULL;
}

static const te_op *check_operation(lua_State *L)
{
    const te_op *op = te_lua_to_operation(L, 1);
    char text[256];
    if (!op) te_lua_fail(L, "operation", "expected an operation, got %s", te_lua_describe(L, 1, text, sizeof text));
    return op;
}

/* --- metamethods -------------------------------------------------------------------------------------------------- */

/* The userdata stays on the stack, above the arguments, so that a collection meanwhile does not take the operation. */
static int call_operation(lua_State *L)
{
    const te_op *op = check_operation(L);
    lua_pushvalue(L, 1);
    lua_remove(L, 1);
    return te_lua_run_operation(te_lua_runtime(L), L, op, lua_gettop(L) - 1);
}

static int release_operation(lua_State *L)
{
    te_lua_operation *u = lua_touserdata(L, 1);
    if (!te_lua_to_operation(L, 1)) return 0;
    te_op_release(u->op);
    *u = (te_lua_operation){0};
    return 0;
}

static int print_operation(lua_State *L)
{
    const te_op *op = check_operation(L);
    char signature[512];
    lua_pushstring(L, te_lua_signature(op, signature, sizeof signature));
    if (!op->def->formula) return 1;
    lua_pushfstring(L, " { %s }", op->def->formula);
    lua_concat(L, 2);
    return 1;
}

/* op.name, op.signature, op.doc, op.outputs, op.formula (nil when it has none), op.params; op.gated: the last dimension
 * of the first input is halved; op.truth: the results are bool. */
static int index_operation(lua_State *L)
{
    const te_op *op = check_operation(L);
    const char *key = luaL_checkstring(L, 2);
    char signature[512];
    if (strcmp(key, "name") == 0)
        lua_pushstring(L, op->name);
    else if (strcmp(key, "signature") == 0)
        lua_pushstring(L, te_lua_signature(op, signature, sizeof signature));
    else if (strcmp(key, "doc") == 0)
        lua_pushstring(L, op->def->doc);
    else if (strcmp(key, "outputs") == 0)
        lua_pushstring(L, op->def->outputs ? op->def->outputs : "y");
    else if (strcmp(key, "formula") == 0)
        lua_pushstring(L, op->def->formula);
    else if (strcmp(key, "params") == 0)
        te_lua_push_params(L, op);
    else if (strcmp(key, "gated") == 0)
        lua_pushboolean(L, (op->def->flags & TE_OP_GATED) != 0);
    else if (strcmp(key, "truth") == 0)
        lua_pushboolean(L, (op->def->flags & TE_OP_BOOL) != 0);
    else
        lua_pushnil(L);
    return 1;
}

/* --- making ------------------------------------------------------------------------------------------------------- */

/* Pushes a userdata that holds no operation yet. */
static te_lua_operation *new_operation(lua_State *L)
{
    te_lua_operation *u = lua_newuserdata(L, sizeof *u);
    *u = (te_lua_operation){operation_tag, NULL};
    if (te_lua_push_metatable(L, operation_tag)) {
        static const luaL_Reg metamethods[] = {
            {"__call", call_operation},
            {"__gc", release_operation},
            {"__tostring", print_operation},
            {"__index", index_operation},
            {NULL, NULL},
        };
        te_lua_register(te_lua_runtime(L), L, metamethods);
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, "__metatable");
        te_lua_keep_copy(L, operation_tag);
    }
    lua_setmetatable(L, -2);
    return u;
}

static bool flag(lua_State *L, const char *name)
{
    if (!lua_istable(L, 3)) return false;
    lua_getfield(L, 3, name);
    bool on = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return on;
}

/* define(signature, formula, {outputs = "y", compute =, truth =, rows =}): a new operation whose numbers may stand for
 * tensors. Its results have the dtype that the inputs promote to; compute: the first input's, or that of te.autocast;
 * truth: bool. rows: the formula reduces along the last dimension; elements: results have a value per element even
 * where it comes to one per row. */
static int define(lua_State *L)
{
    static const char *const known[] = {"outputs", "compute", "truth", "rows", "elements", NULL};
    te_lua *rt = te_lua_runtime(L);
    te_op_def def = {
        .signature = luaL_checkstring(L, 1), .doc = "Defined by a script.", .formula = luaL_checkstring(L, 2)};
    te_lua_enter(rt, L, "define");
    lua_settop(L, 3);
    te_lua_check_options(L, 3, "define", known);
    def.flags = TE_OP_NUMBERS | TE_OP_FLOAT;
    if (flag(L, "compute")) def.flags |= TE_OP_COMPUTE;
    if (flag(L, "truth")) def.flags |= TE_OP_BOOL | TE_OP_NOGRAD;
    if (flag(L, "rows")) def.flags |= TE_OP_LASTROW;
    if (flag(L, "elements")) def.flags |= TE_OP_ELEMENTS;
    if (lua_istable(L, 3)) {
        lua_getfield(L, 3, "outputs"); /* stays on the stack */
        def.outputs = lua_tostring(L, -1);
    }
    te_lua_operation *u = new_operation(L);
    te_lua_call call = te_lua_begin(rt, L);
    u->op = te_op_define(rt->ctx, &def);
    te_lua_end(rt, call);
    if (!u->op) return te_lua_raise(rt, L, "define", rt->ctx->status);
    return 1;
}

/* operation(name): an operation of the engine, also those that are building blocks of others; nil when there is none.
 */
static int operation(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    const char *name = luaL_checkstring(L, 1);
    const te_op *op = te_op_find(rt->ctx, name);
    if (!op) return 0;
    new_operation(L)->op = op;
    return 1;
}

/* A list of the `module` of every operation that has one, in the order of declaration. */
static int operation_modules(lua_State *L)
{
    const te_op *op;
    int n = 0;
    lua_newtable(L);
    for (int i = 0; (op = te_op_at(te_lua_runtime(L)->ctx, i)); i++) {
        if (!op->def->module) continue;
        lua_pushstring(L, op->def->module);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

const luaL_Reg te_lua_define_functions[] = {
    {"define", define}, {"operation", operation}, {"operation_modules", operation_modules}, {NULL, NULL}};
