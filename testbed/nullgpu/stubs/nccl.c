/* Communicators whose ranks meet in shared memory at each collective, compare what they ask for and, with values,
 * exchange all of it. Where a peer has died the device never ends that collective, as NCCL's kernels would not. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#pragma GCC visibility push(default)
#define CHUNK (256ul << 10)
#define SAID 6
enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum what { REDUCE, SCATTER, GATHER, BROADCAST, SPLIT, JOIN };
static const char *const words[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast", "split", "join"};

typedef struct {
    volatile int64_t arrived;
    volatile int pid;
    int64_t said[2][SAID]; /* in turns: one may be a round ahead of those who still read */
    char data[CHUNK];
} seat;
typedef struct {
    int ranks, rank, stalled;
    int64_t round;
    seat *seats;
    double scales[8]; /* of operators made by ncclRedOpCreatePreMulSum */
    int scale_count;
} communicator;
typedef struct {
    char name[128];
} identity;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static int meet(communicator *c) {  /* whether all came */
    int64_t round = ++c->round;
    __atomic_store_n(&c->seats[c->rank].arrived, round, __ATOMIC_RELEASE);
    double until = now_s() + ng_get()->collective_wait_s;
    for (int rank = 0; rank < c->ranks && !c->stalled; rank++)
        for (long turn = 0; __atomic_load_n(&c->seats[rank].arrived, __ATOMIC_ACQUIRE) < round; turn++) {
            if (turn < 100) sched_yield(); else usleep(50);
            int pid = c->seats[rank].pid;
            if (turn % 1000 == 999 && ((pid && !ng_alive(pid)) || now_s() > until)) {
                c->stalled = 1;
                ng_stall(1);
                break;
            }
        }
    return !c->stalled;
}
static int64_t *said(communicator *c, int rank) { return c->seats[rank].said[c->round & 1]; }

static int join(communicator **out, int ranks, int rank, const char *name) {
    char path[192];
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, ranks * sizeof(seat))) return SYSTEM_ERROR;
    communicator *c = calloc(1, sizeof *c + 65536);  /* torch reads what follows, as NCCL's are large */
    c->ranks = ranks, c->rank = rank;
    c->seats = mmap(0, ranks * sizeof(seat), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->seats == MAP_FAILED) return SYSTEM_ERROR;
    c->seats[rank].pid = getpid();
    int met = meet(c), device;
    unlink(path);
    if (!met) return SYSTEM_ERROR;
    extern int cudaGetDevice(int *);
    static int counted;
    cudaGetDevice(&device);
    if (ranks > 1 && !counted++ && !ng_take(device, ng_get()->communicator)) return CUDA_ERROR;
    *out = c;
    return SUCCESS;
}
int ncclGetVersion(int *out) {
    *out = NG_NCCL_VERSION;
    return SUCCESS;
}
int ncclGetUniqueId(identity *out) {
    static int made;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "nullgpu-%d-%d-%lx", getpid(), made++, (long)(now_s() * 1e6));
    return SUCCESS;
}
int ncclCommInitRank(communicator **out, int ranks, identity id, int rank) {
    return join(out, ranks, rank, id.name);
}
int ncclCommInitRankConfig(communicator **out, int ranks, identity id, int rank, void *config) {
    return ncclCommInitRank(out, ranks, id, rank);
}
int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, identity *id, void *config) {
    return ncclCommInitRank(out, ranks, *id, rank);
}
int ncclCommSplit(communicator *c, int color, int key, communicator **out, void *config) {
    int64_t *mine = c->seats[c->rank].said[(c->round + 1) & 1];
    mine[0] = SPLIT, mine[1] = color, mine[2] = key, mine[3] = now_s() * 1e6;
    if (!meet(c)) return SYSTEM_ERROR;
    int ranks = 0, rank = 0;
    char name[128];
    for (int other = 0; other < c->ranks; other++) {
        int64_t *its = said(c, other);
        if (its[1] != color) continue;
        ranks++;
        rank += its[2] < key || (its[2] == key && other < c->rank);
    }
    snprintf(name, sizeof name, "nullgpu-%d-%lx-%d", c->seats[0].pid, (long)said(c, 0)[3], color);
    *out = 0;
    return color < 0 ? SUCCESS : join(out, ranks, rank, name);
}
int ncclCommAbort(communicator *c) {
    ng_stall(0);
    return SUCCESS;
}
int ncclCommDestroy(communicator *c) { return SUCCESS; }
int ncclCommCount(communicator *c, int *out) {
    *out = c->ranks;
    return SUCCESS;
}
int ncclCommUserRank(communicator *c, int *out) {
    *out = c->rank;
    return SUCCESS;
}
int ncclCommGetAsyncError(communicator *c, int *out) {
    int fault = ng_called(__func__);
    *out = fault == NG_NO_FAULT ? SUCCESS : fault;
    return SUCCESS;
}
const char *ncclGetErrorString(int code) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or network error"};
    return code >= 0 && code < 7 ? texts[code] : "unknown result code";
}
const char *ncclGetLastError(communicator *c) { return ""; }

/* --- numbers --- */
enum type { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT };
enum operator { SUM, PROD, MAX, MIN, AVG, MADE };
static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float value;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + 0x38000000);
    else return (sign ? -1.0f : 1.0f) * (float)rest / 16777216.0f;
    memcpy(&value, &bits, 4);
    return value;
}
static uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        memcpy(&value, &bits, 4);
        return sign | (uint16_t)__builtin_rintf(value * 16777216.0f);
    }
    return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}
