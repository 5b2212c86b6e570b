// Planning: query tokens of a row that share tiles of keys are one item per KV head; threads take the largest first.
// Where there are few items with long contexts (a lone request that decodes), the tiles of one item go to several
// threads, and are merged afterwards in the order in which one thread would have merged them.
#include "attention.h"

#include <cmath>

#include "api.h"
#include "attention_source.h"
#include "attention_split.h"
#include "attention_tile.h"

namespace hp {
namespace {

constexpr std::int64_t kItemRows = 192;  // query rows that pay for transposing a tile of keys
constexpr std::int64_t kSplitItemRows = 384;  // and for taking one apart
constexpr std::int64_t kItemTokens = 64, kSplitItemTokens = 128;
constexpr std::int64_t kLeastTokens = 8;
constexpr std::int64_t kLightRows = 24;  // so few that the tiles of an item are worth dividing
constexpr std::int64_t kItemsPerThread = 4;
constexpr std::int64_t kSeries = 8;      // most pieces of light items that a thread takes at once
constexpr float kLn2 = 0.693147180559945309f;

alignas(kAlignment) float no_values[kMaxHeadSize] = {};

// Query tokens [begin, end) of a row, and the tiles of keys that they see.
struct Item {
  std::int64_t row, head, begin, end, first_tile, last_tile, cost;
  Sum* kept;  // [tiles][query rows] where the tiles are divided, or null
};

struct Piece {
  const Item* item;
  std::int64_t first_tile, last_tile;
};

// A tile of a piece: what a thread is at.
struct Visit {
  const Piece* piece;
  std::int64_t tile;
};

// What a thread works with.
struct Desk {
  TileRoom room;
  Found found[2];  // of this tile and of the next one
  float *queries, *logits;
  Sum *totals, *partial;
  SplitRoom split;
};

Sum* take_sums(Arena& arena, std::int64_t count, std::int64_t padded_size) {
  Sum* sums = arena.take<Sum>(count);
  float* values = arena.take<float>(count * padded_size);
  for (std::int64_t i = 0; i < count; ++i) sums[i] = {kNothing, 0.0f, values + i * padded_size};
  return sums;
}

// Which keys of a tile `keys` are.
Range within(std::int64_t tile, Range keys) {
  const Range part{std::max<std::int64_t>(keys.begin - tile * kTile, 0), std::min(keys.end - tile * kTile, kTile)};
  return part.empty() ? Range{0, 0} : part;
}

class Step {
 public:
  Step(const AttentionLayer& layer, const AttentionRows& rows, const Source& source, const AttentionTokens& tokens)
      : layer_(layer), rows_(rows), source_(source), tokens_(tokens), group_(layer.heads / layer.kv_heads) {
    const bool is_capped = layer.soft_cap != std::numeric_limits<float>::infinity();
    logits_ = {is_capped ? layer.scale : layer.scale * kLog2E, layer.soft_cap};
    may_split_ = layer.parts > 0 && may_split(layer.parts);
  }

  void run(Pool& pool, Arena& arena) const;

 private:
  std::int64_t length(std::int64_t row) const { return rows_.query_start[row + 1] - rows_.query_start[row]; }
  std::int64_t position(const Item& item, std::int64_t token) const {
    return rows_.seq_lens[item.row] - length(item.row) + token;
  }
  std::int64_t query_rows(const Item& item) const { return (item.end - item.begin) * group_; }
  std::int64_t tiles(const Item& item) const { return item.last_tile - item.first_tile; }
  bool is_split(const Item& item) const { return may_split_ && query_rows(item) >= kSplitRows; }

  Range seen(const Item& item, std::int64_t token) const;
  Range seen(const Item& item, std::int64_t token, std::int64_t tile) const;
  std::int64_t tokens_per_item(int threads) const;
  std::int64_t count_items(std::int64_t tokens) const;
  void make_items(std::int64_t tokens, Item* items) const;
  std::int64_t divide(Item* items, std::int64_t count, int threads, Piece* pieces, Arena& arena) const;

