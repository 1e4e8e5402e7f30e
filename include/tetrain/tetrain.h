/* tetrain.h - the host interface of tetrain: an interpreter with the engine inside, for a C or C++ program.
 *
 * A runtime is a Lua state and an engine context that belong together. The host opens one, runs scripts in it, hands
 * tensors in, calls functions that the scripts defined, and takes tensors out:
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
 * The interface is small because Lua is the interface: what to train, how, and what to save stands in a script that can
 * change without compiling the host. Numbers, text and tables are not passed across; a script reads its arguments, and
 * makes a tensor of one element of a number that it returns (te.tensor(3)). A host that wants more has the Lua state
 * (tetrain_lua_state) and the engine (te.h) under the same roof.
 *
 * Ownership
 *   Tensors are reference counted. A function that returns a te_tensor * or fills one into `out` gives the host one
 *   reference, to be given back with te_tensor_release; arguments are borrowed for the duration of the call, and Lua
 *   takes references of its own for what it keeps. te_tensor_release(NULL) and tetrain_close(NULL) do nothing, so
 *   cleanup needs no conditions.
 *
 * No copies
 *   te_tensor_from_data makes a tensor of the host's memory as it is; a script that writes into it writes into the
 *   host's buffer. te_tensor_data gives the address of a contiguous tensor on the CPU, which the host may read and
 *   write; of what it wrote te_tensor_written tells the engine, which keeps copies of weights. The memory must stay
 *   where it is until the last reference is gone, which Lua's collector decides: give a deleter where that matters.
 *
 * Lifetime
 *   Tensors that the host holds outlive tetrain_close: they keep the engine context alive, not the interpreter. Strings
 *   that are returned belong to the runtime; tetrain_error stays valid until the next call on the same runtime.
 *
 * Errors
 *   A function that can fail returns a tetrain_status, and tetrain_error then holds the message: "file:line:
 *   te.function: argument: what is wrong with which value", and the traceback of the Lua functions. Nothing aborts,
 *   exits, prints or installs signal handlers. After any failure the runtime is good for the next call: a script that
 *   ran out of memory has been collected, a limit counts anew, an interrupt is over.
 *
 * Threads
 *   One runtime is used by one thread at a time; which one may change between calls. Two runtimes know nothing of each
 *   other and may run in two threads; only of processes that were started together one runtime each is a member at a
 *   time (comm.h). tetrain_interrupt, tetrain_interrupt_pending and tetrain_request_stop alone may be called from any
 *   thread and from signal handlers while a call runs. Kernels use `threads` threads; results do not depend on how
 *   many.
 *
 * Stack
 *   A call needs a stack of 256 KiB, a thread's or a fiber's. Where a thread has less than 192 KiB left, the call fails
 *   with TETRAIN_ERROR_MEMORY before it begins. On a larger stack calls may nest more deeply (coroutines in coroutines,
 *   functions that Lua calls through C); too deep a nesting is a Lua error. The stack of a fiber is taken to be small,
 *   since nobody knows its size. Devices other than the CPU need what their drivers need, some MiB.
 *
 * Floating-point numbers
 *   Calls compute in the default mode: they round to nearest, keep subnormal numbers, and no exception raises a signal.
 *   A mode that the host has set for its thread (fesetround, feenableexcept, flushing to zero) is put aside at the
 *   beginning of a call and restored at its end; functions of the host that are called meanwhile find the default one.
 *   Lua in a state of the host's own (luaopen_te) keeps the host's mode, operations do not.
 *
 * Scripts that never end
 *   LuaJIT's compiled loops look at nothing. tetrain_interrupt is seen by interpreted code within some thousand
 *   instructions and by every operation of the engine; a loop that the compiler made machine code of and that calls no
 *   operation is reached by neither. Where that must not happen set TETRAIN_INTERPRETED, which costs nothing that
 *   matters next to tensor operations. Limits and TETRAIN_RESTRICTED imply it. There long work of the string and table
 *   libraries counts as instructions, too, and table.insert refuses positions before 1. An instruction limit counts
 *   Lua's instructions, not the time of operations: a host that must be sure sets it and calls tetrain_interrupt from a
 *   timer as well. An operation that runs on the CPU is left off, within a fifth of a second as a rule, and fails. Its
 *   results never come to light; but what it was changing in place, gradients that a backward pass was adding to among
 *   it, is neither old nor new. The update of an optimizer's step is done as a whole. Work on other devices, and on
 *   files, is not interrupted.
 *
 * Chunks are text, everywhere: LuaJIT bytecode is never accepted, since damaged bytecode crashes the process.
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
    TETRAIN_ERROR_ARGUMENT,    /* a wrong argument of the call itself: a tensor of another runtime */
    TETRAIN_ERROR_MEMORY,      /* the Lua heap, host or device memory is exhausted, or its limit reached */
    TETRAIN_ERROR_IO,          /* a file could not be read or written */
    TETRAIN_ERROR_INTERRUPTED, /* tetrain_interrupt was called, or te_context_interrupt */
    TETRAIN_ERROR_LIMIT        /* instruction_limit was reached */
} tetrain_status;

