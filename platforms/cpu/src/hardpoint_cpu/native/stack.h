// The layers of a decoder as one call: norms, projections, rotation, attention and feed-forward, from the residual
// stream to the residual stream.
#pragma once

#include "attention.h"
#include "rope.h"

namespace hp {

// One layer. What it points to belongs to the caller and stays where it is.
struct Block {
  const Linear *qkv, *o, *gate_up, *down;
  const AttentionLayer* attention;
  Rotation rotation;
  Norm input_norm, query_norm, key_norm, attention_output_norm, feed_forward_norm, feed_forward_output_norm;
  Gate gate;
};

// What layers whose cache has the same blocks have in common in a step.
struct StepGroup {
  const AttentionRows* rows;
  const std::int64_t* slots;
  std::int64_t num_slots;
};

// A step. `hidden` [tokens, hidden size], rows contiguous, is the residual stream, which the last norm is applied to.
struct StackStep {
  float* hidden;
  const std::int64_t* positions;
  std::int64_t tokens;
  const StepGroup* groups;
  std::int64_t num_groups;
  const std::int32_t* group_of_block;
  const KVCache* caches;  // of every block
};

class Stack {
 public:
  // `final_norm` may be none. Raises std::invalid_argument for blocks whose parts do not fit together.
  Stack(const Block* blocks, std::int64_t count, Norm final_norm);

  void run(const StackStep& step, Pool& pool, Arena& arena) const;

  // The same in pieces, for attention that is computed elsewhere: queries, keys and values of block `index` into `qkv`
  // [tokens, width of its projection], and what follows the attention with heads `attended`.
  void before_attention(std::int64_t index, const StackStep& step, float* qkv, Pool& pool, Arena& arena) const;
  void after_attention(std::int64_t index, const StackStep& step, const float* attended, Pool& pool,
                       Arena& arena) const;

 private:
  const Block& block(std::int64_t index) const;
  void attend(std::int64_t index, const StackStep& step, float* qkv, float* attended, Pool& pool, Arena& arena) const;
  void add_output(const Linear& linear, const float* x, std::int64_t x_stride, Norm norm, const RowView& stream,
                  Pool& pool, Arena& arena) const;

  std::vector<Block> blocks_;
  Norm final_norm_;
  std::int64_t hidden_size_ = 0;
};

}  // namespace hp
