// What happens to one tile of keys: a few query rows against it, and merging what came of it.
//
// A query row is one query head of one token. Up to kRowBlock of them go through a tile together, since they share its
// keys: heads of one KV head, and for prompts tokens next to each other.
#pragma once

#include <limits>

#include "bf16.h"
#include "common.h"
#include "simd.h"

namespace hp {

inline constexpr std::int64_t kTile = 128;   // keys; positions that are multiples of it begin a tile
inline constexpr std::int64_t kRowBlock = 6;  // query rows that registers hold at once
inline constexpr std::int64_t kVectors = vf::W == 16 ? 4 : 2;
inline constexpr std::int64_t kColumns = kVectors * vf::W;  // keys or value entries that registers hold at once
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the logit of what is not seen

// Keys [begin, end) of a tile.
struct Range {
  std::int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// How products become logits, which are of base 2 here.
struct Logits {
  float query_scale;  // what queries are multiplied by beforehand
  float cap;          // natural logits stay below; infinite: queries carry all of the scale
};

// A running softmax: largest logit, sum of exponentials relative to it, and values weighed likewise [padded head size].
struct Sum {
  float largest, weight;
  float* values;
};

// Where keys `range` of a tile lie, by key, with values likewise; `lines` of the processor's cache each.
struct Found {
  const char* keys[kTile];
  const char* values[kTile];
  Range range;
  std::int64_t lines;
};

// Asks for the tile that comes next while this one is computed with: a share of it at each of `steps` calls.
class Ahead {
 public:
  Ahead(const char* const* rows, const Found& next, std::int64_t steps)
      : rows_(rows), at_(next.range.begin), end_(next.range.end), lines_(next.lines),
        share_(ceil_div(std::max<std::int64_t>(end_ - at_, 0), std::max<std::int64_t>(steps, 1))) {}
  void ask() {
    for (const std::int64_t stop = std::min(end_, at_ + share_); at_ < stop; ++at_)
      for (std::int64_t line = 0; line < lines_; ++line) __builtin_prefetch(rows_[at_] + line * kAlignment, 0, 2);
  }

 private:
  const char* const* rows_;
  std::int64_t at_, end_, lines_, share_;
};

// One tile as rows see it. `keys` [head size][kTile] holds keys by columns, zeros where nobody looks.
//
// Or, where `pairs` is not null, both are bfloat16 as they are stored: `pairs` [head size / 2][kTile] holds two entries
// of a key in a lane, the first in its lower half, and `halves` says where values lie. Sums have the same bits.
struct TileView {
  const float* keys;
  const float* const* values;  // [kTile]
  const bf16* pairs;
  const char* const* halves;   // [kTile]
  std::int64_t position;       // of the tile's first key
  std::int64_t head_size, padded_size;
};

// Rows that go together. `queries` [rows][head size]; `logits` is scratch [rows][kTile].
struct RowBlock {
  std::int64_t rows;
  const float* queries;
  float* logits;
  Range seen[kRowBlock];            // of this tile, by row
  std::int64_t places[kRowBlock];   // positions of the rows' tokens
  const float* slopes[kRowBlock];   // ALiBi, natural; null: none
};

// What the rows make of a tile: `sums`, whose values it fills. Rows that see nothing get the logit kNothing. `next`:
// the tile whose values will be wanted afterwards, or null.
void attend(const TileView& tile, const RowBlock& block, const Logits& logits, const Found* next, Sum* sums);

// `total` with `part` after it.
void merge(Sum& total, const Sum& part, std::int64_t padded_size);

// Keys by columns: column i of `columns` [head size][kTile] is `rows[i]`, for whole vectors of columns that touch
// `range`. `rows` [kTile] are valid there, `head_size` long. `next`: the tile whose keys will be wanted afterwards,
// or null.
void transpose_keys(const float* const* rows, Range range, std::int64_t head_size, const Found* next, float* columns);

// Entries `d` to `d` + W of W rows by columns, `stride` values apart.
void transpose_square(const float* const* rows, std::int64_t d, float* target, std::int64_t stride);

// Steps from a row's products with a tile to its weights, which all paths share. `slope`: ALiBi, natural, or null;
// `distance`: from the tile's first key to the row's token.
void adjust(float* line, Range seen, float cap, const float* slope, std::int64_t distance);
// The largest of a row's logits; what is not seen of the vectors they lie in becomes kNothing.
float peak(float* line, Range seen);
// A row's logits to weights, zeros elsewhere in `all`; their sum by lanes.
vf soften(float* line, Range seen, Range all, float largest);

// 2^x for x <= 0 to about two units in the last place; 0 or next to nothing from -126 down.
inline vf exp2_below(vf x) {
#if defined(__AVX512F__)
  const vf clamped = max(x, vf::set(-200.0f));
#else
  const vf clamped = max(x, vf::set(-126.0f));
#endif
  const vf n = round(clamped);
  const vf r = clamped - n;
  vf p = vf::set(1.3264726899e-3f);
  p = fma(p, r, vf::set(9.6715126606e-3f));
  p = fma(p, r, vf::set(5.5507337442e-2f));
  p = fma(p, r, vf::set(2.4022242085e-1f));
  p = fma(p, r, vf::set(6.9314697760e-1f));
  p = fma(p, r, vf::set(1.0f));
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, n.v)};
#else
  return p * exp2_int(n);
#endif
}

}  // namespace hp
