/* test_cuda_backend.c - the CUDA backend on a machine that is made up: memory, order, failures, the kernel cache, and
 * what is said when something is missing. Everything taken is given back, also when host memory ends at any allocation.
 */
#include "cuda_backend.h"
#include "failing_memory.h"

#include <spawn.h>
#include <sys/wait.h>

#define FILL_CACHE "--fill-cache"

extern char **environ;

static bool mentions(te_context *ctx, const char *text) { return strstr(te_context_error(ctx), text) != NULL; }

#define CHECK_MENTIONS(ctx, text) CHECK_MSG(mentions(ctx, text), "\"%s\" lacks \"%s\"", te_context_error(ctx), text)

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Copies of several pieces, of odd sizes and between devices arrive as they left. */
static void test_copies(void)
{
    te_context *ctx = te_context_open(NULL);
    static const int64_t sizes[] = {0, 1, 3, 1 << 19, (3 << 19) + 5};
    for (int i = 0; i < 5; i++) {
        te_tensor *t = numbers_on(ctx, "cuda", TE_F64, 1, &sizes[i]);
        te_tensor *other = t ? te_tensor_on_device(t, te_context_device(ctx, "cuda:1")) : NULL;
        double *back = malloc(((size_t)sizes[i] + 1) * sizeof *back);
        CHECK(other && te_tensor_read(other, TE_F64, back) == TE_OK);
        int wrong = 0;
        for (int64_t k = 0; k < sizes[i]; k++) wrong += back[k] != (double)(k % 97) - 40;
        CHECK_MSG(wrong == 0, "%d of %lld elements changed on the way", wrong, (long long)sizes[i]);
        CHECK(!te_tensor_data(t ? t : other));
        free(back);
        te_tensor_release(other);
        te_tensor_release(t);
    }
    te_context_release(ctx);
}

/* When the device is full, cached blocks are given back first; then the request fails, and a smaller one works. */
static void test_exhaustion(void)
{
    te_context *ctx = te_context_open(NULL);
    const int64_t half = (1 << 20) / 4 / 2, third = (1 << 20) / 4 / 3, whole = (1 << 20) / 4;
    fake.set_memory(1200 << 10); /* writing a third takes another two for its conversion */
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 1, &third);
    CHECK(a != NULL);
    te_tensor_release(a); /* stays reserved */
    te_device *cuda = te_context_device(ctx, "cuda");
    CHECK(cuda && cuda->allocator.reserved > 0);
    te_tensor *b = te_tensor_new(ctx, cuda, TE_F32, 1, (int64_t[]){half + third});
    CHECK_MSG(b != NULL, "%s", te_context_error(ctx));
    te_tensor *c = te_tensor_new(ctx, cuda, TE_F32, 1, &whole);
    CHECK(!c && ctx->status == TE_ERROR_MEMORY);
    CHECK_MENTIONS(ctx, "out of memory");
    te_tensor *d = te_tensor_new(ctx, cuda, TE_F32, 1, (int64_t[]){100});
    CHECK(d && te_tensor_fill(d, 2) == TE_OK);
    te_tensor_release(d);
    te_tensor_release(b);
    te_context_release(ctx);
    fake.set_memory((size_t)8 << 30);
}

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* A call that fails is an error of its own operation. */
static void test_failing_calls(void)
{
    static const char *const functions[] = {"cuLaunchKernel", "nvrtcCompileProgram", "cuModuleLoadData"};
    for (int i = 0; i < 3; i++) {
        te_context *ctx = te_context_open(NULL);
        te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
        each_cached(remove_entry);
        fake.fail_call(functions[i], 0, 700);
        te_tensor *y = apply(ctx, "exp", t);
        CHECK_MSG(!y && ctx->status != TE_OK, "%s", functions[i]);
        if (i < 2) CHECK_MENTIONS(ctx, "exp");
        fake.reset();
        y = apply(ctx, "exp", t);
        CHECK_MSG(y != NULL, "after %s: %s", functions[i], te_context_error(ctx));
        te_tensor_release(y);
        te_tensor_release(t);
        te_context_release(ctx);
    }
}

