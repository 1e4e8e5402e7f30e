/* test_cuda_kernels_sim.c - the simulator itself: places, shared memory and barriers, warp operations, atomics,
 * parameters of all sizes, what it says of kernels that cannot go on, and processes that compile the same. */
#include "kernels/cuda_sim/cuda_sim.h"
#include "test.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char message[4096];

static const char source[] =
    "struct pair { double x; int y[3]; };\n"
    "extern \"C\" __global__ void places(unsigned *out, unsigned char small, const pair p)\n"
    "{\n"
    "    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;\n"
    "    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;\n"
    "    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread + small + p.y[2] + "
    "(int)p.x;\n"
    "}\n"
    "extern \"C\" __global__ void __launch_bounds__(96) reverse(int *data)\n"
    "{\n"
    "    TE_DYNAMIC_SHARED(int, held);\n"
    "    __shared__ int total;\n"
    "    if (threadIdx.x == 0) total = 0;\n"
    "    held[threadIdx.x] = data[threadIdx.x];\n"
    "    __syncthreads();\n"
    "    atomicAdd(&total, held[threadIdx.x]);\n"
    "    data[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];\n"
    "    __syncthreads();\n"
    "    if (threadIdx.x == 5) data[blockDim.x] = total;\n"
    "}\n"
    "extern \"C\" __global__ void lanes(unsigned *out)\n"
    "{\n"
    "    unsigned lane = threadIdx.x % 32, *mine = out + threadIdx.x * 8;\n"
    "    mine[0] = __shfl_sync(0xffffffffu, lane * 10, 7);\n"
    "    mine[1] = __shfl_xor_sync(0xffffffffu, lane, 5, 8);\n"
    "    mine[2] = __shfl_up_sync(0xffffffffu, lane, 3);\n"
    "    mine[3] = __shfl_down_sync(0xffffffffu, lane, 2, 16);\n"
    "    mine[4] = __ballot_sync(0xffffffffu, lane % 3 == 0);\n"
    "    mine[5] = __any_sync(0xffffffffu, threadIdx.x == 40) * 2 + __all_sync(0xffffffffu, lane < 32);\n"
    "    double sum = lane;\n"
    "    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);\n"
    "    mine[6] = (unsigned)sum;\n"
    "    mine[7] = lane < 8 ? __shfl_sync(0xffu, lane, 3) : 99;\n"
    "}\n"
    "extern \"C\" __global__ void early(int *out)\n"
    "{\n"
    "    if (threadIdx.x >= 40) return;\n"
    "    __syncthreads();\n"
    "    out[threadIdx.x] = 1;\n"
    "}\n"
    "extern \"C\" __global__ void behind(int *out)\n" /* a barrier is missing; by number all comes right */
    "{\n"
    "    __shared__ int held[64];\n"
    "    held[threadIdx.x] = threadIdx.x + 1;\n"
    "    if (threadIdx.x > 0) out[threadIdx.x] = held[threadIdx.x - 1];\n"
    "}\n"
    "extern \"C\" __global__ void blocks(int *out)\n" /* and here blocks that wait for others */
    "{\n"
    "    out[blockIdx.x + 1] = out[blockIdx.x] + 1;\n"
    "}\n"
    "extern \"C\" __global__ void fresh(int *out)\n" /* what another block has left must not be seen */
    "{\n"
    "    __shared__ int left;\n"
    "    out[blockIdx.x] = left;\n"
    "    left = 7;\n"
    "}\n"
    "extern \"C\" __global__ void sent(int *out)\n" /* two groups, and one that is not closed */
    "{\n"
    "    __shared__ int at[4];\n"
    "    at[3] = 5;\n"
    "    te_sim_send(at, out, true);\n"
    "    te_sim_close_group();\n"
    "    te_sim_send(at + 1, out + 1, true);\n"
    "    te_sim_send(at + 3, out + 3, false);\n"
    "    te_sim_close_group();\n"
    "    te_sim_send(at + 2, out + 2, true);\n"
    "    te_sim_await(1);\n"
    "    for (int i = 0; i < 4; i++) out[4 + i] = at[i];\n"
    "    te_sim_await(0);\n"
    "    for (int i = 0; i < 4; i++) out[8 + i] = at[i];\n"
    "}\n"
    "extern \"C\" __global__ void lost(int *out)\n"
    "{\n"
    "    if (threadIdx.x == 33) return;\n"
    "    out[0] = __shfl_sync(0xffffffffu, out[0], 0);\n"
    "}\n";

