/* fiber.h - changing between stacks: the threads of a simulated block. */
#ifndef TE_KERNELS_CUDA_SIM_FIBER_H
#define TE_KERNELS_CUDA_SIM_FIBER_H

#include <stddef.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

typedef struct te_fiber {
#if defined(__x86_64__)
    void *stack_pointer; /* where its registers are pushed */
#else
    ucontext_t context;
#endif
} te_fiber;

/* Makes `fiber` start at `entry`, which must never return, when it is first switched to. */
void te_fiber_prepare(te_fiber *fiber, void *stack, size_t size, void (*entry)(void));

/* Leaves `from`, which goes on where it is when somebody switches to it, for `to`. */
void te_fiber_switch(te_fiber *from, te_fiber *to);

#endif
