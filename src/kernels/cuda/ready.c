/* ready.c - finding what the build has compiled. TE_CUDA_READY_TARGETS is X(target) for each target of the build. */
#include "ready.h"

#ifdef TE_CUDA_READY_TARGETS

#define X(target)                                                                          \
    extern const te_cuda_ready te_cuda_ready_##target[]; /* ends with a size of 0 */       \
    extern const unsigned char *const te_cuda_ready_bytes_##target;
TE_CUDA_READY_TARGETS
#undef X

#define X(target) {#target, te_cuda_ready_##target, &te_cuda_ready_bytes_##target},
static const struct {
    const char *target;
    const te_cuda_ready *entries;
    const unsigned char *const *bytes;
} targets[] = {TE_CUDA_READY_TARGETS};
#undef X

static const char *target_for(int capability)
{
    if (capability >= 80 && capability < 89) return "sm_80";
    if (capability == 89) return "sm_89"; /* converts FP8 itself */
    if (capability == 90) return "sm_90a";
    if (capability >= 100 && capability < 110) return "sm_100";
    return "";
}

const void *te_cuda_ready_find(int capability, const char *source, size_t length)
{
    const char *target = target_for(capability);
    te_hash128 hash = te_cuda_ready_hash(source, length);
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        if (strcmp(targets[t].target, target) != 0) continue;
        for (const te_cuda_ready *e = targets[t].entries; e->size; e++)
            if (e->source.a == hash.a && e->source.b == hash.b) return *targets[t].bytes + e->offset;
    }
    return NULL;
}

#else

const void *te_cuda_ready_find(int capability, const char *source, size_t length)
{
    (void)capability, (void)source, (void)length;
    return NULL;
}

#endif
