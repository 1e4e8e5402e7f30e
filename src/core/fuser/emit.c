/* emit.c - programs that leave a result quantized, where a product alone reads it: which do, and how.
 *
 * Where the factor of a block follows from the block, or is known beforehand, a result need not be whole before it is
 * quantized. The program then runs over one stripe of rows after the other, and each stripe is quantized for both
 * directions while it is in cache; the result itself is never stored. What fits in cache anyway takes the way of other
 * results: a kernel less often costs less than its bytes. Sums over columns go on from stripe to stripe, in an order
 * that depends on the shape alone.
 *
 * Where a factor follows from the amax of the whole result (te_quantizer_measures) there are two ways. The program runs
 * twice: first for the amaxes alone, each stripe forgotten as soon as it is measured, then again for the bytes. Or the
 * result is stored, measured stripe by stripe on the way, and quantized when it is whole. The first reads the inputs of
 * the result again and computes it again; the second writes the result, for which memory is read too, and reads it
 * back. What costs less is taken: memory is one for all threads, computing is shared by them, so few threads store and
 * many compute.
 *
 * A device whose backend emits takes the quantization as part of the output instead (te_operand.quantized): its kernel
 * quantizes tile after tile, however many rows there are. To store and measure is one kernel there too, whose program
 * has the amax as an output more; the amax of a transform needs tiles.
 *
 * An operand that backward computes again for a weight gradient (recompute.c) is emitted by the gradient program, with
 * the factor that forward had, where no amax is needed. */
#include "emit.h"

enum { STRIPE_BYTES = 1 << 20, STRIPE_ROWS = 128, TILE = 128 };

/* --- plans -------------------------------------------------------------------------------------------------------- */

bool te_quantizer_is_local(const te_quantizer *q)
{
    return q->element != TE_E2M1 && q->scale != TE_SCALE_E4M3 && !q->hadamard && !q->stochastic &&
           (q->needs_history || q->block_rows);
}

const te_product_recipe *te_emitted_recipe(const te_unit *product)
{
    return product->kind == TE_UNIT_ATTENTION ? product->attention : product->recipe;
}

bool te_emitted_columns(const te_fuse_plan *plan, const te_unit *product, te_role role)
{
    bool later = role == TE_ROLE_INPUT && plan->values[product->x].again;
    return product->kind == TE_UNIT_LINEAR && product->recipe->backward == TE_BACKWARD_QUANTIZED &&
           plan->values[product->weight].wanted && !later;
}

/* Random bits are drawn when quantizing begins: nothing else may draw between the program and the product, `distance`
 * units on. */
static bool emits(const te_unit *product, te_role role, int distance)
{
    const te_product_recipe *recipe = te_emitted_recipe(product);
    return recipe && recipe->quantized[role] && (role == TE_ROLE_INPUT || recipe->backward == TE_BACKWARD_QUANTIZED) &&
           (!recipe->quantizers[role].stochastic || distance == 1);
}

/* Between one program and one product, and seen by nobody else. */
static bool between(const te_fuse_plan *plan, const te_plan_value *v, te_unit_kind maker, te_unit_kind reader)
{
    return v->cls == TE_VALUE_TOKENS && plan->frames[v->space].ndim > 1 && v->unit >= 0 && v->output < 0 &&
           v->first_reader >= 0 && v->first_reader == v->last_reader && plan->units[v->unit].kind == maker &&
           plan->units[v->first_reader].kind == reader;
}

static void mark(te_fuse_plan *plan)
{
    for (int i = 0; i < plan->n_values; i++) {
        te_plan_value *v = &plan->values[i];
        if (between(plan, v, TE_UNIT_PROGRAM, TE_UNIT_LINEAR)) {
            const te_unit *product = &plan->units[v->first_reader];
            bool high = product->recipe && product->recipe->backward == TE_BACKWARD_HIGH_PRECISION;
            v->emitted = emits(product, TE_ROLE_INPUT, v->first_reader - v->unit) && !high && !v->saved &&
                         v->dtype == product->compute;
        } else if (between(plan, v, TE_UNIT_PROGRAM, TE_UNIT_ATTENTION)) {
            const te_unit *call = &plan->units[v->first_reader];
            v->emitted = emits(call, TE_ROLE_INPUT, v->first_reader - v->unit) && !v->saved &&
                         v->dtype == call->compute && !te_plan_turns(&plan->nodes[call->nodes[0]]);
        } else if (between(plan, v, TE_UNIT_LINEAR, TE_UNIT_PROGRAM)) {
            const te_unit *product = &plan->units[v->unit];
            bool bias = product->bias != TE_NO_VALUE && plan->values[product->bias].wanted && !product->bias_elsewhere;
            /* not for a bias alone */
            bool read = plan->values[product->x].wanted || plan->values[product->weight].wanted;
            v->emitted = v->wanted && read && emits(product, TE_ROLE_GRAD_OUTPUT, v->first_reader - v->unit) && !bias &&
                         v->dtype == product->compute;
        }
    }
}

