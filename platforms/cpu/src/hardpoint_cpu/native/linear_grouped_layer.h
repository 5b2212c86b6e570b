// A linear layer over panels of one format: how its paths are put together. Included where formats are compiled.
#pragma once

#include "linear_grouped.h"
#include "linear_grouped_tiles.h"

namespace hp::grouped {

// Weights of one format. Row is what the format packs one output from.
template <class F>
class Layer final : public GroupedLinear {
 public:
  // `span`: groups of 32 inputs that share a head; row(n): output n as the format packs it.
  template <class RowOf>
  Layer(std::int64_t outputs, std::int64_t inputs, std::int64_t span, const float* bias, Options options, Pool& pool,
        RowOf&& row)
      : GroupedLinear(outputs, inputs, options), span_(span), supers_(inputs / (span * kGroup)),
        head_bytes_(round_up(supers_ * F::kHead, kAlignment)),
        panel_bytes_(head_bytes_ + inputs / kGroup * F::Numbers::kBytes), bytes_(panels() * panel_bytes_),
        bias_(panels() * kPanel) {
    pool.ranges(panels(), 1, [&](std::int64_t first, std::int64_t last, int) {
      for (std::int64_t p = first; p < last; ++p) {
        std::uint8_t* heads = bytes_.data() + p * panel_bytes_;
        std::memset(heads, 0, panel_bytes_);
        for (int j = 0; j < kPanel; ++j) {
          const std::int64_t n = p * kPanel + j;
          bias_[n] = bias != nullptr && n < outputs ? bias[n] : 0.0f;
          if (n < outputs) F::pack_row(row(n), supers_, j, heads, heads + head_bytes_);
        }
      }
    });
  }

  std::int64_t bytes() const override { return bytes_.size() + bias_.size() * std::int64_t{sizeof(float)}; }

  void multiply(const Prepared& x, std::int64_t first_panel, std::int64_t last_panel, int thread, float* y,
                std::int64_t y_stride, Into into) const override {
    float* scratch = x.scratch + thread * x.scratch_stride;
    if (x.path == Path::kBf16) {
      bf16(x, first_panel, last_panel, scratch, y, y_stride, into);
      return;
    }
    std::int64_t p = first_panel;
    if (x.path == Path::kFloats && x.rows > kMostRows)
      for (; p + kWide <= last_panel; p += kWide) many_floats<kWide>(p, x, scratch, y, y_stride, into);
    for (; p < last_panel; ++p) {
      if (x.path == Path::kQuantized) {
        quantized(p, x.quantized, y, y_stride, into);
      } else if (x.rows > kMostRows) {
        many_floats<1>(p, x, scratch, y, y_stride, into);
      } else {
        few_floats(p, x, scratch, y, y_stride, into);
      }
    }
  }

 private:
  Panel panel_at(std::int64_t p) const {
    const std::uint8_t* heads = bytes_.data() + p * panel_bytes_;
    return {heads, heads + head_bytes_, span_};
  }

