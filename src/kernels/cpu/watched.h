/* watched.h - for innermost loops under AddressSanitizer: it would check every vector of theirs, so they are UNWATCHED
 * and say beforehand what they touch. What is inlined into them is UNWATCHED as well. */
#ifndef TE_KERNELS_CPU_WATCHED_H
#define TE_KERNELS_CPU_WATCHED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define UNWATCHED __attribute__((no_sanitize("address", "undefined")))
static __attribute__((noinline, unused)) void te_touches(const void *p, int64_t bytes)
{
    const volatile char *poisoned = __asan_region_is_poisoned((void *)(uintptr_t)p, (size_t)bytes);
    if (poisoned) (void)*poisoned; /* this access is watched */
}
#else
#define UNWATCHED
static inline __attribute__((always_inline)) void te_touches(const void *p, int64_t bytes) { (void)p, (void)bytes; }
#endif

#endif
