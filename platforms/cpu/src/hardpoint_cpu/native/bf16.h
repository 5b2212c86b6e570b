// bfloat16 as it is stored: the upper half of a float. Values in pairs become two vectors with one instruction each.
#pragma once

#include <cstdint>

#include "simd.h"

namespace hp {

enum class bf16 : std::uint16_t {};

inline float widen(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// vf::W values in a row.
#if defined(__AVX512F__)
inline vf widen_row(const void* p) {
  const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
#elif defined(__AVX2__) && defined(__FMA__)
inline vf widen_row(const void* p) {
  const __m128i halves = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
#else
inline vf widen_row(const void* p) {
  vf made;
  for (int i = 0; i < vf::W; ++i) made.v[i] = widen(static_cast<const bf16*>(p)[i]);
  return made;
}
#endif

// Of vf::W pairs at `p`: all first values, all second values.
#if defined(__AVX512F__)
inline vf first_of_pairs(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline vf second_of_pairs(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(~0xffff)))};
}
#elif defined(__AVX2__) && defined(__FMA__)
inline __m256i load_pairs(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline vf first_of_pairs(const bf16* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16))}; }
inline vf second_of_pairs(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), _mm256_set1_epi32(~0xffff)))};
}
#else
inline lanes_i load_pairs(const bf16* p) {
  lanes_i pairs;
  __builtin_memcpy(&pairs, p, sizeof(pairs));
  return pairs;
}
inline vf first_of_pairs(const bf16* p) { return {reinterpret_cast<lanes_f>(load_pairs(p) << 16)}; }
inline vf second_of_pairs(const bf16* p) { return {reinterpret_cast<lanes_f>(load_pairs(p) & ~0xffff)}; }
#endif

}  // namespace hp
