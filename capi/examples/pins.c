/*
 * Pins: memory that two threads hand to a device stays bound until the device is done with it.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "uzone.h"

#define LEN ((uint64_t)64 << 20)

static uzone_zone *zone;
static char *memory;

static void check(int code) {
    if (code < 0) {
        fprintf(stderr, "%s\n", uzone_last_error());
        exit(1);
    }
}

/* Each pin is named by a number, which a completion carries as its user data. */
static void *transfer(void *argument) {
    const char *start = memory + *(const size_t *)argument;
    for (int round = 0; round < 10000; round++) {
        uint64_t token;
        check(uzone_pin(zone, start + round, 3 << 20, &token));
        check(uzone_unpin(token));
    }
    return NULL;
}

int main(void) {
    uzone_region *region;
    check(uzone_region_open(LEN, 0, &region)); /* addresses; no memory is taken yet */
    check(uzone_region_populate(region, 0, 8 << 20, NULL, NULL));
    memory = uzone_region_address(region);

    check(uzone_zone_open(&zone));
    uzone_bind_options options = {.size = sizeof options, .folio_bytes = 2 << 20};
    check(uzone_region_bind(region, zone, &options));

    size_t offsets[2] = {0, 32 << 20};
    pthread_t threads[2];
    for (int number = 0; number < 2; number++) {
        if (pthread_create(&threads[number], NULL, transfer, &offsets[number]) != 0) {
            return 1;
        }
    }
    for (int number = 0; number < 2; number++) {
        pthread_join(threads[number], NULL);
    }

    /* Memory that is pinned is not unbound, and not cleared. */
    uint64_t token;
    check(uzone_pin(zone, memory + 100, 1, &token));
    if (uzone_region_unbind(region, 0) != -EBUSY) {
        fprintf(stderr, "pinned memory was unbound\n");
        return 1;
    }
    printf("refused: %s\n", uzone_last_error());
    uint64_t cleared;
    if (uzone_region_clear(region, 0, 4 << 20, &cleared) != -EBUSY || cleared != 2 << 20) {
        fprintf(stderr, "pinned memory was cleared\n");
        return 1;
    }
    printf("refused: %s\n", uzone_last_error());

    /* A token is good for one unpin. */
    check(uzone_unpin(token));
    if (uzone_unpin(token) != -EINVAL) {
        fprintf(stderr, "a pin was given back twice\n");
        return 1;
    }
    printf("refused: %s\n", uzone_last_error());

    uzone_region_stats stats = {.size = sizeof stats};
    check(uzone_region_read_stats(region, &stats));
    printf("%llu bytes of memory, and %llu of descriptors\n", (unsigned long long)stats.resident_bytes,
           (unsigned long long)stats.descriptor_bytes);
    check(uzone_region_unbind(region, 0));
    uzone_region_close(region);
    uzone_zone_close(zone);
    return 0;
}
