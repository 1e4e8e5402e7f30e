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

/* Ids are int64 where `ids_wide`, else int32. Dimensions of ids that lie behind one another in both are joined. */
typedef struct te_embedding_args {
    te_cuda_bound bound;
    te_cuda_view  rows, table, ids; /* rows: out or dy */
    int64_t       n, width, ids_wide;
    int64_t       lanes_bits; /* forward: 1 << lanes_bits threads take a row */
    int64_t       sorted; /* backward: digits that the pairs in scratch memory were sorted by */
} te_embedding_args;

/* Targets of `bytes` bytes each: int64, int32 or uint8. */
typedef struct te_classes_args {
    te_cuda_bound bound;
    te_cuda_view  targets;
    int64_t       n, bytes, classes;
    double        ignored; /* no class, and no fault */
} te_classes_args;

/* n lengths to offsets[n + 1]; and these, times a step each, to what cuDNN reads: lengths [batch], then offsets
 * [batch + 1] for each step. Of empty sequences cuDNN makes NaN or worse before 9.25 (cudnn-frontend's issue 943), so
 * they are left out, and what is missing to `batch` is the shortest sequence again, which has the same numbers written
 * to the same places. */
enum { TE_PACKED_STEPS = 9 };
typedef struct te_packed_args {
    te_cuda_bound bound;
    te_cuda_view  lens;
    int64_t       n, wide, tokens; /* wide: of int64 */
    int32_t      *offsets, *ragged;
    int64_t       batch, n_steps, step[TE_PACKED_STEPS];
} te_packed_args;

/* Stable sort of n pairs in scratch memory by one digit after the other, from the lowest on. There lie, of 8 bytes
 * each, keys[2][n], positions[2][n] and halves[TE_SORT_HALVES], which says where the pairs are after so many digits;
 * then, of 4 bytes, how many pairs of each block have each value of a digit. A block has a stretch of the pairs, in
 * tiles. */
enum { TE_SORT_BITS = 9, TE_SORT_DIGITS = 1 << TE_SORT_BITS, TE_SORT_TILE = 2048, TE_SORT_HALVES = 16 };
typedef struct te_sort_args {
    te_cuda_bound bound;
    int64_t       n, stretch, bits; /* bits: of the keys */
    int64_t       digit;            /* number of the digit */
} te_sort_args;

/* whole is indexed along dim by index, whose shape part has. */
typedef struct te_index_args {
    te_cuda_bound bound;
    te_cuda_view  whole, part, index;
    int64_t       n, dim, index_wide;
    int64_t       sorted; /* as in te_embedding_args */
} te_index_args;

/* Sums by buckets of 1 << stretch_bits places of `slots`, which number the elements of `whole`, of index's shape but
 * for dim, where it has `extent` and the index `taken`; behind dim there are `inner`. Each of `warps` warps has a share
 * of the n elements. Scratch memory: uint32 numbers of elements of the buckets, from counts_at on those of each
 * bucket and warp, from placed_at on the elements with their places in the buckets. All views have their dimensions
 * joined. */
enum { TE_ADD_LONG = 128, TE_ADD_SLOTS = 16, TE_ADD_STRETCH_BYTES = 32 << 10, TE_BUCKETS = 1024 };
typedef struct te_buckets_args {
    te_cuda_bound bound;
    te_cuda_view  whole, part, index;
    int64_t       n, index_wide, extent, taken, inner, slots, buckets, bits, stretch_bits;
    int64_t       warps, share, counts_at, placed_at;
} te_buckets_args;

/* n units of views of one shape, whose last dimension counts units. A source that is walked `back` along it begins a
 * unit less one element before. The diagonal counts columns. */
typedef struct te_move_args {
    te_cuda_bound bound;
    te_cuda_view  dst, src;
    int64_t       n, back;
    int64_t       diagonal, upper; /* of a triangle */
} te_move_args;

/* Lines of `run` elements that share an index: n of them, with the index's dimensions but for that of the run. Or, for
 * te_gather_columns, n rows of `run` elements with the same indices, where dim is the last: a thread has TE_COLUMN_IDS
 * of those, of elements that lie within a row of at most TE_COLUMN_BYTES. */
enum { TE_COLUMN_IDS = 16, TE_COLUMN_THREADS = 512, TE_COLUMN_BYTES = 96 << 10 };
typedef struct te_lines_args {
    te_cuda_bound bound;
    te_cuda_view  whole, part, index;
    int64_t       n, dim, index_wide, run;
    int64_t       lanes_bits; /* as in te_embedding_args */
    int64_t       inner;      /* of a scatter: lines for each index, one after the other */
} te_lines_args;

/* Rows of elements from one memory to another: `run` units side by side, rows `pitch` units apart. The piece has the
 * blocks from `first` on, and `units` in all. */
