/* test_cuda_dnn.c - the real cuDNN, where it is installed, takes the graphs that attention is written as: for devices
 * that are described to it, since there are none. Skipped, with the reason, where the library is missing or older. And
 * what is not asked of which version on which device.
 */
#include "kernels/cuda/attention_dnn.h"
#include "test.h"

#include <dlfcn.h>

/* Under AddressSanitizer: NVIDIA's library lets go of memory only when the process ends. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static te_cuda_dnn_library dnn;
static int capability;

static const char hopper[] =
    "{\"cudaDeviceId\":0,\"deviceVer\":900,\"driverVer\":13000,\"maxGridSize\":[2147483647,65535,65535],"
    "\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"multiProcessorCount\":132,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
    "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
    "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"smClockRateKHz\":1980000,"
    "\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,\"deviceName\":\"NVIDIA H100 80GB HBM3\","
    "\"totalGlobalMem\":85000000000}";

static const char blackwell[] =
    "{\"cudaDeviceId\":0,\"deviceVer\":1000,\"driverVer\":13000,\"maxGridSize\":[2147483647,65535,65535],"
    "\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"multiProcessorCount\":148,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
    "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
    "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"smClockRateKHz\":1965000,"
    "\"memClockRateKHz\":3996000,\"l2CacheSize\":132644864,\"deviceName\":\"NVIDIA B200\","
    "\"totalGlobalMem\":190000000000}";

static const char *load(void)
{
    static const char *const names[] = {
#define NAME(name) #name,
        TE_CUDA_DNN(NAME)
#undef NAME
    };
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("/usr/local/cuda/lib64/libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!library) return "libcudnn.so.9 is not on the loader's path";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *address = dlsym(library, names[i]);
        if (!address) return names[i];
        memcpy((char *)&dnn + i * sizeof address, &address, sizeof address);
    }
    return dnn.cudnnGetVersion() >= TE_DNN_OLDEST ? NULL : "the library is too old";
}

/* Queries, keys and values side by side as a projection leaves them; the rest [batch, seq, heads, dim]. */
static te_dnn_attention attention(int64_t batch, int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim)
{
    te_dnn_attention a = {.batch = batch, .heads = heads, .kv_heads = kv_heads, .seq_q = seq, .seq_kv = seq, .dim = dim,
                          .dim_v = dim, .window = -1, .type = CUDNN_DATA_BFLOAT16, .causal = 1, .lse = 1};
    for (int i = TE_DNN_Q; i <= TE_DNN_DV; i++) {
        bool inside = i <= TE_DNN_V || i >= TE_DNN_DQ;
        a.stride[i][1] = dim;
        a.stride[i][2] = (inside ? heads + 2 * kv_heads : heads) * dim;
        a.stride[i][0] = seq * a.stride[i][2];
    }
    a.stride[TE_DNN_LSE][0] = heads * seq;
    a.stride[TE_DNN_LSE][1] = seq;
    a.stride[TE_DNN_LSE][2] = 1;
    return a;
}

static te_dnn_attention packed(te_dnn_attention a)
{
    a.packed = 1;
    a.stride[TE_DNN_LSE][1] = 1;
    a.stride[TE_DNN_LSE][2] = a.heads;
    return a;
}

/* Dense, with these extents. */
static te_dnn_attention with_bias(te_dnn_attention a, cudnnDataType_t type, int64_t batch, int64_t heads,
                                  int64_t queries)
{
    memcpy(a.bias_dim, (int64_t[]){batch, heads, queries}, sizeof a.bias_dim);
    a.bias_stride[2] = a.seq_kv;
    a.bias_stride[1] = queries * a.seq_kv;
    a.bias_stride[0] = heads * a.bias_stride[1];
    a.bias_type = type;
    return a;
}

static te_dnn_attention at_the_end(te_dnn_attention a, int64_t queries)
{
    a.seq_q = queries;
    a.shift = a.seq_kv - queries;
    a.stride[TE_DNN_LSE][0] = a.heads * queries;
    a.stride[TE_DNN_LSE][1] = queries;
    return a;
}

