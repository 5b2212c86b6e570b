// Eight-bit weights and activations (linear_i8.h), in panels of kPanel outputs as linear_i8_lanes.h lays them out.
#include "linear_i8.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "api.h"
#include "linear_i8_lanes.h"
#include "linear_i8_rows.h"
#include "linear_i8_tiles.h"

namespace hp {
namespace {

using i8::kPanel;
using i8::Lanes;
using Sums = Lanes::Sum[Lanes::kVectors];

constexpr std::int64_t kVectorBytes = vf::W * Lanes::kGroup;
constexpr std::int64_t kGroupBytes = Lanes::kVectors * kVectorBytes;
// Groups that a step of the inner loop takes where few rows need several chains of additions to keep it busy.
constexpr int kMostChains = 4;
#if defined(__AMX_INT8__)
constexpr std::int64_t kInputStep = i8::kTileInputs;
constexpr std::int64_t kPanelLines = kPanel * i8::kTileInputs / kAlignment;  // for each step over the inputs
constexpr std::int64_t kLeastTileRows = 8;  // measured: below, the vectors alone are faster
#else
constexpr std::int64_t kInputStep = Lanes::kGroup * kMostChains;
#endif
// Activations that one chunk reads over and over, so that they stay in a core's second-level cache.
constexpr std::int64_t kRowBytes = vf::W == 16 ? 1 << 20 : 256 << 10;
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kPackedAtOnce = 4;  // panels
// Rows for which a chunk takes long enough that waiting for the last one counts.
constexpr std::int64_t kManyRows = 64, kSmallChunksPerThread = 24;
constexpr std::int64_t kTileRows = 16;

// body(0), ..., body(N - 1), written out one after the other: sums stay in registers only so.
template <int N, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// sums[r][j] of R rows with one panel, from the rows' starts. `next` is what this thread will want after the panel.
template <int R>
[[gnu::always_inline]] inline void multiply(const i8::Rows& rows, std::int64_t first_row, const std::uint8_t* panel,
                                            const std::uint8_t* next, Lanes::Sum (&sums)[R][Lanes::kVectors]) {
  constexpr int kVectors = Lanes::kVectors;
  constexpr int kChains = R == 1 ? kMostChains : R == 2 ? 2 : 1;
  const std::int64_t stride = rows.stride;
  const std::uint8_t* const end = panel + stride * kPanel;
  const Lanes::Input* x = rows.values + first_row * stride;
  Lanes::Sum chains[kChains][R][kVectors];
  unrolled<kChains>([&](auto c) __attribute__((always_inline)) {
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
        chains[c][r][j] = Lanes::start(c == 0 ? rows.starts[first_row + r] : 0);
      });
    });
  });
  for (std::int64_t k = 0; k < stride; k += kChains * Lanes::kGroup) {
    unrolled<kChains>([&](auto c) __attribute__((always_inline)) {
      Lanes::Weights w[kVectors];
      const std::uint8_t* ahead = panel + kFetchAhead;
      if (ahead >= end) ahead = next + (ahead - end);
      for (std::int64_t line = 0; line < kGroupBytes; line += kAlignment) fetch(ahead + line);
      unrolled<kVectors>([&](auto j) __attribute__((always_inline)) { w[j] = Lanes::load(panel + j * kVectorBytes); });
      panel += kGroupBytes;
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const Lanes::Weights spread = Lanes::spread(x + r * stride + k + c * Lanes::kGroup);
        unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
          chains[c][r][j] = Lanes::dot(chains[c][r][j], w[j], spread);
        });
      });
    });
  }
  unrolled<R>([&](auto r) __attribute__((always_inline)) {
    unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
      sums[r][j] = chains[0][r][j];
      unrolled<kChains - 1>([&](auto c) __attribute__((always_inline)) {
        sums[r][j] = Lanes::add(sums[r][j], chains[c + 1][r][j]);
      });
    });
  });
}

struct Output {
  float* y;
  std::int64_t stride;
  Into into;
};

// What turns the sums of one panel into outputs; it stays in registers over the rows of a block.
struct Finish {
  vf scales[Lanes::kVectors], bias[Lanes::kVectors];
  float* y;
  std::int64_t stride, width;
  Into into;

  void operator()(const Sums& sums, float row_scale, std::int64_t row) const {
    float* target = y + row * stride;
    vf line[Lanes::kVectors];
    for (int j = 0; j < Lanes::kVectors; ++j)
      line[j] = i8::apart(Lanes::floats(sums[j]) * (vf::set(row_scale) * scales[j])) + bias[j];
    if (width < kPanel) return put_part(line, target);
    for (int j = 0; j < Lanes::kVectors; ++j) {
      if (into == Into::kAdd) line[j] = vf::load(target + j * vf::W) + line[j];
      line[j].store(target + j * vf::W);
    }
  }

