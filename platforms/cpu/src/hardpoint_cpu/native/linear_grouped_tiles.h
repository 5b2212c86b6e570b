// Panels times many rows by the matrix unit, as bfloat16: several times as fast as vectors, but rounded differently.
// Whole numbers of a group at a time, which would give the bits of the vector path, are no faster than that path.
#pragma once

#include "amx.h"
#include "linear_grouped_kernel.h"

namespace hp::grouped {

inline constexpr std::int64_t kTileRows = 16;
inline constexpr std::int64_t kBf16Rows = 64;  // from here on decoding weights to bfloat16 pays

#if defined(__AMX_BF16__)
inline bool may_use_tiles() { return amx::is_allowed(); }

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
inline bool may_use_tiles() { return false; }
#endif

}  // namespace hp::grouped
