/* bindings.h - what the files of the Lua binding share.
 *
 * Everything goes through the classic Lua C API on type-checked userdata, so a script can raise errors but never reach
 * memory that it should not. Three rules keep that true:
 *
 *   - lua_error jumps. Whatever C holds (tensor references, files) is held by a userdata or released before raising;
 *     userdata for results are made before the engine runs, and only filled afterwards.
 *   - Tensors given to the engine are retained for the duration of the call: a finalizer that runs inside (memory
 *     pressure) may drop the Lua side. So may one that runs where Lua makes a value, and a metamethod behind a field of
 *     the script's table: hence results are made and options read first, then tensors, and nothing between them and
 *     their retaining runs Lua. Lists of tensors are retained as they are read (te_lua_tensors).
 *   - Every C function of the library has the runtime as its first upvalue: a full userdata, so it lives as long as the
 *     last function that uses it.
 */
#ifndef TE_LUA_BINDINGS_H
#define TE_LUA_BINDINGS_H

#include "core/io.h"
#include "core/op.h"

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <pthread.h>
#include <stdatomic.h>

/* One per lua_State: the userdata behind upvalue 1. */
typedef struct te_lua {
    te_context        *ctx;    /* NULL once the state is closing */
    struct te_lua_link *link;  /* how graph nodes find their way back */
    lua_State         *thread; /* a thread of its own, for callbacks without a Lua caller */
    lua_State         *L;      /* who is in the engine, the innermost (te_lua_begin); NULL: nobody */
    size_t             collect_at; /* bytes of live tensors of the host at which the collector runs next … */
    size_t             collect_device_at; /* … and of those on devices */
    bool               restricted; /* no files */
    int                threads;    /* at the start */
    bool               reclaiming; /* a collection inside an allocation: the engine must not be entered again */
    int                error_ref;  /* error value that crossed the engine, LUA_NOREF: none */
    te_status          status;     /* of the last failure that was raised */
    atomic_bool        saving; /* te.save writes a file, which no interrupt ends */
    bool               left_jit; /* the compiler is off until the host's call ends */
    atomic_bool        polls_stop; /* the script asks te._core.interrupt_flag() itself */
    atomic_int         stop_requested; /* from any thread or a signal handler */
    char               device[32]; /* default device for new tensors */
    bool               device_told; /* somebody said which */
    const char        *stack_base; /* where the host's call began on C's stack; NULL: nobody looks */
    size_t             stack_room; /* bytes that calls may take below, 0: not known yet */
    pthread_t          stack_thread; /* who called last, and where its own stack lies; NULL: not known */
    const char        *stack_low, *stack_high;
    struct tetrain    *host; /* who made the state; NULL: a host with a Lua of its own */
} te_lua;

/* Shared by the runtime and by graph nodes that call Lua, which may outlive it. */
typedef struct te_lua_link {
    te_mem  mem;
    te_lua *rt; /* NULL once the state is closing */
    int     refs;
} te_lua_link;

/* A call of the engine back into Lua, from backward. */
typedef struct te_lua_job {
    te_context *ctx;
    te_lua     *rt; /* NULL: its state is closed */
    const char *title;
    te_status   status;
    struct tetrain *host; /* that runs the pass itself; NULL: a script does */
} te_lua_job;

/* Runs body(L), which finds the job as its first argument, under the limits of a script. */
te_status te_lua_job_run(te_lua_job *job, lua_CFunction body);
/* In a body: calls the function below the n arguments on top. job->status says whether that went well. */
void      te_lua_job_call(te_lua_job *job, lua_State *L, int n_args, int handler);

/* The userdata of a tensor. */
typedef struct te_lua_tensor {
    const void *tag; /* te_lua_tensor_tag, checked instead of the metatable: faster, and not replaceable by a script */
    te_tensor  *t;   /* NULL: released */
} te_lua_tensor;

/* What te_lua_begin found, for te_lua_end. */
typedef struct te_lua_call {
    lua_State *caller;
    int        first;
} te_lua_call;

/* These two stand right before and behind what the engine does for L, with nothing between them that runs Lua or
 * raises. So whoever is remembered as the caller is still at it: a coroutine that called before may be gone. Meanwhile
 * dimensions and positions in messages count from 1. */
