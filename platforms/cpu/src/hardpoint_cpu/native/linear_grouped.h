// Linear layers whose weights stay packed in groups of few bits: those of GGUF files, and int4 groups.
#pragma once

#include <memory>

#include "common.h"
#include "linear_grouped_rows.h"
#include "pool.h"

namespace hp::grouped {

// Of a layer. `quantizes`: activations are rounded to eight bits per group of 32 inputs; they stay float32 otherwise.
// `invariant`: no path may be taken that gives a row other bits when more rows come with it.
struct Options {
  bool quantizes;
  bool invariant;
};

// What many rows are turned into before they are multiplied.
enum class Path { kQuantized, kFloats, kBf16 };

// The activations of one call, and scratch for each thread.
struct Prepared {
  Path path;
  const float* x;
  std::int64_t x_stride, rows;
  QuantizedRows quantized;
  const std::uint16_t* bf16;  // [groups][bf16_stride][32], rows above `rows` are zeros
  std::int64_t bf16_stride;
  float* scratch;
  std::int64_t scratch_stride;
};

class GroupedLinear : public Linear {
 public:
  GroupedLinear(std::int64_t outputs, std::int64_t inputs, Options options);

  void run(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride, Into into,
           Pool& pool, Arena& arena) const final;
  bool is_batch_invariant() const final;

  // What a layer that shares its activations with others does in turn: layers of equal path and inputs can be given
  // what one of them prepared.
  Path path(std::int64_t rows) const;
  Prepared prepare(const float* x, std::int64_t x_stride, std::int64_t rows, Pool& pool, Arena& arena) const;
  virtual void multiply(const Prepared& x, std::int64_t first_panel, std::int64_t last_panel, int thread, float* y,
                        std::int64_t y_stride, Into into) const = 0;
  std::int64_t panels() const;
  // work(first, last, thread) for ranges of `panels`, in pieces that suit the path.
  template <class Work>
  static void over_panels(const Prepared& x, std::int64_t panels, Pool& pool, Work&& work) {
    const std::int64_t unit = x.path == Path::kQuantized ? 1 : 2;
    pool.ranges(ceil_div(panels, unit), 1, [&](std::int64_t first, std::int64_t last, int thread) {
      work(first * unit, std::min(last * unit, panels), thread);
    });
  }

 protected:
  const Options options_;
};

// Rows of a type of GGUF files: `rows` rows, row_bytes apart.
struct GgufPart {
  const std::uint8_t* bytes;
  std::int64_t rows, row_bytes;
};

// Packed copy of parts of one type (such as "Q4_1"), one after the other along the outputs; bias [outputs] or null.
std::unique_ptr<GroupedLinear> make_gguf(const std::string& type, const std::vector<GgufPart>& parts,
                                         std::int64_t inputs, const float* bias, Options options, Pool& pool);

// Contiguous rows of int4 groups: values [outputs, inputs / 2], of 32 inputs the first half in the low nibbles of 16
// bytes; weight = scale * value + minimum with both [outputs, inputs / group].
struct Int4Weight {
  const std::uint8_t* values;
  const float* scales;
  const float* minimums;
  std::int64_t outputs, inputs, group;
};

std::unique_ptr<GroupedLinear> make_int4(const Int4Weight& weight, const float* bias, Options options, Pool& pool);

}  // namespace hp::grouped