  Desk make_desk(std::int64_t most_rows, Arena& arena) const;
  void work(const Piece* begin, const Piece* end, Desk& desk) const;
  bool advance(Visit& visit, const Piece* end) const;
  void find(const Visit& visit, Found& found) const;
  void load_queries(const Item& item, float* queries) const;
  void pass(const Visit& visit, const Found& found, const Found* next, Desk& desk) const;
  void pass_split(const Visit& visit, const Found& found, Desk& desk) const;
  void finish(const Item& item, Sum* totals) const;

  const AttentionLayer& layer_;
  const AttentionRows& rows_;
  const Source& source_;
  const AttentionTokens& tokens_;
  const std::int64_t group_;
  Logits logits_;
  bool may_split_;
};

// Positions of the keys that a token sees.
Range Step::seen(const Item& item, std::int64_t token) const {
  const std::int64_t at = position(item, token), all = rows_.seq_lens[item.row];
  const bool is_windowed = layer_.window < all;
  const std::int64_t begin = is_windowed ? std::max<std::int64_t>(0, at - layer_.window + 1) : 0;
  if (rows_.causal) return {begin, at + 1};
  return {begin, is_windowed ? std::min(all, at + layer_.window) : all};
}

Range Step::seen(const Item& item, std::int64_t token, std::int64_t tile) const {
  return within(tile, seen(item, token));
}

std::int64_t Step::count_items(std::int64_t tokens) const {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < rows_.rows; ++row) count += ceil_div(length(row), tokens) * layer_.kv_heads;
  return count;
}

// More, smaller items where there would be too few for all threads.
std::int64_t Step::tokens_per_item(int threads) const {
  std::int64_t tokens = may_split_ ? std::clamp<std::int64_t>(kSplitItemRows / group_, 1, kSplitItemTokens)
                                   : std::clamp<std::int64_t>(kItemRows / group_, 1, kItemTokens);
  while (tokens > kLeastTokens && count_items(tokens) < threads * kItemsPerThread) tokens /= 2;
  return tokens;
}

void Step::make_items(std::int64_t tokens, Item* items) const {
  Item* next = items;
  for (std::int64_t row = 0; row < rows_.rows; ++row) {
    for (std::int64_t begin = 0; begin < length(row); begin += tokens) {
      Item item{row, 0, begin, std::min(begin + tokens, length(row)), 0, 0, 0, nullptr};
      const std::int64_t first = seen(item, item.begin).begin, last = seen(item, item.end - 1).end;
      item.first_tile = first / kTile;
      item.last_tile = ceil_div(last, kTile);
      item.cost = (last - first) * (query_rows(item) + kRowBlock);
      for (; item.head < layer_.kv_heads; ++item.head) *next++ = item;
    }
  }
  const auto is_larger = [](const Item& a, const Item& b) { return a.cost > b.cost; };
  if (!std::is_sorted(items, next, is_larger)) std::sort(items, next, is_larger);
}

// One piece per item, or several where items are few; their number. Without `pieces` it only counts.
std::int64_t Step::divide(Item* items, std::int64_t count, int threads, Piece* pieces, Arena& arena) const {
  std::int64_t all_tiles = 0;
  for (std::int64_t i = 0; i < count; ++i) all_tiles += tiles(items[i]);
  const std::int64_t wanted = threads * kItemsPerThread;
  const std::int64_t most = threads > 1 && count < wanted ? ceil_div(all_tiles, wanted) : all_tiles;
  std::int64_t made = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Item& item = items[i];
    const bool is_divided = tiles(item) > most && query_rows(item) <= kLightRows;
    const std::int64_t stride = is_divided ? most : tiles(item);
    if (is_divided && pieces != nullptr)
      item.kept = take_sums(arena, tiles(item) * query_rows(item), source_.padded_size());
    for (std::int64_t tile = item.first_tile; tile < item.last_tile; tile += stride, ++made)
      if (pieces != nullptr) pieces[made] = {&item, tile, std::min(tile + stride, item.last_tile)};
  }
  return made;
}