static inline te_lua_call te_lua_begin(te_lua *rt, lua_State *L)
{
    te_lua_call outer = {rt->L, te_count_from(rt->ctx, 1)};
    rt->L = L;
    return outer;
}

static inline void te_lua_end(te_lua *rt, te_lua_call outer)
{
    rt->L = outer.caller;
    te_count_from(rt->ctx, outer.first);
}

extern const char te_lua_tensor_tag[], te_lua_collected_tag[]; /* the second after __gc, which scripts may call */


/* Pushes a block of memory for the length of a call, the collector's. Its first word is not what lay there before: that
 * may have been the tag of a handle, with which a script's wrong argument would be taken for one. */
static inline void *te_lua_scratch(lua_State *L, size_t size)
{
    void **block = (void **)lua_newuserdata(L, size < sizeof *block ? sizeof *block : size);
    *block = NULL;
    return block;
}

/* The userdata at `index` if it begins with the tag, which is checked instead of the metatable; NULL: it is something
 * else. */
static inline void *te_lua_to_object(lua_State *L, int index, const void *tag, size_t size)
{
    if (lua_type(L, index) != LUA_TUSERDATA || lua_objlen(L, index) < size) return NULL;
    const void **object = (const void **)lua_touserdata(L, index);
    return *object == tag ? object : NULL;
}

/* --- entries of the table on top ---------------------------------------------------------------------------------- */

static inline void te_lua_flag_entry(lua_State *L, const char *name, bool value)
{
    lua_pushboolean(L, value);
    lua_setfield(L, -2, name);
}

static inline void te_lua_number_entry(lua_State *L, const char *name, double value)
{
    lua_pushnumber(L, value);
    lua_setfield(L, -2, name);
}

static inline void te_lua_text_entry(lua_State *L, const char *name, const char *value)
{
    lua_pushstring(L, value);
    lua_setfield(L, -2, name);
}

/* --- errors (errors.c) -------------------------------------------------------------------------------------------- */

/* Raises "file:line: te.function: message". The position is that of the nearest caller outside the Lua library. A
 * `function` that is NULL leaves the prefix out. */
int te_lua_fail(lua_State *L, const char *function, const char *format, ...) TE_PRINTF(3, 4);
/* Raises the engine's message of a failed call, or the Lua error that crossed the engine. */
int te_lua_raise(te_lua *rt, lua_State *L, const char *function, te_status status);
/* The runtime of the function that runs. Raises once it is gone: what finalizers make while the state closes is
 * finalized later than the runtime is, and may call anything. */
static inline te_lua *te_lua_runtime(lua_State *L)
{
    te_lua *rt = (te_lua *)lua_touserdata(L, lua_upvalueindex(1));
    if (!rt->ctx) te_lua_fail(L, NULL, "te: the interpreter is closing");
    return rt;
}
/* Drops the error value that crossed the engine, if there is one. */
void te_lua_forget_error(te_lua *rt, lua_State *L);
/* Raises what reading or writing a file failed with, which a host can tell by its status. */
int te_lua_raise_io(te_lua *rt, lua_State *L, const char *function, const te_io_error *error);
/* The entry of `names` (n of them, or up to NULL when n < 0) most like `name`; NULL when none is near. */
const char *te_lua_nearest(const char *name, const char *const *names, int n);
/* "number 3", "string \"x\"", "tensor {2, 3}", for messages. Returns text. */
const char *te_lua_describe(lua_State *L, int index, char *text, size_t size);
/* limits.c: from here on every instruction of the script raises, and all of them are interpreted, since compiled code
 * calls no hooks. */
void te_lua_stop(te_lua *rt, lua_State *L);
/* limits.c: a memory limit of the host was reached. Stops a restricted script likewise, with this message, which must
 * last for the call. Changes nothing but hooks, so allocators may say it. */
void te_lua_exhausted(te_lua *rt, const char *message);
/* Message handler for lua_pcall: the message with the traceback of Lua functions. An error object stays what it is, and
 * its traceback is kept under te_lua_trace (te_lua_push_kept). */
int te_lua_traceback(lua_State *L);
extern const char te_lua_trace[];
extern const char te_lua_settle[]; /* kept: the function of lua/te/settle.lua */
/* Message handler for calls that pass an error on: keeps the traceback for te_lua_traceback and leaves the error
 * alone. */
int te_lua_remember(lua_State *L);

/* --- tensors (tensor.c) ------------------------------------------------------------------------------------------- */

