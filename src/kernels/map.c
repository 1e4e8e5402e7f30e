/* map.c - see map.h. A key stands in the first free slot from its home on, round the end of the table. */
#include "map.h"

enum { FIRST_CAPACITY = 32 };

static size_t home_of(te_map_key key, size_t capacity)
{
    uint64_t h = (key.a ^ key.b * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return (size_t)(h ^ h >> 29) & (capacity - 1);
}

/* Where the key is, or would be. */
static te_map_slot *slot_of(te_map_slot *slots, size_t capacity, te_map_key key)
{
    size_t i = home_of(key, capacity);
    while (slots[i].value && (slots[i].key.a != key.a || slots[i].key.b != key.b)) i = (i + 1) & (capacity - 1);
    return &slots[i];
}

void *te_map_find(const te_map *map, te_map_key key)
{
    return map->capacity ? slot_of(map->slots, map->capacity, key)->value : NULL;
}

static bool reserve_one(te_map *map, const te_mem *mem)
{
    if (2 * (map->count + 1) <= map->capacity) return true;
    size_t capacity = map->capacity ? 2 * map->capacity : FIRST_CAPACITY;
    te_map_slot *slots = te_mem_zalloc(mem, capacity * sizeof *slots);
    if (!slots) return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->slots[i].value) *slot_of(slots, capacity, map->slots[i].key) = map->slots[i];
    te_mem_free(mem, map->slots, map->capacity * sizeof *slots);
    map->slots = slots;
    map->capacity = capacity;
    return true;
}

bool te_map_put(te_map *map, const te_mem *mem, te_map_key key, void *value)
{
    if (!reserve_one(map, mem)) return false;
    te_map_slot *slot = slot_of(map->slots, map->capacity, key);
    map->count += !slot->value;
    *slot = (te_map_slot){key, value};
    return true;
}

/* Those behind it that are there because it was in their way move up. */
void te_map_remove(te_map *map, te_map_key key)
{
    if (!te_map_find(map, key)) return;
    size_t mask = map->capacity - 1, hole = (size_t)(slot_of(map->slots, map->capacity, key) - map->slots);
    for (size_t i = (hole + 1) & mask; map->slots[i].value; i = (i + 1) & mask) {
        size_t home = home_of(map->slots[i].key, map->capacity);
        if (((i - home) & mask) < ((i - hole) & mask)) continue;
        map->slots[hole] = map->slots[i];
        hole = i;
    }
    map->slots[hole].value = NULL;
    map->count--;
}

void *te_map_next(const te_map *map, size_t *at)
{
    while (*at < map->capacity) {
        void *value = map->slots[(*at)++].value;
        if (value) return value;
    }
    return NULL;
}

void te_map_clear(te_map *map, const te_mem *mem)
{
    te_mem_free(mem, map->slots, map->capacity * sizeof *map->slots);
    *map = (te_map){NULL, 0, 0};
}
