/* recipe.c - quantizing products under te.autocast, for lua/te/recipe/: te._core.*
 *
 *     product_recipe(input, weight, grad_output, backward, history_lengths, fast_accumulation, hands_on)
 *                                          quantizers of the three roles, false: high precision; how backward computes;
 *                                          a list of the three; what each of the three allows: forward, all, none; of
 *                                          an attention: whether its result goes on quantized
 *     recipe_state()                       what one operation remembers
 *     recipe_state_use(state, recipe)      what it runs under from now on
 *     recipe_states_update{state, role, algorithm, margin, state, …}
 *                                          ends a step of delayed scaling for these
 *     recipe_state_forget(state, gradients)
 *                                          ends one that failed: amaxes of inputs and of the weight are forgotten, or
 *                                          those of gradients
 *     recipe_state_reached(state)          whether the last backward pass quantized a gradient with its scale
 *     recipe_state_tensors(state, role)    scale and history; nil without delayed scaling
 *     recipe_state_counted(state, role)    whether amaxes may wait for an update here
 *     recipe_state_set(state, role, scale, history[, from])
 *                                          copies of them; of another state, or `from` the state: a step's new ones
 *     recipe_state_check(state, role, scale, history)
 *                                          nil, or why they would not be taken
 *     set_recipe_mode(enabled, calibrating)  returns the two before
 *     quantized_linear(state, x, weight, bias)
 *     with_product(state, fn, …)           what fn(…) gives, an operation that runs under the state's recipe
 *     quantize_values(state, x, forward, backward)
 *                                          x as the recipe's format holds it, its gradient likewise
 *     record_scales()                      delayed scaling writes the factors it uses, for a second run of the same
 *     recorded_scales()                    ends that, and gives them
 *     pause_recorded_scales(paused)        uses in between are not written; returns whether it was paused
 *     pause_amaxes(paused)                 what is quantized in between counts nowhere; returns whether it was paused
 *     device_title(name)                   the device and what its kernels come from
 *     replay_scales(scales or nil)         it takes these, each where it was used; nil: its own again
 *     watch_numerics(state, on)            counts anew from here, or no more; nil: forgets
 *     numerics(state, role)                values, nonfinite, saturated, flushed, error, norm, amax, scale (numerics.h)
 *     skipped_amaxes()                     how many steps' amaxes were infinite or NaN
 */
#include "bindings.h"

#include "core/numerics.h"
#include "core/op.h"
#include "core/recipe.h"

static const char recipe_tag[] = "te.product_recipe", state_tag[] = "te.recipe_state";

typedef struct holder {
    const void *tag;
    void *value; /* NULL: released */
} holder;

static void *check(lua_State *L, int index, const char *tag, const char *function)
{
    holder *h = te_lua_to_object(L, index, tag, sizeof *h);
    if (!h || !h->value) te_lua_fail(L, function, "argument %d: expected a %s", index, tag);
    return h->value;
}

te_recipe_state *te_lua_check_recipe_state(lua_State *L, int index, const char *function)
{
    return check(L, index, state_tag, function);
}

static int collect(lua_State *L)
{
    holder *recipe = te_lua_to_object(L, 1, recipe_tag, sizeof *recipe);
    holder *state = te_lua_to_object(L, 1, state_tag, sizeof *state);
    if (recipe) te_product_recipe_release(recipe->value);
    if (state) te_recipe_state_release(state->value);
    if (recipe || state) *(recipe ? recipe : state) = (holder){0};
    return 0;
}

static holder *push_holder(lua_State *L, const char *tag)
{
    holder *h = lua_newuserdata(L, sizeof *h);
    *h = (holder){.tag = tag};
    te_lua_set_collector(L, collect);
    return h;
}

static te_role check_role(lua_State *L, int index) { return (te_role)luaL_checkoption(L, index, NULL, te_role_names); }

/* Of a list that may be left out. */
static void push_entry(lua_State *L, int list, int i)
{
    if (lua_isnoneornil(L, list)) {
        lua_pushnil(L);
        return;
    }
    luaL_checktype(L, list, LUA_TTABLE);
    lua_rawgeti(L, list, i);
}

