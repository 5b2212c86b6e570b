#include "stack.h"

#include "api.h"

namespace hp {
namespace {

// Rows that go through a feed-forward together: its wide intermediates stay in caches.
constexpr std::int64_t kFeedForwardRows = 256;


void check(const Block& block, std::int64_t index, std::int64_t hidden_size) {
  require(block.qkv && block.o && block.gate_up && block.down && block.attention, "block ", index, " lacks a part");
  require(block.input_norm.weight && block.feed_forward_norm.weight, "block ", index, " lacks a norm");
  const AttentionLayer& attention = *block.attention;
  const std::int64_t size = attention.head_size;
  require(block.qkv->inputs == hidden_size && block.o->outputs == hidden_size && block.gate_up->inputs == hidden_size &&
              block.down->outputs == hidden_size,
          "projections of block ", index, " are not from and to ", hidden_size, " values");
  require(block.qkv->outputs == (attention.heads + 2 * attention.kv_heads) * size &&
              block.o->inputs == attention.heads * size,
          "block ", index, " has projections of ", block.qkv->outputs, " and ", block.o->inputs, " values for ",
          attention.heads, " and ", attention.kv_heads, " heads of ", size);
  require(block.gate_up->outputs == 2 * block.down->inputs, "block ", index, " has ", block.gate_up->outputs,
          " values for a gate and as many others, but ", block.down->inputs, " are expected");
  require(block.rotation.rotary_size > 0 && block.rotation.rotary_size % 2 == 0 && block.rotation.rotary_size <= size,
          "block ", index, " turns ", block.rotation.rotary_size, " of ", size, " values of a head");
}

}  // namespace

Stack::Stack(const Block* blocks, std::int64_t count, Norm final_norm)
    : blocks_(blocks, blocks + count), final_norm_(final_norm) {
  require(count > 0 && blocks->qkv != nullptr, "a stack without blocks");
  hidden_size_ = blocks->qkv->inputs;
  for (std::int64_t i = 0; i < count; ++i) check(blocks_[i], i, hidden_size_);
}

const Block& Stack::block(std::int64_t index) const {
  const auto count = static_cast<std::int64_t>(blocks_.size());
  require(0 <= index && index < count, "block ", index, " of ", count);
  return blocks_[index];
}

void Stack::before_attention(std::int64_t index, const StackStep& step, float* qkv, Pool& pool, Arena& arena) const {
  const Block& layer = block(index);
  const AttentionLayer& attention = *layer.attention;
  const std::int64_t width = layer.qkv->outputs;
  const Arena::Scope scope(arena);
  float* normed = arena.take<float>(step.tokens * hidden_size_);
  rms_norm({step.hidden, step.tokens, hidden_size_, hidden_size_}, layer.input_norm, normed, hidden_size_, pool);
  layer.qkv->run(normed, hidden_size_, step.tokens, qkv, width, Into::kStore, pool, arena);
  rotate_heads({qkv, step.tokens, width, attention.heads, attention.kv_heads, attention.head_size}, layer.rotation,
               layer.query_norm, layer.key_norm, step.positions, pool);
}

void Stack::attend(std::int64_t index, const StackStep& step, float* qkv, float* attended, Pool& pool,
                   Arena& arena) const {
  const Block& layer = block(index);
  const AttentionLayer& attention = *layer.attention;
  const KVCache& cache = step.caches[index];
  const std::int64_t size = attention.head_size, width = layer.qkv->outputs, number = step.group_of_block[index];
  require(0 <= number && number < step.num_groups, "block ", index, " is of group ", number, " of ", step.num_groups);
  const StepGroup& group = step.groups[number];
  require(group.num_slots <= step.tokens, group.num_slots, " slots for ", step.tokens, " tokens");
  const float* key = qkv + attention.heads * size;
  write_kv(attention, {key, key + attention.kv_heads * size, width, width}, group.slots, group.num_slots, cache, pool);
  hp::attention(attention, *group.rows, cache, {qkv, attended, nullptr, step.tokens, width, attention.heads * size},
                pool, arena);
}

void Stack::add_output(const Linear& linear, const float* x, std::int64_t x_stride, Norm norm, const RowView& stream,
                       Pool& pool, Arena& arena) const {
  if (norm.weight == nullptr) {
    linear.run(x, x_stride, stream.count, stream.data, hidden_size_, Into::kAdd, pool, arena);
    return;
  }
  const Arena::Scope scope(arena);
  float* output = arena.take<float>(stream.count * hidden_size_);
  linear.run(x, x_stride, stream.count, output, hidden_size_, Into::kStore, pool, arena);
  add_rms_norm({output, stream.count, hidden_size_, hidden_size_}, norm, stream.data, hidden_size_, pool);
}

void Stack::after_attention(std::int64_t index, const StackStep& step, const float* attended, Pool& pool,
                            Arena& arena) const {
  const Block& layer = block(index);
  const std::int64_t width = layer.gate_up->outputs, chunks = ceil_div(step.tokens, kFeedForwardRows);
  const std::int64_t height = ceil_div(step.tokens, std::max<std::int64_t>(chunks, 1));
  const Arena::Scope scope(arena);
  const RowView all{step.hidden, step.tokens, hidden_size_, hidden_size_};
  add_output(*layer.o, attended, layer.o->inputs, layer.attention_output_norm, all, pool, arena);
  float* normed = arena.take<float>(height * hidden_size_);
  float* gate_up = arena.take<float>(height * width);
  for (std::int64_t first = 0; first < step.tokens; first += height) {
    const RowView stream{step.hidden + first * hidden_size_, std::min(height, step.tokens - first), hidden_size_,
                         hidden_size_};
    rms_norm(stream, layer.feed_forward_norm, normed, hidden_size_, pool);
    layer.gate_up->run(normed, hidden_size_, stream.count, gate_up, width, Into::kStore, pool, arena);
    apply_gate({gate_up, stream.count, width, width}, layer.gate, pool);
    add_output(*layer.down, gate_up, width, layer.feed_forward_output_norm, stream, pool, arena);
  }
  if (index + 1 == static_cast<std::int64_t>(blocks_.size()) && final_norm_.weight != nullptr)
    rms_norm(all, final_norm_, step.hidden, hidden_size_, pool);
}

void Stack::run(const StackStep& step, Pool& pool, Arena& arena) const {
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(blocks_.size()); ++i) {
    const Arena::Scope scope(arena);
    float* qkv = arena.take<float>(step.tokens * blocks_[i].qkv->outputs);
    float* attended = arena.take<float>(step.tokens * blocks_[i].o->inputs);
    before_attention(i, step, qkv, pool, arena);
    attend(i, step, qkv, attended, pool, arena);
    after_attention(i, step, attended, pool, arena);
  }
}

}  // namespace hp

HP_EXPORT int hp_stack_create(const hp::Block* blocks, std::int64_t count, const hp::Norm* final_norm,
                              hp::Stack** made) {
  return hp::guarded([&] { *made = new hp::Stack(blocks, count, *final_norm); });
}

HP_EXPORT void hp_stack_destroy(hp::Stack* stack) { delete stack; }

HP_EXPORT int hp_stack_run(hp::Runtime* runtime, const hp::Stack* stack, const hp::StackStep* step) {
  return hp::guarded(runtime, [&] {
    if (step->tokens > 0) stack->run(*step, runtime->pool, runtime->arena);
  });
}

HP_EXPORT int hp_stack_before_attention(hp::Runtime* runtime, const hp::Stack* stack, std::int64_t index,
                                        const hp::StackStep* step, float* qkv) {
  return hp::guarded(runtime,
                     [&] { stack->before_attention(index, *step, qkv, runtime->pool, runtime->arena); });
}

HP_EXPORT int hp_stack_after_attention(hp::Runtime* runtime, const hp::Stack* stack, std::int64_t index,
                                       const hp::StackStep* step, const float* attended) {
  return hp::guarded(runtime,
                     [&] { stack->after_attention(index, *step, attended, runtime->pool, runtime->arena); });
}
