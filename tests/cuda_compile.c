/* cuda_compile.c - hands the kernels that specs made on the made-up GPU to the real NVRTC, as the backend would on a
 * card. Where the GPU is made up, an entry of the kernel cache holds the source that it was compiled from.
 *
 *     cuda_compile NVRTC CACHE TARGET MOST PROCESSES [KEPT]
 *
 * What does not compile, and what spills registers, is printed and counted. Entries bear the hash of their source as
 * name, so the first MOST of them by name are a sample that neither favours anything nor changes from run to run. With KEPT
 * the binaries are left in that folder under the same names: the cache of a device that is such a TARGET and has this NVRTC,
 * so that nothing is compiled there.
 */
#include "kernels/cuda/disk_cache.h"

#include <dirent.h>
#include <dlfcn.h>
#include <nvrtc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SPILL_ALLOWED = 99 }; /* bytes: some go around divisions of 64 bits */

static const char magic[] = "fake cubin\n";

typedef struct compiler {
    __typeof__(&nvrtcCreateProgram) create;
    __typeof__(&nvrtcCompileProgram) compile;
    __typeof__(&nvrtcGetProgramLogSize) log_size;
    __typeof__(&nvrtcGetProgramLog) log;
    __typeof__(&nvrtcDestroyProgram) destroy;
    __typeof__(&nvrtcGetCUBINSize) size;
    __typeof__(&nvrtcGetCUBIN) binary;
    const char *target;
    te_disk_cache *kept; /* NULL: nothing is */
} compiler;

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

/* The text of a file after a header of a few bytes and the magic; NULL when it is something else. */
static char *read_source(const char *path)
{
    FILE *in = fopen(path, "rb");
    char *text = NULL, *source = NULL;
    if (in && fseek(in, 0, SEEK_END) == 0) {
        long size = ftell(in);
        rewind(in);
        text = size > 0 ? calloc(1, (size_t)size + 1) : NULL;
        if (text && fread(text, 1, (size_t)size, in) == (size_t)size)
            for (long i = 0; i + (long)sizeof magic < size && i < 256 && !source; i++)
                if (memcmp(text + i, magic, sizeof magic - 1) == 0) source = strdup(text + i + sizeof magic - 1);
    }
    if (in) fclose(in);
    free(text);
    return source;
}

/* The most bytes that a function spills by the assembler's report; -1 without a report. */
static long spilled(const char *log)
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

static bool compiles(const compiler *c, const char *name, const char *source)
{
    char target[64];
    const char *options[] = {"--fmad=false", "--std=c++17", target, "--ptxas-options=-v"};
    nvrtcProgram program = NULL;
    size_t size = 0;
    snprintf(target, sizeof target, "--gpu-architecture=%s", c->target);
    nvrtcResult r = c->create(&program, source, name, 0, NULL, NULL);
    if (r == NVRTC_SUCCESS) r = c->compile(program, sizeof options / sizeof *options, options);
    char *log = c->log_size(program, &size) == NVRTC_SUCCESS ? calloc(1, size + 1) : NULL;
    if (log) c->log(program, log);
    long spills = log ? spilled(log) : -1;
    bool fine = r == NVRTC_SUCCESS && spills >= 0 && spills <= SPILL_ALLOWED;
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

static int is_kernel(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 6 && strcmp(entry->d_name + length - 6, ".cubin") == 0;
}

/* Every `step`-th entry from the first; how many were refused, 255 at most. */
static int compile_share(const compiler *c, const char *folder, struct dirent **entries, int n, int first, int step)
{
    int refused = 0;
    for (int i = first; i < n; i += step) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        char *source = read_source(path);
        if (!source || !compiles(c, entries[i]->d_name, source)) refused++;
        if (!source) fprintf(stderr, "%s has no source\n", path);
        free(source);
    }
    return refused < 255 ? refused : 255;
}

int main(int argc, char **argv)
{
    compiler c = {.kept = NULL};
    te_disk_cache kept;
    struct dirent **entries = NULL;
    if (argc != 6 && argc != 7) {
        fprintf(stderr, "usage: cuda_compile NVRTC CACHE TARGET MOST PROCESSES [KEPT]\n");
        return 2;
    }
    if (argc == 7 && setenv("TETRAIN_CACHE", argv[6], 1) == 0) {
        te_disk_cache_open(&kept, &te_mem_libc);
        c.kept = &kept;
    }
    int all = scandir(argv[2], &entries, is_kernel, alphasort), most = atoi(argv[4]), processes = atoi(argv[5]);
    int n = all < most ? all : most, refused = 0;
    for (int p = 0; p < processes; p++) {
        pid_t child = fork();
        if (child != 0) continue;
        if (!open_compiler(&c, argv[1], argv[3])) _exit(255);
        _exit(compile_share(&c, argv[2], entries, n, p, processes));
    }
    for (int p = 0, status; p < processes && wait(&status) > 0; p++)
        refused += WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    for (int i = 0; i < all; i++) free(entries[i]);
    free(entries);
    printf("%d of %d kernels compiled for %s, %d refused\n", n > 0 ? n : 0, all > 0 ? all : 0, argv[3], refused);
    return refused || n <= 0;
}
