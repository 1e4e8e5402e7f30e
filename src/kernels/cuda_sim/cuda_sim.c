/* cuda_sim.c - from source to kernels that can be called: see cuda_sim.h.
 *
 * What is compiled is abi.h, device.h, the source, and a line per kernel found in it. Its text and the compiler's
 * command give the name of the shared object in the cache folder; a new one is made under a name of its own and
 * renamed, so that processes do not see each other's halves.
 *
 * Sources of row programs begin with the same headers, which are most of them. These are precompiled once, with the
 * shim, for all sources that begin alike.
 */
#include "cuda_sim.h"

#include "abi.h"
#include "run.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern const char te_cuda_sim_prelude[]; /* abi.h and device.h, made by the build */
extern const char te_cuda_program_device[]; /* the last of the headers that row programs begin with */
extern char     **environ;

struct te_cuda_sim {
    void           *library;
    void          (*attach)(te_sim_state *);
    pthread_mutex_t lock; /* kernels keep their state in the library's variables */
};

/* Without standard libraries, which take the linker a while: the process has libc and libm. */
static const char *const compiler_options[] = {"-std=c++17", "-ffp-contract=off",
                                               "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
                                               "-fvisibility=hidden", "-fPIC", "-shared", "-w", "-nostdlib",
#ifdef __SANITIZE_ADDRESS__ /* then kernels are watched as the host is */
                                               "-fsanitize=address",
#ifndef __clang__ /* checks that are calls, for which less is compiled */
                                               "--param=asan-instrumentation-with-call-threshold=0",
#endif
#endif
};

/* Under TE_SIM_STRICT: what a GPU refuses, or does in silence, ends the process. */
static const char *const strict_options[] = {
    "-fsanitize=alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error"};

enum { N_OPTIONS = sizeof compiler_options / sizeof compiler_options[0], N_STRICT = 2, PATH_SIZE = 512 };

static bool strict(void) { return getenv("TE_SIM_STRICT") != NULL; }

/* Most of the time goes into the compiler's tables, a part of which are for vectors that kernels do not have; what they
 * need is fused multiply-adds. */
static const char *processor_option(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "-march=x86-64-v3";
#endif
    return "-march=native";
}

/* Row programs are many, and run for less time than they are compiled for. */
static const char *optimization(bool row_program) { return row_program ? "-Og" : "-O1"; }

static const char *compiler(void)
{
    const char *cxx = getenv("CXX");
    return cxx && cxx[0] ? cxx : "c++";
}

/* --- names ------------------------------------------------------------------------------------------------------- */

static uint64_t hash(uint64_t h, const char *text)
{
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return (h ^ 0xff) * 0x100000001b3u;
}

static void object_name(const char *source, char name[33])
{
    uint64_t h[2] = {0xcbf29ce484222325u, 0x9ae16a3b2f90404fu};
    for (int k = 0; k < 2; k++) {
        h[k] = hash(hash(hash(h[k], compiler()), te_cuda_sim_prelude), source);
        h[k] = hash(hash(hash(h[k], processor_option()), optimization(false)), optimization(true));
        for (int i = 0; i < N_OPTIONS; i++) h[k] = hash(h[k], compiler_options[i]);
        for (int i = 0; strict() && i < N_STRICT; i++) h[k] = hash(h[k], strict_options[i]);
    }
    snprintf(name, 33, "%016llx%016llx", (unsigned long long)h[0], (unsigned long long)h[1]);
}

static bool make_folder(const char *folder, char path[PATH_SIZE], char *message, size_t size)
{
    const char *temporary = getenv("TMPDIR");
    if (folder) snprintf(path, PATH_SIZE, "%s", folder);
    else snprintf(path, PATH_SIZE, "%s/tetrain-cuda-sim-%ld", temporary ? temporary : "/tmp", (long)getuid());
    if (mkdir(path, 0700) == 0 || errno == EEXIST) return true;
    snprintf(message, size, "cannot make the folder %s: %s", path, strerror(errno));
    return false;
}

/* --- compiling --------------------------------------------------------------------------------------------------- */