enum { TE_COPY_PIECES = 64, TE_COPY_THREADS = 256, TE_COPY_EACH = 4 };
typedef struct te_copy_piece {
    void       *dst;
    const void *src;
    int64_t     run, units, dst_pitch, src_pitch, first;
} te_copy_piece;
typedef struct te_copy_args {
    te_cuda_bound bound;
    int64_t       n;
    te_copy_piece piece[TE_COPY_PIECES];
} te_copy_args;

/* Rows along the last dimension. */
typedef struct te_select_args {
    te_cuda_bound bound;
    te_cuda_view  src, out, indices;
    int64_t       rows, n, k; /* k: of topk; draws of multinomial */
    int64_t       flag;       /* largest, reverse, replacement */
    int64_t       leaves;     /* multinomial: of its tree; te_arg_short: log2 of a row's threads */
    int64_t       parts;      /* arg_reduce: of `part` elements each, of a row that several blocks share */
    int64_t       part;
    uint64_t      rng[4];
} te_select_args;

/* order.cu: the first k of rows of n elements in the order of their keys (te_key of `largest`, `turned` round), less
 * than 2^32. Of a tile k are kept, of the last one k_last. `from` and `to` are where in scratch memory what is chosen
 * so far lies, -1: in src, and where it is wanted. In long rows a block has a stretch of so many elements. */
enum { TE_ORDER_EACH = 8, TE_ORDER_BITS = 8, TE_ORDER_DIGITS = 1 << TE_ORDER_BITS };
typedef struct te_order_args {
    te_cuda_bound bound;
    te_cuda_view  src, out, indices; /* out: values, or no data */
    int64_t       rows, n, k, k_last, largest, turned, from, to;
    int64_t       pass, blocks, stretch;
} te_order_args;

/* A te_integers to n elements of `bytes` bytes. */
typedef struct te_integers_args {
    te_cuda_bound bound;
    void         *to;
    int64_t       n, bytes, low;
    uint64_t      range, rng[4];
} te_integers_args;

/* te_backend.route_map: counts for masks, a sort's scratch for ids below `experts`, of int64 where `wide`. Masks are
 * counted by `tiles` tiles of `tile` tokens; scratch is int32 places {tokens, columns}, how many tokens of each expert
 * are in a tile, later before it, {tiles, columns}, and before each expert {columns}. */
typedef struct te_route_map_args {
    te_cuda_bound bound;
    const void   *routing;
    int32_t      *map, *counts;
    int64_t       tokens, columns, rows, wide, experts, sorted, tile, tiles;
} te_route_map_args;

/* A te_routes with n rows of `width` elements: from `from` to `to`; weights are made of rows `from` and tokens
 * `beside`. Where rows are made, scratch holds a number for each. */
typedef struct te_routes_args {
    te_cuda_bound  bound;
    int64_t        tokens, slots, token_step, slot_step, experts;
    const int32_t *row, *expert, *count, *shift;
    const void    *weights;
    int64_t        gates;
    void          *to;
    const void    *from, *beside;
    int64_t        n, width;
} te_routes_args;

/* te_backend.route_choose; scratch: float {tokens, groups}. */
typedef struct te_choose_args {
    te_cuda_bound bound;
    const float  *scores;
    uint8_t      *map;
    int64_t       tokens, experts, k, groups, best_groups;
} te_choose_args;

/* q, k, v, out, lse, bias and gradients as in te_attention and te_attention_grad; an absent view has no data. */
typedef struct te_attention_args {
    te_cuda_bound  bound; /* scratch: in backward rowsum(dout out) per query, in decoding what the splits found */
    te_cuda_view   q, k, v, out, lse, bias, dout, dq, dk, dv, dbias;
    const void    *sinks; /* float, double beside double; NULL: none */
    const int32_t *cu_q, *cu_kv;
    int64_t        n_seqs, tiles; /* tiles: blocks per head and sequence */
    int64_t        splits, split_keys; /* in decoding, each of so many keys */
    int64_t        left, right, bottom_right;
    int64_t        lse_wide;
    double         scale, kept_scale; /* kept_scale: 1 / (1 - dropout) */
    float          scale_f32, kept_scale_f32; /* the same, rounded */
    int64_t        dropout;           /* whether there is any */
    uint64_t       threshold, rng[4];
    const float   *factor[3];         /* of q, k and v where they are quantized */
    int64_t        codes;             /* out is, too, with v's factor */
} te_attention_args;

/* Views as in te_attention, of 16 bits and float32; keys that row i sees without the bias: i - left to i + right, less
 * what is not there. raised: float32, dense. */
typedef struct te_unseen_args {
    te_cuda_bound bound;
    te_cuda_view  v, out, lse, bias;
    int64_t       keys, left, right;
    float        *raised;
} te_unseen_args;