static int product_recipe(lua_State *L)
{
    static const char *const backward[] = {"quantized", "high_precision", "dequantized", NULL};
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_stack(rt, L);
    te_product_recipe recipe = {.backward = (te_backward_precision)luaL_checkoption(L, 4, "quantized", backward)};
    int fast[TE_ROLE_COUNT];
    recipe.hands_on = lua_toboolean(L, 7);
    lua_settop(L, 7);
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        push_entry(L, 5, r + 1);
        push_entry(L, 6, r + 1);
        recipe.history_length[r] = lua_isnil(L, 8) ? 1 : te_lua_check_int(L, 8, "recipe", "history_length");
        if (recipe.history_length[r] < 1) te_lua_fail(L, "recipe", "history_length: at least 1 is needed");
        fast[r] = luaL_checkoption(L, 9, "none", te_fast_accumulation_names);
        lua_settop(L, 7);
        recipe.quantized[r] = lua_toboolean(L, 1 + r);
        if (recipe.quantized[r]) recipe.quantizers[r] = te_lua_read_quantizer(L, 1 + r, "recipe");
    }
    te_product_recipe_allow_fast_sums(&recipe, fast);
    te_lua_enter(rt, L, "recipe");
    holder *h = push_holder(L, recipe_tag);
    te_lua_call call = te_lua_begin(rt, L);
    h->value = te_product_recipe_new(rt->ctx, &recipe);
    te_lua_end(rt, call);
    return h->value ? 1 : te_lua_raise(rt, L, "recipe", rt->ctx->status);
}

/* --- states ------------------------------------------------------------------------------------------------------- */

static int recipe_state(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "recipe");
    holder *h = push_holder(L, state_tag);
    te_lua_call call = te_lua_begin(rt, L);
    h->value = te_recipe_state_new(rt->ctx);
    te_lua_end(rt, call);
    return h->value ? 1 : te_lua_raise(rt, L, "recipe", rt->ctx->status);
}

static int recipe_state_use(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "recipe");
    te_product_recipe *recipe = check(L, 2, recipe_tag, "recipe");
    te_lua_enter(rt, L, "recipe");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_recipe_state_use(state, recipe);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "recipe", status);
}

/* The list lies in memory of Lua's, so that an error loses nothing. */
static int recipe_states_update(lua_State *L)
{
    static const char *const algorithms[] = {"max", "most_recent", NULL};
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    size_t n = lua_objlen(L, 1) / 4;
    te_lua_enter(rt, L, "recipe");
    te_recipe_update *updates = te_lua_scratch(L, (n + 1) * sizeof *updates);
    for (size_t i = 0; i < n; i++) {
        for (int field = 1; field <= 4; field++) lua_rawgeti(L, 1, (int)(4 * i) + field);
        updates[i] =
            (te_recipe_update){te_lua_check_recipe_state(L, 3, "recipe"), check_role(L, 4),
                               (te_amax_algorithm)luaL_checkoption(L, 5, "max", algorithms), luaL_checkint(L, 6), NULL};
        lua_settop(L, 2);
    }
    te_lua_call call = te_lua_begin(rt, L);
    for (size_t i = 0; i < n; i++) te_recipe_state_retain(updates[i].state);
    te_status status = te_recipe_states_update(rt->ctx, updates, n);
    for (size_t i = 0; i < n; i++) te_recipe_state_release(updates[i].state);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "recipe", status);
}

static int recipe_state_forget(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "recipe");
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "recipe");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_recipe_state_forget(state, lua_toboolean(L, 2));
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "recipe", status);
}

static int recipe_state_reached(lua_State *L)
{
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "recipe");
    lua_pushboolean(L, state->backward == state->ctx->backwards && state->backward > 0);
    return 1;
}

static int recipe_state_tensors(lua_State *L)
{
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "recipe");
    te_role role = check_role(L, 2);
    te_lua_push_tensor(L, &state->scale[role]);
    te_lua_push_tensor(L, &state->history[role]);
    return 2;
}

static int recipe_state_counted(lua_State *L)
{
    lua_pushboolean(L, te_lua_check_recipe_state(L, 1, "recipe")->scaled_for[check_role(L, 2)].counted);
    return 1;
}

static int put_recipe_state(lua_State *L, bool sets)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "recipe");
    te_role role = check_role(L, 2);
    te_lua_enter(rt, L, "recipe");
    te_tensor *scale = te_lua_check_tensor(L, 3, "recipe", "scale"),
              *history = te_lua_check_tensor(L, 4, "recipe", "amax_history");
    te_recipe_state *from = sets && !lua_isnoneornil(L, 5) ? te_lua_check_recipe_state(L, 5, "recipe") : NULL;
    te_tensor_retain(scale), te_tensor_retain(history);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = sets ? te_recipe_state_set(state, role, scale, history)
                            : te_recipe_state_check(state, role, scale, history);
    te_lua_end(rt, call);
    te_tensor_release(scale), te_tensor_release(history);
    if (status == TE_OK && from == state) te_recipe_state_updated(state, role);
    else if (status == TE_OK && from) state->scaled_for[role] = from->scaled_for[role];
    if (status == TE_OK) return 0;
    if (sets) return te_lua_raise(rt, L, "recipe", status);
    lua_pushstring(L, te_context_error(rt->ctx));
    return 1;
}

