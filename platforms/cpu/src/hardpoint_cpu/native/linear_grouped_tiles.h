// Panels times many rows by the matrix unit. Two ways: whole numbers per group, which give the bits of the vector path,
// and bfloat16 weights and activations, which are several times as fast and round differently.
#pragma once

#include "amx.h"
#include "linear_grouped_kernel.h"

namespace hp::grouped {

inline constexpr std::int64_t kTileRows = 16;
inline constexpr std::int64_t kBf16Rows = 64;  // from here on decoding weights to bfloat16 pays

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
inline constexpr bool kHasTiles = true;
inline bool may_use_tiles() { return amx::is_allowed(); }

// Tile numbers must be literals. Of whole numbers: 0 sums, 1 rows, 2 weights.
template <class F>
class NumberTiles {
 public:
  NumberTiles() {
    amx::TileShapes shapes;
    shapes.row_bytes[1] = kGroup / F::kSubs;
    shapes.rows[2] = 8 / F::kSubs;
    _tile_loadconfig(&shapes);
  }
  ~NumberTiles() { _tile_release(); }
  NumberTiles(const NumberTiles&) = delete;
  NumberTiles& operator=(const NumberTiles&) = delete;
};

// The numbers of a panel as tiles want them, one byte each: those of eight bits lie so already.
template <class F>
const std::uint8_t* unpack_numbers(const Panel& panel, std::int64_t groups, std::uint8_t* scratch) {
  if constexpr (F::kBits == 8) return panel.numbers;
  for (std::int64_t group = 0; group < groups; ++group)
    unrolled<8>([&](auto step) __attribute__((always_inline)) {
      F::Numbers::template step<step>(panel.numbers + group * F::Numbers::kBytes, 0)
          .store(scratch + (group * 8 + step) * kStepBytes);
    });
  return scratch;
}

// Sixteen rows from `row` on. The additions are those of multiply_quantized.
template <class F>
void multiply_tiles(const Panel& panel, const std::uint8_t* numbers, const QuantizedRows& x, std::int64_t row,
                    vf (&sums)[kTileRows]) {
  alignas(kAlignment) std::int32_t dots[2][kTileRows][kPanel];
  over_groups<F>(panel, x.groups, [&](std::int64_t group, const GroupPlace& place) __attribute__((always_inline)) {
    const std::int8_t* values = x.values + (group * x.stride + row) * kGroup;
    const float* scales = x.scales + group * x.stride + row;
    unrolled<F::kSubs>([&](auto sub) __attribute__((always_inline)) {
      auto& lines = dots[(group + sub) % 2];
      _tile_zero(0);
      _tile_loadd(1, values + sub * (kGroup / F::kSubs), kGroup);
      _tile_loadd(2, numbers + (group * 8 + sub * (8 / F::kSubs)) * kStepBytes, kStepBytes);
      _tile_dpbsud(0, 1, 2);
      _tile_stored(0, lines, kStepBytes);
      const Scales of = F::scales(place.head, place.inner, sub, 0);
      const float* above = sums_at<F>(x, group, sub) + row;
      for (int r = 0; r < kTileRows; ++r) {
        sums[r] = fma(to_float(vi::load(lines[r])), of.scale * vf::set(scales[r]), sums[r]);
        sums[r] = fma(of.minimum, vf::set(above[r]), sums[r]);
      }
    });
  });
}

// Two vectors of floats as bfloat16, lane by lane: the first in the lower halves.
inline __m512i pair_up(vf first, vf second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
}

// A panel as bfloat16 tiles: [groups][16 pairs of inputs][kPanel][2].
template <class F>
void decode_tiles(const Panel& panel, std::int64_t groups, std::uint16_t* target) {
  over_groups<F>(panel, groups, [&](std::int64_t, const GroupPlace& place) __attribute__((always_inline)) {
    over_steps<F>(place, 0, [&](auto step, const Scales& of) __attribute__((always_inline)) {
      vf four[4];
      decode_step<F, step>(place, 0, of, [&](auto byte, vf weights) __attribute__((always_inline)) { four[byte] = weights; });
      _mm512_storeu_si512(target + (2 * step) * 2 * kPanel, pair_up(four[0], four[1]));
      _mm512_storeu_si512(target + (2 * step + 1) * 2 * kPanel, pair_up(four[2], four[3]));
    });
    target += kGroup * kPanel;
  });
}

using TileLines = float[2][2][kTileRows][kPanel];  // of two times sixteen rows and of two panels

// 32 rows from `row` on, of activations [groups][stride][32], times two decoded panels.
inline void multiply_bf16(const std::uint16_t* weights, std::int64_t panel_size, const std::uint16_t* x,
                          std::int64_t stride, std::int64_t groups, std::int64_t row, TileLines& lines) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::uint16_t* rows = x + (group * stride + row) * kGroup;
    const std::uint16_t* tile = weights + group * kGroup * kPanel;
    _tile_loadd(6, tile, 64);
    _tile_loadd(4, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tile + panel_size, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + kTileRows * kGroup, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, lines[0][0], 64);
  _tile_stored(1, lines[0][1], 64);
  _tile_stored(2, lines[1][0], 64);
  _tile_stored(3, lines[1][1], 64);
}

// 32 floats to bfloat16.
inline void round_group(const float* x, std::uint16_t* target) {
  _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
}
#else
inline constexpr bool kHasTiles = false;
inline bool may_use_tiles() { return false; }
#endif

}  // namespace hp::grouped
