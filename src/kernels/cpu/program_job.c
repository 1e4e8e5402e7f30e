/* program_job.c - from a run's shape and strides to rows, columns, tiles and chunks. */
#include "program_exec.h"

#include "../check.h"
#include "../dtype.h"

/* Registers of a tile should fit L1 with room to spare; where a whole row must fit in a tile, L2 does. */
enum { TILE_BYTES = 24 << 10, ROW_BYTES = 64 << 10, KEPT_BYTES = 512 << 10 };
enum { TILE_MIN = 64, TILE_MAX = 4096, SHORT_ROW = 128, SHARED_ROW = 2048, LOADED_ROW = 512 };

/* A band is long enough for its steps to begin rarely. Its rows have at most so many columns, or else so many bytes in
 * all tensors together. */
enum { BAND_ELEMENTS = 8 << 10, BAND_WIDEST = 5 << 9, BAND_BYTES = 20 << 10, BAND_MAX = 64, BAND_VALUES = 64 << 10 };

/* Where columns are added up, and nothing else is done. */
enum { ADDED_ELEMENTS = 32 << 10, ADDED_WIDEST = 4 << 10 };

/* Where each row becomes a number and nothing else is done. */
enum { FOLDED_ELEMENTS = 32 << 10 };

/* --- shape ------------------------------------------------------------------------------------------------------ */

/* Whether stepping over dimension a is stepping over the whole of b for this operand. */
static bool chains(const te_operand *operand, const te_run *run, int a, int b)
{
    if (operand->block && b == run->ndim - 1) return false;
    return operand->stride[a] == operand->stride[b] * run->shape[b];
}

static bool mergeable(const te_program *program, const te_run *run, int a, int b)
{
    for (int i = 0; i < program->n_inputs; i++)
        if (program->input_rates[i] != TE_RATE_UNIFORM && !chains(&run->inputs[i], run, a, b)) return false;
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind <= TE_OUT_ROW && run->outputs[o].data && !chains(&run->outputs[o], run, a, b))
            return false;
    return true;
}

