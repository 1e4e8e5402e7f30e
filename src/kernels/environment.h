/* environment.h - the variables that the engine reads; the manual page lists its own. Elsewhere OMP_NUM_THREADS is read
 * (cores.c, te.train.ranks), and TERM by te.train.progress; and the executable, which is no part of the engine, reads
 * TETRAIN_HISTORY, where empty is not unset, HOME and TERM for its prompt, and checks the words of some of these
 * (src/tetrain/command_line.c). */
#ifndef TE_KERNELS_ENVIRONMENT_H
#define TE_KERNELS_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

/* X(enumerator, name, meaning) */
#define TE_ENVIRONMENT_OWN(X)                                                                                         \
    X(DEVICE, "TE_DEVICE", "device of new tensors unless --device says otherwise")                                    \
    X(TRACE, "TE_TRACE", "comma-separated list of what to report on standard error: dispatch, fuse")                  \
    X(CPU_ISA, "TE_CPU_ISA", "portable, avx2 or avx512: the highest level that the CPU backend may use")              \
    X(CUDA_MODULE, "TETRAIN_CUDA_MODULE", "path of libtetrain_cuda.so, instead of searching for it")                  \
    X(MPI_MODULE, "TETRAIN_MPI_MODULE", "path of libtetrain_mpi.so, instead of searching for it")                     \
    X(CUDA_LIBRARIES, "TETRAIN_CUDA_LIBRARIES", "the only folder to load NVIDIA's libraries from")                    \
    X(CACHE, "TETRAIN_CACHE", "folder of compiled kernels and tuning (default: tetrain in the user's cache folder)")  \
    X(CUDNN, "TETRAIN_CUDNN", "0: attention never uses cuDNN; all: with a bias and sinks, too")                       \
    X(CUDNN_WORKSPACE, "TETRAIN_CUDNN_WORKSPACE", "MiB of workspace for attention before its batch is split")          \
    X(GEMM_CANDIDATES, "TETRAIN_GEMM_CANDIDATES", "cuBLASLt algorithms that are timed for each product (default: 8)")

/* Those of other programs. */
#define TE_ENVIRONMENT_FOREIGN(X)                                                                                     \
    X(OMPI_SIZE, "OMPI_COMM_WORLD_SIZE", "how many processes mpirun starts together")                                 \
    X(PMIX_RANK, "PMIX_RANK", "likewise, by prterun and srun")                                                        \
    X(SLURM_SIZE, "SLURM_STEP_NUM_TASKS", "how many srun starts")                                                     \
    X(PMI_SIZE, "PMI_SIZE", "how many other starters start")                                                          \
    X(CUDA_HOME, "CUDA_HOME", "CUDA toolkit")                                                                         \
    X(CUDA_PATH, "CUDA_PATH", "CUDA toolkit")                                                                         \
    X(VIRTUAL_ENV, "VIRTUAL_ENV", "Python environment, whose NVIDIA packages hold the libraries too")                 \
    X(CONDA_PREFIX, "CONDA_PREFIX", "likewise")                                                                       \
    X(XDG_CACHE_HOME, "XDG_CACHE_HOME", "the user's cache folder")                                                    \
    X(HOME, "HOME", "the user's folder")

#define TE_ENVIRONMENT(X) TE_ENVIRONMENT_OWN(X) TE_ENVIRONMENT_FOREIGN(X)

typedef enum te_variable {
#define TE_VARIABLE_ENUM(name, text, doc) TE_ENV_##name,
    TE_ENVIRONMENT(TE_VARIABLE_ENUM)
#undef TE_VARIABLE_ENUM
} te_variable;

/* Whether TE_TRACE asks for reports of this kind. */
bool te_environment_traces(const char *kind);
/* NULL when unset or empty. */
const char *te_environment(te_variable variable);

/* The folder of what one process keeps for the next: $TETRAIN_CACHE, or tetrain in the user's cache folder. Returns
 * path; NULL where there is none, or its name is too long. */
char *te_environment_cache(char *path, size_t size);

#endif
