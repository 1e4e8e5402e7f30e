/* map.h - values found by a key of 128 bits: a hash table with open addressing, at most half full.
 *
 * Keys are compared as a whole, so two of them that differ never meet: a key is what identifies a value, or a hash of
 * it that is long enough for nobody to find another with the same. The table mixes the bits itself, so that addresses
 * and small numbers serve as well. Whose the values are is for the caller to say: the table frees its own memory alone.
 */
#ifndef TE_KERNELS_MAP_H
#define TE_KERNELS_MAP_H

#include "memory.h"

#include <stdbool.h>

typedef struct te_map_key {
    uint64_t a, b;
} te_map_key;

typedef struct te_map_slot {
    te_map_key key;
    void      *value; /* NULL: the slot is free */
} te_map_slot;

/* All zeros: empty. */
typedef struct te_map {
    te_map_slot *slots;
    size_t       capacity, count; /* capacity: a power of two, or 0 */
} te_map;

/* The value of a key; NULL: there is none. */
void *te_map_find(const te_map *map, te_map_key key);
/* Gives a key its value, which is not NULL, instead of any that it had. False, and nothing has changed: no memory. */
bool te_map_put(te_map *map, const te_mem *mem, te_map_key key, void *value);
/* Forgets a key, if it is there. */
void te_map_remove(te_map *map, te_map_key key);
/* One value after another, in no order, *at being 0 before the first; NULL after the last. The map stays as it is
 * meanwhile. */
void *te_map_next(const te_map *map, size_t *at);
/* Leaves the map empty. */
void te_map_clear(te_map *map, const te_mem *mem);

#endif
