/* program_f64_fold.h - reductions in float64: the functions of these names in te_blocks. */
#ifndef TE_KERNELS_CPU_PROGRAM_F64_FOLD_H
#define TE_KERNELS_CPU_PROGRAM_F64_FOLD_H

#include "program_blocks.h"

void te_f64_fold_start(te_fold *fold, te_fold_kind kind);
void te_f64_fold_add(te_fold *fold, te_fold_kind kind, const void *src, const void *by, const void *about, size_t n,
                     te_ahead ahead);
void te_f64_fold_finish(te_fold *fold, te_fold_kind kind, void *dst);
void te_f64_fold_rows(te_fold_kind kind, void *dst, const te_fold_rows *fold, te_ahead ahead);
void te_f64_fold_columns(const te_fold_columns *fold, te_ahead ahead);

#endif