static int launch(te_cuda_sim *sim, const char *kernel, uint32_t blocks, uint32_t threads, uint32_t shared,
                  void *pointer)
{
    const uint32_t grid[3] = {blocks, 1, 1}, block[3] = {threads, 1, 1};
    void          *params[] = {&pointer};
    return te_cuda_sim_launch(sim, kernel, grid, block, shared, params, message, sizeof message);
}

static void check_places(te_cuda_sim *sim)
{
    struct {
        double x;
        int    y[3];
    } pair = {3.5, {0, 0, 40}};
    unsigned       out[24 * 24], *pointer = out;
    unsigned char  small = 200;
    void          *params[] = {&pointer, &small, &pair};
    const uint32_t grid[3] = {3, 4, 2}, block[3] = {2, 3, 4};
    CHECK_MSG(te_cuda_sim_launch(sim, "places", grid, block, 0, params, message, sizeof message) == 0, "%s", message);
    for (unsigned i = 0; i < 24 * 24; i++) CHECK(out[i] == i / 24 * 1000 + i % 24 + 243);
}

static void check_barriers(te_cuda_sim *sim)
{
    int data[97];
    for (int i = 0; i < 96; i++) data[i] = i * i;
    CHECK_MSG(launch(sim, "reverse", 1, 96, 96 * 4, data) == 0, "%s", message);
    for (int i = 0; i < 96; i++) CHECK(data[i] == (95 - i) * (95 - i));
    CHECK(data[96] == 95 * 96 * 191 / 6);
    int out[64] = {0};
    CHECK_MSG(launch(sim, "early", 1, 64, 0, out) == 0, "%s", message); /* who has returned is not waited for */
    for (int i = 0; i < 64; i++) CHECK(out[i] == (i < 40));
}

static void check_lanes(te_cuda_sim *sim)
{
    static unsigned out[64][8];
    CHECK_MSG(launch(sim, "lanes", 1, 64, 0, out) == 0, "%s", message);
    for (unsigned t = 0; t < 64; t++) {
        unsigned lane = t % 32;
        CHECK(out[t][0] == 70 && out[t][1] == (lane ^ 5) && out[t][2] == (lane < 3 ? lane : lane - 3));
        CHECK(out[t][3] == (lane % 16 < 14 ? lane + 2 : lane) && out[t][4] == 0x49249249u);
        CHECK(out[t][5] == (t < 32 ? 1u : 3u) && out[t][6] == 496 && out[t][7] == (lane < 8 ? 3u : 99u));
    }
}

static int steps(te_cuda_sim *sim)
{
    int held[64] = {0}, chain[17] = {0}, right = 0;
    CHECK_MSG(launch(sim, "behind", 1, 64, 0, held) == 0 && launch(sim, "blocks", 16, 1, 0, chain) == 0, "%s", message);
    for (int i = 1; i < 64; i++) right += held[i] == i;
    for (int i = 1; i < 17; i++) right += chain[i] == i;
    return right;
}

/* What a thread sends to shared memory, at once or when it is waited for; the last of it goes with the block. */
static void check_copies(te_cuda_sim *sim, bool late)
{
    for (int i = 0; i < 2; i++) {
        int out[12] = {6, 7, 8, 9};
        int soon[2][4] = {{6, 7, 8, 0}, {6, -1, -1, 5}}, then[2][4] = {{6, 7, 8, 0}, {6, 7, -1, 0}};
        CHECK_MSG(launch(sim, "sent", 1, 1, 0, out) == 0, "%s", message);
        for (int k = 0; k < 4; k++) CHECK(out[4 + k] == soon[late][k] && out[8 + k] == then[late][k]);
    }
}

