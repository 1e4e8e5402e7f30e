/* create.h - what functions that make tensors share: their options, and their last step. */
#ifndef TE_LUA_CREATE_H
#define TE_LUA_CREATE_H

#include "bindings.h"

/* What the options of a new tensor say. */
typedef struct te_lua_creation {
    const char *function;
    te_dtype    dtype;
    te_device  *device;
    bool        requires_grad;
} te_lua_creation;

/* The options at `index`, the last argument, of which dtype may be absent; `known` are the names that it may hold.
 * Raises where they are wrong, and where the device is not there. */
te_lua_creation te_lua_read_creation(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype,
                                     const char *const *known);
/* Pushes an uninitialised tensor; the userdata owns it. Raises. */
te_tensor *te_lua_push_created(te_lua *rt, lua_State *L, const te_lua_creation *c, int ndim, const int64_t *shape);
/* What every such function returns: the tensor is on top. Raises where `status` is a failure. */
int te_lua_finish_created(te_lua *rt, lua_State *L, const te_lua_creation *c, te_status status);

#endif
