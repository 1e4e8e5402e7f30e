/* spills.h - what the assembler reports of a kernel that was compiled with TE_CUDA_REPORT_OPTION: registers that it had
 * to keep in memory make a kernel several times slower and fail no other test.
 */
#ifndef TE_KERNELS_CUDA_SPILLS_H
#define TE_KERNELS_CUDA_SPILLS_H

#include <stdlib.h>
#include <string.h>

#define TE_CUDA_REPORT_OPTION "--ptxas-options=-v"

enum { TE_CUDA_SPILLS_ALLOWED = 99 }; /* bytes: some go around divisions of 64 bits */

/* The most bytes that a function spills by the report; -1 without a report. */
static inline long te_cuda_spills(const char *log)
{
    static const char mark[] = " bytes spill ";
    long most = -1;
    for (const char *at = strstr(log, mark); at; at = strstr(at + 1, mark)) {
        const char *digits = at;
        while (digits > log && digits[-1] >= '0' && digits[-1] <= '9') digits--;
        long bytes = strtol(digits, NULL, 10);
        if (bytes > most) most = bytes;
    }
    return most;
}

#endif
