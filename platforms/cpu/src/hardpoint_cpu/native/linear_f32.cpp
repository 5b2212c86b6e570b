// Dense float32 weights, in panels of kPanel outputs: [outputs / kPanel][inputs][kPanel], padded with zeros.
//
// Every output is one chain of additions in the order of the inputs, whatever the number of rows, so that a row's bits
// never depend on its neighbors.
#include "linear_f32.h"

#include "api.h"
#include "simd.h"

namespace hp {
namespace {

constexpr std::int64_t kVectors = vf::W == 16 ? 4 : 2;
constexpr std::int64_t kPanel = kVectors * vf::W;
constexpr int kRows = 6;

template <int R>
void multiply(const float* x, std::int64_t x_stride, const float* panel, std::int64_t inputs, vf (&sums)[R][kVectors]) {
  for (std::int64_t k = 0; k < inputs; ++k) {
    vf w[kVectors];
    for (int j = 0; j < kVectors; ++j) w[j] = vf::load(panel + k * kPanel + j * vf::W);
    for (int r = 0; r < R; ++r) {
      const vf a = vf::set(x[r * x_stride + k]);
      for (int j = 0; j < kVectors; ++j) sums[r][j] = fma(a, w[j], sums[r][j]);
    }
  }
}

class LinearF32 final : public Linear {
 public:
  LinearF32(const float* weight, std::int64_t stride, const float* bias, std::int64_t outputs, std::int64_t inputs)
      : Linear(outputs, inputs), panels_(ceil_div(outputs, kPanel)), weight_(panels_ * inputs * kPanel),
        bias_(panels_ * kPanel) {
    for (std::int64_t n = 0; n < panels_ * kPanel; ++n) {
      bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
      float* column = weight_.data() + n / kPanel * inputs * kPanel + n % kPanel;
      for (std::int64_t k = 0; k < inputs; ++k) column[k * kPanel] = n < outputs ? weight[n * stride + k] : 0.0f;
    }
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena&) const override {
    pool.run(panels_, [&](std::int64_t p, int) {
      std::int64_t row = 0;
      for (; row + kRows <= rows; row += kRows) block<kRows>(p, x + row * x_stride, x_stride, y + row * y_stride, y_stride, into);
      for (; row < rows; ++row) block<1>(p, x + row * x_stride, x_stride, y + row * y_stride, y_stride, into);
    });
  }

  std::int64_t bytes() const override { return (weight_.size() + bias_.size()) * std::int64_t{sizeof(float)}; }
  bool is_batch_invariant() const override { return true; }

 private:
  template <int R>
  void block(std::int64_t p, const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, Into into) const {
    vf sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) sums[r][j] = vf::load(bias_.data() + p * kPanel + j * vf::W);
    multiply<R>(x, x_stride, weight_.data() + p * inputs * kPanel, inputs, sums);
    const std::int64_t first = p * kPanel, width = std::min(kPanel, outputs - first);
    alignas(kAlignment) float line[kPanel];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < kVectors; ++j) sums[r][j].store(line + j * vf::W);
      float* target = y + r * y_stride + first;
      for (std::int64_t j = 0; j < width; ++j) target[j] = into == Into::kAdd ? target[j] + line[j] : line[j];
    }
  }

  const std::int64_t panels_;
  Buffer<float> weight_, bias_;
};

}  // namespace

std::unique_ptr<Linear> make_linear_f32(const float* weight, std::int64_t stride, const float* bias,
                                        std::int64_t outputs, std::int64_t inputs) {
  require(stride >= inputs, "rows of ", inputs, " weights cannot be ", stride, " apart");
  return std::make_unique<LinearF32>(weight, stride, bias, outputs, inputs);
}

}  // namespace hp

HP_EXPORT int hp_linear_f32(const float* weight, std::int64_t stride, const float* bias, std::int64_t outputs,
                            std::int64_t inputs, hp::Linear** made) {
  return hp::guarded([&] { *made = hp::make_linear_f32(weight, stride, bias, outputs, inputs).release(); });
}
