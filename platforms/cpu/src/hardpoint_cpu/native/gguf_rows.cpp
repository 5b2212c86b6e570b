// Rows of GGUF weights as floats: what a table of embeddings is read with.
#include "api.h"
#include "gguf_blocks.h"

namespace hp::gguf {
namespace {

template <class Block>
void decode_row(const std::uint8_t* row, std::int64_t blocks, float* target) {
  std::uint8_t q[Block::kElements];
  for (std::int64_t block = 0; block < blocks; ++block, row += Block::kBytes) {
    Block::values(row, q);
    for (int first = 0; first < Block::kElements; first += Block::kGroup) {
      const Affine of = Block::affine(row, first / Block::kGroup);
      for (int i = 0; i < Block::kGroup; ++i) *target++ = of.scale * static_cast<float>(q[first + i]) + of.minimum;
    }
  }
}

}  // namespace
}  // namespace hp::gguf

// out [count, inputs] = rows `ids` of the `rows` rows of `type` that lie row_bytes apart.
HP_EXPORT int hp_gguf_rows(hp::Runtime* runtime, const char* type, const std::uint8_t* bytes, std::int64_t rows,
                           std::int64_t row_bytes, std::int64_t inputs, const std::int64_t* ids, std::int64_t count,
                           float* out) {
  return hp::guarded(runtime, [&] {
    hp::gguf::with_type(type, [&](auto block) {
      using Block = decltype(block);
      const std::int64_t blocks = inputs / Block::kElements;
      hp::require(inputs > 0 && inputs % Block::kElements == 0 && row_bytes >= blocks * Block::kBytes, "rows of ",
                  row_bytes, " bytes do not hold ", inputs, " inputs of ", type);
      for (std::int64_t i = 0; i < count; ++i)
        hp::require(ids[i] >= 0 && ids[i] < rows, "row ", ids[i], " of ", rows, " rows");
      runtime->pool.ranges(count, 4, [&](std::int64_t first, std::int64_t last, int) {
        for (std::int64_t i = first; i < last; ++i)
          hp::gguf::decode_row<Block>(bytes + ids[i] * row_bytes, blocks, out + i * inputs);
      });
    });
  });
}
