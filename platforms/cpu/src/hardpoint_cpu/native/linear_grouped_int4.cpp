// Layers of int4 groups: weight = scale * q + minimum, with float32 scales and minimums for groups of 32 inputs or a
// multiple. Heads are kept in as few bytes as give the same float32 back.
#include <cmath>

#include "api.h"
#include "linear_grouped_layer.h"

namespace hp::grouped {
namespace {

struct Int4Row {
  const std::uint8_t* values;  // 16 bytes for 32 inputs: the first half in the low nibbles
  const float* scales;
  const float* minimums;
  std::int64_t span;  // groups of 32 inputs to a scale
};

template <class Format>
struct Int4 {
  static constexpr int kBits = 4, kSubs = 1;
  static constexpr bool kHasMinimum = true;
  using Numbers = Planes<4>;
  using Row = Int4Row;

  static void pack_row(const Row& row, std::int64_t supers, int output, std::uint8_t* heads, std::uint8_t* numbers) {
    std::uint8_t q[kGroup];
    for (std::int64_t super = 0; super < supers; ++super)
      Format::place_head(row.scales[super], row.minimums[super], output, heads + super * Format::kHead);
    for (std::int64_t group = 0; group < supers * row.span; ++group) {
      gguf::nibble_halves(row.values + group * (kGroup / 2), q);
      Numbers::place(q, output, numbers + group * Numbers::kBytes);
    }
  }
};

// Any float32.
struct Int4Floats : Int4<Int4Floats> {
  static constexpr std::int64_t kHead = 8 * kPanel;
  static bool holds(float, float) { return true; }
  static void place_head(float scale, float minimum, int output, std::uint8_t* head) {
    std::memcpy(head + 4 * output, &scale, 4);
    std::memcpy(head + 4 * (kPanel + output), &minimum, 4);
  }
  static Scales scales(const std::uint8_t* head, int, int, int half) {
    const float* line = reinterpret_cast<const float*>(head) + half * vf::W;
    return {vf::load(line), vf::load(line + kPanel)};
  }
};

// The float16 of the same value, or none. What is subnormal there counts as none.
bool to_half(float value, std::uint16_t& half) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  half = static_cast<std::uint16_t>(sign);
  if (rest == 0) return true;
  if (rest < 113u << 23 || rest >= 143u << 23 || (rest & 0x1fffu) != 0) return false;
  half = static_cast<std::uint16_t>(sign | (rest - (112u << 23)) >> 13);
  return true;
}

// Both are float16.
struct Int4Halves : Int4<Int4Halves> {
  static constexpr std::int64_t kHead = 4 * kPanel;
  static bool holds(float scale, float minimum) {
    std::uint16_t half;
    return to_half(scale, half) && to_half(minimum, half);
  }
  static void place_head(float scale, float minimum, int output, std::uint8_t* head) {
    std::uint16_t halves[2];
    to_half(scale, halves[0]);
    to_half(minimum, halves[1]);
    std::memcpy(head + 2 * output, halves, 2);
    std::memcpy(head + 2 * (kPanel + output), halves + 1, 2);
  }
  static Scales scales(const std::uint8_t* head, int, int, int half) {
    return {halves_at(head, 0, half), halves_at(head, 1, half)};
  }
};

// The scale is a float16 and the minimum a whole multiple of it, from -255 to 0.
struct Int4Zeros : Int4<Int4Zeros> {
  static constexpr std::int64_t kHead = 3 * kPanel;
  static float zero_of(float scale, float minimum) { return scale == 0.0f ? 0.0f : std::nearbyint(-minimum / scale); }
  static bool holds(float scale, float minimum) {
    std::uint16_t half;
    const float zero = zero_of(scale, minimum);
    return to_half(scale, half) && zero >= 0.0f && zero <= 255.0f && zero * -scale == minimum;
  }
  static void place_head(float scale, float minimum, int output, std::uint8_t* head) {
    std::uint16_t half;
    to_half(scale, half);
    std::memcpy(head + 2 * output, &half, 2);
    head[2 * kPanel + output] = static_cast<std::uint8_t>(zero_of(scale, minimum));
  }
  static Scales scales(const std::uint8_t* head, int, int, int half) {
    const vf scale = halves_at(head, 0, half);
    return {scale, scale * (bytes_to_float(head + 2 * kPanel + half * vf::W) * vf::set(-1.0f))};
  }
};

template <class Format>
bool holds_all(const float* scales, const float* minimums, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i)
    if (!Format::holds(scales[i], minimums[i])) return false;
  return true;
}

}  // namespace

std::unique_ptr<GroupedLinear> make_int4(const Int4Weight& weight, const float* bias, Options options, Pool& pool) {
  require(weight.group > 0 && weight.group % kGroup == 0 && weight.inputs % weight.group == 0, "groups of ",
          weight.group, " inputs do not fit ", weight.inputs, " inputs; they must be a multiple of ", kGroup,
          " that divides them");
  const std::int64_t supers = weight.inputs / weight.group, span = weight.group / kGroup;
  const auto make = [&](auto format) -> std::unique_ptr<GroupedLinear> {
    return std::make_unique<Layer<decltype(format)>>(
        weight.outputs, weight.inputs, span, bias, options, pool, [&](std::int64_t n) {
          return Int4Row{weight.values + n * (weight.inputs / 2), weight.scales + n * supers,
                         weight.minimums + n * supers, span};
        });
  };
  const std::int64_t count = weight.outputs * supers;
  if (holds_all<Int4Zeros>(weight.scales, weight.minimums, count)) return make(Int4Zeros{});
  if (holds_all<Int4Halves>(weight.scales, weight.minimums, count)) return make(Int4Halves{});
  return make(Int4Floats{});
}

}  // namespace hp::grouped

HP_EXPORT int hp_linear_int4(hp::Runtime* runtime, const std::uint8_t* values, const float* scales,
                             const float* minimums, std::int64_t outputs, std::int64_t inputs, std::int64_t group,
                             const float* bias, int quantizes, int invariant, hp::Linear** made) {
  return hp::guarded(runtime, [&] {
    const hp::grouped::Int4Weight weight{values, scales, minimums, outputs, inputs, group};
    *made = hp::grouped::make_int4(weight, bias, {quantizes != 0, invariant != 0}, runtime->pool).release();
  });
}
