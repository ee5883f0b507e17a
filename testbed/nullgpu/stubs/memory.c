/* Device memory is address space of this process that is never touched unless something is written to it. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#pragma GCC visibility push(default)
#define PAGE 4096ul
#define GRANULE (2 * MIB)

enum kind { DEVICE, PINNED, RESERVED };
typedef struct {
    char *base;
    size_t size;
    int device;
    enum kind kind;
} range;
static range *ranges;
static int count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int ng_current(void);
cudaError_t ng_fail(cudaError_t error);

static void remember(void *base, size_t size, int device, enum kind kind) {
    pthread_mutex_lock(&lock);
    if (count == room) ranges = realloc(ranges, (room = room ? 2 * room : 256) * sizeof *ranges);
    ranges[count++] = (range){base, size, device, kind};
    pthread_mutex_unlock(&lock);
}
static int find(const void *at, range *out) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = count - 1; i >= 0 && !found; i--)
        if ((found = (char *)at >= ranges[i].base && (char *)at < ranges[i].base + ranges[i].size)) *out = ranges[i];
    pthread_mutex_unlock(&lock);
    return found;
}
static int forget(const void *base, range *out) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count && !found; i++)
        if ((found = ranges[i].base == base)) *out = ranges[i], ranges[i] = ranges[--count];
    pthread_mutex_unlock(&lock);
    return found;
}
static int on_device(const void *at) {
    range r;
    return find(at, &r) && r.kind != PINNED;
}

static void *map(size_t size) {  /* without huge pages, of which one written byte would take 2 MiB */
    void *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    madvise(at, size, MADV_NOHUGEPAGE);
    madvise(at, size, MADV_DONTDUMP);
    return at;
}
static void zero(char *at, size_t bytes) {  /* whole pages are given back */
    char *from = (char *)(((uintptr_t)at + PAGE - 1) & ~(PAGE - 1)), *to = (char *)(((uintptr_t)at + bytes) & ~(PAGE - 1));
    if (to <= from) {
        memset(at, 0, bytes);
        return;
    }
    memset(at, 0, from - at);
    madvise(from, to - from, MADV_DONTNEED);
    memset(to, 0, at + bytes - to);
}
void ng_copy(void *to, const void *from, size_t bytes) {
    if (!bytes || to == from) return;
    if (bytes < 16 * PAGE || !on_device(from) || !on_device(to)) {
        memmove(to, from, bytes);
        return;
    }
    static __thread unsigned char present[PAGE];
    for (const char *s = from, *end = s + bytes; s < end;) {
        char *page = (char *)((uintptr_t)s & ~(PAGE - 1));
        size_t pages = (end - page + PAGE - 1) / PAGE;
        if (pages > sizeof present) pages = sizeof present;
        if (mincore(page, pages * PAGE, present)) memset(present, 1, pages);
        for (size_t i = 0, j; i < pages && s < end; i = j) {
            for (j = i + 1; j < pages && (present[j] & 1) == (present[i] & 1); j++) {}
            const char *until = page + j * PAGE < end ? page + j * PAGE : end;
            char *d = (char *)to + (s - (const char *)from);
            if (present[i] & 1) memmove(d, s, until - s); else zero(d, until - s);
            s = until;
        }
    }
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    *out = 0;
    if (!bytes) return cudaSuccess;
    size_t step = bytes >= MIB ? GRANULE : 512;
    bytes = (bytes + step - 1) / step * step;
    if (!ng_take(ng_current(), bytes)) return ng_fail(cudaErrorMemoryAllocation);
    if (!(*out = map(bytes))) {
        fprintf(stderr, "nullgpu: no address space for %zu bytes\n", bytes);
        ng_give(ng_current(), bytes);
        return ng_fail(cudaErrorMemoryAllocation);
    }
    remember(*out, bytes, ng_current(), DEVICE);
    return cudaSuccess;
}
cudaError_t cudaFree(void *at) {
    range r;
    ng_count("wait", "cudaFree");
    if (!at) return ng_context(ng_current()) ? cudaSuccess : ng_fail(cudaErrorMemoryAllocation);
    if (!forget(at, &r)) return ng_fail(cudaErrorInvalidValue);
    munmap(r.base, r.size);
    ng_give(r.device, r.size);
    return cudaSuccess;
}
CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes) {
    if (!cudaMalloc((void **)out, bytes)) return CUDA_SUCCESS;
    cudaGetLastError();  /* which the driver does not set */
    return CUDA_ERROR_OUT_OF_MEMORY;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    if (!ng_context(ng_current())) return ng_fail(cudaErrorMemoryAllocation);
    size_t used = ng_used(ng_get()->card_of[ng_current()]);
    *total = ng_device_bytes();
    *free_bytes = used < *total ? *total - used : 0;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    bytes = (bytes + PAGE) / PAGE * PAGE;
    if (!(*out = map(bytes))) return ng_fail(cudaErrorMemoryAllocation);
    remember(*out, bytes, ng_current(), PINNED);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *at) {
    range r;
    if (at && forget(at, &r)) munmap(r.base, r.size);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
    remember(at, bytes, ng_current(), PINNED);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *at) {
    range r;
    return forget(at, &r) ? cudaSuccess : ng_fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at) {
    range r;
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2, .hostPointer = (void *)at};
    if (!find(at, &r)) return cudaSuccess;
    out->device = r.device;
    out->devicePointer = (void *)at;
    out->type = r.kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    if (r.kind != PINNED) out->hostPointer = 0;
    return cudaSuccess;
}

