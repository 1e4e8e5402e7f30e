/* custom.c - operations whose backward is a Lua function.
 *
 * te._core.custom (lua/te/scopes.lua) runs the forward function without recording and hands its results here; `record`
 * makes one graph node that holds a registry reference to {backward function, ctx}. The results are returned as fresh
 * views: the ones that the forward function may have saved in ctx stay outside the graph, so that no cycle runs through
 * the registry, where the collector could not break it.
 *
 * The node may outlive the Lua state (the host holds a tensor), hence the te_lua_link.
 */
#include "bindings.h"
#include "host.h"

#include "core/autograd.h"

#include <stdio.h>

enum { MAX_INPUTS = 200 };

/* What a node keeps: call->pointer. */
typedef struct custom {
    te_lua_link *link;
    int          ref; /* of {backward, ctx} */
    char         title[64];
} custom;

/* --- backward ----------------------------------------------------------------------------------------------------- */

static void release_custom(te_call *call)
{
    custom      *c = (custom *)(uintptr_t)call->pointer;
    te_lua_link *link = c->link;
    te_mem       mem = link->mem;
    if (link->rt) luaL_unref(link->rt->thread, LUA_REGISTRYINDEX, c->ref);
    te_mem_free(&mem, c, sizeof *c);
    if (--link->refs == 0) te_mem_free(&mem, link, sizeof *link);
    call->pointer = NULL;
}

/* Gives result `index` of the backward function to input i. */
static te_status give(te_call *call, lua_State *L, int i, int index)
{
    const te_grad_meta *meta = te_grad_input(call, i);
    te_lua_tensor      *u = te_lua_to_tensor(L, index);
    char                text[256], shape[160];
    if (lua_isnoneornil(L, index) || (lua_isboolean(L, index) && !lua_toboolean(L, index))) return TE_OK;
    if (!u || !u->t)
        return te_call_fail(call, TE_ERROR_ARGUMENT,
                            "backward: the gradient of input %d must be a tensor or nil, not %s", i + 1,
                            te_lua_describe(L, index, text, sizeof text));
    if (!te_grad_wanted(call, i)) return TE_OK;
    bool same = u->t->ndim == meta->ndim && u->t->storage->device == meta->device;
    for (int k = 0; same && k < meta->ndim; k++) same = u->t->shape[k] == meta->shape[k];
    if (!same)
        return te_call_fail(
            call, TE_ERROR_ARGUMENT, "backward: the gradient of input %d is a %s, the input has shape %s", i + 1,
            te_lua_describe(L, index, text, sizeof text), te_shape_text(meta->ndim, meta->shape, shape, sizeof shape));
    return te_grad_give(call, i, te_tensor_retain(u->t));
}

/* Keeps the error value on top so that the binding that called the engine raises it unchanged. Where the engine itself
 * raised it inside because memory ran out or a file failed, status and message stay: a host can tell those apart. */
static void keep_error(te_lua_job *job, lua_State *L)
{
    const char *message = lua_tostring(L, -1);
    te_context *ctx = job->ctx;
    te_status   inside = job->rt->status;
    bool        told = inside == TE_ERROR_MEMORY || inside == TE_ERROR_IO;
    if (told && message && ctx->message[0] && strstr(message, ctx->message))
        job->status = inside;
    else
        job->status = te_fail(ctx, TE_ERROR_ARGUMENT, "%s: backward: %s", job->title,
                              message ? message : "error value that is no string");
    te_lua_forget_error(job->rt, L);
    job->rt->error_ref = luaL_ref(L, LUA_REGISTRYINDEX);
}

void te_lua_job_call(te_lua_job *job, lua_State *L, int n_args, int handler)
{
    if (lua_pcall(L, n_args, LUA_MULTRET, handler) == 0) return;
    keep_error(job, L);
    if (job->host) tetrain_count_work(job->host, L, 0); /* what stopped it stops the host's call */
}

/* A backward pass that the host runs, not a script: under the limits that a script has. */
static te_status run_for_host(tetrain *host, te_lua_job *job, lua_CFunction body)
{
    job->host = host;
    tetrain_status ended = tetrain_protected(host, body, job);
    bool           stopped = ended == TETRAIN_ERROR_INTERRUPTED || ended == TETRAIN_ERROR_LIMIT;
    te_status      status = ended == TETRAIN_ERROR_MEMORY ? TE_ERROR_MEMORY
                            : stopped                     ? TE_ERROR_INTERRUPTED
                                                          : TE_ERROR_ARGUMENT;
    if (ended == TETRAIN_OK) return job->status;
    return te_fail(job->ctx, status, "backward: %s", tetrain_error(host));
}

