// The one pool of threads that all kernels share. The caller works too; the others poll for a while and then sleep.
//
// Work is handed out in chunks from a counter, so that a thread which is held up by another process takes fewer, and
// one that does not even wake up in time takes none and is not waited for. What a chunk computes must not depend on who
// computes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "common.h"

namespace hp {

class Pool {
 public:
  // `threads` counts the caller. `cores`: the logical CPU of each thread, the caller's first; empty: not pinned.
  // `spin_us`: microseconds of polling for work before a thread sleeps.
  Pool(int threads, const std::vector<int>& cores, std::int64_t spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // work(chunk, thread) for chunks 0..chunks-1; returns when all are done. Never nested. `work` must not throw.
  template <class Work>
  void run(std::int64_t chunks, Work&& work) {
    if (chunks <= 1 || workers_.empty()) {
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk, 0);
      return;
    }
    using Body = std::remove_reference_t<Work>;
    dispatch(
        chunks, [](const void* body, std::int64_t chunk, int thread) { (*static_cast<const Body*>(body))(chunk, thread); },
        &work);
  }

  // The same over ranges: work(first, last, thread), in pieces of at least `grain` and about four per thread.
  template <class Work>
  void ranges(std::int64_t count, std::int64_t grain, Work&& work) {
    const std::int64_t pieces = std::max<std::int64_t>(1, std::min<std::int64_t>(count / std::max<std::int64_t>(grain, 1), 4 * size()));
    run(pieces, [&](std::int64_t piece, int thread) {
      work(count * piece / pieces, count * (piece + 1) / pieces, thread);
    });
  }

 private:
  using Body = void (*)(const void*, std::int64_t, int);
  void dispatch(std::int64_t chunks, Body body, const void* work);
  void serve(int thread);
  bool poll(std::uint32_t seen) const;
  void take_chunks(int thread);

  std::vector<std::thread> workers_;
  const std::int64_t spin_us_;
  // What is to be done. Written while `next_` hands nothing out; whoever then gets a chunk of `next_` read these whole.
  std::atomic<Body> body_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<std::int64_t> chunks_{0};
  // The number of the dispatch in the upper half, that of the next chunk in the lower: a thread that comes late for one
  // dispatch cannot take a chunk of another by mistake.
  alignas(kAlignment) std::atomic<std::uint64_t> next_{0};
  alignas(kAlignment) std::atomic<std::int64_t> done_{0};
  alignas(kAlignment) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace hp
