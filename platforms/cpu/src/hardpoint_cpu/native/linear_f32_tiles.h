// Float32 products on the matrix unit, which knows bfloat16 only: a float32 is the sum of three bfloat16 of eight bits
// each, and a product of two floats that of six pairs of these; the three pairs left out are below the last bit of
// the product. (Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations", 2019.) Sums are float32 as elsewhere. Six times the work at seventeen times the speed of vectors.
//
// Two things differ from vectors: what is infinite gives NaN, and parts below the least normal float count as zero.
#pragma once

#include "amx.h"

#if defined(__AMX_BF16__)

#include <type_traits>

#include "bf16.h"
#include "common.h"

namespace hp::split {

inline constexpr std::int64_t kDepth = 32;                        // inputs of a tile
inline constexpr std::int64_t kTile = amx::kTileRows * kDepth;    // values of a tile
inline constexpr int kParts = 3;

using Half = std::uint16_t;

// 32 activations as parts `apart` values from one another.
inline void split_inputs(__m512 low, __m512 high, Half* target, std::int64_t apart) {
  for (int part = 0; part < kParts; ++part, target += apart) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(target, halves);
    if (part + 1 == kParts) return;
    const __m512i wide_low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
    const __m512i wide_high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(wide_low, 16)));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(wide_high, 16)));
  }
}

// Sixteen outputs' weights of two inputs as parts `apart` values from one another: the first in the lower halves. Halves
// are rounded away from zero, which takes fewer instructions and is as good where the rest is kept.
inline void split_pair(__m512 first, __m512 second, Half* target, std::int64_t apart) {
  const __m512i upper = _mm512_set1_epi32(~0xffff), half = _mm512_set1_epi32(0x8000);
  for (int part = 0; part < kParts; ++part, target += apart) {
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(first), half);
    const __m512i b = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(second), half), upper);
    _mm512_storeu_si512(target, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
    if (part + 1 == kParts) return;
    first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
    second = _mm512_sub_ps(second, _mm512_castsi512_ps(b));
  }
}

// Rows of activations as tiles want them, two tiles at once: [blocks of 32 inputs][parts][32 rows][32].
inline constexpr std::int64_t kPairRows = 2 * amx::kTileRows;
inline constexpr std::int64_t kPairSize = kPairRows * kDepth;
inline constexpr std::int64_t kPairBlock = kParts * kPairSize;

// Inputs `first` to `last` of at most 32 rows; rows and inputs that do not exist become zeros.
inline void split_rows(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t inputs, std::int64_t first,
                       std::int64_t last, Half* target) {
  for (std::int64_t k = first; k < last; k += kDepth, target += kPairBlock) {
    const std::uint32_t mask = inputs - k >= kDepth ? ~0u : (1u << (inputs - k)) - 1;
    for (std::int64_t row = 0; row < kPairRows; ++row) {
      const float* values = x + row * stride + k;
      const __mmask16 low = row < rows ? mask : 0, high = row < rows ? mask >> 16 : 0;
      split_inputs(_mm512_maskz_loadu_ps(low, values), _mm512_maskz_loadu_ps(high, values + 16), target + row * kDepth, kPairSize);
    }
  }
}

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
