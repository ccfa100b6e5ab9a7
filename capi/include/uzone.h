/*
 * libuzone: memory management for very large memory, in user space.
 *
 * Pools of host memory that an accelerator reads and writes directly; images and other memory whose pages are read when
 * they are touched; regions, and pins on their pages. docs/C.md is a first walk through it.
 *
 * Results. A function that may fail returns 0, or a negative errno of Linux; uzone_last_error() has the text. A handle comes
 * by its last parameter, which is not changed if the call fails. -EINVAL is also returned for NULL where it is not allowed,
 * -ENOMEM where memory of the library is used up, and -EIO for a defect of the library.
 *
 * Pointers. A handle is valid from its open to its close. A text ends with a zero, and is read before the call returns, and
 * so are structures. Text of the library is the library's.
 *
 * Structures with a field `size`. The caller sets it to sizeof of the type, and zero is the default of every other field:
 *     struct uzone_pool_options options = { .size = sizeof options };
 * A program that was compiled with an older header has defaults for newer fields. -E2BIG is returned if a program with a
 * newer header sets a field that the library does not have.
 *
 * Threads. Every function may be called by any thread, several at a time with one handle, but for functions that close,
 * bind or unbind: no other call uses the handle meanwhile. A function of the caller is never called under a lock of the
 * library, and must return: neither longjmp(3) nor an exception of C++ may leave it.
 *
 * Units are the last word of a name. A page is the host's, 4096 bytes on x86-64.
 */

#ifndef UZONE_H
#define UZONE_H

/* Written by cbindgen of the package uzone-capi: UZONE_WRITE_HEADER=1 cargo test -p uzone-capi header */

#include <stddef.h>
#include <stdint.h>

/// The memory is not registered, or by the functions of the options.
#define UZONE_REGISTER_NONE 0

/// The driver of CUDA registers it, in the context that is current on the calling thread.
#define UZONE_REGISTER_CUDA 1

/// The driver of HIP registers it, in the context that is current on the calling thread.
#define UZONE_REGISTER_HIP 2

/// mlock(2) keeps it present.
#define UZONE_REGISTER_MLOCK 3

/// Memory is made present and registered by threads of the pool, while blocks are handed out already.
#define UZONE_START_BACKGROUND 0

/// All memory is made present and registered before uzone_pool_open() returns.
#define UZONE_START_EAGER 1

/// Each block is made present and registered by the thread that takes it first.
#define UZONE_START_ON_DEMAND 2

/// A block that had an owner is cleared ahead of need, by a thread of the pool.
#define UZONE_CLEAR_AHEAD 0

/// It is cleared by the thread that takes it.
#define UZONE_CLEAR_ON_TAKE 1

/// It is cleared by the thread that gives it back.
#define UZONE_CLEAR_ON_RELEASE 2

/// It is never cleared: it has the bytes of its last owner.
#define UZONE_CLEAR_NEVER 3

/// Memory comes from the NUMA nodes of the threads that make it present.
#define UZONE_NODE_ANY 0

/// Memory comes from the node `node` of the options.
#define UZONE_NODE_ONE 1

/// Memory comes from all nodes in turn, page by page.
#define UZONE_NODE_INTERLEAVED 2

/// No block is handed out before all are registered, and none if one cannot be.
#define UZONE_POOL_ALL_OR_NOTHING 1

/// The pool lies in a memory file, to which another process attaches.
#define UZONE_POOL_SHARED 2

/// The function never waits: the thread that answers faults calls it for many pages at a time. Without this flag, threads
/// that may wait call it for a page at a time.
#define UZONE_READ_IS_QUICK 1

/// Frames are compressed with zstd.
#define UZONE_CODEC_ZSTD 0

/// Frames are compressed with LZ4.
#define UZONE_CODEC_LZ4 1

/// Frames are stored as they are.
#define UZONE_CODEC_NONE 2

/// Memory whose pages are read when they are touched first.
typedef struct uzone_lazy uzone_lazy;