/* A failure on the device comes out where the host waits, with the operations that may have caused it. */
static void test_failing_work(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5}), *y = NULL, *z = NULL;
    double value[5];
    CHECK(te_tensor_read(t, TE_F64, value) == TE_OK);
    fake.fail_work(1, CUDA_ERROR_ILLEGAL_ADDRESS);
    y = apply(ctx, "exp", t);
    z = apply(ctx, "sin", y);
    CHECK(y && z);
    CHECK(te_tensor_read(z, TE_F64, value) == TE_ERROR_DEVICE);
    CHECK_MENTIONS(ctx, "exp, sin");
    CHECK_MENTIONS(ctx, "CUDA_ERROR_ILLEGAL_ADDRESS");
    te_tensor *w = apply(ctx, "cos", t);
    CHECK(!w && ctx->status == TE_ERROR_DEVICE);
    te_tensor *more = te_tensor_new(ctx, te_context_device(ctx, "cuda"), TE_F32, 1, (int64_t[]){12345});
    CHECK(!more && ctx->status == TE_ERROR_DEVICE); /* no lack of memory */
    CHECK_MENTIONS(ctx, "CUDA_ERROR_ILLEGAL_ADDRESS");
    te_tensor_release(z);
    te_tensor_release(y);
    te_tensor_release(t);
    te_context_release(ctx);
    fake.reset();
    ctx = te_context_open(NULL);
    t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
    CHECK(t != NULL);
    te_tensor_release(t);
    te_context_release(ctx);
}

static void expect_no_device(const char *name, te_status status, const char *text)
{
    te_context *ctx = te_context_open(NULL);
    te_device *device = te_context_device(ctx, name);
    CHECK_MSG(!device && ctx->status == status, "%s opened, or failed with %d instead of %d: %s", name,
              (int)ctx->status, (int)status, te_context_error(ctx));
    CHECK_MENTIONS(ctx, text);
    CHECK_MENTIONS(ctx, name);
    te_context_release(ctx);
}

/* What is missing, and where it was looked for. */
static void test_missing(void)
{
    expect_no_device("cuda:2", TE_ERROR_ARGUMENT, "2 CUDA devices");
    expect_no_device("cuda:99", TE_ERROR_ARGUMENT, "no such device");
    fake.set_devices(0, 90);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "no CUDA device");
    fake.set_devices(2, 75);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "compute capability 7.5");
    fake.set_devices(2, 90);
    fake.fail_call("cuInit", 0, CUDA_ERROR_NO_DEVICE);
    expect_no_device("cuda", TE_ERROR_DEVICE, "starting the CUDA driver");
    setenv("TETRAIN_CUDA_LIBRARIES", "/nowhere", 1);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "libcuda.so.1 cannot be opened in /nowhere");
    setenv("TETRAIN_CUDA_LIBRARIES", TE_CUDA_FAKE, 1);
    setenv("TETRAIN_CUDA_MODULE", "/nowhere/module.so", 1);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "/nowhere/module.so");
    setenv("TETRAIN_CUDA_MODULE", TE_CUDA_FAKE "/libcuda.so.1", 1);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "another build");
    unsetenv("TETRAIN_CUDA_MODULE");
    te_context *ctx = te_context_open(NULL);
    CHECK(te_context_cuda_devices(ctx) == 2);
    te_context_release(ctx);
}