te_status te_lua_job_run(te_lua_job *job, lua_CFunction body)
{
    te_lua *rt = job->rt;
    if (!rt)
        return te_fail(job->ctx, TE_ERROR_ARGUMENT,
                       "%s: backward: the interpreter that made this operation is closed", job->title);
    if (rt->reclaiming) return te_fail(job->ctx, TE_ERROR_ARGUMENT, "%s: backward inside a finalizer", job->title);
    lua_State *L = te_lua_caller(rt);
    if (rt->host && !rt->stack_base) return run_for_host(rt->host, job, body);
    int top = lua_gettop(L);
    if (!lua_checkstack(L, LUA_MINSTACK)) return te_fail_memory(job->ctx, "te.custom");
    if (lua_cpcall(L, body, job) != 0) keep_error(job, L);
    lua_settop(L, top);
    return job->status;
}

/* What backward of a node needs while it runs. */
typedef struct backward_job {
    te_lua_job base;
    te_call   *call;
} backward_job;

static int run_backward(lua_State *L)
{
    backward_job *job = lua_touserdata(L, 1);
    te_call      *call = job->call;
    const custom *c = call->pointer;
    lua_pushcfunction(L, te_lua_remember);
    int handler = lua_gettop(L), n_out = (int)call->memo[0];
    lua_rawgeti(L, LUA_REGISTRYINDEX, c->ref);
    if (!lua_istable(L, -1)) { /* scripts with the debug library reach the registry */
        job->base.status =
            te_call_fail(call, TE_ERROR_ARGUMENT, "backward: its function is gone from Lua's registry");
        return 0;
    }
    lua_rawgeti(L, -1, 1);
    lua_rawgeti(L, -2, 2);
    for (int i = 0; i < n_out; i++) te_lua_push_tensor(L, &call->dout[i]);
    te_lua_job_call(&job->base, L, 1 + n_out, handler);
    for (int i = 0; i < call->node->n_edges && job->base.status == TE_OK; i++)
        job->base.status = give(call, L, i, handler + 2 + i);
    return 0;
}

static te_status custom_backward(te_call *call)
{
    const custom *c = call->pointer;
    backward_job  job = {.base = {.ctx = call->ctx, .rt = c->link->rt, .title = c->title}, .call = call};
    return te_lua_job_run(&job.base, run_backward);
}

/* The title goes with what was saved, when a pass has used it: whose pass it was is what then is left to name. */
static const char *custom_title(const te_call *call)
{
    const custom *c = call->pointer;
    return c ? c->title : "te.backward";
}

static const te_op_def custom_def = {
    .signature = "custom(x)",
    .doc = "An operation defined in Lua.",
    .flags = TE_OP_EFFECTS, /* te.checkpoint's function may have parameters */
    .title = custom_title,
    .backward = custom_backward};
static const te_op     custom_op = {.def = &custom_def, .name = "custom", .n_outputs = TE_OP_MAX_OUTPUTS};

/* --- recording ---------------------------------------------------------------------------------------------------- */

/* Fills call->pointer from the {backward, ctx} on top of the stack, which is popped. */
static void hold(te_lua *rt, lua_State *L, te_call *call, const char *title)
{
    te_mem  mem = rt->link->mem;
    int     ref = luaL_ref(L, LUA_REGISTRYINDEX);
    custom *c = te_mem_alloc(&mem, sizeof *c);
    if (!c) {
        luaL_unref(L, LUA_REGISTRYINDEX, ref);
        te_lua_raise(rt, L, "custom", te_fail_memory(rt->ctx, "te.custom"));
        return;
    }
    *c = (custom){.link = rt->link, .ref = ref};
    snprintf(c->title, sizeof c->title, "%s", title);
    rt->link->refs++;
    call->pointer = c;
    call->release = release_custom;
}

/* What messages name: ctx.title, "te.custom" where that is nothing. The text is the table's, which stays. */
static const char *title_of(lua_State *L, int ctx)
{
    luaL_checktype(L, ctx, LUA_TTABLE);
    lua_pushliteral(L, "title");
    lua_rawget(L, ctx);
    const char *title = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "te.custom";
    lua_pop(L, 1);
    return title;
}

