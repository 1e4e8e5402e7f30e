/* describe_internal.h - what the files that describe plans share. */
#ifndef TE_CORE_FUSER_DESCRIBE_INTERNAL_H
#define TE_CORE_FUSER_DESCRIBE_INTERNAL_H

#include "describe.h"
#include "describe_product.h"
#include "emit.h"

typedef struct te_describing {
    const te_fuse_plan *plan;
    te_device          *device;
    const te_space     *frames; /* of a run with these inputs */
    void              (*step)(void *user, const te_step_description *);
    void               *user;
} te_describing;

/* The same as te_group_describe, of a plan that those inputs fit and that is no refusal. */
te_status te_plan_describe(te_fuse_plan *plan, te_tensor *const *inputs,
                           void (*step)(void *user, const te_step_description *),
                           void (*split)(void *user, const te_split_description *), void *user);

double te_described_rows(const te_describing *d, int space);
double te_described_elements(const te_describing *d, int value);
double te_described_bytes(const te_describing *d, int value, int half); /* half: only one of two is read */
/* Bytes that an operand of n elements takes in one direction; in high precision when its role is not quantized. */
double te_described_operand(const te_unit *unit, te_role role, double n);
bool   te_described_quantized(const te_unit *unit); /* whether backward multiplies quantized operands */
double te_described_flops(const te_describing *d, const te_unit *unit); /* of one product of a linear layer */
/* "float8_e4m3", "float8_e4m3 in blocks of 1 x 32": text. */
const char *te_described_format(const te_quantizer *q, char *text, size_t size);
/* How the program that makes a value leaves it for a product. */
te_emit_way te_described_way(const te_describing *d, int value);
te_described_product te_described_gemm(const te_describing *d, const te_unit *unit);

void te_describe_step(const te_describing *d, const te_unit *unit, te_step_what what, const char *kernel, double read,
                      double written, double flops, bool backward);
/* The step that quantizes an operand; none where a program leaves it quantized (way). */
void te_describe_quantize(const te_describing *d, const te_unit *unit, te_role role, double n, bool rowwise,
                          bool columnwise, bool backward, te_emit_way way);

/* describe_linear.c */
void te_describe_linear(const te_describing *d, const te_unit *unit);
void te_describe_linear_backward(const te_describing *d, const te_unit *unit);
/* Weight gradients that waited for the unit to compute operand i again. */
void te_describe_waiting(const te_describing *d, const te_unit *maker, int i);

/* describe_splits.c */
void te_describe_splits(const te_describing *d, void (*split)(void *, const te_split_description *), void *user);

/* describe_grouped.c */
void   te_describe_grouped(const te_describing *d, const te_unit *unit);
void   te_describe_grouped_backward(const te_describing *d, const te_unit *unit);
double te_described_list(const te_describing *d, const te_unit *unit); /* bytes of a node's list */

#endif
