// Activations rounded to eight bits, for weights that come in groups.
#pragma once

#include "common.h"
#include "pool.h"
#include "simd.h"

namespace hp::grouped {

inline constexpr std::int64_t kRowTile = vf::W == 16 ? 12 : 4;  // rows that fit the registers of a kernel

// Rows in groups of 32 inputs: x = scale * value, with values from -127 to 127. Rows come in tiles, and of a
// tile what belongs to a group lies together. A group whose inputs are not all finite has a scale that is not a
// number.
struct QuantizedRows {
  std::int64_t rows, groups, tile;  // kRowTile, or fewer where there are not so many
  std::int8_t* values;              // [tiles][groups][tile][32]
  float* scales;                    // [tiles][groups][tile]
  float* sums;                      // [tiles][groups][tile], of scale * value
  float* half_sums;                 // [tiles][groups][2][tile], the same of each sixteen inputs

  // Which line of 32 values, or which scale, row `row` has at group `group`.
  std::int64_t line(std::int64_t row, std::int64_t group) const {
    return (row / tile * groups + group) * tile + row % tile;
  }
};

// x [rows, inputs] with rows x_stride apart; inputs is a multiple of 32. Lies in `arena`.
QuantizedRows quantize_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t inputs, Pool& pool,
                            Arena& arena);

}  // namespace hp::grouped
