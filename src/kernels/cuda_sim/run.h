/* run.h - the blocks of one launch. */
#ifndef TE_KERNELS_CUDA_SIM_RUN_H
#define TE_KERNELS_CUDA_SIM_RUN_H

#include <stddef.h>
#include <stdint.h>

typedef struct te_sim_state te_sim_state;

typedef struct te_sim_kernel {
    void (*run)(void *const *params);
    void (*attach)(te_sim_state *);
} te_sim_kernel;

/* 0, or -1 with the reason in `message`. */
int te_sim_run_grid(const te_sim_kernel *kernel, const uint32_t grid[3], const uint32_t block[3], uint32_t shared,
                    void *const *params, char *message, size_t message_size);

#endif
