// Eight-bit products in tiles: weights lie as linear_i8_lanes.h has them, of which 64 inputs are what a tile wants.
#pragma once

#if defined(__AMX_INT8__)

#include "amx.h"
#include "linear_i8_lanes.h"

namespace hp::i8 {

inline constexpr std::int64_t kTileInputs = amx::kTileBytes;
static_assert(kPanel == 2 * amx::kTileRows && Lanes::kGroup == 4);

// Weights to be fetched into a core's own cache while tiles are busy: so many lines for each step over the inputs.
struct Ahead {
  const std::uint8_t* weights;
  std::int64_t lines;
};

// sums[row][output] of 16 * R rows `stride` apart with one panel, for `inputs` that are whole tiles.
template <int R>
void multiply_tiles(const std::int8_t* rows, std::int64_t stride, const std::uint8_t* panel, std::int64_t inputs,
                    Ahead ahead, std::int32_t* sums) {
  static_assert(R == 1 || R == 2);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (R == 2) _tile_zero(2);
  if constexpr (R == 2) _tile_zero(3);
  constexpr std::int64_t kBetween = 2 * amx::kTileBytes;
  for (std::int64_t k = 0; k < inputs; k += kTileInputs, panel += amx::kTileRows * kBetween) {
    for (std::int64_t line = 0; line < ahead.lines; ++line, ahead.weights += amx::kTileBytes)
      __builtin_prefetch(ahead.weights, 0, 2);
    _tile_loadd(4, rows + k, stride);
    _tile_loadd(6, panel, kBetween);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, panel + amx::kTileBytes, kBetween);
    _tile_dpbsud(1, 4, 7);
    if constexpr (R == 2) {
      _tile_loadd(5, rows + amx::kTileRows * stride + k, stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  constexpr std::int64_t kLine = kPanel * sizeof(std::int32_t);
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + kPanel / 2, kLine);
  if constexpr (R == 2) {
    _tile_stored(2, sums + amx::kTileRows * kPanel, kLine);
    _tile_stored(3, sums + amx::kTileRows * kPanel + kPanel / 2, kLine);
  }
}

}  // namespace hp::i8

#endif
