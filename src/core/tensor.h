/* tensor.h - tensors and their storage, as the engine sees them. */
#ifndef TE_CORE_TENSOR_H
#define TE_CORE_TENSOR_H

#include "context.h"

/* Why a storage is not written to. */
typedef enum te_read_only {
    TE_WRITABLE,
    TE_OF_QUANTIZED, /* values of a parameter that is stored quantized: what is written would be lost */
    TE_OF_FILE,      /* a mapped file */
} te_read_only;

/* What an optimizer's last step left: the storage of the parameter, and the writes to both until then. */
typedef struct te_follower {
    bool     known;
    uint64_t id, writes, own;
    uint64_t waiting; /* the recording whose launch compares both first */
} te_follower;

/* Bytes on a device, shared by views. */
typedef struct te_storage {
    te_context *ctx;
    te_device  *device;
    te_block   *block; /* NULL: foreign memory */
    void       *data;
    size_t      bytes;
    uint64_t    id;      /* unique within the context */
    uint64_t    version; /* grows with every write in place */
    uint64_t    written; /* te_context.clock at the last one */
    uint64_t    launches; /* how many of its versions are launches of graphs that only read it */
    int         refs, graph_refs; /* the latter among them: of graphs, which go on reading and writing this memory */
    void      (*deleter)(void *user);
    void       *user;
    uint64_t    graph, graph_wrote; /* the last graph that keeps it, and the last whose recording wrote it */
    struct te_storage **made_at, *made_next; /* among those of a graph's own memory, which every launch writes */
    te_tensor  *shadow;  /* the whole storage converted to the compute dtype (weights under autocast), NULL: none */
    uint64_t    shadow_version;
    double      squares; /* the sum of squares of all elements, float32, when they had this version; 0: none known */
    uint64_t    squares_version;
    bool        keyed;   /* its contents were named to the device, which may keep something of them: te_content_key */
    te_read_only read_only;
    struct te_quantized_storage *quantized; /* in place of bytes: quantized_parameter.h */
    te_follower follower; /* of a master copy */
    struct te_quantized_values *attached;   /* what the bytes are the values of: recipe.h */
} te_storage;

struct te_tensor {
    te_context *ctx;
    te_storage *storage;
    int         refs;
    te_dtype    dtype;
    int         ndim;
    bool        requires_grad; /* a leaf that collects gradients */
    bool        replaced;      /* another tensor took its place: a gradient that came back would be lost */
    int64_t     offset;        /* elements from the start of the storage */
    int64_t     shape[TE_MAX_DIMS], stride[TE_MAX_DIMS];
    te_node    *node; /* what computed it, NULL for leaves */
    int         node_output;
    te_tensor  *grad;
    te_tensor  *main_grad; /* gradients of backward are added here instead; NULL: none */
    struct te_leaf_hooks *hooks; /* that see the gradient of a leaf (autograd.h); NULL: none */
    te_tensor  *next;      /* among those that wait to be freed, or to be used again */
};

/* A new tensor on `device` (NULL: cpu), uninitialised. */
te_tensor *te_tensor_new(te_context *ctx, te_device *device, te_dtype dtype, int ndim, const int64_t *shape);
te_tensor *te_tensor_new_like(const te_tensor *t); /* contiguous, same shape, dtype and device */
/* A tensor whose storage has no bytes. */
te_tensor *te_tensor_new_unbacked(te_context *ctx, te_device *device, te_dtype dtype, int ndim, const int64_t *shape);
/* A view with another geometry on the same storage; not connected to the graph. */
te_tensor *te_tensor_alias(te_tensor *t, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset);
te_tensor *te_tensor_scalar(te_context *ctx, te_device *device, te_dtype dtype, double value);

bool    te_tensor_contiguous(const te_tensor *t);
bool    te_tensor_repeats(const te_tensor *t); /* elements share memory, as an expanded one's */
/* Whether writing to out may change what of in is still to be read: the same memory seen differently. */
bool te_tensor_overlaps_otherwise(const te_tensor *out, const te_tensor *in);
/* Why a tensor may not be written to; NULL: it may. */
const char *te_tensor_unwritable(const te_tensor *t);
bool    te_same_shape(const te_tensor *a, const te_tensor *b);
te_view te_tensor_view(const te_tensor *t);
void   *te_tensor_pointer(const te_tensor *t); /* device address of the first element */

/* The gradient that a parameter has, for all who read or change it: main_grad where there is one, else grad.
 * Borrowed. */
te_tensor *te_tensor_gradient(const te_tensor *t);
/* Begins it anew: main_grad becomes zeros, grad goes. */
te_status  te_tensor_zero_gradient(te_tensor *t);

/* Contiguous copies and conversions outside the graph. A new reference; t itself when nothing has to be done. */
te_tensor *te_tensor_contiguous_copy(te_tensor *t);
te_tensor *te_tensor_cast(te_tensor *t, te_dtype dtype);
te_tensor *te_tensor_clone_data(te_tensor *t);
/* As te_tensor_cast, but the copy is kept with the storage until the tensor changes: weights under autocast. */
te_tensor *te_tensor_cast_cached(te_tensor *t, te_dtype dtype);
te_status  te_tensor_copy_data(te_tensor *dst, te_tensor *src); /* dst = src, broadcasting; bumps dst's version */
/* The same for a part, of src's shape, of a tensor that nobody has seen yet; the offset counts elements. */
te_status  te_tensor_copy_part(te_tensor *fresh, const int64_t *stride, int64_t offset, te_tensor *src);
/* Likewise for parts that follow one another along dim of `fresh`; stacked: each is one position of it, and stride is
 * that of the other dimensions. */
te_status  te_tensor_copy_parts(te_tensor *fresh, const int64_t *stride, int dim, bool stacked, te_tensor *const *list,
                                int n);
te_status  te_tensor_copy_across(te_tensor *dst, te_tensor *src); /* likewise, where they are on different devices */
te_tensor *te_tensor_on_device(te_tensor *t, te_device *device); /* a contiguous copy there; t itself when it is
                                                                    there */
te_status  te_tensor_fill(te_tensor *t, double value);
/* Notes the sum of squares of a tensor that was just computed, where it is all of its storage and float32; and says it
 * as long as nothing was written there: then gradients need not be read for their norm. */
void te_tensor_note_squares(te_tensor *t, double squares);
bool te_tensor_squares_known(const te_tensor *t, double *squares);
/* The same of a tensor that was marked as written but is not yet: te_grad_target. */
bool te_tensor_squares_before(const te_tensor *t, double *squares);

void te_storage_release(te_storage *storage);
/* Its versions without those of launches of graphs that only read it: as long as they stay, so do the contents. */
uint64_t te_storage_writes(const te_storage *storage);
void te_tensor_pool_close(te_context *ctx);

/* Number of elements, or -1 when the byte size does not fit 63 bits or an extent is negative. */
int64_t te_shape_numel(int ndim, const int64_t *shape, size_t element_size);
/* "{2,3}", as messages have it, in a caller's buffer; returns it. */
const char *te_shape_text(int ndim, const int64_t *shape, char *text, size_t size);
#define TE_SHAPE_TEXT(t) te_shape_text((t)->ndim, (t)->shape, (char[160]){0}, 160)
/* Normalises a dimension that may count from the end; -1 when out of range. */
int te_dim_index(int64_t dim, int ndim);
/* Shape that a and b broadcast to; false when they do not. */
bool te_broadcast(int *ndim, int64_t *shape, int other_ndim, const int64_t *other_shape);

#endif
