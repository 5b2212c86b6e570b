// Root-mean-square normalization and gated activations of rows. What becomes of a row depends on that row only.
#pragma once

#include "common.h"
#include "pool.h"

namespace hp {

struct Norm {
  const float* weight;  // null: there is no such norm
  float eps;
};

enum class Gate : std::int32_t { kSilu = 0, kGeluTanh = 1 };

// RowView of which one may be computed by another thread: `count` of `size` values each, `stride` apart.
struct RowView {
  float* data;
  std::int64_t count, size, stride;
};

// y = x / rms(x) * weight, over `size` values; y may be x.
void rms_norm(const float* x, std::int64_t size, Norm norm, float* y);

// The same for every row; `y_stride` apart.
void rms_norm(const RowView& x, Norm norm, float* y, std::int64_t y_stride, Pool& pool);

// stream += norm(x), row by row.
void add_rms_norm(const RowView& x, Norm norm, float* stream, std::int64_t stream_stride, Pool& pool);

// RowView of a gate and then as many other values: the first half becomes activation(gate) * other half.
void apply_gate(const RowView& gate_up, Gate gate, Pool& pool);

}  // namespace hp