Desk Step::make_desk(std::int64_t most_rows, Arena& arena) const {
  Desk desk;
  desk.room.columns = arena.take<float>(source_.column_floats());
  desk.room.widened = arena.take<float>(source_.widened_floats());
  desk.queries = arena.take<float>(most_rows * layer_.head_size);
  desk.logits = arena.take<float>(kRowBlock * kTile);
  desk.totals = take_sums(arena, most_rows, source_.padded_size());
  desk.partial = take_sums(arena, may_split_ ? kSplitBlock : kRowBlock, source_.padded_size());
  desk.split = {};
  if (may_split_ && most_rows >= kSplitRows)
    desk.split = take_split_room(arena, layer_.parts, most_rows, layer_.head_size, source_.padded_size());
  return desk;
}

void Step::run(Pool& pool, Arena& arena) const {
  const std::int64_t tokens = tokens_per_item(pool.size()), count = count_items(tokens);
  if (count == 0) return;
  Item* items = arena.take<Item>(count);
  make_items(tokens, items);
  const std::int64_t num_pieces = divide(items, count, pool.size(), nullptr, arena);
  Piece* pieces = arena.take<Piece>(num_pieces);
  divide(items, count, pool.size(), pieces, arena);
  std::int64_t most_rows = 0;
  for (std::int64_t i = 0; i < count; ++i) most_rows = std::max(most_rows, query_rows(items[i]));
  Desk* desks = arena.take<Desk>(pool.size());
  for (int thread = 0; thread < pool.size(); ++thread) desks[thread] = make_desk(most_rows, arena);

  // Who computes several pieces in a row can ask for the next one's keys before it gets there.
  const std::int64_t wanted = num_pieces / (2 * kItemsPerThread * pool.size());
  const std::int64_t series = most_rows > kLightRows ? 1 : std::clamp<std::int64_t>(wanted, 1, kSeries);
  pool.run(ceil_div(num_pieces, series), [&](std::int64_t number, int thread) {
    work(pieces + number * series, pieces + std::min(num_pieces, (number + 1) * series), desks[thread]);
  });
  if (num_pieces == count) return;
  pool.run(count, [&](std::int64_t i, int thread) {
    const Item& item = items[i];
    if (item.kept == nullptr) return;
    const std::int64_t rows = query_rows(item);
    Sum* totals = desks[thread].totals;
    for (std::int64_t row = 0; row < rows; ++row) {
      totals[row].largest = kNothing;
      for (std::int64_t tile = 0; tile < tiles(item); ++tile)
        merge(totals[row], item.kept[tile * rows + row], source_.padded_size());
    }
    finish(item, totals);
  });
}

void Step::work(const Piece* begin, const Piece* end, Desk& desk) const {
  Visit visit{begin, begin->first_tile};
  find(visit, desk.found[0]);
  for (int turn = 0, goes_on = 1; goes_on != 0; turn ^= 1) {
    const Visit now = visit;
    const Item& item = *now.piece->item;
    goes_on = advance(visit, end);
    if (goes_on) find(visit, desk.found[turn ^ 1]);
    if (now.tile == now.piece->first_tile) {
      load_queries(item, desk.queries);
      if (is_split(item)) split_queries(desk.queries, query_rows(item), desk.split);
      for (std::int64_t row = 0; row < query_rows(item); ++row) desk.totals[row].largest = kNothing;
    }
    if (is_split(item)) {
      pass_split(now, desk.found[turn], desk);
    } else {
      pass(now, desk.found[turn], goes_on ? &desk.found[turn ^ 1] : nullptr, desk);
    }
    if (now.tile + 1 == now.piece->last_tile && item.kept == nullptr) finish(item, desk.totals);
  }
}

// False where nothing follows. Pieces have at least one tile, since a token sees itself.
bool Step::advance(Visit& visit, const Piece* end) const {
  if (++visit.tile < visit.piece->last_tile) return true;
  if (++visit.piece == end) return false;
  visit.tile = visit.piece->first_tile;
  return true;
}

