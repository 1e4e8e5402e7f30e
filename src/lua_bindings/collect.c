/* collect.c - when Lua's collector runs for the sake of tensors, and calls into the engine, which it may interrupt.
 *
 * Tensor memory is invisible to Lua's collector: a tensor of a gigabyte is sixteen bytes to it. So after each result
 * the bytes in live tensors are compared with what they were after the last collection, and when they have grown by
 * more than a collection is worth one runs. Views share memory and cost nothing here. Memory that runs out
 * collects too.
 */
#include "bindings.h"
#include "host.h"

static size_t host_bytes(const te_context *ctx) { return ctx->devices[0].allocator.current; }

static size_t device_bytes(const te_context *ctx)
{
    size_t bytes = 0;
    for (int i = 1; i < TE_MAX_DEVICES; i++) bytes += ctx->devices[i].allocator.current;
    return bytes;
}

static bool is_due(const te_lua *rt)
{
    return host_bytes(rt->ctx) > rt->collect_at || device_bytes(rt->ctx) > rt->collect_device_at;
}

/* Goes on to the end of a cycle of the collector. A full collection sweeps all before its cycle, too, which takes half
 * as long again. */
static void finish_cycle(lua_State *L)
{
    while (!lua_gc(L, LUA_GCSTEP, 0)) continue;
}

/* A collection takes some 0.13 ns a byte of Lua's heap; a result written to memory that the caches do not hold takes
 * some 20 us a megabyte more than one that is in them. So the smaller the heap, the sooner it pays to collect: then
 * memory of garbage is used again while the caches hold it. A large heap is not walked for little. A device's memory is
 * worth less of the host's time: its caches hold no tensor for long, and what a step leaves behind is small beside what
 * a device has. */
static void set_threshold(te_lua *rt, lua_State *L)
{
    enum { LEAST = 2 << 20, MOST = 32 << 20, GROWTH_PER_HEAP = 28, DEVICE_LEAST = 256 << 20, DEVICE_PART = 32 };
    size_t live = host_bytes(rt->ctx), there = device_bytes(rt->ctx), heap = (size_t)lua_gc(L, LUA_GCCOUNT, 0) << 10;
    size_t growth = GROWTH_PER_HEAP * heap, most = live / 2 + 2 * heap;
    if (most < MOST) most = MOST;
    if (growth < LEAST) growth = LEAST;
    rt->collect_at = live + (growth < most ? growth : most);
    rt->collect_device_at = there + (there / DEVICE_PART < DEVICE_LEAST ? DEVICE_LEAST : there / DEVICE_PART);
}

void te_lua_charge(te_lua *rt, lua_State *L)
{
    if (!is_due(rt)) return;
    finish_cycle(L);
    /* one that Lua had begun by itself leaves what has become garbage since */
    if (rt->ctx && is_due(rt)) finish_cycle(L);
    if (rt->ctx) set_threshold(rt, L);
}

static int collect_protected(lua_State *L)
{
    lua_gc(L, LUA_GCCOLLECT, 0);
    return 0;
}

/* Called by the engine in the middle of an allocation: nothing may jump out, and finalizers may not come back in. */
static void on_memory_pressure(void *user)
{
    te_lua    *rt = user;
    lua_State *L = te_lua_caller(rt);
    if (rt->reclaiming || !L || !lua_checkstack(L, 8)) return;
    rt->reclaiming = true;
    if (lua_cpcall(L, collect_protected, NULL) != 0) lua_pop(L, 1);
    rt->reclaiming = false;
    set_threshold(rt, L);
}

void te_lua_enter(te_lua *rt, lua_State *L, const char *function)
{
    if (rt->reclaiming) te_lua_fail(L, function, "not possible in a finalizer that runs because memory is short");
    te_lua_check_stack(rt, L);
}

lua_State *te_lua_caller(const te_lua *rt)
{
    if (rt->L) return rt->L;
    return rt->host ? rt->host->L : rt->thread;
}

void te_lua_open_collection(te_lua *rt, lua_State *L)
{
    set_threshold(rt, L);
    rt->ctx->collect = on_memory_pressure;
    rt->ctx->collect_user = rt;
}
