#include "norm.h"

#include "simd.h"

namespace hp {
namespace {

constexpr std::int64_t kGrain = 8192;  // values worth handing to another thread

template <class Work>
void for_rows(const RowView& rows, Pool& pool, Work&& work) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / rows.size);
  pool.ranges(rows.count, grain, [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t row = first; row < last; ++row) work(row);
  });
}

// The last values of a row, filled up with zeros.
vf load_part(const float* p, std::int64_t count) {
  alignas(kAlignment) float lanes[vf::W] = {};
  std::copy_n(p, count, lanes);
  return vf::load(lanes);
}

void store_part(vf v, float* p, std::int64_t count) {
  alignas(kAlignment) float lanes[vf::W];
  v.store(lanes);
  std::copy_n(lanes, count, p);
}

float inverse_rms(const float* x, std::int64_t size, float eps) {
  vf squares = vf::set(0.0f);
  std::int64_t i = 0;
  for (; i + vf::W <= size; i += vf::W) {
    const vf v = vf::load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < size) {
    const vf v = load_part(x + i, size - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// y = (adds ? y : 0) + x * scale * weight
template <bool adds>
void scaled(const float* x, std::int64_t size, float scale, const float* weight, float* y) {
  const vf by = vf::set(scale);
  std::int64_t i = 0;
  for (; i + vf::W <= size; i += vf::W) {
    vf v = vf::load(x + i) * by * vf::load(weight + i);
    if constexpr (adds) v = v + vf::load(y + i);
    v.store(y + i);
  }
  if (i < size) {
    vf v = load_part(x + i, size - i) * by * load_part(weight + i, size - i);
    if constexpr (adds) v = v + load_part(y + i, size - i);
    store_part(v, y + i, size - i);
  }
}

// x / (1 + e^-(t x)): SiLU for t = 1; GELU's approximation by tanh is the same of another argument.
template <Gate gate>
vf activated(vf x) {
  vf exponent = vf::set(0.0f) - x;
  if constexpr (gate == Gate::kGeluTanh) {
    // -2 sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = x * fma(x * x, vf::set(-0.0713548162726f), vf::set(-1.59576912160573f));
  }
  return x / (vf::set(1.0f) + exp(exponent));
}

template <Gate gate>
void gate_row(float* row, std::int64_t size) {
  std::int64_t i = 0;
  for (; i + vf::W <= size; i += vf::W)
    (activated<gate>(vf::load(row + i)) * vf::load(row + size + i)).store(row + i);
  if (i < size) {
    const std::int64_t rest = size - i;
    store_part(activated<gate>(load_part(row + i, rest)) * load_part(row + size + i, rest), row + i, rest);
  }
}

}  // namespace

void rms_norm(const float* x, std::int64_t size, Norm norm, float* y) {
  scaled<false>(x, size, inverse_rms(x, size, norm.eps), norm.weight, y);
}

void rms_norm(const RowView& x, Norm norm, float* y, std::int64_t y_stride, Pool& pool) {
  for_rows(x, pool, [&](std::int64_t row) { rms_norm(x.data + row * x.stride, x.size, norm, y + row * y_stride); });
}

void add_rms_norm(const RowView& x, Norm norm, float* stream, std::int64_t stream_stride, Pool& pool) {
  for_rows(x, pool, [&](std::int64_t row) {
    const float* from = x.data + row * x.stride;
    scaled<true>(from, x.size, inverse_rms(from, x.size, norm.eps), norm.weight, stream + row * stream_stride);
  });
}

void apply_gate(const RowView& gate_up, Gate gate, Pool& pool) {
  require(gate_up.size % 2 == 0, "rows of ", gate_up.size, " values have no two halves");
  const std::int64_t half = gate_up.size / 2;
  for_rows(gate_up, pool, [&](std::int64_t row) {
    float* values = gate_up.data + row * gate_up.stride;
    if (gate == Gate::kSilu) {
      gate_row<Gate::kSilu>(values, half);
    } else {
      gate_row<Gate::kGeluTanh>(values, half);
    }
  });
}

}  // namespace hp