/* Flags of tetrain_options. */
enum {
    /* For scripts that the host did not write: no io, os, package, debug, ffi and jit libraries, no files through te,
     * no finalizers, no bytecode, no way to more threads than the host gave; `print` goes to `log`. Set the three
     * limits with it: pcall swallows none of them. (Without the flag a script may catch that memory ran out, at a
     * limit as well, and go on with less; the instruction limit ends it in any case.) It limits what a mistaken or
     * careless script can damage. It is no wall against a hostile author: LuaJIT and the engine are large programs that
     * share the host's address space. Put such scripts into a process of their own. Devices are the machine's: a script
     * may use a GPU, whose driver compiles kernels for it and keeps them in the cache folder ($TETRAIN_CACHE). */
    TETRAIN_RESTRICTED = 1 << 0,
    /* The JIT compiler stays off, so that tetrain_interrupt ends every script. */
    TETRAIN_INTERPRETED = 1 << 1,
    /* Where `device` is NULL, $TE_DEVICE names the default device. */
    TETRAIN_ENVIRONMENT = 1 << 2,
    /* os.exit ends the process, as in a program whose purpose is to run scripts. Without it os.exit is an error. */
    TETRAIN_MAY_EXIT = 1 << 3
};

/* Fields that are zero have their defaults. New fields are added at the end; struct_size tells which the host knows. */
typedef struct tetrain_options {
    size_t      struct_size;         /* sizeof(tetrain_options) */
    const char *device;              /* default device of new tensors, NULL for "cpu" */
    int         threads;             /* CPU threads; 0: OMP_NUM_THREADS, or all cores */
    size_t      lua_memory_limit;    /* bytes of the Lua heap, with what te.profile records; 0: none. Implies
                                        TETRAIN_INTERPRETED */
    size_t      tensor_memory_limit; /* bytes per device, on the CPU with those that the engine keeps for each
                                        tensor, recorded operation and value of a group; 0: none */
    uint64_t    instruction_limit;   /* Lua instructions per call of the host, with those of calls inside it; 0: none.
                                        Implies TETRAIN_INTERPRETED */
    unsigned    flags;
    /* What print writes in restricted runtimes, a zero byte as "\0"; NULL: dropped. */
    void      (*log)(void *user, int level, const char *message);
    void       *user;
    /* Where all host memory comes from: the Lua heap, the engine's and tensors'. lua_Alloc's contract; NULL: the C
     * library. What libraries take for themselves (BLAS, JSON, threads) is outside. Implies TETRAIN_INTERPRETED: the
     * compiler cannot do without memory. Called from the thread that uses the runtime. */
    void     *(*realloc)(void *user, void *ptr, size_t old_size, size_t new_size);
    void       *realloc_user;
} tetrain_options;

/* --- opening and closing ------------------------------------------------------------------------------------------ */

/* NULL options: all defaults. Copies what it needs from options, `device` included. NULL when memory is exhausted
 * (the library takes some 200 KB of lua_memory_limit), when struct_size was not set, or with less than 64 KiB of stack.
 * The other functions take such a NULL: they do nothing, and return TETRAIN_ERROR_ARGUMENT or NULL. */
