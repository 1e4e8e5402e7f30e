/* cuda_backend.h - a context on the fake CUDA machine, and the fake's controls. TE_CUDA_FAKE is its folder. */
#ifndef TE_TEST_CUDA_BACKEND_H
#define TE_TEST_CUDA_BACKEND_H

#include "core/tensor.h"
#include "kernels/cuda_fake/fake.h"
#include "test.h"

#include <dlfcn.h>
#include <dirent.h>
#include <unistd.h>

typedef struct fake_controls {
    __typeof__(&te_fake_fail_call)   fail_call;
    __typeof__(&te_fake_fail_work)   fail_work;
    __typeof__(&te_fake_set_memory)  set_memory;
    __typeof__(&te_fake_set_devices) set_devices;
    __typeof__(&te_fake_set_shared) set_shared;
    __typeof__(&te_fake_set_driver) set_driver;
    __typeof__(&te_fake_set_nvrtc) set_nvrtc;
    __typeof__(&te_fake_set_epilogue_cost) set_epilogue_cost;
    __typeof__(&te_fake_set_product_costs) set_product_costs;
    __typeof__(&te_fake_set_short_sums) set_short_sums;
    __typeof__(&te_fake_reset)       reset;
    __typeof__(&te_fake_live)        live;
    __typeof__(&te_fake_faults)      faults;
    __typeof__(&te_fake_count)       count;
} fake_controls;

static fake_controls fake;
static char          cache_folder[] = "/tmp/tetrain-cache-XXXXXX";

static inline void *fake_symbol(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol) abort();
    return symbol;
}

/* The fake's controls. */
static inline void fake_find(void)
{
    void *library = dlopen(TE_CUDA_FAKE "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) abort();
    *(void **)&fake.fail_call = fake_symbol(library, "te_fake_fail_call");
    *(void **)&fake.fail_work = fake_symbol(library, "te_fake_fail_work");
    *(void **)&fake.set_memory = fake_symbol(library, "te_fake_set_memory");
    *(void **)&fake.set_devices = fake_symbol(library, "te_fake_set_devices");
    *(void **)&fake.set_shared = fake_symbol(library, "te_fake_set_shared");
    *(void **)&fake.set_driver = fake_symbol(library, "te_fake_set_driver");
    *(void **)&fake.set_nvrtc = fake_symbol(library, "te_fake_set_nvrtc");
    *(void **)&fake.set_epilogue_cost = fake_symbol(library, "te_fake_set_epilogue_cost");
    *(void **)&fake.set_product_costs = fake_symbol(library, "te_fake_set_product_costs");
    *(void **)&fake.set_short_sums = fake_symbol(library, "te_fake_set_short_sums");
    *(void **)&fake.reset = fake_symbol(library, "te_fake_reset");
    *(void **)&fake.live = fake_symbol(library, "te_fake_live");
    *(void **)&fake.faults = fake_symbol(library, "te_fake_faults");
    *(void **)&fake.count = fake_symbol(library, "te_fake_count");
}

/* The fake's libraries and an empty cache, for this process and those that it starts. */
static inline void fake_open(void)
{
    setenv("TETRAIN_CUDA_LIBRARIES", TE_CUDA_FAKE, 1);
    if (!mkdtemp(cache_folder)) abort();
    setenv("TETRAIN_CACHE", cache_folder, 1);
    fake_find();
}

/* Calls `visit` with the path of each entry of the cache. */
static inline void each_cached(void (*visit)(const char *path))
{
    char           path[512];
    DIR           *folder = opendir(cache_folder);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%.200s", cache_folder, entry->d_name);
        visit(path);
    }
    if (folder) closedir(folder);
}

static inline void remove_entry(const char *path) { unlink(path); }

static inline void fake_close(void)
{
    each_cached(remove_entry);
    rmdir(cache_folder);
    CHECK_MSG(fake.live() == 0, "%d things of the fake machine were not given back", fake.live());
    CHECK_MSG(fake.faults() == 0, "%d bytes of device memory beside an allocation were touched", fake.faults());
}

/* A tensor of consecutive numbers on a device; NULL where that fails. */
static inline te_tensor *numbers_on(te_context *ctx, const char *device_name, te_dtype dtype, int ndim,
                                    const int64_t *shape)
{
    te_device *device = te_context_device(ctx, device_name);
    te_tensor *t = device ? te_tensor_new(ctx, device, dtype, ndim, shape) : NULL;
    int64_t    n = t ? te_tensor_numel(t) : 0;
    double    *values = malloc(((size_t)n + 1) * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = (double)(i % 97) - 40;
    te_status status = t ? te_tensor_write(t, TE_F64, values) : ctx->status;
    memset(values, 0x55, ((size_t)n + 1) * sizeof *values); /* what was written must not depend on it any more */
    free(values);
    if (status == TE_OK) return t;
    te_tensor_release(t);
    return NULL;
}

/* One result of an op on one tensor. */
static inline te_tensor *apply(te_context *ctx, const char *op, te_tensor *t)
{
    te_arg     arg = {.kind = TE_ARG_TENSOR, .as.tensor = t};
    te_tensor *out = NULL;
    te_op_run(ctx, te_op_find(ctx, op), &arg, 1, &out, 1);
    return out;
}

#endif
