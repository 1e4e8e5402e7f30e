/* tetrain.h - the host interface of tetrain: an interpreter with the engine inside, for a C program.
 *
 *     tetrain *rt = tetrain_open(NULL);
 *     if (tetrain_run_file(rt, "model.lua", 0, NULL) != TETRAIN_OK) fprintf(stderr, "%s\n", tetrain_error(rt));
 *     te_tensor *in = te_tensor_full(tetrain_context(rt), TE_F32, 2, (int64_t[]){4, 16}, 1.0), *out;
 *     if (tetrain_call(rt, "model.forward", &in, 1, &out, 1) == TETRAIN_OK) …
 *     te_tensor_release(in);
 *     te_tensor_release(out);
 *     tetrain_close(rt);
 *
 * Promises
 *   - No call aborts, exits, prints or installs signal handlers. A script that fails, loops for ever or exhausts a limit ends
 *     in a status and a message, and the runtime stays usable.
 *   - Two runtimes may run in two threads at once. One runtime is used by one thread at a time; tetrain_interrupt and
 *     tetrain_request_stop are the exceptions.
 *   - Chunks are text; LuaJIT bytecode is never accepted.
 *   - Tensors that the host holds outlive tetrain_close.
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
    TETRAIN_ERROR_ARGUMENT,    /* a wrong argument of the call itself: no such function, not a tensor */
    TETRAIN_ERROR_MEMORY,      /* the Lua heap, host or device memory is exhausted, or its limit reached */
    TETRAIN_ERROR_IO,          /* a file could not be read */
    TETRAIN_ERROR_INTERRUPTED, /* tetrain_interrupt was called */
    TETRAIN_ERROR_LIMIT        /* instruction_limit was reached */
} tetrain_status;

/* Flags of tetrain_options. */
enum {
    /* No io, os, package, debug, ffi and jit libraries, no files through te; the JIT compiler is off. This limits what a
     * mistaken script can damage; it is no wall against a hostile author. */
    TETRAIN_RESTRICTED = 1 << 0,
    /* Where `device` is NULL, $TE_DEVICE names the default device. */
    TETRAIN_ENVIRONMENT = 1 << 1
};

typedef struct tetrain_options {
    size_t      struct_size;         /* sizeof(tetrain_options): lets the struct grow */
    const char *device;              /* default device of new tensors, NULL for "cpu" */
    int         threads;             /* CPU threads, 0: all cores */
    size_t      lua_memory_limit;    /* bytes, 0: none. Turns the JIT compiler off */
    size_t      tensor_memory_limit; /* bytes per device, 0: none */
    uint64_t    instruction_limit;   /* Lua instructions per call, 0: none. Turns the JIT compiler off */
    unsigned    flags;               /* TETRAIN_RESTRICTED, TETRAIN_ENVIRONMENT */
    void      (*log)(void *user, int level, const char *message); /* what print writes in restricted runtimes; NULL: dropped */
    void       *user;
    /* Where all host memory comes from: the Lua heap, the engine's and tensors'. lua_Alloc's contract; NULL: the C library. What
     * libraries take for themselves (BLAS, JSON, threads) is outside. Turns the JIT compiler off, since it cannot do without memory. */
    void     *(*realloc)(void *user, void *ptr, size_t old_size, size_t new_size);
    void       *realloc_user;
} tetrain_options;

/* NULL options: all defaults. NULL when memory is exhausted. */
TETRAIN_API tetrain *tetrain_open(const tetrain_options *options);
TETRAIN_API void     tetrain_close(tetrain *rt); /* NULL is a no-op */

/* Runs a file. Its arguments are the values of `...` and the table `arg`, with the path at arg[0]. */
TETRAIN_API tetrain_status tetrain_run_file(tetrain *rt, const char *path, int argc, const char *const *argv);
/* Runs `size` bytes of source; chunk_name stands in messages ("=config", "@file.lua"; NULL: the code itself). */
TETRAIN_API tetrain_status tetrain_run_string(tetrain *rt, const char *code, size_t size, const char *chunk_name);
/* Calls a global function, dotted names allowed ("model.forward"). out receives n_out results, one reference each; all are
 * NULL after a failure. A result that is no tensor is an error. */
TETRAIN_API tetrain_status tetrain_call(tetrain *rt, const char *function, te_tensor *const *in, int n_in, te_tensor **out,
                                        int n_out);
TETRAIN_API tetrain_status tetrain_set_tensor(tetrain *rt, const char *global, te_tensor *tensor); /* NULL sets nil */
TETRAIN_API te_tensor     *tetrain_get_tensor(tetrain *rt, const char *global); /* a new reference, NULL if it is no tensor */

/* Message of the last failure with its Lua traceback, valid until the next call; "" when there was none. */
TETRAIN_API const char *tetrain_error(const tetrain *rt);

/* Makes the running script, or the next one, end with TETRAIN_ERROR_INTERRUPTED. From any thread or a signal handler. */
TETRAIN_API void tetrain_interrupt(tetrain *rt);
/* Asks the script to finish by itself (te._core.interrupt_flag becomes true). False when it does not listen, or was asked
 * before: then only tetrain_interrupt helps. From any thread or a signal handler. */
TETRAIN_API bool tetrain_request_stop(tetrain *rt);

TETRAIN_API struct lua_State *tetrain_lua_state(tetrain *rt);
TETRAIN_API te_context       *tetrain_context(tetrain *rt); /* borrowed */
TETRAIN_API const char       *tetrain_version(void);

/* `require "te"` inside a host's own LuaJIT state: lua_pushcfunction(L, luaopen_te) under package.preload.te. */
TETRAIN_API int luaopen_te(struct lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
