// Products of eight-bit integers in vectors: how a level lays weights out and multiplies them, one `vf` of outputs at
// a time. All sums are exact integers, so levels agree to the last bit.
//
// Inputs come in groups of kGroup, whose products with a vector of outputs are added at once. A panel of weights is
// [inputs / kGroup][kVectors][vf::W outputs][kGroup] bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace hp::i8 {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// One instruction multiplies unsigned by signed bytes. Weights are kept with 128 added, and a row's sum begins at what
// that adds to it.
inline constexpr int kWeightOffset = 128;
#else
inline constexpr int kWeightOffset = 0;
#endif

#if defined(__AVX512VNNI__)
struct Lanes {
  using Input = std::int8_t;
  using Sum = __m512i;
  using Weights = __m512i;
  static constexpr int kGroup = 4, kVectors = 2, kRows = 8;
  static Sum start(std::int32_t value) { return _mm512_set1_epi32(value); }
  static Sum load_sum(const std::int32_t* p) { return _mm512_load_si512(p); }
  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Weights load(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
  static Weights spread(const Input* x) {
    std::int32_t group;
    std::memcpy(&group, x, sizeof(group));
    return _mm512_set1_epi32(group);
  }
  static Sum dot(Sum sum, Weights w, Weights x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static vf floats(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
  static void store_rounded(vf a, Input* q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
  }
};
#elif defined(__AVX512BW__)
struct Lanes {
  using Input = std::int16_t;
  using Sum = __m512i;
  using Weights = __m512i;
  static constexpr int kGroup = 2, kVectors = 2, kRows = 8;
  static Sum start(std::int32_t value) { return _mm512_set1_epi32(value); }
  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Weights load(const std::uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Weights spread(const Input* x) {
    std::int32_t group;
    std::memcpy(&group, x, sizeof(group));
    return _mm512_set1_epi32(group);
  }
  static Sum dot(Sum sum, Weights w, Weights x) { return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x)); }
  static vf floats(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
  static void store_rounded(vf a, Input* q) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
  }
};
#elif defined(__AVX2__)
struct Lanes {
  using Sum = __m256i;
  using Weights = __m256i;
  static constexpr int kVectors = 2, kRows = 6;
  static Sum start(std::int32_t value) { return _mm256_set1_epi32(value); }
  static Sum add(Sum a, Sum b) { return _mm256_add_epi32(a, b); }
  static vf floats(Sum sum) { return {_mm256_cvtepi32_ps(sum)}; }
#if defined(__AVXVNNI__)
  using Input = std::int8_t;
  static constexpr int kGroup = 4;
  static Weights load(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Sum dot(Sum sum, Weights w, Weights x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static void store_rounded(vf a, Input* q) {
    const __m256i words = _mm256_cvtps_epi32(a.v);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(q), _mm_packs_epi16(halves, halves));
  }
#else
  // Pairs of 16 bits: the byte instruction would saturate, and multiplies no faster once that is avoided.
  using Input = std::int16_t;
  static constexpr int kGroup = 2;
  static Weights load(const std::uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Sum dot(Sum sum, Weights w, Weights x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
  static void store_rounded(vf a, Input* q) {
    const __m256i words = _mm256_cvtps_epi32(a.v);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), halves);
  }
#endif
  static Weights spread(const Input* x) {
    std::int32_t group;
    std::memcpy(&group, x, sizeof(group));
    return _mm256_set1_epi32(group);
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct Lanes {
  using Input = std::int8_t;
  using Sum = int32x4_t;
  using Weights = int8x16_t;
  static constexpr int kGroup = 4, kVectors = 4, kRows = 6;
  static Sum start(std::int32_t value) { return vdupq_n_s32(value); }
  static Sum add(Sum a, Sum b) { return vaddq_s32(a, b); }
  static Weights load(const std::uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static Weights spread(const Input* x) {
    std::int32_t group;
    std::memcpy(&group, x, sizeof(group));
    return vreinterpretq_s8_s32(vdupq_n_s32(group));
  }
  static Sum dot(Sum sum, Weights w, Weights x) { return vdotq_s32(sum, w, x); }
  static vf floats(Sum sum) { return {__builtin_convertvector(reinterpret_cast<lanes_i>(sum), lanes_f)}; }
  static void store_rounded(vf a, Input* q) {
    const vf whole = round(a);
    for (int i = 0; i < vf::W; ++i) q[i] = static_cast<Input>(whole.v[i]);
  }
};
#else
struct Lanes {
  typedef std::int16_t Shorts __attribute__((vector_size(sizeof(std::int16_t) * vf::W), aligned(2)));
  using Input = std::int16_t;
  using Sum = lanes_i;
  // The first and the second input of the group.
  struct Weights {
    Shorts first, second;
  };
  static constexpr int kGroup = 2, kVectors = 2, kRows = 4;
  static Sum start(std::int32_t value) { return Sum{} + value; }
  static Sum add(Sum a, Sum b) { return a + b; }
  static Weights load(const std::uint8_t* p) {
    // A pair of bytes as one number of 16 bits: the second input is its upper half.
    Shorts pairs;
    std::memcpy(&pairs, p, sizeof(pairs));
    return {(pairs << 8) >> 8, pairs >> 8};
  }
  static Weights spread(const Input* x) { return {Shorts{} + x[0], Shorts{} + x[1]}; }
  // Two products of at most 127 * 128 fit into 16 bits.
  static Sum dot(Sum sum, Weights w, Weights x) {
    return sum + __builtin_convertvector(w.first * x.first + w.second * x.second, lanes_i);
  }
  static vf floats(Sum sum) { return {__builtin_convertvector(sum, lanes_f)}; }
  static void store_rounded(vf a, Input* q) {
    const vf whole = round(a);
    for (int i = 0; i < vf::W; ++i) q[i] = static_cast<Input>(whole.v[i]);
  }
};
#endif

inline constexpr std::int64_t kPanel = Lanes::kVectors * vf::W;

// Keeps a product from becoming one instruction with the addition after it: only some levels have that, and it rounds
// differently.
inline vf apart(vf a) {
#if defined(__AVX512F__)
  asm("" : "+v"(a.v));
#elif defined(__x86_64__)
  asm("" : "+x"(a.v));
#elif defined(__aarch64__)
  asm("" : "+w"(a.v));
#else
  asm("" : "+m"(a.v));
#endif
  return a;
}

}  // namespace hp::i8