/* A driver for CUDA 12 is given libraries of 12 first, and told apart from what those of 13 make. */
static void test_older_driver(void)
{
    char folder[] = "/tmp/tetrain-driver-XXXXXX", path[64];
    if (!mkdtemp(folder)) abort();
    snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    CHECK(symlink(TE_CUDA_FAKE "/libcuda.so.1", path) == 0);
    setenv("TETRAIN_CUDA_LIBRARIES", folder, 1);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "libnvrtc.so.13 or libnvrtc.so.12 cannot be opened");
    fake.set_driver(12040);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "libnvrtc.so.12 or libnvrtc.so.13 cannot be opened");
    setenv("TETRAIN_CUDA_LIBRARIES", TE_CUDA_FAKE, 1);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED,
                     "the driver is for CUDA 12.4 and does not load what NVRTC 13.0 makes");
    fake.set_driver(12000);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "the driver is for CUDA 12.0; 12.1 is the oldest supported");
    fake.set_driver(13000);
    fake.set_nvrtc(12000);
    expect_no_device("cuda", TE_ERROR_UNSUPPORTED, "NVRTC is of CUDA 12.0; 12.1 is the oldest supported");
    fake.set_nvrtc(13000);
    unlink(path);
    rmdir(folder);
}

/* A card that NVRTC does not know yet gets code that the driver translates. */
static void test_newer_card(void)
{
    fake.set_devices(1, 123);
    te_context *ctx = te_context_open(NULL);
    te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
    CHECK_MSG(t != NULL, "%s", te_context_error(ctx));
    CHECK(fake.count("nvrtcGetPTX") > 0);
    te_tensor_release(t);
    te_context_release(ctx);
    fake.set_devices(2, 90);
}

/* However many targets NVRTC knows, the card's own is found among them. */
static void test_many_targets(void)
{
    setenv("TE_FAKE_TARGETS", "500", 1);
    te_context *ctx = te_context_open(NULL);
    long before = (long)fake.count("nvrtcGetPTX");
    te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){7});
    CHECK_MSG(t != NULL, "%s", te_context_error(ctx));
    CHECK((long)fake.count("nvrtcGetPTX") == before);
    te_tensor_release(t);
    te_context_release(ctx);
    unsetenv("TE_FAKE_TARGETS");
}

/* Work on two devices in turn: each operation goes to the stream of its tensors' device, as the made-up driver
 * checks. */
static void test_devices_in_turn(void)
{
    te_context *ctx = te_context_open(NULL);
    static const char *const names[] = {"cuda", "cuda:1"};
    te_tensor *t[2];
    double value[9];
    for (int i = 0; i < 2; i++) t[i] = numbers_on(ctx, names[i], TE_F32, 2, (int64_t[]){3, 3});
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) {
            te_tensor *moved = te_tensor_on_device(t[1 - i], te_context_device(ctx, names[i])), *y = NULL;
            te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = t[i]}, {.kind = TE_ARG_TENSOR, .as.tensor = moved}};
            te_op_run(ctx, te_op_find(ctx, "matmul"), args, 2, &y, 1);
            CHECK_MSG(y != NULL, "%s", te_context_error(ctx));
            te_tensor *z = y ? apply(ctx, "tanh", y) : NULL;
            CHECK(z && strcmp(te_tensor_device(z), names[i]) == 0 && te_tensor_read(z, TE_F64, value) == TE_OK);
            CHECK(fabs(value[0] - 1) < 1e-6);
            te_tensor_release(z);
            te_tensor_release(y);
            te_tensor_release(moved);
        }
    }
    for (int i = 0; i < 2; i++) te_tensor_release(t[i]);
    te_context_release(ctx);
}

/* A host's own context stays the thread's, in work and when the device is closed, also where it is the device's, which
 * the host holds as well; of one that nobody else holds nothing is left then. Contexts are told apart by their
 * addresses alone. */
