/* cuda_compile.c - hands the kernels that specs made on the made-up GPU to the real NVRTC, as the backend would on a
 * card. Where the GPU is made up, an entry of the kernel cache holds the source that it was compiled from. Files *.cu,
 * as cuda_sources.c writes them, are sources themselves.
 *
 *     cuda_compile NVRTC CACHE TARGET MOST PROCESSES [KEPT SECONDS]
 *
 * What does not compile, and what spills registers, is printed and counted. Entries bear the hash of their source as
 * name, so the first MOST of them by name are a sample that neither favours anything nor changes from run to run. With
 * KEPT the binaries are left in that folder under the same names: the cache of a device that is such a TARGET and has
 * this NVRTC, so that nothing is compiled there. The oldest entries then come first, which whoever fills the cache has
 * made the most needed ones, and none is begun after so many SECONDS.
 */
#include "kernels/cuda/disk_cache.h"
#include "kernels/cuda/spills.h"

#include <dirent.h>
#include <dlfcn.h>
#include <nvrtc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char magic[] = "fake cubin\n";

typedef struct compiler {
    __typeof__(&nvrtcCreateProgram) create;
    __typeof__(&nvrtcCompileProgram) compile;
    __typeof__(&nvrtcGetProgramLogSize) log_size;
    __typeof__(&nvrtcGetProgramLog) log;
    __typeof__(&nvrtcDestroyProgram) destroy;
    __typeof__(&nvrtcGetCUBINSize) size;
    __typeof__(&nvrtcGetCUBIN) binary;
    const char *target, *folder;
    te_disk_cache *kept; /* NULL: nothing is */
    time_t end;          /* 0: none */
} compiler;

typedef struct entry {
    char name[64];
    struct timespec made;
} entry;

/* What the processes count together: one of these for each. */
typedef struct counts {
    int compiled, refused;
} counts;

static bool open_compiler(compiler *c, const char *path, const char *target)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return false;
    }
    c->target = target;
    *(void **)&c->create = dlsym(library, "nvrtcCreateProgram");
    *(void **)&c->compile = dlsym(library, "nvrtcCompileProgram");
    *(void **)&c->log_size = dlsym(library, "nvrtcGetProgramLogSize");
    *(void **)&c->log = dlsym(library, "nvrtcGetProgramLog");
    *(void **)&c->destroy = dlsym(library, "nvrtcDestroyProgram");
    *(void **)&c->size = dlsym(library, "nvrtcGetCUBINSize");
    *(void **)&c->binary = dlsym(library, "nvrtcGetCUBIN");
    return c->create && c->compile && c->log_size && c->log && c->destroy && c->size && c->binary;
}

/* Under the name of the entry that the source is from. */
static bool keep(const compiler *c, const char *name, nvrtcProgram program)
{
    unsigned long long a = 0, b = 0;
    size_t size = 0;
    bool done = sscanf(name, "%16llx%16llx", &a, &b) == 2 && c->size(program, &size) == NVRTC_SUCCESS && size > 0;
    char *binary = done ? malloc(size) : NULL;
    done = binary && c->binary(program, binary) == NVRTC_SUCCESS;
    if (done) te_disk_cache_write(c->kept, (te_hash128){a, b}, ".cubin", binary, size);
    free(binary);
    return done;
}

static bool ends_in(const char *name, const char *suffix)
{
    size_t length = strlen(name), end = strlen(suffix);
    return length > end && strcmp(name + length - end, suffix) == 0;
}

/* The text of a file, in a cache that after a header of a few bytes and the magic; NULL when it is something else. */
static char *read_source(const char *path)
{
    FILE *in = fopen(path, "rb");
    char *text = NULL, *source = NULL;
    if (in && fseek(in, 0, SEEK_END) == 0) {
        long size = ftell(in);
        rewind(in);
        text = size > 0 ? calloc(1, (size_t)size + 1) : NULL;
        bool whole = text && fread(text, 1, (size_t)size, in) == (size_t)size;
        if (whole && ends_in(path, ".cu")) source = strdup(text);
        else if (whole)
            for (long i = 0; i + (long)sizeof magic < size && i < 256 && !source; i++)
                if (memcmp(text + i, magic, sizeof magic - 1) == 0) source = strdup(text + i + sizeof magic - 1);
    }
    if (in) fclose(in);
    free(text);
    return source;
}

