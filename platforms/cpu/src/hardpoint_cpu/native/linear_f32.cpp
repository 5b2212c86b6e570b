// Dense weights in float32 or bfloat16, computed in float32. They lie in panels of kPanel outputs, padded with zeros,
// so that a panel is one stream of memory: [outputs / kPanel][inputs][kPanel], in bfloat16 with the inputs in pairs:
// [outputs / kPanel][inputs / 2][kPanel][2].
//
// Every output is one chain of additions in the order of the inputs, whatever the number of rows, so that a row's bits
// never depend on its neighbors. Rows are read where they lie: packing them was measured to cost what it gains.
#include "linear_f32.h"

#include <unistd.h>

#include <array>
#include <type_traits>
#include <utility>

#include "api.h"
#include "bf16.h"
#include "simd.h"

namespace hp {
namespace {

// As many sums as registers hold beside a line of weights and one input: of 32, or of 16.
constexpr int kVectors = vf::W == 16 ? 3 : 2;
#if defined(__AVX512F__)
constexpr int kRows = 9;
#elif defined(__aarch64__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
constexpr std::int64_t kPanel = kVectors * vf::W;
constexpr std::int64_t kLine = 64;
// Inputs between two requests for memory ahead, few enough that the requests never wait for one another.
constexpr std::int64_t kStep = 8;
constexpr std::int64_t kAheadBytes = 16384;
// Row blocks that share a panel while it is in the second-level cache.
constexpr std::int64_t kBlocksPerGroup = 16;
constexpr std::int64_t kLeastProducts = 1 << 17;

std::int64_t cache_bytes() {
  static const std::int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return found > 0 ? found : 512 << 10;
}

// What is to be read soon: `lines` cache lines at each step.
struct Ahead {
  const char* at;
  std::int64_t lines;

  void request() {
    for (std::int64_t line = 0; line < lines; ++line) __builtin_prefetch(at + line * kLine, 0, 2);
    at += lines * kLine;
  }
};

template <int R>
using Sums = vf[R][kVectors];

template <int R>
inline void add_products(const float* x, std::int64_t x_stride, const vf (&w)[kVectors], Sums<R>& sums) {
  for (int r = 0; r < R; ++r) {
    const vf a = vf::set(x[r * x_stride]);
    for (int j = 0; j < kVectors; ++j) sums[r][j] = fma(a, w[j], sums[r][j]);
  }
}

// One input, or a pair of them, of a whole panel.
template <int R>
inline void add_inputs(const float* x, std::int64_t x_stride, const float* weight, Sums<R>& sums) {
  vf w[kVectors];
  for (int j = 0; j < kVectors; ++j) w[j] = vf::load(weight + j * vf::W);
  add_products<R>(x, x_stride, w, sums);
}

template <int R>
inline void add_inputs(const float* x, std::int64_t x_stride, const bf16* weight, Sums<R>& sums) {
  vf w[kVectors];
  for (int j = 0; j < kVectors; ++j) w[j] = first_of_pairs(weight + j * 2 * vf::W);
  add_products<R>(x, x_stride, w, sums);
  for (int j = 0; j < kVectors; ++j) w[j] = second_of_pairs(weight + j * 2 * vf::W);
  add_products<R>(x + 1, x_stride, w, sums);
}

// The last input of an odd number in pairs; the one beside it does not exist.
template <int R>
inline void add_last(const float* x, std::int64_t x_stride, const bf16* weight, Sums<R>& sums) {
  vf w[kVectors];
  for (int j = 0; j < kVectors; ++j) w[j] = first_of_pairs(weight + j * 2 * vf::W);
  add_products<R>(x, x_stride, w, sums);
}

template <int R, class T>
inline void multiply(const float* x, std::int64_t x_stride, const T* panel, std::int64_t inputs, Ahead ahead,
                     Sums<R>& sums) {
  constexpr std::int64_t kAtOnce = std::is_same_v<T, float> ? 1 : 2;
  std::int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    ahead.request();
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kStep; i += kAtOnce) add_inputs<R>(x + k + i, x_stride, panel + (k + i) * kPanel, sums);
  }
  for (; k + kAtOnce <= inputs; k += kAtOnce) add_inputs<R>(x + k, x_stride, panel + k * kPanel, sums);
  if constexpr (kAtOnce == 2) {
    if (k < inputs) add_last<R>(x + k, x_stride, panel + k * kPanel, sums);
  }
}

