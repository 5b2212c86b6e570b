#include "linear_concat.h"

#include "api.h"
#include "linear_grouped.h"

namespace hp {
namespace {

std::int64_t outputs_of(const std::vector<std::unique_ptr<Linear>>& parts) {
  std::int64_t outputs = 0;
  for (const auto& part : parts) outputs += part->outputs;
  return outputs;
}

class ConcatLinear final : public Linear {
 public:
  explicit ConcatLinear(std::vector<std::unique_ptr<Linear>> parts)
      : Linear(outputs_of(parts), parts.front()->inputs), parts_(std::move(parts)) {
    for (const auto& part : parts_) {
      require(part->inputs == inputs, "a part of ", part->inputs, " inputs does not fit one of ", inputs);
      const auto* grouped = dynamic_cast<const grouped::GroupedLinear*>(part.get());
      if (grouped != nullptr) grouped_.push_back(grouped);
    }
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena& arena) const override {
    if (agree(rows)) {
      together(x, x_stride, rows, y, y_stride, into, pool, arena);
      return;
    }
    for (const auto& part : parts_) {
      part->run(x, x_stride, rows, y, y_stride, into, pool, arena);
      y += part->outputs;
    }
  }

  std::int64_t bytes() const override {
    std::int64_t total = 0;
    for (const auto& part : parts_) total += part->bytes();
    return total;
  }

  bool is_batch_invariant() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->is_batch_invariant(); });
  }

 private:
  bool agree(std::int64_t rows) const {
    if (grouped_.size() != parts_.size()) return false;
    const auto path = grouped_.front()->path(rows);
    return std::all_of(grouped_.begin(), grouped_.end(), [&](const auto* part) { return part->path(rows) == path; });
  }

  // Activations are prepared once, and the panels of all parts are one piece of work.
  void together(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
                Pool& pool, Arena& arena) const {
    const Arena::Scope scope(arena);
    const grouped::Prepared prepared = grouped_.front()->prepare(x, x_stride, rows, pool, arena);
    std::int64_t panels = 0;
    for (const auto* part : grouped_) panels += part->panels();
    grouped::GroupedLinear::over_panels(prepared, panels, pool, [&](std::int64_t first, std::int64_t last, int thread) {
      float* target = y;
      for (const auto* part : grouped_) {
        const std::int64_t own = part->panels(), from = std::max<std::int64_t>(first, 0), to = std::min(last, own);
        if (from < to) part->multiply(prepared, from, to, thread, target, y_stride, into);
        first -= own;
        last -= own;
        target += part->outputs;
      }
    });
  }

  const std::vector<std::unique_ptr<Linear>> parts_;
  std::vector<const grouped::GroupedLinear*> grouped_;  // those parts that can share what they prepare
};

}  // namespace

std::unique_ptr<Linear> make_linear_concat(std::vector<std::unique_ptr<Linear>> parts) {
  require(!parts.empty(), "a layer of parts needs at least one");
  return std::make_unique<ConcatLinear>(std::move(parts));
}

}  // namespace hp

// Takes the parts over, also when it fails.
HP_EXPORT int hp_linear_concat(hp::Linear* const* parts, std::int64_t num_parts, hp::Linear** made) {
  return hp::guarded([&] {
    std::vector<std::unique_ptr<hp::Linear>> owned;
    for (std::int64_t part = 0; part < num_parts; ++part) owned.emplace_back(parts[part]);
    *made = hp::make_linear_concat(std::move(owned)).release();
  });
}
