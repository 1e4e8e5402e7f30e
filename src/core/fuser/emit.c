/* emit.c - programs that leave a result quantized, where a product alone reads it.
 *
 * Where the factor of a block follows from the block, or is known beforehand, a result need not be whole before it is quantized.
 * The program then runs over one stripe of rows after the other, and each stripe is quantized for both directions while it
 * is in cache; the result itself is never stored. What fits in cache anyway takes the way of other results: a kernel less
 * often costs less than its bytes. Sums over columns go on from stripe to stripe, in an order that depends on the shape alone.
 *
 * A device whose backend emits takes the quantization as part of the output instead (te_operand.quantized): its kernel quantizes
 * tile after tile, however many rows there are. */
#include "emit.h"

enum { STRIPE_BYTES = 1 << 20, STRIPE_ROWS = 128, TILE = 128 };

/* --- plans -------------------------------------------------------------------------------------------------------- */

bool te_quantizer_is_local(const te_quantizer *q)
{
    return q->element != TE_E2M1 && q->scale != TE_SCALE_E4M3 && !q->hadamard && !q->stochastic &&
           (q->needs_history || q->block_rows);
}

static bool emits(const te_unit *product, te_role role)
{
    const te_product_recipe *recipe = product->recipe;
    return recipe && recipe->quantized[role] && te_quantizer_is_local(&recipe->quantizers[role]) &&
           (role == TE_ROLE_INPUT || recipe->backward == TE_BACKWARD_QUANTIZED);
}

/* Between one program and one product, and seen by nobody else. */
static bool between(const te_fuse_plan *plan, const te_plan_value *v, te_unit_kind maker, te_unit_kind reader)
{
    return v->cls == TE_VALUE_TOKENS && v->unit >= 0 && v->output < 0 && v->first_reader >= 0 &&
           v->first_reader == v->last_reader && plan->units[v->unit].kind == maker &&
           plan->units[v->first_reader].kind == reader;
}

void te_plan_mark_emissions(te_fuse_plan *plan)
{
    for (int i = 0; i < plan->n_values && plan->x_ndim > 1; i++) {
        te_plan_value *v = &plan->values[i];
        if (between(plan, v, TE_UNIT_PROGRAM, TE_UNIT_LINEAR)) {
            const te_unit *product = &plan->units[v->first_reader];
            bool high = product->recipe && product->recipe->backward == TE_BACKWARD_HIGH_PRECISION;
            v->emitted = emits(product, TE_ROLE_INPUT) && !high && !v->saved && v->dtype == product->compute;
        } else if (between(plan, v, TE_UNIT_LINEAR, TE_UNIT_PROGRAM)) {
            const te_unit *product = &plan->units[v->unit];
            bool bias = product->bias != TE_NO_VALUE && plan->values[product->bias].wanted && !product->bias_elsewhere;
            bool read = plan->values[product->x].wanted || plan->values[product->weight].wanted; /* not for a bias alone */
            v->emitted = v->wanted && read && emits(product, TE_ROLE_GRAD_OUTPUT) && !bias && v->dtype == product->compute;
        }
    }
}

/* --- what a run emits --------------------------------------------------------------------------------------------- */

static void add(te_emitting *e, int output, int value, const te_unit *product, te_role role, bool rowwise, bool columnwise)
{
    te_group_state *state = e->state;
    const te_plan_value *v = &state->plan->values[value];
    e->of[e->n++] = (te_emission){
        .output = output, .second = -1, .value = value, .role = role, .dtype = v->dtype, .width = v->width,
        .state = state->plan->nodes[product->nodes[0]].recipe_state, .want = {rowwise, columnwise},
        .target = &state->emitted[2 * product->product + (role == TE_ROLE_GRAD_OUTPUT)]};
}

static int64_t rows_of(const te_group_state *state)
{
    int64_t rows = 1;
    for (int i = 0; i + 1 < state->ndim; i++) rows *= state->shape[i];
    return rows;
}

/* Rows of a stripe, a multiple of what blocks and random numbers need; all rows when there is nothing to gain. `bytes`: of a row
 * of all that is emitted. */
