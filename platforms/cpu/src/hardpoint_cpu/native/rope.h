// Rotation of queries and keys where they lie, in the output of their common projection.
#pragma once

#include "norm.h"

namespace hp {

// Cosines and sines [positions, rotary_size / 2] of a model. Pairs are (i, i + rotary_size / 2), or neighbors.
struct Rotation {
  const float *cos, *sin;
  std::int64_t positions, rotary_size;
  std::int32_t pairs_are_neighbors;
};

// `heads` query heads and behind them `kv_heads` key heads of `head_size`, tokens `stride` apart.
struct Heads {
  float* data;
  std::int64_t tokens, stride, heads, kv_heads, head_size;
};

// Normalizes every head where there are norms, and turns it by its token's position. Raises std::invalid_argument for
// positions beyond the table.
void rotate_heads(const Heads& heads, const Rotation& rotation, Norm query_norm, Norm key_norm,
                  const std::int64_t* positions, Pool& pool);

}  // namespace hp
