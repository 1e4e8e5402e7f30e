/* program_dump.c - programs as text. */
#include "program_internal.h"

#include "kernels/numerals.h"

static const char *rate_name(int rate)
{
    static const char *const names[] = {"uniform", "row", "elem"};
    return rate >= 0 && rate <= TE_RATE_ELEM ? names[rate] : "?";
}

static const char *output_name(int kind)
{
    static const char *const names[] = {"elem", "row", "colsum", "sum", "amax"};
    return kind >= 0 && kind <= TE_OUT_AMAX ? names[kind] : "?";
}

/* --- text --------------------------------------------------------------------------------------------------------- */

typedef struct text_sink {
    char  *text;
    size_t size;
    int    length; /* of the whole text, also of what did not fit */
} text_sink;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void put(text_sink *sink, const char *format, ...)
{
    size_t used = (size_t)sink->length < sink->size ? (size_t)sink->length : sink->size;
    va_list args;
    va_start(args, format);
    int written = vsnprintf(used < sink->size ? sink->text + used : NULL, sink->size - used, format, args);
    va_end(args);
    if (written > 0) sink->length += written;
}

/* The shortest digits that read back as the same number. */
static void put_number(text_sink *sink, double number)
{
    char digits[40];
    for (int precision = 1; precision <= 17; precision++) {
        te_snprintf(digits, sizeof digits, "%.*g", precision, number);
        if (te_strtod(digits, NULL) == number) break;
    }
    put(sink, " %s", digits);
}

static bool has_slot(const te_insn *insn)
{
    te_opcode op = (te_opcode)insn->op;
    return insn->slot != 0 || op == TE_PW_LOAD || op == TE_PW_PARAM || op == TE_PW_RANDOM || op == TE_PW_KEEP ||
           op == TE_PW_NORMAL;
}

int te_program_dump(const te_program *program, char *text, size_t size)
{
    text_sink sink = {text, size, 0};
    put(&sink, "%s: %d inputs, %d parameters, %d generators\n", program->name, program->n_inputs, program->n_params,
        program->n_rngs);
    for (int i = 0; i < program->n_insns; i++) {
        const te_insn *insn = &program->insns[i];
        te_opcode op = (te_opcode)insn->op;
        put(&sink, "  %%%d %s = %s", i, rate_name(insn->rate), te_opcode_name(op));
        if (has_slot(insn)) put(&sink, " #%d", insn->slot);
        if (op == TE_PW_CONST) put_number(&sink, insn->imm);
        for (int k = 0; k < te_opcode_args(op); k++) put(&sink, " %%%d", insn->arg[k]);
        put(&sink, "\n");
    }
    for (int i = 0; i < program->n_outputs; i++)
        put(&sink, "  output %d: %s %%%d\n", i, output_name(program->outputs[i].kind), program->outputs[i].value);
    return sink.length;
}
