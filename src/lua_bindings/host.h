/* host.h - what the files behind tetrain.h share. */
#ifndef TE_LUA_HOST_H
#define TE_LUA_HOST_H

#include "bindings.h"

#include "tetrain/tetrain.h"

/* What is counted and found out about one call of the host. */
typedef struct call_state {
    int         failure;   /* of the innermost lua_pcall: raising again makes every error a run-time one */
    bool        ran_out;   /* the Lua heap could not grow */
    bool        limit_reached; /* that of instructions */
    const char *exhausted; /* what stops a restricted script that reached a memory limit; NULL: none did */
    uint64_t    executed;  /* Lua instructions, where they are limited */
    uint64_t    limit;     /* how many may be; 0: any number */
    unsigned    step;      /* instructions between two looks of the hook */
} call_state;

/* What a call leaves alone of the one inside which the host makes it. */
typedef struct outer_call {
    call_state now;
    bool       interrupt_seen, limit_refused, polls_stop;
    te_status  status;
    lua_Hook   hook;
    int        hook_mask, hook_count;
} outer_call;

struct tetrain {
    tetrain_options options;
    te_mem          mem;
    lua_State      *L;
    te_context     *ctx;
    te_lua         *rt;
    char           *arena; /* serves lua_newstate, see host_heap.c */
    size_t          arena_used;
    bool            opening;
    size_t          lua_memory; /* bytes of the Lua heap */
    bool            interpreted; /* the JIT compiler is off for good */
    bool            failed;      /* a call did since modules were looked through */
    bool            unsettled;   /* a call failed since scopes were put back */
    call_state      now;         /* of the call that runs, the innermost */
    atomic_bool     interrupt_seen; /* the script of this call is stopped by an interrupt; signal handlers look */
    char            error[8192];
};

tetrain_status tetrain_fail(tetrain *host, tetrain_status status, const char *format, ...) TE_PRINTF(3, 4);
static inline bool tetrain_is_interrupted(const tetrain *host) { return host->ctx->interrupted & TE_INTERRUPT_SCRIPTS; }
static inline bool tetrain_is_stopping(const tetrain *host)
{
    return host->now.limit_reached || host->now.exhausted || tetrain_is_interrupted(host);
}

/* Runs function with `argument` as light userdata at 1; what it raises becomes a status and the message. */
tetrain_status tetrain_protected(tetrain *host, lua_CFunction function, void *argument);

/* Calls the function with n arguments on top; errors get a traceback and are raised again. */
void tetrain_call_traced(tetrain *host, int n_args, int n_results);

/* host_heap.c: a lua_Alloc on the host's hook, with the limit where there is one, whose `user` is the tetrain; and the
 * words of a heap that is full. The arena serves it while host->opening. */
void *tetrain_heap_alloc(void *user, void *ptr, size_t old_size, size_t new_size);
bool  tetrain_arena_open(tetrain *host); /* false: no memory */
void  tetrain_arena_close(tetrain *host);
#define TETRAIN_HEAP_EXHAUSTED "not enough memory" /* LuaJIT's words */

/* host_libraries.c: opens the standard library in a new state, as the host's options say. Raises. */
void tetrain_open_libraries(tetrain *host, lua_State *L);

/* limits.c: around every call into Lua, of so many instructions (0: any number), which ends with the status. */
void tetrain_start_limits(tetrain *host, uint64_t instructions);
void tetrain_stop_limits(tetrain *host, tetrain_status status);
/* Around these for a call inside another one, whose limits go on: what the inner call executed counts for both, and an
 * interrupt that ends the inner one ends the outer one, too. */
outer_call tetrain_leave_limits(tetrain *host);
void       tetrain_resume_limits(tetrain *host, const outer_call *outer);
/* Work that the script had C do for it, counted as instructions; raises once the script is to stop. */
void tetrain_count_work(tetrain *host, lua_State *L, unsigned instructions);
void tetrain_count_large(tetrain *host, size_t bytes); /* a block of the heap, see limits.c */
/* Replaces what would keep hooks from firing, see limits.c; after te_lua_text_only. */
void tetrain_guard_script(lua_State *L);

/* stack.c: looks at what is left of C's stack where the standard library calls Lua; after all that replaces its
 * functions. */
void tetrain_guard_stack(lua_State *L);
/* A call of the host begins at this place on C's stack; false, with the bytes left, where these are too few. */
bool tetrain_begin_stack(te_lua *rt, const char *here, size_t *left);
bool tetrain_may_open(const char *here);

/* patterns.c: replaces the functions of strings that match patterns. */
void tetrain_bound_patterns(lua_State *L);

#endif