  void put_part(const vf (&line)[Lanes::kVectors], float* target) const {
    alignas(kAlignment) float rest[kPanel];
    for (int j = 0; j < Lanes::kVectors; ++j) line[j].store(rest + j * vf::W);
    for (std::int64_t j = 0; j < width; ++j) target[j] = into == Into::kAdd ? target[j] + rest[j] : rest[j];
  }
};

class LinearI8 final : public Linear {
 public:
  LinearI8(const std::int8_t* values, std::int64_t stride, const float* scales, const float* bias,
           std::int64_t outputs, std::int64_t inputs, Pool& pool)
      : Linear(outputs, inputs), padded_(round_up(inputs, kInputStep)), panels_(ceil_div(outputs, kPanel)),
        weights_(panels_ * kPanel * padded_), scales_(panels_ * kPanel), bias_(panels_ * kPanel) {
    pool.ranges(panels_, kPackedAtOnce, [&](std::int64_t first, std::int64_t last, int) {
      std::memset(weights_.data() + first * kPanel * padded_, i8::kWeightOffset, (last - first) * kPanel * padded_);
      for (std::int64_t n = first * kPanel; n < last * kPanel; ++n) {
        scales_[n] = n < outputs ? scales[n] : 0.0f;
        bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
        if (n < outputs) pack(values + n * stride, n);
      }
    });
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena& arena) const override {
    const Arena::Scope scope(arena);
    const bool tiled = uses_tiles(rows);
    const std::int64_t padded_rows = tiled ? round_up(rows, kTileRows) : rows;
    const i8::Rows quantized = i8::quantize(x, x_stride, rows, inputs, padded_, padded_rows, pool, arena);
    const Output out{y, y_stride, into};
    const std::int64_t wanted = (rows < kManyRows ? kChunksPerThread : kSmallChunksPerThread) * pool.size();
    const std::int64_t width = std::max<std::int64_t>(1, panels_ / wanted), columns = ceil_div(panels_, width);
    const std::int64_t fitting = std::max<std::int64_t>(1, kRowBytes / (padded_ * std::int64_t{sizeof(Lanes::Input)}));
    const std::int64_t height = std::min(rows, round_up(fitting, 2 * kTileRows));
    pool.run(columns * ceil_div(rows, height), [&](std::int64_t chunk, int) {
      const std::int64_t panel = chunk % columns * width, row = chunk / columns * height;
      const std::int64_t end = std::min(panel + width, panels_), last = std::min(row + height, rows);
      // What this thread is likely to be given after these panels.
      const std::int64_t then = (chunk + pool.size()) % columns * width;
      if (tiled) return tiles(quantized, row, last, panel, end, then, out);
      for (std::int64_t p = panel; p < end; ++p) blocks(quantized, row, last, p, p + 1 < end ? p + 1 : then, out);
    });
  }

  std::int64_t bytes() const override {
    return weights_.size() + (scales_.size() + bias_.size()) * std::int64_t{sizeof(float)};
  }
  bool is_batch_invariant() const override { return true; }

 private:
  const std::uint8_t* panel(std::int64_t p) const { return weights_.data() + p * kPanel * padded_; }

  void pack(const std::int8_t* row, std::int64_t n) {
    std::uint8_t* target = weights_.data() + n / kPanel * kPanel * padded_ + n % kPanel * Lanes::kGroup;
    const auto put = [&](std::int64_t group, std::int64_t count) {
      for (std::int64_t k = 0; k < count; ++k)
        target[group * kGroupBytes + k] = static_cast<std::uint8_t>(row[group * Lanes::kGroup + k] + i8::kWeightOffset);
    };
    const std::int64_t whole = inputs / Lanes::kGroup;
    for (std::int64_t group = 0; group < whole; ++group) put(group, Lanes::kGroup);
    put(whole, inputs % Lanes::kGroup);
  }

#if defined(__AMX_INT8__)
  static bool uses_tiles(std::int64_t rows) { return rows >= kLeastTileRows && amx::is_allowed(); }

