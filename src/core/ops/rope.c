/* rope.c - rotary position embedding (Su et al. 2021).
 *
 * A row's features stand in pairs (a, b), and pair k of the row at position p turns by the angle p f[k]:
 *
 *     y = a cos - b sin        z = b cos + a sin
 *
 * so that the product of two rows depends on their distance alone. The gradient turns back. Cosines and sines are made
 * anew for every call, in float32: a number per position and pair, which all heads share; a cache of them would have to
 * know about lengths, offsets and devices. Where a launch costs more than they do, as for a token on a GPU, the program
 * that turns the pairs makes them as well, with the same bits.
 */
#include "rope.h"

#include "../autograd.h"
#include "ops.h"

#define ANGLES "angle = (p + offset) * f; c = cos(angle); s = sin(angle)"
#define FORTH  "y = a * c - b * s; z = b * c + a * s"
#define BACK   "y = a * c + b * s; z = b * c - a * s"
static const te_utility tables_program = {
    .name = "rope_angles", .inputs = "p f", .params = "offset", .outputs = "c s", .formula = ANGLES};
/* Forth and back, of tables and of positions. */
static const te_utility turn_programs[2] = {
    {.name = "rope", .inputs = "a b c s", .outputs = "y z", .formula = FORTH},
    {.name = "rope_back", .inputs = "a b c s", .outputs = "y z", .formula = BACK}};
static const te_utility whole_programs[2] = {
    {.name = "rope", .inputs = "a b p f", .params = "offset", .outputs = "y z", .formula = ANGLES "; " FORTH},
    {.name = "rope_back", .inputs = "a b p f", .params = "offset", .outputs = "y z", .formula = ANGLES "; " BACK}};
static const te_utility rest_program = {.name = "rope_rest", .inputs = "x", .outputs = "y", .formula = "y = x"};
/* Of the offsets up to a token the largest is where its sequence begins. */
static const te_utility starts_program = {.name = "rope_starts",
                                          .inputs = "o t",
                                          .outputs = "y",
                                          .formula = "y = rowmax(where(o <= t, o, 0))",
                                          .kind = TE_OUT_ROW};

/* --- runs --------------------------------------------------------------------------------------------------------- */

static te_status run_on(te_context *ctx, te_device *device, const te_utility *utility, te_run *run)
{
    te_program *program = te_utility_program(ctx, utility);
    if (!program) return ctx->status;
    te_status status = device->exec.backend->program_run(&device->exec, program, run, 1);
    return status == TE_OK ? TE_OK : te_fail_exec(ctx, status, &device->exec, NULL);
}

/* Every n-th element of the last dimension from `first` on. */
static te_operand part_of(const te_view *v, int64_t first, int64_t every)
{
    int last = v->ndim - 1;
    te_operand o = {.data = (char *)v->data + first * v->stride[last] * (int64_t)te_dtype_size(v->dtype),
                    .dtype = v->dtype};
    memcpy(o.stride, v->stride, (size_t)v->ndim * sizeof *o.stride);
    o.stride[last] *= every;
    return o;
}

/* A table {.., seq, pairs} beside rows of `ndim` dimensions. */
static te_operand table_beside(const te_tensor *t, int ndim)
{
    te_operand o = {.data = te_tensor_pointer(t), .dtype = t->dtype};
    for (int i = 0; i < t->ndim; i++) o.stride[ndim - t->ndim + i] = t->shape[i] == 1 ? 0 : t->stride[i];
    return o;
}

/* Dimensions in the order in which x lies in memory, the last one apart: heads of a packed projection stand nearer
 * together than tokens. */
static void order_dimensions(te_run *run, te_operand *const *operands, int n)
{
    for (int i = 1; i < run->ndim - 1; i++)
        for (int j = i; j > 0 && operands[0]->stride[j - 1] < operands[0]->stride[j]; j--) {
            int64_t extent = run->shape[j];
            run->shape[j] = run->shape[j - 1];
            run->shape[j - 1] = extent;
            for (int k = 0; k < n; k++) {
                int64_t stride = operands[k]->stride[j];
                operands[k]->stride[j] = operands[k]->stride[j - 1];
                operands[k]->stride[j - 1] = stride;
            }
        }
}

