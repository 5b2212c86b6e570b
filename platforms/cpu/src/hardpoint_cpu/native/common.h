// What every kernel file uses: checks that become exceptions, memory, and the interface of a linear layer.
//
// Nothing here or in the kernels knows Python or torch: arguments are plain pointers, and the functions at the edge
// (HP_EXPORT, api.h) turn exceptions into a status and a message.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define HP_EXPORT extern "C" __attribute__((visibility("default")))

namespace hp {

inline constexpr std::size_t kAlignment = 64;  // of a cache line, and of the widest vector

// How far ahead of its use a packed weight is asked for: what memory delivers meanwhile.
inline constexpr std::int64_t kFetchAhead = 4096;

// Ask for the line at `at`, into the second level: the first has too few places for all that is under way.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) fail(parts...);
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Memory of many megabytes in pages of two, where the system has them: reading weights from those is faster by a
// seventh. Buffers share a slab and hold it; it goes when the last of them does.
class Slab;

struct FreeBuffer {
  std::shared_ptr<Slab> slab;  // none: from the heap
  void operator()(void* pointer) const {
    if (!slab) std::free(pointer);
  }
};

inline constexpr std::size_t kSlabThreshold = 512 << 10;
void* take_from_slab(std::size_t bytes, FreeBuffer& owner);

// Owned, aligned, not initialized.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t count) : size_(count) {
    const std::size_t bytes = round_up(std::max<std::int64_t>(count, 1) * std::int64_t{sizeof(T)}, kAlignment);
    FreeBuffer owner;
    void* place = bytes < kSlabThreshold ? std::aligned_alloc(kAlignment, bytes) : take_from_slab(bytes, owner);
    if (place == nullptr) throw std::bad_alloc();
    memory_ = std::unique_ptr<T, FreeBuffer>(static_cast<T*>(place), std::move(owner));
  }
  T* data() { return memory_.get(); }
  const T* data() const { return memory_.get(); }
  T& operator[](std::int64_t index) { return memory_.get()[index]; }
  const T& operator[](std::int64_t index) const { return memory_.get()[index]; }
  std::int64_t size() const { return size_; }

 private:
  std::unique_ptr<T, FreeBuffer> memory_;
  std::int64_t size_ = 0;
};

// Scratch of one call at a time: grows to what the largest call needed and is then only handed out again. What is taken
// is valid until the Scope it was taken in ends. Only the calling thread may take; kernels hand parts to their threads.
class Arena {
 public:
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), chunk_(arena.chunk_), used_(arena.used_) {}
    ~Scope() {
      arena_.chunk_ = chunk_;
      arena_.used_ = used_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    std::size_t chunk_;
    std::int64_t used_;
  };

  // Room for `count` values, aligned and not initialized.
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = round_up(std::max<std::int64_t>(count, 1) * std::int64_t{sizeof(T)}, kAlignment);
    while (chunk_ < chunks_.size() && used_ + bytes > chunks_[chunk_].size()) {
      ++chunk_;
      used_ = 0;
    }
    if (chunk_ == chunks_.size()) {
      chunks_.emplace_back(std::max(bytes, kLeastChunk));
      used_ = 0;
    }
    char* place = chunks_[chunk_].data() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(place);
  }

 private:
  static constexpr std::int64_t kLeastChunk = 1 << 20;
  std::vector<Buffer<char>> chunks_;
  std::size_t chunk_ = 0;
  std::int64_t used_ = 0;
};

class Pool;

// What becomes of a product: stored, or added to what lies there (a residual stream).
enum class Into { kStore, kAdd };

// y[m, n] = x[m, k] W^T + bias, with W [n, k] kept in whatever form the kernel likes best. Strides count elements.
// A row's result must not depend on `rows` where is_batch_invariant() says so.
class Linear {
 public:
  Linear(std::int64_t outputs, std::int64_t inputs) : outputs(outputs), inputs(inputs) {
    require(outputs > 0 && inputs > 0, "a linear layer of ", inputs, " inputs and ", outputs, " outputs is empty");
  }
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  virtual void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
                   Pool& pool, Arena& arena) const = 0;
  virtual std::int64_t bytes() const = 0;
  virtual bool is_batch_invariant() const = 0;

  const std::int64_t outputs, inputs;
};

}  // namespace hp
