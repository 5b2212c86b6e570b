#include "attention_split.h"

#include <cstring>
#include <type_traits>

#include "bf16_parts.h"

namespace hp {

#if defined(__AVX512BF16__)

namespace {

using split::Half;

constexpr std::int64_t kDepth = split::kDepth, kWide = split::kTileRows, kValues = split::kTile;
static_assert(kSplitBlock == split::kPairRows && kTile % kSplitBlock == 0 && kWide == vf::W);

std::int64_t depth_blocks(const SplitRoom& room) { return ceil_div(room.head_size, kDepth); }

struct Columns {
  const Half *left, *right;  // [blocks][parts][16][32]; `right` may be `left`, where there is no other
  std::int64_t apart;        // from block to block
};

#if defined(__AMX_BF16__)

using Unit = amx::Tiles;

// Sums of twice sixteen rows with twice sixteen columns are registers 0 to 3, rows 4 and 5, columns 6 and 7.
template <bool Both>
inline __attribute__((always_inline)) void take_rows(const Half* rows) {
  _tile_loadd(4, rows, amx::kTileBytes);
  if constexpr (Both) _tile_loadd(5, rows + kValues, amx::kTileBytes);
}

inline __attribute__((always_inline)) void take_columns(const Half* left, const Half* right) {
  _tile_loadd(6, left, amx::kTileBytes);
  _tile_loadd(7, right, amx::kTileBytes);
}

template <bool Both>
inline __attribute__((always_inline)) void add() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Both) _tile_dpbf16ps(2, 5, 6);
  if constexpr (Both) _tile_dpbf16ps(3, 5, 7);
}

// Rows [blocks][parts][32][32] times columns, into lines `stride` apart. Small products come first, each sharing a side
// with the one before.
template <int Parts, bool Both>
void multiply(const Half* rows, Columns columns, std::int64_t blocks, float* target, std::int64_t stride) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Both) _tile_zero(2);
  if constexpr (Both) _tile_zero(3);
  for (; blocks > 0; --blocks, rows += split::kPairBlockOf<Parts>) {
    const auto part_of_rows = [&](int part) __attribute__((always_inline)) { take_rows<Both>(rows + part * split::kPairSize); };
    const auto part_of_columns = [&](int part) __attribute__((always_inline)) {
      take_columns(columns.left + part * kValues, columns.right + part * kValues);
    };
    part_of_rows(0);
    if constexpr (Parts == 3) {
      part_of_columns(2);
      add<Both>();
    }
    if constexpr (Parts > 1) {
      part_of_columns(1);
      add<Both>();
      part_of_rows(1);
      if constexpr (Parts == 3) add<Both>();
      part_of_columns(0);
      add<Both>();
      if constexpr (Parts == 3) part_of_rows(2);
      if constexpr (Parts == 3) add<Both>();
      part_of_rows(0);
    } else {
      part_of_columns(0);
    }
    add<Both>();
    columns.left += columns.apart;
    columns.right += columns.apart;
  }
  const std::int64_t bytes = stride * std::int64_t{sizeof(float)};
  _tile_stored(0, target, bytes);
  if (columns.right != columns.left) _tile_stored(1, target + kWide, bytes);
  if constexpr (Both) _tile_stored(2, target + kWide * stride, bytes);
  if constexpr (Both) {
    if (columns.right != columns.left) _tile_stored(3, target + kWide * stride + kWide, bytes);
  }
}

#else

struct Unit {};  // vectors need no leave

// R rows with one or two vectors of columns; every sum is one chain over the inputs, two of which are added at a time.
template <int R, int N>
inline __attribute__((always_inline)) void multiply_rows(const Half* rows, Columns columns, std::int64_t blocks,
                                                         float* target, std::int64_t stride) {
  __m512 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) sums[r][j] = _mm512_setzero_ps();
  for (; blocks > 0; --blocks, rows += split::kPairSize) {
    for (std::int64_t pair = 0; pair < kDepth; pair += 2) {
      const __m512i values[2] = {_mm512_loadu_si512(columns.left + pair * kWide),
                                 _mm512_loadu_si512(columns.right + pair * kWide)};
      for (int r = 0; r < R; ++r) {
        std::int32_t both;
        std::memcpy(&both, rows + r * kDepth + pair, sizeof(both));
        const __m512i spread = _mm512_set1_epi32(both);
        for (int j = 0; j < N; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], (__m512bh)values[j], (__m512bh)spread);
      }
    }
    columns.left += columns.apart;
    columns.right += columns.apart;
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) _mm512_storeu_ps(target + r * stride + j * kWide, sums[r][j]);
}

