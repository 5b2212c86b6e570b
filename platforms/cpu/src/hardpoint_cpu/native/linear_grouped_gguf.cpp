// Layers of the types of GGUF files.
#include "api.h"
#include "linear_grouped_layer.h"

namespace hp::grouped {
namespace {

using Rows = std::vector<const std::uint8_t*>;

template <class Block>
Rows rows_of(const std::vector<GgufPart>& parts, std::int64_t inputs) {
  require(inputs % Block::kElements == 0, inputs, " inputs are not whole blocks of ", Block::kElements);
  const std::int64_t row_bytes = inputs / Block::kElements * Block::kBytes;
  Rows rows;
  for (const GgufPart& part : parts) {
    require(part.rows >= 0 && part.row_bytes >= row_bytes, part.rows, " rows of ", part.row_bytes, " bytes cannot hold ",
            inputs, " inputs of ", row_bytes, " bytes");
    for (std::int64_t row = 0; row < part.rows; ++row) rows.push_back(part.bytes + row * part.row_bytes);
  }
  return rows;
}

template <class Block>
struct FormatOf {
  using Type = Scaled<Block>;
};
template <>
struct FormatOf<gguf::Q4_1> {
  using Type = ScaledAbove<gguf::Q4_1>;
};
template <>
struct FormatOf<gguf::Q5_1> {
  using Type = ScaledAbove<gguf::Q5_1>;
};
template <>
struct FormatOf<gguf::Q4_K> {
  using Type = Nested<gguf::Q4_K>;
};
template <>
struct FormatOf<gguf::Q5_K> {
  using Type = Nested<gguf::Q5_K>;
};
template <>
struct FormatOf<gguf::Q6_K> {
  using Type = NestedSigned<gguf::Q6_K>;
};

}  // namespace

std::unique_ptr<GroupedLinear> make_gguf(const std::string& type, const std::vector<GgufPart>& parts,
                                         std::int64_t inputs, const float* bias, Options options, Pool& pool) {
  return gguf::with_type(type, [&](auto block) -> std::unique_ptr<GroupedLinear> {
    using Block = decltype(block);
    const Rows rows = rows_of<Block>(parts, inputs);
    return std::make_unique<Layer<typename FormatOf<Block>::Type>>(std::ssize(rows), inputs, Block::kElements / kGroup,
                                                                   bias, options, pool,
                                                                   [&](std::int64_t n) { return rows[n]; });
  });
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
