/* args.h - the arguments of the hand-written kernels, for the host that fills them and the device that reads them.
 * Every member takes 8 bytes or a multiple, so both see one layout; the first two are the plan's scratch memory and
 * fault word, which te_cuda_plan_bind sets. */
#ifndef TE_KERNELS_CUDA_KERNELS_ARGS_H
#define TE_KERNELS_CUDA_KERNELS_ARGS_H

/* A strided window on device memory: strides count elements. */
typedef struct te_cuda_view {
    void   *data;
    int64_t ndim;
    int64_t shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
} te_cuda_view;

typedef struct te_cuda_bound {
    char     *scratch;
    uint64_t *fault; /* the lowest report; all ones: none */
} te_cuda_bound;

/* Ids are int64 where `ids_wide`, else int32. */
typedef struct te_embedding_args {
    te_cuda_bound bound;
    te_cuda_view  rows, table, ids; /* rows: out or dy */
    int64_t       n, width, ids_wide;
    int64_t       sorted; /* backward: 0 or 1, which half of the scratch memory the sort ends in */
} te_embedding_args;

/* Stable sort of n pairs in scratch memory, keys[2][n] and positions[2][n], by the low `bits` of the keys. */
typedef struct te_sort_args {
    te_cuda_bound bound;
    int64_t       n, bits;
} te_sort_args;

/* whole is indexed along dim by index, whose shape part has. */
typedef struct te_index_args {
    te_cuda_bound bound;
    te_cuda_view  whole, part, index;
    int64_t       n, dim, index_wide;
    int64_t       sorted;
} te_index_args;

/* Rows along the last dimension. */
typedef struct te_select_args {
    te_cuda_bound bound;
    te_cuda_view  src, out, indices;
    int64_t       rows, n, k; /* k: of topk; draws of multinomial */
    int64_t       flag;       /* largest, reverse, replacement */
    int64_t       leaves;     /* multinomial: of its tree */
    uint64_t      rng[4];
} te_select_args;

/* q, k, v, out, lse, bias and gradients as in te_attention and te_attention_grad; an absent view has no data. */
typedef struct te_attention_args {
    te_cuda_bound  bound; /* backward: scratch holds rowsum(dout out) per query */
    te_cuda_view   q, k, v, out, lse, bias, dout, dq, dk, dv;
    const int32_t *cu_q, *cu_kv;
    int64_t        n_seqs, tiles; /* tiles: blocks per head and sequence */
    int64_t        left, right, bottom_right;
    int64_t        lse_wide, bias_dtype;
    double         scale, kept_scale; /* kept_scale: 1 / (1 - dropout) */
    int64_t        dropout;           /* whether there is any */
    uint64_t       threshold, rng[4];
} te_attention_args;

#endif
