// Dense weights in float32 or bfloat16, computed in float32. They lie in panels of kPanel outputs, padded with zeros,
// so that a panel is one stream of memory: [outputs / kPanel][inputs][kPanel], in bfloat16 with the inputs in pairs:
// [outputs / kPanel][inputs / 2][kPanel][2].
//
// Every output is one chain of additions in the order of the inputs, whatever the number of rows, so that a row's bits
// never depend on its neighbors. Rows are read where they lie: packing them was measured to cost what it gains. Only
// where there is a matrix unit and invariance is not asked for, many rows go another way (linear_f32_tiles.h).
#include "linear_f32.h"

#include <unistd.h>

#include <array>
#include <type_traits>
#include <utility>

#include "api.h"
#include "bf16.h"
#include "linear_f32_tiles.h"
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
// What memory delivers while the weights before it are multiplied; asking earlier makes requests wait for one another.
constexpr std::int64_t kAheadBytes = 2048;
// Row blocks that share a panel while it is in the second-level cache.
constexpr std::int64_t kBlocksPerGroup = 16;
constexpr std::int64_t kLeastProducts = 1 << 17;
constexpr std::int64_t kPackedAtOnce = 4;  // panels

#if defined(__AMX_BF16__)
// From here on splitting weights pays.
constexpr std::int64_t kTiledRows = 160;
// Blocks of inputs at once: sums are worth keeping in registers for as long as both sides stay in the cache.
constexpr std::int64_t kTiledBlocks = 24;
bool may_use_tiles() { return amx::is_allowed(); }
#else
constexpr bool may_use_tiles() { return false; }
#endif

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
  DenseLinear(const T* weight, std::int64_t stride, const float* bias, std::int64_t outputs, std::int64_t inputs,
              bool invariant, Pool& pool)
      : Linear(outputs, inputs), uses_tiles_(!invariant && may_use_tiles()), panels_(ceil_div(outputs, kPanel)), panel_size_(round_up(inputs, kGroup) * kPanel),
        weight_(panels_ * panel_size_), bias_(panels_ * kPanel) {
    for (std::int64_t n = 0; n < panels_ * kPanel; ++n) bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
    // Most of it is waiting for memory that nobody touched before.
    pool.ranges(panels_, kPackedAtOnce, [&](std::int64_t first, std::int64_t last, int) {
      for (std::int64_t panel = first; panel < last; ++panel) pack(panel, weight + panel * kPanel * stride, stride);
    });
  }

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, [[maybe_unused]] Arena& arena) const override {
    const Call call{x, x_stride, y, y_stride, into};
#if defined(__AMX_BF16__)
    if (uses_tiles_ && rows >= kTiledRows) {
      run_tiles(call, rows, pool, arena);
      return;
    }
#endif
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
  bool is_batch_invariant() const override { return !uses_tiles_; }

 private:
  static constexpr std::int64_t kGroup = std::is_same_v<T, float> ? 1 : 2;

  // Of every output one cache line at a time, so that both sides of the transposition stay in the cache.
  void pack(std::int64_t panel, const T* rows, std::int64_t stride) {
    constexpr std::int64_t kAtOnce = kLine / std::int64_t{sizeof(T)};
    T* target = weight_.data() + panel * panel_size_;
    const std::int64_t width = std::min(kPanel, outputs - panel * kPanel);
    if (width < kPanel || inputs % kGroup != 0) std::fill_n(target, panel_size_, T{});
    for (std::int64_t first = 0; first < inputs; first += kAtOnce) {
      const std::int64_t last = std::min(first + kAtOnce, inputs);
      for (std::int64_t n = 0; n < width; ++n)
        for (std::int64_t k = first; k < last; ++k)
          target[(k / kGroup * kPanel + n) * kGroup + k % kGroup] = rows[n * stride + k];
    }
  }

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

#if defined(__AMX_BF16__)
  static_assert(kPanel == split::kWide * amx::kTileRows);
  static_assert(kPanel == split::kWide * amx::kTileRows);
  static constexpr int kWeightParts = split::kPartsOf<T>;
  static constexpr std::int64_t kWeightsSize = kTiledBlocks * split::kWide * kWeightParts * split::kTile;

  // Some pairs of sixteen rows and some blocks of inputs: what is in a core's own cache at a time. Threads take turns
  // with panels, so that a thread's next one is likely to be `turn` further.
  struct Tiled {
    const split::Half* x;
    std::int64_t first_pair, pairs, rows, first, blocks, turn;
  };

  void run_tiles(const Call& call, std::int64_t rows, Pool& pool, Arena& arena) const {
    const Arena::Scope scope(arena);
    const std::int64_t pairs = ceil_div(rows, split::kPairRows), blocks = ceil_div(inputs, split::kDepth);
    const std::int64_t steps = ceil_div(blocks, kTiledBlocks), most_blocks = ceil_div(blocks, steps);
    const std::int64_t pair_bytes = most_blocks * split::kPairBlock * std::int64_t{sizeof(split::Half)};
    const std::int64_t groups = ceil_div(pairs, std::max<std::int64_t>(1, cache_bytes() * 5 / 8 / pair_bytes));
    split::Half* x = arena.take<split::Half>(ceil_div(pairs, groups) * most_blocks * split::kPairBlock);
    split::Half* weights = arena.take<split::Half>(pool.size() * kWeightsSize);
    for (std::int64_t turn = 0; turn < groups * steps; ++turn) {
      const std::int64_t group = turn / steps, step = turn % steps;
      const std::int64_t first_pair = pairs * group / groups, first = blocks * step / steps;
      const Tiled part{x, first_pair, pairs * (group + 1) / groups - first_pair, rows, first,
                       blocks * (step + 1) / steps - first, pool.size()};
      pool.run(part.pairs, [&](std::int64_t pair, int) {
        const std::int64_t row = (first_pair + pair) * split::kPairRows;
        split::split_rows(call.x + row * call.x_stride, call.x_stride, rows - row, inputs, first * split::kDepth,
                          (first + part.blocks) * split::kDepth, x + pair * part.blocks * split::kPairBlock);
      });
      // Rows are shared out only where threads outnumber panels: weights are split anew for each share.
      const std::int64_t shares = std::clamp<std::int64_t>(2 * pool.size() / panels_, 1, part.pairs);
      pool.run(shares * panels_, [&](std::int64_t chunk, int thread) {
        const std::int64_t share = chunk / panels_;
        tiles(part, chunk % panels_, part.pairs * share / shares, part.pairs * (share + 1) / shares,
              weights + thread * kWeightsSize, call);
      });
    }
  }

  void tiles(const Tiled& part, std::int64_t panel, std::int64_t pair, std::int64_t last_pair, split::Half* weights,
             const Call& call) const {
    const std::int64_t begin = part.first * split::kDepth, end = std::min(begin + part.blocks * split::kDepth, inputs);
    split::arrange(weight_.data() + panel * panel_size_, inputs, begin, begin + part.blocks * split::kDepth, weights);
    const T* next = weight_.data() + (panel + part.turn) % panels_ * panel_size_ + begin * kPanel;
    const std::int64_t lines = (end - begin) * kPanel * std::int64_t{sizeof(T)} / kLine;
    Ahead ahead{reinterpret_cast<const char*>(next), ceil_div(lines, (last_pair - pair) * part.blocks)};
    const auto request = [&] { ahead.request(); };
    const amx::Tiles registers;
    for (; pair < last_pair; ++pair) {
      alignas(kAlignment) split::Lines sums;
      const split::Half* rows = part.x + pair * part.blocks * split::kPairBlock;
      const std::int64_t row = (part.first_pair + pair) * split::kPairRows;
      const bool both = row + amx::kTileRows < part.rows;
      if (both) {
        split::multiply<2, kWeightParts>(rows, weights, part.blocks, request, sums);
      } else {
        split::multiply<1, kWeightParts>(rows, weights, part.blocks, request, sums);
      }
      for (std::int64_t tile = 0; tile <= std::int64_t{both}; ++tile)
        for (std::int64_t column = 0; column < split::kWide; ++column)
          write_tile(sums[tile][column], row + tile * amx::kTileRows, panel * kPanel + column * amx::kTileRows, part, call);
    }
  }

  void write_tile(const float (&lines)[amx::kTileRows][amx::kTileRows], std::int64_t first, std::int64_t output,
                  const Tiled& part, const Call& call) const {
    const std::int64_t width = std::min(amx::kTileRows, outputs - output);
    if (width <= 0) return;
    const auto mask = static_cast<__mmask16>((1u << width) - 1);
    const bool starts = part.first == 0, adds = call.into == Into::kAdd || !starts;
    const __m512 bias = starts ? _mm512_loadu_ps(bias_.data() + output) : _mm512_setzero_ps();
    for (std::int64_t r = 0; r < std::min(amx::kTileRows, part.rows - first); ++r) {
      float* target = call.y + (first + r) * call.y_stride + output;
      __m512 sum = _mm512_add_ps(_mm512_load_ps(lines[r]), bias);
      if (adds) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, target));
      _mm512_mask_storeu_ps(target, mask, sum);
    }
  }