/* Returns the bytes it works in. */
static int64_t accepts(cudnnBackendDescriptor_t device, const te_dnn_attention *a, const char *what)
{
    te_dnn_graph g;
    te_dnn_plan plan;
    te_dnn_engine engine;
    const char *way = a->backward ? "backward" : "forward",
               *fault = te_dnn_attention_fault(dnn.cudnnGetVersion(), capability, a);
    if (fault) {
        printf("sm_%d: %s, %s: not asked: %s\n", capability, what, way, fault);
        return 0;
    }
    bool chosen = te_dnn_attention_engine(dnn.cudnnGetVersion(), capability, a, &engine);
    te_dnn_open(&g, &dnn);
    te_dnn_attention_graph(&g, a);
    bool made = te_dnn_finish(&g, NULL, device, chosen ? &engine : NULL, !a->any_order, &plan);
    int64_t workspace = plan.workspace;
    CHECK_MSG(made, "sm_%d: %s, %s: %s", capability, what, way, g.reason);
    if (made) printf("sm_%d: %s, %s: a plan with %lld bytes to work in\n", capability, what, way, (long long)workspace);
    te_dnn_close(&g);
    te_dnn_plan_close(&dnn, &plan);
    return workspace;
}

static void both_ways(cudnnBackendDescriptor_t device, te_dnn_attention a, const char *what)
{
    accepts(device, &a, what);
    a.backward = 1;
    accepts(device, &a, what);
}

static void accepts_quantized(cudnnBackendDescriptor_t device, te_dnn_attention a, const char *what)
{
    a.type = CUDNN_DATA_FP8_E4M3;
    accepts(device, &a, what);
}

static void forward_quantized(cudnnBackendDescriptor_t device)
{
    te_dnn_attention a = attention(32, 12, 12, 1024, 64);
    accepts_quantized(device, a, "fp8, causal");
    a = attention(2, 12, 12, 1024, 64);
    a.causal = 0;
    accepts_quantized(device, a, "fp8, not causal");
    accepts_quantized(device, attention(1, 32, 8, 4096, 128), "fp8, grouped query");
    accepts_quantized(device, attention(2, 12, 12, 1000, 64), "fp8, a length that is no multiple of anything");
    a = attention(2, 12, 12, 1024, 64);
    a.window = 128;
    accepts_quantized(device, a, "fp8, a window");
    accepts_quantized(device, packed(attention(8, 12, 12, 512, 64)), "fp8, packed");
    accepts_quantized(device, attention(2, 12, 12, 1024, 32), "fp8, narrow heads");
}

/* What own kernels do where the library refuses it. */
static void with_more(cudnnBackendDescriptor_t device)
{
    te_dnn_attention a = attention(4, 16, 16, 1024, 64), other = attention(2, 32, 8, 1000, 128);
    both_ways(device, with_bias(a, CUDNN_DATA_BFLOAT16, 4, 16, 1024), "causal, a bias of all");
    a.causal = 0;
    both_ways(device, with_bias(a, CUDNN_DATA_BFLOAT16, 1, 16, 1024), "a bias of heads and queries");
    both_ways(device, with_bias(a, CUDNN_DATA_FLOAT, 1, 1, 1024), "a bias of queries in float32");
    both_ways(device, with_bias(a, CUDNN_DATA_BFLOAT16, 4, 1, 1), "a bias of batch entries");
    a = with_bias(a, CUDNN_DATA_FLOAT, 4, 1, 1);
    a.backward = a.any_order = 1;
    accepts(device, &a, "a bias of batch entries in float32, sums in any order");
    both_ways(device, with_bias(other, CUDNN_DATA_BFLOAT16, 1, 32, 1000), "grouped query, a bias");
    other.window = 128;
    both_ways(device, with_bias(other, CUDNN_DATA_BFLOAT16, 2, 1, 1), "grouped query, a window, a bias");
    both_ways(device, at_the_end(other, 300), "a window at the last position");
    other.sinks = 1;
    accepts(device, &other, "a window, sinks");
    a = at_the_end(attention(4, 16, 16, 2048, 64), 256);
    both_ways(device, a, "the last position");
    a.backward = a.any_order = 1;
    accepts(device, &a, "the last position, sums in any order");
    a = attention(4, 16, 16, 1024, 64);
    a.sinks = 1;
    accepts(device, &a, "sinks");
}