static inline te_lua_tensor *te_lua_to_tensor(lua_State *L, int index)
{
    return (te_lua_tensor *)te_lua_to_object(L, index, te_lua_tensor_tag, sizeof(te_lua_tensor));
}

/* The tensor at `index`; raises when there is none or it was released. Borrowed. */
te_tensor *te_lua_check_tensor(lua_State *L, int index, const char *function, const char *argument);
/* Pushes a tensor userdata that holds nothing yet. */
te_lua_tensor *te_lua_new_tensor(lua_State *L);
/* Pushes a further reference of *t, nil for NULL; *t is read when the userdata is there. */
void te_lua_push_tensor(lua_State *L, te_tensor *const *t);
/* Raises when t's memory belongs to a file. */
void te_lua_check_writable(lua_State *L, const char *function, const te_tensor *t);
void te_lua_open_tensor(te_lua *rt, lua_State *L); /* the metatable; the library table is on top */

/* --- memory of tensors, and calls into the engine (collect.c) ----------------------------------------------------- */

/* Collects when much tensor memory became garbage since the last time. Called outside the engine, holding nothing. */
void te_lua_charge(te_lua *rt, lua_State *L);
/* Raises unless the engine may be entered. */
void te_lua_enter(te_lua *rt, lua_State *L, const char *function);
/* The state in which the engine may call Lua now. It must be the one that runs: LuaJIT takes the state that was called
 * last for it when an error is caught, and compiled code goes on in that. */
lua_State *te_lua_caller(const te_lua *rt);
/* Raises where calls have left too little of C's stack, see stack.c. */
void te_lua_check_stack(te_lua *rt, lua_State *L);
void te_lua_open_collection(te_lua *rt, lua_State *L); /* when the context is there */

/* --- arguments (arguments.c) -------------------------------------------------------------------------------------- */

enum { TE_LUA_MAX_ARGS = TE_OP_MAX_INPUTS + TE_OP_MAX_ATTRS };

/* A string without zero bytes, which would end it early for the engine and the system; raises otherwise. */
const char *te_lua_check_text(lua_State *L, int index, const char *function, const char *argument);
/* What a message says behind a name that is no dtype's: the one that is meant, or all, written to `text`. */
const char *te_lua_dtype_hint(const char *name, char *text, size_t size);
/* Dtype by its name; raises with that. */
te_dtype te_lua_check_dtype(lua_State *L, int index, const char *function, const char *argument);
/* Whole number within 2^53; raises otherwise. */
int64_t te_lua_check_int(lua_State *L, int index, const char *function, const char *argument);
/* One from `least` to `most`. */
int64_t te_lua_check_range(lua_State *L, int index, const char *function, const char *argument, int64_t least,
                           int64_t most);
double  te_lua_check_number(lua_State *L, int index, const char *function, const char *argument);
/* The field of the table at `table`. */
double  te_lua_number_field(lua_State *L, int table, const char *function, const char *name, double otherwise);
/* A shape: a table at `index`, or the numbers from there on. Returns how many stack entries it took. */
int te_lua_check_shape(lua_State *L, int index, const char *function, const char *argument, int *ndim, int64_t *shape);
/* How many entries the list at `index` has; raises where there are more behind a hole, or under names, which a loop
 * over them would leave out. */
size_t te_lua_check_list(lua_State *L, int index, const char *function, const char *argument);
/* Reads `shape` (a table of whole numbers, at most TE_MAX_DIMS) into ints; returns how many. */
int te_lua_check_ints(lua_State *L, int index, const char *function, const char *argument, int64_t *ints);
/* Whether the value at `index` (absolute) is a table of options: it has text keys; `empty` is the answer for an empty
 * one. */
bool te_lua_is_options(lua_State *L, int index, bool empty);
/* Raises when the options table at `index` has a key that is not in `known` (ends with NULL). A value that is not a
 * table raises as well; nil is an empty table. */
void te_lua_check_options(lua_State *L, int index, const char *function, const char *const *known);
/* Raises when there are more than n arguments, nil aside. */
void te_lua_check_count(lua_State *L, int n, const char *function);
/* References that a pushed userdata owns until te_lua_drop_tensors, or until it is collected where an error comes
 * first. */
