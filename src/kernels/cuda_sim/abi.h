/* abi.h - what the library and a compiled kernel share: where the running thread stands, and how it waits. */
#ifndef TE_KERNELS_CUDA_SIM_ABI_H
#define TE_KERNELS_CUDA_SIM_ABI_H

typedef struct te_sim_state te_sim_state;

struct te_sim_state {
    unsigned thread[3], block[3], block_dim[3], grid_dim[3]; /* of the running thread */
    unsigned lane;                                           /* in its warp */
    void    *shared;                                         /* dynamic shared memory */
    char    *variables, *variables_end;                      /* all shared variables of the module */
    int      other_functions;                                /* see te_cuda_sim_set_other_functions */
    int      late;                                           /* copies arrive when they are waited for, not before */
    unsigned long long run;                                  /* of a block: no other one has this number */

    /* Until every thread of the block that has not returned is here. */
    void (*barrier)(te_sim_state *);
    /* Until every lane of mask is here; the values they came with, valid until this thread's next but one exchange. */
    const unsigned long long *(*exchange)(te_sim_state *, unsigned mask, unsigned long long value);
};

#endif
