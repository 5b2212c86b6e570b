// Panels of dense weights times many rows on the matrix unit, see bf16_parts.h.
#pragma once

#include "bf16_parts.h"

#if defined(__AMX_BF16__)

#include <type_traits>

#include "bf16.h"

namespace hp::split {

// bfloat16 are parts by themselves.
template <class T>
inline constexpr int kPartsOf = std::is_same_v<T, bf16> ? 1 : kParts;

// Inputs `first` to `last` of a panel, as [blocks of 32 inputs][kWide][parts][16 pairs][16][2]. Float32 lies as
// [inputs][kWide * 16], bfloat16 as [inputs / 2][kWide * 16][2].
inline constexpr std::int64_t kWide = 3;

inline void arrange(const float* panel, std::int64_t inputs, std::int64_t first, std::int64_t last, Half* target) {
  constexpr std::int64_t kColumns = kWide * amx::kTileRows, kBlock = kWide * kParts * kTile;
  const __m512 zero = _mm512_setzero_ps();
  for (; first < last; first += kDepth, target += kBlock)
    for (std::int64_t k = first; k < first + kDepth; k += 2)
      for (std::int64_t tile = 0; tile < kWide; ++tile) {
        const float* weights = panel + k * kColumns + tile * amx::kTileRows;
        for (int part = 0; part < kParts; ++part)
          __builtin_prefetch(target + kBlock + (tile * kParts + part) * kTile + (k - first) / 2 * kDepth, 1, 3);
        split_pair(k < inputs ? _mm512_loadu_ps(weights) : zero,
                   k + 1 < inputs ? _mm512_loadu_ps(weights + kColumns) : zero,
                   target + tile * kParts * kTile + (k - first) / 2 * kDepth, kTile);
      }
}

inline void arrange(const bf16* panel, std::int64_t inputs, std::int64_t first, std::int64_t last, Half* target) {
  for (; first < last; first += kDepth, target += kWide * kTile)
    for (std::int64_t k = first; k < first + kDepth; k += 2)
      for (std::int64_t tile = 0; tile < kWide; ++tile) {
        const bf16* weights = panel + k * kWide * amx::kTileRows + tile * kDepth;
        _mm512_storeu_si512(target + tile * kTile + (k - first) / 2 * kDepth,
                            k < inputs ? _mm512_loadu_si512(weights) : _mm512_setzero_si512());
      }
}

using Lines = float[2][kWide][amx::kTileRows][amx::kTileRows];  // of twice sixteen rows, of a panel

// The sums of a pair of rows are in registers 0 to 5; of its first sixteen only, where R is 1.
template <int R>
void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  if constexpr (R == 2) _tile_zero(3);
  if constexpr (R == 2) _tile_zero(4);
  if constexpr (R == 2) _tile_zero(5);
}

template <int R>
void leave_sums(Lines& lines) {
  _tile_stored(0, lines[0][0], amx::kTileBytes);
  _tile_stored(1, lines[0][1], amx::kTileBytes);
  _tile_stored(2, lines[0][2], amx::kTileBytes);
  if constexpr (R == 2) _tile_stored(3, lines[1][0], amx::kTileBytes);
  if constexpr (R == 2) _tile_stored(4, lines[1][1], amx::kTileBytes);
  if constexpr (R == 2) _tile_stored(5, lines[1][2], amx::kTileBytes);
}

// Adds one part of rows times one part of weights, whose tiles are `apart` values from one another.
template <int R>
inline __attribute__((always_inline)) void add_parts(const Half* rows, const Half* weights, std::int64_t apart) {
  _tile_loadd(6, rows, amx::kTileBytes);
  _tile_loadd(7, weights, amx::kTileBytes);
  _tile_dpbf16ps(0, 6, 7);
  _tile_loadd(7, weights + apart, amx::kTileBytes);
  _tile_dpbf16ps(1, 6, 7);
  _tile_loadd(7, weights + 2 * apart, amx::kTileBytes);
  _tile_dpbf16ps(2, 6, 7);
  if constexpr (R == 2) {
    _tile_loadd(6, rows + kTile, amx::kTileBytes);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(7, weights + apart, amx::kTileBytes);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weights, amx::kTileBytes);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// `blocks` blocks of a pair of rows times as many of a panel, in each the small products first. `ahead` is called once a
// block, to fetch what comes next while the unit is busy.
template <int R, int WeightParts, class Ahead>
void multiply(const Half* rows, const Half* weights, std::int64_t blocks, Ahead&& ahead, Lines& lines) {
  clear_sums<R>();
  constexpr std::int64_t kApart = WeightParts * kTile;
  for (; blocks > 0; --blocks, rows += kParts * kPairSize, weights += kWide * kApart) {
    ahead();
    if constexpr (WeightParts == kParts) {
      add_parts<R>(rows, weights + 2 * kTile, kApart);
      add_parts<R>(rows, weights + kTile, kApart);
      add_parts<R>(rows + kPairSize, weights + kTile, kApart);
    }
    add_parts<R>(rows + kPairSize, weights, kApart);
    add_parts<R>(rows + 2 * kPairSize, weights, kApart);
    add_parts<R>(rows, weights, kApart);
  }
  leave_sums<R>(lines);
}

}  // namespace hp::split

#endif