typedef struct te_lua_tensors {
    int         n;
    te_tensor **t; /* NULL: no list */
} te_lua_tensors;
te_lua_tensors te_lua_new_tensors(lua_State *L, int n); /* all NULL, to be filled */
/* The list of tensors at `index`. */
te_lua_tensors te_lua_check_tensors(lua_State *L, int index, const char *function, const char *argument);
void           te_lua_drop_tensors(const te_lua_tensors *list);

/* --- operations (operations.c) ------------------------------------------------------------------------------------ */

void te_lua_open_operations(te_lua *rt, lua_State *L); /* the library table is on top */

/* The arguments of one call while they are read. */
typedef struct te_lua_reader {
    lua_State   *L;
    const te_op *op;
    const char  *name; /* for messages: "softmax", "add_" */
    te_arg       args[TE_LUA_MAX_ARGS];
    int64_t      ints[TE_LUA_MAX_ARGS][TE_MAX_DIMS];
} te_lua_reader;

/* Reads the table of attributes at `index` (absolute; or nil) into r->args; everything else is absent. */
void te_lua_read_attributes(te_lua_reader *r, int index);
/* Runs op on the n lowest values of the stack; the results are on top. Returns how many. */
int te_lua_run_operation(te_lua *rt, lua_State *L, const te_op *op, int n);
/* define.c: the operation that the userdata at `index` holds, from te._core.define or te._core.operation; NULL when
 * there is none. Borrowed. */
const te_op *te_lua_to_operation(lua_State *L, int index);
/* quantized.c: a quantizer from its table of capabilities; raises when a field is no choice. */
struct te_quantizer te_lua_read_quantizer(lua_State *L, int index, const char *function);
/* Pushes a table of all fields. */
void te_lua_push_quantizer(lua_State *L, const struct te_quantizer *q);
/* recipe.c: the state of one operation's recipe; raises when it is something else. Borrowed. */
struct te_recipe_state *te_lua_check_recipe_state(lua_State *L, int index, const char *function);
/* The signature as Lua sees it: defaults of dimensions and positions count from 1. Returns text. */
const char *te_lua_signature(const te_op *op, char *text, size_t size);
/* Pushes a list of { name =, type =, optional =, by_name =, default =, choices = }: default is the number that stands
 * for what is absent, choices are one text with | between them. */
void te_lua_push_params(lua_State *L, const te_op *op);

/* --- the rest ----------------------------------------------------------------------------------------------------- */

/* What a state keeps for good lies in its registry under addresses: where memory runs out while a table of LuaJIT
 * grows, it loses entries under whole numbers (luaL_ref's). te_lua_keep pops the value. */
void te_lua_keep(lua_State *L, const void *key);
void te_lua_push_kept(lua_State *L, const void *key); /* nil: none */
/* Pushes the metatable that is kept under key: true when it is a new one, to be filled and then kept with
 * te_lua_keep_copy. */
bool te_lua_push_metatable(lua_State *L, const void *key);
void te_lua_keep_copy(lua_State *L, const void *key);
extern const char te_lua_tensor_metatable[], te_lua_tensor_methods[]; /* keys */
/* Pushes the userdata that every function of the library has as upvalue 1. */
void te_lua_push_anchor(lua_State *L);
/* Gives the userdata on top a metatable that scripts cannot reach, with `collect` as __gc: it is called with nothing
 * else. */
void te_lua_set_collector(lua_State *L, lua_CFunction collect);
/* Objects that own memory of a context, which stays open for as long. Each begins with a te_lua_owner; the address of
 * its kind is the tag, and its metatable's key. */
typedef struct te_lua_kind {
    size_t size;
    void (*release)(void *object); /* called once, by the collector; may find nothing but zeros behind the owner */
} te_lua_kind;
typedef struct te_lua_owner {
    const void *tag; /* NULL: released */
    te_context *ctx;
} te_lua_owner;
/* Pushes an object of zeros behind its owner. When the first of a kind is made, `fill` adds to the metatable on top,
 * which so far has __gc and hides itself; NULL: nothing is added. */
void *te_lua_push_owner(te_lua *rt, lua_State *L, const te_lua_kind *kind, void (*fill)(te_lua *rt, lua_State *L));
/* Registers functions with the runtime as upvalue in the table on top. */
void te_lua_register(te_lua *rt, lua_State *L, const luaL_Reg *functions);

