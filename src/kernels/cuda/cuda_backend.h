/* cuda_backend.h - what the files of the CUDA backend share.
 *
 * Everything of a device runs on one stream of its primary context, in order. A call that fails while it is made is an
 * error at once; what fails later on the device comes out at the next synchronization, with the names of the operations
 * that were on their way.
 */
#ifndef TE_KERNELS_CUDA_BACKEND_H
#define TE_KERNELS_CUDA_BACKEND_H

#include "disk_cache.h"
#include "libraries.h"
#include "kernels/hand.h"
#include "program_source.h"

enum { TE_CUDA_RECENT = 8, TE_CUDA_NAME = 32, TE_CUDA_STAGES = 2, TE_CUDA_STAGE_BYTES = 4 << 20 };
enum { TE_CUDA_SMALL_STAGES = 32, TE_CUDA_SMALL_BYTES = TE_CUDA_STAGE_BYTES / TE_CUDA_SMALL_STAGES };
enum { TE_CUDA_READING_BYTES = 4096 };

/* Compiled source: kept by the device until it closes. */
typedef struct te_cuda_code te_cuda_code;

typedef struct te_cuda_reading te_cuda_reading; /* reading.c */

/* The program of a copy, with its arrays. */
typedef struct te_cuda_copier {
    te_program               program;
    te_insn                  load;
    struct te_program_output output;
    uint8_t                  rate;
} te_cuda_copier;

typedef struct te_cuda_device {
    te_cuda_driver driver;
    te_cuda_nvrtc  nvrtc;
    CUdevice       handle;
    CUcontext      context;
    CUstream       stream;
    int            index, multiprocessors, capability; /* 90 for sm_90 */
    int            shared_most; /* bytes of shared memory that a block may ask for */
    char           title[96];  /* "NVIDIA H200" */
    char           target[24]; /* NVRTC's: sm_90a; compute_90 where the card is newer than NVRTC */
    int            nvrtc_version;  /* 1300 for 13.0 */
    int            driver_version; /* 13000 for a driver for CUDA 13.0 */
    bool           trace_dispatch;

    void   *stage[TE_CUDA_STAGES]; /* pinned memory that copies from and to the host pass through */
    CUevent staged[TE_CUDA_STAGES];
    void   *small; /* likewise, in pieces for copies of few bytes */
    CUevent small_staged[TE_CUDA_SMALL_STAGES];
    int     next_stage, next_small;

    te_cuda_reading *readings; /* all of them, in use or not */

    te_map        codes; /* te_cuda_code, by hash of the source */
    te_disk_cache cache;

    char     recent[TE_CUDA_RECENT][TE_CUDA_NAME]; /* operations since the last synchronization, the newest n_recent */
    uint64_t n_recent;

    te_cuda_copier      *copier; /* copy.c */
    struct te_cuda_hand *hand; /* kernel_ops.c */
    struct te_cuda_reports *reports; /* reports.c, from the first operation on that checks its operands */
    struct te_cuda_blas *blas; /* gemm.c, from the first matrix product on */
    uint64_t args[TE_CUDA_ARGS / 8]; /* of the kernel being launched */
    struct te_cuda_graph *capture; /* graph.c: being recorded, NULL: none */
    struct te_cuda_graph *graphs;  /* all of them */
    struct te_cuda_collectives *collectives; /* collectives.c, from the first group of processes on */
    struct te_cuda_dnn  *dnn;  /* attention_dnn.c, likewise from the first attention on */
} te_cuda_device;

static inline te_cuda_device *te_cuda(te_exec *exec) { return (te_cuda_device *)exec->device; }

