/* kernel_list.h - the kernels that a backend offers, each said once: members of te_backend, the declarations and the
 * table of the CPU and CUDA backends, and what te.profile measures follow from these rows.
 *
 * Whoever includes it defines, for the rows that it wants,
 *
 *     TE_KERNEL(name, parameters, arguments, moved)             every backend has it
 *     TE_KERNEL_OPTIONAL(name, parameters, arguments, moved)    NULL where a backend leaves the work to other kernels
 *     TE_KERNEL_COUNTED(name, parameters, arguments)            every backend has it; profile.c counts its work
 *     TE_KERNEL_DEVICE(name, parameters, arguments, moved)      NULL where memory is the host's
 *
 * name       of the member; te_cpu_NAME and te_cuda_NAME are the functions
 * parameters of the function
 * arguments  the names of its parameters, with which one such function calls another
 * moved      bytes that it reads and writes, for te.profile: view_bytes counts what is stored, read_bytes leaves out
 *            what is broadcast (profile.c)
 *
 * Read it as part of kernels.h, where views and the rest of their parameters are described; there is no guard, since it
 * is included several times.
 */
#ifndef TE_KERNEL
#define TE_KERNEL(name, parameters, arguments, moved)
#endif
#ifndef TE_KERNEL_OPTIONAL
#define TE_KERNEL_OPTIONAL(name, parameters, arguments, moved) TE_KERNEL(name, parameters, arguments, moved)
#endif
#ifndef TE_KERNEL_COUNTED
#define TE_KERNEL_COUNTED(name, parameters, arguments) TE_KERNEL(name, parameters, arguments, 0)
#endif
#ifndef TE_KERNEL_DEVICE
#define TE_KERNEL_DEVICE(name, parameters, arguments, moved) TE_KERNEL(name, parameters, arguments, moved)
#endif

/* Runs the program once per te_run, as one kernel. */
TE_KERNEL_COUNTED(program_run, (te_exec *exec, te_program *program, const te_run *runs, int n_runs),
                  (exec, program, runs, n_runs))

/* See te_gemm, te_attention and te_attention_grad. */
TE_KERNEL_COUNTED(gemm, (te_exec *exec, const te_gemm *g), (exec, g))
TE_KERNEL_COUNTED(attention, (te_exec *exec, const te_attention *a), (exec, a))
TE_KERNEL_COUNTED(attention_backward, (te_exec *exec, const te_attention_grad *g), (exec, g))

/* See te_rotation. NULL: a program does it. */
TE_KERNEL_OPTIONAL(rotate, (te_exec *exec, const te_rotation *r), (exec, r),
                   2 * (view_bytes(&r->a) + view_bytes(&r->y)))

/* A matrix to its quantized copies in one pass, and back from one of them: quantize.h. */
TE_KERNEL_COUNTED(quantize, (te_exec *exec, const te_quantize_job *job), (exec, job))
TE_KERNEL(dequantize, (te_exec *exec, const te_quantize_job *job, int side), (exec, job, side),
          source_bytes(job) + side_bytes(job->quantizer, &job->side[side]))

/* dst = src with conversion; equal shapes, any strides. Fast where either side is transposed. */
TE_KERNEL(copy, (te_exec *exec, const te_view *dst, const te_view *src), (exec, dst, src),
          view_bytes(dst) + read_bytes(src))
/* n copies in one launch where possible: none may write what another one touches. */
TE_KERNEL_DEVICE(copy_all, (te_exec *exec, const te_view *dst, const te_view *src, int n), (exec, dst, src, n),
                 copies_bytes(dst, src, n))

/* dst, contiguous: src with zeros in the columns of the last dimension right of its row's number, in the one before it,
 * plus `diagonal`, which is less than 2^62 in size; `upper`: left of it. NULL: by programs. */
TE_KERNEL_OPTIONAL(triangle, (te_exec *exec, const te_view *dst, const te_view *src, int64_t diagonal, bool upper),
                   (exec, dst, src, diagonal, upper), view_bytes(src) + view_bytes(dst))

/* out[i, :] = table[ids[i], :]; ids int32 or int64 (any value out of range is an error naming it); out may have another
 * float dtype than the table. Backward: dtable[ids[i], :] += dy[i, :], order of additions fixed. squares: NULL, or the
 * sum of squares of a float32 dtable, which becomes that of the result or NaN: not known. */
TE_KERNEL(embedding, (te_exec *exec, const te_view *out, const te_view *table, const te_view *ids),
          (exec, out, table, ids), 2 * view_bytes(out) + view_bytes(ids))
TE_KERNEL(embedding_backward,
          (te_exec *exec, const te_view *dtable, const te_view *dy, const te_view *ids, double *squares),
          (exec, dtable, dy, ids, squares), 3 * view_bytes(dy) + view_bytes(ids))

