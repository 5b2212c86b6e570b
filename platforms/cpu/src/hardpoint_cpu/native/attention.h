// Attention over a paged cache for rows of any length at once, and the writing of what it reads.
//
// Keys are taken in tiles of a fixed size at fixed positions. What one query head of one token makes of a tile depends
// on nothing but that tile, and its tiles are merged from the first to the last: a result has the same bits whatever
// else is computed with it, however the prompt was cut into steps, and whichever threads take part. Only where
// AttentionLayer::parts allows it do many query rows go through a matrix unit, which rounds otherwise.
#pragma once

#include <limits>

#include "common.h"
#include "pool.h"

namespace hp {

enum class Stored : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t kMaxHeadSize = 256;

// A layer's cache: of every token and head a key and then a value, head_size elements each. Strides count elements.
struct KVCache {
  void* data;
  std::int64_t blocks, block_size;
  std::int64_t block_stride, head_stride, state_stride;
  Stored stored;
};

// A layer's fixed properties. A soft cap that is infinite caps nothing.
struct AttentionLayer {
  std::int64_t heads, kv_heads, head_size;
  std::int64_t window;  // keys that a query sees up to itself, and after itself where nothing is causal; or kUnbounded
  const float* alibi_slopes;  // [heads] or null
  const float* sinks;         // [heads] or null: a logit that takes part without a value
  float scale, soft_cap;
  // Into how many bfloat16 a float may be taken apart for prompts, where there is a matrix unit: 3 keep all of it, 1 only
  // its first bits. 0: a token's bits depend on nothing that is computed with it.
  std::int32_t parts;
};

// The rows of one step. Those of a cache have a table; without one, keys are the step's own tokens.
struct AttentionRows {
  const std::int32_t* query_start;  // [rows + 1]
  const std::int32_t* seq_lens;     // [rows], new tokens included
  const std::int32_t* block_table;  // [rows, table_columns]
  std::int64_t rows, table_columns, table_stride;
  std::int32_t causal;
};

// What a call reads and writes per token: heads lie side by side, tokens are a stride apart, in elements.
struct AttentionTokens {
  const float* query;
  float* output;
  float* lse;  // [tokens, heads] or null: natural logarithm of the sum of exponentials
  std::int64_t tokens, query_stride, output_stride;
};

// Keys and values of the step's tokens, [tokens, kv_heads, head_size].
struct FreshKV {
  const float *key, *value;
  std::int64_t key_stride, value_stride;
};

// Every token of every row. Throws std::invalid_argument for sizes that do not fit together and blocks that do not
// exist.
void attention(const AttentionLayer& layer, const AttentionRows& rows, const KVCache& cache,
               const AttentionTokens& tokens, Pool& pool, Arena& arena);

// The same without a cache: a row's keys are its own tokens of this step.
void attention(const AttentionLayer& layer, const AttentionRows& rows, const FreshKV& fresh,
               const AttentionTokens& tokens, Pool& pool, Arena& arena);

// Puts the first `count` tokens into their slots (block * block_size + place); negative slots are skipped.
void write_kv(const AttentionLayer& layer, const FreshKV& fresh, const std::int64_t* slots, std::int64_t count,
              const KVCache& cache, Pool& pool);

}  // namespace hp
