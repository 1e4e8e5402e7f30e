/* emit_run.c - running programs that leave results quantized; see emit.c. */
#include "emit.h"

#include "../program_build.h"

int64_t te_emit_rows(const te_space *s)
{
    int64_t rows = 1;
    for (int i = 0; i + 1 < s->ndim; i++) rows *= s->shape[i];
    return rows;
}

bool te_emit_flatten(int ndim, const int64_t *shape, te_operand *operands, int n)
{
    for (int i = 0; i < n; i++) {
        te_operand *o = &operands[i];
        int64_t rows = 1, step = 0;
        for (int d = ndim - 2; d >= 0 && o->data; d--) {
            if (shape[d] == 1) continue;
            if (rows > 1 && o->stride[d] != rows * step) return false;
            if (rows == 1) step = o->stride[d];
            rows *= shape[d];
        }
        o->stride[1] = o->stride[ndim - 1];
        o->stride[0] = step;
    }
    return true;
}

static void *at_row(const te_operand *o, int64_t row)
{
    return o->data ? (char *)o->data + row * o->stride[0] * (int64_t)te_dtype_size(o->dtype) : NULL;
}

/* Where the rows from `row` on are computed: the stripe, or their place where all of it is kept. */
static void *stripe_at(const te_emission *m, int64_t row)
{
    size_t before = m->way == TE_EMIT_STORED ? (size_t)(row * m->width) * te_dtype_size(m->dtype) : 0;
    return (char *)m->stripe + before;
}

/* The first and the second half of a stripe are outputs of their own behind a gated operation. */
static void point_to_stripe(const te_emission *m, int64_t row, te_operand *outputs)
{
    char *data = stripe_at(m, row);
    outputs[m->output] = (te_operand){.data = data, .dtype = m->dtype, .stride = {m->width, 1}, .block = m->block};
    if (m->second < 0) return;
    outputs[m->second] = outputs[m->output];
    outputs[m->second].data = data + (size_t)(m->block ? m->block : m->width / 2) * te_dtype_size(m->dtype);
}

/* In memory of the host. */
static float factor_of(const te_emission *m) { return m->factor ? *(float *)te_tensor_data(m->factor) : 1; }

/* What becomes of a stripe, while it is in cache. */
static te_status take_stripe(te_emission *m, int64_t row, int64_t n, bool measuring)
{
    if (measuring || m->way == TE_EMIT_STORED) return te_measure_rows(m->target, row, n, stripe_at(m, row), m->amaxes);
    return te_quantize_rows(m->target, row, n, stripe_at(m, row), factor_of(m), m->amaxes);
}

/* Whether a run has a part for a value: one that only measures has none for others. */
static bool takes_part(const te_emission *m, bool measuring) { return !measuring || m->way == TE_EMIT_TWICE; }

/* The operands of rows from `row` on. */
static void bind_stripe(const te_emitting *e, const te_program *program, const te_run *whole, int64_t row,
                        bool measuring, te_operand *in, te_operand *out, te_rng *rngs)
{
    uint64_t words = (uint64_t)(row * whole->shape[1] / 4);
    for (int i = 0; i < program->n_inputs; i++) {
        in[i] = whole->inputs[i];
        in[i].data = at_row(&in[i], row);
    }
    for (int i = 0; i < program->n_outputs; i++) {
        bool by_row = program->outputs[i].kind == TE_OUT_ELEM || program->outputs[i].kind == TE_OUT_ROW;
        out[i] = measuring ? (te_operand){.data = NULL} : whole->outputs[i];
        if (by_row)
            out[i].data = at_row(&out[i], row);
        else
            out[i].accumulate |= row > 0;
    }
    for (int i = 0; i < e->n; i++)
        if (takes_part(&e->of[i], measuring)) point_to_stripe(&e->of[i], row, out);
    for (int i = 0; i < program->n_rngs; i++) {
        rngs[i] = whole->rngs[i];
        rngs[i].offset += words;
    }
}