static bool compiles(const compiler *c, const char *name, const char *source)
{
    char target[64];
    const char *options[] = {"--fmad=false", "--std=c++17", target, TE_CUDA_REPORT_OPTION};
    nvrtcProgram program = NULL;
    size_t size = 0;
    snprintf(target, sizeof target, "--gpu-architecture=%s", c->target);
    nvrtcResult r = c->create(&program, source, name, 0, NULL, NULL);
    if (r == NVRTC_SUCCESS) r = c->compile(program, sizeof options / sizeof *options, options);
    char *log = c->log_size(program, &size) == NVRTC_SUCCESS ? calloc(1, size + 1) : NULL;
    if (log) c->log(program, log);
    long spills = log ? te_cuda_spills(log) : -1;
    bool fine = r == NVRTC_SUCCESS && spills >= 0 && spills <= TE_CUDA_SPILLS_ALLOWED;
    if (r != NVRTC_SUCCESS)
        fprintf(stderr, "%s does not compile for %s: %.2000s\n", name, c->target, log ? log : "");
    else if (!fine)
        fprintf(stderr, "%s spills %ld bytes on %s: %.2000s\n", name, spills, c->target, log ? log : "");
    if (fine && c->kept && !keep(c, name, program)) {
        fprintf(stderr, "%s cannot be kept\n", name);
        fine = false;
    }
    free(log);
    c->destroy(&program);
    return fine;
}

static int by_name(const void *a, const void *b) { return strcmp(((const entry *)a)->name, ((const entry *)b)->name); }

static int by_age(const void *a, const void *b)
{
    struct timespec x = ((const entry *)a)->made, y = ((const entry *)b)->made;
    if (x.tv_sec != y.tv_sec) return x.tv_sec < y.tv_sec ? -1 : 1;
    return x.tv_nsec != y.tv_nsec ? (x.tv_nsec < y.tv_nsec ? -1 : 1) : by_name(a, b);
}

/* The kernels of a folder; NULL: out of memory or there is no such folder. */
static entry *list_entries(const char *folder, int *n)
{
    DIR *listing = opendir(folder);
    entry *entries = NULL;
    *n = 0;
    for (struct dirent *d; listing && (d = readdir(listing));) {
        size_t length = strlen(d->d_name);
        char path[1024];
        struct stat about;
        if (length >= sizeof entries->name || !(ends_in(d->d_name, ".cubin") || ends_in(d->d_name, ".cu"))) continue;
        entry *more = realloc(entries, ((size_t)*n + 1) * sizeof *more);
        if (!more) break;
        entries = more;
        snprintf(path, sizeof path, "%s/%s", folder, d->d_name);
        if (stat(path, &about) != 0) continue;
        memcpy(entries[*n].name, d->d_name, length + 1);
        entries[(*n)++].made = about.st_mtim;
    }
    if (listing) closedir(listing);
    return entries;
}

/* Every `step`-th entry from the first. */
static void compile_share(const compiler *c, const entry *entries, int n, int first, int step, counts *mine)
{
    for (int i = first; i < n && (!c->end || time(NULL) < c->end); i += step) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", c->folder, entries[i].name);
        char *source = read_source(path);
        if (source && compiles(c, entries[i].name, source))
            mine->compiled++;
        else
            mine->refused++;
        if (!source) fprintf(stderr, "%s has no source\n", path);
        free(source);
    }
}

/* All of them among processes; what they counted. */
static counts compile_all(compiler *c, const char *nvrtc, const entry *entries, int n, int processes)
{
    counts sum = {0, 0}, *each;
    size_t bytes = (size_t)processes * sizeof *each;
    each = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (each == MAP_FAILED) return (counts){0, 1};
    fflush(stdout);
    for (int p = 0; p < processes; p++) {
        if (fork() != 0) continue;
        if (!open_compiler(c, nvrtc, c->target)) _exit(1);
        compile_share(c, entries, n, p, processes, &each[p]);
        _exit(0);
    }
    for (int p = 0, status; p < processes && wait(&status) > 0; p++)
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) sum.refused++;
    for (int p = 0; p < processes; p++) sum.compiled += each[p].compiled, sum.refused += each[p].refused;
    munmap(each, bytes);
    return sum;
}

int main(int argc, char **argv)
{
    te_disk_cache kept;
    time_t began = time(NULL);
    if (argc != 6 && argc != 8) {
        fprintf(stderr, "usage: cuda_compile NVRTC CACHE TARGET MOST PROCESSES [KEPT SECONDS]\n");
        return 2;
    }
    compiler c = {.folder = argv[2], .target = argv[3]};
    int all = 0, most = atoi(argv[4]), processes = atoi(argv[5]);
    if (argc == 8 && setenv("TETRAIN_CACHE", argv[6], 1) == 0) {
        te_disk_cache_open(&kept, &te_mem_libc);
        c.kept = &kept;
        c.end = began + atoi(argv[7]);
    }
    entry *entries = list_entries(c.folder, &all);
    if (all > 0) qsort(entries, (size_t)all, sizeof *entries, c.kept ? by_age : by_name);
    counts sum = processes > 0 ? compile_all(&c, argv[1], entries, all < most ? all : most, processes) : (counts){0, 1};
    free(entries);
    printf("%d of %d kernels compiled for %s in %ld seconds, %d refused\n", sum.compiled, all, c.target,
           (long)(time(NULL) - began), sum.refused);
    return sum.refused || sum.compiled == 0;
}