static void on_hopper(cudnnBackendDescriptor_t device)
{
    te_dnn_attention a = attention(32, 12, 12, 1024, 64);
    both_ways(device, a, "causal");
    te_dnn_attention quarter = attention(8, 12, 12, 1024, 64); /* what a batch of 32 is split into */
    quarter.backward = 1;
    CHECK(accepts(device, &quarter, "a quarter of the batch") <= 256 << 20);
    te_dnn_attention any_order = a;
    any_order.backward = any_order.any_order = 1;
    CHECK(accepts(device, &any_order, "sums in any order") <= 1 << 20); /* beside the sums */
    a.causal = 0;
    both_ways(device, a, "not causal");
    a = attention(1, 32, 8, 4096, 128);
    both_ways(device, a, "grouped query");
    a.backward = a.any_order = 1;
    accepts(device, &a, "grouped query, sums in any order");
    a = attention(2, 12, 12, 1000, 64);
    a.type = CUDNN_DATA_HALF;
    both_ways(device, a, "float16, a length that is no multiple of anything");
    a.window = 128;
    both_ways(device, a, "a window");
    both_ways(device, packed(attention(8, 12, 12, 512, 64)), "packed");
    both_ways(device, packed(attention(8, 32, 8, 512, 128)), "packed, grouped query");
    forward_quantized(device);
    with_more(device);
}

/* Its own engine for gradients; a plan takes half a second, so not all forms again. */
static void on_blackwell(cudnnBackendDescriptor_t device)
{
    te_dnn_attention a = attention(2, 12, 12, 1000, 64);
    a.window = 128;
    both_ways(device, a, "a window");
    a = packed(attention(8, 32, 8, 512, 128));
    a.backward = 1;
    accepts(device, &a, "packed, grouped query");
    accepts_quantized(device, attention(32, 12, 12, 1024, 64), "fp8, causal");
    a = with_bias(attention(2, 12, 12, 1000, 64), CUDNN_DATA_BFLOAT16, 1, 12, 1000);
    accepts(device, &a, "a bias");
    a.backward = a.any_order = 1;
    accepts(device, &a, "a bias, sums in any order");
    both_ways(device, at_the_end(attention(2, 12, 12, 2048, 64), 256), "the last position");
    a = attention(2, 12, 12, 1024, 64);
    a.sinks = 1;
    accepts(device, &a, "sinks");
}

static void on(const char *json, int its_capability, void (*check)(cudnnBackendDescriptor_t device))
{
    char reason[TE_DNN_REASON];
    cudnnBackendDescriptor_t device = te_dnn_device(&dnn, json, reason);
    capability = its_capability;
    CHECK_MSG(device != NULL, "%s", reason);
    if (device) check(device);
    if (device) dnn.cudnnBackendDestroyDescriptor(device);
}

/* One attention, and whether it is asked for; fp8 is forward alone. */
typedef struct rule {
    size_t version;
    int    capability;
    bool   backward, packed, fp8;
    int    dim, dim_v;
    bool   asked;
} rule;