/// A pool of host memory, or the view of another process's pool.
typedef struct uzone_pool uzone_pool;

/// Memory. It is bound to a zone for as long as its pages are to be pinned.
typedef struct uzone_region uzone_region;

/// A set of regions whose pages are pinned by address.
typedef struct uzone_zone uzone_zone;

/// A function that registers memory with a device. Threads of the pool call it, and threads that take blocks, one at a time
/// but with UZONE_START_ON_DEMAND. The pages are present. It returns 0, or a negative errno; nothing is registered then.
typedef int (*uzone_register_function)(void *user, void *address, uint64_t len_bytes);

/// A function that ends the registration that began at `address`. It returns 0, or a negative errno: then the device may
/// still use the memory, so that it stays mapped for as long as the process.
typedef int (*uzone_unregister_function)(void *user, void *address);

/// How a pool is made.
typedef struct uzone_pool_options {
    /// The size of this structure.
    size_t size;
    /// The bytes of a block, a multiple of a page; 0 is 2 MiB.
    uint64_t block_bytes;
    /// The bytes of a page: 0 for transparent huge pages as far as the host has them, the page size of the host for small
    /// pages, and otherwise the size of pages of the host's hugetlb pool, which are reserved now.
    uint64_t page_bytes;
    /// The most bytes that are registered at a time; 0 is 64 MiB. A run of blocks inside one piece is one registration.
    uint64_t piece_bytes;
    /// The microseconds between two registrations, in which other threads use the driver; 0 is a tenth of the time that
    /// the last one took.
    uint64_t pause_us;
    /// UZONE_REGISTER_NONE, UZONE_REGISTER_CUDA, UZONE_REGISTER_HIP or UZONE_REGISTER_MLOCK.
    uint32_t registration;
    /// UZONE_START_BACKGROUND, UZONE_START_EAGER or UZONE_START_ON_DEMAND.
    uint32_t start;
    /// UZONE_CLEAR_AHEAD, UZONE_CLEAR_ON_TAKE, UZONE_CLEAR_ON_RELEASE or UZONE_CLEAR_NEVER.
    uint32_t clear;
    /// UZONE_NODE_ANY, UZONE_NODE_ONE or UZONE_NODE_INTERLEAVED.
    uint32_t place;
    /// The number of the NUMA node, with UZONE_NODE_ONE.
    uint32_t node;
    /// UZONE_POOL_ALL_OR_NOTHING and UZONE_POOL_SHARED, or 0.
    uint32_t flags;
    /// With UZONE_REGISTER_NONE: the caller's functions, both or none. They may be called until uzone_pool_close() returns.
    uzone_register_function register_memory;
    /// As `register_memory`.
    uzone_unregister_function unregister_memory;
    /// The first argument of both functions.
    void *user;
} uzone_pool_options;

/// Blocks in a row that were handed out. This structure never changes.
typedef struct uzone_block {
    /// The address of the first byte.
    void *address;
    /// The bytes of all of them.
    uint64_t len_bytes;
    /// The number of the first block in its pool.
    uint64_t number;
    /// How many blocks there are.
    uint64_t count;
} uzone_block;

