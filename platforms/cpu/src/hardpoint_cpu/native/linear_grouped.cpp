#include "linear_grouped.h"

#include "api.h"
#include "linear_grouped_kernel.h"

namespace hp::grouped {
namespace {

using PanelSums = float[kMostRows][kPanel];

// Weights of one format. Row is what the format packs one output from.
template <class F>
class Layer final : public GroupedLinear {
 public:
  // row(n): output n as the format packs it.
  template <class RowOf>
  Layer(std::int64_t outputs, std::int64_t inputs, const float* bias, Options options, Pool& pool, RowOf&& row)
      : GroupedLinear(outputs, inputs, options), supers_(inputs / (F::kGroups * kGroup)),
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
          if (n < outputs) F::template pack_row<F>(row(n), supers_, j, heads, heads + head_bytes_);
        }
      }
    });
  }

  std::int64_t bytes() const override { return bytes_.size() + bias_.size() * std::int64_t{sizeof(float)}; }

  void multiply(const Prepared& x, std::int64_t first_panel, std::int64_t last_panel, int thread, float* y,
                std::int64_t y_stride, Into into) const override {
    for (std::int64_t p = first_panel; p < last_panel; ++p) {
      const std::uint8_t* heads = bytes_.data() + p * panel_bytes_;
      const Panel panel{heads, heads + head_bytes_};
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
      for (std::int64_t group = 0; group < groups; ++group)
        decode_group<F>(panel, group, scratch + group * kGroup * kPanel);
    in_row_blocks<kMostRows>(x.rows, [&](std::int64_t row, auto count) {
      constexpr int R = count;
      const float* rows = x.x + row * x.x_stride;
      vf sums[R][kHalves];
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < kHalves; ++half) sums[r][half] = vf::load(bias_.data() + p * kPanel + half * vf::W);
      if (whole) {
        multiply_floats<R>(scratch, inputs, rows, x.x_stride, sums);
      } else {
        for (std::int64_t group = 0; group < groups; ++group) {
          decode_group<F>(panel, group, scratch);
          multiply_floats<R>(scratch, kGroup, rows + group * kGroup, x.x_stride, sums);
        }
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

  const std::int64_t supers_, head_bytes_, panel_bytes_;
  Buffer<std::uint8_t> bytes_;
  Buffer<float> bias_;
};

template <class Format, class Block>
std::unique_ptr<GroupedLinear> from_file(const std::vector<GgufPart>& parts, std::int64_t inputs, const float* bias,
                                         Options options, Pool& pool) {
  require(inputs % Block::kElements == 0, inputs, " inputs are not whole blocks of ", Block::kElements);
  const std::int64_t row_bytes = inputs / Block::kElements * Block::kBytes;
  std::vector<const std::uint8_t*> rows;
  for (const GgufPart& part : parts) {
    require(part.rows >= 0 && part.row_bytes >= row_bytes, part.rows, " rows of ", part.row_bytes, " bytes cannot hold ",
            inputs, " inputs of ", row_bytes, " bytes");
    for (std::int64_t row = 0; row < part.rows; ++row) rows.push_back(part.bytes + row * part.row_bytes);
  }
  return std::make_unique<Layer<Format>>(static_cast<std::int64_t>(rows.size()), inputs, bias, options, pool,
                                         [&](std::int64_t n) { return rows[n]; });
}

}  // namespace

GroupedLinear::GroupedLinear(std::int64_t outputs, std::int64_t inputs, Options options)
    : Linear(outputs, inputs), options_(options) {}

std::int64_t GroupedLinear::panels() const { return ceil_div(outputs, kPanel); }

Path GroupedLinear::path(std::int64_t) const { return options_.quantizes ? Path::kQuantized : Path::kFloats; }

Prepared GroupedLinear::prepare(const float* x, std::int64_t x_stride, std::int64_t rows, Pool& pool,
                                Arena& arena) const {
  Prepared made{path(rows), x, x_stride, rows, {}, nullptr, 0};
  if (made.path == Path::kQuantized) {
    made.quantized = quantize_rows(x, x_stride, rows, inputs, pool, arena);
  } else {
    made.scratch_stride = (rows > kMostRows ? inputs : kGroup) * kPanel;
    made.scratch = arena.take<float>(made.scratch_stride * pool.size());
  }
  return made;
}

void GroupedLinear::run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride,
                        Into into, Pool& pool, Arena& arena) const {
  const Arena::Scope scope(arena);
  const Prepared prepared = prepare(x, x_stride, rows, pool, arena);
  pool.ranges(panels(), 1, [&](std::int64_t first, std::int64_t last, int thread) {
    multiply(prepared, first, last, thread, y, y_stride, into);
  });
}

std::unique_ptr<GroupedLinear> make_gguf(const std::string& type, const std::vector<GgufPart>& parts,
                                         std::int64_t inputs, const float* bias, Options options, Pool& pool) {
  using namespace gguf;
  if (type == "Q4_0") return from_file<Scaled<Q4_0>, Q4_0>(parts, inputs, bias, options, pool);
  if (type == "Q4_1") return from_file<ScaledAbove<Q4_1>, Q4_1>(parts, inputs, bias, options, pool);
  if (type == "Q8_0") return from_file<Scaled<Q8_0>, Q8_0>(parts, inputs, bias, options, pool);
  if (type == "Q4_K") return from_file<Nested<Q4_K>, Q4_K>(parts, inputs, bias, options, pool);
  if (type == "Q6_K") return from_file<NestedSigned<Q6_K>, Q6_K>(parts, inputs, bias, options, pool);
  fail("weights of the GGUF type ", type, " have no kernel; allowed: Q4_0, Q4_1, Q8_0, Q4_K, Q6_K");
}

}  // namespace hp::grouped

HP_EXPORT int hp_linear_gguf(hp::Runtime* runtime, const char* type, const std::uint8_t* const* parts,
                             const std::int64_t* rows, const std::int64_t* row_bytes, std::int64_t num_parts,
                             std::int64_t inputs, const float* bias, int quantizes, int invariant, hp::Linear** made) {
  return hp::guarded(runtime, [&] {
    std::vector<hp::grouped::GgufPart> given;
    for (std::int64_t part = 0; part < num_parts; ++part) given.push_back({parts[part], rows[part], row_bytes[part]});
    *made = hp::grouped::make_gguf(type, given, inputs, bias, {quantizes != 0, invariant != 0}, runtime->pool).release();
  });
}
