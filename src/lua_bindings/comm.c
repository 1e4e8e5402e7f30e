/* comm.c - groups of processes for lua/te/distributed.lua: te._core.comm_*.
 *
 *     comm_launched()                         whether this process was started with others
 *     comm_world()                            a group, of all of them
 *     comm_split(comm, color, key)            a group, or nil where the color is negative
 *     comm_place(comm)                        rank, size, local rank, local size; ranks count from 0
 *     comm_barrier(comm)
 *     comm_broadcast_(comm, x, root)          x is written
 *     comm_all_reduce_(comm, x, op)           likewise; op is sum, average, max or min
 *     comm_all_reduce(comm, x, op), comm_all_gather(comm, x), comm_reduce_scatter(comm, x, op),
 *     comm_all_to_all(comm, x), comm_exchange(comm, x, to, from)     a new tensor
 *
 * Arguments that are wrong in one process are an error in all: it takes part in the call before it raises.
 */
#include "bindings.h"

#include "core/comm.h"

#include <limits.h>

static const char comm_tag[] = "te.comm", name[] = "distributed";

typedef struct lua_comm {
    const void *tag;
    te_comm    *comm;
} lua_comm;

static te_comm *check_comm(lua_State *L)
{
    lua_comm *u = te_lua_to_object(L, 1, comm_tag, sizeof *u);
    if (!u || !u->comm) te_lua_fail(L, name, "expected a group of processes");
    return u->comm;
}

static int collect(lua_State *L)
{
    lua_comm *u = te_lua_to_object(L, 1, comm_tag, sizeof *u);
    if (!u) return 0;
    te_comm *comm = u->comm;
    *u = (lua_comm){0};
    te_comm_release(comm);
    return 0;
}

static lua_comm *new_comm(lua_State *L)
{
    lua_comm *u = lua_newuserdata(L, sizeof *u);
    *u = (lua_comm){.tag = comm_tag};
    te_lua_set_collector(L, collect);
    return u;
}

/* A rank, a color or a key. */
static int check_number(lua_State *L, int index, const char *function, const char *what)
{
    int64_t n = te_lua_check_int(L, index, function, what);
    if (n < INT_MIN || n > INT_MAX) te_lua_fail(L, function, "%s is %lld", what, (long long)n);
    return (int)n;
}

static int comm_launched(lua_State *L)
{
    lua_pushboolean(L, te_comm_launched());
    return 1;
}

static int comm_world(lua_State *L)
{
    te_lua   *rt = te_lua_runtime(L);
    lua_comm *u = new_comm(L);
    te_lua_enter(rt, L, name);
    te_lua_call call = te_lua_begin(rt, L);
    u->comm = te_comm_world(rt->ctx);
    te_lua_end(rt, call);
    return u->comm ? 1 : te_lua_raise(rt, L, name, rt->ctx->status);
}

/* The function at the top with the arguments behind the group, and where to put what they say; not 0: with the reason
 * on the stack. */
static int check_arguments(lua_State *L, lua_CFunction check, void *into)
{
    lua_settop(L, 4);
    lua_pushcfunction(L, check);
    lua_pushlightuserdata(L, into);
    for (int i = 2; i <= 4; i++) lua_pushvalue(L, i);
    return lua_pcall(L, 4, 1, 0);
}

/* After this process took part in the call that it cannot make. */
static int raise_reason(te_lua *rt, lua_State *L, te_status status)
{
    if (status == TE_ERROR_INTERRUPTED) return te_lua_raise(rt, L, name, status);
    return lua_error(L);
}

typedef struct split_arguments {
    int       color, key;
    lua_comm *result;
} split_arguments;

static int check_split(lua_State *L)
{
    split_arguments *a = lua_touserdata(L, 1);
    a->color = check_number(L, 2, "distributed: split", "color");
    a->key = check_number(L, 3, "distributed: split", "key");
    a->result = new_comm(L);
    return 1;
}

static int comm_split(lua_State *L)
{
    te_lua         *rt = te_lua_runtime(L);
    te_comm        *comm = check_comm(L);
    split_arguments a;
    te_lua_enter(rt, L, name);
    if (check_arguments(L, check_split, &a) != 0) return raise_reason(rt, L, te_comm_decline_split(comm));
    lua_comm *u = a.result;
    te_lua_call call = te_lua_begin(rt, L);
    u->comm = te_comm_split(comm, a.color, a.key);
    te_lua_end(rt, call);
    if (!u->comm && rt->ctx->message[0]) return te_lua_raise(rt, L, name, rt->ctx->status);
    if (!u->comm) lua_pushnil(L);
    return 1;
}

static int comm_place(lua_State *L)
{
    te_comm *comm = check_comm(L);
    lua_pushinteger(L, te_comm_rank(comm));
    lua_pushinteger(L, te_comm_size(comm));
    lua_pushinteger(L, te_comm_local_rank(comm));
    lua_pushinteger(L, te_comm_local_size(comm));
    return 4;
}

static int comm_barrier(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    te_comm *comm = check_comm(L);
    te_lua_enter(rt, L, name);
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = te_comm_barrier(comm);
    te_lua_end(rt, call);
    return status == TE_OK ? 0 : te_lua_raise(rt, L, name, status);
}

