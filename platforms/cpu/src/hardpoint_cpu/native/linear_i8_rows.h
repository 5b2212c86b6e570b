// Rows of activations as eight-bit integers, quantized anew in every call.
#pragma once

#include "common.h"
#include "linear_i8_lanes.h"
#include "pool.h"

namespace hp::i8 {

// Row r is values[r * stride] * scales[r]. `starts` is what its sums begin with, which takes off the weights' offset.
struct Rows {
  Lanes::Input* values;
  std::int64_t stride;
  float* scales;
  std::int32_t* starts;
};

// Symmetric, with the largest magnitude at 127, ties to even. Columns from `inputs` to `stride` and rows from `rows` to
// `padded_rows` are zeros. A row with a value that is not finite gets zeros and the scale NaN.
Rows quantize(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t inputs, std::int64_t stride,
              std::int64_t padded_rows, Pool& pool, Arena& arena);

}  // namespace hp::i8