TETRAIN_API tetrain *tetrain_open(const tetrain_options *options);
/* Frees the interpreter and everything that the host holds no reference to. NULL is a no-op. Not from inside a call. */
TETRAIN_API void     tetrain_close(tetrain *rt);

/* --- running scripts ---------------------------------------------------------------------------------------------- */

/* Runs a file; NULL: standard input. Its arguments are the values of `...` and the table `arg`, with the path at
 * arg[0]. Globals that it sets remain, for later calls to use. */
TETRAIN_API tetrain_status tetrain_run_file(tetrain *rt, const char *path, int argc, const char *const *argv);
/* Runs `size` bytes of source. chunk_name stands in messages: "=config" as it is, "@file.lua" as a file's name; NULL:
 * "(string)". */
TETRAIN_API tetrain_status tetrain_run_string(tetrain *rt, const char *code, size_t size, const char *chunk_name);
/* Calls a global function, dotted names allowed ("model.forward"), or anything callable, a module say. NULL among `in`
 * arrives as nil. out receives n_out results, one reference each; all are NULL after a failure. A result that is no
 * tensor is an error. */
TETRAIN_API tetrain_status tetrain_call(tetrain *rt, const char *function, te_tensor *const *in, int n_in,
                                        te_tensor **out, int n_out);

/* --- exchanging tensors ------------------------------------------------------------------------------------------- */

/* Makes a tensor of this runtime's context a Lua global; NULL sets nil. The name has no dots. */
TETRAIN_API tetrain_status tetrain_set_tensor(tetrain *rt, const char *global, te_tensor *tensor);
/* The tensor that a global holds, dotted names allowed: a new reference; NULL with a message when it is none. */
TETRAIN_API te_tensor     *tetrain_get_tensor(tetrain *rt, const char *global);

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* Message of the last call, with its Lua traceback; "" when it did not fail. Of an error value that is no text it has
 * what its __tostring gives, or its type; a zero byte stands there as "\0". */
TETRAIN_API const char *tetrain_error(const tetrain *rt);

/* --- stopping ----------------------------------------------------------------------------------------------------- */

/* Makes the running call end with TETRAIN_ERROR_INTERRUPTED; where none runs, or its script is over or does not begin,
 * the next one. An interrupt is over with the call that ended so and with no other: tetrain_get_tensor, which runs no
 * script, leaves it to the next call. Of calls inside one another it ends all. pcall does not swallow it. From any
 * thread or a signal handler; the runtime must not be closed meanwhile. */
TETRAIN_API void tetrain_interrupt(tetrain *rt);
/* Whether an interrupt was asked for and nothing has noticed it, while no file is being saved. Where that stays so the
 * script is in a compiled loop, or waits for the system. From any thread or a signal handler. */
TETRAIN_API bool tetrain_interrupt_pending(tetrain *rt);
/* Asks the script to finish by itself (te._core.interrupt_flag becomes true). False when it does not listen, or was
 * asked before: then only tetrain_interrupt helps. From any thread or a signal handler. */
TETRAIN_API bool tetrain_request_stop(tetrain *rt);

/* --- what is inside ----------------------------------------------------------------------------------------------- */

/* Borrowed, valid until tetrain_close. Whoever calls into the state must protect what can raise (lua_cpcall,
 * lua_pcall). */
TETRAIN_API struct lua_State *tetrain_lua_state(tetrain *rt);
/* Borrowed. Tensors and operations of te.h work on it between calls. te_context_interrupt interrupts operations alone,
 * those of scripts as well, until te_context_clear_interrupt: a call whose script an operation ends so has the status
 * TETRAIN_ERROR_INTERRUPTED and leaves the interrupt as it is, and a script may catch the error. What ends a script is
 * tetrain_interrupt. */
TETRAIN_API te_context       *tetrain_context(tetrain *rt);
TETRAIN_API const char       *tetrain_version(void);

/* `require "te"` inside a host's own LuaJIT state: lua_pushcfunction(L, luaopen_te) under package.preload.te. The
 * engine context then belongs to that state and dies with it. A state has one library: opened again, it is the same. */
TETRAIN_API int luaopen_te(struct lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
