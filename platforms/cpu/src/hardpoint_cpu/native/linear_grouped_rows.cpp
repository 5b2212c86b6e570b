#include "linear_grouped_rows.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "linear_grouped_format.h"

namespace hp::grouped {
namespace {

constexpr int kVectors = kGroup / vf::W;
constexpr float kLargest = 127.0f;
constexpr float kLeast = 1e-30f;  // below, the inverse of a scale would overflow: such groups count as zeros
constexpr std::int64_t kAlone = 1 << 14;  // inputs that are not worth waking others for

struct Group {
  float scale;
  std::int32_t sums[2];
};

#if defined(__AVX512F__)
Group quantize(const float* x, std::int8_t* values) {
  const __m512 parts[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i bits = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(parts[0]), mask),
                                        _mm512_and_si512(_mm512_castps_si512(parts[1]), mask));
  const std::int32_t best = _mm512_reduce_max_epi32(bits);
  float most;
  std::memcpy(&most, &best, sizeof(most));
  const bool usable = most >= kLeast && std::isfinite(most);
  const __m512 inverse = _mm512_set1_ps(usable ? kLargest / most : 0.0f);
  Group made{std::isfinite(most) ? (usable ? most / kLargest : 0.0f) : std::numeric_limits<float>::quiet_NaN(), {0, 0}};
  for (int part = 0; part < 2; ++part) {
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(parts[part], inverse));
    if (!usable) rounded = _mm512_setzero_si512();
    made.sums[part] = _mm512_reduce_add_epi32(rounded);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16 * part), _mm512_cvtepi32_epi8(rounded));
  }
  return made;
}
#else
// The largest magnitude, by the bits: those of what is not finite are the largest of all.
float largest_magnitude(const float* x) {
  std::uint32_t best = 0;
  for (int i = 0; i < kGroup; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    best = std::max(best, bits & 0x7fffffffu);
  }
  float value;
  std::memcpy(&value, &best, sizeof(value));
  return value;
}

Group quantize(const float* x, std::int8_t* values) {
  const float most = largest_magnitude(x);
  if (!std::isfinite(most) || most < kLeast) {
    std::memset(values, 0, kGroup);
    return {std::isfinite(most) ? 0.0f : std::numeric_limits<float>::quiet_NaN(), {0, 0}};
  }
  const vf inverse = vf::set(kLargest / most);
  alignas(kAlignment) float rounded[kGroup];
  for (int j = 0; j < kVectors; ++j) round(vf::load(x + j * vf::W) * inverse).store(rounded + j * vf::W);
  Group made{most / kLargest, {0, 0}};
  for (int i = 0; i < kGroup; ++i) {
    values[i] = static_cast<std::int8_t>(rounded[i]);
    made.sums[i / 16] += values[i];
  }
  return made;
}
#endif

}  // namespace

QuantizedRows quantize_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t inputs, Pool& pool,
                            Arena& arena) {
  const std::int64_t groups = inputs / kGroup, tile = std::min(rows, kRowTile), lines = round_up(rows, tile) * groups;
  const QuantizedRows made{rows,
                           groups,
                           tile,
                           arena.take<std::int8_t>(lines * kGroup),
                           arena.take<float>(lines),
                           arena.take<float>(lines),
                           arena.take<float>(lines * 2)};
  const auto work = [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t row = first; row < last; ++row)
      for (std::int64_t group = 0; group < groups; ++group) {
        const std::int64_t line = made.line(row, group);
        const Group result = quantize(x + row * x_stride + group * kGroup, made.values + line * kGroup);
        float* halves = made.half_sums + 2 * made.line(row - row % tile, group) + row % tile;
        made.scales[line] = result.scale;
        made.sums[line] = result.scale * static_cast<float>(result.sums[0] + result.sums[1]);
        halves[0] = result.scale * static_cast<float>(result.sums[0]);
        halves[tile] = result.scale * static_cast<float>(result.sums[1]);
      }
  };
  if (rows * inputs <= kAlone) {
    work(0, rows, 0);
  } else {
    pool.ranges(rows, 1, work);
  }
  return made;
}

}  // namespace hp::grouped