static void check_rules(void)
{
    static const rule rules[] = {
        {91900, 90, true, false, false, 256, 256, true},  {91900, 90, true, true, false, 64, 64, true},
        {91900, 90, true, true, false, 72, 72, false},    {91900, 90, true, true, false, 64, 72, false},
        {91900, 90, false, true, false, 72, 72, true},    {91900, 90, true, false, false, 72, 72, true},
        {91100, 90, true, false, false, 192, 128, true},  {91100, 90, true, false, false, 192, 120, false},
        {91100, 90, true, false, false, 176, 128, false}, {91301, 90, true, false, false, 176, 128, true},
        {91800, 80, false, true, false, 64, 64, false},   {91801, 80, false, true, false, 64, 64, true},
        {91800, 86, true, true, false, 64, 64, false},    {91900, 89, true, true, false, 64, 64, false},
        {91900, 80, true, false, false, 128, 128, true},  {91900, 80, true, false, false, 136, 128, false},
        {91900, 80, false, false, false, 256, 256, true}, {91002, 120, false, true, false, 64, 64, true},
        {91900, 120, true, true, false, 64, 64, false},   {91900, 120, true, false, false, 64, 64, true},
        {91900, 121, true, false, false, 192, 128, false}, {91701, 100, true, false, false, 64, 64, false},
        {91800, 100, true, false, false, 64, 64, true},   {91800, 103, true, true, false, 64, 64, true},
        {91800, 100, true, false, false, 192, 128, true}, {91800, 100, true, false, false, 192, 192, false},
        {91800, 100, true, false, false, 136, 64, false}, {91002, 100, false, false, false, 256, 256, true},
        {91900, 90, false, true, true, 64, 64, false},    {91900, 100, false, true, true, 128, 128, true},
        {91900, 100, false, false, true, 192, 128, true}, {91801, 100, false, false, true, 192, 128, false},
        {91900, 100, false, false, true, 144, 128, false}, {91900, 120, false, false, true, 64, 64, true},
        {91900, 120, false, true, true, 64, 64, false},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const rule *r = &rules[i];
        te_dnn_attention a = attention(2, 4, 4, 1024, r->dim);
        a.dim_v = r->dim_v;
        a.backward = r->backward;
        a.packed = r->packed;
        if (r->fp8) a.type = CUDNN_DATA_FP8_E4M3;
        const char *fault = te_dnn_attention_fault(r->version, r->capability, &a);
        CHECK_MSG(!fault == r->asked, "rule %d: %s", (int)i, fault ? fault : "nothing is known against it");
    }
}

/* Of the rules for masks, biases and sinks. */
static void check_more_rules(void)
{
    te_dnn_attention a = attention(2, 4, 4, 8192, 64), b = a;
    a.backward = a.window = 1;
    CHECK(te_dnn_attention_fault(91900, 90, &a) && !te_dnn_attention_fault(91900, 100, &a));
    a.window = 256; /* 353 of 4096 keys, as long as 2133 of them take cuDNN */
    CHECK(te_dnn_attention_fault(91900, 90, &a));
    a.window = 1024; /* as 6773 */
    CHECK(!te_dnn_attention_fault(91900, 90, &a));
    a.window = 256;
    a.dim = a.dim_v = 128;
    CHECK(te_dnn_attention_fault(91900, 90, &a));
    a.backward = 0;
    CHECK(!te_dnn_attention_fault(91900, 90, &a));
    a.backward = a.packed = 1;
    CHECK(!te_dnn_attention_fault(91900, 90, &a));
    a = attention(2, 4, 4, 1024, 64);
    a.backward = 1;
    a.window = 64;
    CHECK(!te_dnn_attention_fault(91900, 90, &a)); /* 161 of 512 keys */
    b.sinks = 1;
    CHECK(te_dnn_attention_fault(91300, 90, &b) && !te_dnn_attention_fault(91301, 90, &b));
    b = with_bias(attention(2, 4, 4, 192, 64), CUDNN_DATA_FLOAT, 2, 1, 1);
    CHECK(!te_dnn_attention_fault(91900, 90, &b));
    b.backward = 1;
    CHECK(te_dnn_attention_fault(91900, 90, &b) != NULL);
    b.seq_kv = 200;
    CHECK(!te_dnn_attention_fault(91900, 90, &b));
    b = attention(2, 4, 4, 192, 64);
    b.stride[TE_DNN_LSE][1]++;
    CHECK(te_dnn_attention_fault(91900, 90, &b) && !te_dnn_attention_fault(92600, 90, &b));
    b = at_the_end(attention(2, 4, 4, 192, 64), 100);
    b.type = CUDNN_DATA_FP8_E4M3;
    CHECK(te_dnn_attention_fault(91900, 90, &b) && !te_dnn_attention_fault(91900, 100, &b));
}

static te_view view_of(te_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    static double somewhere;
    return (te_view){.data = &somewhere, .dtype = dtype, .ndim = 4, .shape = {a, b, c, d},
                     .stride = {b * c * d, c * d, d, 1}};
}