const te_unit *te_emitted_product(const te_fuse_plan *plan, int value, te_role *role)
{
    const te_plan_value *v = &plan->values[value];
    bool forward = plan->units[v->unit].kind == TE_UNIT_PROGRAM;
    *role = forward ? TE_ROLE_INPUT : TE_ROLE_GRAD_OUTPUT;
    return &plan->units[forward ? v->first_reader : v->unit];
}

const te_quantizer *te_emitted_quantizer(const te_fuse_plan *plan, int value)
{
    te_role role;
    const te_unit *product = te_emitted_product(plan, value, &role);
    return &te_emitted_recipe(product)->quantizers[role];
}

te_status te_plan_mark_emissions(te_fuse_plan *plan)
{
    te_status status = TE_OK;
    mark(plan);
    for (int u = 0; u < plan->n_units && status == TE_OK; u++) {
        te_unit *unit = &plan->units[u];
        if (unit->kind != TE_UNIT_PROGRAM) continue;
        status = te_emit_cost_of(plan, unit, true);
        if (status == TE_OK) status = te_emit_cost_of(plan, unit, false);
    }
    return status;
}

/* --- what a run emits --------------------------------------------------------------------------------------------- */

int te_emitted_by(const te_fuse_plan *plan, const te_unit *unit, bool forward, int output)
{
    if (forward) return plan->values[unit->results[output]].emitted ? unit->results[output] : TE_NO_VALUE;
    const te_unit_grad *grad = &unit->grads[output];
    const te_plan_value *v = &plan->values[unit->slots[grad->slot].value];
    bool emitted = grad->bias == TE_NO_VALUE && grad->kind == TE_OUT_ELEM && v->emitted && v->unit >= 0 &&
                   plan->units[v->unit].kind == TE_UNIT_LINEAR;
    return emitted ? unit->slots[grad->slot].value : TE_NO_VALUE;
}

/* Rows of a stripe, a multiple of what blocks and random numbers need; all rows when there is nothing to gain. `bytes`:
 * of a row of all that is emitted. */
static int64_t stripe_of(int64_t rows, int64_t bytes)
{
    int64_t stripe = bytes ? STRIPE_BYTES / bytes / STRIPE_ROWS * STRIPE_ROWS : rows;
    if (stripe < STRIPE_ROWS) stripe = STRIPE_ROWS;
    return rows >= 2 * stripe ? stripe : rows;
}

int64_t te_emit_stripe(const te_emitting *e)
{
    int64_t bytes = 0;
    for (int i = 0; i < e->n; i++) bytes += e->of[i].width * (int64_t)te_dtype_size(e->of[i].dtype);
    return stripe_of(te_emit_rows(e->space), bytes);
}

/* Halves of one matrix are tiles of their own, so blocks must not lie across their border. */
static bool halves_apart(const te_quantizer *q, int64_t width) { return !q->block_rows || width / 2 % TILE == 0; }

/* How many tiles a value takes in the kernel of a program on a device, more than there are where it cannot be. */
static int tiles_of(const te_fuse_plan *plan, int value, bool forward)
{
    const te_plan_value *v = &plan->values[value];
    const te_unit *maker = &plan->units[forward ? v->unit : v->first_reader];
    const te_quantizer *q = te_emitted_quantizer(plan, value);
    bool halves = false, interleaved = false;
    for (int i = 0; !forward && i < maker->n_slots; i++) {
        if (maker->slots[i].value != value) continue;
        halves |= maker->slots[i].part.half != 0;
        interleaved |= maker->slots[i].part.block != 0;
    }
    if (maker->compute_f64 || interleaved || (halves && !halves_apart(q, v->width))) return TE_EMIT_TILES + 1;
    return (int)te_dtype_size(v->dtype) / 2 * (halves ? 2 : 1);
}

/* In memory: running again reads the inputs, and on a device once more for values of rows in each run; storing writes
 * and reads what is quantized, and reads what is measured where that is a kernel of its own, or on the host what is
 * written over. There computing shows as well. On a device bytes alone are counted, which both ways take over one
 * bandwidth: it cancels. That holds up to some 14 instructions an element of bfloat16, where an H200 computes as long
 * as it reads (33 T/s beside 4.8 TB/s); what a dearer program, like GELU's, loses by running again has not been timed
 * on one. */
