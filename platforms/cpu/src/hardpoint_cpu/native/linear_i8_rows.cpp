#include "linear_i8_rows.h"

#include <bit>
#include <limits>

namespace hp::i8 {
namespace {

constexpr std::int32_t kInfinityBits = 0x7f800000;
// Below, the inverse of a row's scale would be infinite: such a row counts as zeros.
constexpr float kLeast = 0x1p-119f;
// Values that one thread quantizes while another one would only just wake up.
constexpr std::int64_t kGrain = 16 * 1024;

// Bits of magnitudes order as the magnitudes do, with infinity above all numbers and NaN above that.
std::int32_t largest_magnitude(const float* x, std::int64_t inputs) {
  std::int32_t most = 0;
  for (std::int64_t k = 0; k < inputs; ++k)
    most = std::max(most, std::bit_cast<std::int32_t>(x[k]) & std::numeric_limits<std::int32_t>::max());
  return most;
}

void round_row(const float* x, std::int64_t inputs, float inverse, Lanes::Input* q) {
  const vf factor = vf::set(inverse);
  std::int64_t k = 0;
  for (; k + vf::W <= inputs; k += vf::W) Lanes::store_rounded(vf::load(x + k) * factor, q + k);
  if (k == inputs) return;
  alignas(kAlignment) float rest[vf::W] = {};
  alignas(kAlignment) Lanes::Input rounded[vf::W];
  std::copy(x + k, x + inputs, rest);
  Lanes::store_rounded(vf::load(rest) * factor, rounded);
  std::copy(rounded, rounded + (inputs - k), q + k);
}

void quantize_row(const float* x, std::int64_t inputs, const Rows& into, std::int64_t row) {
  Lanes::Input* q = into.values + row * into.stride;
  const std::int32_t bits = largest_magnitude(x, inputs);
  const float most = std::bit_cast<float>(bits);
  into.starts[row] = 0;
  if (bits >= kInfinityBits || most < kLeast) {
    into.scales[row] = bits >= kInfinityBits ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    std::fill(q, q + into.stride, Lanes::Input{0});
    return;
  }
  into.scales[row] = most / 127.0f;
  round_row(x, inputs, 127.0f / most, q);
  std::fill(q + inputs, q + into.stride, Lanes::Input{0});
  if constexpr (kWeightOffset != 0) {
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < inputs; ++k) sum += q[k];
    into.starts[row] = -kWeightOffset * sum;
  }
}

}  // namespace

Rows quantize(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t inputs, std::int64_t stride,
              std::int64_t padded_rows, Pool& pool, Arena& arena) {
  const Rows made{arena.take<Lanes::Input>(padded_rows * stride), stride, arena.take<float>(padded_rows),
                  arena.take<std::int32_t>(padded_rows)};
  pool.ranges(rows, ceil_div(kGrain, inputs), [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t row = first; row < last; ++row) quantize_row(x + row * x_stride, inputs, made, row);
  });
  std::fill(made.values + rows * stride, made.values + padded_rows * stride, Lanes::Input{0});
  return made;
}

}  // namespace hp::i8
