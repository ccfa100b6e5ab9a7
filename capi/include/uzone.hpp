// uzone.hpp: the handles of uzone.h as values of C++17, which close themselves and throw uzone::error.
//
// Everything else is in uzone.h: a value converts to its handle, so that each function takes it.

#ifndef UZONE_HPP
#define UZONE_HPP

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "uzone.h"

namespace uzone {

/// An error of a call: `code()` is the negative errno that it returned, and `what()` the text of the library.
class error : public std::runtime_error {
  public:
    explicit error(int code) : std::runtime_error(uzone_last_error()), code_(code) {}
    int code() const noexcept { return code_; }

  private:
    int code_;
};

/// Returns the result of a function of uzone.h, or throws its error.
inline int check(int code) {
    if (code < 0) {
        throw error(code);
    }
    return code;
}

/// A handle that is closed at the end of its life, and can be moved.
template <typename T, auto Close>
class handle {
  public:
    using type = T;
    handle() = default;
    explicit handle(T *owned) noexcept : owned_(owned) {}
    handle(handle &&other) noexcept : owned_(std::exchange(other.owned_, nullptr)) {}
    handle &operator=(handle &&other) noexcept {
        handle(std::move(other)).swap(*this);
        return *this;
    }
    ~handle() { Close(owned_); }
    void swap(handle &other) noexcept { std::swap(owned_, other.owned_); }
    operator T *() const noexcept { return owned_; }

  private:
    T *owned_ = nullptr;
};

using zone = handle<uzone_zone, uzone_zone_close>;
using region = handle<uzone_region, uzone_region_close>;
using lazy = handle<uzone_lazy, uzone_lazy_close>;
using pool = handle<uzone_pool, uzone_pool_close>;

/// Returns a structure of uzone.h with its size, and defaults else.
template <typename T>
T sized() {
    T structure{};
    structure.size = sizeof(T);
    return structure;
}

/// Returns the value that a function which opens something makes: `open<uzone::zone>(uzone_zone_open)`,
/// `open<uzone::region>(uzone_region_open, len_bytes, 0)`.
template <typename Handle, typename Function, typename... Arguments>
Handle open(Function function, Arguments... arguments) {
    typename Handle::type *opened = nullptr;
    check(function(arguments..., &opened));
    return Handle(opened);
}

/// Blocks of a pool, which go back to it at the end of their life.
class block {
  public:
    block(uzone_pool *pool, std::size_t count, int timeout_ms) : pool_(pool) {
        check(uzone_pool_take(pool, count, timeout_ms, &block_));
    }
    block(block &&other) noexcept : pool_(std::exchange(other.pool_, nullptr)), block_(other.block_) {}
    block &operator=(block &&) = delete;
    ~block() {
        if (pool_ != nullptr) {
            uzone_pool_free(pool_, &block_);
        }
    }
    const uzone_block *operator->() const noexcept { return &block_; }

  private:
    uzone_pool *pool_;
    uzone_block block_{};
};

/// A pin, which ends with its life.
class pin {
  public:
    pin(const uzone_zone *zone, const void *address, std::uint64_t len_bytes) {
        check(uzone_pin(zone, address, len_bytes, &token_));
    }
    pin(pin &&other) noexcept : token_(std::exchange(other.token_, 0)) {}
    pin &operator=(pin &&) = delete;
    ~pin() {
        if (token_ != 0) {
            uzone_unpin(token_);
        }
    }

  private:
    std::uint64_t token_ = 0;
};

}  // namespace uzone

#endif  // UZONE_HPP
