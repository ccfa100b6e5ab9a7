// A driver of our own in place of CUDA's and of HIP's, which checks its calls. It reads orders from the file beside it
// (<library>.orders, when it is initialised) and writes a line for each call that registers memory to <library>.log.
//
//   context            the thread that initialises it has a context
//   fail_at N          the N-th registration fails
//   fail_unregister N  the N-th unregistration fails
//   gb_per_s N         a registration holds the driver's lock for its length at this rate
//   destroyed          every call in a context fails: the context was destroyed
//
// A line of the log that starts with WRONG is a call that CUDA would refuse, or that shows a defect of the caller.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 65536, PAGE = 4096 };
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEINITIALIZED = 4, INVALID_CONTEXT = 201,
       DESTROYED = 709, ALREADY = 712, NOT_REGISTERED = 713, UNKNOWN = 999 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { size_t start, len; } ranges[MOST];
static size_t count, registered, unregistered;
static size_t fail_at, fail_unregister;
static double gb_per_s;
static int is_destroyed, is_initialised, is_down;
static FILE *out;
static _Thread_local void *current;
static char a_context;

static void say(const char *what, size_t start, size_t len, int code) {
    if (out) fprintf(out, "%s %zx %zx %d\n", what, start, len, code), fflush(out);
}

// The driver takes itself down at the end of the process: later calls are a defect of the caller.
static void take_down(void) {
    pthread_mutex_lock(&lock);
    is_down = 1;
    pthread_mutex_unlock(&lock);
}

int cuInit(unsigned flags) {
    if (is_initialised) return OK;
    if (flags) return INVALID_VALUE;
    Dl_info me;
    char path[4096], word[64];
    if (!dladdr((void *)cuInit, &me)) return UNKNOWN;
    snprintf(path, sizeof path, "%s.orders", me.dli_fname);
    FILE *orders = fopen(path, "r");
    while (orders && fscanf(orders, "%63s", word) == 1) {
        if (!strcmp(word, "context")) current = &a_context;
        if (!strcmp(word, "destroyed")) is_destroyed = 1;
        if (!strcmp(word, "fail_at") && fscanf(orders, "%zu", &fail_at) != 1) return UNKNOWN;
        if (!strcmp(word, "fail_unregister") && fscanf(orders, "%zu", &fail_unregister) != 1) return UNKNOWN;
        if (!strcmp(word, "gb_per_s") && fscanf(orders, "%lf", &gb_per_s) != 1) return UNKNOWN;
    }
    if (orders) fclose(orders);
    snprintf(path, sizeof path, "%s.log", me.dli_fname);
    out = fopen(path, "w");
    is_initialised = 1;
    return atexit(take_down) ? UNKNOWN : OK;
}

int cuCtxGetCurrent(void **context) {
    *context = current;
    return is_initialised ? OK : NOT_INITIALIZED;
}

int cuCtxSetCurrent(void *context) {
    current = context;
    return is_initialised ? OK : NOT_INITIALIZED;
}

static int usable(void) {
    if (!is_initialised) return NOT_INITIALIZED;
    if (is_down) return DEINITIALIZED;
    if (current != &a_context) return INVALID_CONTEXT;
    return is_destroyed ? DESTROYED : OK;
}

int cuMemHostRegister_v2(void *address, size_t len, unsigned flags) {
    size_t start = (size_t)address;
    pthread_mutex_lock(&lock);
    int code = usable();
    registered++;
    if (!code && (start % PAGE || len % PAGE || !len || flags != 1)) code = INVALID_VALUE;
    for (size_t i = 0; !code && i < count; i++)
        if (start < ranges[i].start + ranges[i].len && ranges[i].start < start + len) code = ALREADY;
    // Memory that is not there is populated by the real one, with its lock held: it is read here to be found.
    if (!code && len > ((size_t)64 << 30)) code = OUT_OF_MEMORY;
    if (code) say("WRONG register", start, len, code);
    if (!code && registered == fail_at) code = OUT_OF_MEMORY;
    if (!code && count == MOST) code = OUT_OF_MEMORY;
    if (!code && gb_per_s) {
        long ns = (long)(len / gb_per_s);
        nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
    }
    if (!code) ranges[count].start = start, ranges[count++].len = len;
    say("register", start, len, code);
    pthread_mutex_unlock(&lock);
    return code;
}

int cuMemHostUnregister(void *address) {
    size_t i, start = (size_t)address;
    int code = usable();
    pthread_mutex_lock(&lock);
    unregistered++;
    for (i = 0; i < count && ranges[i].start != start; i++) {}
    if (!code && i == count) code = NOT_REGISTERED;
    if (code) say("WRONG unregister", start, 0, code);
    if (!code && unregistered == fail_unregister) code = UNKNOWN;
    say("unregister", start, i < count ? ranges[i].len : 0, code);
    if (!code) ranges[i] = ranges[--count];
    pthread_mutex_unlock(&lock);
    return code;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == DESTROYED ? "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        : code == UNKNOWN ? "CUDA_ERROR_UNKNOWN" : NULL;
    return *name ? OK : INVALID_VALUE;
}

// HIP has the same functions by other names. It keeps the error of a failed call of a thread until that is taken back,
// and a later call, which has not failed, may return it.
static _Thread_local int pending;
static int hip(int code) {
    if (pending) say("WRONG pending", 0, 0, pending);
    return code ? pending = code : OK;
}
int hipInit(unsigned flags) { return hip(cuInit(flags)); }
int hipCtxGetCurrent(void **context) { return hip(cuCtxGetCurrent(context)); }
int hipCtxSetCurrent(void *context) { return hip(cuCtxSetCurrent(context)); }
int hipHostRegister(void *address, size_t len, unsigned flags) { return hip(cuMemHostRegister_v2(address, len, flags)); }
int hipHostUnregister(void *address) { return hip(cuMemHostUnregister(address)); }
const char *hipGetErrorName(int code) { return code == OUT_OF_MEMORY ? "hipErrorOutOfMemory" : "hipErrorUnknown"; }
int hipGetLastError(void) {
    int code = pending;
    pending = OK;
    return code;
}

// The rest is what the measuring program calls besides.
int cuDeviceGet(int *device, int number) { *device = number; return OK; }
int cuDeviceGetName(char *name, int len, int device) { (void)device; snprintf(name, len, "stub"); return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &a_context; return OK; }
int cuDriverGetVersion(int *version) { *version = 0; return OK; }
int cuMemAlloc_v2(size_t *start, size_t len) { return (*start = (size_t)malloc(len)) ? OK : OUT_OF_MEMORY; }
int cuMemHostAlloc(void **start, size_t len, unsigned flags) {
    (void)flags;
    if (posix_memalign(start, 2 << 20, len)) return OUT_OF_MEMORY;
    memset(*start, 0, len);
    return OK;
}
int cuMemFreeHost(void *start) { free(start); return OK; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &a_context; return OK; }
int cuStreamSynchronize(void *stream) { (void)stream; return OK; }
int cuMemcpyHtoDAsync_v2(size_t to, const void *from, size_t len, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    memcpy((void *)to, from, len);
    pthread_mutex_unlock(&lock);
    return usable();
}
int cuMemcpyDtoHAsync_v2(void *to, size_t from, size_t len, void *stream) {
    (void)stream;
    memcpy(to, (void *)from, len);
    return usable();
}
int cuMemGetInfo_v2(size_t *left, size_t *all) {
    pthread_mutex_lock(&lock);
    *left = *all = (size_t)80 << 30;
    pthread_mutex_unlock(&lock);
    return usable();
}