/* Cosines and sines {.., pairs} of the positions {..}. */
static te_status make_tables(te_call *call, const te_rope *rope, te_dtype dtype, te_tensor *tables[2])
{
    const te_tensor *p = rope->positions, *f = rope->frequencies;
    te_device *device = p->storage->device;
    te_run run = {.ndim = p->ndim + 1, .compute_f64 = dtype == TE_F64, .params = &rope->offset};
    memcpy(run.shape, p->shape, (size_t)p->ndim * sizeof *run.shape);
    run.shape[p->ndim] = f->shape[0];
    te_operand in[2] = {{.data = te_tensor_pointer(p), .dtype = p->dtype},
                        {.data = te_tensor_pointer(f), .dtype = f->dtype}}, out[2];
    memcpy(in[0].stride, p->stride, (size_t)p->ndim * sizeof *p->stride);
    in[1].stride[p->ndim] = f->stride[0];
    for (int i = 0; i < 2; i++) {
        tables[i] = te_tensor_new(call->ctx, device, dtype, run.ndim, run.shape);
        if (!tables[i]) return call->ctx->status;
        out[i] = table_beside(tables[i], run.ndim);
    }
    run.inputs = in;
    run.outputs = out;
    return run_on(call->ctx, device, &tables_program, &run);
}

static te_view view_of(const te_operand *o, const te_run *run)
{
    te_view v = {.data = o->data, .dtype = o->dtype, .ndim = run->ndim};
    memcpy(v.shape, run->shape, (size_t)run->ndim * sizeof *v.shape);
    memcpy(v.stride, o->stride, (size_t)run->ndim * sizeof *v.stride);
    return v;
}

/* Positions {..} beside rows of `ndim` dimensions, for each pair the same. */
static te_operand positions_beside(const te_tensor *p, int ndim)
{
    te_operand o = {.data = te_tensor_pointer(p), .dtype = p->dtype};
    for (int i = 0; i < p->ndim; i++) o.stride[ndim - 1 - p->ndim + i] = p->shape[i] == 1 ? 0 : p->stride[i];
    return o;
}

static te_operand frequencies_beside(const te_tensor *f, int ndim)
{
    te_operand o = {.data = te_tensor_pointer(f), .dtype = f->dtype};
    o.stride[ndim - 1] = f->stride[0];
    return o;
}

/* Whether one program makes cosines and sines for each head again: a backend with a loop of its own for rotations has
 * no launches that would be worth it. */
static bool turns_at_once(const te_rope *rope, const te_view *x)
{
    enum { FEW = 1 << 18 }; /* pairs: a few microseconds of a GPU */
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    const te_device *device = rope->positions->storage->device;
    return !device->exec.backend->rotate && rows * rope->frequencies->shape[0] <= FEW;
}

/* tables NULL: cosines and sines are made on the way. */
static te_status turn_pairs(te_call *call, const te_rope *rope, te_tensor *const *tables, const te_view *x,
                            const te_view *y, bool back)
{
    int64_t pairs = rope->frequencies->shape[0], second = rope->interleaved ? 1 : pairs;
    int64_t every = rope->interleaved ? 2 : 1;
    te_device *device = rope->positions->storage->device;
    te_operand in[4] = {part_of(x, 0, every), part_of(x, second, every),
                        tables ? table_beside(tables[0], x->ndim) : positions_beside(rope->positions, x->ndim),
                        tables ? table_beside(tables[1], x->ndim) : frequencies_beside(rope->frequencies, x->ndim)};
    te_operand out[2] = {part_of(y, 0, every), part_of(y, second, every)};
    te_operand *all[6] = {&in[0], &in[1], &in[2], &in[3], &out[0], &out[1]};
    te_run run = {.ndim = x->ndim, .inputs = in, .outputs = out, .compute_f64 = x->dtype == TE_F64,
                  .params = tables ? NULL : &rope->offset};
    memcpy(run.shape, x->shape, (size_t)x->ndim * sizeof *run.shape);
    run.shape[x->ndim - 1] = pairs;
    order_dimensions(&run, all, 6);
    if (!tables) return run_on(call->ctx, device, &whole_programs[back], &run);
    if (!device->exec.backend->rotate || run.compute_f64)
        return run_on(call->ctx, device, &turn_programs[back], &run);
    te_rotation rotation = {view_of(&in[0], &run), view_of(&in[1], &run), view_of(&out[0], &run),
                            view_of(&out[1], &run), view_of(&in[2], &run), view_of(&in[3], &run), back};
    return te_call_kernel(call, &device->exec, device->exec.backend->rotate(&device->exec, &rotation));
}

