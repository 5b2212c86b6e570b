#pragma once

#include <memory>

#include "common.h"
#include "pool.h"

namespace hp {

// Longer rows could overflow sums of 32 bits.
inline constexpr std::int64_t kMostInt8Inputs = 1 << 17;

// Weights values[o, i] * scales[o], `values` [outputs, inputs] with rows `stride` apart; bias [outputs] or null. All
// are copied, by all threads of `pool`. Activations are quantized to eight bits, row by row, and
//     y = float(sum) * (row's scale * scales[o]) + bias[o].
// Every bit of a row is the same whatever the level and the number of rows.
std::unique_ptr<Linear> make_linear_i8(const std::int8_t* values, std::int64_t stride, const float* scales,
                                       const float* bias, std::int64_t outputs, std::int64_t inputs, Pool& pool);

// The same weights with float32 activations: one chain of additions in the order of the inputs for each output.
std::unique_ptr<Linear> make_linear_i8_float(const std::int8_t* values, std::int64_t stride, const float* scales,
                                             const float* bias, std::int64_t outputs, std::int64_t inputs,
                                             Pool& pool);

// What both refuse.
void check_int8_weights(std::int64_t stride, const float* scales, std::int64_t outputs, std::int64_t inputs);

}  // namespace hp