static te_dnn_attention key_of(const te_attention *a)
{
    te_dnn_attention key;
    te_dnn_attention_key(&key, a, NULL, false);
    return key;
}

static bool same(te_dnn_attention a, te_dnn_attention b) { return memcmp(&a, &b, sizeof a) == 0; }

/* Two attentions of different graphs have different keys. */
static void check_keys(void)
{
    te_attention a = {.q = view_of(TE_BF16, 2, 4, 32, 64), .k = view_of(TE_BF16, 2, 4, 48, 64),
                      .v = view_of(TE_BF16, 2, 4, 48, 64), .out = view_of(TE_BF16, 2, 4, 32, 64),
                      .lse = view_of(TE_F32, 2, 4, 32, 1), .window_left = -1, .window_right = -1};
    te_dnn_attention plain = key_of(&a);
    te_attention biased = a;
    biased.bias = view_of(TE_BF16, 2, 4, 32, 48);
    te_dnn_attention of_all = key_of(&biased);
    CHECK(!same(plain, of_all) && same(of_all, key_of(&biased)));
    CHECK(of_all.bias_dim[0] == 2 && of_all.bias_dim[1] == 4 && of_all.bias_dim[2] == 32);
    for (int i = 0; i < 3; i++) { /* the same for all batch entries, heads, queries */
        te_attention broadcast = biased;
        broadcast.bias.stride[i] = 0;
        te_dnn_attention key = key_of(&broadcast);
        CHECK(!same(key, of_all) && !same(key, plain) && key.bias_dim[i] == 1);
    }
    te_attention wide = biased, longer = biased;
    wide.bias.dtype = TE_F32;
    longer.bias.stride[2] = 64;
    CHECK(!same(key_of(&wide), of_all) && !same(key_of(&longer), of_all));
    biased.bias.stride[0] = biased.bias.stride[1] = biased.bias.stride[2] = 0;
    te_dnn_attention row = key_of(&biased);
    CHECK(row.bias_stride[0] == 48 && row.bias_stride[1] == 48 && row.bias_stride[2] == 48);
    te_attention last = a;
    last.bottom_right = true;
    CHECK(same(key_of(&last), plain)); /* nothing is masked */
    last.window_right = 0;
    te_dnn_attention at_last = key_of(&last);
    last.bottom_right = false;
    CHECK(at_last.shift == 16 && !same(at_last, key_of(&last)));
    last.sinks = view_of(TE_F32, 1, 1, 1, 4);
    te_dnn_attention sunk = key_of(&last);
    last.sinks.data = NULL;
    CHECK(!same(sunk, key_of(&last)));
}

static void check_engines(void)
{
    te_dnn_attention a = attention(2, 4, 4, 1024, 64);
    te_dnn_engine e;
    CHECK(!te_dnn_attention_engine(91900, 100, &a, &e));
    a.backward = 1;
    CHECK(!te_dnn_attention_engine(91900, 90, &a, &e) && !te_dnn_attention_engine(91900, 120, &a, &e));
    CHECK(te_dnn_attention_engine(91900, 103, &a, &e) && e.index == 5 && e.n_knobs == 2 && e.value[0] == 31);
    CHECK(te_dnn_attention_engine(92300, 100, &a, &e) && e.index == 5 && e.n_knobs == 6 && e.value[2] == 2);
    a.any_order = 1; /* the library's choice will do, also before 9.18 */
    CHECK(!te_dnn_attention_engine(91900, 103, &a, &e) && !te_dnn_attention_fault(91701, 100, &a));
}

int main(void)
{
    check_rules();
    check_more_rules();
    check_keys();
    check_engines();
    const char *missing = load();
    if (missing) {
        printf("skipped: %s\n", missing);
        return TEST_END();
    }
    bool watched = SANITIZED; /* a plan is a second of the library's, which is not what is watched */
    on(hopper, 90, watched ? on_blackwell : on_hopper);
    if (!watched && dnn.cudnnGetVersion() >= 91900) on(blackwell, 100, on_blackwell);
    return TEST_END();
}
