/* cores.c - see cores.h. Threads beyond what the scheduler grants cost more than they bring: they spin at the end of
 * every parallel loop for one that is not running. */
#define _GNU_SOURCE /* sched_getaffinity and CPU_COUNT */
#include "cores.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

enum { MOST = 1024 };

static int permitted(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN); /* more processors than the set has room for */
}

/* The numbers in a file, one or two; how many: 0 where it is missing or says something else, such as "max". */
static int read_numbers(const char *path, double *first, double *second)
{
    FILE *file = fopen(path, "r");
    int   n = file ? fscanf(file, "%lf %lf", first, second) : 0;
    if (file) fclose(file);
    return n < 0 ? 0 : n;
}

/* Processors' worth of time in a period, of version 2 of control groups or of version 1; 0 without a limit. */
static double granted(void)
{
    double quota, period, none;
    if (read_numbers("/sys/fs/cgroup/cpu.max", &quota, &period) == 2 && period > 0) return quota / period;
    if (read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &none) == 1 && quota > 0 &&
        read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &none) == 1 && period > 0)
        return quota / period;
    return 0;
}

int te_cores(void)
{
    int    cores = permitted();
    double share = granted();
    if (share > 0 && share + 0.5 < cores) cores = (int)(share + 0.5);
    return cores < 1 ? 1 : cores > MOST ? MOST : cores;
}
