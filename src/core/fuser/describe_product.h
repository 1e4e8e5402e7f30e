/* describe_product.h - how the device multiplies the operands of a quantized product. */
#ifndef TE_CORE_FUSER_DESCRIBE_PRODUCT_H
#define TE_CORE_FUSER_DESCRIBE_PRODUCT_H

#include "../recipe.h"

/* A product of a linear layer: y {tokens, out} = x {tokens, in} weight {out, in}^T, and what backward makes of it. */
typedef struct te_described_product {
    te_exec *exec;
    const te_product_recipe *recipe;
    te_dtype compute, result;
    int64_t tokens, in, out;
} te_described_product;

/* "linear, float8_e4m3 as it is, fast sums" or "linear, decoded: " and why: forward, and where backward is quantized.
 * `name` alone for products of plain operands. */
const char *te_describe_product(const te_described_product *p, te_product_kind kind, const char *name, char *text,
                                size_t size);

#endif