#endif

  template <int... R>
  static constexpr std::array<Block, kRows> all_blocks(std::integer_sequence<int, R...>) {
    return {&DenseLinear::block<R + 1>...};
  }
  static constexpr std::array<Block, kRows> kBlocks = all_blocks(std::make_integer_sequence<int, kRows>());

  const bool uses_tiles_;
  const std::int64_t panels_, panel_size_;
  Buffer<T> weight_;
  Buffer<float> bias_;
};

template <class T>
std::unique_ptr<Linear> make_dense(const T* weight, std::int64_t stride, const float* bias, std::int64_t outputs,
                                   std::int64_t inputs, bool invariant, Pool& pool) {
  require(stride >= inputs, "rows of ", inputs, " weights cannot be ", stride, " apart");
  return std::make_unique<DenseLinear<T>>(weight, stride, bias, outputs, inputs, invariant, pool);
}

}  // namespace

std::unique_ptr<Linear> make_linear_f32(const float* weight, std::int64_t stride, const float* bias,
                                        std::int64_t outputs, std::int64_t inputs, bool invariant, Pool& pool) {
  return make_dense(weight, stride, bias, outputs, inputs, invariant, pool);
}

std::unique_ptr<Linear> make_linear_bf16(const std::uint16_t* weight, std::int64_t stride, const float* bias,
                                         std::int64_t outputs, std::int64_t inputs, bool invariant, Pool& pool) {
  return make_dense(reinterpret_cast<const bf16*>(weight), stride, bias, outputs, inputs, invariant, pool);
}

}  // namespace hp

HP_EXPORT int hp_linear_f32(hp::Runtime* runtime, const float* weight, std::int64_t stride, const float* bias,
                            std::int64_t outputs, std::int64_t inputs, int invariant, hp::Linear** made) {
  return hp::guarded(runtime, [&] {
    *made = hp::make_linear_f32(weight, stride, bias, outputs, inputs, invariant != 0, runtime->pool).release();
  });
}

HP_EXPORT int hp_linear_bf16(hp::Runtime* runtime, const std::uint16_t* weight, std::int64_t stride, const float* bias,
                             std::int64_t outputs, std::int64_t inputs, int invariant, hp::Linear** made) {
  return hp::guarded(runtime, [&] {
    *made = hp::make_linear_bf16(weight, stride, bias, outputs, inputs, invariant != 0, runtime->pool).release();
  });
}
