#include <sys/mman.h>

#include <mutex>

#include "common.h"

namespace hp {

class Slab {
 public:
  explicit Slab(std::size_t bytes) : mapped_(bytes + kHuge) {
    void* found = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(found);
    free_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::intptr_t>(found), kHuge));
    end_ = free_ + bytes;
    // Where huge pages are switched off, small ones do.
    madvise(free_, bytes, MADV_HUGEPAGE);
  }
  ~Slab() { munmap(base_, mapped_); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Null when there is no room.
  void* take(std::size_t bytes) {
    if (static_cast<std::size_t>(end_ - free_) < bytes) return nullptr;
    void* taken = free_;
    free_ += bytes;
    return taken;
  }

  static constexpr std::int64_t kHuge = 2 << 20;

 private:
  const std::size_t mapped_;
  char *base_, *free_, *end_;
};

namespace {

constexpr std::size_t kSlabBytes = 32 << 20;
std::mutex lock;
std::weak_ptr<Slab> current;

}  // namespace

void* take_from_slab(std::size_t bytes, FreeBuffer& owner) {
#if defined(__SANITIZE_ADDRESS__)
  // Each on its own, so that reading beyond one is seen.
  (void)owner;
  return std::aligned_alloc(kAlignment, bytes);
#else
  const std::lock_guard<std::mutex> guard(lock);
  owner.slab = current.lock();
  void* taken = owner.slab ? owner.slab->take(bytes) : nullptr;
  if (taken != nullptr) return taken;
  owner.slab = std::make_shared<Slab>(std::max<std::size_t>(kSlabBytes, round_up(bytes, Slab::kHuge)));
  if (bytes < kSlabBytes / 2) current = owner.slab;
  return owner.slab->take(bytes);
#endif
}

}  // namespace hp
