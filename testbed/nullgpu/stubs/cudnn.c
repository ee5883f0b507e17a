/* cuDNN's graph API: every descriptor is accepted, and the heuristics know one engine that needs no workspace. */
#include "nullgpu.h"
#include <stdlib.h>
#pragma GCC visibility push(default)

size_t cudnnGetVersion(void) { return NG_CUDNN_VERSION; }  /* what torch was compiled with: it compares them */
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *out) {
    *out = which == 0 ? NG_CUDNN_VERSION / 10000 : which == 1 ? NG_CUDNN_VERSION / 100 % 100 : NG_CUDNN_VERSION % 100;
    return 0;
}
const char *cudnnGetErrorString(int code) {
    switch (code) {
    case 0: return "CUDNN_STATUS_SUCCESS";
    case 1001: return "CUDNN_STATUS_NOT_INITIALIZED";
    case 3000: return "CUDNN_STATUS_NOT_SUPPORTED";
    case 4000: return "CUDNN_STATUS_INTERNAL_ERROR";
    case 4004: return "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED";
    case 5000: return "CUDNN_STATUS_EXECUTION_FAILED";
    default: return "CUDNN_STATUS_UNKNOWN";
    }
}
void cudnnGetLastErrorString(char *out, size_t room) {
    if (room) *out = 0;
}
int cudnnCreate(void **out) {
    *out = calloc(1, 64);
    return 0;
}
int cudnnDestroy(void *h) {
    free(h);
    return 0;
}
int cudnnSetStream(void **h, void *stream) {
    *h = stream;
    return 0;
}
int cudnnGetStream(void **h, void **out) {
    *out = *h;
    return 0;
}

enum { INT64 = 3, NUMERICAL_NOTE = 11, BEHAVIOR_NOTE = 19, INT32 = 23, CHAR = 24 };  /* cudnnBackendAttributeType_t */
int cudnnBackendCreateDescriptor(int type, void **out) {
    *out = calloc(1, 256);
    return 0;
}
int cudnnBackendDestroyDescriptor(void *d) {
    free(d);
    return 0;
}
int cudnnBackendGetAttribute(void *d, int name, int type, int64_t room, int64_t *n, void *out) {
    int none = type == NUMERICAL_NOTE || type == BEHAVIOR_NOTE || type == CHAR;
    if (n) *n = !none;
    if (!out || room <= 0) return 0;
    if (type == INT64) *(int64_t *)out = 0;
    if (type == INT32) *(int *)out = 0;
    if (type == CHAR) *(char *)out = 0;
    return 0;
}
