/* Streams and events: work is done when it is asked for, unless a collective waits for a dead peer. Matrix products and
 * collectives may take time, in which nothing happens: the device has one queue, and a wait for it lasts as long. */
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#pragma GCC visibility push(default)

cudaError_t ng_fail(cudaError_t error);
int ng_current(void);
static volatile int stalled;
void ng_stall(int on) { stalled = on; }
int ng_stalled(void) { return stalled; }
static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}
static double busy_until_ms;
static double idle_ms(void) {
    double now = now_ms();
    return busy_until_ms > now ? busy_until_ms : now;
}
void ng_work(double amount, double per_s) {
    if (per_s > 0) busy_until_ms = idle_ms() + amount / per_s * 1e3;
}
static cudaError_t wait_until(double ms) {
    for (double left; (left = ms - now_ms()) > 0;) usleep((useconds_t)(left * 1e3) + 1);
    return cudaSuccess;
}
static cudaError_t wait_for_device(void) {
    while (stalled) usleep(10000);
    return wait_until(busy_until_ms);
}
static cudaError_t ready(int yes) { return yes ? cudaSuccess : cudaErrorNotReady; }

typedef struct {
    int priority;
} stream;
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    *out = (cudaStream_t)made;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned f) { return cudaStreamCreateWithPriority(out, f, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    free(s);
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *out) {
    *out = (uintptr_t)s > 16 ? ((stream *)s)->priority : 0;  /* small numbers are the default streams */
    return cudaSuccess;
}
/* --- graphs: one capture at a time; its kernels are counted as they are recorded, and again at each launch --- */
static cudaStream_t capturing;
static ng_graph *graph;
static unsigned long long captures;
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    if (capturing) return ng_fail(cudaErrorStreamCaptureUnsupported);
    capturing = s, captures++;
    ng_capture(graph = calloc(1, NG_GRAPH));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
    if (!capturing || capturing != s) return ng_fail(cudaErrorIllegalState);
    ng_capture(0);
    capturing = 0, *out = (cudaGraph_t)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long flags) {
    *out = (cudaGraphExec_t)g; /* which outlives its graph, and is a few KiB */
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
    ng_replay((ng_graph *)g);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out) {
    *out = s && s == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    if (id) *id = captures;
    if (n) *n = 0;
    return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    *mode = cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    ng_count("poll", "cudaStreamQuery");
    return ready(!stalled && busy_until_ms <= now_ms());
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    ng_count("wait", "cudaStreamSynchronize");
    if (capturing && s == capturing) return ng_fail(cudaErrorStreamCaptureUnsupported);
    return wait_for_device();
}
cudaError_t cudaDeviceSynchronize(void) {
    ng_count("wait", "cudaDeviceSynchronize");
    return ng_context(ng_current()) ? wait_for_device() : ng_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(s, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) {
    call(data);
    return cudaSuccess;
}

typedef struct {
    double at_ms;
    unsigned flags;
    int recorded, after_stall;
} event;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    event *made = calloc(1, sizeof *made);
    made->flags = flags;
    *out = (cudaEvent_t)made;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    free(e);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    *(event *)e = (event){idle_ms(), ((event *)e)->flags, 1, stalled};
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
    ng_count("poll", "cudaEventQuery");
    return ready(!(stalled && ((event *)e)->after_stall) && ((event *)e)->at_ms <= now_ms());
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    ng_count("wait", "cudaEventSynchronize");
    return ((event *)e)->after_stall ? wait_for_device() : wait_until(((event *)e)->at_ms);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    event *a = (event *)from, *b = (event *)to;
    if (!a->recorded || !b->recorded || ((a->flags | b->flags) & cudaEventDisableTiming))
        return ng_fail(cudaErrorInvalidResourceHandle);
    *ms = (float)(b->at_ms - a->at_ms);
    return cudaSuccess;
}
