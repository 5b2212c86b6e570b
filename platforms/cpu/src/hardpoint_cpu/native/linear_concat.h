// A linear layer of several parts along the outputs, each with a weight of its own kind.
#pragma once

#include <memory>

#include "common.h"

namespace hp {

// The parts' outputs behind one another; all have the same inputs.
std::unique_ptr<Linear> make_linear_concat(std::vector<std::unique_ptr<Linear>> parts);

}  // namespace hp
