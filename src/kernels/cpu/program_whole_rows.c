/* program_whole_rows.c - sums and extremes of whole numbers over rows or columns, in integers.
 *
 * As in program_whole.c the results are those of float64. Extremes always are, once they are rounded as float64 would
 * have been. Sums are where no sum of so many numbers can leave the 53 bits that float64 has; where a number is too
 * large for that, the run is done again by others.
 *
 * What is reduced may be one dimension or several, `deep`; the others are walked one by one, but for one in which
 * numbers lie side by side, whose results are made together.
 */
#include "copy.h"
#include "program_exec.h"
#include "workers.h"

#include "../dtype.h"

#include <string.h>

enum { WIDTH = 1024 /* results at a time, and numbers of a row */, LEAST = 512 };

typedef struct dims {
    int     n;
    int64_t shape[TE_MAX_DIMS], in[TE_MAX_DIMS], out[TE_MAX_DIMS], all; /* the product of the extents */
} dims;

typedef struct job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    te_dtype              dtype;
    te_whole_join         join;
    const char           *from;
    char                 *to;
    dims                  kept, deep;
    int64_t               columns, column, out_column, width, across; /* that dimension; pieces of it */
    bool                  along;  /* the numbers of one result lie one behind the other */
    uint64_t              half;   /* numbers plus it have no bit from `limit` on, or they are too large */
    int                   limit;
    bool                  large;  /* there was a number that is too large */
} job;

/* --- what is to be done ------------------------------------------------------------------------------------------- */

static void add_dim(dims *d, int64_t extent, int64_t in, int64_t out)
{
    int n = d->n;
    d->all *= extent;
    if (extent == 1) return;
    if (n > 0 && d->in[n - 1] == in * extent && d->out[n - 1] == out * extent) {
        d->shape[n - 1] *= extent;
        n--;
    } else {
        d->shape[n] = extent;
        d->n++;
    }
    d->in[n] = in;
    d->out[n] = out;
}

/* The reduction of an input's elements that is all the program does; false: it is another one. */
static bool find_join(const te_program *p, const te_run *run, te_whole_join *join)
{
    if (p->n_inputs != 1 || p->n_outputs != 1 || p->insns[0].op != TE_PW_LOAD || p->input_rates[0] != TE_RATE_ELEM)
        return false;
    const te_insn *last = &p->insns[p->outputs[0].value];
    int            kind = p->outputs[0].kind;
    *join = TE_WHOLE_SUM;
    if (kind == TE_OUT_COLSUM) return last == &p->insns[0];
    if (kind != TE_OUT_ROW) return false;
    if (last->op == TE_PW_MUL) { /* by 1 */
        const te_insn *factor = &p->insns[last->arg[1]];
        if (factor->op != TE_PW_PARAM || run->params[factor->slot] != 1) return false;
        last = &p->insns[last->arg[0]];
    }
    if (!te_opcode_reduces(last->op) || last->arg[0] != 0) return false;
    if (last->op != TE_PW_ROWSUM) *join = last->op == TE_PW_ROWMAX ? TE_WHOLE_MAX : TE_WHOLE_MIN;
    return true;
}

static bool take_operands(job *j, const te_program *p, const te_run *run)
{
    const te_operand *in = run->inputs, *out = run->outputs;
    bool              by_row = p->outputs[0].kind == TE_OUT_ROW;
    int               last = run->ndim - 1;
    if ((in->dtype != TE_I64 && in->dtype != TE_I32) || in->block || out->accumulate || !in->data || !out->data)
        return false;
    if (out->dtype != (j->join == TE_WHOLE_SUM ? TE_I64 : in->dtype)) return false;
    j->kept.all = j->deep.all = 1;
    for (int d = 0; d <= last; d++) {
        if (run->shape[d] < 1) return false;
        if (by_row == (d == last)) add_dim(&j->deep, run->shape[d], in->stride[d], 0);
        else add_dim(&j->kept, run->shape[d], in->stride[d], out->stride[d]);
    }
    j->dtype = in->dtype;
    j->from = in->data;
    j->to = out->data;
    return j->deep.n > 0 && j->kept.all * j->deep.all >= LEAST;
}

/* Takes the dimension out that results are made side by side in: numbers of one result, or of several ones, lie one
 * behind the other. */
static bool take_columns(job *j)
{
    bool along = j->deep.in[j->deep.n - 1] == 1;
    int  at = along ? j->kept.n - 1 : -1;
    for (int d = 0; d < j->kept.n && !along; d++)
        if (j->kept.in[d] == 1) at = d;
    j->columns = 1;
    if (at >= 0) {
        j->columns = j->kept.shape[at];
        j->column = j->kept.in[at];
        j->out_column = j->kept.out[at];
        j->kept.n--;
        for (int d = at; d < j->kept.n; d++) {
            j->kept.shape[d] = j->kept.shape[d + 1];
            j->kept.in[d] = j->kept.in[d + 1];
            j->kept.out[d] = j->kept.out[d + 1];
        }
    }
    j->along = along;
    j->width = WIDTH;
    if (along && j->deep.all > 16) j->width = WIDTH / 16; /* a piece is enough to do, and there are some */
    j->across = (j->columns + j->width - 1) / j->width;
    return along || at >= 0;
}

/* --- doing it ----------------------------------------------------------------------------------------------------- */

static void place(const dims *d, int64_t number, int64_t *in, int64_t *out)
{
    for (int i = d->n - 1; i >= 0; i--) {
        int64_t at = i > 0 ? number % d->shape[i] : number;
        if (i > 0) number /= d->shape[i];
        *in += at * d->in[i];
        if (out) *out += at * d->out[i];
    }
}