static te_status copy_rest(te_call *call, const te_rope *rope, const te_view *x, const te_view *y)
{
    int64_t turned = 2 * rope->frequencies->shape[0], left = x->shape[x->ndim - 1] - turned;
    if (left == 0) return TE_OK;
    te_operand in = part_of(x, turned, 1), out = part_of(y, turned, 1), *both[2] = {&in, &out};
    te_run run = {.ndim = x->ndim, .inputs = &in, .outputs = &out, .compute_f64 = x->dtype == TE_F64};
    memcpy(run.shape, x->shape, (size_t)x->ndim * sizeof *run.shape);
    run.shape[x->ndim - 1] = left;
    order_dimensions(&run, both, 2);
    return run_on(call->ctx, rope->positions->storage->device, &rest_program, &run);
}

te_status te_rope_turn(te_call *call, const te_rope *rope, const te_view *x, const te_view *y, bool back)
{
    te_tensor *tables[2] = {NULL, NULL};
    te_status status = TE_OK;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] == 0) return TE_OK;
    if (rope->frequencies->shape[0] > 0 && turns_at_once(rope, x)) {
        status = turn_pairs(call, rope, NULL, x, y, back);
    } else if (rope->frequencies->shape[0] > 0) {
        status = make_tables(call, rope, x->dtype == TE_F64 ? TE_F64 : TE_F32, tables);
        if (status == TE_OK) status = turn_pairs(call, rope, tables, x, y, back);
    }
    for (int i = 0; i < 2; i++) te_tensor_release(tables[i]);
    return status == TE_OK ? copy_rest(call, rope, x, y) : status;
}

/* --- positions ---------------------------------------------------------------------------------------------------- */

te_tensor *te_rope_positions(te_context *ctx, te_device *device, int64_t n)
{
    te_tensor *positions = te_tensor_new(ctx, device, TE_F32, 1, &n);
    te_arg count[] = {TE_A_TENSOR(positions), TE_A_NUMBER(0), TE_A_NUMBER(1)};
    if (positions && te_op_run_inplace(ctx, te_op_find(ctx, "sequence"), count, 3) == TE_OK) return positions;
    te_tensor_release(positions);
    return NULL;
}

te_tensor *te_rope_packed_positions(te_context *ctx, te_tensor *offsets, int64_t tokens)
{
    te_device *device = offsets->storage->device;
    te_tensor *token = te_rope_positions(ctx, device, tokens);
    te_tensor *start = token ? te_tensor_new(ctx, device, TE_F32, 1, &tokens) : NULL;
    te_tensor *positions = NULL;
    if (start) {
        te_operand in[2] = {{.data = te_tensor_pointer(offsets), .dtype = offsets->dtype, .stride = {0, 1}},
                            {.data = te_tensor_pointer(token), .dtype = TE_F32, .stride = {1, 0}}};
        te_operand out = {.data = te_tensor_pointer(start), .dtype = TE_F32, .stride = {1, 0}};
        te_run run = {.ndim = 2, .shape = {tokens, offsets->shape[0]}, .inputs = in, .outputs = &out};
        te_arg apart[] = {TE_A_TENSOR(token), TE_A_TENSOR(start)};
        if (tokens == 0 || run_on(ctx, device, &starts_program, &run) == TE_OK)
            positions = te_op_call(ctx, "sub", 2, apart);
    }
    te_tensor_release(token);
    te_tensor_release(start);
    return positions;
}

