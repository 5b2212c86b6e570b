// Eight-bit weights that become float32 in registers, with float32 activations. Panels are [inputs][kPanel] bytes.
#include "api.h"
#include "linear_i8.h"
#include "linear_i8_lanes.h"

namespace hp {
namespace {

constexpr int kVectors = vf::W == 16 ? 4 : 2;
constexpr int kRows = 4;
constexpr std::int64_t kPanel = kVectors * vf::W;
// How far ahead of its use a weight is asked for. Past the last one nothing happens.
constexpr std::int64_t kAhead = 2048;
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kPackedAtOnce = 4;  // panels

vf widen(const std::int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#elif defined(__AVX2__)
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#else
  vf made;
  for (int i = 0; i < vf::W; ++i) made.v[i] = p[i];
  return made;
#endif
}

class LinearI8Float final : public Linear {
 public:
  LinearI8Float(const std::int8_t* values, std::int64_t stride, const float* scales, const float* bias,
                std::int64_t outputs, std::int64_t inputs, Pool& pool)
      : Linear(outputs, inputs), panels_(ceil_div(outputs, kPanel)), weights_(panels_ * kPanel * inputs),
        scales_(panels_ * kPanel), bias_(panels_ * kPanel) {
    pool.ranges(panels_, kPackedAtOnce, [&](std::int64_t first, std::int64_t last, int) {
      for (std::int64_t n = first * kPanel; n < last * kPanel; ++n) {
        scales_[n] = n < outputs ? scales[n] : 0.0f;
        bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
        std::int8_t* column = weights_.data() + n / kPanel * kPanel * inputs + n % kPanel;
        for (std::int64_t k = 0; k < inputs; ++k) column[k * kPanel] = n < outputs ? values[n * stride + k] : 0;
      }
    });
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena&) const override {
    const std::int64_t width = std::max<std::int64_t>(1, panels_ / (kChunksPerThread * pool.size()));
    pool.run(ceil_div(panels_, width), [&](std::int64_t chunk, int) {
      for (std::int64_t p = chunk * width; p < std::min((chunk + 1) * width, panels_); ++p) {
        std::int64_t row = 0;
        for (; row + kRows <= rows; row += kRows)
          block<kRows>(p, x + row * x_stride, x_stride, y + row * y_stride, y_stride, into);
        for (; row < rows; ++row) block<1>(p, x + row * x_stride, x_stride, y + row * y_stride, y_stride, into);
      }
    });
  }

  std::int64_t bytes() const override {
    return weights_.size() + (scales_.size() + bias_.size()) * std::int64_t{sizeof(float)};
  }
  bool is_batch_invariant() const override { return true; }

 private:
  template <int R>
  void block(std::int64_t p, const float* x, std::int64_t x_stride, float* y, std::int64_t y_stride, Into into) const {
    vf sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) sums[r][j] = vf::set(0.0f);
    const std::int8_t* panel = weights_.data() + p * kPanel * inputs;
    for (std::int64_t k = 0; k < inputs; ++k, panel += kPanel) {
      __builtin_prefetch(panel + kAhead);
      vf w[kVectors];
      for (int j = 0; j < kVectors; ++j) w[j] = widen(panel + j * vf::W);
      for (int r = 0; r < R; ++r) {
        const vf a = vf::set(x[r * x_stride + k]);
        for (int j = 0; j < kVectors; ++j) sums[r][j] = fma(a, w[j], sums[r][j]);
      }
    }
    for (int r = 0; r < R; ++r) finish(sums[r], p * kPanel, y + r * y_stride, into);
  }

  void finish(const vf (&sums)[kVectors], std::int64_t first, float* y, Into into) const {
    alignas(kAlignment) float line[kPanel];
    for (int j = 0; j < kVectors; ++j) {
      const vf scaled = i8::apart(sums[j] * vf::load(scales_.data() + first + j * vf::W));
      (scaled + vf::load(bias_.data() + first + j * vf::W)).store(line + j * vf::W);
    }
    const std::int64_t width = std::min(kPanel, outputs - first);
    for (std::int64_t j = 0; j < width; ++j) y[first + j] = into == Into::kAdd ? y[first + j] + line[j] : line[j];
  }

  const std::int64_t panels_;
  Buffer<std::int8_t> weights_;
  Buffer<float> scales_, bias_;
};

}  // namespace

std::unique_ptr<Linear> make_linear_i8_float(const std::int8_t* values, std::int64_t stride, const float* scales,
                                             const float* bias, std::int64_t outputs, std::int64_t inputs,
                                             Pool& pool) {
  check_int8_weights(stride, scales, outputs, inputs);
  return std::make_unique<LinearI8Float>(values, stride, scales, bias, outputs, inputs, pool);
}

}  // namespace hp
