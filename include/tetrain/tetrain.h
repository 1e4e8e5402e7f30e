/* tetrain.h - the host interface of tetrain: an interpreter with the engine inside, for a C or C++ program.
 *
 * A runtime is a Lua state together with an engine context. The host opens one, runs scripts in it, passes tensors in,
 * calls functions that the scripts defined, and takes tensors out:
 *
 *     tetrain *rt = tetrain_open(NULL);
 *     if (tetrain_run_file(rt, "model.lua", 0, NULL) != TETRAIN_OK) fprintf(stderr, "%s\n", tetrain_error(rt));
 *     te_context *ctx = tetrain_context(rt);
 *     te_tensor *in = te_tensor_from_data(ctx, numbers, TE_F32, 2, (int64_t[]){4, 16}, NULL, NULL), *out;
 *     if (tetrain_call(rt, "model.forward", &in, 1, &out, 1) == TETRAIN_OK) use(te_tensor_data(out));
 *     te_tensor_release(in);
 *     te_tensor_release(out);
 *     tetrain_close(rt);
 *
 * The interface is small because Lua is the interface: a script says what to train, how, and what to save, and can
 * change without recompiling the host. Numbers, text and tables are not passed across; a script reads its arguments,
 * and returns a number as a tensor of one element (te.tensor(3)). A host that needs more can use the Lua state
 * (tetrain_lua_state) and the engine (te.h) directly.
 *
 * Ownership
 *   Tensors are reference counted. A function that returns a te_tensor * or fills one into `out` gives the host one
 *   reference, which it must release with te_tensor_release. Arguments are borrowed for the duration of the call; Lua
 *   takes its own references to the tensors that it keeps. te_tensor_release(NULL) and tetrain_close(NULL) do nothing,
 *   so cleanup needs no conditions.
 *
 * No copies
 *   te_tensor_from_data wraps the host's memory in a tensor; a script that writes into it writes into the host's
 *   buffer. te_tensor_data gives the address of a contiguous tensor on the CPU, which the host may read and write.
 *   After writing it must call te_tensor_written, because the engine keeps copies of weights. The memory must stay
 *   where it is until the last reference is gone, and Lua's garbage collector decides when: pass a deleter where that
 *   matters.
 *
 * Lifetime
 *   Tensors that the host holds outlive tetrain_close: they keep the engine context alive, not the interpreter.
 *   Returned strings belong to the runtime; that of tetrain_error stays valid until the next call on the same runtime.
 *
 * Errors
 *   A function that can fail returns a tetrain_status, and tetrain_error then holds the message: "file:line:
 *   te.function: argument: what is wrong with which value", and the Lua traceback. Nothing aborts, exits, prints or
 *   installs signal handlers. After any failure the runtime is ready for the next call: the garbage of a script that
 *   ran out of memory has been collected, limits count anew, and the interrupt is over.
 *
 * Threads
 *   A runtime is used by one thread at a time, which may be a different one for each call. Two runtimes are independent
 *   and may run in two threads; but where processes were started together (comm.h), only one runtime of each process is
 *   a member of the group at a time. Only tetrain_interrupt, tetrain_interrupt_pending and tetrain_request_stop may be
 *   called from any thread and from signal handlers while a call runs. Kernels use `threads` threads; results do not
 *   depend on their number.
 *
 * Stack
 *   A call needs 256 KiB of stack, on a thread or a fiber. Where a thread has less than 192 KiB left, the call fails
 *   with TETRAIN_ERROR_MEMORY before it begins. On a larger stack calls may nest more deeply (coroutines in coroutines,
 *   functions that Lua calls through C); nesting too deeply is a Lua error. A fiber's stack is assumed to be small,
 *   since its size is not known. Devices other than the CPU need what their drivers need, some MiB.
 *
 * Floating-point numbers
 *   Calls compute in the default mode: they round to nearest, keep subnormal numbers, and no exception raises a signal.
 *   A mode that the host has set for its thread (fesetround, feenableexcept, flushing to zero) is saved at the
 *   beginning of a call and restored at its end; host functions called in between see the default mode. In a Lua state
 *   of the host's own (luaopen_te), Lua code keeps the host's mode; operations use the default one.
 *
 * Scripts that never end
 *   LuaJIT's compiled loops check for nothing. Interpreted code sees tetrain_interrupt within some thousand
 *   instructions, and so does every operation of the engine; a loop that was compiled to machine code and calls no
 *   operation never sees it. Where that must not happen, set TETRAIN_INTERPRETED, whose cost is negligible next to
 *   tensor operations. Limits and TETRAIN_RESTRICTED imply it. Long work in the string and table libraries then counts
 *   as instructions, too, and so does the length of a text that is made; compiling one is not interrupted. table.insert
 *   refuses positions before 1. An instruction limit counts Lua instructions, not the time that operations take: a host
 *   that must be sure also calls tetrain_interrupt from a timer. An operation that runs on the CPU is abandoned,
 *   usually within a fifth of a second, and fails. It returns no results; but tensors that it was changing in place,
 *   such as gradients that a backward pass was adding to, are left partly updated. An optimizer's update is never left
 *   half done. Work on other devices, and on files, is not interrupted.
 *
 * Chunks are always text: LuaJIT bytecode is never accepted, since damaged bytecode crashes the process.
 */