/// Numbers of a pool. Times count from the opening of the pool.
typedef struct uzone_pool_stats {
    /// The size of this structure, which the caller sets.
    size_t size;
    /// The address of the pool: block `n` starts `n * block_bytes` behind it.
    void *address;
    /// The bytes of the pool.
    uint64_t len_bytes;
    /// The bytes of a block.
    uint64_t block_bytes;
    /// How many blocks there are.
    uint64_t blocks;
    /// The bytes that are present and registered, handed out or not.
    uint64_t ready_bytes;
    /// The bytes in huge pages; 0 before all are present.
    uint64_t huge_bytes;
    /// The bytes in small pages; 0 before all are present.
    uint64_t small_bytes;
    /// How many blocks are handed out. This number and the next seven are 0 for the view of another process's pool.
    uint64_t used;
    /// How many are free and zero.
    uint64_t zero;
    /// How many are free and have to be cleared or made present.
    uint64_t dirty;
    /// How many are being made ready or cleared.
    uint64_t in_work;
    /// How many are bad, and never handed out.
    uint64_t bad;
    /// How many were cleared ahead of need.
    uint64_t cleared_ahead;
    /// How many a taker cleared.
    uint64_t cleared_on_take;
    /// How many were cleared when they were given back.
    uint64_t cleared_on_release;
    /// How many registrations there are.
    uint64_t pieces;
    /// How long memory was made present.
    uint64_t populating_ns;
    /// How long all registrations took, without pauses.
    uint64_t registering_ns;
    /// How long the longest registration took.
    uint64_t longest_piece_ns;
    /// When the first block was ready; 0 before.
    uint64_t first_ready_ns;
    /// When all blocks were ready; 0 before.
    uint64_t all_ready_ns;
    /// The NUMA node that most of the memory is on; -1 if that is not known.
    int64_t node;
    /// Whether the process that opened the pool is alive.
    uint64_t is_owner_alive;
} uzone_pool_stats;

/// How memory is mapped lazily.
typedef struct uzone_lazy_options {
    /// The size of this structure.
    size_t size;
    /// The zone in which pages of the memory are pinned by address; NULL for none.
    const struct uzone_zone *zone;
    /// Of images alone: the root hash that it must have, 64 hexadecimal digits; NULL for any. It makes the bytes authentic:
    /// without it, damage is found and forgery is not.
    const char *root;
    /// The most milliseconds that reading a page may take, after which the page is bad; 0 for no limit.
    uint32_t deadline_ms;
    /// Of functions alone: UZONE_READ_IS_QUICK or 0.
    uint32_t flags;
} uzone_lazy_options;

/// A function that fills `len_bytes` at `bytes`, whole pages, with the content from `offset_bytes` on. Several threads of
/// the library call it, until the memory is closed. It must not touch lazily mapped memory, nor wait for a thread that does.
/// It returns 0 or a negative errno; then the page is bad.
typedef int (*uzone_read_function)(void *user, uint64_t offset_bytes, void *bytes, size_t len_bytes);

/// A function that receives how many of `total_bytes` are done. The thread that made the call runs it, about 20 times a
/// second and once at the end. It returns 0 to go on; a negative errno ends the call, which returns it.
typedef int (*uzone_progress_function)(void *user, uint64_t done_bytes, uint64_t total_bytes);

/// Numbers of lazily mapped memory, from its start. Pages are counted, not bytes.
typedef struct uzone_lazy_stats {
    /// The size of this structure, which the caller sets.
    size_t size;
    /// The bytes of a page.
    uint64_t page_bytes;
    /// Page faults that were answered.
    uint64_t faults;
    /// Pages that a thread waited for.
    uint64_t on_demand;
    /// Pages that came along with those.
    uint64_t around;
    /// Pages that uzone_lazy_populate() made present.
    uint64_t populated;
    /// Pages that were given back.
    uint64_t evicted;
    /// Pages that are bad.
    uint64_t bad;
} uzone_lazy_stats;

/// How an image is written.
typedef struct uzone_pack_options {
    /// The size of this structure.
    size_t size;
    /// UZONE_CODEC_ZSTD, UZONE_CODEC_LZ4 or UZONE_CODEC_NONE.
    uint32_t codec;
    /// How hard to compress: 1 to 22 for zstd, 1 to 12 for LZ4; 0 is 3 for zstd, and the fastest for LZ4.
    int32_t level;
    /// The bytes that are compressed together: a power of two from 4 KiB to 16 MiB; 0 is 64 KiB.
    uint64_t frame_bytes;
    /// An image whose frames are not stored again, and which has to stay where it is; NULL for none.
    const char *parent;
    /// A function that is called meanwhile, or NULL.
    uzone_progress_function progress;
    /// The first argument of `progress`.
    void *user;
} uzone_pack_options;

