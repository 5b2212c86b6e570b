// Where a row's keys and values lie: in the blocks of a cache, or one after another among the step's tokens.
#pragma once

#include "attention.h"
#include "attention_tile.h"

namespace hp {

// Room for one tile in the form that kernels read. One per thread.
struct TileRoom {
  float* columns;   // [head size][kTile]
  float* widened;   // [2][kTile][padded size]: keys and values that are not stored as the kernels read them, or null
  const float* keys[kTile];
  const float* values[kTile];
};

class Source {
 public:
  Source(const AttentionLayer& layer, const AttentionRows& rows, const KVCache& cache);
  Source(const AttentionLayer& layer, const AttentionRows& rows, const FreshKV& fresh);

  std::int64_t padded_size() const { return padded_; }
  // Floats that TileRoom::columns and TileRoom::widened need.
  std::int64_t column_floats() const { return head_size_ * kTile; }
  std::int64_t widened_floats() const { return is_direct() ? 0 : 2 * kTile * padded_; }

  // Keys `range` of the tile that begins at `position`, of one KV head of a row: where they lie,
  void find(std::int64_t row, std::int64_t head, std::int64_t position, Range range, Found& found) const;
  // and for kernels to read. `next`: what will be loaded afterwards, or null.
  TileView load(const Found& found, std::int64_t position, const Found* next, TileRoom& room) const;
  // The same without making floats of bfloat16, which pays where few rows look at them; only where `keeps_pairs()`.
  bool keeps_pairs() const {
    return stored_ == Stored::kBFloat16 && padded_ == head_size_ && head_size_ % (2 * vf::W) == 0;
  }
  TileView load_pairs(const Found& found, std::int64_t position, const Found* next, TileRoom& room) const;
  // Only where the keys and values of `whole` lie as floats, in `room`; zeros where `found` has none.
  void gather(const Found& found, Range whole, TileRoom& room) const;

 private:
  bool is_direct() const { return stored_ == Stored::kFloat32 && padded_ == head_size_; }

  const AttentionRows& rows_;
  const std::int64_t head_size_, padded_;
  Stored stored_;
  const char *key_, *value_;
  // In bytes. Fresh tokens are one block without end.
  std::int64_t block_size_, block_stride_, key_stride_, value_stride_, key_head_stride_, value_head_stride_;
};

// `count` stored elements as floats.
void widen_elements(Stored stored, const void* from, std::int64_t count, float* to);
// `count` floats as stored elements, rounded to nearest.
void store_elements(Stored stored, const float* from, std::int64_t count, void* to);
std::int64_t element_bytes(Stored stored);

}  // namespace hp