static bool twice_pays(const te_emit_cost *cost, const te_exec *exec)
{
    bool host = exec->backend->host_memory;
    int64_t threads = exec->threads > 0 ? exec->threads : 1;
    int64_t again = host ? cost->read + cost->work / threads : cost->read * (cost->reduces ? 3 : 1);
    return again <= (host || !cost->whole ? 3 : 2) * cost->stored && !(host && cost->stochastic);
}

static te_emit_way way_of(const te_fuse_plan *plan, int value, bool fitting, const te_exec *exec)
{
    const te_plan_value *v = &plan->values[value];
    bool host = exec->backend->host_memory, forward = plan->units[v->unit].kind == TE_UNIT_PROGRAM;
    const te_unit *maker = &plan->units[forward ? v->unit : v->first_reader];
    const te_emit_cost *cost = &maker->emit_cost[!forward];
    bool measures = te_quantizer_measures(te_emitted_quantizer(plan, value)),
         stored = measures && (host ? fitting : cost->whole);
    if (fitting && !measures) return TE_EMIT_AT_ONCE;
    if (fitting && twice_pays(cost, exec)) return TE_EMIT_TWICE;
    return stored ? TE_EMIT_STORED : TE_EMIT_APART;
}

/* Of values that one program emits in one pass. */
typedef struct emit_size {
    int64_t bytes; /* of a row */
    int     tiles;
} emit_size;

static void add_size(const te_fuse_plan *plan, int value, bool forward, emit_size *size)
{
    size->bytes += plan->values[value].width * (int64_t)te_dtype_size(plan->values[value].dtype);
    size->tiles += tiles_of(plan, value, forward);
}

/* Whether there is anything to gain from stripes, or room for tiles. */
static bool has_room(const te_device *device, emit_size size, int64_t rows)
{
    if (device->exec.backend->emits) return size.tiles <= TE_EMIT_TILES;
    return device->exec.backend->host_memory && stripe_of(rows, size.bytes) < rows;
}

/* The gradients that the program of a unit emits. */
static emit_size size_of_gradients(const te_fuse_plan *plan, int position)
{
    emit_size size = {0};
    for (int i = 0; i < plan->n_values; i++) {
        const te_plan_value *w = &plan->values[i];
        bool gradient = w->emitted && w->unit >= 0 && plan->units[w->unit].kind == TE_UNIT_LINEAR;
        if (gradient && w->first_reader == position) add_size(plan, i, false, &size);
    }
    return size;
}

static bool fits(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows)
{
    const te_plan_value *v = &plan->values[value];
    emit_size size = {0};
    if (plan->units[v->unit].kind != TE_UNIT_PROGRAM)
        return has_room(device, size_of_gradients(plan, v->first_reader), rows);
    for (int i = 0; i < plan->n_values; i++)
        if (plan->values[i].emitted && plan->values[i].unit == v->unit) add_size(plan, i, true, &size);
    return has_room(device, size, rows);
}

te_emit_way te_plan_emits(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows)
{
    const te_plan_value *v = &plan->values[value];
    return v->emitted ? way_of(plan, value, fits(plan, device, value, rows), &device->exec) : TE_EMIT_APART;
}

/* Gradients come first where there is no room for all. */
te_emit_way te_plan_emits_again(const te_fuse_plan *plan, const te_device *device, const te_unit *unit, int i,
                                int64_t rows)
{
    int value = unit->again[i];
    if (!plan->values[value].emitted || te_quantizer_measures(te_emitted_quantizer(plan, value))) return TE_EMIT_APART;
    emit_size size = size_of_gradients(plan, (int)(unit - plan->units));
    if (!has_room(device, size, rows)) size = (emit_size){0};
    for (int k = 0; k < unit->n_again; k++) add_size(plan, unit->again[k], true, &size);
    return has_room(device, size, rows) ? TE_EMIT_AT_ONCE : TE_EMIT_APART;
}

const char *te_emit_reason(const te_fuse_plan *plan, const te_device *device, int value, int64_t rows)
{
    bool tiles = device->exec.backend->emits, marked = plan->values[value].emitted;
    te_emit_way way = te_plan_emits(plan, device, value, rows);
    if (way == TE_EMIT_AT_ONCE) return "by the program that makes it";
    if (way == TE_EMIT_TWICE)
        return "by the program that makes it: to run that once more for the amax costs less than to store";
    if (!marked) return "by a kernel of its own: it is not between one program and one product alone";
    if (!fits(plan, device, value, rows))
        return tiles ? "by a kernel of its own: the program's has no room for tiles of it"
                     : "by a kernel of its own: a run too small for another way";
    if (!tiles && te_emitted_quantizer(plan, value)->stochastic)
        return "by a kernel of its own: random bits are numbered down whole columns";
    return "by a kernel of its own: to run the program once more for the amax costs more than to store";
}