static void test_context_of_host(void)
{
    typedef int get_current(void **context);
    typedef int set_current(void *context);
    typedef int retain(void **context, int device);
    void *library = dlopen(TE_CUDA_FAKE "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *other = NULL, *same = NULL, *now;
    get_current *get;
    set_current *set;
    retain *primary;
    *(void **)&get = fake_symbol(library, "cuCtxGetCurrent");
    *(void **)&set = fake_symbol(library, "cuCtxSetCurrent");
    *(void **)&primary = fake_symbol(library, "cuDevicePrimaryCtxRetain");
    int *(*release)(int);
    *(void **)&release = fake_symbol(library, "cuDevicePrimaryCtxRelease_v2");
    CHECK(primary(&other, 1) == 0);
    for (int own = 2; own >= 0; own--) {
        if (own == 2) CHECK(primary(&same, 0) == 0);
        void *hosts = own == 2 ? same : own ? other : NULL;
        set(hosts);
        te_context *ctx = te_context_open(NULL);
        te_device *device = te_context_device(ctx, "cuda");
        te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){9}), *y = t ? apply(ctx, "tanh", t) : NULL;
        float values[9];
        char text[400];
        CHECK_MSG(y && te_tensor_read(y, TE_F32, values) == TE_OK, "%s", te_context_error(ctx));
        CHECK(get(&now) == 0 && (own ? now == hosts : now && now != other));
        CHECK(apply(ctx, "no such operation", t) == NULL && te_context_synchronize(ctx, NULL) == TE_OK);
        CHECK(get(&now) == 0 && (own ? now == hosts : now != other));
        device->exec.backend->describe(&device->exec, text, sizeof text);
        CHECK(get(&now) == 0 && (own ? now == hosts : now != other));
        te_tensor_release(y);
        te_tensor_release(t);
        te_context_release(ctx);
        CHECK(get(&now) == 0 && now == hosts);
        if (own == 2) release(0);
    }
    release(1);
}

/* A limit ends a request that is too large, after what was cached has been given back; a smaller one works. */
static void test_limit(void)
{
    te_context *ctx = te_context_open(
        &(te_context_options){.struct_size = sizeof(te_context_options), .tensor_memory_limit = 1 << 20});
    te_device *cuda = te_context_device(ctx, "cuda");
    const int64_t large = 200 << 10, small = 100 << 10; /* of four bytes */
    te_tensor *a = cuda ? te_tensor_new(ctx, cuda, TE_F32, 1, &large) : NULL;
    CHECK_MSG(a != NULL, "%s", te_context_error(ctx));
    te_tensor *b = te_tensor_new(ctx, cuda, TE_F32, 1, &small);
    CHECK(!b && ctx->status == TE_ERROR_MEMORY);
    CHECK_MENTIONS(ctx, "out of memory");
    te_tensor_release(a);
    te_tensor *c = te_tensor_new(ctx, cuda, TE_F32, 1, &small), *d = te_tensor_new(ctx, cuda, TE_F32, 1, &small);
    CHECK_MSG(c && d && te_tensor_fill(d, 2) == TE_OK, "%s", te_context_error(ctx));
    CHECK(cuda->allocator.reserved <= 1 << 20);
    te_tensor_release(d);
    te_tensor_release(c);
    te_context_release(ctx);
}

/* Operands on two devices are an error, not a copy. */
static void test_two_devices(void)
{
    te_context *ctx = te_context_open(NULL);
    te_tensor *a = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5}),
              *b = numbers_on(ctx, "cuda:1", TE_F32, 1, (int64_t[]){5});
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = a}, {.kind = TE_ARG_TENSOR, .as.tensor = b}};
    te_tensor *out = NULL;
    CHECK(te_op_run(ctx, te_op_find(ctx, "add"), args, 2, &out, 1) == TE_ERROR_ARGUMENT && !out);
    CHECK_MENTIONS(ctx, "cuda and cuda:1");
    args[0].as.tensor = b;
    CHECK(te_op_run(ctx, te_op_find(ctx, "add"), args, 2, &out, 1) == TE_OK);
    CHECK(out && strcmp(te_tensor_device(out), "cuda:1") == 0);
    te_tensor_release(out);
    te_tensor_release(a);
    te_tensor_release(b);
    te_context_release(ctx);
}

