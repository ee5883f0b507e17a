/* NVML: every function that nvidia-ml-py, torch and the project ask for. It lists cards, whatever CUDA may see.
 *
 * torch asserts that some functions exist when it first runs out of memory: those that say "not supported" must stay. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#pragma GCC visibility push(default)
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT = 7 };
#define POWER_MW 250000

typedef void *device; /* 0x3000 + card, or 0x4000 + card for its first MIG slice */
static int is_slice(device d) { return (uintptr_t)d >= 0x4000; }
static int card_of(device d) { return (int)((uintptr_t)d & 0xff); }
static device handle_of(int card) { return (device)(uintptr_t)(0x3000 + card); }

int nvmlInit_v2(void) {
    return OK;
}
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    static const char *const texts[] = {"Success", "Uninitialized", "Invalid Argument", "Not Supported",
                                        "Insufficient Permissions", "Already Initialized", "Not Found", "Insufficient Size"};
    return code >= 0 && code < 8 ? texts[code] : code == 9 ? "Driver Not Loaded" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *out, unsigned room) {
    snprintf(out, room, "%s", ng_get()->driver);
    return OK;
}
int nvmlSystemGetNVMLVersion(char *out, unsigned room) { return nvmlSystemGetDriverVersion(out, room); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    *out = 13000;
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = ng_get()->cards;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    *out = handle_of(index);
    return (int)index < ng_get()->cards ? OK : INVALID;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, device *out) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device *out) {
    return nvmlDeviceGetHandleByIndex_v2(strtoul(uuid + strlen(uuid) - 2, 0, 16), out);
}
int nvmlDeviceGetIndex(device d, unsigned *out) {
    *out = card_of(d);
    return OK;
}
int nvmlDeviceGetMinorNumber(device d, unsigned *out) { return nvmlDeviceGetIndex(d, out); }
int nvmlDeviceGetName(device d, char *out, unsigned room) {
    snprintf(out, room, is_slice(d) ? "%s MIG %s" : "%s", ng_get()->name, ng_get()->mig);
    return OK;
}
int nvmlDeviceGetUUID(device d, char *out, unsigned room) {
    snprintf(out, room, "%s-6e756c6c-6770-7500-0000-0000000000%02x", is_slice(d) ? "MIG" : "GPU", card_of(d));
    return OK;
}
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci;
int nvmlDeviceGetPciInfo_v3(device d, pci *out) {
    *out = (pci){.bus = 1 + card_of(d), .id = 0x232110de};
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(device d, int *major, int *minor) {
    *major = ng_get()->major, *minor = ng_get()->minor;
    return OK;
}
int nvmlDeviceGetComputeMode(device d, int *out) {
    *out = 0;
    return OK;
}

/* The first interface counts the driver's reserve as used. */
static size_t total_of(device d) { return is_slice(d) ? ng_get()->mig_memory : ng_get()->memory + ng_get()->reserved; }
static size_t reserved_of(device d) { return is_slice(d) ? 0 : ng_get()->reserved; }
typedef struct {
    uint64_t total, free, used;
} memory;
int nvmlDeviceGetMemoryInfo(device d, memory *out) {
    out->total = total_of(d);
    out->used = ng_used(card_of(d)) + reserved_of(d);
    out->free = out->total - out->used;
    return OK;
}
typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} memory_v2;
int nvmlDeviceGetMemoryInfo_v2(device d, memory_v2 *out) {
    out->total = total_of(d), out->reserved = reserved_of(d), out->used = ng_used(card_of(d));
    out->free = out->total - out->used - out->reserved;
    return OK;
}
typedef struct {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
} process;
typedef struct {  /* of the function without a version */
    unsigned pid;
    uint64_t used;
} old_process;
static unsigned list(int card, process *out, unsigned room) {
    ng_process all[64];
    unsigned found = 0, count = ng_processes(all, 64);
    for (unsigned i = 0; i < count; i++) {
        if (!all[i].used[card]) continue;
        if (found < room) out[found] = (process){all[i].pid, all[i].used[card], ~0u, ~0u};
        found++;
    }
    return found;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *out) {
    unsigned room = out ? *n : 0;
    *n = list(card_of(d), out, room);
    return *n > room ? INSUFFICIENT : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v2(device d, unsigned *n, process *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(d, n, out);
}
int nvmlDeviceGetComputeRunningProcesses(device d, unsigned *n, old_process *out) {
    process all[64];
    unsigned room = out ? *n : 0;
    *n = list(card_of(d), all, 64);
    for (unsigned i = 0; i < *n && i < room; i++) out[i] = (old_process){all[i].pid, all[i].used};
    return *n > room ? INSUFFICIENT : OK;
}

int nvmlDeviceGetUtilizationRates(device d, unsigned out[2]) {
    out[0] = 100, out[1] = 50;
    return OK;
}
int nvmlDeviceGetPowerUsage(device d, unsigned *out) {
    *out = POWER_MW;
    return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long *out) {  /* mJ */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *out = (unsigned long long)(POWER_MW * (t.tv_sec + t.tv_nsec * 1e-9));
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *out) {
    *out = 400000;
    return OK;
}
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *out) {
    *out = 45;
    return OK;
}
typedef struct {
    unsigned version;
    int sensor, degrees;
} temperature;
int nvmlDeviceGetTemperatureV(device d, temperature *out) {
    out->degrees = 45;
    return OK;
}
int nvmlDeviceGetClockInfo(device d, int type, unsigned *out) {
    *out = 1785;
    return OK;
}
int nvmlDeviceGetMaxClockInfo(device d, int type, unsigned *out) {
    *out = 1980;
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(device d, uint64_t *out) {
    *out = ng_thermal() ? 0x40 : 0;  /* hardware thermal slowdown */
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, uint64_t *out) { return nvmlDeviceGetCurrentClocksEventReasons(d, out); }

/* --- slices --- */
int nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *pending) {
    *now = *pending = ng_get()->mig != 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *out) {
    *out = ng_get()->mig ? 7 : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned index, device *out) {
    *out = (device)(uintptr_t)(0x4000 + card_of(d));
    return ng_get()->mig && index == 0 ? OK : NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device d, device *out) {
    *out = handle_of(card_of(d));
    return OK;
}
int nvmlDeviceIsMigDeviceHandle(device d, unsigned *out) {
    *out = is_slice(d);
    return OK;
}

/* --- links --- */
int nvmlDeviceGetP2PStatus(device d, device other, int index, int *out) {
    *out = 0;
    return OK;
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} fabric;
int nvmlDeviceGetGpuFabricInfoV(device d, fabric *out) {  /* a GPU beside no NVSwitch */
    memset(out->cluster, 0, sizeof out->cluster);
    out->status = OK, out->clique = 0, out->state = 0, out->health = 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(device d, unsigned link, int *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device d, unsigned link, pci *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(device d, unsigned link, int *out) { return NOT_SUPPORTED; }
int nvmlGpmQueryDeviceSupport(device d, unsigned out[2]) {
    out[1] = 0;
    return OK;
}
