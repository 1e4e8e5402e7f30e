/* quantized.c - quantizing for te.quantize. A quantizer is a plain table of capabilities, a quantized tensor the plain
 * tensors that it consists of; lua/te/quantized.lua makes values of them.
 *
 *     te._core.check_quantizer(quantizer)                         raises when its fields contradict each other
 *     local data, scale_inv, amax, data_c, scale_inv_c, amax_c =
 *         te._core.quantize(t, quantizer, { rowwise = true, columnwise = true, scale = 1, seed = 7 })
 *     local t = te._core.dequantize(quantizer, "bfloat16", { 4, 32 }, "rowwise", data, scale_inv, amax)
 *     local data_c = te._core.complete_quantized(quantizer, "bfloat16", { 4, 32 }, "rowwise", data, scale_inv, amax)
 *     local text = te._core.tensor_bytes(data)                    what specs compare
 *     te._core.become(t, other)                                   for te.Module's to
 */
#include "bindings.h"

#include "core/autograd.h"

#include "core/quantized.h"

static const char *const fields[] = {"element",       "scale",          "block_rows", "block_cols",
                                     "needs_history", "has_columnwise", "transposed", "replicated",
                                     "power_of_two",  "epsilon",        "row_scaled", "hadamard",
                                     "stochastic",    "four_over_six",  "scale_max",  NULL};

static bool read_bool(lua_State *L, int table, const char *function, const char *name, bool otherwise)
{
    char text[256];
    lua_getfield(L, table, name);
    if (!lua_isnil(L, -1) && !lua_isboolean(L, -1))
        te_lua_fail(L, function, "%s: expected true or false, got %s", name, te_lua_describe(L, -1, text, sizeof text));
    bool value = lua_isnil(L, -1) ? otherwise : lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

static int read_extent(lua_State *L, int table, const char *function, const char *name)
{
    lua_getfield(L, table, name);
    int64_t value = lua_isnil(L, -1) ? 0 : te_lua_check_int(L, -1, function, name);
    if (value < 0 || value > 128)
        te_lua_fail(L, function, "%s: %lld; blocks have at most 128 rows and columns", name, (long long)value);
    lua_pop(L, 1);
    return (int)value;
}

/* The position of a name in a list that ends with NULL. */
static int read_choice(lua_State *L, int table, const char *function, const char *field, const char *const *names)
{
    char text[256];
    lua_getfield(L, table, field);
    const char *given = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : lua_isnil(L, -1) ? names[0] : "";
    for (int i = 0; names[i]; i++) {
        if (strcmp(names[i], given) != 0) continue;
        lua_pop(L, 1);
        return i;
    }
    char list[256] = "";
    for (int i = 0, n = 0; names[i] && n < (int)sizeof list; i++)
        n += snprintf(list + n, sizeof list - (size_t)n, "%s%s", i ? ", " : "", names[i]);
    te_lua_fail(L, function, "%s: no choice %s; there are %s", field, te_lua_describe(L, -1, text, sizeof text), list);
    return 0;
}

te_quantizer te_lua_read_quantizer(lua_State *L, int index, const char *function)
{
    te_lua_check_stack(te_lua_runtime(L), L); /* fields may run scripts */
    te_quantizer q = {0};
    te_lua_check_options(L, index, function, fields);
    if (!lua_istable(L, index)) te_lua_fail(L, function, "quantizer: expected a table");
    q.element = (te_element_kind)read_choice(L, index, function, "element", te_element_names);
    q.scale = (te_scale_kind)read_choice(L, index, function, "scale", te_scale_names);
    q.four_over_six = (te_four_over_six)read_choice(L, index, function, "four_over_six", te_four_over_six_names);
    q.block_rows = read_extent(L, index, function, "block_rows");
    q.block_cols = read_extent(L, index, function, "block_cols");
    q.needs_history = read_bool(L, index, function, "needs_history", false);
    q.has_columnwise = read_bool(L, index, function, "has_columnwise", true);
    q.transposed = read_bool(L, index, function, "transposed", true);
    q.replicated = read_bool(L, index, function, "replicated", false);
    q.power_of_two = read_bool(L, index, function, "power_of_two", false);
    q.row_scaled = read_bool(L, index, function, "row_scaled", false);
    q.hadamard = read_bool(L, index, function, "hadamard", false);
    q.stochastic = read_bool(L, index, function, "stochastic", false);
    q.epsilon = (float)te_lua_number_field(L, index, function, "epsilon", 0);
    q.scale_max = (float)te_lua_number_field(L, index, function, "scale_max", 448);
    return q;
}

void te_lua_push_quantizer(lua_State *L, const te_quantizer *q)
{
    lua_createtable(L, 0, 15);
    te_lua_text_entry(L, "element", te_element_names[q->element]);
    te_lua_text_entry(L, "scale", te_scale_names[q->scale]);
    te_lua_text_entry(L, "four_over_six", te_four_over_six_names[q->four_over_six]);
    te_lua_number_entry(L, "block_rows", q->block_rows);
    te_lua_number_entry(L, "block_cols", q->block_cols);
    te_lua_flag_entry(L, "needs_history", q->needs_history);
    te_lua_flag_entry(L, "has_columnwise", q->has_columnwise);
    te_lua_flag_entry(L, "transposed", q->transposed);
    te_lua_flag_entry(L, "replicated", q->replicated);
    te_lua_flag_entry(L, "power_of_two", q->power_of_two);
    te_lua_flag_entry(L, "row_scaled", q->row_scaled);
    te_lua_flag_entry(L, "hadamard", q->hadamard);
    te_lua_flag_entry(L, "stochastic", q->stochastic);
    te_lua_number_entry(L, "epsilon", (double)q->epsilon);
    te_lua_number_entry(L, "scale_max", (double)q->scale_max);
}

static int check_quantizer(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_quantizer q = te_lua_read_quantizer(L, 1, "recipe.Quantizer");
    te_lua_enter(rt, L, "recipe.Quantizer");
    te_status status = te_quantizer_check(rt->ctx, &q);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "recipe.Quantizer", status);
}

