/*
 * Memory that a function fills: 64 GiB of squares, of which no page exists before it is touched.
 *
 * Exits with 77 where the host has no userfaultfd.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "uzone.h"

#define LEN ((uint64_t)64 << 30)
#define BAD ((uint64_t)32 << 30)

static void check(int code) {
    if (code < 0) {
        fprintf(stderr, "%s\n", uzone_last_error());
        exit(code == -EPERM || code == -EACCES || code == -ENOSYS || code == -EOPNOTSUPP ? 77 : 1);
    }
}

/* Threads of the library call it. It may wait, as for a request over the network. */
static int squares(void *user, uint64_t offset_bytes, void *bytes, size_t len_bytes) {
    uint64_t *numbers = bytes;
    uint64_t first = offset_bytes / sizeof *numbers;
    (void)user;
    if (offset_bytes == BAD) {
        return -ENODATA;
    }
    for (size_t at = 0; at < len_bytes / sizeof *numbers; at++) {
        numbers[at] = (first + at) * (first + at);
    }
    return 0;
}

int main(void) {
    uzone_zone *zone;
    check(uzone_zone_open(&zone));
    uzone_lazy_options options = {.size = sizeof options, .zone = zone, .deadline_ms = 5000};
    uzone_lazy *memory;
    check(uzone_lazy_open_function(LEN, squares, NULL, &options, &memory));
    uint64_t *numbers = uzone_lazy_address(memory);

    uint64_t random = 1, sum = 0;
    for (int touch = 0; touch < 200; touch++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = (random >> 20) % (BAD / sizeof *numbers);
        if (numbers[at] != at * at) {
            fprintf(stderr, "number %llu is wrong\n", (unsigned long long)at);
            return 1;
        }
        sum += numbers[at];
    }
    printf("the sum of 200 squares is %llu\n", (unsigned long long)sum);

    /* A pin produces pages that are missing, and they stay there. */
    uint64_t token;
    check(uzone_pin(zone, numbers, 1 << 20, &token));
    uint64_t evicted;
    check(uzone_lazy_evict(memory, 0, 1 << 20, &evicted));
    if (evicted != 0) {
        fprintf(stderr, "pinned pages were given back\n");
        return 1;
    }
    check(uzone_unpin(token));

    /* The error of the function is the error of the call. A touch of that page would raise SIGBUS. */
    int code = uzone_lazy_populate(memory, BAD, 4096, NULL, NULL);
    if (code != -ENODATA) {
        fprintf(stderr, "the call returned %d\n", code);
        return 1;
    }
    printf("refused: %s\n", uzone_last_error());

    uzone_lazy_close(memory);
    uzone_zone_close(zone);
    return 0;
}