/* --- the kernel cache --------------------------------------------------------------------------------------------- */

static int cached;

static void count_entry(const char *path)
{
    (void)path;
    cached++;
}

/* Flips a byte in the middle. */
static void damage_entry(const char *path)
{
    FILE *f = fopen(path, "r+b");
    int byte;
    if (!f || fseek(f, 0, SEEK_END) != 0) abort();
    long middle = ftell(f) / 2;
    fseek(f, middle, SEEK_SET);
    byte = fgetc(f);
    fseek(f, middle, SEEK_SET);
    fputc(byte ^ 1, f);
    fclose(f);
}

static void shorten_entry(const char *path)
{
    if (truncate(path, 100) != 0) abort();
}

/* Compilations that a fresh context makes for one op. */
static int compilations(void)
{
    uint64_t before = fake.count("nvrtcCompileProgram");
    te_context *ctx = te_context_open(NULL);
    te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){6}), *y = t ? apply(ctx, "tanh", t) : NULL;
    float values[6];
    CHECK_MSG(y && te_tensor_read(y, TE_F32, values) == TE_OK, "%s", te_context_error(ctx));
    CHECK(fabsf(values[0] + 1) < 1e-6f);
    te_tensor_release(y);
    te_tensor_release(t);
    te_context_release(ctx);
    return (int)(fake.count("nvrtcCompileProgram") - before);
}

static void test_cache(void)
{
    each_cached(remove_entry);
    int fresh = compilations();
    CHECK(fresh > 0);
    cached = 0;
    each_cached(count_entry);
    CHECK_MSG(cached == fresh, "%d compilations left %d entries", fresh, cached);
    CHECK(compilations() == 0);
    each_cached(damage_entry);
    CHECK(compilations() == fresh);
    CHECK(compilations() == 0);
    each_cached(shorten_entry);
    CHECK(compilations() == fresh);
    CHECK(compilations() == 0);
    setenv("TETRAIN_CACHE", "/proc/nowhere", 1); /* a folder that cannot be made */
    CHECK(compilations() == fresh);
    setenv("TETRAIN_CACHE", cache_folder, 1);
}

#ifdef TE_CUDA_READY_BUILT
/* Binaries that the module has in itself come first, on the cards that they are for. The made-up driver cannot run
 * them, as an older driver could not, so that what is refused is compiled. */
static void test_ready(void)
{
    static const int capabilities[] = {80, 89, 90, 100, 103, 123};
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; i++) {
        fake.set_devices(1, capabilities[i]);
        each_cached(remove_entry);
        te_context *ctx = te_context_open(NULL);
        te_tensor *t = numbers_on(ctx, "cuda", TE_F32, 1, (int64_t[]){5});
        uint64_t found = fake.count("binary for a GPU"), compiled = fake.count("nvrtcCompileProgram");
        te_tensor *y = t ? apply(ctx, "argmax", t) : NULL;
        int64_t place = -1;
        CHECK_MSG(y && te_tensor_read(y, TE_I64, &place) == TE_OK && place == 4, "%s", te_context_error(ctx));
        bool wanted = capabilities[i] < 110;
        CHECK_MSG(fake.count("binary for a GPU") - found == wanted, "sm_%d", capabilities[i]);
        CHECK(fake.count("nvrtcCompileProgram") > compiled);
        te_tensor_release(y);
        te_tensor_release(t);
        te_context_release(ctx);
    }
    fake.set_devices(2, 90);
}
#endif

/* Several processes fill the cache at once: all of them work, and nothing half written stays. They are programs of
 * their own: a child of fork would inherit the pool of the parent's OpenMP threads without the threads, and wait for
 * them. */
