#include "pool.h"

#include <pthread.h>
#include <sched.h>

namespace hp {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cores, std::int64_t spins) : spins_(spins) {
  require(threads >= 1, "a pool of ", threads, " threads");
  require(cores.empty() || cores.size() == static_cast<std::size_t>(threads), "a pool of ", threads, " threads on ",
          cores.size(), " named cores");
  for (int thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { serve(thread); });
    if (!cores.empty()) {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      CPU_SET(cores[thread], &mask);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof(mask), &mask);
    }
  }
}

Pool::~Pool() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::take_chunks(int thread) {
  for (;;) {
    const std::int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks_) return;
    body_(work_, chunk, thread);
  }
}

void Pool::dispatch(std::int64_t chunks, Body body, const void* work) {
  body_ = body;
  work_ = work;
  chunks_ = chunks;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  take_chunks(0);
  // Whoever still works holds at most one chunk; sleeping here would cost more than that.
  for (std::int64_t polls = 0; busy_.load(std::memory_order_acquire) != 0; ++polls) {
    if (polls < spins_) {
      relax();
    } else {
      sched_yield();
    }
  }
}

void Pool::serve(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    for (std::int64_t polls = 0; epoch_.load(std::memory_order_acquire) == seen; ++polls) {
      if (polls < spins_) {
        relax();
      } else {
        epoch_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;  // one dispatch at a time: the next one starts when this one is done
    if (stopping_.load()) return;
    take_chunks(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace hp