/* A te_quantized_side. */
typedef struct te_quantize_place {
    uint8_t *data;
    int64_t  rows, cols, row_stride, col_stride;
    void    *scale_inv;
    int64_t  scale_row_stride, scale_col_stride;
    float   *amax;
    int64_t  amax_stride;
    uint64_t rng[4];
    int64_t  line_groups;
} te_quantize_place;

/* A quantizer as far as the code depends on it, in 16 bits that are never all 0: its element, its kind of factor << 2,
 * 1 + log2 of the length of its blocks << 4 (0: one factor for the whole tensor), and these. TRANSPOSED: side 1 is
 * stored so, if there is one; FOUR_BITS: where its choice between two factors begins. */
enum {
    TE_VARIANT_SQUARE = 1 << 8,
    TE_VARIANT_TRANSPOSED = 1 << 9,
    TE_VARIANT_HADAMARD = 1 << 10,
    TE_VARIANT_STOCHASTIC = 1 << 11,
    TE_VARIANT_FOUR_BITS = 12,
    TE_VARIANT_ANY = 1 << 15
};

/* A te_quantize_job with its quantizer; `from`: the side that is dequantized. Floats as doubles. */
typedef struct te_quantize_args {
    te_cuda_bound     bound; /* scratch: two amaxes */
    void             *source;
    int64_t           rows, cols, source_stride;
    te_quantize_place side[2];
    int64_t           element, scale, block_rows, block_cols, needs_history, replicated, power_of_two, row_scaled;
    int64_t           hadamard, stochastic, four_over_six, from;
    double            epsilon, scale_max, factor, overflow;
    const float      *given; /* instead of `factor`; NULL: that */
    float            *seen;
    float            *amaxes;   /* of the whole; NULL: those in scratch */
    int64_t           measures; /* tiles are measured and forgotten */
    float            *kept;     /* and what follows: see te_quantize_job */
    const float      *stale;
    int64_t           force;
    int64_t           decides; /* te_quantize compares factors, nothing was decided before */
} te_quantize_args;

/* The last two dimensions of a quantized view (te_quant), as lines of places that follow one another where they can:
 * element (line, place) has the factor (line >> shift[0], place >> shift[1]), where `scaled` asks for that, and times
 * the factor of the whole tensor where `whole` does. 2^across_bits threads are beside each other along a line. */
typedef struct te_decode_args {
    te_cuda_bound  bound;
    const uint8_t *data;
    void          *to;
    int64_t        lines, places, stride[2], to_stride[2];
    int64_t        element, scale, shift[2], scale_stride[2];
    const void    *scale_inv;
    const float   *amax;
    int64_t        amax_stride[2], scaled, whole, across_bits;
    double         scale_max;
} te_decode_args;

/* alpha and beta of a product to out[0] and out[1], 0 to out[2]; alpha is multiplied by up to two factors of tensors: a
 * number, or what an amax gives under scale_max > 0. */
typedef struct te_scales_args {
    te_cuda_bound bound;
    float        *out;
    const float  *factor[2];
    double        scale_max[2], alpha, beta;
} te_scales_args;

/* te_backend.delayed_update: a block of the grid for each tensor. */
typedef struct te_delayed_args {
    te_cuda_bound     bound;
    const te_delayed *tensors;
    int64_t           n;
    uint64_t         *skipped;
} te_delayed_args;

/* Factors of blocks, `lines` down the result by `blocks` along the sum, to where a product of bytes wants them; the
 * padding is 0. TILES: see te_arranged. */
enum { TE_ARRANGE_BY_BLOCKS, TE_ARRANGE_BY_LINES, TE_ARRANGE_TILES };
typedef struct te_arrange_args {
    te_cuda_bound bound;
    const void   *from;
    void         *to;
    int64_t       lines, blocks, stride[2], padded_lines, padded_blocks, layout, bytes;
} te_arrange_args;

/* y {m, n} = alpha x {m, k} w {n, k}^T + bias {n}, times the factors of w and x where they are quantized; lines are so
 * many elements apart, and those of w and x begin at multiples of 16 bytes and are as many long. m <= TE_FEW_ROWS, and
 * k <= TE_FEW_LONGEST. */
enum { TE_FEW_ROWS = 8, TE_FEW_LINES = 16 /* of w to a block */, TE_FEW_LONGEST = 1 << 30 };
typedef struct te_few_args {
    te_cuda_bound bound;
    const void   *w, *x, *bias; /* bias: of y's dtype, or NULL */
    void         *y;
    int64_t       m, n, k, w_line, x_line, y_line;
    double        alpha;
    const float  *factor[2]; /* NULL: none */
} te_few_args;

/* Lines of bytes to lines of 16's multiples, and further lines, of zeros. */
typedef struct te_pad_args {
    te_cuda_bound  bound;
    const uint8_t *from;
    uint8_t       *to;
    int64_t        lines, bytes, stride, padded_lines, padded_bytes;
} te_pad_args;

#endif
