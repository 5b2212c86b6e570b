// Vectors of floats of the level that is compiled for: `vf` with vf::W lanes. Levels differ in width only; with no
// intrinsics of its own a level uses the compiler's vector extension.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hp {

#if defined(__AVX512F__)
struct vf {
  static constexpr int W = 16;
  __m512 v;
  static vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static vf set(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
inline vf round(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in the range of normal floats.
inline vf exp2_int(vf n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
#elif defined(__AVX2__) && defined(__FMA__)
struct vf {
  static constexpr int W = 8;
  __m256 v;
  static vf load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static vf set(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
};
inline vf operator+(vf a, vf b) { return {_mm256_add_ps(a.v, b.v)}; }
inline vf operator-(vf a, vf b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline vf operator*(vf a, vf b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline vf operator/(vf a, vf b) { return {_mm256_div_ps(a.v, b.v)}; }
inline vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline vf max(vf a, vf b) { return {_mm256_max_ps(a.v, b.v)}; }
inline vf min(vf a, vf b) { return {_mm256_min_ps(a.v, b.v)}; }
inline vf round(vf a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline vf exp2_int(vf n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
#else
inline constexpr int kGenericWidth = 4;
typedef float lanes_f __attribute__((vector_size(sizeof(float) * kGenericWidth), aligned(4)));
typedef std::int32_t lanes_i __attribute__((vector_size(sizeof(float) * kGenericWidth), aligned(4)));
struct vf {
  static constexpr int W = kGenericWidth;
  lanes_f v;
  static vf load(const float* p) { return {*reinterpret_cast<const lanes_f*>(p)}; }
  static vf set(float x) { return {lanes_f{} + x}; }
  void store(float* p) const { *reinterpret_cast<lanes_f*>(p) = v; }
};
inline vf operator+(vf a, vf b) { return {a.v + b.v}; }
inline vf operator-(vf a, vf b) { return {a.v - b.v}; }
inline vf operator*(vf a, vf b) { return {a.v * b.v}; }
inline vf operator/(vf a, vf b) { return {a.v / b.v}; }
// Contracted to one instruction where the target has it (-ffp-contract=fast).
inline vf fma(vf a, vf b, vf c) { return {a.v * b.v + c.v}; }
inline vf max(vf a, vf b) { return {a.v > b.v ? a.v : b.v}; }
inline vf min(vf a, vf b) { return {a.v < b.v ? a.v : b.v}; }
inline vf round(vf a) {
  vf r;
  for (int i = 0; i < vf::W; ++i) r.v[i] = std::nearbyint(a.v[i]);
  return r;
}
inline vf exp2_int(vf n) {
  const lanes_i bits = (__builtin_convertvector(n.v, lanes_i) + 127) << 23;
  return {reinterpret_cast<lanes_f>(bits)};
}
#endif

// Sum and largest of the lanes, in an order that does not depend on anything else.
inline float sum(vf a) {
  alignas(64) float lanes[vf::W];
  a.store(lanes);
  for (int half = vf::W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float largest(vf a) {
  alignas(64) float lanes[vf::W];
  a.store(lanes);
  float best = lanes[0];
  for (int i = 1; i < vf::W; ++i) best = best < lanes[i] ? lanes[i] : best;
  return best;
}

// e^x to about 2 units in the last place, for x from -87.3 to 88 and clamped to that: what is masked becomes 1e-38.
inline vf exp(vf x) {
  const vf low = vf::set(-87.33654f);
  const vf clamped = min(max(x, low), vf::set(88.0f));
  const vf n = round(clamped * vf::set(1.44269504f));
  // Two parts of ln 2, so that the remainder keeps its digits.
  const vf r = fma(n, vf::set(2.12194440e-4f), fma(n, vf::set(-0.693359375f), clamped));
  vf p = vf::set(1.9875691500e-4f);
  p = fma(p, r, vf::set(1.3981999507e-3f));
  p = fma(p, r, vf::set(8.3334519073e-3f));
  p = fma(p, r, vf::set(4.1665795894e-2f));
  p = fma(p, r, vf::set(1.6666665459e-1f));
  p = fma(p, r, vf::set(5.0000001201e-1f));
  p = fma(p, r * r, r + vf::set(1.0f));
  return p * exp2_int(n);
}

}  // namespace hp
