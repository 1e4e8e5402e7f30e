/* device.h - the part of CUDA C++ that tetrain's kernels use, for the host's compiler. Comes after abi.h, before the
 * source of a kernel. Warp operations take whole values of up to 8 bytes. */
#define TE_CUDA_SIM 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))
#define __shared__      static __attribute__((section("te_shared")))
#define __constant__    static
#define __align__(n)    __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define TE_DYNAMIC_SHARED(type, name) type *name = (type *)te_sim->shared

/* The linker's names for the section of shared variables; null where there are none. */
extern "C" __attribute__((weak, visibility("hidden"))) char __start_te_shared[], __stop_te_shared[];

static te_sim_state *te_sim;
extern "C" __attribute__((visibility("default"))) void te_sim_attach(te_sim_state *state)
{
    te_sim = state;
    te_sim->variables = __start_te_shared;
    te_sim->variables_end = __stop_te_shared;
}

/* --- places ------------------------------------------------------------------------------------------------------ */

struct dim3 {
    unsigned x, y, z;
};

static inline dim3 te_sim_dim(const unsigned *v) { return dim3{v[0], v[1], v[2]}; }

#define threadIdx te_sim_dim(te_sim->thread)
#define blockIdx  te_sim_dim(te_sim->block)
#define blockDim  te_sim_dim(te_sim->block_dim)
#define gridDim   te_sim_dim(te_sim->grid_dim)
#define warpSize  32

/* --- vectors ----------------------------------------------------------------------------------------------------- */

struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));

/* --- waiting ----------------------------------------------------------------------------------------------------- */

static inline void __syncthreads() { te_sim->barrier(te_sim); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { te_sim->exchange(te_sim, mask, 0); }
static inline void __threadfence() {}

template <class T> static inline unsigned long long te_sim_pack(T value)
{
    unsigned long long bits = 0;
    static_assert(sizeof(T) <= sizeof bits, "warp operations take up to 8 bytes");
    __builtin_memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> static inline T te_sim_from(unsigned mask, T value, unsigned lane, bool inside)
{
    unsigned long long bits = te_sim->exchange(te_sim, mask, te_sim_pack(value))[lane & 31];
    T other;
    __builtin_memcpy(&other, &bits, sizeof other);
    return inside ? other : value;
}

template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    unsigned lane = te_sim->lane, first = lane & ~(unsigned)(width - 1);
    return te_sim_from(mask, value, first + ((unsigned)source & (unsigned)(width - 1)), true);
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32)
{
    unsigned lane = te_sim->lane, other = lane ^ (unsigned)with,
             end = (lane & ~(unsigned)(width - 1)) + (unsigned)width;
    return te_sim_from(mask, value, other, other < end);
}

template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned lane = te_sim->lane;
    return te_sim_from(mask, value, lane + by, (lane & (unsigned)(width - 1)) + by < (unsigned)width);
}

template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    unsigned lane = te_sim->lane;
    return te_sim_from(mask, value, lane - by, (lane & (unsigned)(width - 1)) >= by);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const unsigned long long *all = te_sim->exchange(te_sim, mask, predicate != 0);
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++) votes |= mask >> i & 1u && all[i] ? 1u << i : 0u;
    return votes;
}

static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

/* --- bits and atomics -------------------------------------------------------------------------------------------- */

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T> static inline T te_sim_swap(T *at, T value)
{
    T old = *at;
    *at = value;
    return old;
}
template <class T> static inline T atomicAdd(T *at, T value) { return te_sim_swap(at, (T)(*at + value)); }
template <class T> static inline T atomicMax(T *at, T value) { return te_sim_swap(at, value > *at ? value : *at); }
template <class T> static inline T atomicMin(T *at, T value) { return te_sim_swap(at, value < *at ? value : *at); }
template <class T> static inline T atomicExch(T *at, T value) { return te_sim_swap(at, value); }
template <class T> static inline T atomicCAS(T *at, T old, T value)
{
    return te_sim_swap(at, *at == old ? value : *at);
}

/* --- copies that arrive later ------------------------------------------------------------------------------------ */

/* cp.async: what a thread has sent is there when it has waited for its group, and may be before. It comes at once, or
 * under TE_SIM_STRICT as late as it can. */
struct te_sim_copy {
    void      (*move)(void *to, const void *from);
    void       *to;
    const void *from; /* null: zeros */
    unsigned    group;
};