extern const luaL_Reg te_lua_create_functions[];  /* create.c: te.tensor, te.zeros … */
extern const luaL_Reg te_lua_create_file_functions[]; /* create_file.c: te.from_file; not in restricted runtimes */
extern const luaL_Reg te_lua_runtime_functions[]; /* runtime.c: te.manual_seed … */
/* Members of te._core. */
extern const luaL_Reg te_lua_random_functions[];  /* runtime.c: te._core.rng_state */
extern const luaL_Reg te_lua_autograd_functions[]; /* autograd.c */
extern const luaL_Reg te_lua_comm_functions[];      /* comm.c: not in restricted runtimes */
extern const luaL_Reg te_lua_custom_functions[];   /* custom.c */
extern const luaL_Reg te_lua_group_functions[];    /* group.c */
extern const luaL_Reg te_lua_graph_functions[];    /* graph.c */
extern const luaL_Reg te_lua_define_functions[];   /* define.c */
extern const luaL_Reg te_lua_hook_functions[];     /* hook.c */
extern const luaL_Reg te_lua_optim_functions[];    /* optim.c */
extern const luaL_Reg te_lua_optim_prepared_functions[]; /* optim_prepared.c */
extern const luaL_Reg te_lua_profile_functions[];  /* profile.c */
extern const luaL_Reg te_lua_quantized_functions[]; /* quantized.c */
extern const luaL_Reg te_lua_quantized_parameter_functions[]; /* quantized_parameter.c */
extern const luaL_Reg te_lua_recipe_kind_functions[]; /* recipe_kinds.c */
extern const luaL_Reg te_lua_recipe_functions[];   /* recipe.c */
extern const luaL_Reg te_lua_system_functions[];   /* system.c */
extern const luaL_Reg te_lua_process_functions[];  /* system.c: not in restricted runtimes */
extern const luaL_Reg te_lua_file_functions[];     /* files.c */
extern const luaL_Reg te_lua_json_functions[];     /* json.c: not in restricted runtimes */
extern const luaL_Reg te_lua_token_functions[];    /* tokens.c */
extern const luaL_Reg te_lua_tokenizer_functions[]; /* tokenizer.c: not in restricted runtimes */
extern const luaL_Reg te_lua_words_functions[];     /* words.c: not in restricted runtimes */

int te_lua_tensor_tostring(lua_State *L); /* print.c */
/* optim.c: writes the step to each table in the list `states` of the table on top, where there is one. No hook runs
 * meanwhile: nothing stops a script between a step and its count. */
void te_lua_count_step(lua_State *L, lua_Number step);

/* --- the library (library.c) -------------------------------------------------------------------------------------- */

/* Lua sources linked into the program, ordered by name; ends with a NULL name. Generated by the build. */
typedef struct te_lua_source {
    const char          *name;   /* "te.optim" */
    const char          *file;   /* "te/optim.lua" */
    const unsigned char *packed; /* as many bytes as `size`: the text itself */
    size_t               packed_size, size;
} te_lua_source;

extern const te_lua_source te_lua_sources[];

/* unpack.c: writes the text, `size` bytes. */
void te_lua_unpack(const te_lua_source *source, unsigned char *to);

/* Pushes the chunk of an embedded module; false (nothing pushed) when there is none. Raises on a syntax error. */
bool te_lua_load_source(lua_State *L, const char *name);
extern const char te_lua_modules[]; /* kept: the library's modules that were loaded, `te` itself too, by their names */
/* Makes `require` find the embedded modules; where there is no package library, provides a require that finds only
 * them. */
void te_lua_open_library(lua_State *L);
/* Makes load, loadstring, loadfile, dofile and require take text chunks only. */
void te_lua_text_only(lua_State *L);
extern const luaL_Reg te_lua_library_functions[]; /* te._core.library_sources */

/* --- the runtime (module.c) --------------------------------------------------------------------------------------- */

typedef struct te_lua_options {
    te_context *ctx;    /* a reference is taken; NULL: a new context */
    const char *device; /* default for new tensors, NULL: "cpu" */
    bool        restricted;
} te_lua_options;

/* Makes the runtime of a state, to be found by luaopen_te later. Raises when memory is exhausted. */
te_lua *te_lua_attach(lua_State *L, const te_lua_options *options);
/* The runtime of a state; NULL when it has none yet. */
te_lua *te_lua_attached(lua_State *L);

#endif
