#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

namespace hp {
namespace {

constexpr std::uint64_t kNothing = 0xffffffff;  // of `next_`'s lower half: no chunk is to be had
constexpr int kPollsPerLook = 64;               // at the clock

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cores, std::int64_t spin_us) : spin_us_(spin_us) {
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
  std::uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const Body body = body_.load(std::memory_order_acquire);
    const void* work = work_.load(std::memory_order_acquire);
    const std::uint64_t chunk = next & kNothing;
    if (chunk >= static_cast<std::uint64_t>(chunks_.load(std::memory_order_acquire))) return;
    // Succeeds only where nothing was dispatched since `next` was read, so that body and work belong to the chunk.
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
    body(work, static_cast<std::int64_t>(chunk), thread);
    done_.fetch_add(1, std::memory_order_acq_rel);
    next = next_.load(std::memory_order_acquire);
  }
}

void Pool::dispatch(std::int64_t chunks, Body body, const void* work) {
  require(chunks < static_cast<std::int64_t>(kNothing), chunks, " chunks are more than a pool counts");
  const std::uint64_t number = ((next_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
  next_.store(number | kNothing);
  body_.store(body, std::memory_order_release);
  work_.store(work, std::memory_order_release);
  chunks_.store(chunks, std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  next_.store(number, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  take_chunks(0);
  // Whoever still works holds one chunk; sleeping here would cost more than that.
  for (std::int64_t polls = 0; done_.load(std::memory_order_acquire) != chunks; ++polls) {
    if (polls % kPollsPerLook != kPollsPerLook - 1) {
      relax();
    } else {
      sched_yield();
    }
  }
}

// Whether there is work after all before the time is up.
bool Pool::poll(std::uint32_t seen) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
  do {
    for (int polls = 0; polls < kPollsPerLook; ++polls) {
      if (epoch_.load(std::memory_order_acquire) != seen) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void Pool::serve(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    if (!poll(seen)) epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    take_chunks(thread);
  }
}

}  // namespace hp
