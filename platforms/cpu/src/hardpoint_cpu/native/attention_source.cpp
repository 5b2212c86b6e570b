#include "attention_source.h"

#include <cstring>

namespace hp {
namespace {

// What is read where no key is: never looked at, but finite.
alignas(kAlignment) const float zeros[kMaxHeadSize] = {};

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float widen_half(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16, exponent = (half >> 10) & 0x1fu, rest = half & 0x3ffu;
  if (exponent == 0x1fu) return from_bits(sign | 0x7f800000u | rest << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | rest << 13);
  const float small = static_cast<float>(rest) * 0x1p-24f;  // subnormal
  return sign != 0 ? -small : small;
}

std::uint16_t narrow_bfloat(float value) {
  const std::uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // NaN stays one
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

std::uint16_t narrow_half(float value) {
  const std::uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to more than 65504
  if (size < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded digits in the lowest bits.
    const std::uint32_t moved = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
    return static_cast<std::uint16_t>(sign | moved);
  }
  const std::uint32_t rounded = size + 0xfffu + (size >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

void check(const AttentionLayer& layer, const AttentionRows& rows) {
  require(layer.head_size > 0 && layer.head_size % 8 == 0 && layer.head_size <= kMaxHeadSize, "head size ",
          layer.head_size, " is no multiple of 8 up to ", kMaxHeadSize);
  require(layer.kv_heads > 0 && layer.heads > 0 && layer.heads % layer.kv_heads == 0, layer.heads,
          " query heads are no multiple of ", layer.kv_heads, " key and value heads");
  require(rows.rows >= 0 && layer.window > 0 && layer.soft_cap > 0, "rows ", rows.rows, ", window ", layer.window,
          " or soft cap ", layer.soft_cap, " is out of range");
}

}  // namespace

std::int64_t element_bytes(Stored stored) { return stored == Stored::kFloat32 ? 4 : 2; }

void widen_elements(Stored stored, const void* from, std::int64_t count, float* to) {
  if (stored == Stored::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const std::uint16_t*>(from);
  if (stored == Stored::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = from_bits(std::uint32_t{halves[i]} << 16);
    return;
  }
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
#endif
  for (; i < count; ++i) to[i] = widen_half(halves[i]);
}

void store_elements(Stored stored, const float* from, std::int64_t count, void* to) {
  if (stored == Stored::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto* halves = static_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < count; ++i)
    halves[i] = stored == Stored::kBFloat16 ? narrow_bfloat(from[i]) : narrow_half(from[i]);
}

Source::Source(const AttentionLayer& layer, const AttentionRows& rows, const KVCache& cache)
    : rows_(rows), head_size_(layer.head_size), padded_(round_up(layer.head_size, vf::W)), stored_(cache.stored) {
  check(layer, rows);
  const std::int64_t size = element_bytes(cache.stored);
  require(rows.rows == 0 || (cache.data != nullptr && rows.block_table != nullptr),
          "a cache or its block table is missing");
  require(cache.block_size > 0 && cache.blocks > 0, cache.blocks, " blocks of ", cache.block_size, " tokens");
  key_ = static_cast<const char*>(cache.data);
  value_ = key_ == nullptr ? nullptr : key_ + layer.head_size * size;
  block_size_ = cache.block_size;
  block_stride_ = cache.block_stride * size;
  key_stride_ = value_stride_ = cache.state_stride * size;
  key_head_stride_ = value_head_stride_ = cache.head_stride * size;
}

Source::Source(const AttentionLayer& layer, const AttentionRows& rows, const FreshKV& fresh)
    : rows_(rows), head_size_(layer.head_size), padded_(round_up(layer.head_size, vf::W)), stored_(Stored::kFloat32) {
  check(layer, rows);
  require(rows.block_table == nullptr, "keys of the step itself lie in no blocks");
  key_ = reinterpret_cast<const char*>(fresh.key);
  value_ = reinterpret_cast<const char*>(fresh.value);
  block_size_ = kUnbounded;
  block_stride_ = 0;
  key_stride_ = fresh.key_stride * std::int64_t{sizeof(float)};
  value_stride_ = fresh.value_stride * std::int64_t{sizeof(float)};
  key_head_stride_ = value_head_stride_ = layer.head_size * std::int64_t{sizeof(float)};
}

void Source::find(std::int64_t row, std::int64_t head, std::int64_t position, Range range, Found& found) const {
  found.range = range;
  found.lines = ceil_div(head_size_ * element_bytes(stored_), std::int64_t{kAlignment});
  for (std::int64_t i = range.begin; i < range.end;) {
    const std::int64_t column = (position + i) / block_size_, place = (position + i) % block_size_;
    std::int64_t state = place, block = 0;
    if (rows_.block_table != nullptr) {
      block = rows_.block_table[row * rows_.table_stride + column];
    } else {
      state += rows_.query_start[row];
    }
    const char* key = key_ + block * block_stride_ + head * key_head_stride_ + state * key_stride_;
    const char* value = value_ + block * block_stride_ + head * value_head_stride_ + state * value_stride_;
    const std::int64_t end = std::min(range.end, i + (block_size_ - place));
    for (; i < end; ++i, key += key_stride_, value += value_stride_) {
      found.keys[i] = key;
      found.values[i] = value;
    }
  }
}

void Source::gather(const Found& found, Range whole, TileRoom& room) const {
  const Range range = found.range;
  for (std::int64_t i = whole.begin; i < whole.end; ++i) {
    if (i < range.begin || i >= range.end) {
      room.keys[i] = room.values[i] = zeros;
    } else if (is_direct()) {
      room.keys[i] = reinterpret_cast<const float*>(found.keys[i]);
      room.values[i] = reinterpret_cast<const float*>(found.values[i]);
    } else {
      float* key = room.widened + i * padded_;
      float* value = key + kTile * padded_;
      widen_elements(stored_, found.keys[i], head_size_, key);
      widen_elements(stored_, found.values[i], head_size_, value);
      for (std::int64_t d = head_size_; d < padded_; ++d) value[d] = 0.0f;
      room.keys[i] = key;
      room.values[i] = value;
    }
  }
}

TileView Source::load(const Found& found, std::int64_t position, const Found* next, TileRoom& room) const {
  const Range whole{found.range.begin / kColumns * kColumns, round_up(found.range.end, kColumns)};
  gather(found, whole, room);
  transpose_keys(room.keys, whole, head_size_, next, room.columns);
  return {room.columns, room.values, nullptr, nullptr, position, head_size_, padded_};
}

TileView Source::load_pairs(const Found& found, std::int64_t position, const Found* next, TileRoom& room) const {
  const Range whole{found.range.begin / kColumns * kColumns, round_up(found.range.end, kColumns)};
  // A pair moves like a float, unread.
  for (std::int64_t i = whole.begin; i < whole.end; ++i)
    room.keys[i] = found.range.begin <= i && i < found.range.end ? reinterpret_cast<const float*>(found.keys[i]) : zeros;
  transpose_keys(room.keys, whole, head_size_ / 2, next, room.columns);
  const auto* pairs = reinterpret_cast<const bf16*>(room.columns);
  return {nullptr, nullptr, pairs, found.values, position, head_size_, padded_};
}

}  // namespace hp