/* One run of the program, stripe by stripe; whole: over {rows, width}. */
static te_status run_stripes(te_emitting *e, te_program *program, const te_run *whole, int64_t stripe, bool measuring)
{
    te_exec *exec = &e->state->device->exec;
    te_operand in[TE_GRAD_MAX_SOURCES], out[TE_EMIT_OUTPUTS];
    te_rng rngs[TE_UNIT_RNGS];
    te_run run = *whole;
    te_status status = TE_OK;
    run.inputs = in;
    run.outputs = out;
    run.rngs = rngs;
    for (int64_t row = 0; row < whole->shape[0] && status == TE_OK; row += stripe) {
        run.shape[0] = whole->shape[0] - row < stripe ? whole->shape[0] - row : stripe;
        bind_stripe(e, program, whole, row, measuring, in, out, rngs);
        status = exec->backend->program_run(exec, program, &run, 1);
        if (status != TE_OK) return te_fail_exec(e->state->plan->ctx, status, exec, program->name);
        for (int i = 0; i < e->n && status == TE_OK; i++)
            if (takes_part(&e->of[i], measuring)) status = take_stripe(&e->of[i], row, run.shape[0], measuring);
    }
    return status;
}

static te_status open_emission(te_emitting *e, te_emission *m)
{
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, e->space->shape, sizeof shape);
    shape[e->space->ndim - 1] = m->width;
    if (m->again) {
        m->factor = m->again->scale ? te_tensor_retain(m->again->scale) : NULL;
        return te_quantized_open(e->state->device, &m->recipe->quantizers[m->role], m->dtype, e->space->ndim,
                                 shape, m->want, true, m->target);
    }
    return te_role_open(m->state, m->recipe, m->role, e->state->device, m->dtype, e->space->ndim, shape, m->want,
                        m->target, &m->factor);
}

static te_status open_stripe(te_emitting *e, te_emission *m, int64_t stripe)
{
    te_exec *exec = &e->state->device->exec;
    int64_t rows = m->way == TE_EMIT_STORED ? te_emit_rows(e->space) : stripe;
    m->stripe = exec->scratch(exec, (size_t)(rows * m->width) * te_dtype_size(m->dtype));
    return m->stripe ? TE_OK : te_fail_memory(e->state->plan->ctx, "quantize");
}

/* The half of a matrix that an output is, as a job of its own: columns of the source from `first` on. */
static te_quantize_job half_of(const te_quantizer *q, te_quantize_job job, int64_t first, int64_t width)
{
    static const int64_t factor[] = {4, 1, 1};
    te_quantized_side *rows = &job.side[0], *columns = &job.side[1];
    int64_t blocks = q->block_rows ? first / q->block_cols : 0;
    int64_t lines = q->block_rows ? first / (q->replicated ? 1 : q->block_rows) : 0;
    job.cols = width;
    if (rows->data) { /* random bits are numbered along whole rows */
        rows->line_groups = (rows->cols + 15) / 16;
        rows->rng.offset += (uint64_t)first / 16;
        rows->cols = width;
        rows->data += first * rows->col_stride / (q->element == TE_E2M1 ? 2 : 1);
        rows->scale_inv = (char *)rows->scale_inv + blocks * rows->scale_col_stride * factor[q->scale];
    }
    if (columns->data) {
        columns->rng.offset += (uint64_t)first * (uint64_t)((columns->cols + 15) / 16);
        columns->rows = width;
        columns->data += first * columns->row_stride;
        columns->scale_inv = (char *)columns->scale_inv + lines * columns->scale_row_stride * factor[q->scale];
    }
    return job;
}

static bool any(const te_emitting *e, te_emit_way way)
{
    for (int i = 0; i < e->n; i++)
        if (e->of[i].way == way) return true;
    return false;
}

