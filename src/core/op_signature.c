/* op_signature.c - signatures: what a declaration's text says, and arguments taken as it says. */
#include "op.h"

#include "kernels/numerals.h"

/* --- signatures --------------------------------------------------------------------------------------------------- */

static const char *const type_names[] = {"tensor", "tensors", "number", "int",   "bool",   "dim",
                                         "index",  "dims",    "shape",  "dtype", "device", "text"};

/* Cuts the next word (or number, or choice list) out of *at into word; false when there is none. */
static bool next_word(const char **at, char *word, size_t size)
{
    const char *s = *at;
    while (*s == ' ') s++;
    size_t n = 0;
    while (*s && !strchr(" ,;:()=", *s)) {
        if (n + 1 < size) word[n++] = *s;
        s++;
    }
    word[n] = 0;
    while (*s == ' ') s++;
    *at = s;
    return n > 0;
}

static te_param_type type_of(const char *word)
{
    for (int i = 0; i < TE_TYPE_CHOICE; i++)
        if (strcmp(word, type_names[i]) == 0) return (te_param_type)i;
    return TE_TYPE_CHOICE;
}

/* Position of `word` in "a|b|c", or -1. */
static int choice_index(const char *choices, const char *word)
{
    size_t n = strlen(word);
    for (int i = 0; *choices; i++) {
        const char *end = strchr(choices, '|');
        size_t length = end ? (size_t)(end - choices) : strlen(choices);
        if (length == n && memcmp(choices, word, n) == 0) return i;
        choices += length + (end != NULL);
    }
    return -1;
}

static void parse_default(te_param *p, const char *word)
{
    p->has_default = p->optional = true;
    if (p->type == TE_TYPE_CHOICE)
        p->number = choice_index(p->text, word);
    else if (strcmp(word, "true") == 0)
        p->number = 1;
    else if (strcmp(word, "nil") == 0)
        p->has_default = false;
    else
        p->number = te_strtod(word, NULL);
}

te_status te_op_parse(te_context *ctx, const te_op_def *def, te_op *op)
{
    const char *at = def->signature;
    char word[64];
    bool by_name = false;
    memset(op, 0, sizeof *op);
    op->def = def;
    next_word(&at, op->name, sizeof op->name);
    if (*at++ != '(') return te_fail(ctx, TE_ERROR_INTERNAL, "operation \"%s\": no parameter list", def->signature);
    while (*at && *at != ')') {
        if (op->n_params == (int)(sizeof op->params / sizeof *op->params))
            return te_fail(ctx, TE_ERROR_INTERNAL, "operation \"%s\": too many parameters", op->name);
        te_param *p = &op->params[op->n_params++];
        next_word(&at, p->name, sizeof p->name);
        p->by_name = by_name;
        if (*at == ':') {
            at++;
            next_word(&at, word, sizeof word);
            p->type = type_of(word);
            if (p->type == TE_TYPE_CHOICE) snprintf(p->text, sizeof p->text, "%s", word);
        }
        if (*at == '=') {
            at++;
            next_word(&at, word, sizeof word);
            parse_default(p, word);
        }
        bool input = p->type == TE_TYPE_TENSOR || p->type == TE_TYPE_TENSORS;
        if (p->type == TE_TYPE_TENSORS) op->takes_list = true;
        p->slot = input ? op->n_inputs++ : op->n_attrs++;
        if (*at == ';') by_name = true;
        if (*at == ',' || *at == ';') at++;
        while (*at == ' ') at++;
    }
    if (op->n_inputs > TE_OP_MAX_INPUTS || op->n_attrs > TE_OP_MAX_ATTRS)
        return te_fail(ctx, TE_ERROR_ARGUMENT,
                       "operation \"%s\": %d inputs and %d attributes, at most %d and %d are possible", op->name,
                       op->n_inputs, op->n_attrs, TE_OP_MAX_INPUTS, TE_OP_MAX_ATTRS);
    const char *outputs = def->outputs ? def->outputs : "y";
    while (next_word(&outputs, word, sizeof word)) {
        op->n_outputs++;
        while (*outputs == ' ' || *outputs == ',') outputs++;
    }
    op->simple = def->formula && !def->resolve && !def->rows && op->n_attrs == 0 && op->n_outputs == 1 &&
                 !op->takes_list &&
                 !(def->flags & (TE_OP_BOOL | TE_OP_F32 | TE_OP_GATED | TE_OP_LASTROW | TE_OP_COMPUTE));
    return TE_OK;
}

/* --- arguments ---------------------------------------------------------------------------------------------------- */

static te_status take_input(te_call *call, const te_param *p, const te_arg *arg)
{
    int i = p->slot;
    if (arg->kind == TE_ARG_TENSOR && p->type == TE_TYPE_TENSOR && (arg->as.tensor || p->optional)) {
        call->in[i] = arg->as.tensor;
    } else if (arg->kind == TE_ARG_TENSORS && p->type == TE_TYPE_TENSORS) {
        if (arg->n < 0)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s: a list of %d tensors", p->name, arg->n);
        call->list = (te_tensor **)(uintptr_t)arg->as.tensors;
        call->n_list = arg->n;
        for (int k = 0; k < arg->n; k++)
            if (!arg->as.tensors || !arg->as.tensors[k])
                return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s: tensor %lld of the list is NULL", p->name,
                                    te_counted(call->ctx, k));
    } else if (arg->kind == TE_ARG_NUMBER && p->type == TE_TYPE_TENSOR && (call->op->def->flags & TE_OP_NUMBERS)) {
        call->is_number[i] = true;
        call->number[i] = arg->as.number;
    } else if (arg->kind != TE_ARG_ABSENT) {
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s must be a %s", p->name, type_names[p->type]);
    } else if (!p->optional) {
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s is missing", p->name);
    }
    return TE_OK;
}

