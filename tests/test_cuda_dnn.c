/* test_cuda_dnn.c - the real cuDNN, where it is installed, takes the graphs that attention is written as: for a device
 * that is described to it, since there is none. Skipped, with the reason, where the library is missing or older.
 */
#include "kernels/cuda/attention_dnn.h"
#include "test.h"

#include <dlfcn.h>

/* Under AddressSanitizer: NVIDIA's library lets go of memory only when the process ends. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static te_cuda_dnn_library dnn;

static const char hopper[] =
    "{\"cudaDeviceId\":0,\"deviceVer\":900,\"driverVer\":13000,\"maxGridSize\":[2147483647,65535,65535],"
    "\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"multiProcessorCount\":132,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
    "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
    "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"smClockRateKHz\":1980000,"
    "\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,\"deviceName\":\"NVIDIA H100 80GB HBM3\","
    "\"totalGlobalMem\":85000000000}";

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

/* Returns the bytes it works in. */
static int64_t accepts(cudnnBackendDescriptor_t device, const te_dnn_attention *a, const char *what)
{
    te_dnn_graph g;
    te_dnn_plan plan;
    te_dnn_open(&g, &dnn);
    te_dnn_attention_graph(&g, a);
    bool made = te_dnn_finish(&g, NULL, device, &plan);
    CHECK_MSG(made, "%s, %s: %s", what, a->backward ? "backward" : "forward", g.reason);
    if (made) {
        printf("%s, %s: a plan with %lld bytes to work in\n", what, a->backward ? "backward" : "forward",
               (long long)plan.workspace);
        dnn.cudnnBackendDestroyDescriptor(plan.plan);
    }
    te_dnn_close(&g);
    return made ? plan.workspace : 0;
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

int main(void)
{
    char reason[TE_DNN_REASON];
    const char *missing = load();
    if (missing) {
        printf("skipped: %s\n", missing);
        return 0;
    }
    cudnnBackendDescriptor_t device = te_dnn_device(&dnn, hopper, reason);
    CHECK_MSG(device != NULL, "%s", reason);
    if (!device) return TEST_END();
    te_dnn_attention a = attention(32, 12, 12, 1024, 64);
    both_ways(device, a, "causal");
    te_dnn_attention quarter = attention(8, 12, 12, 1024, 64); /* what a batch of 32 is split into */
    quarter.backward = 1;
    CHECK(accepts(device, &quarter, "a quarter of the batch") <= 256 << 20);
    a.causal = 0;
    both_ways(device, a, "not causal");
    a = attention(1, 32, 8, 4096, 128);
    both_ways(device, a, "grouped query");
    a = attention(2, 12, 12, 1000, 64);
    a.type = CUDNN_DATA_HALF;
    both_ways(device, a, "float16, a length that is no multiple of anything");
    a.window = 128;
    both_ways(device, a, "a window");
    both_ways(device, packed(attention(8, 12, 12, 512, 64)), "packed");
    both_ways(device, packed(attention(8, 32, 8, 512, 128)), "packed, grouped query");
    forward_quantized(device);
    dnn.cudnnBackendDestroyDescriptor(device);
    return TEST_END();
}
