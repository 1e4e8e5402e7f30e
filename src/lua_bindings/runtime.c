/* runtime.c - what belongs to the runtime as a whole: random state, memory, threads, devices, the list of
 * operations. */
#include "bindings.h"

#include "core/graph.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* A recording holds no place in the random numbers: its launches draw on from where the context's stand. */
static void refuse_recording(lua_State *L, te_lua *rt, const char *function, const char *what)
{
    if (!rt->ctx->capture) return;
    te_graph_spoil(rt->ctx->capture, what); /* also where the script goes on */
    te_lua_fail(L, function, "%s cannot be part of a graph", what);
}

static int manual_seed(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    int64_t seed = te_lua_check_int(L, 1, "manual_seed", "seed");
    te_lua_check_count(L, 1, "manual_seed");
    te_lua_enter(rt, L, "manual_seed");
    refuse_recording(L, rt, "manual_seed", "a seed of random numbers");
    te_context_seed(rt->ctx, (uint64_t)seed);
    return 0;
}

static int get_or_set_rng(lua_State *L, bool replays)
{
    te_lua  *rt = te_lua_runtime(L);
    uint64_t seed, offset;
    char     text[64], *end;
    te_lua_check_count(L, 1, "rng_state");
    te_lua_enter(rt, L, "rng_state");
    te_context_rng_state(rt->ctx, &seed, &offset);
    snprintf(text, sizeof text, "%llu %llu", (unsigned long long)seed, (unsigned long long)offset);
    if (!lua_isnoneornil(L, 1)) {
        const char *state = lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : "";
        errno = 0;
        seed = strtoull(state, &end, 10);
        bool good = end != state && *end == ' ' && errno == 0 && state[0] != '-';
        state = end + (*end == ' ');
        offset = strtoull(state, &end, 10);
        if (!good || end == state || *end || errno || state[0] == '-')
            return te_lua_fail(L, "rng_state", "state: expected what te.rng_state() returned, got %s",
                               te_lua_describe(L, 1, (char[256]){0}, 256));
        if (!replays) refuse_recording(L, rt, "rng_state", "a state of random numbers");
        te_context_set_rng_state(rt->ctx, seed, offset);
    }
    lua_pushstring(L, text);
    return 1;
}

/* te.rng_state(): the state as a string, "seed offset"; te.rng_state(state) goes back to it. */
static int rng_state(lua_State *L) { return get_or_set_rng(L, false); }

/* te._core.rng_state: the same for the library, which computes again, or puts back, what a recording drew itself. */
static int replayed_rng_state(lua_State *L) { return get_or_set_rng(L, true); }

const luaL_Reg te_lua_random_functions[] = {{"rng_state", replayed_rng_state}, {NULL, NULL}};

static void set_count(lua_State *L, const char *name, double value)
{
    lua_pushnumber(L, value);
    lua_setfield(L, -2, name);
}

/* te.memory_stats([device]): {current, peak, reserved} in bytes, and allocations. */
static int memory_stats(lua_State *L)
{
    te_lua         *rt = te_lua_runtime(L);
    te_memory_stats stats;
    te_lua_check_count(L, 1, "memory_stats");
    te_lua_enter(rt, L, "memory_stats");
    const char *device = lua_isnoneornil(L, 1) ? rt->device : te_lua_check_text(L, 1, "memory_stats", "device");
    te_status   status = te_context_memory(rt->ctx, device, &stats);
    if (status != TE_OK) return te_lua_raise(rt, L, "memory_stats", status);
    lua_createtable(L, 0, 4);
    set_count(L, "current", (double)stats.current);
    set_count(L, "peak", (double)stats.peak);
    set_count(L, "reserved", (double)stats.reserved);
    set_count(L, "allocations", (double)stats.allocations);
    return 1;
}

static int reset_peak_memory(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "reset_peak_memory");
    te_context_reset_peak(rt->ctx);
    return 0;
}

/* Gives cached blocks back to the system. */
static int empty_cache(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "empty_cache");
    te_context_empty_cache(rt->ctx);
    return 0;
}

/* te.set_num_threads(n): n threads for kernels, 0 for OMP_NUM_THREADS or all cores. Results do not depend on it. */
static int set_num_threads(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    int64_t n = te_lua_check_int(L, 1, "set_num_threads", "n");
    te_lua_check_count(L, 1, "set_num_threads");
    if (n < 0 || n > TE_MAX_THREADS)
        return te_lua_fail(L, "set_num_threads", "n: %lld is not in 0 to %d", (long long)n, TE_MAX_THREADS);
    te_lua_enter(rt, L, "set_num_threads");
    if (rt->restricted && (n == 0 || n > rt->threads)) n = rt->threads; /* the host's number is the most */
    te_context_set_threads(rt->ctx, (int)n);
    return 0;
}

static int get_num_threads(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "get_num_threads");
    lua_pushinteger(L, te_context_threads(rt->ctx));
    return 1;
}

