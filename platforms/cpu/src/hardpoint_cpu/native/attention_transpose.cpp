// Keys by columns: registers of W keys by W entries at a time.
#include "attention_tile.h"

namespace hp {

#if defined(__AVX512F__)

void transpose_square(const float* const* rows, std::int64_t d, float* target, std::int64_t stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(rows[i] + d);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  // Lane l of a[4 g + c] holds entry 4 l + c of rows 4 g .. 4 g + 3.
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_ps(target + (0 + c) * stride, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(target + (4 + c) * stride, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(target + (8 + c) * stride, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(target + (12 + c) * stride, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}

#elif defined(__AVX2__) && defined(__FMA__)

void transpose_square(const float* const* rows, std::int64_t d, float* target, std::int64_t stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(rows[i] + d);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(target + c * stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(target + (4 + c) * stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}

#else

void transpose_square(const float* const* rows, std::int64_t d, float* target, std::int64_t stride) {
  for (int i = 0; i < vf::W; ++i)
    for (int e = 0; e < vf::W; ++e) target[e * stride + i] = rows[i][d + e];
}

#endif

void transpose_keys(const float* const* rows, Range range, std::int64_t head_size, const Found* next, float* columns) {
  const std::int64_t begin = range.begin / vf::W * vf::W;
  static const Found nothing{};
  Ahead ahead(next == nullptr ? nothing.keys : next->keys, next == nullptr ? nothing : *next,
              ceil_div(range.end - begin, vf::W));
  for (std::int64_t first = begin; first < range.end; first += vf::W) {
    ahead.ask();
    std::int64_t d = 0;
    for (; d + vf::W <= head_size; d += vf::W) transpose_square(rows + first, d, columns + d * kTile + first, kTile);
    for (; d < head_size; ++d)
      for (int i = 0; i < vf::W; ++i) columns[d * kTile + first + i] = rows[first + i][d];
  }
}

}  // namespace hp