/// An image that was written.
typedef struct uzone_packed {
    /// The size of this structure, which the caller sets.
    size_t size;
    /// The bytes of the image.
    uint64_t image_bytes;
    /// The bytes of the file.
    uint64_t file_bytes;
    /// The pages of zeroes, which are not stored.
    uint64_t zero_pages;
    /// The root hash: 64 hexadecimal digits, and a zero behind them.
    char root[72];
} uzone_packed;

/// How a region is bound.
typedef struct uzone_bind_options {
    /// The size of this structure.
    size_t size;
    /// The bytes of a folio, which is pinned and cleared as one: a power of two from a page on; 0 is a page.
    uint64_t folio_bytes;
} uzone_bind_options;

/// Numbers of a region.
typedef struct uzone_region_stats {
    /// The size of this structure, which the caller sets.
    size_t size;
    /// The bytes that have memory of the kernel now.
    uint64_t resident_bytes;
    /// The part of `resident_bytes` in huge pages.
    uint64_t huge_bytes;
    /// The bytes of a page.
    uint64_t page_bytes;
    /// The bytes of the descriptors of its pages; 0 for a region that is not bound.
    uint64_t descriptor_bytes;
} uzone_region_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns the text of the last error of the calling thread: the function, the resource, the cause, and the remedy where
/// there is one; an empty text before the first. The text is valid until the next call of the thread that fails. Never
/// NULL.
const char *uzone_last_error(void);

/// Makes an empty zone. Costs a few microseconds.
int uzone_zone_open(struct uzone_zone **zone);

/// Closes a zone. Regions that are bound in it stay bound, and pins stay.
void uzone_zone_close(struct uzone_zone *zone);

/// Pins the pages that `len_bytes` from `address` on have a part of, in whichever regions of the zone they lie: until
/// uzone_unpin() they are not unbound, cleared or given back. Pages that are not present, as of lazily mapped memory, are
/// read first, and the call waits for them. A pin holds off this library's own calls; the kernel may still migrate a page or
/// swap it out.
///
/// `token` becomes a number that names the pin, never 0.
///
/// Costs some atomic steps for each region and for each 512 pages, or for each folio; no memory is allocated.
///
/// Errors: -ENOENT if no region of the zone has an address, -EBUSY if a page is being cleared or its region is being
/// unbound, -EHWPOISON if a page is bad, -EINVAL. Then no page is pinned.
int uzone_pin(const struct uzone_zone *zone,
              const void *address,
              uint64_t len_bytes,
              uint64_t *token);

/// Gives the pin of a token back. Any thread may do so. Costs a few atomic steps.
///
/// Errors: -EINVAL for a token that was given back before, or that no pin has. Then nothing changes.
int uzone_unpin(uint64_t token);

/// Opens a pool of as many whole blocks as fit into `len_bytes`. Returns in milliseconds at any size, but with
/// UZONE_START_EAGER: threads make the memory present, and one registers it behind them, in pieces with pauses.
///
/// A driver registers in the context that is current on the calling thread: the caller makes one before. A process that is
/// forked off has no part of the pool. `options` may be NULL.
///
/// Errors: -ENOMEM with the numbers if the host has less memory; -ENOTSUP if there is no driver, or no context of it;
/// -EINVAL for options that do not go together; with UZONE_START_EAGER also the error that `register_memory` returned.
int uzone_pool_open(uint64_t len_bytes,
                    const struct uzone_pool_options *options,
                    struct uzone_pool **pool);

/// Maps the pool of another process, by its memory file (uzone_pool_file()), of which a descriptor was passed. The view is
/// registered as `options` say, and has blocks of the owner's size. The descriptor stays the caller's.
///
/// The owner hands blocks out and tells their numbers: block `n` starts `n * block_bytes` behind the address of the view
/// (uzone_pool_read_stats()). Blocks have no owner any more when the owning process has ended.
///
/// Errors: -EBADF, -ESRCH if there is no process `owner`, and as for uzone_pool_open().
int uzone_pool_attach(int file,
                      int owner,
                      const struct uzone_pool_options *options,
                      struct uzone_pool **pool);