/* Drops dimensions of extent 1 and merges neighbours. The last one stays by itself where rows mean something. */
static void merge_dimensions(te_job *job)
{
    const te_run *run = job->run;
    int           last = run->ndim - 1, n = 0;
    bool          structured = job->compiled->structured;
    for (int d = 0; d <= last; d++) {
        if (run->shape[d] == 1 || (structured && d == last)) continue;
        if (n > 0 && mergeable(job->program, run, job->axis[n - 1], d)) {
            job->outer[n - 1] *= run->shape[d];
            job->axis[n - 1] = (int8_t)d;
        } else {
            job->outer[n] = run->shape[d];
            job->axis[n++] = (int8_t)d;
        }
    }
    if (structured) {
        job->columns = run->shape[last];
        job->column_axis = (int8_t)last;
    } else if (n > 0) {
        job->columns = job->outer[--n];
        job->column_axis = job->axis[n];
    } else {
        job->columns = 1;
        job->column_axis = -1;
    }
    job->n_outer = n;
    job->rows = 1;
    for (int d = 0; d < n; d++) job->rows *= job->outer[d];
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

/* Elements of a tile whose registers fill that much: a multiple of TILE_MIN. */
static int64_t tile_elements(const te_plan *plan, size_t size)
{
    int64_t n = (int64_t)(TILE_BYTES / ((size_t)(plan->n_registers + 1) * size)) / TILE_MIN * TILE_MIN;
    return n < TILE_MIN ? TILE_MIN : n > TILE_MAX ? TILE_MAX : n;
}

static int64_t power_of_two_below(int64_t n)
{
    int64_t p = TILE_MIN;
    while (p * 2 <= n) p *= 2;
    return p;
}

static bool use_plan(te_exec *exec, te_program *program, te_job *job, te_plan_kind kind)
{
    job->kind = kind;
    job->plan = te_compiled_plan(exec, program, kind);
    return job->plan != NULL;
}

/* Whether an operand has as many elements as the run. */
static bool is_whole(const te_job *job, const te_operand *operand)
{
    int axis = job->n_outer ? job->axis[job->n_outer - 1] : job->column_axis;
    return axis >= 0 && operand->stride[axis] != 0;
}

static void measure_tensors(te_job *job)
{
    const te_program *program = job->program;
    const te_operand *in = job->run->inputs, *out = job->run->outputs;
    job->elements = te_job_elements(job);
    job->bytes = 0;
    for (int i = 0; i < program->n_inputs; i++)
        if (program->input_rates[i] == TE_RATE_ELEM && is_whole(job, &in[i]))
            job->bytes += job->elements * (int64_t)te_dtype_size(in[i].dtype);
    for (int o = 0; o < program->n_outputs; o++) {
        bool own = program->outputs[o].kind == TE_OUT_ELEM && out[o].data;
        for (int i = 0; i < program->n_inputs; i++) own = own && in[i].data != out[o].data;
        if (own) job->bytes += job->elements * (int64_t)te_dtype_size(out[o].dtype);
    }
}

/* Whether a run's tensors are too much for the caches together while its outputs are not streamed: then the stores of
 * a row have to wait for memory, and it is better that they do while the next row is summed. Sooner where elementary
 * functions take most of the time, so that bands save little. Rows that are only added up are read fastest one behind
 * the other, but adding those of narrow elements takes longer than reading them. */
static bool stores_wait(const te_job *job)
{
    const te_program *program = job->program;
    for (int o = 0; o < program->n_outputs; o++)
        if (program->outputs[o].kind == TE_OUT_ELEM && job->run->outputs[o].data &&
            te_job_streams(job, (int64_t)te_dtype_size(job->run->outputs[o].dtype)))
            return false;
    if (job->plan->adds && job->bytes < job->elements * (int64_t)sizeof(float)) return false;
    return job->bytes >= (job->compiled->dear ? 16 << 20 : 32 << 20);
}

/* Whether rows become numbers in one go, straight from a tensor. Then nothing has to stay in a cache, and the fewer
 * stops there are between rows, the better the caches are used; from memory it is slower. Of float16, which is loaded
 * first, several rows still begin but once. */
static bool folds_once(const te_job *job)
{
    const te_program *p = job->program;
    const te_operand *in = job->run->inputs;
    if (job->bytes > TE_PAST_CACHES || p->n_inputs != 1 || !job->compiled->reduces_rows) return false;
    if (job->plan->n_turns != 1 || job->plan->n_registers > 1) return false;
    for (int o = 0; o < p->n_outputs; o++)
        if (p->outputs[o].kind != TE_OUT_ROW) return false;
    bool takes = in->dtype == TE_F32 || in->dtype == TE_BF16 || in->dtype == TE_F16;
    return takes && in->stride[job->column_axis] == 1 && !in->block;
}

/* Whether an operand's elements may be used where they lie in a row. */
static bool lies_there(const te_job *job, const te_operand *operand)
{
    bool kind = operand->dtype == TE_F32 || operand->dtype == TE_BF16;
    return kind && is_whole(job, operand) && operand->stride[job->column_axis] == 1 && !operand->block;
}

/* Rows of a band, whose tensors and registers may leave L1 but not L2. What is only added up is added where it lies. */
static int64_t band_rows(const te_job *job)
{
    const te_program *p = job->program;
    int64_t           columns = job->columns, values = job->plan->n_long;
    bool              adds = job->plan->adds, loads = false;
    for (int i = 0; adds && i < p->n_inputs; i++)
        loads |= p->input_rates[i] == TE_RATE_ELEM && !lies_there(job, &job->run->inputs[i]);
    int64_t rows = (loads ? TILE_MAX : adds ? ADDED_ELEMENTS : BAND_ELEMENTS) / columns;
    if (rows * columns * values > BAND_VALUES) rows = BAND_VALUES / (columns * values);
    if (rows > BAND_MAX) rows = BAND_MAX;
    return rows < job->rows ? rows : job->rows;
}

/* Whether rows that mean nothing are apart in memory, as in half of a tensor's columns: then bands save what a row
 * takes to begin, as long as nothing has to be loaded first. */
static bool lies_in_rows(const te_job *job)
{
    const te_program *p = job->program;
    bool              lies = !job->compiled->n_sums && job->n_outer > 0 && job->column_axis >= 0;
    for (int i = 0; lies && i < p->n_inputs; i++)
        if (p->input_rates[i] == TE_RATE_ELEM) lies = lies_there(job, &job->run->inputs[i]);
    for (int o = 0; lies && o < p->n_outputs; o++) lies = lies_there(job, &job->run->outputs[o]);
    return lies;
}

/* Makes the tiles of a TE_PLAN_ROW bands where that may be and is better: wide rows stay in L1 one by one, but sums of
 * columns would push them out. */
static bool take_bands(te_exec *exec, te_program *program, te_job *job)
{
    job->band = false;
    if (!job->blocks->strip || job->rows < 2 || job->columns < TE_FOLD_LANES || job->columns > ADDED_WIDEST ||
        !(job->compiled->structured || lies_in_rows(job)))
        return true;
    if (!use_plan(exec, program, job, TE_PLAN_ROW)) return false;
    bool adds = job->plan->adds || (job->compiled->reduces_rows && job->compiled->columns_summed);
    bool once = folds_once(job);
    if (job->columns % TE_FOLD_LANES && !once) return true; /* a fold knows rows of any length */
    bool wide = job->columns > (once ? ADDED_WIDEST : BAND_WIDEST) && job->bytes > job->rows * BAND_BYTES;
    if (wide && !adds) return true;
    bool    there = job->run->inputs[0].dtype != TE_F16;
    int64_t rows = once ? (there ? FOLDED_ELEMENTS : TILE_MAX) / job->columns : band_rows(job);
    if (rows > job->rows) rows = job->rows;
    if (!job->plan->bands || rows < 2 || (job->columns > SHORT_ROW && stores_wait(job))) return true;
    job->band = true;
    job->tile_rows = rows;
    job->tile_columns = job->columns;
    return true;
}

/* Whether a tile of several rows can be used where it lies, except for what repeats from row to row or along it. */
static bool is_dense_or_repeated(const te_job *job, const te_operand *operand)
{
    int64_t row = operand->stride[job->axis[job->n_outer - 1]], column = operand->stride[job->column_axis];
    return row == 0 || column == 0 || (column == 1 && row == job->columns) ||
           (operand->dtype != TE_F32 && job->columns <= LOADED_ROW);
}

/* Whether tiles hold several rows. Longer ones do where these mean nothing and operands are broadcast, so that a step
 * need not begin anew for each; not where rows are apart, since then one is used where it lies and several are not. */
static bool takes_rows(const te_job *job)
{
    if (job->rows < 2) return false;
    if (job->columns <= SHORT_ROW) return true;
    if (job->compiled->structured || job->compiled->n_sums || job->run->compute_f64 || job->columns > SHARED_ROW)
        return false;
    bool dense = true;
    for (int i = 0; i < job->program->n_inputs; i++)
        if (job->program->input_rates[i] == TE_RATE_ELEM) dense &= is_dense_or_repeated(job, &job->run->inputs[i]);
    for (int o = 0; o < job->program->n_outputs; o++)
        if (job->program->outputs[o].kind == TE_OUT_ELEM && job->run->outputs[o].data)
            dense &= is_dense_or_repeated(job, &job->run->outputs[o]);
    return dense;
}

static bool choose_tile(te_exec *exec, te_program *program, te_job *job)
{
    size_t size = job->blocks->size;
    job->tile_rows = 1;
    if (!take_bands(exec, program, job)) return false;
    if (job->band) return true;
    if (takes_rows(job)) {
        if (!use_plan(exec, program, job, TE_PLAN_ROWS)) return false;
        job->tile_rows = tile_elements(job->plan, size) / (job->columns ? job->columns : 1);
        job->tile_columns = job->columns;
        if (job->tile_rows >= 2) return true;
        job->tile_rows = 1;
    }
    if (!use_plan(exec, program, job, TE_PLAN_ROW)) return false;
    job->tile_columns = tile_elements(job->plan, size);
    if (job->columns <= job->tile_columns) job->tile_columns = job->columns;
    if (!job->compiled->reduces_rows || job->columns == job->tile_columns) return true;
    if ((size_t)(job->plan->n_registers + 1) * size * (size_t)job->columns <= ROW_BYTES) {
        job->tile_columns = job->columns;
        return true;
    }
    if (!use_plan(exec, program, job, TE_PLAN_PASSES)) return false;
    if ((size_t)job->plan->n_kept * size * (size_t)job->columns > KEPT_BYTES &&
        !use_plan(exec, program, job, TE_PLAN_REPEAT))
        return false;
    job->tile_columns = power_of_two_below(2 * tile_elements(job->plan, size));
    return true;
}

/* Lanes of column sums follow from the shape alone, and so do chunks: the sums have the same bits whatever else there
 * is in the program. */
static bool choose_lanes(te_job *job)
{
    job->lanes = 1;
    if (!job->compiled->columns_summed || job->columns < 1 || job->columns >= TE_FOLD_LANES) return false;
    while (job->lanes * job->columns < TE_COLSUM_WIDTH && 16 * job->lanes <= job->rows) job->lanes *= 2;
    if (job->lanes == 1) return false;
    int64_t rows = (job->rows + TE_COLSUM_CHUNKS - 1) / TE_COLSUM_CHUNKS, most = TE_COLSUM_MOST * job->lanes;
    if (rows < TE_CHUNK / job->columns) rows = TE_CHUNK / job->columns;
    if (rows > most) rows = most;
    job->chunk_rows = (rows + job->lanes - 1) / job->lanes * job->lanes;
    if (job->tile_rows > job->chunk_rows) job->tile_rows = job->chunk_rows;
    if (job->tile_rows > job->lanes) job->tile_rows -= job->tile_rows % job->lanes;
    return true;
}

static void choose_chunk_rows(te_job *job)
{
    job->chunk_rows = job->band && folds_once(job) ? job->tile_rows : TE_CHUNK / job->chunk_columns;
    int64_t least = 1;
    if (job->compiled->columns_summed) { /* a chunk's sums are cleared, read and written as often as it has columns */
        least = (job->rows + TE_COLSUM_CHUNKS - 1) / TE_COLSUM_CHUNKS;
        if (least > TE_COLSUM_MOST) least = TE_COLSUM_MOST;
        if (least < TE_COLSUM_ROWS) least = TE_COLSUM_ROWS;
        if (job->chunk_rows > TE_COLSUM_MOST) job->chunk_rows = TE_COLSUM_MOST;
        if (job->tile_rows > TE_COLSUM_MOST) job->tile_rows = TE_COLSUM_MOST;
    }
    if (job->chunk_rows < least) job->chunk_rows = least;
    int64_t tiles = (job->chunk_rows + job->tile_rows - 1) / job->tile_rows;
    if (job->band) job->tile_rows = (job->chunk_rows + tiles - 1) / tiles;
    else job->chunk_rows = tiles * job->tile_rows;
}

static void choose_chunks(te_job *job)
{
    int64_t columns = job->columns ? job->columns : 1;
    job->chunk_columns = columns;
    if (!job->compiled->reduces_rows && job->kind != TE_PLAN_ROWS && columns > TE_CHUNK)
        job->chunk_columns = TE_CHUNK / job->tile_columns * job->tile_columns;
    if (!choose_lanes(job)) choose_chunk_rows(job);
    job->row_chunks = (job->rows + job->chunk_rows - 1) / job->chunk_rows;
    job->column_chunks = (columns + job->chunk_columns - 1) / job->chunk_columns;
}

const te_blocks *te_job_blocks(te_exec *exec, bool compute_f64)
{
    const te_cpu_isa isa = te_cpu(exec)->isa;
#ifdef TE_ISA_HAS_X86
    if (isa == TE_CPU_AVX512 && compute_f64) return &te_program_blocks_f64_avx512;
    if (isa == TE_CPU_AVX2 && compute_f64) return &te_program_blocks_f64_avx2;
#ifdef TE_ISA_HAS_AVX512BF16
    if (isa == TE_CPU_AVX512 && te_cpu(exec)->has_bf16) return &te_program_blocks_avx512bf16;
#endif
    if (isa == TE_CPU_AVX512) return &te_program_blocks_avx512;
    if (isa == TE_CPU_AVX2) return &te_program_blocks_avx2;
#endif
    (void)isa;
    return compute_f64 ? &te_program_blocks_f64_portable : &te_program_blocks_portable;
}

te_status te_job_describe(te_exec *exec, te_program *program, const te_run *run, te_job *job)
{
    job->exec = exec;
    job->program = program;
    job->compiled = program->compiled;
    job->run = run;
    job->blocks = te_job_blocks(exec, run->compute_f64);
    te_status status = te_check_run(exec, program, run);
    if (status != TE_OK) return status;
    merge_dimensions(job);
    measure_tensors(job);
    if (!choose_tile(exec, program, job)) return TE_ERROR_MEMORY;
    choose_chunks(job);
    return TE_OK;
}
