/*
 * A pool of host memory whose blocks a device reads and writes: a queue of buffers for transfers.
 *
 * The two functions stand for functions of a driver, such as cuMemHostRegister() or ibv_reg_mr(). A program that uses CUDA or HIP
 * sets `registration` instead, and has no such functions.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uzone.h"

/* The device: how much of the host's memory it knows. */
struct device {
    atomic_uint_fast64_t registered_bytes;
    atomic_int pieces;
};

static int register_piece(void *user, void *address, uint64_t len_bytes) {
    struct device *device = user;
    (void)address;
    atomic_fetch_add(&device->registered_bytes, len_bytes);
    atomic_fetch_add(&device->pieces, 1);
    return 0; /* or a negative errno, which becomes the error of the pool */
}

static int unregister_piece(void *user, void *address) {
    struct device *device = user;
    (void)address;
    atomic_fetch_sub(&device->pieces, 1);
    return 0;
}

static void check(int code) {
    if (code < 0) {
        fprintf(stderr, "%s\n", uzone_last_error());
        exit(1);
    }
}

int main(void) {
    static struct device device;
    struct uzone_pool_options options = {
        .size = sizeof options,
        .block_bytes = 2 << 20,
        .piece_bytes = 8 << 20,
        .register_memory = register_piece,
        .unregister_memory = unregister_piece,
        .user = &device,
    };
    uzone_pool *pool;
    check(uzone_pool_open(64 << 20, &options, &pool)); /* at once, at any size */

    uzone_block block; /* of the first memory that is ready; every byte is zero */
    check(uzone_pool_take(pool, 1, 10000, &block));
    const unsigned char *bytes = block.address;
    for (uint64_t at = 0; at < block.len_bytes; at++) {
        if (bytes[at] != 0) {
            fprintf(stderr, "byte %llu is not zero\n", (unsigned long long)at);
            return 1;
        }
    }
    memset(block.address, 0xa5, block.len_bytes); /* the device would do so */

    uzone_block run; /* four blocks in a row, in one registration */
    check(uzone_pool_take(pool, 4, 10000, &run));
    printf("blocks %llu to %llu: %llu bytes\n", (unsigned long long)run.number,
           (unsigned long long)(run.number + run.count - 1), (unsigned long long)run.len_bytes);
    check(uzone_pool_free(pool, &run));
    check(uzone_pool_free(pool, &block)); /* cleared before its next owner has it */
    if (uzone_pool_free(pool, &block) == 0) {
        fprintf(stderr, "a block was given back twice\n");
        return 1;
    }
    printf("refused: %s\n", uzone_last_error());

    check(uzone_pool_wait_ready(pool, UINT64_MAX, 10000));
    uzone_pool_stats stats = {.size = sizeof stats};
    check(uzone_pool_read_stats(pool, &stats));
    printf("%llu of %llu bytes are ready in %llu pieces\n", (unsigned long long)stats.ready_bytes,
           (unsigned long long)stats.len_bytes, (unsigned long long)stats.pieces);
    char report[1024];
    check(uzone_pool_describe(pool, report, sizeof report));
    puts(report);
    if (stats.ready_bytes != atomic_load(&device.registered_bytes) || stats.used != 0) {
        fprintf(stderr, "the device knows other memory\n");
        return 1;
    }

    check(uzone_pool_close(pool));
    if (atomic_load(&device.pieces) != 0) {
        fprintf(stderr, "%d pieces are registered still\n", atomic_load(&device.pieces));
        return 1;
    }
    return 0;
}
