/* compile.c - the programs of a plan: each unit's program ops joined into one, its gradient derived from the whole
 * (compile_gradient.c); and what backward must find saved. */
#include "emit.h"
#include "handed.h"
#include "plan.h"

#include "../ops/ops.h"

#include <stdio.h>

/* A unit's program in the making. */
typedef struct joining {
    te_fuse_plan *plan;
    te_unit      *unit;
    int           position; /* of the unit */
    te_program   *program;
    int          *mapped; /* per value of the plan that this unit makes: its value in the program */
    bool         *read;   /* per value: read inside the unit too */
    te_joint     *joints; /* per value of the program, when all are there */
} joining;

static te_status out_of_memory(te_fuse_plan *plan) { return te_fail_memory(plan->ctx, "fuser"); }

/* --- inputs ------------------------------------------------------------------------------------------------------- */

static int find_slot(const te_unit *unit, int value, te_part part)
{
    for (int i = 0; i < unit->n_slots; i++) {
        const te_unit_slot *slot = &unit->slots[i];
        if (slot->value == value && slot->part.half == part.half && slot->part.block == part.block) return i;
    }
    return -1;
}

/* Whether a value is read in halves that lie otherwise: their gradients would not be parts of one tensor. */
static bool halved_otherwise(const te_unit *unit, int value, te_part part)
{
    for (int i = 0; i < unit->n_slots; i++) {
        const te_unit_slot *slot = &unit->slots[i];
        if (slot->value == value && part.half && slot->part.block != part.block) return true;
    }
    return false;
}

