// Many query rows against a tile of keys: products as sums of products of bfloat16 (bf16_parts.h), on a matrix unit or
// in vectors.
#pragma once

#include "attention_tile.h"

namespace hp {

inline constexpr std::int64_t kSplitBlock = 32;  // query rows that go through a tile together
// Query rows for which it pays to take a tile of keys and values apart.
inline constexpr std::int64_t kSplitRows = 64;

// Whether this processor and system have what the rest of this file needs, and are faster at it than with floats.
bool may_split(int parts);

// What a thread works with. `parts`: of how many bfloat16 a float is the sum: 3 keep all of it, 1 only its first bits.
struct SplitRoom {
  int parts;
  std::int64_t head_size, padded_size;
  std::uint16_t *queries, *keys, *values, *weights;
  float* logits;  // [kSplitBlock][kTile]
};

// Room for items of at most `rows` query rows.
SplitRoom take_split_room(Arena& arena, int parts, std::int64_t rows, std::int64_t head_size, std::int64_t padded_size);

// The queries [rows][head size] of an item, whose tiles come next.
void split_queries(const float* queries, std::int64_t rows, const SplitRoom& room);

// Keys and values of a tile up to `end`; rows from there to the next multiple of kSplitBlock must be readable.
void split_tile(const float* const* keys, const float* const* values, std::int64_t end, const SplitRoom& room);

// Rows that go together, of which the first is `first` of the item.
struct SplitBlock {
  std::int64_t first, rows;
  Range seen[kSplitBlock];  // of this tile, by row
  std::int64_t distances[kSplitBlock];  // from the tile's first key to the rows' tokens
  const float* slopes[kSplitBlock];     // ALiBi, natural; null: none
};

// What the rows make of the tile: kSplitBlock `sums`, whose values lie one after another.
void attend_split(const SplitBlock& block, std::int64_t end, float cap, const SplitRoom& room, Sum* sums);

}  // namespace hp
