/* trace.c - plans on standard error as they are made, under TE_TRACE=fuse: their steps, the programs of those, and why
 * neighbours are not one step. */
#include "../program_build.h"
#include "describe_internal.h"

#include <stdio.h>

static void print_step(void *user, const te_step_description *step)
{
    const te_fuse_plan *plan = user;
    fprintf(stderr, "fuse:   %s %s, of", step->backward ? "backward" : "forward ", step->kernel);
    for (int i = 0; i < step->n_nodes; i++) fprintf(stderr, " %s", plan->nodes[step->nodes[i]].call.op->name);
    fprintf(stderr, ": %.4g bytes read, %.4g written, %.4g FLOP\n", step->read_bytes, step->written_bytes, step->flops);
}

static void print_split(void *user, const te_split_description *split)
{
    const te_fuse_plan *plan = user;
    fprintf(stderr, "fuse:   apart: %s | %s: %s\n", plan->nodes[split->from].call.op->name,
            plan->nodes[split->to].call.op->name, split->reason);
}

static void print_program(const te_fuse_plan *plan, const te_program *program)
{
    int size = program ? te_program_dump(program, NULL, 0) + 1 : 0;
    char *text = size ? te_mem_alloc(&plan->ctx->mem, (size_t)size) : NULL;
    if (!text) return;
    te_program_dump(program, text, (size_t)size);
    for (const char *line = text; *line;) {
        int n = (int)strcspn(line, "\n");
        fprintf(stderr, "fuse:   %.*s\n", n, line);
        line += n + (line[n] == '\n');
    }
    te_mem_free(&plan->ctx->mem, text, (size_t)size);
}

void te_fuse_trace(te_fuse_plan *plan, te_tensor *const *inputs)
{
    fprintf(stderr, "fuse: a plan of %d operations%s for %s %s\n", plan->n_nodes,
            plan->record ? " and their gradients" : "", te_dtype_name(inputs[0]->dtype), TE_SHAPE_TEXT(inputs[0]));
    if (plan->refusal) {
        fprintf(stderr, "fuse:   none: %s\n", plan->refusal);
        return;
    }
    if (te_plan_describe(plan, inputs, print_step, print_split, plan) != TE_OK) return;
    for (int u = 0; u < plan->n_units; u++) {
        const te_unit *unit = &plan->units[u];
        if (unit->kind != TE_UNIT_PROGRAM) continue;
        print_program(plan, unit->gradient.forward);
        print_program(plan, unit->gradient.backward);
    }
}