/* The program with an amax more for each value that is stored, rounded as that is. */
static te_program *with_amaxes(te_emitting *e, const te_program *program)
{
    if (*e->measuring || !any(e, TE_EMIT_STORED)) return *e->measuring;
    te_program *p = te_program_clone(program);
    bool ok = p != NULL;
    for (int i = 0; i < e->n && ok; i++) {
        const te_emission *m = &e->of[i];
        if (m->way != TE_EMIT_STORED) continue;
        int value = p->outputs[m->output].value;
        if (m->dtype != TE_F32)
            value = te_program_emit(p, m->dtype == TE_BF16 ? TE_PW_TO_BF16 : TE_PW_TO_F16, value, -1, -1);
        ok = value >= 0 && te_program_output(p, TE_OUT_AMAX, value) >= 0;
    }
    if (!ok) te_program_free(p);
    return *e->measuring = ok ? p : NULL;
}

/* A dense value where the program would have left it. */
static te_operand dense(const te_emission *m, const te_run *run)
{
    te_operand o = {.data = m->stripe, .dtype = m->dtype};
    int64_t step = 1;
    for (int d = run->ndim - 1; d >= 0; d--) {
        o.stride[d] = step;
        step *= run->shape[d];
    }
    return o;
}

/* One run of a backend that emits; jobs: in the order of the emissions, two for the halves of one matrix. */
static te_status run_tiles(te_emitting *e, te_program *program, const te_run *whole, int n_outputs,
                           te_quantize_job *jobs, bool measuring)
{
    te_exec *exec = &e->state->device->exec;
    te_operand outputs[TE_EMIT_OUTPUTS];
    te_run run = *whole;
    int n = 0, amaxes = n_outputs;
    for (int i = 0; i < program->n_outputs; i++)
        outputs[i] = measuring || i >= n_outputs ? (te_operand){.data = NULL} : whole->outputs[i];
    run.outputs = outputs;
    for (int i = 0; i < e->n; i++) {
        const te_emission *m = &e->of[i];
        bool stored = m->way == TE_EMIT_STORED, there = takes_part(m, measuring) && !stored;
        for (int half = 0; half < (m->second < 0 ? 1 : 2); half++, n++) {
            if (m->way == TE_EMIT_TWICE) jobs[n].step = measuring ? TE_QUANTIZE_MEASURE : TE_QUANTIZE_CONVERT;
            outputs[half ? m->second : m->output] =
                (te_operand){.dtype = m->dtype, .quantized = there ? &jobs[n] : NULL};
        }
        if (!stored || measuring) continue;
        outputs[m->output] = dense(m, whole);
        outputs[amaxes++] = (te_operand){.data = te_tensor_pointer(m->measured), .dtype = TE_F32};
    }
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(e->state->plan->ctx, status, exec, program->name);
}

/* Room for the amaxes of the whole, which start at 0 where tiles raise them, and for what is stored. */
static te_status open_amaxes(te_emitting *e, te_emission *m, te_quantize_job *job)
{
    te_context *ctx = e->state->plan->ctx;
    te_tensor *rows = m->target->quantizer.row_scaled ? m->target->side[0].amax : NULL;
    if (m->way == TE_EMIT_AT_ONCE) return TE_OK;
    m->measured = te_tensor_new(ctx, e->state->device, TE_F32, 1, (int64_t[]){2});
    if (!m->measured) return ctx->status;
    job->amaxes = te_tensor_pointer(m->measured);
    if (m->way == TE_EMIT_STORED) return open_stripe(e, m, 0);
    te_status status = te_tensor_fill(m->measured, 0);
    return status == TE_OK && rows ? te_tensor_fill(rows, 0) : status;
}

/* What was stored, by the amax that was taken on the way. */
static te_status quantize_stored(te_emitting *e, te_emission *m, te_quantize_job *job)
{
    te_exec *exec = &e->state->device->exec;
    job->step = TE_QUANTIZE_CONVERT;
    job->source = m->stripe;
    job->source_stride = m->width;
    te_status status = exec->backend->quantize(exec, job);
    return status == TE_OK ? TE_OK : te_fail_exec(e->state->plan->ctx, status, exec, "quantize");
}

