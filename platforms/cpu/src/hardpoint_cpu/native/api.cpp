#include "api.h"

namespace hp {
namespace {
thread_local std::string last_error;
}
void set_error(const std::string& text) { last_error = text; }
}  // namespace hp

HP_EXPORT const char* hp_last_error() { return hp::last_error.c_str(); }

// ISA level this library was compiled for; see build.py.
HP_EXPORT const char* hp_isa() { return HP_ISA; }

HP_EXPORT int hp_runtime_create(int threads, const int* cores, int num_cores, std::int64_t spin_us, hp::Runtime** made) {
  return hp::guarded(
      [&] { *made = new hp::Runtime(threads, std::vector<int>(cores, cores + num_cores), spin_us); });
}

HP_EXPORT void hp_runtime_destroy(hp::Runtime* runtime) { delete runtime; }

HP_EXPORT int hp_linear_run(hp::Runtime* runtime, const hp::Linear* linear, const float* x, std::int64_t x_stride,
                            std::int64_t rows, float* y, std::int64_t y_stride, int adds) {
  return hp::guarded(runtime, [&] {
    hp::require(linear != nullptr, "a layer that is part of another one now");
    hp::require(rows >= 0 && x_stride >= linear->inputs && y_stride >= linear->outputs, "rows ", rows, " of strides ",
                x_stride, " and ", y_stride, " do not fit a layer of ", linear->inputs, " inputs and ", linear->outputs,
                " outputs");
    if (rows == 0) return;
    linear->run(x, x_stride, rows, y, y_stride, adds ? hp::Into::kAdd : hp::Into::kStore, runtime->pool, runtime->arena);
  });
}

HP_EXPORT std::int64_t hp_linear_bytes(const hp::Linear* linear) { return linear->bytes(); }
HP_EXPORT int hp_linear_is_batch_invariant(const hp::Linear* linear) { return linear->is_batch_invariant(); }
HP_EXPORT void hp_linear_destroy(hp::Linear* linear) { delete linear; }