/* out[…i…] = src[… index[…i…] at dim …]; index int64/int32 of out's shape. scatter_add: dst[… index …] += src, in the
 * order of src, of dst's dtype (or adds_halves); scatter: dst[… index …] = src, likewise. */
TE_KERNEL(gather, (te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim),
          (exec, out, src, index, dim), 2 * view_bytes(out) + view_bytes(index))
TE_KERNEL(scatter_add, (te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim),
          (exec, dst, src, index, dim), 3 * view_bytes(src) + view_bytes(index))
TE_KERNEL(scatter, (te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim),
          (exec, dst, src, index, dim), 2 * view_bytes(src) + view_bytes(index))

/* Along the last dimension: index (int64, from 0) of the first largest (smallest) value; a NaN counts as the
 * extreme. */
TE_KERNEL(arg_reduce, (te_exec *exec, const te_view *index, const te_view *src, bool largest),
          (exec, index, src, largest), view_bytes(src) + view_bytes(index))
/* Along the last dimension: the k largest (smallest), sorted; values and int64 indices. */
TE_KERNEL(topk, (te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool largest),
          (exec, values, indices, src, largest), view_bytes(src) + view_bytes(values) + view_bytes(indices))
/* Along the last dimension: positions (int64) of the elements in order; equal ones stay in order, NaN is the largest.
 * Where memory is not the host's, rows may have less than 2^32 elements, which come to `values`, too, if that is not
 * NULL. */
TE_KERNEL(sort,
          (te_exec *exec, const te_view *values, const te_view *indices, const te_view *src, bool descending),
          (exec, values, indices, src, descending),
          view_bytes(src) + view_bytes(indices) + (values ? view_bytes(values) : 0))
/* Along the last dimension: sums of the elements so far, with `reverse` of those from there on. */
TE_KERNEL(cumsum, (te_exec *exec, const te_view *dst, const te_view *src, bool reverse), (exec, dst, src, reverse),
          view_bytes(src) + view_bytes(dst))
/* Row i of out (int64): samples drawn by the weights (non-negative, finite, not all zero) in row i of src; without
 * replacement when asked. Draw d of row i uses element i * n_samples + d of the generator. */
TE_KERNEL(multinomial, (te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng),
          (exec, out, src, replacement, rng), view_bytes(src) + view_bytes(out))

/* Mixtures of experts (te_routes). route_map: where each slot stands, sorted by expert, then token, then slot; what
 * does not fit into `rows` rows, and what stands for no slot, is -1. routing: bool or uint8 {tokens, experts} gives map
 * {tokens, 2 experts + 1} int32, per token rows, experts and their number, and counts {experts} int32; ids int64 or
 * int32 {tokens, slots} give map {slots * tokens} and no counts. All contiguous. */
TE_KERNEL(route_map, (te_exec *exec, const te_view *map, const te_view *counts, const te_view *routing, int64_t rows),
          (exec, map, counts, routing, rows), view_bytes(map) + view_bytes(routing))
/* rows {n, width} from tokens {tokens, width}, each times its weight; rows of no slot are 0. And tokens, as sums over
 * their slots in order; and weights {tokens, experts} = the products of both, 0 where there is no slot. Contiguous, of
 * one floating dtype; weights are float32 (float64 beside float64). A place outside is an error. */
TE_KERNEL(route_rows, (te_exec *exec, const te_routes *routes, const te_view *rows, const te_view *tokens),
          (exec, routes, rows, tokens), view_bytes(rows) + view_bytes(tokens))
TE_KERNEL(route_tokens, (te_exec *exec, const te_routes *routes, const te_view *tokens, const te_view *rows),
          (exec, routes, tokens, rows), view_bytes(rows) + view_bytes(tokens))
TE_KERNEL(route_weights,
          (te_exec *exec, const te_routes *routes, const te_view *weights, const te_view *rows, const te_view *tokens),
          (exec, routes, weights, rows, tokens), view_bytes(rows) + view_bytes(tokens) + view_bytes(weights))
/* map {tokens, experts} bool: the k experts of the largest scores (float32) in each row, among those of the best_groups
 * groups whose largest k / best_groups scores have the largest sum. A NaN is the largest, ties go to the lower index.
 * Contiguous. */
TE_KERNEL(route_choose,
          (te_exec *exec, const te_view *map, const te_view *scores, int64_t k, int64_t groups, int64_t best_groups),
          (exec, map, scores, k, groups, best_groups), view_bytes(map) + view_bytes(scores))

#undef TE_KERNEL_DEVICE
#undef TE_KERNEL_COUNTED
#undef TE_KERNEL_OPTIONAL
#undef TE_KERNEL