/* n numbers as int64, where they are or in the room for them. */
static const int64_t *numbers(const job *j, int64_t *room, int64_t at, int64_t n)
{
    const void *from = te_element(j->from, j->dtype, at);
    if (j->dtype == TE_I64) return from;
    j->blocks->load[j->dtype](room, from, 1, n);
    return room;
}

/* Rows of few numbers that follow one another are joined as longer ones, and the parts of these in the end. */
static int64_t rows_at_once(const job *j, int64_t n)
{
    int64_t rows = 1;
    if (j->deep.n == 1 && j->deep.in[0] == n)
        while (2 * rows * n <= WIDTH && 2 * rows <= j->deep.all) rows *= 2;
    return rows;
}

static void join_columns(job *j, int64_t *sums, int64_t at, int64_t n, uint64_t *bits)
{
    int64_t room[WIDTH], rows = rows_at_once(j, n);
    for (int64_t k = 0; k < j->deep.all && !(k % LEAST < rows && te_cpu_stopping(j->exec)); k += rows) {
        int64_t in = at, wide = (j->deep.all - k < rows ? j->deep.all - k : rows) * n;
        place(&j->deep, k, &in, NULL);
        const int64_t *from = numbers(j, room, in, wide);
        if (k == 0) memset(sums, 0, (size_t)wide * sizeof *sums);
        if (k == 0 && j->join != TE_WHOLE_SUM) memcpy(sums, from, (size_t)wide * sizeof *sums);
        else *bits |= j->blocks->join(j->join, sums, from, j->half, wide);
    }
    for (; rows > 1; rows /= 2) (void)j->blocks->join(j->join, sums, sums + rows / 2 * n, 0, rows / 2 * n);
}

/* Of one result, in pieces. */
static void join_row(job *j, int64_t *sum, int64_t at, uint64_t *bits)
{
    int64_t room[WIDTH], length = j->deep.shape[j->deep.n - 1], most = j->dtype == TE_I64 ? INT64_C(1) << 16 : WIDTH;
    for (int64_t k = 0, n; k < j->deep.all && !te_cpu_stopping(j->exec); k += n) {
        int64_t in = at, one;
        place(&j->deep, k, &in, NULL);
        n = length - k % length < most ? length - k % length : most;
        *bits |= j->blocks->joined(j->join, &one, numbers(j, room, in, n), n, j->half, n, 1);
        if (k == 0) *sum = one;
        else (void)j->blocks->join(j->join, sum, &one, 0, 1);
    }
}

static void join_rows(job *j, int64_t *sums, int64_t at, int64_t n, uint64_t *bits)
{
    if (j->dtype == TE_I64 && j->deep.n == 1 && j->deep.all <= 1 << 12)
        *bits |= j->blocks->joined(j->join, sums, (const int64_t *)(const void *)j->from + at, j->column, j->half,
                                   j->deep.all, n);
    else
        for (int64_t i = 0; i < n; i++) join_row(j, &sums[i], at + i * j->column, bits);
}

/* Extremes are rounded as float64 is. */
static void round_large(int64_t *values, int64_t n)
{
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; i++) bits |= (uint64_t)values[i] + (UINT64_C(1) << 53);
    for (int64_t i = 0; i < n && bits >> 54; i++) values[i] = te_f64_to_i64((double)values[i]);
}

static void run_pieces(void *context, int64_t first, int64_t end, int thread)
{
    job *j = context;
    (void)thread;
    for (int64_t piece = first; piece < end && !te_cpu_stopping(j->exec); piece++) {
        int64_t  sums[WIDTH], column = piece % j->across * j->width, n = j->columns - column;
        int64_t  in = column * j->column, out = column * j->out_column;
        uint64_t bits = 0;
        if (n > j->width) n = j->width;
        place(&j->kept, piece / j->across, &in, &out);
        if (j->along) join_rows(j, sums, in, n, &bits);
        else join_columns(j, sums, in, n, &bits);
        if (j->join == TE_WHOLE_SUM && bits >> j->limit) __atomic_store_n(&j->large, true, __ATOMIC_RELAXED);
        te_dtype type = j->join == TE_WHOLE_SUM ? TE_I64 : j->dtype;
        if (j->join != TE_WHOLE_SUM) round_large(sums, n);
        j->blocks->store[TE_CLASS_I64][type](te_element(j->to, type, out), j->out_column, sums, 1, n);
    }
}

bool te_program_whole_rows_run(te_exec *exec, const te_program *program, const te_run *runs, int n_runs)
{
    job j = {.exec = exec, .blocks = te_copy_blocks_of(exec), .limit = 54};
    if (n_runs != 1 || !runs->compute_f64 || !find_join(program, runs, &j.join) || !take_operands(&j, program, runs) ||
        !take_columns(&j))
        return false;
    for (int64_t n = 1; n < j.deep.all; n *= 2) j.limit--;
    if (j.join == TE_WHOLE_SUM && j.limit < 2) return false;
    j.half = UINT64_C(1) << (j.limit - 1);
    int64_t pieces = j.across;
    for (int d = 0; d < j.kept.n; d++) pieces *= j.kept.shape[d];
    int threads = j.kept.all * j.deep.all >= 1 << 16 ? exec->threads : 1;
    if (threads > 4 && pieces < threads) return false; /* better cut */
    te_cpu_loop(exec, threads, pieces, te_cpu_even_grain(pieces, threads), run_pieces, &j);
    return !j.large;
}
