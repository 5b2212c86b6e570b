#include "linear_grouped.h"

#include <limits>

#include "linear_grouped_tiles.h"

namespace hp::grouped {
namespace {

#if defined(__AMX_BF16__)
void round_rows(Prepared& x, std::int64_t inputs, Pool& pool, Arena& arena) {
  const std::int64_t groups = inputs / kGroup, stride = round_up(x.rows, 2 * kTileRows);
  auto* target = arena.take<std::uint16_t>(groups * stride * kGroup);
  pool.ranges(stride, 8, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t row = first; row < last; ++row)
      for (std::int64_t group = 0; group < groups; ++group) {
        std::uint16_t* place = target + (group * stride + row) * kGroup;
        if (row < x.rows) {
          round_group(x.x + row * x.x_stride + group * kGroup, place);
        } else {
          std::memset(place, 0, kGroup * sizeof(*place));
        }
      }
  });
  x.bf16 = target;
  x.bf16_stride = stride;
}
#else
void round_rows(Prepared&, std::int64_t, Pool&, Arena&) {}
#endif

}  // namespace

GroupedLinear::GroupedLinear(std::int64_t outputs, std::int64_t inputs, Options options)
    : Linear(outputs, inputs), options_(options) {}

std::int64_t GroupedLinear::panels() const { return ceil_div(outputs, kPanel); }

Path GroupedLinear::path(std::int64_t rows) const {
  if (!options_.quantizes) return Path::kFloats;
  return rows >= kBf16Rows && !options_.invariant && may_use_tiles() ? Path::kBf16 : Path::kQuantized;
}

bool GroupedLinear::is_batch_invariant() const {
  return path(1) == path(std::numeric_limits<std::int64_t>::max());
}

Prepared GroupedLinear::prepare(const float* x, std::int64_t x_stride, std::int64_t rows, Pool& pool,
                                Arena& arena) const {
  Prepared made{path(rows), x, x_stride, rows, {}, nullptr, 0, nullptr, 0};
  // Of each thread: decoded weights of a few panels, or of one group.
  if (made.path == Path::kBf16) made.scratch_stride = inputs * kPanel;
  if (made.path == Path::kFloats) made.scratch_stride = rows > kMostRows ? inputs * kPanel * kWide : kGroup * kPanel;
  made.scratch = arena.take<float>(made.scratch_stride * pool.size());
  if (made.path == Path::kQuantized) made.quantized = quantize_rows(x, x_stride, rows, inputs, pool, arena);
  if (made.path == Path::kBf16) round_rows(made, inputs, pool, arena);
  return made;
}

void GroupedLinear::run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
                        Into into, Pool& pool, Arena& arena) const {
  const Arena::Scope scope(arena);
  const Prepared prepared = prepare(x, x_stride, rows, pool, arena);
  over_panels(prepared, panels(), pool, [&](std::int64_t first, std::int64_t last, int thread) {
    multiply(prepared, first, last, thread, y, y_stride, into);
  });
}

}  // namespace hp::grouped
