/* test_short_memory.c - a system that has no more memory: tensors take all of it and are released, and whatever else
 * needs some then gets it. */
#include "test.h"

#include "tetrain/te.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

enum { FILLING = 20000, MOST = 20000, BUDGET = 100 << 20 };

static te_tensor *filling[MOST];

/* Takes all memory with tensors and releases them: their number. */
static int fill(te_context *ctx)
{
    int n = 0;
    while (n < MOST && (filling[n] = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){FILLING}, 1))) n++;
    CHECK_MSG(strstr(te_context_error(ctx), "out of memory"), "%s", te_context_error(ctx));
    for (int i = 0; i < n; i++) te_tensor_release(filling[i]);
    return n;
}

static te_tensor *apply(te_context *ctx, const char *op, te_tensor *a)
{
    te_tensor *out = NULL;
    te_arg     args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a}, {.kind = TE_ARG_TENSOR, .as.tensor = a}};
    if (te_op_run(ctx, te_op_find(ctx, op), args, 2, &out, 1) != TE_OK)
        CHECK_MSG(false, "%s: %s", op, te_context_error(ctx));
    return out;
}

/* --- a hook ------------------------------------------------------------------------------------------------------- */

typedef struct budget {
    size_t used, most;
} budget;

static void *budget_realloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    budget *b = user;
    if (!ptr) old_size = 0;
    if (new_size > old_size && new_size - old_size > b->most - b->used) return NULL;
    void *now = new_size ? realloc(ptr, new_size) : NULL;
    if (!new_size) free(ptr);
    if (!new_size || now) b->used += new_size - old_size;
    return now;
}

/* Structs of small results, and nodes of the graph, come from where blocks of tensors do. */
static void test_small_results(void)
{
    enum { RESULTS = 2000 };
    static te_tensor  *results[RESULTS];
    budget             b = {.most = BUDGET};
    te_context_options options = {.struct_size = sizeof options, .threads = 1, .realloc = budget_realloc,
                                  .realloc_user = &b};
    te_context        *ctx = te_context_open(&options);
    te_tensor         *a = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){64}, 1);
    CHECK(fill(ctx) > 1000);
    te_tensor_set_requires_grad(a, true);
    for (int i = 0; i < RESULTS; i++) results[i] = apply(ctx, "mul", a);
    for (int i = 0; i < RESULTS; i++) te_tensor_release(results[i]);
    CHECK_MSG(fill(ctx) > 1000, "%zu bytes used", b.used); /* and tensors get all of it again */
    te_tensor_release(a);
    te_context_release(ctx);
    CHECK_MSG(b.used == 0, "%zu bytes were not given back", b.used);
}

/* A request beyond all bounds says nothing of how much memory there is: blocks are kept as before. */
static void test_absurd(void)
{
    te_memory_stats    stats;
    budget             b = {.most = BUDGET};
    te_context_options options = {.struct_size = sizeof options, .threads = 1, .realloc = budget_realloc,
                                  .realloc_user = &b};
    te_context        *ctx = te_context_open(&options);
    CHECK(!te_tensor_full(ctx, TE_F32, 1, (int64_t[]){BUDGET}, 1));
    for (int i = 0; i < 500; i++) filling[i] = te_tensor_full(ctx, TE_F32, 1, (int64_t[]){FILLING}, 1);
    for (int i = 0; i < 500; i++) te_tensor_release(filling[i]);
    CHECK(te_context_memory(ctx, "cpu", &stats) == TE_OK && stats.reserved > 500 * FILLING * sizeof(float));
    te_context_release(ctx);
}

/* Sizes that do not come again: what was cached for them is given back. */
static void test_changing_sizes(void)
{
    te_memory_stats stats;
    te_context     *ctx = te_context_open(NULL);
    for (int64_t n = 1; n < 12000; n += 7) {
        te_tensor *held[5];
        for (int i = 0; i < 5; i++) CHECK((held[i] = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){n, 64})));
        for (int i = 0; i < 5; i++) te_tensor_release(held[i]);
    }
    CHECK(te_context_memory(ctx, "cpu", &stats) == TE_OK);
    CHECK_MSG(stats.reserved < 3 * stats.peak + (64 << 20) && stats.peak > 8 << 20, "%zu of %zu", stats.peak,
              stats.reserved);
    te_context_release(ctx);
}

/* Sizes that come in no order: what was cached for larger ones serves smaller ones. Half of the tensors live on for a
 * while. What is in use is counted by what was asked for. */
static void test_sizes_without_order(void)
{
    enum { HELD = 8 };
    te_memory_stats stats;
    te_context     *ctx = te_context_open(NULL);
    te_tensor      *held[HELD] = {0};
    uint64_t        state = 9;
    size_t          most = 0;
    for (int i = 0; i < 4000; i++) {
        int k = i % 2 ? 0 : i / 2 % HELD;
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        te_tensor_release(held[k]);
        CHECK((held[k] = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){1 + (int64_t)(state >> 33) % 20000, 256})));
        CHECK(te_context_memory(ctx, "cpu", &stats) == TE_OK);
        if (stats.reserved > most) most = stats.reserved;
    }
    for (int k = 0; k < HELD; k++) te_tensor_release(held[k]);
    CHECK(te_context_memory(ctx, "cpu", &stats) == TE_OK && stats.current == 0);
    CHECK_MSG(most < 2 * stats.peak + (64 << 20) && stats.peak > 64 << 20, "%zu of %zu", stats.peak, most);
    te_context_release(ctx);
}

/* --- a limit of the process --------------------------------------------------------------------------------------- */

#ifndef SANITIZED
/* Libraries take their memory where no hook is asked, and end the process where there is none. */
static int multiply_within(size_t limit)
{
    struct rlimit bytes = {limit, limit};
    te_context   *ctx = te_context_open(&(te_context_options){.struct_size = sizeof(te_context_options), .threads = 1});
    te_tensor    *a = te_tensor_full(ctx, TE_F32, 2, (int64_t[]){64, 64}, 1);
    if (!a || setrlimit(RLIMIT_AS, &bytes) != 0) return 1;
    fill(ctx);
    te_tensor *product = apply(ctx, "matmul", a);
    return !product || *(float *)te_tensor_data(product) != 64;
}

static void test_products(void)
{
    for (size_t limit = 80; limit <= 800; limit *= 2) {
        int   status = 0;
        pid_t child = fork();
        if (child == 0) _exit(multiply_within(limit << 20));
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK_MSG(status == 0, "within %zu MB: status %d", limit, status);
    }
}
#else
static void test_products(void) {} /* sanitizers take address space without end */
#endif

int main(void)
{
    test_products();
    test_small_results();
    test_absurd();
    test_changing_sizes();
    test_sizes_without_order();
    return TEST_END();
}
