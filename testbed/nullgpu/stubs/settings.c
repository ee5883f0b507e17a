/* The environment, read once; CUDA_VISIBLE_DEVICES again after a fork, as CUDA reads it when a process begins.
 * Every name is NULLGPU_ and a field of ng_settings in capitals. */
#include "nullgpu.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ng_settings settings;
static int forked;
static void has_forked(void) { forked = 1; }

static const char *text(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}
static double number(const char *name, double otherwise) {
    const char *value = text(name, 0);
    return value ? strtod(value, 0) : otherwise;
}
static size_t bytes(const char *name, size_t otherwise) {
    const char *value = text(name, 0);
    return value ? strtoull(value, 0, 10) : otherwise;
}

static int card_named(const char *word) {  /* an index, GPU-… or MIG-…, whose last two digits count */
    if (!strncmp(word, "GPU-", 4) || !strncmp(word, "MIG-", 4)) return (int)strtoul(word + strlen(word) - 2, 0, 16);
    char *end;
    long index = strtol(word, &end, 10);
    return *end || end == word ? -1 : (int)index;
}
static void see(const char *visible) {
    ng_settings *s = &settings;
    if (!visible) {
        for (s->devices = 0; s->devices < s->cards; s->devices++) s->card_of[s->devices] = s->devices;
        return;
    }
    char words[512], *rest = words;
    snprintf(words, sizeof words, "%s", visible);
    for (char *word; (word = strsep(&rest, ",")) && s->devices < NG_CARDS;) {
        int card = card_named(word);
        if (card < 0 || card >= s->cards) break;  /* as CUDA does: what follows an unknown one is not seen */
        s->card_of[s->devices++] = card;
    }
}

__attribute__((constructor(101))) static void read_environment(void) {
    settings = (ng_settings){
        .cards = (int)number("NULLGPU_CARDS", 1),
        .name = text("NULLGPU_NAME", "NVIDIA H100 NVL"),
        .driver = text("NULLGPU_DRIVER", "0.0 (nullgpu)"),  /* by this nothing is kept as measured */
        .mig = text("NULLGPU_MIG", 0),
        .memory = bytes("NULLGPU_MEMORY", 93ul << 30),
        .reserved = bytes("NULLGPU_RESERVED", 598 * MIB),
        .mig_memory = bytes("NULLGPU_MIG_MEMORY", 11ul << 30),
        .multiprocessors = (int)number("NULLGPU_MULTIPROCESSORS", 132),
        .context = bytes("NULLGPU_CONTEXT", 0),
        .communicator = bytes("NULLGPU_COMMUNICATOR", 0),
        .state = text("NULLGPU_STATE", 0),
        .counts = text("NULLGPU_COUNTS", 0),
        .trace = text("NULLGPU_TRACE", 0),
        .values = (int)number("NULLGPU_VALUES", 0),
        .collective_wait_s = number("NULLGPU_COLLECTIVE_WAIT_S", 60),
        .faults = text("NULLGPU_FAULTS", 0),
        .growth_per_launch = bytes("NULLGPU_GROWTH_PER_LAUNCH", 0),
        .growth_per_s = bytes("NULLGPU_GROWTH_PER_S", 0),
        .neighbour = bytes("NULLGPU_NEIGHBOUR", 0),
        .neighbour_from_s = number("NULLGPU_NEIGHBOUR_FROM_S", 0),
        .neighbour_until_s = number("NULLGPU_NEIGHBOUR_UNTIL_S", 1e9),
        .thermal_first = (long)number("NULLGPU_THERMAL_FIRST", 0),
        .thermal_samples = (long)number("NULLGPU_THERMAL_SAMPLES", 0),
        .flops_per_s = number("NULLGPU_FLOPS_PER_S", 0),
        .link_bytes_per_s = number("NULLGPU_LINK_BYTES_PER_S", 0),
    };
    if (settings.cards > NG_CARDS) settings.cards = NG_CARDS;
    if (sscanf(text("NULLGPU_CAPABILITY", "9.0"), "%d.%d", &settings.major, &settings.minor) != 2) abort();
    see(getenv("CUDA_VISIBLE_DEVICES"));
    pthread_atfork(0, 0, has_forked);
}
const ng_settings *ng_get(void) {
    if (forked) {
        forked = settings.devices = 0;
        see(getenv("CUDA_VISIBLE_DEVICES"));
    }
    return &settings;
}