/* The n results of the forward function, from place 4 of the stack on. */
static te_lua_tensors take_results(lua_State *L, const char *title, int n)
{
    te_lua_tensors results = te_lua_new_tensors(L, n);
    char text[256];
    for (int i = 0; i < n; i++) {
        te_lua_tensor *u = te_lua_to_tensor(L, 4 + i);
        if (!u || !u->t)
            te_lua_fail(L, NULL, "%s: result %d of the forward function: expected a tensor, got %s", title, i + 1,
                        te_lua_describe(L, 4 + i, text, sizeof text));
        results.t[i] = te_tensor_retain(u->t);
    }
    return results;
}

/* The n inputs from place `first` on, NULL for what is no tensor; *wanted: whether one of them wants a gradient. */
static te_lua_tensors take_inputs(lua_State *L, int first, int n, bool *wanted)
{
    te_lua_tensors inputs = te_lua_new_tensors(L, n);
    *wanted = false;
    for (int i = 0; i < n; i++) {
        te_lua_tensor *u = te_lua_to_tensor(L, first + i);
        inputs.t[i] = te_tensor_retain(u ? u->t : NULL);
        *wanted = *wanted || (inputs.t[i] && te_needs_grad(inputs.t[i]));
    }
    return inputs;
}

/* Makes the node: fresh tensors of the results' memory, into `fresh`. */
static te_status make_node(te_call *call, const te_lua_tensors *results, const te_lua_tensors *inputs,
                           te_lua_tensor *const *fresh)
{
    for (int i = 0; i < results->n; i++) {
        te_tensor *t = results->t[i];
        call->out[i] = fresh[i]->t = te_tensor_alias(t, t->ndim, t->shape, t->stride, t->offset);
        if (!fresh[i]->t) return call->ctx->status;
    }
    return te_autograd_record(call, inputs->t, inputs->n);
}

/* record(backward, ctx, n_outputs, outputs…, inputs…): the outputs, connected to those inputs that are tensors. */
static int record(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_call call = {.ctx = rt->ctx, .op = &custom_op};
    int64_t count = te_lua_check_int(L, 3, "custom", "number of outputs");
    bool    wanted;
    luaL_checktype(L, 1, LUA_TFUNCTION);
    const char *title = title_of(L, 2);
    te_lua_enter(rt, L, "custom");
    if (count < 1 || count > TE_OP_MAX_OUTPUTS)
        return te_lua_fail(L, NULL, "%s: the forward function returned %lld values; one to %d tensors are possible",
                           title, (long long)count, TE_OP_MAX_OUTPUTS);
    int n_out = (int)count, n_in = lua_gettop(L) - 3 - n_out;
    if (n_in < 0 || n_in > MAX_INPUTS)
        return te_lua_fail(L, NULL, "%s: %d inputs; at most %d are possible", title, n_in, MAX_INPUTS);
    te_lua_tensors results = take_results(L, title, n_out), inputs = take_inputs(L, 4 + n_out, n_in, &wanted);
    if (!wanted || !te_context_grad_enabled(rt->ctx)) {
        te_lua_drop_tensors(&results);
        te_lua_drop_tensors(&inputs);
        lua_settop(L, 3 + n_out);
        return n_out;
    }
    luaL_checkstack(L, n_out + 4, "te.custom");
    te_lua_tensor *fresh[TE_OP_MAX_OUTPUTS];
    for (int i = 0; i < n_out; i++) fresh[i] = te_lua_new_tensor(L);
    lua_createtable(L, 2, 0);
    for (int i = 1; i <= 2; i++) {
        lua_pushvalue(L, i);
        lua_rawseti(L, -2, i);
    }
    hold(rt, L, &call, title);
    call.memo[0] = n_out;
    te_lua_call entered = te_lua_begin(rt, L);
    te_status   status = make_node(&call, &results, &inputs, fresh);
    te_lua_end(rt, entered);
    te_lua_drop_tensors(&results);
    te_lua_drop_tensors(&inputs);
    if (status != TE_OK) {
        release_custom(&call);
        return te_lua_raise(rt, L, "custom", status);
    }
    return n_out;
}

const luaL_Reg te_lua_custom_functions[] = {{"record", record}, {NULL, NULL}};