static bool word(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* A line for each `__global__ … name(`. */
static void write_kernels(FILE *out, const char *source)
{
    static const char mark[] = "__global__", bounds[] = "__launch_bounds__";
    for (const char *at = strstr(source, mark); at; at = strstr(at, mark)) {
        const char *open = at += sizeof mark - 1, *end, *start;
        for (;;) {
            open = strchr(open, '(');
            if (!open) return;
            for (end = open; end > at && !word(end[-1]);) end--;
            for (start = end; start > at && word(start[-1]);) start--;
            if ((size_t)(end - start) != sizeof bounds - 1 || memcmp(start, bounds, sizeof bounds - 1) != 0) break;
            open = strchr(open, ')');
            if (!open) return;
        }
        fprintf(out, "TE_SIM_KERNEL(%.*s)\n", (int)(end - start), start);
    }
}

/* A file of three texts. */
static bool write_text(const char *path, const char *a, const char *b, size_t b_length, const char *c, char *message,
                       size_t size)
{
    FILE *out = fopen(path, "w");
    if (out) {
        fputs(a, out);
        fputs("#line 1 \"kernel.cu\"\n", out);
        fwrite(b, 1, b_length, out);
        fputs("\n", out);
        write_kernels(out, c);
    }
    if (out && !ferror(out) && fclose(out) == 0) return true;
    snprintf(message, size, "cannot write %s: %s", path, strerror(errno));
    return false;
}

static int run_compiler(const char *language, bool row_program, const char *source, const char *object,
                        const char *log)
{
    const char *args[N_OPTIONS + N_STRICT + 10] = {compiler(), optimization(row_program), processor_option()};
    posix_spawn_file_actions_t actions;
    int                        n = 3, status = -1;
    pid_t                      pid;
    for (int i = 0; i < N_OPTIONS; i++) args[n++] = compiler_options[i];
    for (int i = 0; strict() && i < N_STRICT; i++) args[n++] = strict_options[i];
    args[n++] = "-x";
    args[n++] = language;
    args[n++] = source;
    if (strcmp(language, "c++") == 0) args[n++] = "-lgcc";
    args[n++] = "-o";
    args[n] = object;
    if (posix_spawn_file_actions_init(&actions) != 0) return -1;
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    /* posix_spawn takes the pointers without const and leaves the strings alone */
    if (posix_spawnp(&pid, args[0], &actions, NULL, (char *const *)(void *)args, environ) == 0)
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    posix_spawn_file_actions_destroy(&actions);
    return status;
}

static void first_lines(const char *path, char *text, size_t size)
{
    FILE *in = fopen(path, "r");
    size_t n = in ? fread(text, 1, size - 1, in) : 0;
    text[n] = 0;
    if (in) fclose(in);
}

/* How much of a source is the headers that many have; 0: it has others. */
static size_t common_length(const char *source)
{
    const char *last = strstr(source, te_cuda_program_device);
    return last ? (size_t)(last - source) + strlen(te_cuda_program_device) : 0;
}

/* `path` becomes the name of a file with the shim and the first `length` bytes of source. It is precompiled, under the
 * name where the compiler looks for that; if that fails, the text serves. What is unfinished has names with `base`. */
static bool make_header(const char *folder, const char *base, const char *source, size_t length, char *path,
                        char *message, size_t size)
{
    char  name[33], fresh[PATH_SIZE + 80], log[PATH_SIZE + 80], compiled[PATH_SIZE + 80];
    char *text = strndup(source, length);
    if (!text) return false;
    object_name(text, name);
    free(text);
    snprintf(path, PATH_SIZE + 64, "%s/%s.h", folder, name);
    if (access(path, R_OK) == 0) return true;
    snprintf(fresh, sizeof fresh, "%s.h", base);
    snprintf(log, sizeof log, "%s.log", base);
    snprintf(compiled, sizeof compiled, "%s.gch", path);
    if (!write_text(fresh, te_cuda_sim_prelude, source, length, "", message, size)) return false;
    if (rename(fresh, path) != 0) return false;
    if (run_compiler("c++-header", true, path, fresh, log) != 0 || rename(fresh, compiled) != 0) unlink(fresh);
    return true;
}

static bool compile(const char *folder, const char *object, const char *source, char *message, size_t size)
{
    char base[PATH_SIZE + 64], text[PATH_SIZE + 80], log[PATH_SIZE + 80], fresh[PATH_SIZE + 80], errors[2048];
    char header[PATH_SIZE + 64] = "", include[PATH_SIZE + 96];
    size_t skipped = common_length(source);
    bool done = false;
    snprintf(base, sizeof base, "%s/%ld-%lx", folder, (long)getpid(), (unsigned long)pthread_self());
    snprintf(text, sizeof text, "%s.cu", base);
    snprintf(log, sizeof log, "%s.log", base);
    snprintf(fresh, sizeof fresh, "%s.so", base);
    if (skipped && !make_header(folder, base, source, skipped, header, message, size)) skipped = 0;
    snprintf(include, sizeof include, "#include \"%s\"\n", header);
    const char *rest = source + skipped;
    if (write_text(text, skipped ? include : te_cuda_sim_prelude, rest, strlen(rest), rest, message, size)) {
        int status = run_compiler("c++", skipped > 0, text, fresh, log);
        if (status != 0) {
            first_lines(log, errors, sizeof errors);
            snprintf(message, size, "%s failed (status %d): %s", compiler(), status, errors);
        } else {
            done = rename(fresh, object) == 0;
            if (!done) snprintf(message, size, "cannot rename %s: %s", fresh, strerror(errno));
        }
    }
    unlink(text);
    unlink(log);
    if (!done) unlink(fresh);
    return done;
}

/* --- interface --------------------------------------------------------------------------------------------------- */

static te_cuda_sim *open_object(const char *path, char *message, size_t size)
{
    te_cuda_sim *sim = calloc(1, sizeof *sim);
    if (sim) sim->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (sim && sim->library) *(void **)&sim->attach = dlsym(sim->library, "te_sim_attach");
    if (sim && sim->attach && pthread_mutex_init(&sim->lock, NULL) == 0) return sim;
    snprintf(message, size, "cannot open %s: %s", path, sim && !sim->library ? dlerror() : "out of memory");
    if (sim && sim->library) dlclose(sim->library);
    free(sim);
    return NULL;
}

/* Processes that want the same kernels at the same time, as those of one training run do, wait for the one that
 * compiles them: those whose names begin alike share a lock. -1: there is none, and each compiles for itself. */
static int take_lock(const char *folder, const char name[33])
{
    char path[PATH_SIZE + 16];
    snprintf(path, sizeof path, "%s/%.2s.lock", folder, name);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    while (lock >= 0 && flock(lock, LOCK_EX) != 0 && errno == EINTR) {}
    return lock;
}

/* Unless it is there. */
static bool make_object(const char *folder, const char name[33], const char *object, const char *source, char *message,
                        size_t size)
{
    if (access(object, R_OK) == 0) return true;
    int  lock = take_lock(folder, name);
    bool made = access(object, R_OK) == 0 || compile(folder, object, source, message, size);
    if (lock >= 0) close(lock);
    return made;
}

te_cuda_sim *te_cuda_sim_compile(const char *source, const char *folder, char *message, size_t message_size)
{
    char path[PATH_SIZE], name[33], object[PATH_SIZE + 64];
    if (!make_folder(folder, path, message, message_size)) return NULL;
    object_name(source, name);
    snprintf(object, sizeof object, "%s/%s.so", path, name);
    if (!make_object(path, name, object, source, message, message_size)) return NULL;
    te_cuda_sim *sim = open_object(object, message, message_size);
    if (sim) return sim;
    unlink(object); /* damaged: made anew, once */
    if (!make_object(path, name, object, source, message, message_size)) return NULL;
    return open_object(object, message, message_size);
}

void te_cuda_sim_release(te_cuda_sim *sim)
{
    if (!sim) return;
    dlclose(sim->library);
    pthread_mutex_destroy(&sim->lock);
    free(sim);
}

static void *find(te_cuda_sim *sim, const char *kernel)
{
    char name[256];
    snprintf(name, sizeof name, "te_sim_kernel_%s", kernel);
    return dlsym(sim->library, name);
}

int te_cuda_sim_has(te_cuda_sim *sim, const char *kernel) { return find(sim, kernel) != NULL; }

uint32_t te_cuda_sim_variables(te_cuda_sim *sim)
{
    te_sim_state state;
    sim->attach(&state);
    return (uint32_t)(state.variables_end - state.variables);
}

int te_cuda_sim_launch(te_cuda_sim *sim, const char *kernel, const uint32_t grid[3], const uint32_t block[3],
                       uint32_t shared, void *const *params, char *message, size_t message_size)
{
    te_sim_kernel found = {.attach = sim->attach};
    *(void **)&found.run = find(sim, kernel);
    if (!found.run) {
        snprintf(message, message_size, "there is no kernel %s", kernel);
        return -1;
    }
    pthread_mutex_lock(&sim->lock);
    int result = te_sim_run_grid(&found, grid, block, shared, params, message, message_size);
    pthread_mutex_unlock(&sim->lock);
    return result;
}