/* Whether somebody counts what quantizing does, for which a result has to be whole. */
static bool is_watched(const te_emitting *e)
{
    for (int i = 0; i < e->n; i++)
        if (e->of[i].state->watched) return true;
    return false;
}

/* What may be emitted: nothing where it has to be whole, or where the rows of an input are not evenly spaced for
 * stripes. */
static bool settle(te_emitting *e, const te_space *s, const te_operand *inputs, int n_inputs)
{
    te_operand flat[TE_GRAD_MAX_SOURCES];
    const te_device *device = e->state->device;
    bool emits = e->n > 0 && !is_watched(e);
    memcpy(flat, inputs, (size_t)n_inputs * sizeof *flat);
    if (emits && !device->exec.backend->emits) emits = te_emit_flatten(s->ndim, s->shape, flat, n_inputs);
    if (!emits) e->n = 0;
    return emits;
}

/* One more value, unless it goes another way. */
static bool add(te_emitting *e, int output, int value, bool rowwise, bool columnwise)
{
    te_group_state *state = e->state;
    const te_plan_value *v = &state->plan->values[value];
    te_role role;
    const te_unit *product = te_emitted_product(state->plan, value, &role);
    te_emit_way way = te_plan_emits(state->plan, state->device, value, te_emit_rows(e->space));
    if (way == TE_EMIT_APART) return false;
    e->of[e->n++] = (te_emission){
        .output = output, .second = -1, .value = value, .role = role, .way = way, .dtype = v->dtype, .width = v->width,
        .state = state->plan->nodes[product->nodes[0]].recipe_state, .recipe = te_emitted_recipe(product),
        .want = {rowwise, columnwise},
        .target = &state->emitted[2 * product->product + (role == TE_ROLE_GRAD_OUTPUT)]};
    return true;
}

bool te_emitting_forward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                         te_emitting *e)
{
    const te_fuse_plan *plan = state->plan;
    e->state = state; /* entries are written whole where there are any */
    e->space = s;
    e->measuring = &state->plan->units[unit - plan->units].measuring[0];
    e->n = 0;
    for (int i = 0; i < unit->n_results; i++) {
        int value = te_emitted_by(plan, unit, true, i);
        if (value == TE_NO_VALUE) continue;
        const te_unit *product = &plan->units[plan->values[value].first_reader];
        add(e, i, value, true, te_emitted_columns(plan, product, TE_ROLE_INPUT));
    }
    return settle(e, s, inputs, unit->gradient.forward->n_inputs);
}

/* Operands that weight gradients wait for. */
static void add_again(te_emitting *e, const te_unit *unit)
{
    te_group_state *state = e->state;
    const te_fuse_plan *plan = state->plan;
    for (int i = 0; i < unit->n_again; i++) {
        const te_plan_value *v = &plan->values[unit->again[i]];
        const te_unit *product = &plan->units[v->first_reader];
        if (te_plan_emits_again(plan, state->device, unit, i, te_emit_rows(e->space)) == TE_EMIT_APART) continue;
        te_product_saved *saved = &state->products[product->product];
        if (!te_factor_is_there(&saved->waiting)) continue;
        e->of[e->n++] = (te_emission){
            .output = unit->n_grads + i, .second = -1, .value = unit->again[i], .role = TE_ROLE_INPUT,
            .way = TE_EMIT_AT_ONCE, .dtype = v->dtype, .width = v->width, .state = saved->state,
            .recipe = saved->recipe, .want = {false, true}, .again = saved, .target = &saved->x.quantized};
    }
}

bool te_emitting_backward(te_group_state *state, const te_unit *unit, const te_space *s, const te_operand *inputs,
                          te_emitting *e)
{
    const te_fuse_plan *plan = state->plan;
    e->state = state; /* entries are written whole where there are any */
    e->space = s;
    e->measuring = &state->plan->units[unit - plan->units].measuring[1];
    e->n = 0;
    for (int k = 0; k < unit->n_grads; k++) {
        int value = te_emitted_by(plan, unit, false, k);
        te_emission *first = value == TE_NO_VALUE ? NULL : te_emission_of(e, value);
        if (value == TE_NO_VALUE) continue;
        if (first) {
            first->second = k;
            continue;
        }
        const te_unit *product = &plan->units[plan->values[value].unit];
        if (add(e, k, value, plan->values[product->x].wanted, plan->values[product->weight].wanted))
            e->of[e->n - 1].block = unit->slots[unit->grads[k].slot].part.block;
    }
    add_again(e, unit);
    return settle(e, s, inputs, unit->gradient.backward->n_inputs);
}

te_emission *te_emission_of(te_emitting *e, int value)
{
    for (int i = 0; i < e->n; i++)
        if (e->of[i].value == value) return &e->of[i];
    return NULL;
}
