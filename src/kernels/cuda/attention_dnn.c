/* attention_dnn.c - attention through cuDNN, where it takes it: what it is asked for, plans by shape, running them.
 *
 * A plan is a compiled kernel and costs half a second, so plans are kept, and packed sequences are rounded up to few
 * shapes: their number and the longest length to powers of two, where one sequence fills the rest (te_packed_args).
 * Numbers of rows (lse) of packed sequences are [position, head] in cuDNN and copied from and to ours.
 *
 * Declined is what would have other bits than elsewhere (dropout draws from Philox by position), what has no form there
 * (float32) and what the library refuses; own kernels do it then. TE_TRACE=dispatch says which and why.
 *
 * A bias is added as it lies in memory, its extents of 1 where it is the same for all batch entries, heads or queries.
 * Minus infinity hides a score, and so may hide all of a row: then the library's maximum is minus infinity, too, and
 * its differences are no numbers. Whatever it makes of them, forward finds such rows by lse and the bias and writes
 * zeros and minus infinity, and backward reads an lse so large that all their weights are 0 (attention_unseen.cu).
 *
 * E4M3 operands are multiplied from Hopper on, where the result is E4M3, too: with 16-bit results Hopper has no engine.
 *
 * The backward pass that repeats its bits keeps the gradient of the queries in parts, 805 MB for GPT-2 on 32 x 1024:
 * where a plan wants more than TETRAIN_CUDNN_WORKSPACE its batch is split. On an H200 that GPT-2's backward pass takes
 * .69 ms a layer as a whole and .83 ms in four parts of 256 MiB. Under exec->any_order that gradient is summed in
 * place, in 100 MB.
 */
#include "attention_dnn.h"
#include "cuda_backend.h"
#include "kernels/args.h"
#include "../environment.h"
#include "../numerals.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_PLANS = 128, MAX_TENSORS = 2 * TE_DNN_OFFSETS, LEAST_WORKSPACE = 256 << 20, WORKSPACE_SHARE = 64 };

/* TE_DNN_SCALE_P to TE_DNN_SCALE_OUT: the largest number of E4M3, its inverse, and twice 1. */
enum { N_FACTORS = TE_DNN_SCALE_OUT - TE_DNN_SCALE_P + 1 };
static const float factors[N_FACTORS] = {448, 1.0f / 448, 1, 1};

typedef struct known_plan {
    te_dnn_attention key;
    te_dnn_plan plan; /* its plan NULL: there is none */
    uint64_t used;
    bool declined;    /* when it was to run, which it may have done before, or for want of memory */
    char reason[TE_DNN_REASON];
} known_plan;

struct te_cuda_dnn {
    te_cuda_dnn_library library;
    cudnnHandle_t handle;
    char reason[TE_DNN_REASON]; /* why there is none, empty: there is */
    float *factors;             /* on the device, of fp8: see bind_factors */
    double most; /* bytes that a plan may work in */
    known_plan *plans;
    size_t n, capacity;
    uint64_t clock;
};

/* One call: memory it works in, and what its plan's numbers stand for. */
typedef struct call {
    te_exec *exec;
    const te_attention *a;
    const te_attention_grad *grad;
    te_dnn_attention key;
    int64_t uids[MAX_TENSORS];
    void *pointers[MAX_TENSORS];
    int n;
    float numbers[TE_DNN_WINDOW + 1];
    int32_t counts[2];
    te_view rows;  /* packed: lse as cuDNN lays it out */
    void *lent[6]; /* scratch */
    int n_lent;
} call;

/* --- the library -------------------------------------------------------------------------------------------------- */