  void quantized(std::int64_t p, const QuantizedRows& x, float* y, std::int64_t y_stride, Into into) const {
    const Panel panel = panel_at(p);
    in_row_blocks<kMostRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      alignas(kAlignment) float lines[R][kPanel];
      for (int half = 0; half < kHalves; ++half) {
        vf sums[R];
        for (int r = 0; r < R; ++r) sums[r] = vf::load(bias_.data() + p * kPanel + half * vf::W);
        multiply_quantized<F, R>(panel, x, row, half, sums);
        for (int r = 0; r < R; ++r) sums[r].store(lines[r] + half * vf::W);
      }
      write(lines, R, p, y + row * y_stride, y_stride, into);
    });
  }

  // Two panels at a time, decoded once for all rows.
  void bf16([[maybe_unused]] const Prepared& x, [[maybe_unused]] std::int64_t first, [[maybe_unused]] std::int64_t last,
            [[maybe_unused]] float* scratch, [[maybe_unused]] float* y, [[maybe_unused]] std::int64_t y_stride,
            [[maybe_unused]] Into into) const {
#if defined(__AMX_BF16__)
    auto* weights = reinterpret_cast<std::uint16_t*>(scratch);
    const std::int64_t size = inputs * kPanel;
    const amx::Tiles tiles;
    for (std::int64_t p = first; p < last; p += 2) {
      const int count = p + 1 < last ? 2 : 1;
      for (int i = 0; i < count; ++i) decode_tiles<F>(panel_at(p + i), inputs / kGroup, weights + i * size);
      for (std::int64_t row = 0; row < x.rows; row += 2 * kTileRows) {
        alignas(kAlignment) TileLines lines;
        multiply_bf16(weights, count == 2 ? size : 0, x.bf16, x.bf16_stride, inputs / kGroup, row, lines);
        for (int upper = 0; upper < 2; ++upper)
          for (int i = 0; i < count; ++i) {
            const std::int64_t begin = row + upper * kTileRows, rows = std::min(kTileRows, x.rows - begin);
            for (std::int64_t r = 0; r < rows; ++r) {
              float* line = lines[upper][i][r];
              (vf::load(line) + vf::load(bias_.data() + (p + i) * kPanel)).store(line);
            }
            write(lines[upper][i], rows, p + i, y + begin * y_stride, y_stride, into);
          }
      }
    }
#endif
  }

  // Each group is decoded beside its use.
  void few_floats(std::int64_t p, const Prepared& x, float* scratch, float* y, std::int64_t y_stride, Into into) const {
    in_row_blocks<kFloatRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      const float* rows = x.x + row * x.x_stride;
      vf sums[R][kHalves];
      start<R, 1>(p, sums);
      over_groups<F>(panel_at(p), inputs / kGroup, [&](std::int64_t group, const GroupPlace& place) {
        decode_group<F>(place, scratch, kPanel);
        multiply_floats<R, kHalves>(scratch, kGroup, rows + group * kGroup, x.x_stride, sums);
      });
      finish<R, 1>(p, sums, y + row * y_stride, y_stride, into);
    });
  }

  // `Wide` panels side by side are decoded once, for all rows.
  template <int Wide>
  void many_floats(std::int64_t p, const Prepared& x, float* scratch, float* y, std::int64_t y_stride, Into into) const {
    for (int i = 0; i < Wide; ++i)
      over_groups<F>(panel_at(p + i), inputs / kGroup, [&](std::int64_t group, const GroupPlace& place) {
        decode_group<F>(place, scratch + group * kGroup * kPanel * Wide + i * kPanel, kPanel * Wide);
      });
    in_row_blocks<kFloatRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      vf sums[R][kHalves * Wide];
      start<R, Wide>(p, sums);
      multiply_floats<R, kHalves * Wide>(scratch, inputs, x.x + row * x.x_stride, x.x_stride, sums);
      finish<R, Wide>(p, sums, y + row * y_stride, y_stride, into);
    });
  }

  template <int R, int Wide>
  void start(std::int64_t p, vf (&sums)[R][kHalves * Wide]) const {
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kHalves * Wide; ++j) sums[r][j] = vf::load(bias_.data() + p * kPanel + j * vf::W);
  }

  template <int R, int Wide>
  void finish(std::int64_t p, const vf (&sums)[R][kHalves * Wide], float* y, std::int64_t y_stride, Into into) const {
    alignas(kAlignment) float lines[R][kPanel];
    for (int i = 0; i < Wide; ++i) {
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < kHalves; ++half) sums[r][i * kHalves + half].store(lines[r] + half * vf::W);
      write(lines, R, p + i, y, y_stride, into);
    }
  }

  void write(const float (*lines)[kPanel], std::int64_t rows, std::int64_t p, float* y, std::int64_t y_stride,
             Into into) const {
    const std::int64_t first = p * kPanel, width = std::min(kPanel, outputs - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* target = y + r * y_stride + first;
      if (into == Into::kAdd) {
        for (std::int64_t j = 0; j < width; ++j) target[j] += lines[r][j];
      } else {
        std::memcpy(target, lines[r], width * sizeof(float));
      }
    }
  }

  const std::int64_t span_, supers_, head_bytes_, panel_bytes_;
  Buffer<std::uint8_t> bytes_;
  Buffer<float> bias_;
};

}  // namespace hp::grouped