static int recipe_state_set(lua_State *L) { return put_recipe_state(L, true); }
static int recipe_state_check(lua_State *L) { return put_recipe_state(L, false); }

/* --- running ------------------------------------------------------------------------------------------------------ */

static int set_recipe_mode(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "autocast");
    lua_pushboolean(L, rt->ctx->recipe_enabled);
    lua_pushboolean(L, rt->ctx->calibrating);
    rt->ctx->recipe_enabled = lua_toboolean(L, 1);
    rt->ctx->calibrating = lua_toboolean(L, 2);
    return 2;
}

/* Makes `state` that of the products that follow, and returns the one before, for the end of them: a product may be
 * called inside of another one's. */
static te_recipe_state *set_product(te_context *ctx, te_recipe_state *state)
{
    te_recipe_state *before = ctx->product_state;
    ctx->product_state = state;
    return before;
}

static te_status run_product(te_lua *rt, lua_State *L, te_recipe_state *state, const te_op *op, const te_arg *args,
                             int n, te_tensor **result)
{
    te_recipe_state *before = set_product(rt->ctx, state);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_op_run(rt->ctx, op, args, n, result, 1);
    te_lua_end(rt, call);
    set_product(rt->ctx, before);
    return status;
}

static int quantized_linear(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "linear");
    static const char *const names[] = {"x", "weight", "bias"};
    te_arg args[3] = {{.kind = TE_ARG_ABSENT}};
    lua_settop(L, 4);
    te_lua_enter(rt, L, "linear");
    const te_op *op = te_op_find(rt->ctx, "quantized_linear");
    te_lua_tensor *result = te_lua_new_tensor(L);
    if (!op) return te_lua_raise(rt, L, "linear", rt->ctx->status);
    for (int i = 0; i < 3; i++) {
        if (i == 2 && lua_isnil(L, 4)) continue;
        args[i] = (te_arg){.kind = TE_ARG_TENSOR, .as.tensor = te_lua_check_tensor(L, 2 + i, "linear", names[i])};
    }
    for (int i = 0; i < 3; i++) if (args[i].kind == TE_ARG_TENSOR) te_tensor_retain(args[i].as.tensor);
    te_status status = run_product(rt, L, state, op, args, 3, &result->t);
    for (int i = 0; i < 3; i++) if (args[i].kind == TE_ARG_TENSOR) te_tensor_release(args[i].as.tensor);
    if (status != TE_OK) return te_lua_raise(rt, L, "linear", status);
    te_lua_charge(rt, L);
    return 1;
}

static int with_product(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "attention");
    luaL_checkany(L, 2);
    te_lua_enter(rt, L, "attention");
    te_recipe_state *before = set_product(rt->ctx, state);
    int failed = lua_pcall(L, lua_gettop(L) - 2, 1, 0);
    set_product(rt->ctx, before);
    return failed ? lua_error(L) : 1;
}

static int quantize_values(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "Quantize");
    lua_settop(L, 4);
    te_lua_enter(rt, L, "Quantize");
    const te_op *op = te_op_find(rt->ctx, "quantize_values");
    te_lua_tensor *result = te_lua_new_tensor(L);
    te_tensor *x = te_lua_check_tensor(L, 2, "Quantize", "x");
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x},
                     {.kind = TE_ARG_NUMBER, .as.number = lua_toboolean(L, 3)},
                     {.kind = TE_ARG_NUMBER, .as.number = lua_toboolean(L, 4)}};
    te_tensor_retain(x);
    te_status status = op ? run_product(rt, L, state, op, args, 3, &result->t) : rt->ctx->status;
    te_tensor_release(x);
    if (status != TE_OK) return te_lua_raise(rt, L, "Quantize", status);
    te_lua_charge(rt, L);
    return 1;
}

static int record_scales(lua_State *L)
{
    te_scale_tape *tape = &te_lua_runtime(L)->ctx->recorded_scales;
    te_scale_tape_clear(tape);
    tape->on = true;
    tape->paused = false;
    return 0;
}

static int recorded_scales(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_scale_tape *tape = &rt->ctx->recorded_scales;
    tape->on = false;
    te_lua_tensors scales = te_lua_new_tensors(L, (int)tape->n);
    uintptr_t *uses = te_lua_scratch(L, (size_t)(scales.n + 1) * sizeof *uses);
    int n = (int)tape->n < scales.n ? (int)tape->n : scales.n; /* a finalizer may have begun anew */
    for (int i = 0; i < n; i++) {
        scales.t[i] = te_tensor_retain(tape->uses[i].factor);
        uses[i] = tape->uses[i].use;
    }
    te_scale_tape_clear(tape);
    lua_createtable(L, n, 1);
    lua_pushlstring(L, (const char *)uses, (size_t)n * sizeof *uses);
    lua_setfield(L, -2, "uses");
    for (int i = 0; i < n; i++) {
        te_lua_push_tensor(L, &scales.t[i]);
        lua_rawseti(L, -2, i + 1);
    }
    te_lua_drop_tensors(&scales);
    return 1;
}

