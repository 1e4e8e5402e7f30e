/* program_walker.h - one thread on its way through a job: what it knows and where its values are. Shared by the files
 * that run programs. */
#ifndef TE_KERNELS_CPU_PROGRAM_WALKER_H
#define TE_KERNELS_CPU_PROGRAM_WALKER_H

#include "program_exec.h"

#include "../philox.h"

enum { TE_FETCHED_MAX = 6 };

/* What a step fetches of the next tile's rows while it goes over this one's: parts of operands,
 * to the first of none. */
typedef struct te_share {
    struct te_share_part {
        int32_t operand;
        int64_t offset; /* bytes from the row at hand */
        size_t  lines;
    } part[TE_FETCHED_MAX];
} te_share;

typedef struct te_walker {
    const te_job     *job;
    const te_plan    *plan;
    const te_blocks  *blocks;
    te_bound_operand *operands; /* inputs, then outputs */
    char            **row;      /* per operand: its first element in the row at hand */
    char            **slot;     /* per slot: where its values are */
    uint8_t          *form;     /* per slot: te_slot_form */
    int64_t          *step;     /* per slot: bytes from row to row of a band */
    int32_t          *direct;   /* per output: the slot that is the output itself, -1: none */
    char             *registers;
    te_fold          *folds, *sums;
    char             *spare;    /* one more register, for what accumulates */
    char             *kept, *constants;
    size_t            register_bytes, kept_bytes;
    int64_t           at[TE_MAX_DIMS]; /* position in the outer dimensions */
    int64_t           row_number, column;
    size_t            tile_rows, tile_columns;
    te_share         *shares;   /* per turn of the plan */
    bool              fetches;  /* there are any */
    te_ahead          ahead[TE_FETCHED_MAX]; /* what the step at hand fetches */
    /* elements of a register that serves a chain of any length, 0: tiles are as long as registers */
    size_t            window;
    int64_t           row_chunk;
    char             *parts;
} te_walker;

/* Whether chains run on the tile at hand. */
static inline bool te_walker_chains(const te_walker *w)
{
    return w->blocks->strip > 0 && w->tile_rows * w->tile_columns >= w->blocks->strip;
}

/* NULL: values that are never but where they lie as a tensor have none. */
static inline char *te_walker_register(const te_walker *w, int32_t slot)
{
    int32_t index = w->plan->slots[slot].index;
    return index < 0 ? NULL : w->registers + (size_t)index * w->register_bytes;
}

/* Whether a load may leave bfloat16 to the links that read it. */
static inline bool te_walker_takes_half(const te_step *load, const te_bound_operand *in)
{
    return load->half_ok && in->straight && in->dtype == TE_BF16 && !in->constant;
}

static inline size_t te_align64(size_t n) { return (n + 63) & ~(size_t)63; }

/* program_bind.c: lays the te_walker's arrays out in a workspace and binds them to the run; returns the bytes that it
 * takes. With base NULL nothing is written but the layout's own sizes. */
size_t te_walker_lay_out(const te_job *job, te_walker *w, char *base);
void   te_walker_bind(te_walker *w);
void   te_walker_uniform(te_walker *w); /* computes the UNIFORM values, once it is bound */
void   te_walker_uniform_value(te_walker *w, int v);

/* program_exec.c: lays out and binds; goes through a chunk of the job; says whether the chain that begins with step
 * `first` runs on the tile at hand. */
void te_walker_start(te_walker *w, const te_job *job, char *workspace, char *parts);
void te_walker_chunk(te_walker *w, int64_t chunk);
bool te_walker_takes_chain(const te_walker *w, int first);

/* program_steps.c, on the tile at hand: one step, and the chain that begins with step `first`. */
void te_walker_step(te_walker *w, const te_step *step);
void te_walker_chain(te_walker *w, int first);

/* Slots that are the tensors themselves. A load, or an output that the step which makes its value writes, is pointed at
 * the tile where that may be: then true, and nothing is left to do for the load, or the store of the output. */
bool te_walker_point_load(te_walker *w, const te_step *step);
bool te_walker_point_output(te_walker *w, int output); /* program_exec.c */
bool te_walker_stored(const te_walker *w, const te_step *store);

/* program_join.c: where the parts of column sums lie, per output, per row chunk; and of sums and amaxes, per chunk. */
char   *te_job_column_part(const te_job *job, char *parts, int output, int64_t row_chunk);
double *te_job_sum_parts(const te_job *job, char *parts);

static inline char *te_walker_tile(const te_walker *w, const te_bound_operand *operand, int index)
{
    return w->row[index] + te_operand_place(operand->block, w->column) * operand->column * operand->size;
}

static inline int64_t te_walker_row_stride(const te_walker *w, const te_bound_operand *operand)
{
    return w->job->n_outer ? operand->outer[w->job->n_outer - 1] : 0;
}

#endif