  void tiles(const i8::Rows& rows, std::int64_t first, std::int64_t last, std::int64_t begin, std::int64_t end,
             std::int64_t then, const Output& out) const {
    const amx::Tiles configured;
    const std::int64_t blocks = ceil_div(last - first, 2 * kTileRows), lines = ceil_div(kPanelLines, blocks);
    for (std::int64_t p = begin; p < end; ++p) {
      i8::Ahead ahead{panel(p + 1 < end ? p + 1 : then), lines};
      for (std::int64_t row = first; row < last; row += 2 * kTileRows) {
        if (row + kTileRows < last) {
          tile_block<2>(rows, row, last, p, ahead, out);
        } else {
          tile_block<1>(rows, row, last, p, ahead, out);
        }
        ahead.weights += lines * kAlignment * (padded_ / i8::kTileInputs);
      }
    }
  }

  template <int R>
  void tile_block(const i8::Rows& rows, std::int64_t first, std::int64_t last, std::int64_t p, const i8::Ahead& ahead,
                  const Output& out) const {
    alignas(kAlignment) std::int32_t sums[R * kTileRows * kPanel];
    i8::multiply_tiles<R>(rows.values + first * rows.stride, rows.stride, panel(p), padded_, ahead, sums);
    const std::int64_t height = std::min(R * kTileRows, last - first);
    const Finish finish = this->finish(p, out);
    for (std::int64_t r = 0; r < height; ++r) {
      Sums line;
      const Lanes::Sum start = Lanes::start(rows.starts[first + r]);
      for (int j = 0; j < Lanes::kVectors; ++j)
        line[j] = Lanes::add(Lanes::load_sum(sums + r * kPanel + j * vf::W), start);
      finish(line, rows.scales[first + r], first + r);
    }
  }
#else
  static bool uses_tiles(std::int64_t) { return false; }
  void tiles(const i8::Rows&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
             const Output&) const {}
#endif

  // Rows in blocks of nearly equal height, so that the last one is not a lonely row.
  void blocks(const i8::Rows& rows, std::int64_t first, std::int64_t last, std::int64_t p, std::int64_t next,
              const Output& out) const {
    for (std::int64_t left = ceil_div(last - first, Lanes::kRows); left > 0; --left) {
      const std::int64_t height = ceil_div(last - first, left);
      block<Lanes::kRows>(height, rows, first, p, next, out);
      first += height;
    }
  }

  template <int R>
  void block(std::int64_t height, const i8::Rows& rows, std::int64_t first, std::int64_t p, std::int64_t next,
             const Output& out) const {
    if constexpr (R > 1) {
      if (height < R) return block<R - 1>(height, rows, first, p, next, out);
    }
    Lanes::Sum sums[R][Lanes::kVectors];
    multiply<R>(rows, first, panel(p), panel(next), sums);
    const Finish finish = this->finish(p, out);
    for (int r = 0; r < R; ++r) finish(sums[r], rows.scales[first + r], first + r);
  }

  Finish finish(std::int64_t p, const Output& out) const {
    const std::int64_t first = p * kPanel;
    Finish made{{}, {}, out.y + first, out.stride, std::min(kPanel, outputs - first), out.into};
    for (int j = 0; j < Lanes::kVectors; ++j) {
      made.scales[j] = vf::load(scales_.data() + first + j * vf::W);
      made.bias[j] = vf::load(bias_.data() + first + j * vf::W);
    }
    return made;
  }

  const std::int64_t padded_, panels_;
  Buffer<std::uint8_t> weights_;
  Buffer<float> scales_, bias_;
};

}  // namespace

void check_int8_weights(std::int64_t stride, const float* scales, std::int64_t outputs, std::int64_t inputs) {
  require(inputs <= kMostInt8Inputs, "a layer of ", inputs, " inputs with eight-bit weights; allowed: at most ",
          kMostInt8Inputs);
  require(stride >= inputs, "rows of ", inputs, " weights cannot be ", stride, " apart");
  for (std::int64_t n = 0; n < outputs; ++n)
    require(std::isfinite(scales[n]), "the scale of output ", n, " is ", scales[n], ", not a finite number");
}

std::unique_ptr<Linear> make_linear_i8(const std::int8_t* values, std::int64_t stride, const float* scales,
                                       const float* bias, std::int64_t outputs, std::int64_t inputs, Pool& pool) {
  check_int8_weights(stride, scales, outputs, inputs);
  return std::make_unique<LinearI8>(values, stride, scales, bias, outputs, inputs, pool);
}

}  // namespace hp

HP_EXPORT int hp_linear_i8(hp::Runtime* runtime, const std::int8_t* values, std::int64_t stride, const float* scales,
                           const float* bias, std::int64_t outputs, std::int64_t inputs, int float_activations,
                           hp::Linear** made) {
  return hp::guarded(runtime, [&] {
    const auto make = float_activations ? hp::make_linear_i8_float : hp::make_linear_i8;
    *made = make(values, stride, scales, bias, outputs, inputs, runtime->pool).release();
  });
}