static int64_t stripe_of(int64_t rows, int64_t bytes)
{
    int64_t stripe = bytes ? STRIPE_BYTES / bytes / STRIPE_ROWS * STRIPE_ROWS : rows;
    if (stripe < STRIPE_ROWS) stripe = STRIPE_ROWS;
    return rows >= 2 * stripe ? stripe : rows;
}

static int64_t stripe_rows(const te_emitting *e)
{
    int64_t bytes = 0;
    for (int i = 0; i < e->n; i++) bytes += e->of[i].width * (int64_t)te_dtype_size(e->of[i].dtype);
    return stripe_of(rows_of(e->state), bytes);
}

/* Halves of one matrix are tiles of their own, so blocks must not lie across their border. */
static bool halves_apart(const te_quantizer *q, int64_t width) { return !q->block_rows || width / 2 % TILE == 0; }

/* How many tiles a value takes in the kernel of a program on a device, more than there are where it cannot be. */
static int tiles_of(const te_fuse_plan *plan, int value, bool forward)
{
    const te_plan_value *v = &plan->values[value];
    const te_unit *maker = &plan->units[forward ? v->unit : v->first_reader];
    const te_unit *product = &plan->units[forward ? v->first_reader : v->unit];
    const te_quantizer *q = &product->recipe->quantizers[forward ? TE_ROLE_INPUT : TE_ROLE_GRAD_OUTPUT];
    bool halves = false, interleaved = false;
    for (int i = 0; !forward && i < maker->n_slots; i++) {
        if (maker->slots[i].value != value) continue;
        halves |= maker->slots[i].part.half != 0;
        interleaved |= maker->slots[i].part.block != 0;
    }
    if (maker->compute_f64 || interleaved || (halves && !halves_apart(q, v->width))) return TE_EMIT_TILES + 1;
    return (int)te_dtype_size(v->dtype) / 2 * (halves ? 2 : 1);
}

bool te_plan_emits(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows)
{
    const te_plan_value *v = &plan->values[value];
    int64_t bytes = 0;
    int tiles = 0;
    if (!v->emitted) return false;
    bool forward = plan->units[v->unit].kind == TE_UNIT_PROGRAM;
    for (int i = 0; i < plan->n_values; i++) { /* all that the same program emits in the same pass */
        const te_plan_value *w = &plan->values[i];
        bool together = w->emitted && (forward ? w->unit == v->unit
                                               : w->unit >= 0 && plan->units[w->unit].kind == TE_UNIT_LINEAR &&
                                                     w->first_reader == v->first_reader);
        if (!together) continue;
        bytes += w->width * (int64_t)te_dtype_size(w->dtype);
        tiles += tiles_of(plan, i, forward);
    }
    if (device->exec.backend->emits) return tiles <= TE_EMIT_TILES;
    return stripe_of(rows, bytes) < rows;
}

/* Operands over {rows, width}: false when the rows of one are not evenly spaced. */
static bool flatten(int ndim, const int64_t *shape, te_operand *operands, int n)
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

/* Whether somebody counts what quantizing does, for which a result has to be whole. */
static bool is_watched(const te_emitting *e)
{
    for (int i = 0; i < e->n; i++)
        if (e->of[i].state->watched) return true;
    return false;
}

static bool pays(te_emitting *e, const te_space *s, const te_operand *inputs, int n_inputs)
{
    te_operand flat[TE_GRAD_MAX_SOURCES];
    const te_device *device = e->state->device;
    bool emits = e->n > 0 && !is_watched(e) && te_plan_emits(e->state->plan, device, e->of[0].value, rows_of(e->state));
    memcpy(flat, inputs, (size_t)n_inputs * sizeof *flat);
    if (emits && !device->exec.backend->emits)
        emits = device->exec.backend->host_memory && flatten(s->ndim, s->shape, flat, n_inputs);
    if (!emits) e->n = 0;
    return emits;
}

bool te_emitting_forward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                         te_emitting *e)
{
    const te_fuse_plan *plan = state->plan;
    e->state = state; /* entries are written whole where there are any */
    e->n = 0;
    for (int i = 0; i < unit->n_results; i++) {
        const te_plan_value *v = &plan->values[unit->results[i]];
        if (!v->emitted) continue;
        const te_unit *product = &plan->units[v->first_reader];
        bool columnwise = product->recipe->backward == TE_BACKWARD_QUANTIZED && plan->values[product->weight].wanted;
        add(e, i, unit->results[i], product, TE_ROLE_INPUT, true, columnwise);
    }
    return pays(e, s, inputs, unit->gradient.forward->n_inputs);
}