static void test_processes(void)
{
    enum { PROCESSES = 4 };
    char *const arguments[] = {"test_cuda_backend", FILL_CACHE, NULL};
    pid_t children[PROCESSES];
    each_cached(remove_entry);
    for (int i = 0; i < PROCESSES; i++)
        CHECK(posix_spawn(&children[i], "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        CHECK(waitpid(children[i], &status, 0) == children[i] && status == 0);
    }
    int entries = compilations();
    CHECK_MSG(entries == 0, "%d compilations after other processes made them", entries);
    cached = 0;
    each_cached(count_entry);
    each_cached(remove_entry);
    int fresh = compilations();
    CHECK_MSG(cached == fresh, "%d files for %d kernels", cached, fresh);
}

/* What each of them does, with the cache of the parent. */
static int fill_cache(void)
{
    fake_find();
    return compilations() >= 0 && test_failures == 0 ? 0 : 1;
}

/* --- host memory -------------------------------------------------------------------------------------------------- */

/* linear and its gradient on the device; whether it came to its end. */
static bool train_once(te_context *ctx)
{
    te_tensor *x = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){4, 3}),
              *w = numbers_on(ctx, "cuda", TE_F32, 2, (int64_t[]){5, 3});
    bool done = x && w && te_tensor_set_requires_grad(w, true) == TE_OK;
    te_arg args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = x}, {.kind = TE_ARG_TENSOR, .as.tensor = w}};
    te_tensor *y = NULL;
    done = done && te_op_run(ctx, te_op_find(ctx, "linear"), args, 2, &y, 1) == TE_OK;
    te_tensor *loss = done ? apply(ctx, "sum", y) : NULL;
    done = loss && te_backward(loss, NULL, false) == TE_OK && te_tensor_grad(w);
    te_tensor_release(loss);
    te_tensor_release(y);
    te_tensor_release(w);
    te_tensor_release(x);
    return done;
}

/* Host memory ends at the n-th allocation, for every n. */
static void test_host_memory(void)
{
    bool done = false;
    long n = 0;
    for (; !done && n < 3000; n++) {
        failing_memory h = {.countdown = n};
        te_context_options options = {
            .struct_size = sizeof options, .threads = 1, .realloc = failing_memory_realloc, .realloc_user = &h};
        te_context *ctx = te_context_open(&options);
        bool trained =
            ctx && train_once(ctx); /* without room for a cached kernel it is compiled again, which is no failure */
        done = trained && h.countdown >= 0;
        if (ctx && !trained)
            CHECK_MSG(ctx->status == TE_ERROR_MEMORY, "n = %ld: status %d, %s", n, (int)ctx->status,
                      te_context_error(ctx));
        h.countdown = -1;
        if (ctx && !trained) CHECK_MSG(train_once(ctx), "after n = %ld: %s", n, te_context_error(ctx));
        te_context_release(ctx);
        CHECK_MSG(h.live == 0, "n = %ld: %zu bytes of host memory not given back", n, h.live);
        CHECK_MSG(fake.live() == 0, "n = %ld: %d things of the device not given back", n, fake.live());
    }
    CHECK(done && n > 20);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"copies", test_copies},
                 {"exhaustion", test_exhaustion},
                 {"failing calls", test_failing_calls},
                 {"failing work", test_failing_work},
                 {"missing", test_missing},
                 {"older driver", test_older_driver},
                 {"newer card", test_newer_card},
                 {"many targets", test_many_targets},
                 {"two devices", test_two_devices},
                 {"devices in turn", test_devices_in_turn},
                 {"the host's context", test_context_of_host},
                 {"limit", test_limit},
                 {"cache", test_cache},
#ifdef TE_CUDA_READY_BUILT
                 {"ready", test_ready},
#endif
                 {"processes", test_processes},
                 {"host memory", test_host_memory}};
    if (argc > 1 && strcmp(argv[1], FILL_CACHE) == 0) return fill_cache();
    fake_open();
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        tests[i].run();
        CHECK_MSG(fake.live() == 0, "%s: %d things not given back", tests[i].name, fake.live());
    }
    fake_close();
    return TEST_END();
}