/* The program's value for (a half of) a value that is stored; -1 when memory is exhausted. */
static int load(joining *j, int value, te_part part, te_rate rate)
{
    te_unit *unit = j->unit;
    int slot = find_slot(unit, value, part);
    if (slot >= 0) return te_program_load(j->program, slot);
    unit->slots[unit->n_slots++] = (te_unit_slot){.value = value, .part = part, .rate = rate};
    return te_program_input(j->program, rate);
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

/* The op's program with its attributes as constants: a changed attribute makes another plan. */
static te_program *bound_program(joining *j, const te_group_node *node, const te_program *source, unsigned numbers)
{
    double values[TE_PROGRAM_PARAMS + 1] = {0};
    te_program_params(&node->call, source, numbers, j->unit->width, values);
    te_program *bound = te_program_bind(source, values);
    if (!bound) out_of_memory(j->plan);
    return bound;
}

uint8_t te_plan_rounding(const te_fuse_plan *plan, const te_unit *unit, int v)
{
    switch (plan->values[v].dtype) {
    case TE_BF16: return TE_PW_TO_BF16;
    case TE_F16: return TE_PW_TO_F16;
    case TE_F32: return unit->compute_f64 ? TE_PW_TO_F32 : 0;
    default: return 0;
    }
}

/* The program's number of a value of this unit as memory of its dtype would hold it. What is only stored is rounded on
 * the way there. */
static int rounded(joining *j, int v)
{
    uint8_t op = te_plan_rounding(j->plan, j->unit, v);
    return op ? te_program_emit(j->program, (te_opcode)op, j->mapped[v], -1, -1) : j->mapped[v];
}

static te_status append_node(joining *j, const te_group_node *node)
{
    te_fuse_plan *plan = j->plan;
    unsigned present = te_plan_present(plan, node), numbers = 0;
    for (int i = 0; i < node->call.op->n_inputs; i++) numbers |= (unsigned)node->call.is_number[i] << i;
    te_layout l = te_program_layout(&node->call, present);
    te_call call = node->call;
    call.ctx = plan->ctx;
    const te_variant *variant = te_variant_get(&call, present, numbers, &l, NULL, NULL);
    if (!variant) return plan->ctx->status;
    const te_program *source = variant->gradient.forward;
    int inputs[TE_PROGRAM_SLOTS], result[TE_OP_MAX_OUTPUTS];
    if (source->n_outputs != 1 || source->outputs[0].kind != TE_OUT_ELEM)
        return te_plan_refuse(plan, node, "its result is not one value per element");
    if (source->n_rngs > 1 || j->unit->n_rngs + source->n_rngs > TE_UNIT_RNGS)
        return te_plan_refuse(plan, node, "too many random generators");
    if (j->unit->n_slots + l.n > TE_UNIT_SLOTS)
        return te_plan_refuse(plan, node, "its kernel would read more than %d tensors", TE_UNIT_SLOTS);
    for (int i = 0; i < l.n; i++) {
        int value = node->in[l.input[i]];
        bool here = plan->values[value].unit == j->position;
        if (halved_otherwise(j->unit, value, l.part[i]))
            return te_plan_refuse(plan, node, "another operation takes halves of its input that lie otherwise");
        inputs[i] = here ? rounded(j, value) : load(j, value, l.part[i], l.rate[i]);
        if (inputs[i] < 0) return out_of_memory(plan);
        j->read[value] |= here;
    }
    te_program *bound = bound_program(j, node, source, numbers);
    if (!bound) return plan->ctx->status;
    te_status status = te_program_append(j->program, bound, inputs, 0, j->unit->n_rngs, result);
    te_program_free(bound);
    if (status != TE_OK) return out_of_memory(plan);
    if (source->n_rngs) j->unit->rng_nodes[j->unit->n_rngs++] = (int)(node - plan->nodes);
    j->mapped[node->out] = result[0];
    return TE_OK;
}

/* --- the unit's program ------------------------------------------------------------------------------------------- */

bool te_plan_computes_f64(const te_fuse_plan *plan, const te_group_node *node)
{
    bool any = false;
    for (int i = 0; i < node->call.op->n_inputs; i++)
        any |= node->in[i] != TE_NO_VALUE && plan->values[node->in[i]].dtype == TE_F64;
    return any;
}

static te_status add_results(joining *j)
{
    te_unit *unit = j->unit;
    for (int k = 0; k < unit->n_nodes; k++) {
        const te_group_node *node = &j->plan->nodes[unit->nodes[k]];
        if (j->plan->values[node->out].inside) continue;
        if (unit->n_results == TE_UNIT_RESULTS)
            return te_plan_refuse(j->plan, node, "its kernel would write more than %d tensors", TE_UNIT_RESULTS);
        int value = j->read[node->out] ? rounded(j, node->out) : j->mapped[node->out];
        if (value < 0 || te_program_output(j->program, TE_OUT_ELEM, value) < 0) return out_of_memory(j->plan);
        unit->reload[unit->n_results] = j->read[node->out];
        unit->results[unit->n_results++] = node->out;
    }
    return TE_OK;
}

/* Gradients that arrive from later units become inputs of this one's. */
static te_status add_identities(joining *j)
{
    te_unit *unit = j->unit;
    for (int i = 0; i < unit->n_slots; i++) {
        const te_plan_value *v = &j->plan->values[unit->slots[i].value];
        bool later = v->last_reader > j->position || v->output >= 0;
        if (v->cls != TE_VALUE_TOKENS || !v->wanted || !later) continue;
        int value = te_program_load(j->program, i);
        if (value < 0 || te_program_output(j->program, TE_OUT_ELEM, value) < 0) return out_of_memory(j->plan);
        unit->identities[unit->n_identities++] = i;
    }
    return TE_OK;
}

te_output_kind te_plan_reduction(const te_plan_value *v, te_rate rate)
{
    if (v->cls != TE_VALUE_FIXED) return rate == TE_RATE_ROW ? TE_OUT_ROW : TE_OUT_ELEM;
    return v->width == 1 ? TE_OUT_SUM : TE_OUT_COLSUM;
}

/* What single operations would store between them: the slots' values and those that are read in the unit. */
static te_status describe_joints(joining *j, const int *ends)
{
    te_fuse_plan *plan = j->plan;
    te_unit *unit = j->unit;
    j->joints = te_mem_zalloc(&plan->ctx->mem, (size_t)j->program->n_insns * sizeof *j->joints);
    if (!j->joints) return out_of_memory(plan);
    for (int i = 0; i < unit->n_slots; i++) {
        const te_unit_slot *slot = &unit->slots[i];
        bool tensor = te_plan_reduction(&plan->values[slot->value], slot->rate) == TE_OUT_ELEM;
        j->joints[te_program_load(j->program, i)] =
            (te_joint){false, tensor, te_plan_rounding(plan, unit, slot->value)};
    }
    for (int k = 0; k < unit->n_nodes; k++) {
        int v = plan->nodes[unit->nodes[k]].out, value = j->read[v] ? rounded(j, v) : -1;
        bool tensor = value >= 0 && plan->values[v].cls == TE_VALUE_TOKENS;
        if (tensor && j->program->insns[value].rate == TE_RATE_ELEM)
            j->joints[value] = (te_joint){false, true, te_plan_rounding(plan, unit, v)};
    }
    for (int k = 0; k < unit->n_nodes; k++) j->joints[ends[k] - 1].last = true;
    return TE_OK;
}

/* "dropout_apply+add+layer_norm": what a profile shows. */
static void name_program(const te_fuse_plan *plan, const te_unit *unit, char *name, size_t size)
{
    size_t used = 0;
    name[0] = 0;
    for (int k = 0; k < unit->n_nodes && used < size; k++)
        used +=
            (size_t)snprintf(name + used, size - used, "%s%s", k ? "+" : "", plan->nodes[unit->nodes[k]].call.op->name);
}

/* *joints, where gradients are wanted, is the caller's. */
static te_status join_unit(te_fuse_plan *plan, int position, te_joint **joints)
{
    char name[sizeof plan->units->gradient.forward->name - sizeof ".backward"];
    te_unit *unit = &plan->units[position];
    joining j = {.plan = plan, .unit = unit, .position = position};
    size_t bytes = (size_t)plan->n_values * (sizeof *j.mapped + sizeof *j.read) + (size_t)unit->n_nodes * sizeof(int);
    unit->compute_f64 = te_plan_computes_f64(plan, &plan->nodes[unit->nodes[0]]); /* as all of them do */
    j.mapped = te_mem_zalloc(&plan->ctx->mem, bytes);
    int *ends = j.mapped + plan->n_values; /* per node: how many values there were when it had been joined */
    j.read = (bool *)(ends + unit->n_nodes);
    name_program(plan, unit, name, sizeof name);
    j.program = te_program_new(&plan->ctx->mem, name);
    te_status status = j.mapped && j.program ? TE_OK : out_of_memory(plan);
    for (int k = 0; k < unit->n_nodes && status == TE_OK; k++) {
        status = append_node(&j, &plan->nodes[unit->nodes[k]]);
        if (status == TE_OK) ends[k] = j.program->n_insns;
    }
    if (status == TE_OK) status = add_results(&j);
    if (status == TE_OK && plan->record) status = add_identities(&j);
    if (status == TE_OK && plan->record) status = describe_joints(&j, ends);
    if (j.mapped) te_mem_free(&plan->ctx->mem, j.mapped, bytes);
    if (status != TE_OK) {
        te_program_free(j.program);
        return status;
    }
    unit->gradient.forward = j.program; /* replaced when it is differentiated */
    *joints = j.joints;
    return TE_OK;
}

/* --- what backward reads ------------------------------------------------------------------------------------------ */

/* Biases that were spread over rows are spread again. */
static void save_value(te_fuse_plan *plan, int value)
{
    te_plan_value *v = &plan->values[value];
    const te_unit *maker = v->unit < 0 ? NULL : &plan->units[v->unit];
    v->spread = maker && maker->kind == TE_UNIT_BIASES && v->output < 0;
    v->saved |= !v->spread;
    const te_group_node *node = v->spread ? &plan->nodes[maker->nodes[0]] : NULL;
    for (int i = 0; v->spread && i < node->n_list; i++) plan->values[node->list[i]].saved = true;
}

static void save_sources(te_fuse_plan *plan, const te_unit *unit)
{
    for (int i = 0; i < unit->gradient.n_sources; i++) {
        const te_grad_source *source = &unit->gradient.sources[i];
        if (source->kind == TE_GRAD_FROM_INPUT) save_value(plan, unit->slots[source->index].value);
        if (source->kind == TE_GRAD_FROM_OUTPUT) plan->values[unit->results[source->index]].saved = true;
    }
}

/* Whether one unit alone reads a value, forward and backward: not the one that makes it either. */
static bool read_by_one_unit(const te_fuse_plan *plan, const te_plan_value *v, int value)
{
    const te_unit *maker = v->unit < 0 ? NULL : &plan->units[v->unit];
    if (v->output >= 0 || v->first_reader < 0 || v->first_reader != v->last_reader) return false;
    for (int k = 0; maker && k < maker->n_nodes; k++) {
        const te_group_node *node = &plan->nodes[maker->nodes[k]];
        for (int i = 0; i < node->call.op->n_inputs; i++)
            if (node->in[i] == value) return false;
    }
    for (int i = 0; maker && i < maker->gradient.n_sources; i++) {
        const te_grad_source *source = &maker->gradient.sources[i];
        if (source->kind == TE_GRAD_FROM_OUTPUT && maker->results[source->index] == value) return false;
    }
    return true;
}

/* What an operation asks to be saved in a byte a value: where backward of that operation's program alone reads it. */
static void pack_values(te_fuse_plan *plan)
{
    for (int n = 0; n < plan->n_nodes; n++) {
        const te_group_node *node = &plan->nodes[n];
        if (!node->cache_quantized || node->in[0] == TE_NO_VALUE) continue;
        te_plan_value *v = &plan->values[node->in[0]];
        if (!v->saved || v->packed || v->cls != TE_VALUE_TOKENS || v->dtype == TE_F64) continue;
        if (!read_by_one_unit(plan, v, node->in[0])) continue;
        v->packed = true;
        v->pack = plan->n_packs++;
    }
}

/* Products keep their operands themselves, in the dtype that they multiply in. */
static void describe_linear(te_fuse_plan *plan, te_unit *unit)
{
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    bool has_bias = te_plan_present(plan, node) >> 2 & 1;
    unit->x = node->in[0];
    unit->weight = node->in[1];
    unit->bias = has_bias ? node->in[2] : TE_NO_VALUE;
    unit->result = node->out;
    unit->compute = plan->values[node->out].dtype;
    unit->recipe = plan->recipes[unit->nodes[0]];
    unit->first_aux = plan->n_aux;
    unit->product = plan->n_products;
    unit->n_products = unit->recipe != NULL;
    plan->n_aux += unit->recipe ? 0 : 3;
    plan->n_products += unit->n_products;
}

static te_status compile_program(te_fuse_plan *plan, int position)
{
    te_joint *joints = NULL;
    te_status status = join_unit(plan, position, &joints);
    te_program *joined = plan->units[position].gradient.forward;
    size_t bytes = joined ? (size_t)joined->n_insns * sizeof *joints : 0;
    if (status == TE_OK && joints) status = te_plan_differentiate(plan, position, joints);
    if (joints) te_mem_free(&plan->ctx->mem, joints, bytes);
    bool kept = status == TE_OK && plan->units[position].gradient.forward == joined;
    return kept && te_program_prune(joined) != TE_OK ? out_of_memory(plan) : status;
}

/* What no program is made for. */
static void describe_other(te_fuse_plan *plan, te_unit *unit)
{
    const te_group_node *node = &plan->nodes[unit->nodes[0]];
    unit->result = node->out;
    unit->x = node->in[unit->kind == TE_UNIT_GATHER];
    unit->weight = unit->kind == TE_UNIT_GATHER ? node->in[0] : TE_NO_VALUE;
    if (unit->kind == TE_UNIT_ATTENTION) {
        unit->compute = plan->values[unit->result].dtype;
        unit->attention = unit->compute == TE_F64 ? NULL : plan->recipes[unit->nodes[0]];
        unit->product = plan->n_products;
        unit->n_products = unit->attention != NULL;
        plan->n_products += unit->n_products;
    }
    unit->first_aux = plan->n_aux;
    if (unit->kind == TE_UNIT_GATHER) plan->values[unit->x].saved |= plan->values[unit->weight].wanted;
    if (unit->kind == TE_UNIT_GROUPED) te_plan_describe_grouped(plan, unit);
    if (unit->kind == TE_UNIT_GATHER || unit->kind == TE_UNIT_VIEW) return;
    unit->first_rng = plan->n_rngs;
    unit->rng_nodes[0] = unit->nodes[0];
    unit->n_rngs = unit->kind == TE_UNIT_MASK || (unit->kind == TE_UNIT_ATTENTION && te_plan_draws(node));
    plan->n_rngs += unit->n_rngs;
    plan->n_aux += unit->kind == TE_UNIT_ATTENTION ? TE_CALL_AUX : 2; /* of ranges the input and their sizes */
}

te_status te_plan_compile(te_fuse_plan *plan)
{
    te_status status = TE_OK;
    for (int u = 0; u < plan->n_units; u++) {
        te_unit *unit = &plan->units[u];
        if (unit->kind == TE_UNIT_LINEAR)
            describe_linear(plan, unit);
        else if (unit->kind != TE_UNIT_PROGRAM)
            describe_other(plan, unit);
    }
    for (int u = 0; u < plan->n_units && status == TE_OK; u++) {
        te_unit *unit = &plan->units[u];
        if (unit->kind != TE_UNIT_PROGRAM) continue;
        status = compile_program(plan, u);
        if (status != TE_OK) return status;
        save_sources(plan, unit);
        unit->first_row = plan->n_rows;
        unit->first_rng = plan->n_rngs;
        plan->n_rows += unit->gradient.n_rows;
        plan->n_rngs += unit->n_rngs;
    }
    if (status == TE_OK) status = te_plan_order_draws(plan);
    if (status != TE_OK) return status;
    if (plan->record) pack_values(plan);
    te_plan_mark_handed(plan);
    return te_plan_mark_emissions(plan);
}