/// Closes a pool: all of its blocks end with it, and its memory is unregistered and unmapped. Waits for the threads of the
/// pool. No other call uses the pool meanwhile or afterwards. NULL is no pool.
///
/// Errors: -EIO if memory could not be unregistered. It stays mapped, since a device may use it; the pool is closed.
int uzone_pool_close(struct uzone_pool *pool);

/// Returns the descriptor of the memory file of a pool, to be passed to another process; it stays the pool's.
///
/// Errors: -ENOTSUP without UZONE_POOL_SHARED.
int uzone_pool_file(const struct uzone_pool *pool);

/// Takes `count` blocks in a row that are ready, every byte of them zero (but with UZONE_CLEAR_NEVER). Waits until blocks
/// are made ready or cleared, and not until some are given back: up to `timeout_ms` milliseconds, not at all for 0, and
/// without end for a negative number. Costs a lock and a few steps if one is ready and zero.
///
/// Errors: -ETIMEDOUT if not as many became ready in time, -ENOMEM if there are not as many free blocks in a row, -ENOTSUP
/// for the view of another process's pool, and the error that ended filling the pool, such as an error of `register_memory`.
int uzone_pool_take(const struct uzone_pool *pool,
                    size_t count,
                    int timeout_ms,
                    struct uzone_block *block);

/// Gives back blocks that uzone_pool_take() handed out, all of a run or some, by `number` and `count`; the other fields
/// are not read.
///
/// Errors: -EINVAL if one of them is free; then none is given back.
int uzone_pool_free(const struct uzone_pool *pool, const struct uzone_block *block);

/// Waits until `len_bytes` are present and registered, all of them for UINT64_MAX; `timeout_ms` is as for
/// uzone_pool_take().
///
/// Errors: -ETIMEDOUT if the time is up, or at once with UZONE_START_ON_DEMAND; the error that ended filling the pool.
int uzone_pool_wait_ready(const struct uzone_pool *pool, uint64_t len_bytes, int timeout_ms);

/// Fills in the numbers of a pool. The caller sets `stats->size`.
int uzone_pool_read_stats(const struct uzone_pool *pool, struct uzone_pool_stats *stats);

/// Writes a report of a pool as text: how much is ready, in which pages, how long it took, and why it is not better, a line
/// each. At most `size` bytes are written to `text`, a zero at the end among them, as by snprintf(3).
///
/// Returns the bytes of the whole report, without the zero, or a negative errno.
int uzone_pool_describe(const struct uzone_pool *pool,
                        char *text,
                        size_t size);

/// Opens an image, packed or raw, and maps it lazily: only its index is read. Each page is read, decoded and verified
/// when it is touched. A file that is no image is mapped as raw memory, unless `options` has a root hash.
///
/// The memory may be written to; writes stay in this process. A page that cannot be read, or does not match its hash,
/// raises SIGBUS in the thread that touches it, and a line on standard error names the file and the place;
/// uzone_lazy_populate() and uzone_image_verify() return an error instead. The first call installs a handler of SIGBUS,
/// which passes other signals on to the handler before it. A process that is forked off does not have the memory.
///
/// `options` may be NULL.
///
/// Errors: the errors of open(2); -EBADMSG if it is damaged or has another root hash; -EPERM or -ENOTSUP if this host has no
/// userfaultfd.
int uzone_image_open(const char *file,
                     const struct uzone_lazy_options *options,
                     struct uzone_lazy **memory);

/// Maps a file lazily, as long as it is now. Its bytes are copied when they are touched; writes stay in this process.
/// Faults, signals and processes are as for uzone_image_open(). `options` may be NULL.
///
/// Errors: the errors of open(2); -EPERM or -ENOTSUP if this host has no userfaultfd.
int uzone_lazy_open_file(const char *file, const struct uzone_lazy_options *options, struct uzone_lazy **memory);

