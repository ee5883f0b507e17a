/* Memory of the cards as all processes of the machine share it, in one mapped file: who holds how much. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#define PROCESSES 64

typedef struct {
    int64_t started_ns, samples;
    ng_process processes[PROCESSES];
} machine;
static machine alone, *shared = &alone;
static ng_process *mine;
static int has_context[NG_CARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static void forked(void) { mine = 0; memset(has_context, 0, sizeof has_context); }
__attribute__((constructor(102))) static void open_state(void) {
    int file = ng_get()->state ? open(ng_get()->state, O_RDWR | O_CREAT, 0666) : -1;
    if (file >= 0 && ftruncate(file, sizeof alone) == 0) {
        void *at = mmap(0, sizeof alone, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) shared = at;
    }
    if (file >= 0) close(file);
    __sync_val_compare_and_swap(&shared->started_ns, 0, now_ns());
    pthread_atfork(0, 0, forked);
}
__attribute__((destructor)) static void leave(void) {
    if (mine) { memset(mine->used, 0, sizeof mine->used); mine->pid = 0; }
}

int ng_alive(int pid) {  /* what was killed and not yet waited for is dead */
    char path[32], line[256] = "", *state;
    if (!pid || (kill(pid, 0) && errno != EPERM)) return 0;
    if (pid == getpid()) return 1;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    state = strrchr(line, ')');
    return state && state[1] && state[2] != 'Z' && state[2] != 'X';
}
static ng_process *me(void) {
    for (int i = 0; !mine && i < PROCESSES; i++) {
        int old = shared->processes[i].pid;
        if (old != getpid() && ng_alive(old)) continue;
        if (!__sync_bool_compare_and_swap(&shared->processes[i].pid, old, getpid())) continue;
        mine = &shared->processes[i];
        memset(mine->used, 0, sizeof mine->used);
    }
    return mine ? mine : (mine = &alone.processes[0]);
}
static size_t neighbour(void) {
    const ng_settings *s = ng_get();
    double age_s = (now_ns() - shared->started_ns) * 1e-9;
    return s->neighbour && age_s >= s->neighbour_from_s && age_s < s->neighbour_until_s ? s->neighbour : 0;
}
size_t ng_used(int card) {
    size_t sum = neighbour();
    for (int i = 0; i < PROCESSES; i++)
        if (shared->processes[i].used[card] && ng_alive(shared->processes[i].pid)) sum += shared->processes[i].used[card];
    return sum;
}
int ng_processes(ng_process *out, int room) {
    int count = 0;
    for (int i = 0; i < PROCESSES && count < room; i++)
        if (ng_alive(shared->processes[i].pid)) out[count++] = shared->processes[i];
    if (neighbour() && count < room) {  /* process 1 always lives */
        out[count] = (ng_process){.pid = 1};
        for (int card = 0; card < NG_CARDS; card++) out[count].used[card] = (int64_t)neighbour();
        count++;
    }
    return count;
}
size_t ng_device_bytes(void) { return ng_get()->mig ? ng_get()->mig_memory : ng_get()->memory; }

static int take(int card, size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = ng_used(card) + bytes <= ng_device_bytes();
    if (fits) __sync_fetch_and_add(&me()->used[card], (int64_t)bytes);
    pthread_mutex_unlock(&lock);
    return fits;
}
int ng_context(int device) {
    if (has_context[device]) return 1;
    if (!take(ng_get()->card_of[device], ng_get()->context)) return 0;
    return has_context[device] = 1;
}
int ng_has_context(int device) { return has_context[device]; }
int ng_take(int device, size_t bytes) { return ng_context(device) && take(ng_get()->card_of[device], bytes); }
void ng_give(int device, size_t bytes) { __sync_fetch_and_sub(&me()->used[ng_get()->card_of[device]], (int64_t)bytes); }

int ng_grow(int device) {
    static int64_t since_ns;
    int64_t now = now_ns(), before = __sync_lock_test_and_set(&since_ns, now);
    size_t more = ng_get()->growth_per_launch;
    if (before) more += (size_t)(ng_get()->growth_per_s * 1e-9 * (now - before));
    return !more || take(ng_get()->card_of[device], more);
}
int ng_thermal(void) {
    long at = __sync_fetch_and_add(&shared->samples, 1), first = ng_get()->thermal_first;
    return at >= first && at < first + ng_get()->thermal_samples;
}