bool te_emitting_backward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                          te_emitting *e)
{
    const te_fuse_plan *plan = state->plan;
    e->state = state; /* entries are written whole where there are any */
    e->n = 0;
    for (int k = 0; k < unit->n_grads; k++) {
        const te_unit_slot *slot = &unit->slots[unit->grads[k].slot];
        const te_plan_value *v = &plan->values[slot->value];
        te_emission *first = te_emission_of(e, slot->value);
        if (unit->grads[k].bias != TE_NO_VALUE || unit->grads[k].kind != TE_OUT_ELEM || !v->emitted || v->unit < 0 ||
            plan->units[v->unit].kind != TE_UNIT_LINEAR)
            continue;
        if (first) {
            first->second = k;
            continue;
        }
        const te_unit *product = &plan->units[v->unit];
        add(e, k, slot->value, product, TE_ROLE_GRAD_OUTPUT, plan->values[product->x].wanted,
            plan->values[product->weight].wanted);
        e->of[e->n - 1].block = slot->part.block;
    }
    return pays(e, s, inputs, unit->gradient.backward->n_inputs);
}

te_emission *te_emission_of(te_emitting *e, int value)
{
    for (int i = 0; i < e->n; i++)
        if (e->of[i].value == value) return &e->of[i];
    return NULL;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static void *at_row(const te_operand *o, int64_t row)
{
    return o->data ? (char *)o->data + row * o->stride[0] * (int64_t)te_dtype_size(o->dtype) : NULL;
}

/* The first and the second half of a stripe are outputs of their own behind a gated operation. */
static void point_to_stripe(const te_emission *m, te_operand *outputs)
{
    outputs[m->output] = (te_operand){.data = m->stripe, .dtype = m->dtype, .stride = {m->width, 1}, .block = m->block};
    if (m->second < 0) return;
    outputs[m->second] = outputs[m->output];
    outputs[m->second].data = (char *)m->stripe + (size_t)(m->block ? m->block : m->width / 2) * te_dtype_size(m->dtype);
}

/* In memory of the host. */
static float factor_of(const te_emission *m) { return m->factor ? *(float *)te_tensor_data(m->factor) : 1; }

static te_status run_stripes(te_emitting *e, te_program *program, const te_run *whole, const te_operand *inputs,
                             const te_operand *outputs, int64_t stripe)
{
    te_exec *exec = &e->state->device->exec;
    te_context *ctx = e->state->plan->ctx;
    te_operand in[TE_GRAD_MAX_SOURCES], out[TE_EMIT_OUTPUTS];
    te_rng rngs[TE_UNIT_RNGS];
    te_run run = *whole;
    int64_t rows = rows_of(e->state), width = whole->shape[whole->ndim - 1];
    run.ndim = 2;
    run.shape[1] = width;
    run.inputs = in;
    run.outputs = out;
    run.rngs = rngs;
    for (int64_t row = 0; row < rows; row += stripe) {
        run.shape[0] = rows - row < stripe ? rows - row : stripe;
        for (int i = 0; i < program->n_inputs; i++) {
            in[i] = inputs[i];
            in[i].data = at_row(&inputs[i], row);
        }
        for (int i = 0; i < program->n_outputs; i++) {
            bool by_row = program->outputs[i].kind == TE_OUT_ELEM || program->outputs[i].kind == TE_OUT_ROW;
            out[i] = outputs[i];
            if (by_row)
                out[i].data = at_row(&outputs[i], row);
            else
                out[i].accumulate |= row > 0;
        }
        for (int i = 0; i < e->n; i++) point_to_stripe(&e->of[i], out);
        for (int i = 0; i < program->n_rngs; i++) {
            rngs[i] = whole->rngs[i];
            rngs[i].offset += (uint64_t)(row * width / 4);
        }
        te_status status = exec->backend->program_run(exec, program, &run, 1);
        if (status != TE_OK) return te_fail_exec(ctx, status, exec, program->name);
        for (int i = 0; i < e->n && status == TE_OK; i++) {
            te_emission *m = &e->of[i];
            status = te_quantize_rows(m->target, row, run.shape[0], m->stripe, factor_of(m), &m->amax);
        }
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

static te_status open_emission(te_emitting *e, te_emission *m)
{
    te_group_state *state = e->state;
    int64_t shape[TE_MAX_DIMS];
    memcpy(shape, state->shape, sizeof shape);
    shape[state->ndim - 1] = m->width;
    return te_role_open(m->state, m->role, state->device, m->dtype, state->ndim, shape, m->want, m->target, &m->factor);
}

static te_status open_stripe(te_emitting *e, te_emission *m, int64_t stripe)
{
    te_exec *exec = &e->state->device->exec;
    m->stripe = exec->scratch(exec, (size_t)(stripe * m->width) * te_dtype_size(m->dtype));
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
    if (rows->data) {
        rows->cols = width;
        rows->data += first * rows->col_stride;
        rows->scale_inv = (char *)rows->scale_inv + blocks * rows->scale_col_stride * factor[q->scale];
    }
    if (columns->data) {
        columns->rows = width;
        columns->data += first * columns->row_stride;
        columns->scale_inv = (char *)columns->scale_inv + lines * columns->scale_row_stride * factor[q->scale];
    }
    return job;
}

/* One run of a backend that emits. */
static te_status run_emitting(te_emitting *e, te_program *program, const te_run *whole)
{
    te_exec *exec = &e->state->device->exec;
    te_operand outputs[TE_EMIT_OUTPUTS];
    te_quantize_job jobs[TE_EMIT_TILES];
    te_run run = *whole;
    int n = 0;
    memcpy(outputs, whole->outputs, (size_t)program->n_outputs * sizeof *outputs);
    run.outputs = outputs;
    for (int i = 0; i < e->n; i++) {
        te_emission *m = &e->of[i];
        te_quantize_job job = te_quantized_job(m->target, m->factor);
        int64_t half = m->width / 2;
        outputs[m->output] = (te_operand){.dtype = m->dtype, .quantized = &jobs[n]};
        jobs[n++] = m->second < 0 ? job : half_of(&m->target->quantizer, job, 0, half);
        if (m->second < 0) continue;
        outputs[m->second] = (te_operand){.dtype = m->dtype, .quantized = &jobs[n]};
        jobs[n++] = half_of(&m->target->quantizer, job, half, half);
    }
    te_status status = exec->backend->program_run(exec, program, &run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(e->state->plan->ctx, status, exec, program->name);
}

static te_status run_in_stripes(te_emitting *e, te_program *program, const te_run *run)
{
    te_exec *exec = &e->state->device->exec;
    te_operand inputs[TE_GRAD_MAX_SOURCES], outputs[TE_EMIT_OUTPUTS];
    te_status status = TE_OK;
    memcpy(inputs, run->inputs, (size_t)program->n_inputs * sizeof *inputs);
    memcpy(outputs, run->outputs, (size_t)program->n_outputs * sizeof *outputs);
    flatten(run->ndim, run->shape, inputs, program->n_inputs);
    flatten(run->ndim, run->shape, outputs, program->n_outputs); /* dense, all of them */
    int64_t stripe = stripe_rows(e);
    for (int i = 0; i < e->n && status == TE_OK; i++) status = open_stripe(e, &e->of[i], stripe);
    if (status == TE_OK) status = run_stripes(e, program, run, inputs, outputs, stripe);
    for (int i = 0; i < e->n; i++)
        if (e->of[i].stripe) exec->scratch_free(exec, e->of[i].stripe);
    return status;
}

te_status te_emitting_run(te_emitting *e, te_program *program, const te_run *run)
{
    te_status status = TE_OK;
    for (int i = 0; i < e->n && status == TE_OK; i++) status = open_emission(e, &e->of[i]);
    if (status == TE_OK)
        status = e->state->device->exec.backend->emits ? run_emitting(e, program, run) : run_in_stripes(e, program, run);
    for (int i = 0; i < e->n; i++) {
        if (status == TE_OK) status = te_role_close(e->of[i].state, e->of[i].role, e->of[i].target);
        te_tensor_release(e->of[i].factor);
    }
    return status;
}