/* Both directions, where the quantizer has both, unless the options leave one out. */
static te_quantize_options read_options(lua_State *L, int index, const te_quantizer *q, uint64_t *seed)
{
    static const char *const known[] = {"rowwise", "columnwise", "scale", "seed", NULL};
    te_lua_check_options(L, index, "quantize", known);
    te_quantize_options o = {.want = {true, q->has_columnwise}, .scale = 1};
    if (!lua_istable(L, index)) return o;
    o.want[0] = read_bool(L, index, "quantize", "rowwise", true);
    o.want[1] = read_bool(L, index, "quantize", "columnwise", o.want[1]);
    o.scale = (float)te_lua_number_field(L, index, "quantize", "scale", 1);
    if (o.scale != 1 && !q->needs_history)
        te_lua_fail(L, "quantize", "scale: the factors of this quantizer follow from the values; one is given where it "
                                   "has needs_history, as under DelayedScaling");
    lua_getfield(L, index, "seed");
    if (!lua_isnil(L, -1)) {
        *seed = (uint64_t)te_lua_check_int(L, -1, "quantize", "seed");
        o.seed = seed;
    }
    lua_pop(L, 1);
    return o;
}

enum { PARTS = 6 };

static int quantize(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_tensor(L, 1, "quantize", "t");
    uint64_t seed = 0;
    lua_settop(L, 3);
    te_quantizer q = te_lua_read_quantizer(L, 2, "quantize");
    te_quantize_options options = read_options(L, 3, &q, &seed);
    te_quantized result;
    te_lua_tensor *parts[PARTS];
    for (int i = 0; i < PARTS; i++) parts[i] = te_lua_new_tensor(L);
    te_lua_enter(rt, L, "quantize");
    te_tensor *source = te_tensor_retain(te_lua_check_tensor(L, 1, "quantize", "t"));
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_quantize(source, &q, &options, &result);
    te_lua_end(rt, call);
    te_tensor_release(source);
    if (status != TE_OK) return te_lua_raise(rt, L, "quantize", status);
    for (int s = 0; s < 2; s++) {
        parts[3 * s]->t = result.side[s].data;
        parts[3 * s + 1]->t = result.side[s].scale_inv;
        parts[3 * s + 2]->t = result.side[s].amax;
    }
    for (int i = 0; i < PARTS; i++) {
        if (parts[i]->t) continue;
        lua_pushnil(L);
        lua_replace(L, 4 + i);
    }
    te_lua_charge(rt, L);
    return PARTS;
}

/* What both functions below take: (quantizer, dtype, shape, direction, data, scale_inv, amax or nil). Pushes the
 * result's handle. */
typedef struct quantized_side {
    te_quantized z; /* holds its parts: to be closed */
    int side;
    te_lua_tensor *result;
} quantized_side;

