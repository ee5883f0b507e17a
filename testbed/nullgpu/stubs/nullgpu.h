/* What the stub libraries share. All of it lives in libcudart: libcuda and libnvidia-ml are linked to it.
 *
 * A device is what a process counts from 0 through CUDA_VISIBLE_DEVICES; a card is what the machine has. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#define NG_CARDS 8
#define NG_API __attribute__((visibility("default")))
#define MIB (1ul << 20)

typedef struct {
    int cards, devices, card_of[NG_CARDS]; /* what CUDA_VISIBLE_DEVICES leaves */
    const char *name, *driver, *mig;       /* mig: a profile such as 1g.12gb, in which the first slice is used */
    size_t memory, reserved, mig_memory;   /* what CUDA counts; what NVML counts beside it; one slice */
    int major, minor, multiprocessors;
    size_t context, communicator; /* what a process occupies outside the allocator */
    const char *state, *counts;   /* a file that processes of one machine share; a folder */
    const char *trace;            /* what is counted with a stack of Python */
    int values;                   /* collectives exchange data, and do not merely succeed */
    double collective_wait_s;
    const char *faults;
    size_t growth_per_launch, growth_per_s, neighbour;
    double neighbour_from_s, neighbour_until_s;
    long thermal_first, thermal_samples;
    double flops_per_s, link_bytes_per_s; /* of matrix products and collectives; 0: they take no time */
} ng_settings;
NG_API const ng_settings *ng_get(void);

/* Memory of cards, by live processes. */
typedef struct {
    int pid;
    int64_t used[NG_CARDS];
} ng_process;
NG_API int ng_take(int device, size_t bytes); /* whether it fits */
NG_API void ng_give(int device, size_t bytes);
NG_API int ng_context(int device);     /* the first use costs a context; whether it fits */
NG_API int ng_has_context(int device);
NG_API size_t ng_device_bytes(void);   /* what CUDA calls total */
NG_API size_t ng_used(int card);       /* by everybody */
NG_API int ng_processes(ng_process *out, int room);
NG_API int ng_alive(int pid);
NG_API int ng_grow(int device);        /* at each launch: memory outside the allocator; whether it fits */
NG_API int ng_thermal(void);     /* whether this sample tells of heat */

/* Work that never ends on the device, once a collective waits for a peer that is dead. */
NG_API void ng_stall(int on);
NG_API int ng_stalled(void);
NG_API void ng_work(double amount, double per_s); /* asked of the device, which does one thing after the other */

/* Counts, and faults on purpose. Every function of a library is preceded by a generated one that calls ng_called. */
#define NG_NO_FAULT (-1 << 30)
NG_API void ng_count(const char *kind, const char *literal);
NG_API void ng_count_kernel(const void *kernel, const char *name);
typedef struct ng_graph ng_graph; /* zeroed memory of NG_GRAPH bytes */
#define NG_GRAPH 64
NG_API void ng_capture(ng_graph *graph); /* what is counted from now on, or no longer (0) */
NG_API void ng_replay(const ng_graph *graph);
NG_API void ng_name_kernel(const void *kernel, const char *name);
NG_API int ng_called(const char *function); /* the answer of a planned fault, or NG_NO_FAULT */

NG_API void ng_copy(void *to, const void *from, size_t bytes); /* pages never written stay so */
