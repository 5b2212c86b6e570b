#include "linear_grouped.h"

#include "linear_grouped_kernel.h"

namespace hp::grouped {

GroupedLinear::GroupedLinear(std::int64_t outputs, std::int64_t inputs, Options options)
    : Linear(outputs, inputs), options_(options) {}

std::int64_t GroupedLinear::panels() const { return ceil_div(outputs, kPanel); }

Path GroupedLinear::path(std::int64_t) const { return options_.quantizes ? Path::kQuantized : Path::kFloats; }

Prepared GroupedLinear::prepare(const float* x, std::int64_t x_stride, std::int64_t rows, Pool& pool,
                                Arena& arena) const {
  Prepared made{path(rows), x, x_stride, rows, {}, nullptr, 0};
  if (made.path == Path::kQuantized) {
    made.quantized = quantize_rows(x, x_stride, rows, inputs, pool, arena);
  } else {
    made.scratch_stride = (rows > kMostRows ? inputs : kGroup) * kPanel;
    made.scratch = arena.take<float>(made.scratch_stride * pool.size());
  }
  return made;
}

void GroupedLinear::run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
                        Into into, Pool& pool, Arena& arena) const {
  const Arena::Scope scope(arena);
  const Prepared prepared = prepare(x, x_stride, rows, pool, arena);
  pool.ranges(panels(), 1, [&](std::int64_t first, std::int64_t last, int thread) {
    multiply(prepared, first, last, thread, y, y_stride, into);
  });
}

}  // namespace hp::grouped