static long double load(const void *at, size_t i, int type) {
    float value;
    uint32_t bits;
    switch (type) {
    case INT8: return ((const int8_t *)at)[i];
    case UINT8: return ((const uint8_t *)at)[i];
    case INT32: return ((const int32_t *)at)[i];
    case UINT32: return ((const uint32_t *)at)[i];
    case INT64: return ((const int64_t *)at)[i];
    case UINT64: return ((const uint64_t *)at)[i];
    case HALF: return half_to_float(((const uint16_t *)at)[i]);
    case FLOAT: return ((const float *)at)[i];
    case DOUBLE: return ((const double *)at)[i];
    default:
        bits = (uint32_t)((const uint16_t *)at)[i] << 16;
        memcpy(&value, &bits, 4);
        return value;
    }
}
static void store(void *at, size_t i, int type, long double value) {
    float single = (float)value;
    uint32_t bits;
    switch (type) {
    case INT8: case UINT8: ((int8_t *)at)[i] = (int8_t)value; break;
    case INT32: case UINT32: ((int32_t *)at)[i] = (int32_t)(int64_t)value; break;
    case INT64: ((int64_t *)at)[i] = (int64_t)value; break;
    case UINT64: ((uint64_t *)at)[i] = (uint64_t)value; break;
    case HALF: ((uint16_t *)at)[i] = float_to_half(single); break;
    case FLOAT: ((float *)at)[i] = single; break;
    case DOUBLE: ((double *)at)[i] = (double)value; break;
    default:
        memcpy(&bits, &single, 4);
        ((uint16_t *)at)[i] = single != single ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
static void combine(communicator *c, void *out, size_t from, size_t until, int type, int op) {
    for (size_t i = from; i < until; i++) {
        long double all = load(c->seats[0].data, i, type);
        for (int rank = 1; rank < c->ranks; rank++) {
            long double one = load(c->seats[rank].data, i, type);
            all = op == PROD ? all * one : op == MAX ? (one > all ? one : all) : op == MIN ? (one < all ? one : all) : all + one;
        }
        if (op == AVG) all /= c->ranks;
        if (op >= MADE) all *= c->scales[op - MADE];
        store(out, i - from, type, all);
    }
}

/* --- collectives --- */
static int collective(communicator *c, enum what what, const char *send, char *recv, size_t count, int type, int op, int root) {
    if (c->stalled) return SUCCESS;
    size_t width = widths[type], total = what == SCATTER ? count * c->ranks : count, chunk = CHUNK / width;
    int64_t asked[SAID] = {what, (int64_t)count, type, op, root};
    memcpy(c->seats[c->rank].said[(c->round + 1) & 1], asked, sizeof asked);
    if (!meet(c)) return SUCCESS;
    for (int rank = 0; rank < c->ranks; rank++) {
        int64_t *its = said(c, rank);
        if (!memcmp(its, asked, sizeof asked)) continue;
        fprintf(stderr, "nullgpu: rank %d asks for %s of %zu (type %d), rank %d for %s of %ld (type %ld)\n", c->rank, words[what],
                count, type, rank, words[its[0]], (long)its[1], (long)its[2]);
        return INVALID_USAGE;
    }
    ng_work(total * width, ng_get()->link_bytes_per_s);
    if (!ng_get()->values && total > chunk) {  /* a rank's own data in every place; what is small may steer the host */
        for (int place = 0; place < (what == GATHER ? c->ranks : 1); place++)
            ng_copy(recv + place * count * width, send + (what == SCATTER ? c->rank * count * width : 0), count * width);
        return SUCCESS;
    }
    size_t mine = what == SCATTER ? c->rank * count : 0;
    for (size_t at = 0; at < total; at += chunk) {
        size_t n = total - at < chunk ? total - at : chunk;
        memcpy(c->seats[c->rank].data, send + at * width, n * width);
        if (!meet(c)) return SUCCESS;
        if (what == GATHER)
            for (int rank = 0; rank < c->ranks; rank++) memcpy(recv + (rank * count + at) * width, c->seats[rank].data, n * width);
        else if (what == BROADCAST) memcpy(recv + at * width, c->seats[root].data, n * width);
        else {
            size_t from = mine > at ? mine - at : 0, until = mine + count < at + n ? (mine + count > at ? mine + count - at : 0) : n;
            if (from < until) combine(c, recv + (at + from - mine) * width, from, until, type, op);
        }
        if (!meet(c)) return SUCCESS;
    }
    return SUCCESS;
}
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, communicator *c, void *stream) {
    return collective(c, REDUCE, send, recv, count, type, op, 0);
}
int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, communicator *c, void *stream) {
    return ncclAllReduce(send, recv, count, type, op, c, stream);
}
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, communicator *c, void *stream) {
    return collective(c, BROADCAST, send, recv, count, type, 0, root);
}
int ncclBcast(void *data, size_t count, int type, int root, communicator *c, void *stream) {
    return ncclBroadcast(data, data, count, type, root, c, stream);
}
int ncclAllGather(const void *send, void *recv, size_t count, int type, communicator *c, void *stream) {
    return collective(c, GATHER, send, recv, count, type, 0, 0);
}
int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, communicator *c, void *stream) {
    return collective(c, SCATTER, send, recv, count, type, op, 0);
}
int ncclRedOpCreatePreMulSum(int *out, void *scalar, int type, int residence, communicator *c) {
    *out = MADE + c->scale_count % 8;
    c->scales[c->scale_count++ % 8] = (double)load(scalar, 0, type);
    return SUCCESS;
}
