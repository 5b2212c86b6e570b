#include "api.h"
#include "attention_source.h"

namespace hp {
namespace {

constexpr std::int64_t kGrain = 32;  // tokens worth handing to another thread

}  // namespace

void write_kv(const AttentionLayer& layer, const FreshKV& fresh, const std::int64_t* slots, std::int64_t count,
              const KVCache& cache, Pool& pool) {
  const std::int64_t size = layer.head_size, width = layer.kv_heads * size;
  require(count <= 1 || (fresh.key_stride >= width && fresh.value_stride >= width), "tokens ", fresh.key_stride,
          " and ", fresh.value_stride, " apart cannot hold ", layer.kv_heads, " heads of ", size);
  require(cache.block_size > 0 && cache.blocks > 0, cache.blocks, " blocks of ", cache.block_size, " tokens");
  for (std::int64_t token = 0; token < count; ++token)
    require(slots[token] < cache.blocks * cache.block_size, "slot ", slots[token], " of ", cache.blocks, " blocks of ",
            cache.block_size, " tokens");
  const std::int64_t bytes = element_bytes(cache.stored);
  pool.ranges(count, kGrain, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t token = first; token < last; ++token) {
      if (slots[token] < 0) continue;
      const std::int64_t block = slots[token] / cache.block_size, state = slots[token] % cache.block_size;
      for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
        char* place = static_cast<char*>(cache.data) +
                      (block * cache.block_stride + head * cache.head_stride + state * cache.state_stride) * bytes;
        store_elements(cache.stored, fresh.key + token * fresh.key_stride + head * size, size, place);
        const float* value = fresh.value + token * fresh.value_stride + head * size;
        store_elements(cache.stored, value, size, place + size * bytes);
      }
    }
  });
}

}  // namespace hp

HP_EXPORT int hp_write_kv(hp::Runtime* runtime, const hp::AttentionLayer* layer, const hp::FreshKV* fresh,
                          const std::int64_t* slots, std::int64_t count, const hp::KVCache* cache) {
  return hp::guarded(runtime, [&] { hp::write_kv(*layer, *fresh, slots, count, *cache, runtime->pool); });
}