/* device.c */
te_status te_cuda_device_open(te_exec *exec, int index);
void      te_cuda_device_close(te_exec *exec);
int       te_cuda_device_count(te_exec *exec);
void      te_cuda_describe(te_exec *exec, char *text, size_t size);
te_status te_cuda_synchronize(te_exec *exec);
/* Makes the device's context the thread's: first thing in every function of the table. */
te_status te_cuda_enter(te_exec *exec);
/* The thread's context where its host has made another one current, and making that current again; NULL: it has not. */
CUcontext te_cuda_host_context(te_exec *exec);
void      te_cuda_leave(te_exec *exec, CUcontext host);
/* The status of a driver call that was to do `what`. */
te_status te_cuda_result(te_exec *exec, CUresult result, const char *what);
/* The status of a call that waits for the device. */
te_status te_cuda_waited(te_exec *exec, CUresult result);
/* Notes that work of an operation is on its way. */
void te_cuda_note(te_exec *exec, const char *operation);
/* Reports on standard error under TE_TRACE=dispatch. */
void te_cuda_trace(te_exec *exec, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* timing.c: milliseconds of some work on the device, the mean of a few runs after one that is not counted; the status
 * of the first run that fails, else of the measurement. */
typedef te_status te_cuda_work(te_exec *exec, void *work);
te_status te_cuda_time(te_exec *exec, te_cuda_work *run, void *work, float *ms);
/* *best: which of n ways of doing the same, by number from 0, is the fastest. TE_ERROR_UNSUPPORTED: all of them are;
 * another status: it could not be measured. The first one is taken unless another is faster by more than measurements
 * vary. */
typedef te_status te_cuda_way(te_exec *exec, void *work, int number);
te_status te_cuda_fastest(te_exec *exec, te_cuda_way *run, void *work, int n, int *best);

/* memory.c */
te_status te_cuda_stages_open(te_exec *exec);
void      te_cuda_stages_close(te_exec *exec);
void     *te_cuda_memory_alloc(te_exec *exec, size_t bytes);
void      te_cuda_memory_free(te_exec *exec, void *ptr, size_t bytes);
te_status te_cuda_memory_copy(te_exec *exec, void *dst, const void *src, size_t bytes, te_copy_kind kind);
/* Host bytes into device memory lent for a kernel; NULL with the message set. Given back with exec->scratch_free. A
 * graph brings the same bytes every time. */
void *te_cuda_upload(te_exec *exec, const void *host, size_t bytes);

/* collectives.c. Waits for the event, or for all of the stream where it is NULL; with a group of processes connected
 * until one of them fails or the wait is interrupted. */
struct te_device_peers;
#ifdef TE_HAVE_NCCL
extern const struct te_collectives te_cuda_collectives_table;
te_status te_cuda_await(te_exec *exec, CUevent event);
void      te_cuda_collectives_close(te_exec *exec);
struct te_device_peers *te_cuda_peers_retain(struct te_device_peers *peers);
void      te_cuda_peers_release(te_exec *exec, struct te_device_peers *peers);
/* An error that names `what` where the connection has failed. */
te_status te_cuda_peers_check(te_exec *exec, const struct te_device_peers *peers, const char *what);
/* Ends connections that failed while a graph was being recorded, now that it is not any more. */
void      te_cuda_peers_reap(te_exec *exec);
#else
static inline te_status te_cuda_await(te_exec *exec, CUevent event)
{
    te_cuda_device *d = te_cuda(exec);
    return te_cuda_waited(exec, event ? d->driver.cuEventSynchronize(event) : d->driver.cuStreamSynchronize(d->stream));
}
#define te_cuda_collectives_close(exec)     ((void)(exec))
#define te_cuda_peers_retain(peers)         (peers)
#define te_cuda_peers_release(exec, peers)  ((void)(exec), (void)(peers))
#define te_cuda_peers_check(exec, peers, what) ((void)(exec), (void)(peers), (void)(what), TE_OK)
#define te_cuda_peers_reap(exec)            ((void)(exec))
#endif

/* reading.c */
te_status te_cuda_read_begin(te_exec *exec, const void *src, size_t bytes, void **reading);
te_status te_cuda_read_end(te_exec *exec, void *reading, void *dst);
void      te_cuda_readings_close(te_exec *exec);

/* compile.c: the code of a source text, from memory, from disk or fresh from NVRTC. */
te_status te_cuda_compile(te_exec *exec, const char *name, const char *source, size_t length, te_cuda_code **out);
void      te_cuda_codes_close(te_exec *exec);
/* Starts a kernel of the code; `operation` is what messages call it. */
te_status te_cuda_launch_code(te_exec *exec, te_cuda_code *code, const te_cuda_launch *launch, const char *operation);

/* reports.c. A word on the device for what an operation finds wrong, lent until the host next waits: _fetch comes
 * before that, _read after it. */
te_status te_cuda_report(te_exec *exec, const te_cuda_check *check, uint64_t **word);
te_status te_cuda_reports_fetch(te_exec *exec);
te_status te_cuda_reports_read(te_exec *exec);
void      te_cuda_reports_close(te_exec *exec);

/* graph.c. TE_OK unless a graph is being recorded; then `what`, which the host would have to take part in, fails. */
te_status te_cuda_outside_graph(te_exec *exec, const char *what);
/* While one is recorded: host memory that stays as it is until the graph goes; NULL with the message set. */
void     *te_cuda_graph_keep(te_exec *exec, size_t bytes);
/* Likewise: that the connection that a collective of the graph goes through lasts as long. */
te_status te_cuda_graph_keep_peers(te_exec *exec, struct te_device_peers *peers);
/* Likewise: a word on the device for the report of an operation, read after the graph has run; NULL
 * with the message set. */
uint64_t *te_cuda_graph_report(te_exec *exec, const te_cuda_check *check);
/* What graphs that have finished reported; all that was launched has to be waited for first. And whether there is
 * something, which may be asked at any time; false while a graph is recorded. */
te_status te_cuda_graph_reports(te_exec *exec);
bool      te_cuda_graph_reported(te_exec *exec);
te_status te_cuda_capture_begin(te_exec *);
te_status te_cuda_capture_end(te_exec *, bool keep, void **graph);
te_status te_cuda_graph_launch(te_exec *, void *graph);
void      te_cuda_graph_free(te_exec *, void *graph);
void      te_cuda_graphs_close(te_exec *);
/* Destroys what the driver has of the graphs that go through the connection: they cannot be launched any more. */
void      te_cuda_graphs_drop(te_exec *, const struct te_device_peers *peers);

/* Entries of the table, by file. */
#define TE_KERNEL_OPTIONAL(name, parameters, arguments, moved)
#define TE_KERNEL(name, parameters, arguments, moved) te_status te_cuda_##name parameters;
#include "../kernel_list.h"
void      te_cuda_gemm_close(te_exec *);
void      te_cuda_forget(te_exec *, const void *data, size_t bytes);                    /* gemm_kept.c */
void      te_cuda_forget_all(te_exec *);
/* gemm_narrow.c: why this device does not multiply the bytes of quantized operands as they are; NULL: it does.
 * Addresses are not looked at where they are NULL. */
const char *te_cuda_decline_narrow(te_exec *, const te_gemm *);
void      te_cuda_copier_close(te_exec *);
void      te_cuda_hand_close(te_exec *);
/* kernel_ops.c and those below */
te_status te_cuda_pack(te_exec *, int32_t *offsets, const te_view *lens, int64_t tokens);
/* What cuDNN reads of packed sequences (te_packed_args); device pointers. */
struct te_packed_args;
te_status te_cuda_ragged(te_exec *, const struct te_packed_args *);
/* Rows whose bias hides all keys: out becomes 0 and lse minus infinity, whatever cuDNN has made of them. And lse for
 * its gradients, dense, with a large number in their place and that of rows hidden by finite numbers. */
te_status te_cuda_attention_unseen(te_exec *, const te_attention *);
te_status te_cuda_attention_raised(te_exec *, const te_view *lse, float *raised);
/* attention_dnn.c: whether cuDNN has taken it (grad NULL: forward), with the status of that;
 * own kernels do the rest. */
#ifdef TE_HAVE_CUDNN
bool te_cuda_attention_dnn(te_exec *, const te_attention *, const te_attention_grad *grad, te_status *);
/* Why cuDNN is not there; NULL: it is, in that version. */
const char *te_cuda_dnn_missing(te_exec *, size_t *version);
void te_cuda_dnn_close(te_exec *);
#else
#define te_cuda_attention_dnn(exec, attention, grad, status) ((void)(exec), (void)(grad), (void)(status), false)
#define te_cuda_dnn_missing(exec, version)                    ((void)(exec), *(version) = 0, "built without cudnn.h")
#define te_cuda_dnn_close(exec)                              ((void)(exec))
#endif
/* A copy that walks src backwards somewhere. */
te_status te_cuda_turn(te_exec *, const te_view *dst, const te_view *src);
te_status te_cuda_triangle(te_exec *, const te_view *dst, const te_view *src, int64_t diagonal, bool upper);
te_status te_cuda_delayed_update(te_exec *, const te_delayed *tensors, int64_t n, uint64_t *skipped);
te_status te_cuda_check_classes(te_exec *, const te_view *targets, int64_t classes, double ignored);
te_status te_cuda_integers(te_exec *, void *values, te_dtype dtype, int64_t n, const te_integers *drawn);

static inline CUdeviceptr te_cuda_address(const void *ptr) { return (CUdeviceptr)(uintptr_t)ptr; }

#endif