/// Maps `len_bytes`, whole pages, of which `read` makes the content when they are touched; see uzone_read_function. `user`
/// is passed to it. Faults, signals and processes are as for uzone_image_open(). `options` may be NULL.
///
/// Errors: -EINVAL if `len_bytes` cuts a page; -EPERM or -ENOTSUP if this host has no userfaultfd.
int uzone_lazy_open_function(uint64_t len_bytes,
                             uzone_read_function read,
                             void *user,
                             const struct uzone_lazy_options *options,
                             struct uzone_lazy **memory);

/// Closes lazily mapped memory and unmaps it. Pages that are pinned keep it mapped, until the last pin is given back. No
/// thread may touch it. NULL is no memory.
void uzone_lazy_close(struct uzone_lazy *memory);

/// Returns the address of the first byte; NULL for no memory. It does not change.
void *uzone_lazy_address(const struct uzone_lazy *memory);

/// Returns the bytes of the image, file or function; 0 for no memory.
uint64_t uzone_lazy_len_bytes(const struct uzone_lazy *memory);

/// Makes a range of bytes present before it is touched, in whole pages: several threads read, decode and verify it.
/// `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -EBADMSG if bytes do not match their hash, the errors of read(2), the error that the read function or `progress`
/// returned, -EHWPOISON if a page is bad, -EINVAL if the range is not inside.
int uzone_lazy_populate(const struct uzone_lazy *memory,
                        uint64_t offset_bytes,
                        uint64_t len_bytes,
                        uzone_progress_function progress,
                        void *user);

/// Gives the memory of a range of bytes back; its pages are read again when they are touched. Writes to them are lost. Only
/// pages that are inside as a whole are given back, and none that is pinned.
///
/// `evicted_bytes` becomes the bytes that were given back; it may be NULL.
int uzone_lazy_evict(const struct uzone_lazy *memory,
                     uint64_t offset_bytes,
                     uint64_t len_bytes,
                     uint64_t *evicted_bytes);

/// Fills in the numbers of lazily mapped memory. The caller sets `stats->size`.
int uzone_lazy_read_stats(const struct uzone_lazy *memory, struct uzone_lazy_stats *stats);

/// Returns the root hash of an image, 64 hexadecimal digits; NULL for other memory. It is valid until the memory is closed.
const char *uzone_image_root(const struct uzone_lazy *memory);

/// Reads bytes of an image and checks them against their hashes, by several threads. No page becomes present.
/// `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -EBADMSG if bytes do not match their hash, the errors of read(2), the error that `progress` returned, -ENOTSUP for
/// memory without hashes, -EINVAL if the range is not inside.
int uzone_image_verify(const struct uzone_lazy *memory,
                       uint64_t offset_bytes,
                       uint64_t len_bytes,
                       uzone_progress_function progress,
                       void *user);

/// Writes a file as an image: compressed, with a hash of each frame, and seekable. The image has its name when all of it is
/// on the device; one that is there is replaced as a whole, and stays if the call fails.
///
/// `options` may be NULL, and so may `packed`; otherwise the caller sets `packed->size`.
///
/// Errors: the errors of open(2), read(2) and write(2), -EINVAL for options that do not go together, the error that `progress`
/// returned.
int uzone_pack(const char *source,
               const char *image,
               const struct uzone_pack_options *options,
               struct uzone_packed *packed);

/// Writes `len_bytes` of memory as an image, as uzone_pack() does. No thread writes to the memory meanwhile.
int uzone_pack_memory(const void *bytes,
                      size_t len_bytes,
                      const char *image,
                      const struct uzone_pack_options *options,
                      struct uzone_packed *packed);

/// Writes the bytes of an image to a file. Zeroes are holes. A file that is there is replaced as a whole, and stays if the
/// call fails.
///
/// `root` is the root hash that the image must have, or NULL for any. `progress` may be NULL; see uzone_progress_function.
///
/// Errors: the errors of open(2), read(2) and write(2), -EBADMSG if the image is damaged or has another root hash, the error
/// that `progress` returned.
int uzone_unpack(const char *image,
                 const char *file,
                 const char *root,
                 uzone_progress_function progress,
                 void *user);