template <int R>
void deliver(const Sums<R>& sums, float* y, std::int64_t y_stride, std::int64_t width, Into into) {
  alignas(kAlignment) float line[kPanel];
  for (int r = 0; r < R; ++r) {
    float* target = y + r * y_stride;
    if (width == kPanel) {
      for (int j = 0; j < kVectors; ++j) {
        float* place = target + j * vf::W;
        (into == Into::kAdd ? vf::load(place) + sums[r][j] : sums[r][j]).store(place);
      }
      continue;
    }
    for (int j = 0; j < kVectors; ++j) sums[r][j].store(line + j * vf::W);
    for (std::int64_t j = 0; j < width; ++j) target[j] = into == Into::kAdd ? target[j] + line[j] : line[j];
  }
}

template <class T>
class DenseLinear final : public Linear {
 public:
  DenseLinear(const T* weight, std::int64_t stride, const float* bias, std::int64_t outputs, std::int64_t inputs)
      : Linear(outputs, inputs), panels_(ceil_div(outputs, kPanel)), panel_size_(round_up(inputs, kGroup) * kPanel),
        weight_(panels_ * panel_size_), bias_(panels_ * kPanel) {
    std::fill_n(weight_.data(), weight_.size(), T{});
    for (std::int64_t n = 0; n < panels_ * kPanel; ++n) bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
    for (std::int64_t n = 0; n < outputs; ++n) {
      T* column = weight_.data() + n / kPanel * panel_size_ + n % kPanel * kGroup;
      for (std::int64_t k = 0; k < inputs; ++k) column[k / kGroup * kGroup * kPanel + k % kGroup] = weight[n * stride + k];
    }
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena&) const override {
    const Call call{x, x_stride, y, y_stride, into};
    // Rows whose inputs stay in the cache while panel after panel passes by.
    const std::int64_t fitting = cache_bytes() / 2 / (inputs * std::int64_t{sizeof(float)});
    const std::int64_t most = std::max<std::int64_t>(kRows, std::min(fitting, kBlocksPerGroup * kRows));
    const std::int64_t groups = ceil_div(rows, most);
    const std::int64_t least = ceil_div(kLeastProducts, std::max<std::int64_t>(1, rows / groups) * inputs * kPanel);
    const std::int64_t at_once = std::min(least, std::max<std::int64_t>(1, panels_ / pool.size()));
    const std::int64_t pieces = ceil_div(panels_, at_once);
    pool.run(groups * pieces, [&](std::int64_t chunk, int) {
      const std::int64_t group = chunk / pieces, first = chunk % pieces * at_once;
      const std::int64_t row = rows * group / groups, end = rows * (group + 1) / groups;
      for (std::int64_t p = first; p < std::min(first + at_once, panels_); ++p) {
        // Threads take turns with panels, so this one is likely to be handed that one next.
        const std::int64_t next = at_once == 1 ? p + pool.size() : p + 1;
        column(p, next < panels_ ? next : 0, row, end, call);
      }
    });
  }

  std::int64_t bytes() const override {
    return weight_.size() * std::int64_t{sizeof(T)} + bias_.size() * std::int64_t{sizeof(float)};
  }
  bool is_batch_invariant() const override { return true; }

 private:
  static constexpr std::int64_t kGroup = std::is_same_v<T, float> ? 1 : 2;