static void check_orders(te_cuda_sim *sim)
{
    int out[3] = {0};
    check_copies(sim, false);
    CHECK(steps(sim) == 63 + 16);
    setenv("TE_SIM_STRICT", "reverse", 1);
    CHECK(steps(sim) == 1); /* the first block's */
    check_copies(sim, true);
    check_barriers(sim);
    setenv("TE_SIM_STRICT", "shuffle", 1);
    CHECK(steps(sim) < 63 + 16);
    check_barriers(sim);
    check_lanes(sim);
    unsetenv("TE_SIM_STRICT");
    CHECK_MSG(launch(sim, "fresh", 3, 1, 0, out) == 0 && out[0] == -1 && out[1] == -1 && out[2] == -1, "%d %d %d",
              out[0], out[1], out[2]);
}

static void check_failures(te_cuda_sim *sim)
{
    int out[64] = {0};
    CHECK(launch(sim, "lost", 1, 64, 0, out) == -1 && strstr(message, "lanes ffffffff") &&
          strstr(message, "33 have returned"));
    CHECK(launch(sim, "nothing", 1, 64, 0, out) == -1 && strstr(message, "no kernel nothing"));
    CHECK(launch(sim, "early", 1, 2000, 0, out) == -1 && strstr(message, "2000"));
    CHECK(launch(sim, "early", 0, 32, 0, out) == -1);
    CHECK(!te_cuda_sim_has(sim, "nothing") && te_cuda_sim_has(sim, "early"));
    CHECK(te_cuda_sim_compile("extern \"C\" __global__ void k() { int x = \"\"; }", NULL, message, sizeof message) ==
              NULL &&
          strstr(message, "kernel.cu:1:"));
    CHECK(te_cuda_sim_compile(source, "/nowhere/at/all", message, sizeof message) == NULL &&
          strstr(message, "/nowhere"));
}

/* Of several processes that want the same kernel one starts the compiler, which notes each start. */
static void check_processes(void)
{
    enum { PROCESSES = 3 };
    static const char kernel[] = "extern \"C\" __global__ void one(int *out) { *out = 1; }\n";
    const char *usual = getenv("CXX");
    char folder[] = "/tmp/tetrain-sim-XXXXXX", path[128], *kept = strdup(usual && usual[0] ? usual : "c++");
    if (!kept || !mkdtemp(folder)) abort();
    snprintf(path, sizeof path, "%s/compiler", folder);
    FILE *script = fopen(path, "w");
    if (!script) abort();
    fprintf(script, "#!/bin/sh\necho >>%s/starts\nexec %s \"$@\"\n", folder, kept);
    if (fclose(script) != 0 || chmod(path, 0700) != 0) abort();
    setenv("CXX", path, 1);
    for (int i = 0; i < PROCESSES; i++) {
        if (fork() != 0) continue;
        te_cuda_sim *sim = te_cuda_sim_compile(kernel, folder, message, sizeof message);
        _exit(sim && te_cuda_sim_has(sim, "one") ? 0 : 1);
    }
    for (int status; wait(&status) > 0;) CHECK(status == 0);
    if (usual) setenv("CXX", kept, 1);
    else unsetenv("CXX");
    free(kept);
    struct stat starts;
    snprintf(path, sizeof path, "%s/starts", folder);
    CHECK_MSG(stat(path, &starts) == 0 && starts.st_size == 1, "%lld starts", (long long)starts.st_size);
    DIR *files = opendir(folder);
    for (struct dirent *entry; files && (entry = readdir(files));) {
        snprintf(path, sizeof path, "%s/%.80s", folder, entry->d_name);
        if (entry->d_name[0] != '.') unlink(path);
    }
    if (files) closedir(files);
    rmdir(folder);
}

int main(void)
{
    check_processes();
    te_cuda_sim *sim = te_cuda_sim_compile(source, NULL, message, sizeof message);
    CHECK_MSG(sim != NULL, "%s", message);
    if (sim) {
        check_places(sim);
        check_barriers(sim);
        check_lanes(sim);
        check_orders(sim);
        check_failures(sim);
    }
    te_cuda_sim_release(sim);
    return TEST_END();
}