static quantized_side read_side(te_lua *rt, lua_State *L, const char *function)
{
    static const char *const sides[] = {"rowwise", "columnwise", NULL};
    quantized_side s = {0};
    te_quantized *z = &s.z;
    lua_settop(L, 7);
    z->quantizer = te_lua_read_quantizer(L, 1, function);
    z->dtype = te_lua_check_dtype(L, 2, function, "dtype");
    if (z->dtype != TE_F32 && z->dtype != TE_BF16 && z->dtype != TE_F16)
        te_lua_fail(L, function, "dtype: %s; use float32, bfloat16 or float16", te_dtype_name(z->dtype));
    z->ndim = te_lua_check_ints(L, 3, function, "shape", z->shape);
    s.side = luaL_checkoption(L, 4, NULL, sides);
    s.result = te_lua_new_tensor(L);
    te_lua_enter(rt, L, function);
    te_quantized_part *part = &z->side[s.side];
    part->data = te_lua_check_tensor(L, 5, function, "data");
    part->scale_inv = te_lua_check_tensor(L, 6, function, "scale_inv");
    part->amax = lua_isnil(L, 7) ? NULL : te_lua_check_tensor(L, 7, function, "amax");
    te_tensor_retain(part->data);
    te_tensor_retain(part->scale_inv);
    if (part->amax) te_tensor_retain(part->amax);
    return s;
}

static int dequantize(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    quantized_side s = read_side(rt, L, "dequantize");
    te_lua_call call = te_lua_begin(rt, L);
    s.result->t = te_dequantize(rt->ctx, &s.z, s.side);
    te_lua_end(rt, call);
    te_quantized_close(&s.z);
    if (!s.result->t) return te_lua_raise(rt, L, "dequantize", rt->ctx->status);
    te_lua_charge(rt, L);
    return 1;
}

/* The data of the column-wise copy from a row-wise one; nil where they do not follow from it. */
static int complete_quantized(lua_State *L)
{
    static const char function[] = "QuantizedTensor.update_usage";
    te_lua *rt = te_lua_runtime(L);
    quantized_side s = read_side(rt, L, function);
    bool possible = te_quantized_may_complete(&s.z);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_quantized_check(rt->ctx, "te.QuantizedTensor.update_usage", &s.z, s.side);
    if (status == TE_OK && possible) status = te_quantized_complete(&s.z);
    te_lua_end(rt, call);
    if (status == TE_OK && possible) s.result->t = te_tensor_retain(s.z.side[1].data);
    te_quantized_close(&s.z);
    if (status != TE_OK) return te_lua_raise(rt, L, function, status);
    if (!possible) lua_pushnil(L);
    te_lua_charge(rt, L);
    return 1;
}

/* become(t, other): t is from now on what `other` is, for all who have the handle. Its hooks come along. */
static int become(lua_State *L)
{
    te_tensor *t = te_lua_check_tensor(L, 1, "become", "t"), *other = te_lua_check_tensor(L, 2, "become", "other");
    te_lua_to_tensor(L, 1)->t = te_tensor_retain(other);
    te_leaf_hooks_move(t, other);
    t->replaced = true;
    te_tensor_release(t);
    return 0;
}

/* tensor_bytes(t): the elements of a contiguous tensor as they lie in memory, wherever that is. */
static int tensor_bytes(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "tensor_bytes");
    te_lua_tensor *here = te_lua_new_tensor(L); /* holds a copy, where t is on another device, whatever happens */
    te_tensor *t = te_tensor_retain(te_lua_check_tensor(L, 1, "tensor_bytes", "t"));
    te_lua_call call = te_lua_begin(rt, L);
    here->t = te_tensor_on_device(t, te_context_device(rt->ctx, "cpu"));
    te_lua_end(rt, call);
    te_tensor_release(t);
    if (!here->t) return te_lua_raise(rt, L, "tensor_bytes", rt->ctx->status);
    const char *data = te_tensor_data(here->t);
    if (!data && te_tensor_numel(here->t)) return te_lua_fail(L, "tensor_bytes", "t: expected a contiguous tensor");
    lua_pushlstring(L, data ? data : "", (size_t)te_tensor_numel(here->t) * te_dtype_size(here->t->dtype));
    return 1;
}

const luaL_Reg te_lua_quantized_functions[] = {
    {"check_quantizer", check_quantizer}, {"quantize", quantize}, {"dequantize", dequantize},
    {"tensor_bytes", tensor_bytes}, {"become", become}, {"complete_quantized", complete_quantized}, {NULL, NULL},
};
