#pragma once

#include <memory>

#include "common.h"
#include "pool.h"

namespace hp {

// weight [outputs, inputs] with rows `stride` apart, bias [outputs] or null; both are copied, by all threads of `pool`.
// `invariant`: no path may be taken that gives a row other bits when more rows come with it.
std::unique_ptr<Linear> make_linear_f32(const float* weight, std::int64_t stride, const float* bias,
                                        std::int64_t outputs, std::int64_t inputs,
                                        bool invariant, Pool& pool);

// The same of bfloat16, kept as such: half the memory, and the bits that the weights widened to float32 would give.
std::unique_ptr<Linear> make_linear_bf16(const std::uint16_t* weight, std::int64_t stride, const float* bias,
                                         std::int64_t outputs, std::int64_t inputs,
                                        bool invariant, Pool& pool);

}  // namespace hp
