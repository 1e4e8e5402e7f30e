/* context.h - the context: everything that would otherwise be global. */
#ifndef TE_CORE_CONTEXT_H
#define TE_CORE_CONTEXT_H

#include "allocator.h"
#include "device_module.h"
#include "kernels/kernels.h"
#include "kernels/map.h"
#include "tetrain/te.h"

#include <stdarg.h>
#include <stdatomic.h>

#define TE_PRINTF(string, first) __attribute__((__format__(__printf__, string, first)))

typedef struct te_node te_node;

enum { TE_MAX_DEVICES = 9 }; /* cpu and eight accelerators */
enum { TE_MAX_THREADS = 1024 };
enum { TE_OP_HASHES = 512 }; /* about twice as many as there are operations */

/* A device that this context has opened. */
typedef struct te_device {
    te_context  *ctx;
    te_exec      exec;
    te_allocator allocator;
    char         name[16]; /* "cpu", "cuda", "cuda:1" */
    bool         open;
    uint64_t    *skipped_amaxes; /* on the device: infinite or NaN; NULL until delayed scaling runs there */
} te_device;

/* Factors of delayed scaling in the order of their use; see recipe.h. */
typedef struct te_scale_use {
    struct te_tensor *factor; /* one number, held; NULL: taken */
    uintptr_t use;            /* which state's, in which role */
} te_scale_use;

typedef struct te_scale_tape {
    bool on, paused;
    te_scale_use *uses;
    size_t n, at, capacity; /* those before `at` are taken */
} te_scale_tape;

struct te_context {
    te_mem    mem;
    int       refs; /* the owner's and one per tensor, storage and node */
    te_device devices[TE_MAX_DEVICES]; /* 0 is the CPU, 1 + i is cuda:i */
    te_device_module cuda;
    struct te_comm *world; /* of te_comm_world while somebody holds it; NULL: nobody does */
    size_t    tensor_memory_limit;
    int       threads;
    bool      threads_told; /* somebody said how many */
    bool      tf32, any_order; /* see te_exec */

    bool     grad_enabled;
    bool     laid_out_alike; /* results over all elements have the strides of the first input, which fills its memory */
    uint64_t gradient_uses; /* counts operations whose inputs take part in gradients, recorded or not */
    int64_t  recompute_width; /* groups compute operands of weight gradients anew, instead of keeping them, where the
                                 products that read them have so many columns together */
    te_dtype compute_dtype; /* TE_DTYPE_COUNT: that of the operands */
    bool     recipe_enabled, calibrating; /* products of scripts run under their recipes; amaxes are collected
                                             without */
    bool     host_enabled, host_calibrating; /* likewise those of a C host (te_autocast_begin) */
    te_scale_tape recorded_scales, replayed_scales;
    bool     amaxes_paused; /* what runs is no step: neither histories nor te.numerics take notice */
    struct te_recipe_state *product_state; /* of the product or attention that is called; borrowed */
    bool     product_bytes; /* of that attention: its result has bytes alone, as a parameter that is stored quantized
                               has */
    struct te_scope *scopes; /* of te_autocast_begin, the innermost last */
    int      n_scopes;
    size_t   scope_capacity;
    struct te_recipe_state *products; /* of a C host, with scales that change; a list (autocast.h) */
    uint64_t skipped_amaxes; /* infinite or NaN, on the host, since the context was opened */
    uint64_t seed, rng_offset;
    uint64_t clock;          /* counts storages made, whose ids these are, and writes in place */
    uint64_t replayed_since; /* when the stretch had run that backward computes again; UINT64_MAX: it computes none */
    uint64_t replay_began;
    uint64_t next_node;

    te_op       *ops; /* parsed declarations */
    int          n_ops;
    te_op       *ops_by_name[TE_OP_HASHES]; /* the first of each hash, see te_op.next */
    te_map       variants; /* compiled programs of program ops, see op_variant.c */