/* What has a number for each of its values takes no other; 0: any. */
static int values_of(const te_param *p)
{
    if (p->type == TE_TYPE_BOOL) return 2;
    if (p->type == TE_TYPE_DTYPE) return TE_DTYPE_COUNT;
    int n = p->type == TE_TYPE_CHOICE;
    for (const char *at = n ? p->text : ""; *at; at++) n += *at == '|';
    return n;
}

static te_status fail_kind(te_call *call, const te_param *p)
{
    return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s must be a %s", p->name,
                        p->type == TE_TYPE_CHOICE ? p->text : type_names[p->type]);
}

static te_status take_number(te_call *call, const te_param *p, double number)
{
    te_attr *a = &call->attr[p->slot];
    bool choice = p->type == TE_TYPE_CHOICE;
    if (p->type == TE_TYPE_TEXT || p->type == TE_TYPE_DEVICE) return fail_kind(call, p);
    if (p->type != TE_TYPE_NUMBER && !te_is_whole(number))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s must be whole, not %g", p->name, number);
    if (values_of(p) && !(number >= 0 && number < values_of(p)))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s must be from 0 to %d%s%s, not %g", p->name,
                            values_of(p) - 1, choice ? " for " : "", choice ? p->text : "", number);
    if (p->type == TE_TYPE_DIMS || p->type == TE_TYPE_SHAPE) {
        a->n = 1;
        a->ints[0] = (int64_t)number;
    } else {
        a->number = number;
    }
    return TE_OK;
}

static te_status take_ints(te_call *call, const te_param *p, const int64_t *ints, int n)
{
    te_attr *a = &call->attr[p->slot];
    if (p->type != TE_TYPE_DIMS && p->type != TE_TYPE_SHAPE) return fail_kind(call, p);
    if (n < 0 || (n > 0 && !ints))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s: %d entries%s", p->name, n, ints ? "" : " at NULL");
    if (n > TE_MAX_DIMS)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s has %d entries, at most %d are possible", p->name, n,
                            TE_MAX_DIMS);
    a->n = n;
    if (n) memcpy(a->ints, ints, (size_t)n * sizeof *a->ints);
    return TE_OK;
}

static te_status take_text(te_call *call, const te_param *p, const char *text)
{
    te_attr *a = &call->attr[p->slot];
    if (!text) return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s: the text is NULL", p->name);
    if (p->type == TE_TYPE_CHOICE) {
        int choice = choice_index(p->text, text);
        if (choice < 0)
            return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s must be one of %s, not \"%.40s\"", p->name,
                                p->text, text);
        a->number = choice;
        return TE_OK;
    }
    if (p->type != TE_TYPE_TEXT && p->type != TE_TYPE_DEVICE) return fail_kind(call, p);
    a->text = text;
    return TE_OK;
}

static te_status take_attr(te_call *call, const te_param *p, const te_arg *arg)
{
    te_attr *a = &call->attr[p->slot];
    a->set = arg->kind != TE_ARG_ABSENT;
    switch (arg->kind) {
    case TE_ARG_ABSENT:
        if (!p->optional) return te_call_fail(call, TE_ERROR_ARGUMENT, "argument %s is missing", p->name);
        a->set = p->has_default;
        a->number = p->number;
        return TE_OK;
    case TE_ARG_NUMBER: return take_number(call, p, arg->as.number);
    case TE_ARG_INTS: return take_ints(call, p, arg->as.ints, arg->n);
    case TE_ARG_TEXT: return take_text(call, p, arg->as.text);
    default: return fail_kind(call, p);
    }
}

te_status te_call_attributes(te_call *call, const te_arg *args, int n_args)
{
    static const te_arg absent = {.kind = TE_ARG_ABSENT};
    te_status status = TE_OK;
    for (int i = 0; i < call->op->n_params && status == TE_OK; i++) {
        const te_param *p = &call->op->params[i];
        const te_arg *arg = args && i < n_args ? &args[i] : &absent;
        if (p->type > TE_TYPE_TENSORS)
            status = take_attr(call, p, arg);
        else if (arg->kind == TE_ARG_NUMBER)
            status = take_input(call, p, arg);
    }
    return status;
}

te_status te_call_arguments(te_call *call, const te_arg *args, int n_args)
{
    static const te_arg absent = {.kind = TE_ARG_ABSENT};
    const te_op *op = call->op;
    if (n_args > op->n_params)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%d arguments given, at most %d taken: %s", n_args, op->n_params,
                            op->def->signature);
    for (int i = 0; i < op->n_params; i++) {
        const te_param *p = &op->params[i];
        const te_arg *arg = args && i < n_args ? &args[i] : &absent;
        te_status status = p->type == TE_TYPE_TENSOR || p->type == TE_TYPE_TENSORS ? take_input(call, p, arg)
                                                                                   : take_attr(call, p, arg);
        if (status != TE_OK) return status;
    }
    return TE_OK;
}
