// The edge to the caller in another language: a status instead of exceptions, and what one pool of threads shares.
#pragma once

#include <mutex>

#include "common.h"
#include "pool.h"

namespace hp {

// Everything that calls share. Calls of several threads take turns.
struct Runtime {
  Runtime(int threads, const std::vector<int>& cores, std::int64_t spin_us) : pool(threads, cores, spin_us) {}
  std::mutex turn;
  Pool pool;
  Arena arena;
};

void set_error(const std::string& text);

// 0, or 1 with the message kept for hp_last_error().
template <class Call>
int guarded(Call&& call) noexcept {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    set_error(error.what());
  } catch (...) {
    set_error("unknown failure in a native kernel");
  }
  return 1;
}

template <class Call>
int guarded(Runtime* runtime, Call&& call) noexcept {
  return guarded([&] {
    const std::lock_guard<std::mutex> lock(runtime->turn);
    const Arena::Scope scope(runtime->arena);
    call();
  });
}

}  // namespace hp