/* --- the op ------------------------------------------------------------------------------------------------------- */

te_status te_rope_check(te_call *call, const te_tensor *frequencies, int64_t dim)
{
    bool fits = frequencies->ndim == 1 && (frequencies->dtype == TE_F32 || frequencies->dtype == TE_F64);
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "frequencies must be {pairs} of float32 or float64, not %s %s",
                            TE_SHAPE_TEXT(frequencies), te_dtype_name(frequencies->dtype));
    if (frequencies->shape[0] > dim / 2)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "%lld frequencies turn %lld features, but rows have %lld",
                            (long long)frequencies->shape[0], 2 * (long long)frequencies->shape[0], (long long)dim);
    if (call->record && te_needs_grad(frequencies))
        return te_call_fail(call, TE_ERROR_UNSUPPORTED, "frequencies have no gradient; they must not require one");
    return TE_OK;
}

/* Positions that were given: whole or not, one for each row or shared by several. */
static te_status check_positions(te_call *call, const te_tensor *x, const te_tensor *p)
{
    bool number = te_dtype_has_gradient(p->dtype) || p->dtype == TE_I64 || p->dtype == TE_I32 || p->dtype == TE_U8;
    bool fits = number && p->ndim < x->ndim;
    for (int i = 0; fits && i < p->ndim; i++)
        fits = p->shape[i] == 1 || p->shape[i] == x->shape[x->ndim - 1 - p->ndim + i];
    if (!fits)
        return te_call_fail(call, TE_ERROR_ARGUMENT, "positions %s %s do not fit the rows of %s", TE_SHAPE_TEXT(p),
                            te_dtype_name(p->dtype), TE_SHAPE_TEXT(x));
    if (call->record && te_needs_grad(p))
        return te_call_fail(call, TE_ERROR_UNSUPPORTED, "positions have no gradient; they must not require one");
    return TE_OK;
}

enum { INTERLEAVED, OFFSET };

te_status te_rope_forward(te_call *call)
{
    te_tensor *x = call->in[0], *given = call->in[2];
    if (!te_dtype_has_gradient(x->dtype) || x->ndim < (given ? 1 : 2))
        return te_call_fail(call, TE_ERROR_ARGUMENT, "x {.., seq, dim} of a floating dtype is needed, not %s %s",
                            TE_SHAPE_TEXT(x), te_dtype_name(x->dtype));
    te_device *device = x->storage->device;
    te_status status = te_rope_check(call, call->in[1], x->shape[x->ndim - 1]);
    if (status == TE_OK && given) status = check_positions(call, x, given);
    if (status != TE_OK) return status;
    te_tensor *y = te_tensor_new_like(x);
    te_tensor *positions = !y      ? NULL
                           : given ? te_tensor_retain(given)
                                   : te_rope_positions(call->ctx, device, x->shape[x->ndim - 2]);
    status = positions ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_rope rope = {positions, call->in[1], call->attr[OFFSET].number, call->attr[INTERLEAVED].number != 0};
        te_view from = te_tensor_view(x), to = te_tensor_view(y);
        status = te_rope_turn(call, &rope, &from, &to, false);
    }
    if (status == TE_OK && call->record &&
        (te_call_save(call, positions) < 0 || te_call_save(call, call->in[1]) < 0))
        status = call->ctx->status;
    te_tensor_release(positions);
    if (status == TE_OK)
        call->out[0] = y;
    else
        te_tensor_release(y);
    return status;
}

te_status te_rope_backward(te_call *call)
{
    te_tensor *dx = te_tensor_new_like(call->dout[0]);
    te_status status = dx ? TE_OK : call->ctx->status;
    if (status == TE_OK) {
        te_rope rope = {call->saved[0], call->saved[1], call->attr[OFFSET].number, call->attr[INTERLEAVED].number != 0};
        te_view from = te_tensor_view(call->dout[0]), to = te_tensor_view(dx);
        status = te_rope_turn(call, &rope, &from, &to, true);
    }
    if (status == TE_OK) return te_grad_give(call, 0, dx);
    te_tensor_release(dx);
    return status;
}
