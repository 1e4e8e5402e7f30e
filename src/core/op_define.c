/* op_define.c - operations made at run time: the texts of a declaration, which nobody has compiled or tested before.
 *
 * A defined op behaves as one from a table in ops/. It lives as long as somebody holds it: who made it, and every graph
 * node of a call. Its compiled variants go with it.
 */
#include "op_program.h"
#include "ops/ops.h"

#include <ctype.h>

typedef struct defined_op {
    te_op op; /* first, so that a te_op of one is a pointer to it */
    te_op_def def;
    te_context *ctx;
    size_t bytes;
    char text[];
} defined_op;

enum {
    ALLOWED = TE_OP_NUMBERS | TE_OP_COMPUTE | TE_OP_BOOL | TE_OP_FLOAT | TE_OP_F32 | TE_OP_GATED | TE_OP_LASTROW |
              TE_OP_NOGRAD | TE_OP_ELEMENTS
};

/* --- texts -------------------------------------------------------------------------------------------------------- */

/* PROGRAMS: bytes that count for those of an op, about what the first takes. */
enum { N_TEXTS = 7, PROGRAMS = 2048 };

static void list_texts(te_op_def *def, const char **list[N_TEXTS])
{
    const char **texts[N_TEXTS] = {&def->signature, &def->doc,  &def->formula, &def->gradient,
                                   &def->outputs,   &def->rows, &def->domain};
    memcpy(list, texts, sizeof texts);
}

const te_context *te_op_definer(const te_op *op) { return ((const defined_op *)op)->ctx; }

/* The op with copies of all texts behind it; NULL when memory is exhausted. */
static defined_op *copy_declaration(te_context *ctx, const te_op_def *def)
{
    te_op_def source = *def;
    const char **from[N_TEXTS], **to[N_TEXTS];
    size_t bytes = sizeof(defined_op);
    list_texts(&source, from);
    for (int i = 0; i < N_TEXTS; i++)
        if (*from[i]) bytes += strlen(*from[i]) + 1;
    if (!te_context_count(ctx, bytes + PROGRAMS)) return NULL;
    defined_op *d = te_mem_zalloc(&ctx->mem, bytes);
    if (!d) {
        te_context_discount(ctx, bytes + PROGRAMS);
        te_fail_memory(ctx, "te_op_define");
        return NULL;
    }
    d->def = source;
    d->bytes = bytes;
    list_texts(&d->def, to);
    char *at = d->text;
    for (int i = 0; i < N_TEXTS; i++) {
        if (!*from[i]) continue;
        size_t size = strlen(*from[i]) + 1;
        *to[i] = memcpy(at, *from[i], size);
        at += size;
    }
    return d;
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

static bool is_name(const char *text)
{
    if (!isalpha((unsigned char)*text) && *text != '_') return false;
    while (isalnum((unsigned char)*text) || *text == '_') text++;
    return *text == 0;
}

/* The parser of declarations cuts words that are too long and takes what it does not know for a choice, which is fine
 * for tables that tests walk; here both are mistakes. */
static te_status check_signature(te_context *ctx, const char *signature)
{
    enum { LONGEST = 23 }; /* te_param.name */
    size_t length = 0;
    for (const char *at = signature; *at; at++) {
        length = isalnum((unsigned char)*at) || *at == '_' ? length + 1 : 0;
        if (length > LONGEST)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: a name in \"%.200s\" has more than %d characters",
                           signature, LONGEST);
    }
    const char *end = strchr(signature, ')');
    if (!strchr(signature, '(') || !end || end[1])
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: \"%.200s\" is no signature, such as f(x, y; a: number = 1)",
                       signature);
    return TE_OK;
}

static te_status check_param(te_context *ctx, const te_op *op, int i)
{
    const te_param *p = &op->params[i];
    if (!is_name(p->name))
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: \"%.200s\": parameter %d has no name", op->def->signature,
                       i + 1);
    bool number = p->type == TE_TYPE_NUMBER || p->type == TE_TYPE_INT || p->type == TE_TYPE_BOOL;
    if (p->type != TE_TYPE_TENSOR && !number)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "te.define: \"%.200s\": parameter %s must be a tensor, number, int or bool", op->def->signature,
                       p->name);
    for (int k = 0; k < i; k++)
        if (strcmp(op->params[k].name, p->name) == 0)
            return te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: \"%.200s\": two parameters named %s", op->def->signature,
                           p->name);
    return TE_OK;
}

/* Compiles the formula for all inputs, which is the variant that will be asked for first. */
static te_status try_formula(te_context *ctx, const te_op *op)
{
    bool wanted[TE_PROGRAM_SLOTS] = {false};
    te_output_kind reduce[TE_PROGRAM_SLOTS] = {TE_OUT_ELEM};
    te_call call = {.ctx = ctx, .op = op};
    unsigned present = (1u << op->n_inputs) - 1;
    te_layout l = te_program_layout(&call, present);
    return te_variant_get(&call, present, 0, &l, wanted, reduce) ? TE_OK : ctx->status;
}

static te_status check_declaration(te_context *ctx, te_op *op, const te_op_def *def)
{
    if (def->flags & ~(unsigned)ALLOWED || !def->formula)
        return te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: only operations with a formula can be defined");
    te_status status = check_signature(ctx, def->signature);
    if (status == TE_OK) status = te_op_parse(ctx, def, op);
    if (status == TE_OK && !is_name(op->name))
        status = te_fail(ctx, TE_ERROR_ARGUMENT, "te.define: \"%.200s\" has no name", def->signature);
    if (status == TE_OK && (op->n_inputs == 0 || op->n_outputs == 0 || op->n_outputs > TE_OP_MAX_OUTPUTS))
        status = te_fail(ctx, TE_ERROR_ARGUMENT,
                         "te.define: %s: %d inputs and %d results; at most %d and %d, at least one of each", op->name,
                         op->n_inputs, op->n_outputs, TE_OP_MAX_INPUTS, TE_OP_MAX_OUTPUTS);
    for (int i = 0; i < op->n_params && status == TE_OK; i++) status = check_param(ctx, op, i);
    return status;
}

/* --- making and releasing ----------------------------------------------------------------------------------------- */

static void free_declaration(te_context *ctx, defined_op *d)
{
    te_context_discount(ctx, d->bytes + PROGRAMS);
    te_mem_free(&ctx->mem, d, d->bytes);
}

const te_op *te_op_define(te_context *ctx, const te_op_def *def)
{
    defined_op *d = copy_declaration(ctx, def);
    if (!d) return NULL;
    te_status status = check_declaration(ctx, &d->op, &d->def);
    d->ctx = ctx;
    d->op.refs = 1;
    if (status == TE_OK) status = try_formula(ctx, &d->op);
    if (status != TE_OK) {
        free_declaration(ctx, d);
        return NULL;
    }
    te_context_retain(ctx);
    return &d->op;
}

void te_op_retain(const te_op *op)
{
    te_op *own = (te_op *)(uintptr_t)op;
    if (own->refs) own->refs++;
}

void te_op_release(const te_op *op)
{
    defined_op *d = (defined_op *)(uintptr_t)op;
    if (!op || !op->refs || --d->op.refs) return;
    te_context *ctx = d->ctx;
    te_variants_drop(ctx, op);
    free_declaration(ctx, d);
    te_context_unref(ctx);
}
