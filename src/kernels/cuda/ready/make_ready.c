/* make_ready.c - run by the build: compiles the kernels of ready_list.c for one target with the toolkit's NVRTC, which
 * takes them as the backend's would. `make_ready TARGET OUTPUT [strict]` writes OUTPUT.bin, the binaries one behind the
 * other, and OUTPUT.c, which puts them into the module with their table (ready.h). That takes half a minute, so outputs
 * which their first line says to be made from the same sources stay as they are.
 */
#include "../ready.h"
#include "../spills.h"

#include <fcntl.h>
#include <nvrtc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { ALIGNMENT = 64, MAX_LOG = 4000 };

typedef struct output {
    const char *target, *path;
    bool strict; /* spilled registers are an error */
    FILE *bytes, *table;
    size_t written;
} output;

static int complain(const output *o, const char *what, nvrtcProgram program)
{
    size_t size = 0;
    char *log = program && nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS ? calloc(1, size + 1) : NULL;
    if (log) nvrtcGetProgramLog(program, log);
    fprintf(stderr, "%s: %s: %.*s\n", o->target, what, MAX_LOG, log ? log : "");
    free(log);
    return 1;
}

static int write_binary(output *o, const te_text *source, nvrtcProgram program)
{
    static const char padding[ALIGNMENT];
    size_t size = 0;
    if (nvrtcGetCUBINSize(program, &size) != NVRTC_SUCCESS) return complain(o, "no binary", program);
    char *binary = malloc(size);
    te_hash128 hash = te_cuda_ready_hash(source->data, source->length);
    int failed = !binary || nvrtcGetCUBIN(program, binary) != NVRTC_SUCCESS;
    size_t gap = (ALIGNMENT - size % ALIGNMENT) % ALIGNMENT;
    failed = failed || fwrite(binary, 1, size, o->bytes) != size || fwrite(padding, 1, gap, o->bytes) != gap;
    fprintf(o->table, "    {{UINT64_C(0x%016llx), UINT64_C(0x%016llx)}, %zu, %zu},\n", (unsigned long long)hash.a,
            (unsigned long long)hash.b, o->written, size);
    o->written += size + gap;
    free(binary);
    return failed ? complain(o, "its binary cannot be written", NULL) : 0;
}

/* Warns of a kernel that spills registers, which a strict build refuses, as it does one without a report. */
static int check_registers(const output *o, nvrtcProgram program)
{
    size_t size = 0;
    char *log = nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS ? calloc(1, size + 1) : NULL;
    bool read = log && nvrtcGetProgramLog(program, log) == NVRTC_SUCCESS;
    long spills = read ? te_cuda_spills(log) : -1;
    free(log);
    if (spills >= 0 && spills <= TE_CUDA_SPILLS_ALLOWED) return 0;
    if (spills < 0) fprintf(stderr, "%s: the assembler reports no registers of a kernel\n", o->target);
    else fprintf(stderr, "%s: a kernel spills %ld bytes of registers\n", o->target, spills);
    return o->strict;
}

static int compile_kernel(output *o, const te_cuda_kernel *kernel)
{
    char target[64];
    const char *options[] = {TE_CUDA_FIXED_OPTIONS, TE_CUDA_REPORT_OPTION, target};
    nvrtcProgram program = NULL;
    te_text source;
    te_text_open(&source, &te_mem_libc);
    snprintf(target, sizeof target, "--gpu-architecture=%s", o->target);
    int failed = te_cuda_kernel_source(kernel, &source) != TE_OK ||
                 nvrtcCreateProgram(&program, source.data, "kernel", 0, NULL, NULL) != NVRTC_SUCCESS ||
                 nvrtcCompileProgram(program, sizeof options / sizeof *options, options) != NVRTC_SUCCESS;
    if (failed) complain(o, "a kernel does not compile", program);
    else failed = check_registers(o, program) || write_binary(o, &source, program);
    if (program) nvrtcDestroyProgram(&program);
    te_text_close(&source);
    return failed;
}

