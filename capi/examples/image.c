/*
 * An image of memory: packed, mapped lazily, verified. The argument is the folder for its files.
 *
 * Exits with 77 where the host has no userfaultfd.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uzone.h"

#define LEN ((size_t)16 << 20)

static void check(int code) {
    if (code < 0) {
        fprintf(stderr, "%s\n", uzone_last_error());
        exit(code == -EPERM || code == -EACCES || code == -ENOSYS || code == -EOPNOTSUPP ? 77 : 1);
    }
}

static int show(void *user, uint64_t done_bytes, uint64_t total_bytes) {
    *(uint64_t *)user = done_bytes;
    return done_bytes <= total_bytes ? 0 : -ERANGE;
}

int main(int count, char **arguments) {
    const char *folder = count > 1 ? arguments[1] : ".";
    char path[4096];
    snprintf(path, sizeof path, "%s/numbers.uz", folder);

    uint64_t *numbers = malloc(LEN);
    if (numbers == NULL) {
        return 1;
    }
    for (size_t at = 0; at < LEN / sizeof *numbers; at++) {
        numbers[at] = at / 100;
    }
    uzone_packed packed = {.size = sizeof packed};
    check(uzone_pack_memory(numbers, LEN, path, NULL, &packed));
    printf("%llu bytes in %llu, root hash %s\n", (unsigned long long)packed.image_bytes,
           (unsigned long long)packed.file_bytes, packed.root);

    /* Only the index is read. The root hash makes the bytes authentic. */
    uzone_lazy_options options = {.size = sizeof options, .root = packed.root};
    uzone_lazy *image;
    check(uzone_image_open(path, &options, &image));
    const uint64_t *mapped = uzone_lazy_address(image);
    if (uzone_lazy_len_bytes(image) != LEN || strcmp(uzone_image_root(image), packed.root) != 0) {
        fprintf(stderr, "it is another image\n");
        return 1;
    }

    /* A touch reads, decodes and verifies one part of the file. */
    if (mapped[1000000] != 10000) {
        fprintf(stderr, "it has other numbers\n");
        return 1;
    }
    uzone_lazy_stats stats = {.size = sizeof stats};
    check(uzone_lazy_read_stats(image, &stats));
    printf("%llu of %llu pages were read for one number\n", (unsigned long long)(stats.on_demand + stats.around),
           (unsigned long long)(LEN / stats.page_bytes));

    /* Present before they are touched: an error is returned here, and is no signal later. */
    uint64_t done = 0;
    check(uzone_lazy_populate(image, 0, LEN, show, &done));
    if (done != LEN || memcmp(mapped, numbers, LEN) != 0) {
        fprintf(stderr, "it has other bytes\n");
        return 1;
    }

    uint64_t evicted = 0;
    check(uzone_lazy_evict(image, 0, LEN, &evicted));
    check(uzone_image_verify(image, 0, LEN, NULL, NULL));
    printf("%llu bytes were given back; all frames are sound\n", (unsigned long long)evicted);

    uzone_lazy_close(image);
    free(numbers);
    return 0;
}
