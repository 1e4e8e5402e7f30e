/* test_host_failures.c - every allocation of a runtime's life fails in turn: opening, loading the library,
 * building a model, training, encoding a text, closing. Each time there is a status, the runtime does its next work,
 * and closing gives everything back.
 *
 *     test_host_failures [STRIDE]      1 tries every allocation; the test takes some of them
 */
#include "test.h"

#include "tetrain/tetrain.h"

#if defined(__SANITIZE_ADDRESS__)
enum { STRIDE = 67 }; /* each try is ten times as long */
#else
enum { STRIDE = 23 };
#endif

typedef struct heap {
    long countdown; /* fails when it reaches 0; negative: never */
    long count;     /* growing requests */
    long live;      /* blocks */
    bool stays;     /* once memory ran out, it stays so */
} heap;

static void *heap_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    heap *h = user;
    if (new_size == 0) {
        h->live -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    if (new_size > (ptr ? old_size : 0)) { /* Lua relies on shrinking */
        h->count++;
        if (h->countdown == 0 || (h->countdown > 0 && --h->countdown == 0)) {
            h->countdown = h->stays ? 0 : -1;
            return NULL;
        }
    }
    void *p = realloc(ptr, new_size);
    h->live += p && !ptr;
    return p;
}

static const char script[] = "local te = require 'te'\n"
                             "te.manual_seed(1)\n"
                             "local model = te.Sequential(te.LayerNorm(4), te.Linear(4, 8), te.GELU(), te.Linear(8, "
                             "3))\n"
                             "local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.01 })\n"
                             "local x, targets = te.randn { 5, 4 }, te.tensor({ 0, 2, 1, 2, 1 }, { dtype = 'int64' })\n"
                             "te.autocast({ dtype = 'bfloat16', recipe = te.recipe.MXFP8BlockScaling {} }, function()\n"
                             "  te.no_grad(model, x)\n"
                             "end)\n"
                             "for i = 1, 2 do\n"
                             "  optimizer:zero_grad()\n"
                             "  local loss = te.cross_entropy(model(x), targets)\n"
                             "  loss:backward()\n"
                             "  optimizer:step()\n"
                             "end\n"
                             "assert(#tostring(model:explain(x)) > 100)\n"
                             "local tokens = te._core.tokenizer { tokens = { 'a', 'b', 'ab', '<x>' }, opaque = { 3 },\n"
                             "  merges = { 0, 1, 2 }, added = { '<x>', 3, false }, steps = { '<', false } }\n"
                             "assert(tokens:decode(tokens:encode('ab<x>b')) == 'ab<x>b')\n"
                             "assert(tostring(model[2].weight):sub(1, 7) == 'float32')\n";

/* Scopes are closed in which memory may have run out. */
static const char settled[] = "local te = require 'te'\n"
                              "assert(te._core.grad_enabled() and not te._core.compute_dtype())\n"
                              "assert(not require('te.recipe.mode').on)\n";

static tetrain *open_runtime(heap *h)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .realloc = heap_realloc, .realloc_user = h};
    return tetrain_open(&options);
}

static tetrain_status run(tetrain *rt) { return tetrain_run_string(rt, script, sizeof script - 1, "=script"); }

/* The n-th allocation fails, or it and all after it. */
static void fail_at(long n, bool stays, int *outcomes)
{
    heap     h = {.countdown = n, .stays = stays};
    tetrain *rt = open_runtime(&h);
    if (!rt) {
        CHECK_MSG(h.live == 0, "allocation %ld: %ld blocks left by opening", n, h.live);
        outcomes[0]++;
        return;
    }
    tetrain_status status = run(rt);
    CHECK_MSG(status == TETRAIN_OK || status == TETRAIN_ERROR_MEMORY, "allocation %ld: status %d, %s", n, (int)status,
              tetrain_error(rt));
    CHECK_MSG(status == TETRAIN_OK || *tetrain_error(rt), "allocation %ld: no message", n);
    outcomes[status == TETRAIN_OK ? 1 : 2]++;
    h.countdown = -1;
    CHECK_MSG(tetrain_run_string(rt, settled, sizeof settled - 1, "=settled") == TETRAIN_OK,
              "after allocation %ld failed: %s", n, tetrain_error(rt));
    status = run(rt);
    CHECK_MSG(status == TETRAIN_OK, "after allocation %ld failed: status %d, %s", n, (int)status, tetrain_error(rt));
    tetrain_close(rt);
    CHECK_MSG(h.live == 0, "allocation %ld: %ld blocks leaked", n, h.live);
}

int main(int argc, char **argv)
{
    heap     h = {.countdown = -1};
    tetrain *rt = open_runtime(&h);
    CHECK(rt && run(rt) == TETRAIN_OK);
    tetrain_close(rt);
    CHECK(h.live == 0);
    long total = h.count, stride = argc > 1 ? atol(argv[1]) : STRIDE;
    CHECK_MSG(total > 1000, "%ld allocations", total);
    for (int stays = 0; stays <= 1; stays++) {
        int outcomes[3] = {0};
        for (long n = 1 + stays; n <= total; n += stride) fail_at(n, stays, outcomes);
        CHECK_MSG(outcomes[0] > 0 && outcomes[2] > outcomes[1], "%d not opened, %d recovered, %d failed", outcomes[0],
                  outcomes[1], outcomes[2]);
        printf("of %ld allocations%s: %d not opened, %d recovered, %d failed\n", total,
               stays ? ", memory gone from then on" : "", outcomes[0], outcomes[1], outcomes[2]);
    }
    return TEST_END();
}