static te_reduction check_reduction(lua_State *L, int index, const char *function)
{
    static const char *const names[] = {"sum", "average", "max", "min", NULL};
    const char *given = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : NULL;
    char        text[160];
    for (int i = 0; given && names[i]; i++)
        if (strcmp(given, names[i]) == 0) return (te_reduction)i;
    const char *near = given ? te_lua_nearest(given, names, -1) : NULL;
    te_lua_fail(L, function, "op: expected sum, average, max or min, got %s%s%s%s",
                te_lua_describe(L, index, text, sizeof text), near ? "; did you mean \"" : "", near ? near : "",
                near ? "\"?" : "");
    return TE_REDUCE_SUM;
}

/* A function of a tensor, with what stands behind it: a reduction or one or two ranks. */
typedef struct call {
    const char  *name; /* for messages */
    bool         reduces;
    int          n_ranks;
    te_tensor *(*make)(te_comm *comm, te_tensor *x, te_reduction reduction, const int *ranks);
    te_status  (*change)(te_comm *comm, te_tensor *x, te_reduction reduction, const int *ranks);
} call;

typedef struct call_arguments {
    const call    *call;
    te_reduction   reduction;
    int            ranks[2];
    te_tensor     *x;
    te_lua_tensor *result;
} call_arguments;

static int check_call(lua_State *L)
{
    call_arguments *a = lua_touserdata(L, 1);
    const call     *c = a->call;
    if (c->reduces) a->reduction = check_reduction(L, 3, c->name);
    for (int i = 0; i < c->n_ranks; i++) a->ranks[i] = check_number(L, 3 + i, c->name, "rank");
    if (!c->change) a->result = te_lua_new_tensor(L);
    te_tensor *x = te_lua_check_tensor(L, 2, c->name, "x");
    if (c->change) te_lua_check_writable(L, c->name, x);
    a->x = x;
    return 1;
}

static int run(lua_State *L, const call *c)
{
    te_lua        *rt = te_lua_runtime(L);
    te_comm       *comm = check_comm(L);
    call_arguments a = {.call = c};
    te_lua_enter(rt, L, name);
    int wrong = check_arguments(L, check_call, &a); /* and x is NULL, which no process gets by with */
    te_tensor_retain(a.x);
    te_comm_retain(comm);
    te_status status = TE_OK;
    te_tensor *made = NULL;
    te_lua_call entered = te_lua_begin(rt, L);
    if (c->change) status = c->change(comm, a.x, a.reduction, a.ranks);
    else made = c->make(comm, a.x, a.reduction, a.ranks);
    te_lua_end(rt, entered);
    te_tensor_release(a.x);
    te_comm_release(comm);
    if (wrong) return raise_reason(rt, L, rt->ctx->status);
    if (a.result) a.result->t = made;
    if (status != TE_OK || (a.result && !made)) return te_lua_raise(rt, L, name, rt->ctx->status);
    if (c->change) lua_settop(L, 2);
    te_lua_charge(rt, L);
    return 1;
}

#define MAKE(function, arguments)                                                                                     \
    static te_tensor *make_##function(te_comm *comm, te_tensor *x, te_reduction reduction, const int *ranks)          \
    {                                                                                                                 \
        (void)reduction, (void)ranks;                                                                                 \
        return te_comm_##function arguments;                                                                          \
    }
#define CHANGE(function, arguments)                                                                                   \
    static te_status change_##function(te_comm *comm, te_tensor *x, te_reduction reduction, const int *ranks)         \
    {                                                                                                                 \
        (void)reduction, (void)ranks;                                                                                 \
        return te_comm_##function arguments;                                                                          \
    }
#define FUNCTION(name, ...)                                                                                           \
    static int comm_##name(lua_State *L) { return run(L, &(call){"distributed: " #name, __VA_ARGS__}); }

MAKE(all_reduce, (comm, x, reduction))
MAKE(all_gather, (comm, x))
MAKE(reduce_scatter, (comm, x, reduction))
MAKE(all_to_all, (comm, x))
MAKE(exchange, (comm, x, ranks[0], ranks[1]))
CHANGE(all_reduce_in_place, (comm, x, reduction))
CHANGE(broadcast, (comm, x, ranks[0]))

FUNCTION(all_reduce, .reduces = true, .make = make_all_reduce)
FUNCTION(all_gather, .make = make_all_gather)
FUNCTION(reduce_scatter, .reduces = true, .make = make_reduce_scatter)
FUNCTION(all_to_all, .make = make_all_to_all)
FUNCTION(exchange, .n_ranks = 2, .make = make_exchange)
FUNCTION(all_reduce_, .reduces = true, .change = change_all_reduce_in_place)
FUNCTION(broadcast_, .n_ranks = 1, .change = change_broadcast)

const luaL_Reg te_lua_comm_functions[] = {
    {"comm_launched", comm_launched}, {"comm_world", comm_world}, {"comm_split", comm_split},
    {"comm_place", comm_place}, {"comm_barrier", comm_barrier}, {"comm_broadcast_", comm_broadcast_},
    {"comm_all_reduce_", comm_all_reduce_}, {"comm_all_reduce", comm_all_reduce}, {"comm_all_gather", comm_all_gather},
    {"comm_reduce_scatter", comm_reduce_scatter}, {"comm_all_to_all", comm_all_to_all},
    {"comm_exchange", comm_exchange}, {NULL, NULL},
};
