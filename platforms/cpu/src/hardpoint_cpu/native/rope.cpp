#include "rope.h"

#include "simd.h"

namespace hp {
namespace {

constexpr std::int64_t kGrain = 4096;  // values worth handing to another thread

void rotate_halves(float* head, const float* cos, const float* sin, std::int64_t half) {
  std::int64_t i = 0;
  for (; i + vf::W <= half; i += vf::W) {
    const vf a = vf::load(head + i), b = vf::load(head + half + i), c = vf::load(cos + i), s = vf::load(sin + i);
    (a * c - b * s).store(head + i);
    (b * c + a * s).store(head + half + i);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

void rotate_neighbors(float* head, const float* cos, const float* sin, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cos[i] - b * sin[i];
    head[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

void rotate_token(float* token, const Heads& heads, const Rotation& rotation, Norm query_norm, Norm key_norm,
                  std::int64_t position) {
  const std::int64_t half = rotation.rotary_size / 2;
  const float *cos = rotation.cos + position * half, *sin = rotation.sin + position * half;
  for (std::int64_t h = 0; h < heads.heads + heads.kv_heads; ++h) {
    float* head = token + h * heads.head_size;
    const Norm norm = h < heads.heads ? query_norm : key_norm;
    if (norm.weight != nullptr) rms_norm(head, heads.head_size, norm, head);
    if (rotation.pairs_are_neighbors) {
      rotate_neighbors(head, cos, sin, half);
    } else {
      rotate_halves(head, cos, sin, half);
    }
  }
}

}  // namespace

void rotate_heads(const Heads& heads, const Rotation& rotation, Norm query_norm, Norm key_norm,
                  const std::int64_t* positions, Pool& pool) {
  for (std::int64_t t = 0; t < heads.tokens; ++t)
    require(0 <= positions[t] && positions[t] < rotation.positions, "token ", t, " is at position ", positions[t],
            ", but the rotation has ", rotation.positions);
  const std::int64_t size = (heads.heads + heads.kv_heads) * heads.head_size;
  pool.ranges(heads.tokens, std::max<std::int64_t>(1, kGrain / size), [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t t = first; t < last; ++t)
      rotate_token(heads.data + t * heads.stride, heads, rotation, query_norm, key_norm, positions[t]);
  });
}

}  // namespace hp
