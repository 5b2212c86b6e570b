// Vectors of 32-bit lanes that hold four bytes each, beside `vf`: what weights in groups are unpacked and multiplied
// with. A lane belongs to one output and its bytes to four inputs in a row, as instructions for dot products want it.
#pragma once

#include <cstring>
#include <utility>

#include "simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HP_DOT_UNSIGNED 1  // one instruction: unsigned weights, signed activations, no saturation
#endif

namespace hp {

// Whether weights of 8 bits are kept as signed bytes; as bytes that 128 was added to otherwise.
#if defined(HP_DOT_UNSIGNED)
inline constexpr bool kSignedBytes = false;
#else
inline constexpr bool kSignedBytes = true;
#endif

// body(integral_constant) for 0..N-1, each a constant: shifts by immediates need that.
template <int N, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

#if defined(__AVX512F__)
struct vi {
  __m512i v;
  static vi zero() { return {_mm512_setzero_si512()}; }
  static vi load(const void* p) { return {_mm512_loadu_si512(p)}; }
  static vi set(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
  void store(void* p) const { _mm512_storeu_si512(p, v); }
};
inline vi operator&(vi a, vi b) { return {_mm512_and_si512(a.v, b.v)}; }
inline vi operator|(vi a, vi b) { return {_mm512_or_si512(a.v, b.v)}; }
inline vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
// Bits of the whole lane move; callers mask what came from the neighboring byte.
template <int N>
vi up(vi a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N>
vi down(vi a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N>
vi down_signed(vi a) { return {_mm512_srai_epi32(a.v, N)}; }
inline vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline vf halves_to_float(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline vf bytes_to_float(const std::uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline vf bytes_to_float(const std::int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif defined(__AVX2__) && defined(__FMA__)
struct vi {
  __m256i v;
  static vi zero() { return {_mm256_setzero_si256()}; }
  static vi load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
  static vi set(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
  void store(void* p) const { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
};
inline vi operator&(vi a, vi b) { return {_mm256_and_si256(a.v, b.v)}; }
inline vi operator|(vi a, vi b) { return {_mm256_or_si256(a.v, b.v)}; }
inline vi operator+(vi a, vi b) { return {_mm256_add_epi32(a.v, b.v)}; }
template <int N>
vi up(vi a) { return {_mm256_slli_epi32(a.v, N)}; }
template <int N>
vi down(vi a) { return {_mm256_srli_epi32(a.v, N)}; }
template <int N>
vi down_signed(vi a) { return {_mm256_srai_epi32(a.v, N)}; }
inline vf to_float(vi a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline vf halves_to_float(const std::uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline vf bytes_to_float(const std::uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline vf bytes_to_float(const std::int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
#else
typedef std::uint32_t lanes_u __attribute__((vector_size(sizeof(float) * kGenericWidth), aligned(4)));
typedef std::int16_t lanes_s __attribute__((vector_size(sizeof(float) * kGenericWidth), aligned(4)));
struct vi {
  lanes_u v;
  static vi zero() { return {lanes_u{}}; }
  static vi load(const void* p) {
    vi made;
    std::memcpy(&made.v, p, sizeof(made.v));
    return made;
  }
  static vi set(std::int32_t x) { return {lanes_u{} + static_cast<std::uint32_t>(x)}; }
  void store(void* p) const { std::memcpy(p, &v, sizeof(v)); }
};
inline vi operator&(vi a, vi b) { return {a.v & b.v}; }
inline vi operator|(vi a, vi b) { return {a.v | b.v}; }
inline vi operator+(vi a, vi b) { return {a.v + b.v}; }
template <int N>
vi up(vi a) { return {a.v << N}; }
template <int N>
vi down(vi a) { return {a.v >> N}; }
template <int N>
vi down_signed(vi a) { return {reinterpret_cast<lanes_u>(reinterpret_cast<lanes_i>(a.v) >> N)}; }
inline vf to_float(vi a) { return {__builtin_convertvector(reinterpret_cast<lanes_i>(a.v), lanes_f)}; }
#endif

// A float16 by its bits.
inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, digits = half & 1023u;
  if (exponent == 0) {
    // Subnormal: units of 2^-24.
    const float size = static_cast<float>(digits) * 5.9604644775390625e-8f;
    return sign ? -size : size;
  }
  const std::uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | digits << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#if !(defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
inline vf halves_to_float(const std::uint8_t* p) {
  vf made;
  for (int i = 0; i < vf::W; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, p + 2 * i, sizeof(bits));
    made.v[i] = half_to_float(bits);
  }
  return made;
}
template <class Byte>
inline vf bytes_to_float(const Byte* p) {
  vf made;
  for (int i = 0; i < vf::W; ++i) made.v[i] = static_cast<float>(p[i]);
  return made;
}
#endif

// Dot products of four bytes per lane, added up: weights of `Bits` bits by activations from -127 to 127.
template <int Bits>
struct Dots {
  vi v = vi::zero();

#if defined(__AVX512VNNI__)
  void add(vi w, vi x) { v.v = _mm512_dpbusd_epi32(v.v, w.v, x.v); }
  vi whole() const { return v; }
#elif defined(__AVXVNNI__)
  void add(vi w, vi x) { v.v = _mm256_dpbusd_avx_epi32(v.v, w.v, x.v); }
  vi whole() const { return v; }
#elif defined(__AVX512F__)
  void add(vi w, vi x) {
    if constexpr (Bits == 4) {
      // Eight steps of two products of at most 15 * 127 fit 16 bits.
      v.v = _mm512_add_epi16(v.v, _mm512_maddubs_epi16(w.v, x.v));
    } else if constexpr (Bits < 8) {
      v.v = _mm512_add_epi32(v.v, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, x.v), _mm512_set1_epi16(1)));
    } else {
      // |w| by x with the sign of w: two products of at most 128 * 127 fit.
      const __m512i turned = _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), x.v);
      const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.v), turned);
      v.v = _mm512_add_epi32(v.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
  }
  vi whole() const {
    if constexpr (Bits == 4) return {_mm512_madd_epi16(v.v, _mm512_set1_epi16(1))};
    return v;
  }
#elif defined(__AVX2__) && defined(__FMA__)
  void add(vi w, vi x) {
    if constexpr (Bits == 4) {
      v.v = _mm256_add_epi16(v.v, _mm256_maddubs_epi16(w.v, x.v));
    } else if constexpr (Bits < 8) {
      v.v = _mm256_add_epi32(v.v, _mm256_madd_epi16(_mm256_maddubs_epi16(w.v, x.v), _mm256_set1_epi16(1)));
    } else {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.v), _mm256_sign_epi8(x.v, w.v));
      v.v = _mm256_add_epi32(v.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
  vi whole() const {
    if constexpr (Bits == 4) return {_mm256_madd_epi16(v.v, _mm256_set1_epi16(1))};
    return v;
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  void add(vi w, vi x) {
    v.v = (lanes_u)vdotq_s32((int32x4_t)v.v, (int8x16_t)w.v, (int8x16_t)x.v);
  }
  vi whole() const { return v; }
#else
  // Even and odd bytes as 16 bits with their sign; two products of at most 128 * 127 fit, then pairs of those.
  void add(vi w, vi x) {
    const lanes_s ws = reinterpret_cast<lanes_s>(w.v), xs = reinterpret_cast<lanes_s>(x.v);
    const lanes_s pairs = ((ws << 8) >> 8) * ((xs << 8) >> 8) + (ws >> 8) * (xs >> 8);
    const lanes_i both = reinterpret_cast<lanes_i>(pairs);
    v.v += reinterpret_cast<lanes_u>(((both << 16) >> 16) + (both >> 16));
  }
  vi whole() const { return v; }
#endif
};

}  // namespace hp
