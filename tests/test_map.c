/* test_map.c - the table of kernels/map.h against a plain list: keys that collide, that differ in one half alone, that
 * are removed in any order; and without memory. */
#include "failing_memory.h"
#include "test.h"

#include "kernels/map.h"

enum { KEYS = 600, STEPS = 40000 };

/* Small numbers, addresses in steps of a page, and equal halves: what hashes badly. */
static te_map_key key_of(int i)
{
    switch (i % 3) {
    case 0: return (te_map_key){(uint64_t)i, 0};
    case 1: return (te_map_key){7, (uint64_t)i << 12};
    default: return (te_map_key){(uint64_t)i << 40, (uint64_t)i << 40};
    }
}

static void check_all(const te_map *map, int *const *expected, size_t count)
{
    int wrong = 0;
    size_t at = 0, met = 0;
    for (int i = 0; i < KEYS; i++) wrong += te_map_find(map, key_of(i)) != expected[i];
    for (const int *value; (value = te_map_next(map, &at)); met++) wrong += expected[value[0]] != value;
    CHECK_MSG(wrong == 0 && map->count == count && met == count, "%d wrong, %zu in the table, %zu met, expected %zu",
              wrong, map->count, met, count);
}

/* Puts, replaces and removes at random; values are pairs of numbers, of which the first is the key's. */
static void check_random(uint64_t seed)
{
    static int values[KEYS][2];
    int *expected[KEYS] = {NULL};
    failing_memory memory = {.countdown = -1};
    const te_mem mem = {failing_memory_realloc, &memory};
    te_map map = {NULL, 0, 0};
    size_t count = 0, range = 30;
    for (int step = 0; step < STEPS; step++) {
        if (step == STEPS / 2) range = KEYS; /* at first few keys, often removed */
        int i = (int)(test_random(&seed) % range);
        bool put = test_random(&seed) % 2;
        count += (size_t)(put && !expected[i]);
        count -= (size_t)(!put && expected[i]);
        values[i][0] = i;
        expected[i] = put ? values[i] : NULL;
        if (put) CHECK(te_map_put(&map, &mem, key_of(i), values[i]));
        else te_map_remove(&map, key_of(i));
        if (step % 97 == 0) check_all(&map, expected, count);
    }
    check_all(&map, expected, count);
    CHECK_MSG(2 * map.count <= map.capacity, "%zu of %zu slots", map.count, map.capacity);
    te_map_clear(&map, &mem);
    CHECK_MSG(memory.live == 0 && !map.slots && !map.count, "%zu bytes left", memory.live);
}

static void check_empty(void)
{
    te_map map = {NULL, 0, 0};
    size_t at = 0;
    CHECK(!te_map_find(&map, key_of(1)) && !te_map_next(&map, &at));
    te_map_remove(&map, key_of(1));
    te_map_clear(&map, &te_mem_libc);
    CHECK(!map.slots && !map.capacity);
}

/* A key that is refused leaves the others as they are; replacing a value wants no memory. */
static void check_refused(void)
{
    static int values[KEYS];
    failing_memory memory = {.countdown = 0};
    const te_mem mem = {failing_memory_realloc, &memory};
    te_map map = {NULL, 0, 0};
    CHECK(!te_map_put(&map, &mem, key_of(0), values) && !map.capacity);
    memory.countdown = 1; /* the first table, and no larger one */
    int n = 0;
    while (te_map_put(&map, &mem, key_of(n), &values[n])) n++;
    CHECK_MSG(n >= 8 && map.count == (size_t)n && 2 * map.count <= map.capacity, "%d of %zu", n, map.capacity);
    CHECK(!te_map_find(&map, key_of(n)));
    CHECK(te_map_put(&map, &mem, key_of(0), &values[n]) && te_map_find(&map, key_of(0)) == &values[n]);
    for (int i = 1; i < n; i++) CHECK(te_map_find(&map, key_of(i)) == &values[i]);
    te_map_clear(&map, &mem);
    CHECK(memory.live == 0);
}

int main(void)
{
    for (uint64_t seed = 1; seed <= 5; seed++) check_random(seed);
    check_empty();
    check_refused();
    return TEST_END();
}