static void open_library(te_exec *exec, struct te_cuda_dnn *dnn)
{
    static const char *const names[] = {
#define NAME(name) #name,
        TE_CUDA_DNN(NAME)
#undef NAME
    };
    static const char *const files[] = {"libcudnn.so.9", NULL};
    te_cuda_device *d = te_cuda(exec);
    char message[sizeof exec->message];
    const char *wish = te_environment(TE_ENV_CUDNN);
    if (wish && strcmp(wish, "0") == 0) {
        snprintf(dnn->reason, sizeof dnn->reason, "TETRAIN_CUDNN is 0");
        return;
    }
    memcpy(message, exec->message, sizeof message);
    te_status status = te_cuda_load_library(exec, files, names, sizeof names / sizeof *names, &dnn->library);
    if (status != TE_OK) snprintf(dnn->reason, sizeof dnn->reason, "%.*s", TE_DNN_REASON - 1, exec->message);
    memcpy(exec->message, message, sizeof message);
    if (status != TE_OK) return;
    size_t version = dnn->library.cudnnGetVersion();
    if (version < TE_DNN_OLDEST)
        snprintf(dnn->reason, sizeof dnn->reason, "cuDNN %zu is older than %d", version, (int)TE_DNN_OLDEST);
    else if (dnn->library.cudnnCreate(&dnn->handle) != CUDNN_STATUS_SUCCESS)
        snprintf(dnn->reason, sizeof dnn->reason, "cuDNN %zu does not start", version);
    else if (dnn->library.cudnnSetStream(dnn->handle, (cudaStream_t)d->stream) != CUDNN_STATUS_SUCCESS)
        snprintf(dnn->reason, sizeof dnn->reason, "cuDNN %zu does not take the stream", version);
}

/* Bytes that a plan may work in where the batch can be halved instead. */
static double most_workspace(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    const char *most = te_environment(TE_ENV_CUDNN_WORKSPACE);
    size_t bytes = 0;
    if (most) return 0x1p20 * te_strtod(most, NULL);
    bool known = d->driver.cuDeviceTotalMem_v2(&bytes, d->handle) == CUDA_SUCCESS;
    return known && bytes / WORKSPACE_SHARE > LEAST_WORKSPACE ? (double)(bytes / WORKSPACE_SHARE) : LEAST_WORKSPACE;
}

static struct te_cuda_dnn *open_dnn(te_exec *exec)
{
    te_cuda_device *d = te_cuda(exec);
    if (d->dnn) return d->dnn;
    struct te_cuda_dnn *dnn = te_mem_zalloc(exec->mem, sizeof *dnn);
    if (dnn) open_library(exec, dnn);
    if (dnn) dnn->most = most_workspace(exec);
    return d->dnn = dnn;
}

const char *te_cuda_dnn_missing(te_exec *exec, size_t *version)
{
    const struct te_cuda_dnn *dnn = te_cuda_enter(exec) == TE_OK ? open_dnn(exec) : NULL;
    *version = dnn && dnn->library.cudnnGetVersion ? dnn->library.cudnnGetVersion() : 0;
    return !dnn ? "it cannot be opened" : dnn->reason[0] ? dnn->reason : NULL;
}

