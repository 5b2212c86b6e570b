// Floats as sums of bfloat16, for instructions that multiply only these: a float32 is the sum of three bfloat16 of eight bits
// each, and a product of two floats that of six pairs of these; the three pairs left out are below the last bit of
// the product. (Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations", 2019.) Sums are float32 as elsewhere. Six times the work at seventeen times the speed of vectors, on a
// matrix unit; vectors of bfloat16 are twice as fast as those of floats, which pays for one part only.
//
// Two things differ from vectors: what is infinite gives NaN, and parts below the least normal float count as zero.
#pragma once

#include "amx.h"

#if defined(__AVX512BF16__)

#include "common.h"

namespace hp::split {

inline constexpr std::int64_t kTileRows = 16, kDepth = 32;  // rows of a tile and inputs
inline constexpr std::int64_t kTile = kTileRows * kDepth;
inline constexpr int kParts = 3;

using Half = std::uint16_t;

// 32 floats as parts `apart` values from one another.
template <int Parts = kParts>
inline void split_inputs(__m512 low, __m512 high, Half* target, std::int64_t apart) {
  for (int part = 0; part < Parts; ++part, target += apart) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(target, halves);
    if (part + 1 == Parts) return;
    const __m512i wide_low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
    const __m512i wide_high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(wide_low, 16)));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(wide_high, 16)));
  }
}

// Sixteen outputs' weights of two inputs as parts `apart` values from one another: the first in the lower halves. Halves
// are rounded away from zero, which takes fewer instructions and is as good where the rest is kept.
template <int Parts = kParts>
inline void split_pair(__m512 first, __m512 second, Half* target, std::int64_t apart) {
  const __m512i upper = _mm512_set1_epi32(~0xffff), half = _mm512_set1_epi32(0x8000);
  for (int part = 0; part < Parts; ++part, target += apart) {
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(first), half);
    const __m512i b = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(second), half), upper);
    _mm512_storeu_si512(target, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
    if (part + 1 == Parts) return;
    first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
    second = _mm512_sub_ps(second, _mm512_castsi512_ps(b));
  }
}

// Rows of activations as tiles want them, two tiles at once: [blocks of 32 inputs][parts][32 rows][32].
inline constexpr std::int64_t kPairRows = 2 * kTileRows;
inline constexpr std::int64_t kPairSize = kPairRows * kDepth;
template <int Parts>
inline constexpr std::int64_t kPairBlockOf = Parts * kPairSize;
inline constexpr std::int64_t kPairBlock = kPairBlockOf<kParts>;

// Inputs `first` to `last` of at most 32 rows; rows and inputs that do not exist become zeros.
template <int Parts = kParts>
inline void split_rows(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t inputs, std::int64_t first,
                       std::int64_t last, Half* target) {
  for (std::int64_t k = first; k < last; k += kDepth, target += kPairBlockOf<Parts>) {
    const std::uint32_t mask = inputs - k >= kDepth ? ~0u : (1u << (inputs - k)) - 1;
    for (std::int64_t row = 0; row < kPairRows; ++row) {
      const float* values = x + row * stride + k;
      const __mmask16 low = row < rows ? mask : 0, high = row < rows ? mask >> 16 : 0;
      split_inputs<Parts>(_mm512_maskz_loadu_ps(low, values), _mm512_maskz_loadu_ps(high, values + 16), target + row * kDepth, kPairSize);
    }
  }
}

}  // namespace hp::split

#endif