/* te.devices(): their names; and, where there is no CUDA device, the reason. */
static int devices(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_count(L, 0, "devices");
    te_lua_enter(rt, L, "devices");
    int n = te_context_cuda_devices(rt->ctx);
    lua_createtable(L, n + 1, 0);
    lua_pushliteral(L, "cpu");
    lua_rawseti(L, -2, 1);
    for (int i = 0; i < n; i++) {
        if (i == 0) lua_pushliteral(L, "cuda");
        else lua_pushfstring(L, "cuda:%d", i);
        lua_rawseti(L, -2, i + 2);
    }
    if (n > 0) return 1;
    lua_pushfstring(L, "cuda: %s", te_context_error(rt->ctx));
    return 2;
}

/* te.synchronize([device]): waits for a device, or for all. */
static int synchronize(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    if (!lua_isnoneornil(L, 1) && !lua_isstring(L, 1))
        return te_lua_fail(L, "synchronize", "device: expected the name of one");
    te_lua_enter(rt, L, "synchronize");
    te_status status = te_context_synchronize(rt->ctx, lua_tostring(L, 1));
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "synchronize", status);
}

/* te.set_float32_matmul_precision(precision): "highest" keeps float32 in matrix products, "high" allows TF32. */
static int set_float32_matmul_precision(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *precision = lua_isstring(L, 1) ? lua_tostring(L, 1) : "";
    bool        high = strcmp(precision, "high") == 0;
    if (!high && strcmp(precision, "highest") != 0)
        return te_lua_fail(L, "set_float32_matmul_precision", "expected \"highest\" or \"high\", got \"%.40s\"",
                           precision);
    te_lua_enter(rt, L, "set_float32_matmul_precision");
    te_context_set_tf32(rt->ctx, high);
    return 0;
}

static int get_float32_matmul_precision(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "get_float32_matmul_precision");
    lua_pushstring(L, te_context_tf32(rt->ctx) ? "high" : "highest");
    return 1;
}

/* te.use_deterministic_algorithms(mode): whether results repeat their bits even where others would be faster. */
static int use_deterministic_algorithms(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    if (!lua_isboolean(L, 1))
        return te_lua_fail(L, "use_deterministic_algorithms", "expected true or false, got %s", luaL_typename(L, 1));
    te_lua_enter(rt, L, "use_deterministic_algorithms");
    te_context_set_any_order(rt->ctx, !lua_toboolean(L, 1));
    return 0;
}

static int are_deterministic_algorithms_enabled(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "are_deterministic_algorithms_enabled");
    lua_pushboolean(L, !te_context_any_order(rt->ctx));
    return 1;
}

/* te.get_default_device(): where tensors are made that no device is named for. */
static int get_default_device(lua_State *L)
{
    lua_pushstring(L, te_lua_runtime(L)->device);
    return 1;
}

static int is_tensor(lua_State *L)
{
    lua_pushboolean(L, te_lua_to_tensor(L, 1) != NULL);
    return 1;
}

/* --- the list of operations --------------------------------------------------------------------------------------- */

/* te.ops_list(): what every operation declares, for help and for tests that walk all of them. */
static int ops_list(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    int     n = 0;
    char    signature[512];
    te_lua_enter(rt, L, "ops_list");
    lua_newtable(L);
    const te_op *op;
    for (int i = 0; (op = te_op_at(rt->ctx, i)); i++) {
        if (op->def->flags & TE_OP_HIDDEN) continue;
        lua_createtable(L, 0, 14);
        te_lua_text_entry(L, "name", op->name);
        te_lua_text_entry(L, "signature", te_lua_signature(op, signature, sizeof signature));
        te_lua_text_entry(L, "doc", te_op_doc(op));
        te_lua_text_entry(L, "group", op->group);
        te_lua_text_entry(L, "module", op->def->module);
        te_lua_text_entry(L, "domain", op->def->domain);
        te_lua_number_entry(L, "n_outputs", op->n_outputs);
        te_lua_flag_entry(L, "differentiable", !(op->def->flags & TE_OP_NOGRAD));
        te_lua_flag_entry(L, "method", (op->def->flags & TE_OP_METHOD) != 0);
        te_lua_flag_entry(L, "inplace", (op->def->flags & TE_OP_INPLACE) != 0);
        te_lua_flag_entry(L, "numbers", (op->def->flags & TE_OP_NUMBERS) != 0);
        te_lua_flag_entry(L, "gated", (op->def->flags & TE_OP_GATED) != 0);
        te_lua_push_params(L, op);
        lua_setfield(L, -2, "params");
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

const luaL_Reg te_lua_runtime_functions[] = {
    {"manual_seed", manual_seed},         {"rng_state", rng_state},     {"memory_stats", memory_stats},
    {"reset_peak_memory", reset_peak_memory}, {"empty_cache", empty_cache}, {"set_num_threads", set_num_threads},
    {"get_num_threads", get_num_threads}, {"devices", devices},         {"get_default_device", get_default_device},
    {"set_float32_matmul_precision", set_float32_matmul_precision},
    {"get_float32_matmul_precision", get_float32_matmul_precision},
    {"use_deterministic_algorithms", use_deterministic_algorithms},
    {"are_deterministic_algorithms_enabled", are_deterministic_algorithms_enabled},
    {"synchronize", synchronize},         {"is_tensor", is_tensor},
    {"ops_list", ops_list},               {NULL, NULL},
};