/// Reserves private memory, all zero. No memory is taken before a page is touched or populated, so `len_bytes` may be more
/// than the host has.
///
/// `page_bytes`: 0 for small pages, and huge ones as far as the host makes them; otherwise pages of the host's hugetlb pool
/// of this size, which are reserved now.
///
/// Errors: -ENOMEM if the pool or a limit is too small, -EINVAL if `len_bytes` is not a multiple of a page.
int uzone_region_open(uint64_t len_bytes,
                      uint64_t page_bytes,
                      struct uzone_region **region);

/// Maps `len_bytes` of a file from `offset_bytes` on. A write to the region is a write to the file.
///
/// Errors: the errors of open(2); -EINVAL if the file is too short, or `offset_bytes` or `len_bytes` cut a page.
int uzone_region_open_file(const char *file, uint64_t offset_bytes, uint64_t len_bytes, struct uzone_region **region);

/// Takes memory that the caller has mapped, readable and writable. It stays mapped until the region is closed, and is the
/// caller's to unmap afterwards.
///
/// Errors: -EINVAL if `address` or `len_bytes` cut a page.
int uzone_region_adopt(void *address,
                       uint64_t len_bytes,
                       struct uzone_region **region);

/// Closes a region and unmaps its memory, unless that was adopted. While pages of it are pinned, the memory stays mapped,
/// until the last of them is given back. NULL is no region.
void uzone_region_close(struct uzone_region *region);

/// Returns the address of the first byte; NULL for no region. It does not change.
void *uzone_region_address(const struct uzone_region *region);

/// Returns the bytes of a region; 0 for no region.
uint64_t uzone_region_len_bytes(const struct uzone_region *region);

/// Binds a region to a zone: each page has a descriptor, and can be pinned. Costs a few microseconds at any size.
///
/// `options` may be NULL. No other call uses the region meanwhile.
///
/// Errors: -EEXIST if the memory is bound already, -EINVAL if a folio does not fit. Then the region is as it was.
int uzone_region_bind(struct uzone_region *region,
                      const struct uzone_zone *zone,
                      const struct uzone_bind_options *options);

/// Ends the binding of a region, if no page of it is pinned; waits for pins up to `timeout_ms` milliseconds, without end
/// if that is negative. Meanwhile no page of it is pinned anew.
///
/// No other call uses the region meanwhile; uzone_unpin() may be called.
///
/// Errors: -EBUSY if pages are pinned still, with their number in the text; then the region is bound as it was. -EINVAL if
/// it is not bound.
int uzone_region_unbind(struct uzone_region *region,
                        int timeout_ms);

/// Makes a range of bytes present, in whole pages, by a thread for each CPU, and in huge pages as far as the host has them.
/// No byte changes. `progress` may be NULL; see uzone_progress_function.
///
/// Errors: -ENOMEM with the numbers if the host has less memory, before any is taken where that is known; -EINVAL if the
/// range is not inside the region; the error that `progress` returned.
int uzone_region_populate(const struct uzone_region *region,
                          uint64_t offset_bytes,
                          uint64_t len_bytes,
                          uzone_progress_function progress,
                          void *user);

/// Clears a range of bytes at the bandwidth of memory. In a region that is bound, the range is whole folios; folios
/// that are known to be zero or are pinned are left alone.
///
/// `cleared_bytes` becomes the bytes that were written; it may be NULL.
///
/// Errors: -EBUSY if pages are pinned, -EHWPOISON if one is bad; the others are cleared. -EINVAL if the range is not inside
/// the region or cuts a folio; then no byte is.
int uzone_region_clear(const struct uzone_region *region,
                       uint64_t offset_bytes,
                       uint64_t len_bytes,
                       uint64_t *cleared_bytes);

/// Fills in the numbers of a region. The caller sets `stats->size`. Costs a walk over the page tables of the region.
int uzone_region_read_stats(const struct uzone_region *region, struct uzone_region_stats *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* UZONE_H */