static void count_copy(const void *to, const void *from) {  /* the host waits for a copy of pageable memory */
    range a, b;
    int into = on_device(to), out_of = on_device(from);
    if (into && out_of) ng_count("copy", "on the device");
    else if (into && find(from, &b)) ng_count("copy", "to the device");
    else if (into) ng_count("wait", "pageable copy to the device");
    else if (out_of && find(to, &a)) ng_count("copy", "to the host");
    else if (out_of) ng_count("wait", "pageable copy to the host");
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    count_copy(to, from);
    ng_copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    ng_count("wait", "cudaMemcpy");
    ng_copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream) {
    ng_copy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    count_copy(to, from);
    for (size_t i = 0; i < height; i++) ng_copy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    ng_count("copy", "memset");
    if (value & 255) memset(at, value, bytes); else zero(at, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, 0); }
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    *out = (void *)symbol;
    return cudaSuccess;
}

/* --- the driver's virtual memory, of which expandable segments are made --- */
typedef struct {
    size_t size;
    int device;
} physical;
CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    *out = GRANULE;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags) {
    char *raw = map(size + GRANULE);
    if (!raw) return CUDA_ERROR_OUT_OF_MEMORY;
    char *base = (char *)(((uintptr_t)raw + GRANULE - 1) & ~(GRANULE - 1));
    if (base > raw) munmap(raw, base - raw);
    munmap(base + size, raw + GRANULE - base);
    remember(base, size, ng_current(), RESERVED);
    *out = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    range r;
    return forget((void *)at, &r) && !munmap(r.base, r.size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *p, unsigned long long f) {
    int device = p->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? p->location.id : ng_current();
    if (!ng_take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    physical *memory = malloc(sizeof *memory);
    *memory = (physical){size, device};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    physical *memory = (physical *)(uintptr_t)handle;
    ng_give(memory->device, memory->size);
    free(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long f) {
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    madvise((void *)at, size, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *d, size_t n) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr at) {
    range r;
    if (!find((void *)at, &r)) return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out = r.device;
    else if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = r.kind == PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = at;
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *which, void **out, CUdeviceptr at) {
    for (unsigned i = 0; i < n; i++)
        if (cuPointerGetAttribute(out[i], which[i], at)) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
