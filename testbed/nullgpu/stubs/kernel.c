/* Kernels are counted by name, their grid is checked, and none runs. */
#include "nullgpu.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#pragma GCC visibility push(default)

cudaError_t ng_fail(cudaError_t error);
int ng_current(void);

static cudaError_t launch(const void *kernel, const char *name, dim3 grid, dim3 block) {
    ng_count_kernel(kernel, name);
    int fault = ng_called("kernel");
    if (fault != NG_NO_FAULT) return ng_fail((cudaError_t)fault);
    if (!ng_context(ng_current())) return ng_fail(cudaErrorMemoryAllocation);
    if (!ng_grow(ng_current())) return ng_fail(cudaErrorMemoryAllocation);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024)
        return ng_fail(cudaErrorInvalidConfiguration);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launch(f, 0, grid, block);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launch(f, 0, grid, block);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launch(f, 0, grid, block);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return launch(f, 0, c->gridDim, c->blockDim);
}
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;
static __thread configuration pushed[8];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s) {
    if (depth < 8) pushed[depth++] = (configuration){grid, block, shared, s};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s) {
    if (!depth) return cudaErrorMissingConfiguration;
    configuration c = pushed[--depth];
    *grid = c.grid, *block = c.block, *shared = c.shared, *(void **)s = c.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *f) {
    *out = (cudaKernel_t)f;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *f) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *name, int l, void *a, void *b, void *c, void *e, int *w) {
    ng_name_kernel(f, name);
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterVar(void **h, char *v, char *d, const char *name, int e, size_t size, int c, int g) {}
char __cudaInitModule(void **h) { return 1; }

/* CUB reads ptxVersion, and sizes its temporaries by how many blocks are said to run at once. It knows only versions
   that torch was compiled for: an sm_89 runs the kernels of sm_86. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
    static const int compiled[] = {120, 100, 90, 86, 80, 75};
    int own = 10 * ng_get()->major + ng_get()->minor, which = 0;
    while (which < 5 && compiled[which] > own) which++;
    int version = compiled[which];
    *out = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = version,
                                       .binaryVersion = version, .maxDynamicSharedSizeBytes = 232448};
    return cudaSuccess;
}
static int blocks_at_once(int threads, size_t shared) {
    int by_threads = 2048 / (threads > 0 ? threads : 1), by_shared = shared ? (int)(233472 / (shared + 1024)) : 32;
    int blocks = by_threads < by_shared ? by_threads : by_shared;
    return blocks < 1 ? 1 : blocks > 32 ? 32 : blocks;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int threads, size_t shared) {
    *out = blocks_at_once(threads, shared);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int n, size_t shared, unsigned u) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, f, n, shared);
}

/* --- the driver, as Triton and NVRTC use it: a function is its own name --- */
CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    *out = calloc(1, 64);
    return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *out, const char *path) { return cuModuleLoadData(out, 0); }
CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, CUjit_option *o, void **v) {
    return cuModuleLoadData(out, 0);
}
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *out, CUmodule m, const char *name) {
    *out = calloc(1, 256);
    snprintf((char *)*out, 256, "%s", name);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute which, CUfunction f) {
    *out = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **args, void **extra) {
    return (CUresult)launch(f, (const char *)f, (dim3){gx, gy, gz}, (dim3){bx, by, bz});
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra) {
    return (CUresult)launch(f, (const char *)f, (dim3){c->gridDimX, c->gridDimY, c->gridDimZ},
                            (dim3){c->blockDimX, c->blockDimY, c->blockDimZ});
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int threads, size_t shared) {
    *out = blocks_at_once(threads, shared);
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction f, const CUlaunchConfig *c) {
    *out = 8;
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *out, CUtensorMapDataType d, cuuint32_t r, void *p, const cuuint64_t *a,
                                const cuuint64_t *b, const cuuint32_t *c, const cuuint32_t *e, CUtensorMapInterleave i,
                                CUtensorMapSwizzle s, CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) {
    memset(out, 0, sizeof *out);
    return CUDA_SUCCESS;
}