// Rows [blocks][32][32] times columns, into lines `stride` apart. More parts than one would be slower than floats.
template <int Parts, bool Both>
void multiply(const Half* rows, Columns columns, std::int64_t blocks, float* target, std::int64_t stride) {
  static_assert(Parts == 1);
  constexpr int kHeld = 8;
  const bool is_pair = columns.left != columns.right;
  for (std::int64_t first = 0; first < (Both ? 2 : 1) * kWide; first += kHeld) {
    if (is_pair) {
      multiply_rows<kHeld, 2>(rows + first * kDepth, columns, blocks, target + first * stride, stride);
    } else {
      multiply_rows<kHeld, 1>(rows + first * kDepth, columns, blocks, target + first * stride, stride);
    }
  }
}

#endif

// Sixteen keys as columns: [blocks][parts][16 pairs of entries][16 keys][2].
template <int Parts>
void split_keys(const float* const* keys, const SplitRoom& room, Half* target) {
  alignas(kAlignment) Half parts[Parts][kWide][kDepth];
  for (std::int64_t d = 0; d < room.head_size; d += kDepth, target += Parts * kValues) {
    const std::int64_t left = room.head_size - d;
    const std::uint32_t mask = left >= kDepth ? ~0u : (1u << left) - 1;
    for (std::int64_t i = 0; i < kWide; ++i)
      split::split_inputs<Parts>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), keys[i] + d),
                                 _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), keys[i] + d + kWide), parts[0][i],
                                 kValues);
    for (int part = 0; part < Parts; ++part) {
      // Pairs of halves move like floats, unread.
      const float* lines[kWide];
      for (std::int64_t i = 0; i < kWide; ++i) lines[i] = reinterpret_cast<const float*>(parts[part][i]);
      transpose_square(lines, 0, reinterpret_cast<float*>(target + part * kValues), kWide);
    }
  }
}

// 32 keys' values as columns: [padded size / 16][parts][16 pairs of keys][16 entries][2].
template <int Parts>
void split_values(const float* const* values, const SplitRoom& room, Half* target) {
  for (std::int64_t column = 0; column < room.padded_size; column += kWide, target += Parts * kValues)
    for (std::int64_t pair = 0; pair < kDepth / 2; ++pair)
      split::split_pair<Parts>(_mm512_loadu_ps(values[2 * pair] + column), _mm512_loadu_ps(values[2 * pair + 1] + column),
                               target + pair * kDepth, kValues);
}

template <int Parts>
void split_tile_in(const float* const* keys, const float* const* values, std::int64_t end, const SplitRoom& room) {
  const std::int64_t key_size = depth_blocks(room) * Parts * kValues, value_size = room.padded_size / kWide * Parts * kValues;
  for (std::int64_t first = 0; first < end; first += kSplitBlock) {
    for (std::int64_t half = 0; half < kSplitBlock; half += kWide)
      split_keys<Parts>(keys + first + half, room, room.keys + (first + half) / kWide * key_size);
    split_values<Parts>(values + first, room, room.values + first / kSplitBlock * value_size);
  }
}

