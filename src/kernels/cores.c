/* cores.c - see cores.h. Threads beyond what the scheduler grants cost more than they bring: they spin at the end of
 * every parallel loop for one that is not running. */
#define _GNU_SOURCE /* sched_getaffinity, sched_getcpu and CPU_COUNT */
#include "cores.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 1024 };

/* Of the OpenMP library, where the process has one: oneDNN's or the host's. */
#pragma weak omp_get_proc_bind
#pragma weak omp_get_num_places
#pragma weak omp_get_place_num_procs
#pragma weak omp_get_place_proc_ids
int  omp_get_proc_bind(void); /* an enumeration whose 0 says that threads move freely */
int  omp_get_num_places(void);
int  omp_get_place_num_procs(int place);
void omp_get_place_proc_ids(int place, int *ids);

/* 0: OpenMP does not bind threads. */
static int places(void)
{
    if (!omp_get_proc_bind || !omp_get_num_places || !omp_get_place_num_procs || !omp_get_place_proc_ids) return 0;
    return omp_get_proc_bind() != 0 ? omp_get_num_places() : 0;
}

static void add_place(cpu_set_t *set, int place)
{
    int ids[CPU_SETSIZE], n = omp_get_place_num_procs(place);
    if (n < 1 || n > CPU_SETSIZE) return;
    omp_get_place_proc_ids(place, ids);
    for (int i = 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < CPU_SETSIZE) CPU_SET(ids[i], set);
}

static int permitted(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) /* more processors than the set has room for */
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = 0, n = places(); i < n; i++) add_place(&set, i);
    return CPU_COUNT(&set);
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

int te_cores_wanted(void)
{
    const char *asked = getenv("OMP_NUM_THREADS");
    char       *end;
    long        threads = asked ? strtol(asked, &end, 10) : 0;
    if (threads < 1 || end[strspn(end, " ")] != (strchr(end, ',') ? ',' : '\0')) return te_cores();
    return threads < MOST ? (int)threads : MOST;
}

int te_cores_current(void) { return sched_getcpu(); }

void te_cores_bind(int index)
{
    int n = places();
    if (n < 1) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    add_place(&set, index % n);
    if (CPU_COUNT(&set) > 0) sched_setaffinity(0, sizeof set, &set);
}

void te_cores_leave(int processor)
{
    cpu_set_t before, others;
    if (processor < 0 || processor >= CPU_SETSIZE || sched_getaffinity(0, sizeof before, &before) != 0) return;
    others = before;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof before, &before);
}

static atomic_int forks;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void count_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

int te_cores_forks(void)
{
    static pthread_once_t counts = PTHREAD_ONCE_INIT;
    pthread_once(&counts, count_forks);
    return atomic_load(&forks);
}