/* The first line: a hash of all that the binaries depend on. */
static bool describe(const output *o, char line[80])
{
    static const char *const options[] = {TE_CUDA_FIXED_OPTIONS};
    int version[2] = {0, 0};
    bool good = nvrtcVersion(&version[0], &version[1]) == NVRTC_SUCCESS;
    te_hash128 hash = te_hash128_add(TE_HASH128_START, o->target, strlen(o->target));
    hash = te_hash128_add(hash, version, sizeof version);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        hash = te_hash128_add(hash, options[i], strlen(options[i]));
    for (const te_cuda_kernel *k = te_cuda_ready_list; k->file != TE_CUDA_FILE_COUNT; k++) {
        te_text source;
        te_text_open(&source, &te_mem_libc);
        good = te_cuda_kernel_source(k, &source) == TE_OK && good;
        hash = te_hash128_add(hash, source.data, source.length);
        te_text_close(&source);
    }
    snprintf(line, 80, "/* Made by the build from %016llx%016llx. */\n", (unsigned long long)hash.a,
             (unsigned long long)hash.b);
    return good;
}

static void path_of(const output *o, const char *suffix, char path[1024])
{
    snprintf(path, 1024, "%s%s", o->path, suffix);
}

/* Whether the outputs are there and of this line; then they get the time of now. */
static bool made_already(const output *o, const char *line)
{
    char table[1024], bytes[1024], found[80] = "";
    path_of(o, ".c", table);
    path_of(o, ".bin", bytes);
    FILE *in = fopen(table, "r");
    bool same = in && fgets(found, sizeof found, in) && strcmp(found, line) == 0;
    if (in) fclose(in);
    return same && utimensat(AT_FDCWD, bytes, NULL, 0) == 0 && utimensat(AT_FDCWD, table, NULL, 0) == 0;
}

static FILE *create(const output *o, const char *suffix)
{
    char path[1024];
    path_of(o, suffix, path);
    FILE *file = fopen(path, "wb");
    if (!file) fprintf(stderr, "cannot write %s\n", path);
    return file;
}

static void write_head(const output *o, const char *line)
{
    fprintf(o->table,
            "%s#include \"kernels/cuda/ready.h\"\n\n"
            "__asm__(\".section .rodata\\n.balign %d\\nte_ready_image:\\n.incbin \\\"%s.bin\\\"\\n.previous\\n\");\n"
            "extern const unsigned char te_ready_image[] __attribute__((visibility(\"hidden\")));\n"
            "extern const te_cuda_ready te_cuda_ready_%s[];\n"
            "extern const unsigned char *const te_cuda_ready_bytes_%s;\n"
            "const unsigned char *const te_cuda_ready_bytes_%s = te_ready_image;\n"
            "const te_cuda_ready te_cuda_ready_%s[] = {\n",
            line, ALIGNMENT, o->path, o->target, o->target, o->target, o->target);
}

int main(int argc, char **argv)
{
    if (argc != 3 && !(argc == 4 && strcmp(argv[3], "strict") == 0)) {
        fprintf(stderr, "usage: make_ready TARGET OUTPUT [strict]\n");
        return 2;
    }
    output o = {.target = argv[1], .path = argv[2], .strict = argc == 4};
    char line[80], table[1024];
    if (!describe(&o, line)) return complain(&o, "the sources cannot be made", NULL);
    if (made_already(&o, line)) return 0;
    o.bytes = create(&o, ".bin");
    o.table = create(&o, ".c");
    if (!o.bytes || !o.table) return 1;
    write_head(&o, line);
    int failed = 0;
    for (const te_cuda_kernel *k = te_cuda_ready_list; k->file != TE_CUDA_FILE_COUNT && !failed; k++)
        failed = compile_kernel(&o, k);
    fprintf(o.table, "    {{0, 0}, 0, 0},\n};\n");
    failed |= fclose(o.bytes) != 0;
    failed |= fclose(o.table) != 0;
    path_of(&o, ".c", table);
    if (failed) remove(table);
    return failed != 0;
}
