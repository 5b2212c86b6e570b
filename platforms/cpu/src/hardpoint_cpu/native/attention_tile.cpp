#include "attention_tile.h"

namespace hp {
namespace {

// Products of R rows with kColumns keys; each is one chain over the head size.
template <int R>
void score(const float* queries, const float* keys, std::int64_t head_size, float* logits) {
  vf sums[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) sums[r][j] = vf::set(0.0f);
  for (std::int64_t d = 0; d < head_size; ++d) {
    vf k[kVectors];
    for (int j = 0; j < kVectors; ++j) k[j] = vf::load(keys + d * kTile + j * vf::W);
    for (int r = 0; r < R; ++r) {
      const vf q = vf::set(queries[r * head_size + d]);
      for (int j = 0; j < kVectors; ++j) sums[r][j] = fma(q, k[j], sums[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) sums[r][j].store(logits + r * kTile + j * vf::W);
}

// The same of keys in bfloat16, two entries in a lane.
template <int R>
void score_pairs(const float* queries, const bf16* pairs, std::int64_t head_size, float* logits) {
  vf sums[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) sums[r][j] = vf::set(0.0f);
  for (std::int64_t d = 0; d < head_size; d += 2, pairs += 2 * kTile) {
    vf first[kVectors], second[kVectors];
    for (int j = 0; j < kVectors; ++j) first[j] = first_of_pairs(pairs + 2 * j * vf::W);
    for (int j = 0; j < kVectors; ++j) second[j] = second_of_pairs(pairs + 2 * j * vf::W);
    for (int r = 0; r < R; ++r) {
      const vf q = vf::set(queries[r * head_size + d]), then = vf::set(queries[r * head_size + d + 1]);
      for (int j = 0; j < kVectors; ++j) sums[r][j] = fma(then, second[j], fma(q, first[j], sums[r][j]));
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) sums[r][j].store(logits + r * kTile + j * vf::W);
}

// How values lie: as floats, or as bfloat16.
struct AsFloats {
  const float* const* lines;
  vf load(std::int64_t k, std::int64_t column) const { return vf::load(lines[k] + column); }
};
struct AsHalves {
  const char* const* lines;
  vf load(std::int64_t k, std::int64_t column) const { return widen_row(lines[k] + column * std::int64_t{sizeof(bf16)}); }
};

// N vectors of the values of keys `range`, weighed for R rows; each entry is one chain over the keys.
template <int R, int N, class Values>
void weigh(const float* weights, Values values, Range range, std::int64_t column, const Found* next,
           const Sum* sums) {
  static const Found nothing{};
  Ahead ahead(next == nullptr ? nothing.values : next->values, next == nullptr ? nothing : *next,
              range.end - range.begin);
  vf acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) acc[r][j] = vf::set(0.0f);
  for (std::int64_t k = range.begin; k < range.end; ++k) {
    if (next != nullptr) ahead.ask();
    vf v[N];
    for (int j = 0; j < N; ++j) v[j] = values.load(k, column + j * vf::W);
    for (int r = 0; r < R; ++r) {
      const vf w = vf::set(weights[r * kTile + k]);
      for (int j = 0; j < N; ++j) acc[r][j] = fma(w, v[j], acc[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) acc[r][j].store(sums[r].values + column + j * vf::W);
}

// Near zero the exponential would cancel, which a large cap makes visible: there the first terms of the series do.
vf tanh(vf x) {
  const vf one = vf::set(1.0f), bound = vf::set(0.25f);
  const vf far = one - vf::set(2.0f) / (exp(x + x) + one);
  const vf near = min(max(x, vf::set(-0.25f)), bound), square = near * near;
  vf series = vf::set(62.0f / 2835.0f);
  series = fma(series, square, vf::set(-17.0f / 315.0f));
  series = fma(series, square, vf::set(2.0f / 15.0f));
  series = fma(series, square, vf::set(-1.0f / 3.0f));
  series = fma(series * square, near, near);
  // 1 beyond the bound, 0 within: there is no choice by lanes at every level.
  const vf is_far = min(max((max(x, vf::set(0.0f) - x) - bound) * vf::set(1e30f), vf::set(0.0f)), one);
  return fma(is_far, far - series, series);
}

// Whole vectors that touch `range`.
Range widen(Range range) { return {range.begin / vf::W * vf::W, round_up(range.end, vf::W)}; }

void fill(float* line, std::int64_t begin, std::int64_t end, float value) {
  for (std::int64_t i = begin; i < end; ++i) line[i] = value;
}

}  // namespace

// Caps and biases, and logits of base 2. Not inlined: all paths must run the same instructions.
__attribute__((noinline)) void adjust(float* line, Range seen, float cap, const float* slope, std::int64_t distance) {
  if (seen.empty() || (cap == std::numeric_limits<float>::infinity() && slope == nullptr)) return;
  const Range whole = widen(seen);
  alignas(kAlignment) float lanes[vf::W];
  for (int i = 0; i < vf::W; ++i) lanes[i] = static_cast<float>(i);
  const vf offsets = vf::load(lanes), base = vf::set(kLog2E);
  for (std::int64_t i = whole.begin; i < whole.end; i += vf::W) {
    vf x = vf::load(line + i);
    if (cap != std::numeric_limits<float>::infinity()) {
      x = tanh(x / vf::set(cap)) * vf::set(cap) * base;
    }
    if (slope != nullptr) {
      const vf away = vf::set(static_cast<float>(distance - i)) - offsets;
      x = fma(vf::set(-*slope * kLog2E), away, x);
    }
    x.store(line + i);
  }
}

__attribute__((noinline)) float peak(float* line, Range seen) {
  if (seen.empty()) return kNothing;
  const Range whole = widen(seen);
  fill(line, whole.begin, seen.begin, kNothing);
  fill(line, seen.end, whole.end, kNothing);
  vf best = vf::load(line + whole.begin);
  for (std::int64_t i = whole.begin + vf::W; i < whole.end; i += vf::W) best = max(best, vf::load(line + i));
  return largest(best);
}

__attribute__((noinline)) vf soften(float* line, Range seen, Range all, float largest) {
  vf total = vf::set(0.0f);
  if (!seen.empty()) {
    const Range whole = widen(seen);
    const vf shift = vf::set(largest);
    for (std::int64_t i = whole.begin; i < whole.end; i += vf::W) {
      const vf weight = exp2_below(vf::load(line + i) - shift);
      total = total + weight;
      weight.store(line + i);
    }
  }
  fill(line, all.begin, std::min(seen.begin, all.end), 0.0f);
  fill(line, std::max(seen.end, all.begin), all.end, 0.0f);
  return total;
}

namespace {

template <int R, class Values>
void weigh_all(const TileView& tile, Values values, const float* weights, Range all, const Found* next, const Sum* sums) {
  std::int64_t column = 0;
  for (; column + kColumns <= tile.padded_size; column += kColumns, next = nullptr)
    weigh<R, kVectors>(weights, values, all, column, next, sums);
  for (; column < tile.padded_size; column += vf::W, next = nullptr)
    weigh<R, 1>(weights, values, all, column, next, sums);
}

template <int R>
void attend_rows(const TileView& tile, const RowBlock& block, const Logits& logits, const Found* next, Sum* sums) {
  Range all{kTile, 0};
  for (int r = 0; r < R; ++r) {
    if (block.seen[r].empty()) continue;
    all.begin = std::min(all.begin, block.seen[r].begin);
    all.end = std::max(all.end, block.seen[r].end);
  }
  for (std::int64_t k = all.begin / kColumns * kColumns; k < all.end; k += kColumns) {
    if (tile.pairs != nullptr) {
      score_pairs<R>(block.queries, tile.pairs + 2 * k, tile.head_size, block.logits + k);
    } else {
      score<R>(block.queries, tile.keys + k, tile.head_size, block.logits + k);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* line = block.logits + r * kTile;
    adjust(line, block.seen[r], logits.cap, block.slopes[r], block.places[r] - tile.position);
    sums[r].largest = peak(line, block.seen[r]);
  }
  // One thing for all rows after the other: within a row everything waits for what came before.
  vf totals[R];
  for (int r = 0; r < R; ++r) totals[r] = soften(block.logits + r * kTile, block.seen[r], all, sums[r].largest);
  for (int r = 0; r < R; ++r) sums[r].weight = sum(totals[r]);
  if (tile.pairs != nullptr) {
    weigh_all<R>(tile, AsHalves{tile.halves}, block.logits, all, next, sums);
  } else {
    weigh_all<R>(tile, AsFloats{tile.values}, block.logits, all, next, sums);
  }
}

}  // namespace

void attend(const TileView& tile, const RowBlock& block, const Logits& logits, const Found* next, Sum* sums) {
  using Call = void (*)(const TileView&, const RowBlock&, const Logits&, const Found*, Sum*);
  static constexpr Call calls[kRowBlock] = {attend_rows<1>, attend_rows<2>, attend_rows<3>,
                                            attend_rows<4>, attend_rows<5>, attend_rows<6>};
  calls[block.rows - 1](tile, block, logits, next, sums);
}

__attribute__((noinline)) void merge(Sum& total, const Sum& part, std::int64_t padded_size) {
  if (part.largest == kNothing) return;
  if (total.largest == kNothing) {
    total.largest = part.largest;
    total.weight = part.weight;
    for (std::int64_t d = 0; d < padded_size; d += vf::W) vf::load(part.values + d).store(total.values + d);
    return;
  }
  const float most = std::max(total.largest, part.largest);
  const vf keep = exp2_below(vf::set(total.largest - most)), take = exp2_below(vf::set(part.largest - most));
  for (std::int64_t d = 0; d < padded_size; d += vf::W)
    fma(take, vf::load(part.values + d), keep * vf::load(total.values + d)).store(total.values + d);
  alignas(kAlignment) float lanes[vf::W];
  fma(take, vf::set(part.weight), keep * vf::set(total.weight)).store(lanes);
  total.largest = most;
  total.weight = lanes[0];
}

}  // namespace hp
