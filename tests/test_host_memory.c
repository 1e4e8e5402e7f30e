/* test_host_memory.c - a training script while memory runs out: every allocation of the Lua heap, the engine and the
 * tensors fails in turn. Each time the script ends in a status and a message, the weights are what they were, the next
 * step works, and closing gives everything back. */
#include "test.h"

#include "tetrain/tetrain.h"

typedef struct heap {
    long countdown; /* fails when it reaches 0; negative: never */
    size_t live;    /* blocks */
    size_t bytes;   /* in them */
    size_t wrong;   /* sizes that were named and are not those that were asked for */
} heap;

enum { HEADER = 16 }; /* before each block: its size */

static void *heap_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    heap  *h = user;
    size_t size = 0;
    if (ptr) memcpy(&size, (char *)ptr - HEADER, sizeof size);
    h->wrong += ptr && size != old_size;
    if (new_size == 0) {
        h->live -= ptr != NULL;
        h->bytes -= size;
        free(ptr ? (char *)ptr - HEADER : NULL);
        return NULL;
    }
    bool grows = new_size > size; /* Lua relies on shrinking */
    if (grows && h->countdown >= 0 && h->countdown-- == 0) return NULL;
    char *block = realloc(ptr ? (char *)ptr - HEADER : NULL, HEADER + new_size);
    if (!block) return NULL;
    h->live += !ptr;
    h->bytes += new_size - size;
    memcpy(block, &new_size, sizeof new_size);
    return block + HEADER;
}

#define STEP                                                                                                           \
    "optimizer = te.optim.AdamW(model:parameters(), { lr = 0.01 })\n"                                                  \
    "x, targets = te.randn { 6, 8 }, te.tensor({ 0, 4, 2, 1, 3, 4 }, { dtype = 'int64' })\n"                           \
    "function step()\n"                                                                                                \
    "  model:zero_grad()\n"                                                                                            \
    "  local loss = te.cross_entropy(model(x), targets)\n"                                                             \
    "  loss:backward()\n"                                                                                              \
    "  optimizer:step()\n"                                                                                             \
    "end\n"                                                                                                            \
    "step()\n"

static const char layers[] = "local te = require 'te'\n"
                             "te.manual_seed(1)\n"
                             "model = te.Sequential(te.LayerNorm(8), te.Linear(8, 16), te.GELU(), te.Linear(16, 5))\n"
                             "w1, w2, w3 = model[2].weight, model[4].weight, model[1].weight\n" STEP;
static const char experts[] = "local te = require 'te'\n"
                              "te.manual_seed(1)\n"
                              "model = te.Sequential(te.LayerNorm(8), te.MoE(8, 8, 3), te.Linear(8, 5))\n"
                              "w1, w2, w3 = model[2].router.weight, model[3].weight, model[1].weight\n" STEP;
/* Functions in Lua within the step. */
static const char own[] = "te = require 'te'\n"
                          "te.manual_seed(1)\n"
                          "local Own = te.BasicOperation:extend('Own')\n"
                          "function Own:op_forward(_, v) return v * 2 end\n"
                          "function Own:op_backward(_, g) return te.pointwise(function(v) return v * 2 end)(g) end\n"
                          "model = te.Sequential(te.LayerNorm(8), Own(), te.Linear(8, 5), Own())\n"
                          "w1, w2, w3 = model[3].weight, model[1].weight, model[1].bias\n" STEP;

enum { N_WEIGHTS = 3, MAX_ELEMENTS = 128 };

static void read_weights(tetrain *rt, float (*values)[MAX_ELEMENTS])
{
    static const char *const names[N_WEIGHTS] = {"w1", "w2", "w3"};
    for (int i = 0; i < N_WEIGHTS; i++) {
        te_tensor *w = tetrain_get_tensor(rt, names[i]);
        CHECK(w && te_tensor_read(w, TE_F32, values[i]) == TE_OK);
        te_tensor_release(w);
    }
}

static tetrain *open_runtime(heap *h)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .realloc = heap_realloc, .realloc_user = h};
    return tetrain_open(&options);
}

/* Returns whether allocation n was reached within a step. */
static bool step_with_failure(tetrain *rt, heap *h, long n)
{
    static float before[N_WEIGHTS][MAX_ELEMENTS], after[N_WEIGHTS][MAX_ELEMENTS];
    memset(before, 0, sizeof before);
    memset(after, 0, sizeof after);
    read_weights(rt, before);
    h->countdown = n;
    tetrain_status status = tetrain_run_string(rt, "step()", 6, "=step");
    bool reached = h->countdown < 0;
    h->countdown = -1;
    if (status != TETRAIN_OK) {
        CHECK_MSG(status == TETRAIN_ERROR_MEMORY, "allocation %ld: status %d, %s", n, (int)status, tetrain_error(rt));
        CHECK_MSG(*tetrain_error(rt), "allocation %ld: no message", n);
        read_weights(rt, after);
        CHECK_MSG(memcmp(before, after, sizeof before) == 0, "allocation %ld: weights changed", n);
    }
    CHECK_MSG(tetrain_run_string(rt, "step()", 6, "=step") == TETRAIN_OK, "after allocation %ld failed: %s", n,
              tetrain_error(rt));
    return reached;
}

static void test_steps(const char *setup)
{
    heap h = {.countdown = -1};
    tetrain *rt = open_runtime(&h);
    CHECK_MSG(rt && tetrain_run_string(rt, setup, strlen(setup), "=setup") == TETRAIN_OK, "%s",
              rt ? tetrain_error(rt) : "not opened");
    long n = 0;
    while (step_with_failure(rt, &h, n) && n < 20000) n++;
    CHECK_MSG(n > 20 && n < 20000, "%ld allocations in a step", n);
    tetrain_close(rt);
    CHECK_MSG(h.live == 0 && h.bytes == 0, "%zu blocks leaked, %zu bytes", h.live, h.bytes);
    CHECK_MSG(h.wrong == 0, "%zu blocks with a wrong size", h.wrong);
    printf("%ld allocations in a step\n", n);
}

/* Closures for whose upvalues there is no memory. */
static void test_closures(void)
{
    static const char make[] = "function step() local a, b, c for i = 1, 20 do local d, e = i, i "
                               "a, b, c = function() return a, d end, function() return e, b, c end, d end end";
    heap     h = {.countdown = -1};
    tetrain *rt = open_runtime(&h);
    CHECK(rt && tetrain_run_string(rt, make, sizeof make - 1, "=make") == TETRAIN_OK);
    for (long n = 0; n < 120; n++) {
        h.countdown = n;
        tetrain_run_string(rt, "step()", 6, "=step");
        h.countdown = -1;
        CHECK(tetrain_run_string(rt, "step() collectgarbage()", 23, "=step") == TETRAIN_OK);
    }
    tetrain_close(rt);
    CHECK_MSG(h.live == 0 && h.bytes == 0, "%zu blocks leaked, %zu bytes", h.live, h.bytes);
    CHECK_MSG(h.wrong == 0, "%zu closures with a wrong size", h.wrong);
}

int main(void)
{
    test_closures();
    test_steps(layers);
    test_steps(experts);
    test_steps(own);
    return TEST_END();
}
