/* cuBLAS, NVRTC and CUPTI: what must give back more than success. Compiled into each of them. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>
#pragma GCC visibility push(default)

#ifdef NG_CUBLAS
typedef struct {
    void *stream;
    int math, pointer;
} handle;
int cublasCreate_v2(void **out) {
    *out = calloc(1, sizeof(handle));
    return 0;
}
int cublasDestroy_v2(void *h) {
    free(h);
    return 0;
}
int cublasSetStream_v2(handle *h, void *stream) {
    h->stream = stream;
    return 0;
}
int cublasGetStream_v2(handle *h, void **out) {
    *out = h->stream;
    return 0;
}
/* Trailing arguments are left out: callers take them back themselves. Batches count once. */
static int multiply(double m, double n, double k) {
    ng_work(2 * m * n * k, ng_get()->flops_per_s);
    return 0;
}
int cublasSgemm_v2(handle *h, int a, int b, int m, int n, int k) { return multiply(m, n, k); }
int cublasGemmEx(handle *h, int a, int b, int m, int n, int k) { return multiply(m, n, k); }
int cublasSgemmStridedBatched(handle *h, int a, int b, int m, int n, int k) { return multiply(m, n, k); }
int cublasGemmStridedBatchedEx(handle *h, int a, int b, int m, int n, int k) { return multiply(m, n, k); }
int cublasSetMathMode(handle *h, int mode) {
    h->math = mode;
    return 0;
}
int cublasGetMathMode(handle *h, int *out) {
    *out = h->math;
    return 0;
}
int cublasSetPointerMode_v2(handle *h, int mode) {
    h->pointer = mode;
    return 0;
}
int cublasGetPointerMode_v2(handle *h, int *out) {
    *out = h->pointer;
    return 0;
}
#endif

#ifdef NG_CUBLASLT
typedef struct {  /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} result;
int cublasLtCreate(void **out) {
    *out = calloc(1, 64);
    return 0;
}
size_t cublasLtGetVersion(void) { return 130200; }
int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return cublasLtCreate(out); }
typedef struct {
    double rows, columns;
} layout;
int cublasLtMatrixLayoutCreate(layout **out, int type, uint64_t rows, uint64_t columns, int64_t l) {
    *out = malloc(sizeof **out);
    **out = (layout){rows, columns};
    return 0;
}
int cublasLtMatmul(void *h, void *o, void *alpha, void *a, layout *left, void *b, layout *right, void *beta, void *c,
                   layout *product) {
    double inner = left->rows * left->columns / product->rows; /* also of a transposed one */
    ng_work(2 * product->rows * product->columns * inner, ng_get()->flops_per_s);
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **out) { return cublasLtCreate(out); }
int cublasLtMatmulDescDestroy(void *d) {
    free(d);
    return 0;
}
int cublasLtMatrixLayoutDestroy(void *d) { return cublasLtMatmulDescDestroy(d); }
int cublasLtMatmulPreferenceDestroy(void *d) { return cublasLtMatmulDescDestroy(d); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int room, result *out, int *n) {
    if (room > 0) memset(out, 0, sizeof *out);  /* one that needs no workspace: torch refuses to go on without any */
    *n = room > 0;
    return 0;
}
#endif

#ifdef NG_NVRTC
int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return 0;
}
#endif

#ifdef NG_CUPTI
int cuptiGetVersion(uint32_t *out) {
    *out = 130000;
    return 0;
}
int cuptiSubscribe(void **out, void *call, void *data) {
    *out = (void *)1;
    return 0;
}
int cuptiActivityGetNextRecord(void *buffer, size_t size, void **out) {
    *out = 0;
    return 12;  /* no more */
}
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *out) {
    *out = 0;
    return 0;
}
int cuptiGetResultString(int code, const char **out) {
    *out = "null GPU";
    return 0;
}
#endif
