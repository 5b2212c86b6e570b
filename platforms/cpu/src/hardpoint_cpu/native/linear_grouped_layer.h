// A linear layer over panels of one format: how its paths are put together. Included where formats are compiled.
#pragma once

#include "linear_grouped.h"
#include "linear_grouped_kernel.h"

namespace hp::grouped {

using PanelSums = float[kMostRows][kPanel];

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
    for (std::int64_t p = first_panel; p < last_panel; ++p) {
      const std::uint8_t* heads = bytes_.data() + p * panel_bytes_;
      const Panel panel{heads, heads + head_bytes_, span_};
      if (x.path == Path::kQuantized) {
        quantized(p, panel, x.quantized, y, y_stride, into);
      } else {
        floats(p, panel, x, x.scratch + thread * x.scratch_stride, y, y_stride, into);
      }
    }
  }

 private:
  void quantized(std::int64_t p, const Panel& panel, const QuantizedRows& x, float* y, std::int64_t y_stride,
                 Into into) const {
    in_row_blocks<kMostRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      alignas(kAlignment) PanelSums lines;
      for (int half = 0; half < kHalves; ++half) {
        vf sums[R];
        for (int r = 0; r < R; ++r) sums[r] = vf::load(bias_.data() + p * kPanel + half * vf::W);
        multiply_quantized<F, R>(panel, x, row, half, sums);
        for (int r = 0; r < R; ++r) sums[r].store(lines[r] + half * vf::W);
      }
      write<R>(lines, p, y + row * y_stride, y_stride, into);
    });
  }

  // Few rows: each group is decoded beside its use. More: the whole panel once, for all of them.
  void floats(std::int64_t p, const Panel& panel, const Prepared& x, float* scratch, float* y, std::int64_t y_stride,
              Into into) const {
    const std::int64_t groups = inputs / kGroup;
    const bool whole = x.rows > kMostRows;
    if (whole)
      over_groups<F>(panel, groups, [&](std::int64_t group, const GroupPlace& place) {
        decode_group<F>(place, scratch + group * kGroup * kPanel);
      });
    in_row_blocks<kMostRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      const float* rows = x.x + row * x.x_stride;
      vf sums[R][kHalves];
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < kHalves; ++half) sums[r][half] = vf::load(bias_.data() + p * kPanel + half * vf::W);
      if (whole) {
        multiply_floats<R>(scratch, inputs, rows, x.x_stride, sums);
      } else {
        over_groups<F>(panel, groups, [&](std::int64_t group, const GroupPlace& place) {
          decode_group<F>(place, scratch);
          multiply_floats<R>(scratch, kGroup, rows + group * kGroup, x.x_stride, sums);
        });
      }
      alignas(kAlignment) PanelSums lines;
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < kHalves; ++half) sums[r][half].store(lines[r] + half * vf::W);
      write<R>(lines, p, y + row * y_stride, y_stride, into);
    });
  }

  template <int R>
  void write(const PanelSums& lines, std::int64_t p, float* y, std::int64_t y_stride, Into into) const {
    const std::int64_t first = p * kPanel, width = std::min(kPanel, outputs - first);
    for (int r = 0; r < R; ++r) {
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
