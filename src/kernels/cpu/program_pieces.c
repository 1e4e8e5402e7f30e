/* program_pieces.c - the extreme of one long row, such as of a whole tensor, found in pieces.
 *
 * A row is one thread's work, and a row that no tile holds goes through the lanes of a te_fold block by block. So the
 * extremes of its pieces are found first, as those of so many rows, and then the extreme of these: of the elements that
 * are met, only which of two zeros is taken depends on how the row is cut, and that follows from its length.
 */
#include "program_exec.h"

#include "../dtype.h"

enum { PIECE = 4096, LEAST = 8 * PIECE };

/* y = rowmax(x) or y = rowmin(x), and nothing else. */
static bool finds_extreme(const te_program *program)
{
    if (program->n_insns != 2 || program->n_inputs != 1 || program->n_outputs != 1) return false;
    const te_insn *load = &program->insns[0], *fold = &program->insns[1];
    return load->op == TE_PW_LOAD && load->rate == TE_RATE_ELEM && fold->arg[0] == 0 &&
           (fold->op == TE_PW_ROWMAX || fold->op == TE_PW_ROWMIN) && program->outputs[0].kind == TE_OUT_ROW &&
           program->outputs[0].value == 1;
}

static bool is_long_row(const te_run *run)
{
    const te_operand *in = run->inputs, *out = run->outputs;
    for (int d = 0; d + 1 < run->ndim; d++)
        if (run->shape[d] != 1) return false;
    return run->ndim >= 1 && run->shape[run->ndim - 1] >= LEAST && in->data && !in->block && !in->quantized &&
           out->data && !out->accumulate;
}

/* Run i: `rows` rows of `columns` elements. */
static void add_run(te_pieces *p, int i, const te_run *like, int64_t rows, int64_t columns, int64_t stride)
{
    te_run *run = &p->runs[i];
    *run = *like;
    run->ndim = 2;
    run->shape[0] = rows;
    run->shape[1] = columns;
    run->inputs = &p->in[i];
    run->outputs = &p->out[i];
    p->in[i] = like->inputs[0];
    p->in[i].stride[0] = columns * stride;
    p->in[i].stride[1] = stride;
    p->out[i] = like->outputs[0];
    p->out[i].stride[0] = 1;
    p->out[i].stride[1] = 0;
}

bool te_program_cut(te_exec *exec, const te_program *program, const te_run *run, te_pieces *p)
{
    if (!finds_extreme(program) || !is_long_row(run)) return false;
    const te_operand *in = &run->inputs[0];
    int64_t n = run->shape[run->ndim - 1], stride = in->stride[run->ndim - 1], whole = n / PIECE, rest = n % PIECE;
    int64_t size = (int64_t)te_dtype_size(in->dtype);
    p->room = exec->scratch(exec, (size_t)((whole + 1) * size));
    if (!p->room) return false;
    p->n = rest ? 2 : 1;
    add_run(p, 0, run, whole, PIECE, stride);
    if (rest) add_run(p, 1, run, 1, rest, stride);
    if (rest) p->in[1].data = (char *)in->data + whole * PIECE * stride * size;
    for (int i = 0; i < p->n; i++) {
        p->out[i].data = (char *)p->room + i * whole * size;
        p->out[i].dtype = in->dtype;
    }
    add_run(p, TE_PIECES_LAST, run, 1, whole + (rest > 0), 1);
    p->in[TE_PIECES_LAST].data = p->room;
    return true;
}
