/* Calls counted in a mapped file of each process, so that no way of ending loses them; and faults on purpose. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define ROOM 4096
#define TABLE (1u << 18)

typedef struct {
    int64_t count;
    char name[504];
} entry;
typedef struct {
    const void *key;
    const char *name;
    entry *entry;
} known;
static entry *entries;
static int used;
static known *table;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static known *find(const void *key) {
    if (!table) table = calloc(TABLE, sizeof *table);
    size_t at = (((uintptr_t)key >> 3) * 0x9E3779B97F4A7C15ull) >> 46;
    while (table[at].key && table[at].key != key) at = (at + 1) % TABLE;
    table[at].key = key;
    return &table[at];
}
static void forked(void) {
    entries = 0, used = 0;
    for (size_t i = 0; table && i < TABLE; i++) table[i].entry = 0;
}
static entry *enter(const char *kind, const char *name) {
    if (!entries) {
        char path[512];
        snprintf(path, sizeof path, "%s/%d", ng_get()->counts, getpid());
        mkdir(ng_get()->counts, 0777);
        int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
        if (file < 0 || ftruncate(file, ROOM * sizeof *entries)) abort();
        entries = mmap(0, ROOM * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        pthread_atfork(0, 0, forked);
    }
    entry *new = &entries[used < ROOM - 1 ? used++ : used];
    snprintf(new->name, sizeof new->name, "%s:%s", kind, name);
    return new;
}
/* NULLGPU_TRACE: the beginning of KIND:NAME, at which a process that listens (faulthandler) tells where it is. */
static void trace(const char *name) {
    const char *wanted = ng_get()->trace;
    struct sigaction now;
    if (!wanted || strncmp(name, wanted, strlen(wanted)) || sigaction(SIGRTMIN, 0, &now) || now.sa_handler == SIG_DFL) return;
    dprintf(2, "nullgpu trace %s\n", name);
    raise(SIGRTMIN);
}

/* A captured graph is a list of what was counted meanwhile, which each replay counts again. */
struct ng_graph {
    int used, room;
    entry **entries;
};
static ng_graph *captured;
static void capture(entry *one) {
    if (!strncmp(one->name, "wait:", 5)) return; /* of the recording host */
    if (!strncmp(one->name, "call:", 5) && strncmp(one->name, "call:cublas", 11) && strncmp(one->name, "call:cudnn", 10)) return;
    ng_graph *g = captured;
    if (g->used == g->room) g->entries = realloc(g->entries, (g->room = g->room ? 2 * g->room : 256) * sizeof *g->entries);
    g->entries[g->used++] = one;
}
void ng_capture(ng_graph *graph) { captured = graph; }
void ng_replay(const ng_graph *graph) {
    for (int i = 0; i < graph->used; i++) __sync_add_and_fetch(&graph->entries[i]->count, 1);
}

static void count(const char *kind, const void *key, const char *name) {
    if (!ng_get()->counts) return;
    pthread_mutex_lock(&lock);
    known *at = find(key);
    if (!at->entry) at->entry = enter(kind, at->name ? at->name : name ? name : "?");
    entry *one = at->entry;
    __sync_add_and_fetch(&one->count, 1);
    if (captured) capture(one);
    pthread_mutex_unlock(&lock);
    trace(one->name);
}
void ng_count(const char *kind, const char *literal) { count(kind, literal, literal); }
void ng_count_kernel(const void *kernel, const char *name) { count("kernel", kernel, name); }
void ng_name_kernel(const void *key, const char *name) {
    if (!ng_get()->counts) return;
    pthread_mutex_lock(&lock);
    find(key)->name = name;
    pthread_mutex_unlock(&lock);
}

/* NULLGPU_FAULTS: FUNCTION=ANSWER[@FIRST[-LAST]][<BYTES], with commas between; ANSWER is a number or hang, FIRST and
 * LAST count calls from 1, BYTES are what must be free for the call to succeed. */
typedef struct {
    char plan[160];
    size_t length; /* of the function's name in it */
    int answer, hangs;
    long first, last, calls;
    size_t needed;
} fault;
static fault faults[16];
static int fault_count;
__attribute__((constructor(103))) static void plan_faults(void) {
    char words[2048], *rest = words;
    snprintf(words, sizeof words, "%s", ng_get()->faults ? ng_get()->faults : "");
    for (char *word; (word = strsep(&rest, ",")) && *word;) {
        size_t length = strcspn(word, "=");
        char *at = strchr(word, '@'), *below = strchr(word, '<');
        if (!word[length] || fault_count == 16) abort();
        fault *f = &faults[fault_count++];
        const char *answer = word + length + 1;
        *f = (fault){.length = length, .answer = atoi(answer), .hangs = !strncmp(answer, "hang", 4), .first = 1, .last = 1l << 60};
        snprintf(f->plan, sizeof f->plan, "%s", word);
        if (at && sscanf(at, "@%ld-%ld", &f->first, &f->last) < 1) abort();
        if (below) f->needed = strtoull(below + 1, 0, 10);
    }
}
int ng_called(const char *function) {
    ng_count("call", function);
    for (int i = 0; i < fault_count; i++) {
        fault *f = &faults[i];
        if (strncmp(f->plan, function, f->length) || function[f->length]) continue;
        long call = __sync_add_and_fetch(&f->calls, 1);
        if (call < f->first || call > f->last) continue;
        if (f->needed && ng_used(ng_get()->card_of[0]) + f->needed <= ng_device_bytes()) continue;
        ng_count("fault", f->plan);
        while (f->hangs) pause();
        return f->answer;
    }
    return NG_NO_FAULT;
}