void Step::find(const Visit& visit, Found& found) const {
  const Item& item = *visit.piece->item;
  const Range whole = within(visit.tile, {seen(item, item.begin).begin, seen(item, item.end - 1).end});
  source_.find(item.row, item.head, visit.tile * kTile, whole, found);
}

// [query rows][head size], with the scale in them. The heads of a token lie side by side.
void Step::load_queries(const Item& item, float* queries) const {
  const std::int64_t width = group_ * layer_.head_size, first = rows_.query_start[item.row];
  for (std::int64_t token = item.begin; token < item.end; ++token) {
    const float* query = tokens_.query + (first + token) * tokens_.query_stride + item.head * width;
    for (std::int64_t i = 0; i < width; ++i) *queries++ = query[i] * logits_.query_scale;
  }
}

// All rows of an item against one tile.
void Step::pass(const Visit& visit, const Found& found, const Found* next, Desk& desk) const {
  const Item& item = *visit.piece->item;
  const std::int64_t tile = visit.tile, rows = query_rows(item);
  const bool in_pairs = rows <= kRowBlock && source_.keeps_pairs();
  const TileView view = in_pairs ? source_.load_pairs(found, tile * kTile, next, desk.room)
                                 : source_.load(found, tile * kTile, next, desk.room);
  Sum* kept = item.kept == nullptr ? nullptr : item.kept + (tile - item.first_tile) * rows;
  for (std::int64_t first = 0; first < rows; first += kRowBlock) {
    RowBlock block;
    block.rows = std::min(kRowBlock, rows - first);
    block.queries = desk.queries + first * layer_.head_size;
    block.logits = desk.logits;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      const std::int64_t token = item.begin + (first + r) / group_, head = item.head * group_ + (first + r) % group_;
      block.seen[r] = seen(item, token, tile);
      block.places[r] = position(item, token);
      block.slopes[r] = layer_.alibi_slopes == nullptr ? nullptr : layer_.alibi_slopes + head;
    }
    attend(view, block, logits_, first == 0 ? next : nullptr, kept == nullptr ? desk.partial : kept + first);
    if (kept != nullptr) continue;
    for (std::int64_t r = 0; r < block.rows; ++r)
      merge(desk.totals[first + r], desk.partial[r], source_.padded_size());
  }
}

// The same in bfloat16.
void Step::pass_split(const Visit& visit, const Found& found, Desk& desk) const {
  const Item& item = *visit.piece->item;
  const std::int64_t rows = query_rows(item), end = found.range.end;
  source_.gather(found, {0, round_up(end, kSplitBlock)}, desk.room);
  split_tile(desk.room.keys, desk.room.values, end, desk.split);
  for (std::int64_t first = 0; first < rows; first += kSplitBlock) {
    SplitBlock block;
    block.first = first;
    block.rows = std::min(kSplitBlock, rows - first);
    std::int64_t last_seen = 0;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      const std::int64_t token = item.begin + (first + r) / group_, head = item.head * group_ + (first + r) % group_;
      block.seen[r] = seen(item, token, visit.tile);
      block.distances[r] = position(item, token) - visit.tile * kTile;
      block.slopes[r] = layer_.alibi_slopes == nullptr ? nullptr : layer_.alibi_slopes + head;
      last_seen = std::max(last_seen, block.seen[r].end);
    }
    if (last_seen == 0) continue;
    attend_split(block, last_seen, logits_.cap, desk.split, desk.partial);
    for (std::int64_t r = 0; r < block.rows; ++r) merge(desk.totals[first + r], desk.partial[r], source_.padded_size());
  }
}

