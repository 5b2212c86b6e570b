// Activations rounded to eight bits, for weights that come in groups.
#pragma once

#include "common.h"
#include "pool.h"

namespace hp::grouped {

// Rows in groups of 32 inputs: x = scale * value, with values from -127 to 127. Groups come first in every array, so
// that a few rows at one group lie together. A group whose inputs are not all finite has a scale that is not a number.
struct QuantizedRows {
  std::int64_t rows, stride, groups;  // `stride` rows lie in each group; those above `rows` are zeros
  std::int8_t* values;                // [groups][stride][32]
  float* scales;                      // [groups][stride]
  float* sums;                        // [groups][stride], of scale * value
  float* half_sums;                   // [groups][2][stride], the same of each sixteen inputs
};

// x [rows, inputs] with rows x_stride apart; inputs is a multiple of 32. Lies in `arena`.
QuantizedRows quantize_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t inputs, Pool& pool,
                            Arena& arena);

}  // namespace hp::grouped