static te_status run_in_tiles(te_emitting *e, te_program *program, const te_run *run)
{
    te_exec *exec = &e->state->device->exec;
    te_quantize_job jobs[TE_EMIT_VALUES + TE_EMIT_TILES];
    te_program *measuring = with_amaxes(e, program);
    te_status status = measuring || !any(e, TE_EMIT_STORED) ? TE_OK : te_fail_memory(e->state->plan->ctx, "fuser");
    int n = 0;
    for (int i = 0; i < e->n && status == TE_OK; i++) {
        te_emission *m = &e->of[i];
        te_tensor *seen = m->again ? NULL : te_role_seen(m->state, m->recipe, m->role);
        te_quantize_job job = te_quantized_job(m->target, m->factor, seen);
        int64_t half = m->width / 2;
        status = open_amaxes(e, m, &job);
        jobs[n++] = m->second < 0 ? job : half_of(&m->target->quantizer, job, 0, half);
        if (m->second >= 0) jobs[n++] = half_of(&m->target->quantizer, job, half, half);
    }
    if (status == TE_OK && any(e, TE_EMIT_TWICE)) status = run_tiles(e, program, run, program->n_outputs, jobs, true);
    if (status == TE_OK) status = run_tiles(e, measuring ? measuring : program, run, program->n_outputs, jobs, false);
    for (int i = e->n - 1; i >= 0; i--) {
        te_emission *m = &e->of[i];
        n -= m->second < 0 ? 1 : 2;
        if (status == TE_OK && m->way == TE_EMIT_STORED) status = quantize_stored(e, m, &jobs[n]);
        if (m->stripe) exec->scratch_free(exec, m->stripe);
        te_tensor_release(m->measured);
    }
    return status;
}

static te_status run_in_stripes(te_emitting *e, te_program *program, const te_run *run)
{
    te_exec *exec = &e->state->device->exec;
    te_operand inputs[TE_GRAD_MAX_SOURCES], outputs[TE_EMIT_OUTPUTS];
    te_run flat = *run;
    te_status status = TE_OK;
    memcpy(inputs, run->inputs, (size_t)program->n_inputs * sizeof *inputs);
    memcpy(outputs, run->outputs, (size_t)program->n_outputs * sizeof *outputs);
    te_emit_flatten(run->ndim, run->shape, inputs, program->n_inputs);
    te_emit_flatten(run->ndim, run->shape, outputs, program->n_outputs); /* dense, all of them */
    flat.ndim = 2;
    flat.shape[0] = te_emit_rows(e->space);
    flat.shape[1] = run->shape[run->ndim - 1];
    flat.inputs = inputs;
    flat.outputs = outputs;
    int64_t stripe = te_emit_stripe(e);
    for (int i = 0; i < e->n && status == TE_OK; i++) status = open_stripe(e, &e->of[i], stripe);
    if (status == TE_OK && any(e, TE_EMIT_TWICE)) status = run_stripes(e, program, &flat, stripe, true);
    if (status == TE_OK) status = run_stripes(e, program, &flat, stripe, false);
    for (int i = e->n - 1; i >= 0; i--) {
        te_emission *m = &e->of[i];
        if (m->way == TE_EMIT_STORED && status == TE_OK)
            status = te_quantize_rows(m->target, 0, flat.shape[0], m->stripe, 1, m->amaxes);
        if (m->stripe) exec->scratch_free(exec, m->stripe);
    }
    return status;
}

te_status te_emitting_run(te_emitting *e, te_program *program, const te_run *run)
{
    te_status status = TE_OK;
    for (int i = 0; i < e->n && status == TE_OK; i++) status = open_emission(e, &e->of[i]);
    if (status == TE_OK)
        status =
            e->state->device->exec.backend->emits ? run_in_tiles(e, program, run) : run_in_stripes(e, program, run);
    for (int i = 0; i < e->n; i++) {
        const te_emission *m = &e->of[i];
        bool first = !m->again && m->role == TE_ROLE_INPUT && e->state->plan->values[m->value].again;
        if (status == TE_OK && !m->again) status = te_role_close(m->state, m->recipe, m->role, m->target);
        if (status == TE_OK && first) status = te_role_keep_factor(m->state, m->role, m->factor, m->target);
        te_tensor_release(m->factor);
    }
    return status;
}