template <int Parts, bool Both>
void attend_in(const SplitBlock& block, std::int64_t end, float cap, const SplitRoom& room, Sum* sums) {
  const std::int64_t depths = depth_blocks(room), key_size = depths * Parts * kValues;
  const std::int64_t stop = round_up(end, kSplitBlock), columns = room.padded_size / kWide;
  const Half* queries = room.queries + block.first / kSplitBlock * depths * split::kPairBlockOf<Parts>;
  {
    [[maybe_unused]] const Unit registers;
    for (std::int64_t key = 0; key < stop; key += kSplitBlock) {
      const Half* keys = room.keys + key / kWide * key_size;
      multiply<Parts, Both>(queries, {keys, keys + key_size, Parts * kValues}, depths, room.logits + key, kTile);
    }
  }
  const Range all{0, stop};
  vf totals[kSplitBlock];
  for (std::int64_t r = 0; r < block.rows; ++r) {
    float* line = room.logits + r * kTile;
    adjust(line, block.seen[r], cap, block.slopes[r], block.distances[r]);
    sums[r].largest = peak(line, block.seen[r]);
  }
  for (std::int64_t r = 0; r < block.rows; ++r)
    totals[r] = soften(room.logits + r * kTile, block.seen[r], all, sums[r].largest);
  for (std::int64_t r = 0; r < block.rows; ++r) sums[r].weight = sum(totals[r]);
  split::split_rows<Parts>(room.logits, kTile, block.rows, stop, 0, stop, room.weights);
  [[maybe_unused]] const Unit registers;
  for (std::int64_t column = 0; column < columns; column += 2) {
    const Half* values = room.values + column * Parts * kValues;
    const Half* right = column + 1 < columns ? values + Parts * kValues : values;
    multiply<Parts, Both>(room.weights, {values, right, columns * Parts * kValues}, stop / kDepth,
                          sums[0].values + column * kWide, room.padded_size);
  }
}

template <int Parts>
void attend_split_in(const SplitBlock& block, std::int64_t end, float cap, const SplitRoom& room, Sum* sums) {
  (block.rows > kWide ? attend_in<Parts, true> : attend_in<Parts, false>)(block, end, cap, room, sums);
}

#if defined(__AMX_BF16__)
constexpr int kMostParts = split::kParts;
#else
constexpr int kMostParts = 1;
#endif

// `call` with the number of parts as a constant.
template <class Call>
auto with_parts(int parts, Call&& call) {
  if constexpr (kMostParts == split::kParts) {
    if (parts == split::kParts) return call(std::integral_constant<int, split::kParts>{});
  }
  return call(std::integral_constant<int, 1>{});
}

}  // namespace

#if defined(__AMX_BF16__)
bool may_split(int) { return amx::is_allowed(); }
#else
bool may_split(int parts) { return parts <= kMostParts; }
#endif

SplitRoom take_split_room(Arena& arena, int parts, std::int64_t rows, std::int64_t head_size, std::int64_t padded_size) {
  require(parts == 1 || parts == kMostParts, "floats are taken apart into 1 or ", kMostParts, " parts, not ", parts);
  const std::int64_t depth = round_up(head_size, kDepth);
  SplitRoom room{parts, head_size, padded_size, nullptr, nullptr, nullptr, nullptr, nullptr};
  room.queries = arena.take<Half>(parts * round_up(rows, kSplitBlock) * depth);
  room.keys = arena.take<Half>(parts * kTile * depth);
  room.values = arena.take<Half>(parts * kTile * padded_size);
  room.weights = arena.take<Half>(parts * kSplitBlock * kTile);
  room.logits = arena.take<float>(kSplitBlock * kTile);
  return room;
}

void split_queries(const float* queries, std::int64_t rows, const SplitRoom& room) {
  const std::int64_t depth = round_up(room.head_size, kDepth);
  for (std::int64_t first = 0; first < rows; first += kSplitBlock) {
    const float* from = queries + first * room.head_size;
    Half* target = room.queries + first * depth * room.parts;
    with_parts(room.parts, [&](auto parts) {
      split::split_rows<parts()>(from, room.head_size, rows - first, room.head_size, 0, depth, target);
    });
  }
}

void split_tile(const float* const* keys, const float* const* values, std::int64_t end, const SplitRoom& room) {
  with_parts(room.parts, [&](auto parts) { split_tile_in<parts()>(keys, values, end, room); });
}

void attend_split(const SplitBlock& block, std::int64_t end, float cap, const SplitRoom& room, Sum* sums) {
  with_parts(room.parts, [&](auto parts) { attend_split_in<parts()>(block, end, cap, room, sums); });
}

#else

namespace {
[[noreturn]] void refuse() { fail("this level has no instructions for bfloat16"); }
}  // namespace

bool may_split(int) { return false; }
SplitRoom take_split_room(Arena&, int, std::int64_t, std::int64_t, std::int64_t) { refuse(); }
void split_queries(const float*, std::int64_t, const SplitRoom&) { refuse(); }
void split_tile(const float* const*, const float* const*, std::int64_t, const SplitRoom&) { refuse(); }
void attend_split(const SplitBlock&, std::int64_t, float, const SplitRoom&, Sum*) { refuse(); }

#endif

}  // namespace hp
