/* gemm_onednn.h - the library behind gemm_onednn.c: its engine, streams and the primitives made so far. */
#ifndef TE_KERNELS_CPU_GEMM_ONEDNN_H
#define TE_KERNELS_CPU_GEMM_ONEDNN_H

#include "gemm_onednn_compat.h"

typedef struct te_gemm_onednn te_gemm_onednn;

te_gemm_onednn *te_gemm_onednn_open(te_exec *exec); /* NULL: no memory, or the library cannot start */
void te_gemm_onednn_close(te_exec *exec, te_gemm_onednn *lib);

/* The primitive of `spec`, which runs on one thread; made at first use and kept, at least until some hundred others
 * have been asked for. NULL: the library cannot do it, which is remembered as well. */
const te_dnnl_matmul *te_gemm_onednn_primitive(te_exec *exec, te_gemm_onednn *lib, const te_dnnl_spec *spec);

/* Where thread `thread` < `threads` executes; streams are made by the first form, which may fail. */
bool te_gemm_onednn_streams(te_exec *exec, te_gemm_onednn *lib, int threads);
te_dnnl_args te_gemm_onednn_args(const te_gemm_onednn *lib, int thread);

#endif
