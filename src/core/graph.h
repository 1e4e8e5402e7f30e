/* graph.h - a device's work recorded once and launched again as a whole.
 *
 * Between te_graph_begin and te_graph_end operations run as ever, but their kernels are recorded instead of run. A
 * launch makes them again on the same memory: the graph has a pool of its own for what was allocated meanwhile, and
 * keeps every other storage that a kernel was given. Random numbers go on with each launch where the context's stand.
 * What the host would have to read in between (te_tensor_read) or bring along (te_tensor_write) fails and names itself;
 * a number that is to change from launch to launch lies in a tensor that te_tensor_send fills.
 */
#ifndef TE_CORE_GRAPH_H
#define TE_CORE_GRAPH_H

#include "quantized.h"

typedef struct te_graph te_graph;

/* TE_ERROR_UNSUPPORTED where the device has no graphs (the CPU), or while another graph is recorded. */
te_status te_graph_begin(te_context *ctx, te_device *device, te_graph **out);
/* Just behind te_graph_begin: every launch will follow one of `before`, a backward its forward. Random numbers go on
 * from there, and those that are drawn again, as te.checkpoint does, are what that launch drew. */
void te_graph_follow(te_graph *graph, const te_graph *before);
/* Ends the recording. Not kept, or on failure, the graph is gone. */
te_status te_graph_end(te_graph *graph, bool keep);
te_status te_graph_launch(te_graph *graph);
void      te_graph_release(te_graph *graph);

/* A float64 tensor {rows, columns} that te_tensor_send may fill before a launch, also while a graph is recorded: no
 * kernel of the graph has its memory before. */
te_tensor *te_graph_numbers(te_context *ctx, te_device *device, int64_t rows, int64_t columns);
/* t = values, float64 and contiguous, before all later work of the device; nothing is waited for. */
te_status te_tensor_send(te_tensor *t, const double *values, int64_t n);

/* t's numbers, float64 and contiguous, as all work so far leaves them: te_fetch_end gives them, and waits only where
 * they have not arrived yet. At most TE_FETCH_MAX. values NULL: nobody wants them. The end frees the fetch, also when
 * it fails. */
enum { TE_FETCH_MAX = 512 };
typedef struct te_fetch te_fetch;
te_status te_tensor_fetch(te_tensor *t, te_fetch **out);
int       te_fetch_count(const te_fetch *fetch);
te_status te_fetch_end(te_fetch *fetch, double *values);

/* What tells recordings apart; 0 for NULL. */
uint64_t te_graph_id(const te_graph *graph);

/* While recording. A kernel was given t; random numbers were drawn; something happened that cannot be launched
 * again. */
void   te_graph_keep(te_graph *graph, const te_tensor *t);
/* A storage came to be, and is gone. Of those in the graph's own memory every launch counts as a write, so that nobody
 * takes what was made of their former contents for what they hold. */
void   te_graph_made(te_graph *graph, te_storage *storage);
void   te_graph_unmade(te_storage *storage);
/* Likewise t's copy in the compute dtype, storage->shadow: a launch brings it up to date where t was changed. */
void   te_graph_keep_shadow(te_graph *graph, const te_tensor *t);
te_rng te_graph_draw(te_graph *graph, te_rng rng);
/* Where a kernel that quantizes t finds whether t changed since the last launch (te_quantize_job.stale); NULL: nowhere,
 * it makes the copies in every launch. te_graph_keep_copies then has them stay where they are. */
const float *te_graph_stale(te_graph *graph, const te_tensor *t);
void   te_graph_keep_copies(te_graph *graph, const te_quantized *copies, te_tensor *words);
void   te_graph_spoil(te_graph *graph, const char *what);

#endif