static int pause_recorded_scales(lua_State *L)
{
    te_scale_tape *tape = &te_lua_runtime(L)->ctx->recorded_scales;
    lua_pushboolean(L, tape->paused);
    tape->paused = lua_toboolean(L, 1);
    return 1;
}

static int pause_amaxes(lua_State *L)
{
    te_context *ctx = te_lua_runtime(L)->ctx;
    lua_pushboolean(L, ctx->amaxes_paused);
    ctx->amaxes_paused = lua_toboolean(L, 1);
    return 1;
}

static int device_title(lua_State *L)
{
    char text[256] = "";
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "autocast");
    te_device *device = te_context_device(rt->ctx, luaL_checkstring(L, 1));
    if (!device) return te_lua_raise(rt, L, "autocast", rt->ctx->status);
    if (device->exec.backend->describe) device->exec.backend->describe(&device->exec, text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

static int replay_scales(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_scale_tape *tape = &rt->ctx->replayed_scales;
    size_t n = lua_istable(L, 1) ? lua_objlen(L, 1) : 0, bytes = 0;
    const char *packed = "";
    te_lua_check_stack(rt, L);
    lua_settop(L, 1);
    if (n > 0) { /* the field may run a script, and that this function */
        lua_getfield(L, 1, "uses");
        packed = luaL_checklstring(L, 2, &bytes);
        if (bytes != n * sizeof(uintptr_t)) return te_lua_fail(L, "checkpoint", "scales: expected those recorded");
    }
    te_scale_tape_clear(tape);
    if (!te_mem_grow(&rt->ctx->mem, &tape->uses, &tape->capacity, n, sizeof *tape->uses))
        return te_lua_raise(rt, L, "checkpoint", te_fail_memory(rt->ctx, "recipe"));
    tape->on = lua_istable(L, 1);
    for (size_t i = 0; i < n; i++) {
        te_scale_use *use = &tape->uses[i];
        lua_rawgeti(L, 1, (int)i + 1);
        memcpy(&use->use, packed + i * sizeof use->use, sizeof use->use);
        use->factor = te_tensor_retain(te_lua_check_tensor(L, -1, "checkpoint", "scale"));
        tape->n++;
        lua_pop(L, 1);
    }
    return 0;
}

/* --- numerics ----------------------------------------------------------------------------------------------------- */

static int watch_numerics(lua_State *L)
{
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "numerics");
    if (lua_isnoneornil(L, 2)) return te_numerics_unwatch(state), 0;
    te_lua *rt = te_lua_runtime(L);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_numerics_watch(state, lua_toboolean(L, 2));
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "numerics", status);
}

static int numerics(lua_State *L)
{
    te_recipe_state *state = te_lua_check_recipe_state(L, 1, "numerics");
    te_role_numerics n = {0};
    if (state->watched) n = state->watched->roles[check_role(L, 2)];
    const double numbers[] = {n.values, n.nonfinite, n.saturated, n.flushed, n.error, n.norm, n.amax, n.scale};
    int count = (int)(sizeof numbers / sizeof *numbers);
    for (int i = 0; i < count; i++) lua_pushnumber(L, numbers[i]);
    return count;
}

static int skipped_amaxes(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    uint64_t count;
    te_lua_enter(rt, L, "numerics");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_recipe_skipped_amaxes(rt->ctx, &count);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "numerics", status);
    lua_pushnumber(L, (double)count);
    return 1;
}

const luaL_Reg te_lua_recipe_functions[] = {
    {"product_recipe", product_recipe},
    {"recipe_state", recipe_state},
    {"recipe_state_use", recipe_state_use},
    {"recipe_states_update", recipe_states_update},
    {"recipe_state_forget", recipe_state_forget},
    {"recipe_state_reached", recipe_state_reached},
    {"recipe_state_tensors", recipe_state_tensors},
    {"recipe_state_counted", recipe_state_counted},
    {"recipe_state_set", recipe_state_set},
    {"recipe_state_check", recipe_state_check},
    {"set_recipe_mode", set_recipe_mode},
    {"quantized_linear", quantized_linear},
    {"with_product", with_product},
    {"quantize_values", quantize_values},
    {"record_scales", record_scales},
    {"recorded_scales", recorded_scales},
    {"pause_recorded_scales", pause_recorded_scales},
    {"pause_amaxes", pause_amaxes},
    {"device_title", device_title},
    {"replay_scales", replay_scales},
    {"watch_numerics", watch_numerics},
    {"numerics", numerics},
    {"skipped_amaxes", skipped_amaxes},
    {NULL, NULL},
};