enum { TE_SIM_COPIES = 512, TE_SIM_MOST_THREADS = 1024 };
struct te_sim_copies {
    unsigned long long run;
    unsigned           n, group; /* group: of what is sent next */
    te_sim_copy        copy[TE_SIM_COPIES];
};

static inline te_sim_copies &te_sim_own_copies()
{
    static te_sim_copies all[TE_SIM_MOST_THREADS];
    const unsigned *t = te_sim->thread, *d = te_sim->block_dim;
    te_sim_copies  &own = all[(t[2] * d[1] + t[1]) * d[0] + t[0]];
    if (own.run != te_sim->run) own.run = te_sim->run, own.n = own.group = 0;
    return own;
}

template <class T> static void te_sim_move(void *to, const void *from) { *(T *)to = from ? *(const T *)from : T{}; }

/* A whole unit, or zeros. */
template <class T> static inline void te_sim_send(T *to, const T *from, bool inside)
{
    if (!te_sim->late) return te_sim_move<T>(to, inside ? from : nullptr);
    te_sim_copies &own = te_sim_own_copies();
    if (own.n == TE_SIM_COPIES) __builtin_trap();
    own.copy[own.n++] = te_sim_copy{te_sim_move<T>, to, inside ? from : nullptr, own.group};
}

static inline void te_sim_close_group()
{
    if (te_sim->late) te_sim_own_copies().group++;
}

/* Until all but the `later` last groups have arrived. */
static inline void te_sim_await(unsigned later)
{
    if (!te_sim->late) return;
    te_sim_copies &own = te_sim_own_copies();
    unsigned       left = 0;
    for (unsigned i = 0; i < own.n; i++) {
        te_sim_copy &c = own.copy[i];
        if (c.group + later < own.group) c.move(c.to, c.from);
        else own.copy[left++] = c;
    }
    own.n = left;
}

/* --- the C library's float64 functions --------------------------------------------------------------------------- */

extern "C" {
double exp(double), log(double), sin(double), cos(double), tanh(double), erf(double), pow(double, double);
}

/* A GPU's are within 2 units of the last place and not the host's: where that is wanted, results with fractions of many
 * bits have another last one. */
static inline double te_sim_other(double x)
{
    unsigned long long bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits ^= te_sim->other_functions && (bits & 0xffff) != 0;
    __builtin_memcpy(&x, &bits, sizeof bits);
    return x;
}
#define exp(x)    te_sim_other(exp(x))
#define log(x)    te_sim_other(log(x))
#define sin(x)    te_sim_other(sin(x))
#define cos(x)    te_sim_other(cos(x))
#define tanh(x)   te_sim_other(tanh(x))
#define erf(x)    te_sim_other(erf(x))
#define pow(x, y) te_sim_other(pow(x, y))
#define fabs   __builtin_fabs
#define fabsf  __builtin_fabsf
#define floor  __builtin_floor
#define floorf __builtin_floorf
#define ceil   __builtin_ceil
#define ceilf  __builtin_ceilf
#define rint   __builtin_rint
#define rintf  __builtin_rintf
#define trunc  __builtin_trunc
#define truncf __builtin_truncf
#define sqrt   __builtin_sqrt
#define sqrtf  __builtin_sqrtf

/* --- calling a kernel -------------------------------------------------------------------------------------------- */

template <int... I> struct te_sim_indices {};
template <int N, int... I> struct te_sim_count : te_sim_count<N - 1, N - 1, I...> {};
template <int... I> struct te_sim_count<0, I...> {
    typedef te_sim_indices<I...> type;
};

template <class... P, int... I>
static inline void te_sim_apply(void (*kernel)(P...), void *const *params, te_sim_indices<I...>)
{
    kernel(*(P *)params[I]...);
}

/* What the library calls, once per thread; a line of TE_SIM_KERNEL follows the source for each of its kernels. */
template <class... P> static inline void te_sim_run(void (*kernel)(P...), void *const *params)
{
    te_sim_apply(kernel, params, typename te_sim_count<(int)sizeof...(P)>::type());
}

#define TE_SIM_KERNEL(name)                                                                                   \
    extern "C" __attribute__((visibility("default"))) void te_sim_kernel_##name(void *const *params)          \
    {                                                                                                         \
        te_sim_run(name, params);                                                                             \
    }
