/* describe_product.c - see describe_product.h. The device is asked about views without data: what it does depends on
 * formats and shapes. */
#include "describe_product.h"

#include <stdio.h>

/* A side of a role's matrix {rows, cols} as an operand, or a plain matrix of that shape. */
static te_view operand(const te_described_product *p, te_role role, int side, bool transposed, int64_t rows,
                       int64_t cols, te_quant *quant)
{
    const te_quantizer *q = &p->recipe->quantizers[role];
    bool turn = transposed != (side == 1);
    if (p->recipe->quantized[role]) {
        te_quantized_layout l = te_quantizer_layout(q, side, rows, cols);
        te_quantized_side s = {.rows = l.rows,
                               .cols = l.cols,
                               .row_stride = l.row_stride,
                               .col_stride = l.col_stride,
                               .scale_row_stride = l.scale_row_stride,
                               .scale_col_stride = l.scale_col_stride,
                               .amax_stride = l.amaxes > 1};
        return te_quantized_view(q, &s, transposed, quant);
    }
    return (te_view){.dtype = p->compute,
                     .ndim = 2,
                     .shape = {turn ? cols : rows, turn ? rows : cols},
                     .stride = {turn ? 1 : cols, turn ? cols : 1}};
}

const char *te_describe_product(const te_described_product *p, te_product_kind kind, const char *name, char *text,
                                size_t size)
{
    const te_backend *backend = p->exec->backend;
    te_quant quants[2];
    te_gemm g = {.alpha = 1};
    int64_t m = kind == TE_PRODUCT_WGRAD ? p->out : p->tokens, n = kind == TE_PRODUCT_FORWARD ? p->out : p->in;
    te_role a = kind == TE_PRODUCT_FORWARD ? TE_ROLE_INPUT : TE_ROLE_GRAD_OUTPUT;
    te_role b = kind == TE_PRODUCT_WGRAD ? TE_ROLE_INPUT : TE_ROLE_WEIGHT;
    bool quantized = p->recipe && (p->recipe->quantized[a] || p->recipe->quantized[b]) &&
                     (kind == TE_PRODUCT_FORWARD || p->recipe->backward == TE_BACKWARD_QUANTIZED);
    if (!quantized) return name;
    if (kind == TE_PRODUCT_FORWARD) {
        g.a = operand(p, a, 0, false, p->tokens, p->in, &quants[0]);
        g.b = operand(p, b, 0, true, p->out, p->in, &quants[1]);
    } else if (kind == TE_PRODUCT_DGRAD) {
        g.a = operand(p, a, 0, false, p->tokens, p->out, &quants[0]);
        g.b = operand(p, b, 1, true, p->out, p->in, &quants[1]);
    } else {
        g.a = operand(p, a, 1, false, p->tokens, p->out, &quants[0]);
        g.b = operand(p, b, 1, true, p->tokens, p->in, &quants[1]);
    }
    g.c = (te_view){.dtype = p->result, .ndim = 2, .shape = {m, n}, .stride = {n, 1}};
    const char *reason =
        backend->gemm_decline ? backend->gemm_decline(p->exec, &g) : "the device has no products of such bytes";
    if (reason)
        snprintf(text, size, "%s, decoded: %s", name, reason);
    else
        snprintf(text, size, "%s, %s as it is%s", name, te_element_names[p->recipe->quantizers[a].element],
                 p->recipe->fast_sums[kind] ? ", fast sums" : "");
    return text;
}
