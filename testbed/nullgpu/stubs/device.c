/* What a device is, and the driver's view of it. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#pragma GCC visibility push(default)

static __thread int current;
static __thread cudaError_t last;
int ng_current(void) { return current; }
cudaError_t ng_fail(cudaError_t error) { return last = error; }

static const char *name(void) {
    static char sliced[256];
    if (!ng_get()->mig) return ng_get()->name;
    snprintf(sliced, sizeof sliced, "%s MIG %s", ng_get()->name, ng_get()->mig);
    return sliced;
}
static int attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1785000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6016;
    case cudaDevAttrMultiProcessorCount: return ng_get()->multiprocessors;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return ng_get()->major;
    case cudaDevAttrComputeCapabilityMinor: return ng_get()->minor;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrMaxPersistingL2CacheSize: return 39321600;
    case cudaDevAttrTextureAlignment: case cudaDevAttrSurfaceAlignment: return 512;
    case cudaDevAttrPciBusId: return 1 + ng_get()->card_of[current];
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrEccEnabled:
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrComputePreemptionSupported: case cudaDevAttrClusterLaunch:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
    }
}
cudaError_t cudaGetDeviceCount(int *out) {
    *out = ng_get()->devices;
    return *out ? cudaSuccess : ng_fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *out) {
    *out = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= ng_get()->devices) return ng_fail(cudaErrorInvalidDevice);
    current = device;
    return ng_context(device) ? cudaSuccess : ng_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device < 0 || device >= ng_get()->devices) return ng_fail(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .totalGlobalMem = ng_device_bytes(), .sharedMemPerBlock = 49152, .regsPerBlock = 65536, .warpSize = 32,
        .memPitch = 2147483647, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .totalConstMem = 65536, .major = ng_get()->major,
        .minor = ng_get()->minor, .textureAlignment = 512, .surfaceAlignment = 512, .texturePitchAlignment = 32,
        .multiProcessorCount = ng_get()->multiprocessors, .canMapHostMemory = 1, .concurrentKernels = 1,
        .ECCEnabled = 1, .unifiedAddressing = 1, .pciBusID = 1 + ng_get()->card_of[device], .asyncEngineCount = 3,
        .memoryBusWidth = 6016, .l2CacheSize = 62914560, .persistingL2CacheMaxSize = 39321600,
        .maxThreadsPerMultiProcessor = 2048, .streamPrioritiesSupported = 1, .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1, .sharedMemPerMultiprocessor = 233472, .regsPerMultiprocessor = 65536,
        .managedMemory = 1, .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 232448, .maxBlocksPerMultiProcessor = 32,
        .reservedSharedMemPerBlock = 1024, .hostRegisterSupported = 1, .memoryPoolsSupported = 1,
        .computePreemptionSupported = 1, .clusterLaunch = 1, .unifiedFunctionPointers = 1,
    };
    snprintf(p->name, sizeof p->name, "%s", name());
    memcpy(p->uuid.bytes, "nullgpu\0\0\0\0\0\0\0\0", 16);  /* as nvml.c writes it */
    p->uuid.bytes[15] = (char)ng_get()->card_of[device];
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
    *out = attribute(which);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device) {
    snprintf(out, room, "00000000:%02X:00.0", 1 + ng_get()->card_of[device]);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) {
    *out = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *out) {
    *out = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *out) { return cudaDriverGetVersion(out); }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
static int row(cudaError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return (int)i;
    return -1;
}
const char *cudaGetErrorName(cudaError_t code) { return row(code) < 0 ? "cudaErrorUnknown" : errors[row(code)].name; }
const char *cudaGetErrorString(cudaError_t code) { return row(code) < 0 ? "unknown error" : errors[row(code)].text; }

/* --- the driver --- */
CUresult cuInit(unsigned flags) { return ng_get()->devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *out) { return (CUresult)cudaDriverGetVersion(out); }
CUresult cuDeviceGetCount(int *out) {
    *out = ng_get()->devices;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *out, int index) {
    *out = index;
    return index < ng_get()->devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *out, int room, CUdevice device) {
    snprintf(out, room, "%s", name());
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device) {
    *out = attribute((int)which);
    return CUDA_SUCCESS;
}
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x2000 + device); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = ng_has_context(device);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    *out = context_of(device);
    return ng_context(device) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuCtxGetCurrent(CUcontext *out) {
    *out = context_of(current);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext c) { return c ? (CUresult)cudaSetDevice((int)((uintptr_t)c - 0x2000)) : CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *out) {
    *out = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *out, CUlimit which) {
    *out = 8 * MIB;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **out) {  /* those that occur have the runtime's numbers */
    *out = cudaGetErrorString((cudaError_t)code);
    return CUDA_SUCCESS;
}

static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    Dl_info self;
    dladdr((void *)unsupported, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *out = library ? dlsym(library, symbol) : 0;
    if (!*out) *out = (void *)unsupported;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