#ifndef TETRAIN_TETRAIN_H
#define TETRAIN_TETRAIN_H

#include "te.h"

#define TETRAIN_API TE_API

#ifdef __cplusplus
extern "C" {
#endif

struct lua_State;
typedef struct tetrain tetrain; /* one interpreter and one engine context */

typedef enum tetrain_status {
    TETRAIN_OK = 0,
    TETRAIN_ERROR_SCRIPT,      /* a Lua error, syntax errors included */
    TETRAIN_ERROR_ARGUMENT,    /* a wrong argument of the call itself, such as a tensor of another runtime */
    TETRAIN_ERROR_MEMORY,      /* the Lua heap, host or device memory is exhausted, or its limit reached */
    TETRAIN_ERROR_IO,          /* a file could not be read or written */
    TETRAIN_ERROR_INTERRUPTED, /* tetrain_interrupt or te_context_interrupt was called */
    TETRAIN_ERROR_LIMIT        /* instruction_limit was reached */
} tetrain_status;

/* Flags of tetrain_options. */
enum {
    /* For scripts that the host did not write: no io, os, package, debug, ffi and jit libraries, none of dofile,
     * loadfile, module, newproxy, collectgarbage and string.dump, no files through te, no finalizers, no bytecode, no
     * way to use more threads than the host allows; `print` goes to `log`. Set the three limits as well: with this flag
     * pcall cannot catch them. (Without it a script may catch an out-of-memory error, also at a limit, and go on with
     * less; the instruction limit ends it in any case.) The flag limits the damage that a mistaken or careless script
     * can do. It is no defense against a hostile author: LuaJIT and the engine are large programs that share the host's
     * address space. Run such scripts in a process of their own. Devices are not restricted: a script may use a GPU,
     * whose driver compiles kernels for it and keeps them in the cache folder ($TETRAIN_CACHE). */
    TETRAIN_RESTRICTED = 1 << 0,
    /* The JIT compiler stays off, so that tetrain_interrupt ends every script. */
    TETRAIN_INTERPRETED = 1 << 1,
    /* Where `device` is NULL, $TE_DEVICE names the default device. */
    TETRAIN_ENVIRONMENT = 1 << 2,
    /* os.exit ends the process, as in a program whose purpose is to run scripts. Without it os.exit is an error. */
    TETRAIN_MAY_EXIT = 1 << 3
};

/* A field that is zero means its default. New fields are added at the end; struct_size tells which the host knows. */
typedef struct tetrain_options {
    size_t      struct_size;         /* sizeof(tetrain_options) */
    const char *device;              /* default device of new tensors; NULL: "cpu". Where it does not exist or work,
                                        making the first tensor there fails, not tetrain_open */
    int         threads;             /* CPU threads, 1024 at most; 0: OMP_NUM_THREADS, or all cores */
    size_t      lua_memory_limit;    /* bytes of the Lua heap, including what te.profile records; 0: none. Implies
                                        TETRAIN_INTERPRETED */
    size_t      tensor_memory_limit; /* bytes per device, on the CPU including those that the engine keeps for each
                                        tensor, recorded operation, value and plan of a group, and recipe; 0: none */
    uint64_t    instruction_limit;   /* Lua instructions per call of the host, including nested calls; 0: none.
                                        Implies TETRAIN_INTERPRETED */
    unsigned    flags;
    /* Receives what print writes in restricted runtimes, a zero byte as "\0", without the newline at its end; level is
     * 0. NULL: the output is dropped. */
    void      (*log)(void *user, int level, const char *message);
    void       *user;
    /* Allocator for all host memory: the Lua heap, the engine's and tensors'. It has lua_Alloc's contract; NULL: the C
     * library. Memory that libraries allocate for themselves (BLAS, JSON, threads) is not included. Implies
     * TETRAIN_INTERPRETED: the compiler cannot cope with failed allocations. Called from the thread that uses the
     * runtime. */
    void     *(*realloc)(void *user, void *ptr, size_t old_size, size_t new_size);
    void       *realloc_user;
} tetrain_options;

/* --- opening and closing ------------------------------------------------------------------------------------------ */

/* NULL options: all defaults. Copies what it needs from options, `device` included. NULL when memory is exhausted
 * (the library takes some 200 KB of lua_memory_limit), when struct_size was not set, or with less than 64 KiB of stack.
 * The other functions accept this NULL: they do nothing, and return TETRAIN_ERROR_ARGUMENT or NULL. */
TETRAIN_API tetrain *tetrain_open(const tetrain_options *options);
/* Frees the interpreter and everything that the host holds no reference to. NULL is a no-op. Must not be called from
 * inside a call. */
TETRAIN_API void     tetrain_close(tetrain *rt);

/* --- running scripts ---------------------------------------------------------------------------------------------- */

/* Runs a file; NULL: standard input. Its arguments are the values of `...` and the table `arg`, with the path at
 * arg[0]. Globals that it sets remain available to later calls. */
TETRAIN_API tetrain_status tetrain_run_file(tetrain *rt, const char *path, int argc, const char *const *argv);
/* Runs `size` bytes of source. chunk_name appears in messages: "=config" as it is, "@file.lua" as a file's name; NULL:
 * "(string)". */
TETRAIN_API tetrain_status tetrain_run_string(tetrain *rt, const char *code, size_t size, const char *chunk_name);
/* Calls a global function, or anything callable, such as a module; dotted names are allowed ("model.forward"). NULL
 * in `in` arrives as nil. out receives n_out results, one reference each; all are NULL after a failure. A result that
 * is not a tensor is an error. */
TETRAIN_API tetrain_status tetrain_call(tetrain *rt, const char *function, te_tensor *const *in, int n_in,
                                        te_tensor **out, int n_out);

/* --- exchanging tensors ------------------------------------------------------------------------------------------- */

/* Makes a tensor of this runtime's context a Lua global; NULL sets nil. The name has no dots. */
TETRAIN_API tetrain_status tetrain_set_tensor(tetrain *rt, const char *global, te_tensor *tensor);
/* A new reference to the tensor that a global holds; dotted names are allowed. NULL, with a message, when the value is
 * not a tensor. */
TETRAIN_API te_tensor     *tetrain_get_tensor(tetrain *rt, const char *global);

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* Message of the last call, with its Lua traceback; "" when it did not fail. For an error value that is not text it
 * has the result of __tostring, or the type; a zero byte appears as "\0". */
TETRAIN_API const char *tetrain_error(const tetrain *rt);

/* --- stopping ----------------------------------------------------------------------------------------------------- */

/* Makes the running call end with TETRAIN_ERROR_INTERRUPTED, or the next one where none is running, or where its
 * script has finished or does not begin. Only a call that ends this way clears the interrupt: tetrain_get_tensor, which
 * runs no script, leaves it to the next call. Nested calls all end. pcall cannot catch it. May be called from any
 * thread or a signal handler; the runtime must not be closed meanwhile. */
TETRAIN_API void tetrain_interrupt(tetrain *rt);
/* Whether an interrupt was requested that nothing has noticed yet, while no file is being saved. Where this stays true,
 * the script is in a compiled loop or waits for the system. May be called from any thread or a signal handler. */
TETRAIN_API bool tetrain_interrupt_pending(tetrain *rt);
/* Asks the script to finish by itself (te._core.interrupt_flag becomes true). False when the script does not check the
 * flag, or was asked before: then only tetrain_interrupt helps. May be called from any thread or a signal handler. */
TETRAIN_API bool tetrain_request_stop(tetrain *rt);

/* --- what is inside ----------------------------------------------------------------------------------------------- */

/* Borrowed, valid until tetrain_close. Calls into the state that can raise an error must be protected (lua_cpcall,
 * lua_pcall). */
TETRAIN_API struct lua_State *tetrain_lua_state(tetrain *rt);
/* Borrowed. The functions of te.h work on it between calls. te_context_interrupt interrupts only operations, also
 * those that scripts run, until te_context_clear_interrupt. A script may catch the error of such an operation; where it
 * does not, its call returns TETRAIN_ERROR_INTERRUPTED and leaves the interrupt set. To end a script, use
 * tetrain_interrupt. */
TETRAIN_API te_context       *tetrain_context(tetrain *rt);
TETRAIN_API const char       *tetrain_version(void);

/* `require "te"` inside a host's own LuaJIT state: lua_pushcfunction(L, luaopen_te) under package.preload.te. The
 * engine context then belongs to that state and dies with it. A state has one library: opening it again gives the same
 * one. */
TETRAIN_API int luaopen_te(struct lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