  struct Call {
    const float* x;
    std::int64_t x_stride;
    float* y;
    std::int64_t y_stride;
    Into into;
  };
  using Block = void (DenseLinear::*)(std::int64_t, std::int64_t, Ahead, const Call&) const;

  // Rows first to end of one panel, in blocks of almost equal size; meanwhile the next panel is fetched.
  void column(std::int64_t panel, std::int64_t next, std::int64_t first, std::int64_t end, const Call& call) const {
    const std::int64_t blocks = ceil_div(end - first, kRows), steps = inputs / kStep;
    const std::int64_t lines = panel_size_ * std::int64_t{sizeof(T)} / kLine;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t row = first + (end - first) * block / blocks;
      const std::int64_t last = first + (end - first) * (block + 1) / blocks;
      Ahead ahead{reinterpret_cast<const char*>(weight_.data() + panel * panel_size_) + kAheadBytes, 0};
      if (blocks == 1) {
        ahead.lines = kStep * kPanel * std::int64_t{sizeof(T)} / kLine;
      } else if (steps > 0) {
        ahead.lines = ceil_div(lines, blocks * steps);
        ahead.at = reinterpret_cast<const char*>(weight_.data() + next * panel_size_) + block * steps * ahead.lines * kLine;
      }
      (this->*kBlocks[last - row - 1])(panel, row, ahead, call);
    }
  }

  template <int R>
  void block(std::int64_t panel, std::int64_t row, Ahead ahead, const Call& call) const {
    Sums<R> sums;
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) sums[r][j] = vf::load(bias_.data() + panel * kPanel + j * vf::W);
    multiply<R>(call.x + row * call.x_stride, call.x_stride, weight_.data() + panel * panel_size_, inputs, ahead, sums);
    deliver<R>(sums, call.y + row * call.y_stride + panel * kPanel, call.y_stride,
               std::min(kPanel, outputs - panel * kPanel), call.into);
  }

  template <int... R>
  static constexpr std::array<Block, kRows> all_blocks(std::integer_sequence<int, R...>) {
    return {&DenseLinear::block<R + 1>...};
  }
  static constexpr std::array<Block, kRows> kBlocks = all_blocks(std::make_integer_sequence<int, kRows>());

  const std::int64_t panels_, panel_size_;
  Buffer<T> weight_;
  Buffer<float> bias_;
};

template <class T>
std::unique_ptr<Linear> make_dense(const T* weight, std::int64_t stride, const float* bias, std::int64_t outputs,
                                   std::int64_t inputs) {
  require(stride >= inputs, "rows of ", inputs, " weights cannot be ", stride, " apart");
  return std::make_unique<DenseLinear<T>>(weight, stride, bias, outputs, inputs);
}

}  // namespace

std::unique_ptr<Linear> make_linear_f32(const float* weight, std::int64_t stride, const float* bias,
                                        std::int64_t outputs, std::int64_t inputs) {
  return make_dense(weight, stride, bias, outputs, inputs);
}

std::unique_ptr<Linear> make_linear_bf16(const std::uint16_t* weight, std::int64_t stride, const float* bias,
                                         std::int64_t outputs, std::int64_t inputs) {
  return make_dense(reinterpret_cast<const bf16*>(weight), stride, bias, outputs, inputs);
}

}  // namespace hp

HP_EXPORT int hp_linear_f32(const float* weight, std::int64_t stride, const float* bias, std::int64_t outputs,
                            std::int64_t inputs, hp::Linear** made) {
  return hp::guarded([&] { *made = hp::make_linear_f32(weight, stride, bias, outputs, inputs).release(); });
}

HP_EXPORT int hp_linear_bf16(const std::uint16_t* weight, std::int64_t stride, const float* bias, std::int64_t outputs,
                             std::int64_t inputs, hp::Linear** made) {
  return hp::guarded([&] { *made = hp::make_linear_bf16(weight, stride, bias, outputs, inputs).release(); });
}