void Step::finish(const Item& item, Sum* totals) const {
  const std::int64_t size = layer_.head_size;
  for (std::int64_t row = 0; row < query_rows(item); ++row) {
    const std::int64_t token = rows_.query_start[item.row] + item.begin + row / group_;
    const std::int64_t head = item.head * group_ + row % group_;
    Sum& total = totals[row];
    if (layer_.sinks != nullptr)
      merge(total, {layer_.sinks[head] * kLog2E, 1.0f, no_values}, source_.padded_size());
    const bool is_empty = total.largest == kNothing;
    const float share = is_empty ? 0.0f : 1.0f / total.weight;
    float* output = tokens_.output + token * tokens_.output_stride + head * size;
    if (is_empty) {
      std::fill(output, output + size, 0.0f);
    } else {
      for (std::int64_t d = 0; d < size; ++d) output[d] = total.values[d] * share;
    }
    if (tokens_.lse != nullptr)
      tokens_.lse[token * layer_.heads + head] =
          is_empty ? kNothing : (total.largest + std::log2(total.weight)) * kLn2;
  }
}

void check(const AttentionLayer& layer, const AttentionRows& rows, const AttentionTokens& tokens) {
  const std::int64_t width = layer.heads * layer.head_size;
  require(tokens.tokens <= 1 || (tokens.query_stride >= width && tokens.output_stride >= width), "tokens ",
          tokens.query_stride, " and ", tokens.output_stride, " apart cannot hold ", layer.heads, " heads of ",
          layer.head_size);
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    const std::int64_t begin = rows.query_start[row], end = rows.query_start[row + 1];
    require(0 <= begin && begin <= end && end <= tokens.tokens, "row ", row, " claims tokens ", begin, " to ", end,
            " of ", tokens.tokens);
    require(rows.seq_lens[row] >= end - begin, "row ", row, " has ", end - begin, " new tokens, but a length of ",
            rows.seq_lens[row]);
  }
}

void check_blocks(const AttentionRows& rows, const KVCache& cache) {
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    const std::int64_t used = ceil_div(rows.seq_lens[row], cache.block_size);
    require(used <= rows.table_columns, "row ", row, " has ", rows.seq_lens[row], " tokens in ", used,
            " blocks, its table ", rows.table_columns);
    const std::int32_t* blocks = rows.block_table + row * rows.table_stride;
    std::int32_t least = 0, most = 0;
    for (std::int64_t i = 0; i < used; ++i) {
      least = std::min(least, blocks[i]);
      most = std::max(most, blocks[i]);
    }
    require(least >= 0 && most < cache.blocks, "row ", row, " names block ", least < 0 ? least : most, " of ",
            cache.blocks);
  }
}

}  // namespace

void attention(const AttentionLayer& layer, const AttentionRows& rows, const KVCache& cache,
               const AttentionTokens& tokens, Pool& pool, Arena& arena) {
  const Source source(layer, rows, cache);
  check(layer, rows, tokens);
  check_blocks(rows, cache);
  const Arena::Scope scope(arena);
  Step(layer, rows, source, tokens).run(pool, arena);
}

void attention(const AttentionLayer& layer, const AttentionRows& rows, const FreshKV& fresh,
               const AttentionTokens& tokens, Pool& pool, Arena& arena) {
  const Source source(layer, rows, fresh);
  check(layer, rows, tokens);
  for (std::int64_t row = 0; row < rows.rows; ++row)
    require(rows.seq_lens[row] == rows.query_start[row + 1] - rows.query_start[row], "row ", row,
            " has keys from before this step, which are not here");
  const Arena::Scope scope(arena);
  Step(layer, rows, source, tokens).run(pool, arena);
}

}  // namespace hp

HP_EXPORT int hp_attention(hp::Runtime* runtime, const hp::AttentionLayer* layer, const hp::AttentionRows* rows,
                           const hp::KVCache* cache, const hp::AttentionTokens* tokens) {
  return hp::guarded(runtime, [&] { hp::attention(*layer, *rows, *cache, *tokens, runtime->pool, runtime->arena); });
}

HP_EXPORT int hp_attention_fresh(hp::Runtime* runtime, const hp::AttentionLayer* layer, const hp::AttentionRows* rows,
                                 const hp::FreshKV* fresh, const hp::AttentionTokens* tokens) {
  return hp::guarded(runtime, [&] { hp::attention(*layer, *rows, *fresh, *tokens, runtime->pool, runtime->arena); });
}
