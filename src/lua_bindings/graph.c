/* graph.c - recorded graphs of a device for lua/te/graph.lua: te._core.graph_*.
 *
 *     graph_begin(device, before)  starts recording; nil where the device has no graphs. before: the graph whose
 *                              launches come before, or nil
 *     graph_end(g, keep)       ends it; g can be launched when it was kept
 *     graph_launch(g)
 *     graph_free(g)            otherwise the collector does
 *     fetch(tensor)            float64 numbers on their way to the host, for fetched
 *     fetched(f)               a list of them; waits where they have not arrived
 *     graph_numbers(device, rows, columns)   a float64 tensor for adamw_send, in a recording or not
 */
#include "bindings.h"

#include "core/graph.h"

static const char graph_tag[] = "te.graph";

typedef struct lua_graph {
    const void *tag;
    te_graph   *graph; /* NULL: none any more */
    bool        recording;
} lua_graph;

static lua_graph *check_graph_at(lua_State *L, int arg, const char *function)
{
    lua_graph *u = te_lua_to_object(L, arg, graph_tag, sizeof *u);
    if (!u || !u->graph) te_lua_fail(L, function, "expected a graph");
    return u;
}

static lua_graph *check_graph(lua_State *L, const char *function) { return check_graph_at(L, 1, function); }

static void end(lua_graph *u)
{
    if (!u->graph) return;
    if (u->recording)
        te_graph_end(u->graph, false);
    else
        te_graph_release(u->graph);
    u->graph = NULL;
}

static int collect(lua_State *L)
{
    lua_graph *u = te_lua_to_object(L, 1, graph_tag, sizeof *u);
    if (!u) return 0;
    end(u);
    *u = (lua_graph){0};
    return 0;
}

static int graph_begin(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *name = luaL_checkstring(L, 1);
    const lua_graph *before = lua_isnoneornil(L, 2) ? NULL : check_graph_at(L, 2, "graph_begin");
    te_lua_enter(rt, L, "graph");
    lua_graph *u = lua_newuserdata(L, sizeof *u);
    *u = (lua_graph){.tag = graph_tag};
    te_lua_set_collector(L, collect);
    te_device *device = te_context_device(rt->ctx, name);
    if (!device) return te_lua_raise(rt, L, "graph", rt->ctx->status);
    if (!device->exec.backend->capture_begin) {
        lua_pushnil(L);
        return 1;
    }
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_graph_begin(rt->ctx, device, &u->graph);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "graph", status);
    if (before) te_graph_follow(u->graph, before->graph);
    u->recording = true;
    return 1;
}

static int graph_end(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_graph *u = check_graph(L, "graph_end");
    bool       keep = lua_toboolean(L, 2);
    if (!u->recording) return te_lua_fail(L, "graph_end", "the graph is not being recorded");
    te_lua_enter(rt, L, "graph");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_graph_end(u->graph, keep);
    te_lua_end(rt, call);
    u->recording = false;
    if (status != TE_OK || !keep) u->graph = NULL;
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "graph", status);
}

static int graph_launch(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_graph *u = check_graph(L, "graph_launch");
    if (u->recording) return te_lua_fail(L, "graph_launch", "the graph is still being recorded");
    te_lua_enter(rt, L, "graph");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_graph_launch(u->graph);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "graph", status);
}

static int graph_free(lua_State *L)
{
    te_lua_enter(te_lua_runtime(L), L, "graph"); /* not by a finalizer in the middle of a graph's own call */
    end(check_graph(L, "graph_free"));
    return 0;
}

static const char fetch_tag[] = "te.fetch";

typedef struct lua_fetch {
    const void *tag;
    te_fetch   *fetch; /* NULL: ended */
} lua_fetch;

static int collect_fetch(lua_State *L)
{
    lua_fetch *u = te_lua_to_object(L, 1, fetch_tag, sizeof *u);
    if (!u) return 0;
    if (u->fetch) te_fetch_end(u->fetch, NULL);
    *u = (lua_fetch){0};
    return 0;
}

static int fetch(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    lua_settop(L, 1);
    te_lua_enter(rt, L, "fetch");
    lua_fetch *u = lua_newuserdata(L, sizeof *u);
    *u = (lua_fetch){.tag = fetch_tag};
    te_lua_set_collector(L, collect_fetch);
    te_tensor  *t = te_tensor_retain(te_lua_check_tensor(L, 1, "fetch", "tensor"));
    te_lua_call call = te_lua_begin(rt, L);
    te_status   status = te_tensor_fetch(t, &u->fetch);
    te_lua_end(rt, call);
    te_tensor_release(t);
    return status == TE_OK ? 1 : te_lua_raise(rt, L, "fetch", status);
}

static int fetched(lua_State *L)
{
    te_lua    *rt = te_lua_runtime(L);
    lua_fetch *u = te_lua_to_object(L, 1, fetch_tag, sizeof *u);
    double     values[TE_FETCH_MAX];
    if (!u || !u->fetch) return te_lua_fail(L, "fetched", "expected what fetch returned, once");
    te_lua_enter(rt, L, "fetch");
    int       n = te_fetch_count(u->fetch);
    te_fetch *ended = u->fetch;
    u->fetch = NULL;
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_fetch_end(ended, values);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "fetch", status);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, values[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int graph_numbers(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    int64_t rows = te_lua_check_int(L, 2, "graph_numbers", "rows"),
            columns = te_lua_check_int(L, 3, "graph_numbers", "columns");
    te_lua_enter(rt, L, "graph");
    te_device *device = te_context_device(rt->ctx, luaL_checkstring(L, 1));
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_lua_call call = te_lua_begin(rt, L);
    u->t = device ? te_graph_numbers(rt->ctx, device, rows, columns) : NULL;
    te_lua_end(rt, call);
    return u->t ? 1 : te_lua_raise(rt, L, "graph", rt->ctx->status);
}

const luaL_Reg te_lua_graph_functions[] = {{"graph_begin", graph_begin},
                                           {"graph_end", graph_end},
                                           {"graph_launch", graph_launch},
                                           {"graph_free", graph_free},
                                           {"graph_numbers", graph_numbers},
                                           {"fetch", fetch},
                                           {"fetched", fetched},
                                           {NULL, NULL}};
