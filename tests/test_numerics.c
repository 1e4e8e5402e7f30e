/* test_numerics.c - counting what quantization does, without Lua: numbers done by hand, and every allocation failing in
 * turn. spec/recipe/numerics_spec.lua compares with te.quantize under every recipe. */
#include "failing_context.h"
#include "test.h"

#include "core/numerics.h"

#include <math.h>

static const te_quantizer fp8 = {.element = TE_E4M3, .needs_history = true, .has_columnwise = true, .transposed = true};
static const te_quantizer fp4 = {.element = TE_E2M1, .scale = TE_SCALE_E4M3, .block_rows = 1, .block_cols = 16,
                                 .has_columnwise = true, .transposed = true, .scale_max = 448};

static te_recipe_state *make_state(te_context *ctx, const te_quantizer *q)
{
    te_product_recipe recipe = {.history_length = {2, 2, 2}};
    for (int r = 0; r < TE_ROLE_COUNT; r++) {
        recipe.quantized[r] = true;
        recipe.quantizers[r] = *q;
    }
    te_product_recipe *made = te_product_recipe_new(ctx, &recipe);
    te_recipe_state *state = made ? te_recipe_state_new(ctx) : NULL;
    bool ok = state && te_recipe_state_use(state, made) == TE_OK;
    te_product_recipe_release(made);
    if (ok) return state;
    te_recipe_state_release(state);
    return NULL;
}

static te_tensor *matrix(te_context *ctx, int64_t rows, int64_t cols, const double *values)
{
    te_tensor *t = te_tensor_empty(ctx, TE_F32, 2, (int64_t[]){rows, cols});
    if (t && te_tensor_write(t, TE_F64, values) == TE_OK) return t;
    te_tensor_release(t);
    return NULL;
}

static te_role_numerics counted(te_context *ctx, const te_quantizer *q, int64_t rows, int64_t cols,
                                const double *values)
{
    te_role_numerics result = {.values = -1};
    te_recipe_state *state = make_state(ctx, q);
    te_tensor *t = matrix(ctx, rows, cols, values);
    bool ok = state && t && te_numerics_watch(state, true) == TE_OK &&
              te_numerics_count(state, &state->recipe->quantizers[TE_ROLE_INPUT], TE_ROLE_INPUT, t, TE_F32, 2) == TE_OK;
    if (ok) result = state->watched->roles[TE_ROLE_INPUT];
    CHECK_MSG(result.values >= 0, "%s", te_context_error(ctx));
    te_tensor_release(t);
    te_recipe_state_release(state);
    return result;
}

static void test_by_hand(void)
{
    te_context *ctx = te_context_open(NULL);
    /* times 2: 462 comes back to 448, 466 would not; 2^-10 is a tie to 0; 17 becomes 16 */
    const double x[] = {231, 233, 0x1p-11, 0, 8.5, -INFINITY, NAN, -1};
    te_role_numerics n = counted(ctx, &fp8, 2, 4, x);
    CHECK(n.values == 8 && n.nonfinite == 2 && n.saturated == 1 && n.flushed == 1);
    CHECK(n.amax == 233 && n.scale == 2);
    double changed = 7.0 * 7 + 9.0 * 9 + 0x1p-22 + 0.25, norm = 231.0 * 231 + 233.0 * 233 + 0x1p-22 + 8.5 * 8.5 + 1;
    CHECK(fabs(n.error - changed) < 1e-9 && fabs(n.norm - norm) < 1e-9);

    /* odd columns: two elements a byte, rows apart; values of the format under a factor of 1 stay as they are */
    const double y[] = {6, -1, 0, 3, 0.5, -6};
    n = counted(ctx, &fp4, 2, 3, y);
    CHECK(n.values == 6 && n.error < 1e-9 && n.saturated == 0 && n.flushed == 0 && n.amax == 6 && n.scale == 0);
    te_context_release(ctx);
}

static bool watch_and_count(te_recipe_state *state, te_tensor *t)
{
    return te_numerics_watch(state, true) == TE_OK &&
           te_numerics_count(state, &state->recipe->quantizers[TE_ROLE_INPUT], TE_ROLE_INPUT, t, TE_BF16, 1) == TE_OK;
}

/* Returns whether everything got by without reaching allocation k. */
static bool count_with_failure(const te_quantizer *q, long k)
{
    static const double x[20] = {1, 2, 3, 4, 5, 6, 7, 8};
    failing_memory f;
    te_context *ctx = failing_context_open(&f, 1);
    te_recipe_state *state = ctx ? make_state(ctx, q) : NULL;
    te_tensor *t = state ? matrix(ctx, 4, 5, x) : NULL;
    CHECK(t != NULL);
    if (!t) return true;
    f.countdown = k;
    bool ok = watch_and_count(state, t), reached = failing_memory_stop(&f);
    CHECK_MSG(ok || strlen(te_context_error(ctx)) > 0, "allocation %ld failed without a message", k);
    ok = watch_and_count(state, t);
    CHECK_MSG(ok && state->watched->roles[TE_ROLE_INPUT].values == 20, "after allocation %ld failed", k);
    te_tensor_release(t);
    te_recipe_state_release(state);
    failing_context_close(ctx, &f, k);
    return !reached;
}

static void test_failing_allocations(const te_quantizer *q)
{
    long k = 0;
    while (!count_with_failure(q, k) && k < 1000) k++;
    CHECK_MSG(k > 3 && k < 1000, "%ld allocations", k);
}

int main(void)
{
    test_by_hand();
    test_failing_allocations(&fp8);
    test_failing_allocations(&fp4);
    return TEST_END();
}
