/* test_host_memory.c - a training script while memory runs out: every allocation of the Lua heap, the engine and the
 * tensors fails in turn. Each time the script ends in a status and a message, the weights are what they were, the next
 * step works, and closing gives everything back. */
#include "test.h"

#include "tetrain/tetrain.h"

typedef struct heap {
    long countdown; /* fails when it reaches 0; negative: never */
    size_t live;    /* blocks: LuaJIT may name another size when it frees after a failure */
} heap;

static void *heap_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    heap *h = user;
    if (new_size == 0) {
        h->live -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    bool grows = new_size > (ptr ? old_size : 0); /* Lua relies on shrinking */
    if (grows && h->countdown >= 0 && h->countdown-- == 0) return NULL;
    void *p = realloc(ptr, new_size);
    h->live += p && !ptr;
    return p;
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
    CHECK_MSG(h.live == 0, "%zu blocks leaked", h.live);
    printf("%ld allocations in a step\n", n);
}

int main(void)
{
    test_steps(layers);
    test_steps(experts);
    test_steps(own);
    return TEST_END();
}
