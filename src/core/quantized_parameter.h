/* quantized_parameter.h - parameters that exist in quantized form alone.
 *
 * Such a tensor has a shape and the dtype of what it was made from, but its storage has no bytes: it holds the
 * quantized copies that products read, and the recipe state of the product that it belongs to. It may be a leaf
 * that collects gradients. What knows nothing of all this sees its values: operations take the dequantized
 * tensor (te_tensor_plain, which hands gradients on), copies and conversions dequantize, and what is written to
 * it is quantized again. */
#ifndef TE_CORE_QUANTIZED_PARAMETER_H
#define TE_CORE_QUANTIZED_PARAMETER_H

#include "recipe.h"

struct te_quantized_storage {
    te_quantized copies;
    te_recipe_state *state; /* whose weight it is: scale, history and quantizer */
};

static inline bool te_tensor_is_quantized(const te_tensor *t) { return t->storage->quantized != NULL; }

/* A parameter with source's values, in the role of the weight under state's recipe, for row-wise use and, where
 * backward is to multiply with it, column-wise. Not quantized where the recipe leaves weights in high precision. NULL
 * on failure. */
te_tensor *te_quantized_parameter_new(te_tensor *source, te_recipe_state *state, bool columnwise);
/* The same with copies that exist already, of which it takes references. */
te_tensor *te_quantized_parameter_from(te_context *ctx, const te_quantized *copies, te_recipe_state *state);
/* How often it was written since te_quantized_parameter_new, here or before it was moved. */
static inline uint64_t te_quantized_parameter_writes(const te_tensor *t) { return t->storage->version; }

/* The same bytes, which stand for values of a dtype, and on a device. */
te_tensor *te_quantized_parameter_as(const te_tensor *param, te_dtype dtype);
te_tensor *te_quantized_parameter_on(const te_tensor *param, te_device *device);
/* Copies of the bytes, for another product. */
te_tensor *te_quantized_parameter_clone(const te_tensor *param, te_recipe_state *state);
void te_quantized_storage_free(te_storage *storage);

/* param = source, quantized anew with the scale that its state has now; of equal shapes. Copies that a graph
 * reads stay where they are, here and where others are adopted: they are written over. Copies of another
 * kind are an error there. */
te_status te_quantized_parameter_store(te_tensor *param, te_tensor *source);
/* The same in steps, of which only the first needs memory: copies for te_quantize_rows, or te_quantize over them, which
 * may be those that the parameter has where nobody else sees them, and what makes them its own. Closing copies that are
 * the parameter's does nothing. */
te_status te_quantized_parameter_open(te_tensor *param, te_quantized *copies);
void te_quantized_parameter_written(te_tensor *param, te_quantized *copies);
void te_quantized_parameter_close(te_tensor *param, te_quantized *copies);

/* Replaces the copies by those of `from`, which must be of the same kind and shape and have all directions that the
 * parameter has; they may be on another device. The check alone: `who` begins its message. */
te_status te_quantized_parameter_check(const te_tensor *param, const char *who, const te_quantized *from);
te_status te_quantized_parameter_adopt(te_tensor *param, const te_quantized *from);

/* Its values as an ordinary tensor, and the same recorded, so that gradients go to it. t itself when it is one. A new
 * reference; NULL on failure. */
te_tensor *te_tensor_dequantized(te_tensor *t);
te_tensor *te_tensor_plain(te_tensor *t);

#endif
