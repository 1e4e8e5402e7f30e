/* cuda_sim.h - CUDA C kernels run by the host: a library for tests on machines without a GPU.
 *
 * The source is compiled by the host's C++ compiler behind a small shim (device.h) into a shared object. Blocks run one
 * after the other; the threads of a block are fibers that change at barriers and warp operations, so a thread that
 * meets none costs a function call. Memory is the host's.
 *
 * With TE_SIM_STRICT in the environment ("reverse" or "shuffle") threads, warps and blocks come in another order, what
 * a thread sends to shared memory arrives when it waits for that, and a misaligned access, an index beyond an array or
 * a sum of whole numbers that overflows ends the process.
 *
 * Kernels are functions marked `extern "C" __global__ void`; any parameters. Shared memory: `__shared__` variables, and
 * TE_DYNAMIC_SHARED(type, name) for that which the launch asks for. Warp operations must be reached by every thread of
 * their mask, barriers by every thread of the block that has not returned; otherwise the launch fails and says who
 * waits where.
 */
#ifndef TE_KERNELS_CUDA_SIM_H
#define TE_KERNELS_CUDA_SIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct te_cuda_sim te_cuda_sim;

/* Compiles source, or takes what an earlier call (of any process) left in `folder`, which is made when missing; NULL: a
 * folder under $TMPDIR or /tmp. The compiler is $CXX, or c++. NULL with the reason in `message` on failure. */
te_cuda_sim *te_cuda_sim_compile(const char *source, const char *folder, char *message, size_t message_size);
void         te_cuda_sim_release(te_cuda_sim *sim);

/* Whether there is a kernel of that name. */
int te_cuda_sim_has(te_cuda_sim *sim, const char *kernel);

/* Bytes of the shared variables of all its kernels. */
uint32_t te_cuda_sim_variables(te_cuda_sim *sim);

/* Whether float64's exp, log, sin, cos, tanh, erf and pow are to have other last bits than the host's, as a GPU's have;
 * false at first. */
void te_cuda_sim_set_other_functions(int other);

/* Runs it: params[i] points to the value of parameter i, as for cuLaunchKernel. 0, or -1 with the reason in `message`.
 * Launches of one te_cuda_sim are made one at a time, from any thread. */
int te_cuda_sim_launch(te_cuda_sim *sim, const char *kernel, const uint32_t grid[3], const uint32_t block[3],
                       uint32_t shared, void *const *params, char *message, size_t message_size);

#endif