void te_cuda_dnn_close(te_exec *exec)
{
    struct te_cuda_dnn *dnn = te_cuda(exec)->dnn;
    if (!dnn) return;
    for (size_t i = 0; i < dnn->n; i++) te_dnn_plan_close(&dnn->library, &dnn->plans[i].plan);
    if (dnn->handle) dnn->library.cudnnDestroy(dnn->handle);
    te_cuda_memory_free(exec, dnn->factors, sizeof factors);
    te_mem_free(exec->mem, dnn->plans, dnn->capacity * sizeof *dnn->plans);
    te_mem_free(exec->mem, dnn, sizeof *dnn);
    te_cuda(exec)->dnn = NULL;
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

/* false: out of host memory, which says nothing about the shape. */
static bool make_plan(te_exec *exec, struct te_cuda_dnn *dnn, known_plan *known)
{
    te_dnn_engine engine;
    te_dnn_graph *g = te_mem_alloc(exec->mem, sizeof *g);
    if (!g) return false;
    bool chosen =
        te_dnn_attention_engine(dnn->library.cudnnGetVersion(), te_cuda(exec)->capability, &known->key, &engine);
    te_dnn_open(g, &dnn->library);
    te_dnn_attention_graph(g, &known->key);
    if (!te_dnn_finish(g, dnn->handle, NULL, chosen ? &engine : NULL, !known->key.any_order, &known->plan))
        memcpy(known->reason, g->reason, sizeof known->reason);
    te_dnn_close(g);
    te_mem_free(exec->mem, g, sizeof *g);
    return true;
}

/* The plan that was not wanted for the longest time goes. Graphs hold on to kernels of plans, and so does what is under
 * way. */
static void make_room(te_exec *exec, struct te_cuda_dnn *dnn)
{
    const te_cuda_device *d = te_cuda(exec);
    known_plan *oldest = dnn->plans;
    if (dnn->n < MAX_PLANS || d->capture || d->graphs || te_cuda_await(exec, NULL) != TE_OK) return;
    for (size_t i = 1; i < dnn->n; i++)
        if (dnn->plans[i].used < oldest->used) oldest = &dnn->plans[i];
    te_dnn_plan_close(&dnn->library, &oldest->plan);
    *oldest = dnn->plans[--dnn->n];
}

/* NULL: out of host memory. */
static known_plan *find_plan(te_exec *exec, struct te_cuda_dnn *dnn, const te_dnn_attention *key)
{
    for (size_t i = 0; i < dnn->n; i++) {
        if (memcmp(&dnn->plans[i].key, key, sizeof *key) != 0) continue;
        dnn->plans[i].used = ++dnn->clock;
        return &dnn->plans[i];
    }
    make_room(exec, dnn);
    if (!te_mem_grow(exec->mem, &dnn->plans, &dnn->capacity, dnn->n + 1, sizeof *dnn->plans)) return NULL;
    known_plan *known = &dnn->plans[dnn->n++];
    memset(known, 0, sizeof *known);
    known->key = *key;
    known->used = ++dnn->clock;
    if (make_plan(exec, dnn, known)) return known;
    dnn->n--;
    return NULL;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static void bind(call *c, int64_t uid, const void *pointer)
{
    c->uids[c->n] = uid;
    c->pointers[c->n++] = (void *)(uintptr_t)pointer;
}

static void *lend(call *c, size_t bytes)
{
    void *memory = c->exec->scratch(c->exec, bytes);
    if (memory) c->lent[c->n_lent++] = memory;
    return memory;
}

static void bind_numbers(call *c)
{
    const te_dnn_attention *key = &c->key;
    c->numbers[TE_DNN_SCALE] = (float)c->a->scale;
    c->numbers[TE_DNN_MASKED] = -INFINITY;
    c->numbers[TE_DNN_ONE] = 1;
    c->numbers[TE_DNN_WINDOW] = (float)(key->window + 1 - key->shift);
    c->counts[0] = (int32_t)key->seq_kv;
    c->counts[1] = (int32_t)key->seq_q;
    bind(c, TE_DNN_SCALE, &c->numbers[TE_DNN_SCALE]);
    if (key->packed || key->causal || key->window >= 0) bind(c, TE_DNN_MASKED, &c->numbers[TE_DNN_MASKED]);
    if (key->backward) bind(c, TE_DNN_ONE, &c->numbers[TE_DNN_ONE]);
    if (key->window >= 0) bind(c, TE_DNN_WINDOW, &c->numbers[TE_DNN_WINDOW]);
    if (!key->causal || key->shift == 0) return;
    bind(c, TE_DNN_KEYS, &c->counts[0]);
    bind(c, TE_DNN_QUERIES, &c->counts[1]);
}

/* By how much one position moves in every tensor that is packed, whose numbers of offsets go to `uids`. */
static te_status packed_steps(const call *c, te_packed_args *args, int *uids)
{
    for (int uid = TE_DNN_Q; uid <= TE_DNN_LSE; uid++) {
        int64_t step = c->key.stride[uid][2];
        if (step == 0 || (uid == TE_DNN_LSE && !c->key.lse)) continue;
        if (step > INT32_MAX / c->a->q.shape[2]) return TE_ERROR_UNSUPPORTED;
        uids[args->n_steps] = TE_DNN_OFFSETS + uid;
        args->step[args->n_steps++] = step;
    }
    return TE_OK;
}

/* Where the host knows the offsets: as te_ragged writes it. */
static void write_ragged(const te_packed_args *a, int32_t *out)
{
    const int32_t *at = a->offsets;
    int64_t n = 0, shortest = -1, slot = 0;
    for (int64_t i = 0; i < a->n; i++) {
        int32_t length = at[i + 1] - at[i];
        if (length > 0 && (shortest < 0 || length < at[shortest + 1] - at[shortest])) shortest = i;
        n += length > 0;
    }
    for (int64_t i = 0; i < a->n; i++) {
        int64_t times = at[i + 1] == at[i] ? 0 : i == shortest ? 1 + a->batch - n : 1;
        for (; times > 0; times--, slot++) {
            out[slot] = at[i + 1] - at[i];
            for (int64_t k = 0; k < a->n_steps; k++)
                out[a->batch + k * (a->batch + 1) + slot] = (int32_t)(at[i] * a->step[k]);
        }
    }
    for (int64_t k = 0; k < a->n_steps; k++)
        out[a->batch + k * (a->batch + 1) + a->batch] = (int32_t)(at[a->n] * a->step[k]);
}

static te_status send_ragged(call *c, te_packed_args *args, size_t bytes)
{
    int32_t *host = te_mem_alloc(c->exec->mem, bytes);
    if (!host) return TE_ERROR_MEMORY;
    write_ragged(args, host);
    args->ragged = te_cuda_upload(c->exec, host, bytes);
    te_mem_free(c->exec->mem, host, bytes);
    if (args->ragged) c->lent[c->n_lent++] = args->ragged;
    return args->ragged ? TE_OK : TE_ERROR_MEMORY;
}

/* Lengths, and where the sequences of every tensor start. */
static te_status bind_offsets(call *c)
{
    int uids[TE_PACKED_STEPS];
    te_packed_args args = {
        .n = c->a->n_seqs, .offsets = (int32_t *)(uintptr_t)c->a->cu_seqlens_q, .batch = c->key.batch};
    te_status status = packed_steps(c, &args, uids);
    size_t bytes = (size_t)(args.batch + args.n_steps * (args.batch + 1)) * sizeof(int32_t);
    if (status == TE_OK && c->a->longest == 0) status = send_ragged(c, &args, bytes);
    if (status == TE_OK && c->a->longest > 0) {
        args.ragged = lend(c, bytes);
        status = args.ragged ? te_cuda_ragged(c->exec, &args) : TE_ERROR_MEMORY;
    }
    if (status != TE_OK) return status;
    bind(c, TE_DNN_LENGTHS, args.ragged);
    for (int i = 0; i < args.n_steps; i++) bind(c, uids[i], args.ragged + args.batch + i * (args.batch + 1));
    return TE_OK;
}

/* lse for the gradient of scores with a bias. */
static te_status bind_raised(call *c)
{
    const te_view *lse = &c->a->lse;
    float *raised = lend(c, (size_t)te_view_numel(lse) * sizeof *raised);
    bind(c, TE_DNN_LSE, raised);
    return raised ? te_cuda_attention_raised(c->exec, lse, raised) : TE_ERROR_MEMORY;
}

/* lse, or its stand-in for packed sequences, [1, heads, positions] over memory that runs [position, head]. */
static te_status bind_rows(call *c)
{
    const te_view *lse = &c->a->lse;
    c->rows = *lse;
    if (!c->key.lse) return TE_OK;
    if (c->key.backward && c->key.bias_dim[0]) return bind_raised(c);
    if (c->key.packed) {
        c->rows.data = lend(c, (size_t)te_view_numel(lse) * sizeof(float));
        c->rows.stride[0] = c->rows.stride[1] = 1;
        c->rows.stride[2] = c->key.heads;
        if (!c->rows.data) return TE_ERROR_MEMORY;
    }
    bind(c, TE_DNN_LSE, c->rows.data);
    return c->key.packed && c->key.backward ? te_cuda_copy(c->exec, &c->rows, lse) : TE_OK;
}

/* Written once; while a graph is recorded nothing can be, and the graph brings its own. */
static const float *factors_on_device(call *c)
{
    te_cuda_device *d = te_cuda(c->exec);
    if (d->dnn->factors) return d->dnn->factors;
    float *made = d->capture ? te_cuda_upload(c->exec, factors, sizeof factors)
                             : te_cuda_memory_alloc(c->exec, sizeof factors);
    if (made && d->capture) return c->lent[c->n_lent++] = made;
    if (!made || te_cuda_memory_copy(c->exec, made, factors, sizeof factors, TE_COPY_HOST_TO_DEVICE) == TE_OK)
        return d->dnn->factors = made;
    te_cuda_memory_free(c->exec, made, sizeof factors);
    return NULL;
}

/* Of fp8: what probabilities are rounded as, the operands' factors, and where amaxes go. */
static te_status bind_factors(call *c)
{
    const float *known = factors_on_device(c);
    float *amaxes = known ? lend(c, 32) : NULL;
    if (!amaxes) return TE_ERROR_MEMORY;
    for (int i = 0; i < N_FACTORS; i++) bind(c, TE_DNN_SCALE_P + i, known + i);
    bind(c, TE_DNN_DESCALE_Q, c->a->q.quant->scale_inv);
    bind(c, TE_DNN_DESCALE_K, c->a->k.quant->scale_inv);
    bind(c, TE_DNN_AMAX_P, amaxes);
    bind(c, TE_DNN_AMAX_OUT, amaxes + 4);
    return TE_OK;
}

static int64_t dq_sums_bytes(const te_dnn_attention *key)
{
    return key->any_order ? key->batch * key->heads * key->seq_q * key->dim * (int64_t)sizeof(float) : 0;
}

static te_status bind_tensors(call *c)
{
    for (int uid = TE_DNN_Q; uid <= (c->grad ? TE_DNN_DV : TE_DNN_OUT); uid++)
        bind(c, uid, te_dnn_attention_view(c->a, c->grad, uid)->data);
    if (c->key.bias_dim[0]) bind(c, TE_DNN_BIAS, c->a->bias.data);
    if (c->key.sinks) bind(c, TE_DNN_SINKS, c->a->sinks.data);
    te_status status = bind_rows(c);
    if (status == TE_OK && c->key.packed) status = bind_offsets(c);
    if (status == TE_OK && c->a->q.quant) status = bind_factors(c);
    if (status != TE_OK || !c->key.backward) return status;
    void *sums = lend(c, (size_t)(c->a->q.shape[0] * c->key.heads * c->a->q.shape[2]) * sizeof(float));
    bind(c, TE_DNN_SUMS, sums);
    if (!sums || !c->key.any_order) return sums ? TE_OK : TE_ERROR_MEMORY;
    void *gradient = lend(c, (size_t)dq_sums_bytes(&c->key));
    bind(c, TE_DNN_DQ_SUMS, gradient);
    return gradient ? TE_OK : TE_ERROR_MEMORY;
}

/* TE_ERROR_UNSUPPORTED where the library declines at last what it has planned: the reason is the plan's from now on. */
static te_status execute(call *c, struct te_cuda_dnn *dnn, known_plan *known, const char *operation, void *workspace)
{
    te_cuda_note(c->exec, operation);
    cudnnStatus_t r = te_dnn_run(&dnn->library, dnn->handle, &known->plan, c->n, c->uids, c->pointers, workspace);
    if (r == CUDNN_STATUS_SUCCESS) return TE_OK;
    te_dnn_describe(&dnn->library, "running a plan", r, known->reason);
    te_exec_fail(c->exec, TE_ERROR_DEVICE, "%s: cuDNN: %s", operation, known->reason);
    known->declined = te_dnn_declines(r);
    return known->declined ? TE_ERROR_UNSUPPORTED : TE_ERROR_DEVICE;
}

static te_status run(call *c, struct te_cuda_dnn *dnn, known_plan *known, const char *operation)
{
    const te_dnn_plan *plan = &known->plan;
    void *workspace = NULL;
    bind_numbers(c);
    te_status status = bind_tensors(c);
    if (status == TE_OK && plan->workspace > 0 && !(workspace = lend(c, (size_t)plan->workspace))) {
        status = TE_ERROR_MEMORY;
        known->declined = true; /* looking for it has emptied the cache of memory, which no step is to do again */
        snprintf(known->reason, sizeof known->reason, "lacks memory to work in");
    }
    if (status == TE_OK) status = execute(c, dnn, known, operation, workspace);
    if (status == TE_OK && c->key.packed && c->key.lse && !c->key.backward)
        status = te_cuda_copy(c->exec, &c->a->lse, &c->rows);
    if (status == TE_OK && c->key.bias_dim[0] && !c->key.backward) status = te_cuda_attention_unseen(c->exec, c->a);
    while (c->n_lent > 0) c->exec->scratch_free(c->exec, c->lent[--c->n_lent]);
    return status;
}

/* Sequences of a batch do not know of each other, so their bits are the same in halves. */
static te_view half_of(const te_view *v, int64_t first, int64_t n)
{
    te_view half = *v;
    if (!v->data) return half;
    half.data = (char *)v->data + (size_t)(first * v->stride[0]) * te_dtype_size(v->dtype);
    half.shape[0] = n;
    return half;
}

static bool in_halves(te_exec *exec, const te_attention *a, const te_attention_grad *grad, te_status *status)
{
    int64_t batch = a->q.shape[0];
    bool taken = true;
    for (int i = 0; i < 2 && taken && *status == TE_OK; i++) {
        int64_t first = i ? batch / 2 : 0, n = i ? batch - batch / 2 : batch / 2;
        te_attention_grad g = {.forward = *a};
        if (grad) g = *grad;
        te_view *views[] = {&g.forward.q,    &g.forward.k, &g.forward.v, &g.forward.out, &g.forward.lse,
                            &g.forward.bias, &g.dout,      &g.dq,        &g.dk,          &g.dv};
        for (size_t k = 0; k < sizeof views / sizeof *views; k++) *views[k] = half_of(views[k], first, n);
        taken = te_cuda_attention_dnn(exec, &g.forward, grad ? &g : NULL, status);
    }
    return taken;
}

bool te_cuda_attention_dnn(te_exec *exec, const te_attention *a, const te_attention_grad *grad, te_status *status)
{
    const char *operation = grad ? "attention.backward" : "attention",
               *reason = te_dnn_attention_decline(exec, a, grad);
    struct te_cuda_dnn *dnn = reason ? NULL : open_dnn(exec);
    known_plan *known = NULL;
    call c = {.exec = exec, .a = a, .grad = grad};
    if (!reason) reason = !dnn ? "out of host memory" : dnn->reason[0] ? dnn->reason : NULL;
    if (!reason) {
        te_dnn_attention_key(&c.key, a, grad, exec->any_order);
        reason = te_dnn_attention_fault(dnn->library.cudnnGetVersion(), te_cuda(exec)->capability, &c.key);
    }
    if (!reason) {
        known = find_plan(exec, dnn, &c.key);
        reason = !known                                   ? "out of host memory"
                 : known->plan.plan && !known->declined ? NULL
                                                        : known->reason;
    }
    if (reason) {
        te_cuda_trace(exec, "dispatch: %s: own kernels, since cuDNN is not asked or declines: %s\n", operation, reason);
        return false;
    }
    int64_t room = known->plan.workspace + dq_sums_bytes(&c.key);
    te_cuda_trace(exec, "dispatch: %s: cuDNN %zu, %lld bytes to work in%s\n", operation,
                  dnn->library.cudnnGetVersion(), (long long)room, c.key.any_order ? ", sums in any order" : "");
    if ((double)room > dnn->most && !c.key.packed && c.key.batch > 1) return in_halves(exec, a, grad, status);
    if ((double)room > dnn->most && c.key.packed) {
        te_cuda_trace(exec, "dispatch: %s: own kernels, since cuDNN's workspace counts every sequence as long as all\n",
                      operation);
        return false;
    }
    *status = run(&c, dnn, known, operation);
    if (*status != TE_ERROR_MEMORY && *status != TE_ERROR_UNSUPPORTED) return true;
    te_cuda_trace(exec, "dispatch: %s: own kernels, since cuDNN %s\n", operation,
                  known->reason[0] ? known->reason : "lacks memory to work in");
    *status = TE_OK;
    return false;
}