    void (*reclaim)(void *user); /* the host's, see te_context_on_memory_pressure … */
    void  *reclaim_user;
    void (*collect)(void *user); /* … and that of an interpreter around the engine; NULL: none */
    void  *collect_user;
    bool   reclaiming;
    bool   limit_refused; /* memory that ran out last did so at tensor_memory_limit */

    int count_from; /* what dimensions and positions in messages count from: 1 where a script calls, 0 where C does */

    struct te_graph *capture; /* a graph being recorded, NULL: none */
    struct te_profiler *profiler; /* a profile in progress, NULL: none */
    struct te_engine *engine; /* the backward pass in progress, NULL: none */
    uint64_t backwards; /* counts backward passes, one within another not */
    te_node *dead_nodes; /* nodes waiting to be freed: release is iterative, so a long graph cannot overflow the
                            stack */
    bool     freeing_nodes;
    te_tensor *dead_tensors; /* likewise: a gradient may have one in its turn, and so on */
    bool     freeing_tensors;
    te_tensor *free_tensors; /* recycled te_tensor structs */
    int      n_free_tensors;

    atomic_int interrupted; /* set from any thread or a signal handler */
    te_status    status;
    char         message[1024];
};

/* Gives memory that the host's cache holds back to the system. */
static inline void te_context_empty_host_cache(te_context *ctx)
{
    if (ctx->devices[0].open) te_allocator_empty_cache(&ctx->devices[0].allocator);
}

/* Records the message and returns status. Where memory is short the host's cache is emptied: what comes next may need
 * it for something else. */
te_status te_fail(te_context *ctx, te_status status, const char *format, ...) TE_PRINTF(3, 4);
/* Takes over the message of a kernel that failed in `op`; NULL: in an operation that names itself. Returns the status,
 * or that of the scratch which the kernel did not get. */
te_status te_fail_exec(te_context *ctx, te_status status, te_exec *exec, const char *op);
te_status te_fail_memory(te_context *ctx, const char *what);

static inline void te_context_retain(te_context *ctx) { ctx->refs++; }
void               te_context_unref(te_context *ctx);

/* Dimension or position i as messages have it; negative ones count from the end for everybody. */
static inline long long te_counted(const te_context *ctx, int64_t i)
{
    return (long long)(i < 0 || i == INT64_MAX ? i : i + ctx->count_from);
}
/* Sets count_from and returns the setting before. */
static inline int te_count_from(te_context *ctx, int first)
{
    int before = ctx->count_from;
    ctx->count_from = first;
    return before;
}

/* Opens on first use; NULL with the reason recorded. A NULL name is the default device. */
te_device *te_context_device(te_context *ctx, const char *name);
void       te_device_close(te_device *device); /* one that is not open: does nothing */

/* Takes over of a struct of options what both sides know. `given`, the host's struct_size, is a multiple of 8 in every
 * version of such a struct; bytes behind that would be a part of a field. */
static inline void te_copy_fields(void *to, const void *from, size_t given, size_t known)
{
    size_t size = given < known ? given : known;
    memcpy(to, from, size - size % 8);
}

/* Number of CUDA devices that can be opened; 0 with the reason recorded. */
int te_context_cuda_devices(te_context *ctx);

/* Memory of a device. When it is exhausted the cache is emptied and the owner asked to release tensors before the
 * request fails; then NULL with the sizes recorded. */
te_block *te_device_alloc(te_device *device, size_t bytes);
/* Counts structs that a script may make without end towards the limit of the CPU's memory; false: none is left.
 * te_context_discount takes it back. */
bool te_context_count(te_context *ctx, size_t bytes);
void te_context_discount(te_context *ctx, size_t bytes);

/* Reserves `words` Philox words and says where they start. */
te_rng te_context_draw(te_context *ctx, uint64_t words);

/* Bits of te_context.interrupted, with either of which work of the engine ends: the engine is interrupted until that is
 * cleared; the interpreter around it is until a call has ended so. */
enum { TE_INTERRUPT_WORK = 1, TE_INTERRUPT_SCRIPTS = 2 };

/* TE_ERROR_INTERRUPTED once te_context_interrupt was called. */
te_status te_context_poll(te_context *ctx);

#endif
