// Panels of weights in groups times rows. Every output is one chain of additions in the order of the groups (inputs,
// where activations are floats), whatever the number of rows and however they are cut into blocks.
#pragma once

#include "linear_grouped_format.h"
#include "linear_grouped_rows.h"

namespace hp::grouped {

// Of a block: what fits the registers.
inline constexpr int kMostRows = kRowTile;
inline constexpr int kFloatRows = vf::W == 16 ? 12 : vf::W == 8 ? 6 : 2;
inline constexpr int kWide = vf::W == 16 ? 2 : 1;  // panels side by side, for floats

inline std::int32_t four_bytes(const std::int8_t* p) {
  std::int32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// One panel as it lies in memory; `span` groups share a head.
struct Panel {
  const std::uint8_t* heads;
  const std::uint8_t* numbers;
  std::int64_t span;
};

// One group of it: its numbers, its head, and which of those that share the head it is.
struct GroupPlace {
  const std::uint8_t* numbers;
  const std::uint8_t* head;
  int inner;
};

// body(group, place) for all groups in order.
template <class F, class Body>
[[gnu::always_inline]] inline void over_groups(const Panel& panel, std::int64_t groups, Body&& body) {
  GroupPlace place{panel.numbers, panel.heads, 0};
  for (std::int64_t group = 0; group < groups; ++group) {
    // Past the last weight nothing happens.
    for (std::int64_t line = 0; line < F::Numbers::kBytes; line += kAlignment) fetch(place.numbers + kFetchAhead + line);
    body(group, place);
    place.numbers += F::Numbers::kBytes;
    if (++place.inner == panel.span) {
      place.inner = 0;
      place.head += F::kHead;
    }
  }
}

// Rows `row`.. of quantized activations times one vector of outputs, added to sums.
template <class F, int R>
void multiply_quantized(const Panel& panel, const QuantizedRows& x, std::int64_t row, int half, vf (&sums)[R]) {
  constexpr int kSteps = 8 / F::kSubs;
  const std::int64_t first = x.line(row, 0), inner = row % x.tile;
  over_groups<F>(panel, x.groups, [&](std::int64_t group, const GroupPlace& place) __attribute__((always_inline)) {
    const std::int64_t line = first + group * x.tile;
    const std::int8_t* values = x.values + line * kGroup;
    const float* scales = x.scales + line;
    unrolled<F::kSubs>([&](auto sub) __attribute__((always_inline)) {
      Dots<F::kBits> dots[R];
      unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
        constexpr int kStep = sub * kSteps + step;
        const vi w = F::Numbers::template step<kStep>(place.numbers, half);
        for (int r = 0; r < R; ++r) dots[r].add(w, vi::set(four_bytes(values + r * kGroup + kStep * 4)));
      });
      const Scales of = F::scales(place.head, place.inner, sub, half);
      const float* above = F::kSubs == 1 ? x.sums + line : x.half_sums + 2 * line - inner + sub * x.tile;
      for (int r = 0; r < R; ++r) {
        sums[r] = fma(to_float(dots[r].whole()), of.scale * vf::set(scales[r]), sums[r]);
        if constexpr (F::kHasMinimum) sums[r] = fma(of.minimum, vf::set(above[r]), sums[r]);
      }
    });
  });
}

// Byte `B` of each lane.
template <int B, bool Signed>
vf byte_to_float(vi lanes) {
  if constexpr (Signed) return to_float(down_signed<24>(up<24 - 8 * B>(lanes)));
  if constexpr (B == 3) return to_float(down<24>(lanes));
  return to_float(down<8 * B>(lanes) & vi::set(255));
}

// The weights of step `Step` as floats: each(byte, weights of input 4 * Step + byte).
template <class F, int Step, class Each>
[[gnu::always_inline]] inline void decode_step(const GroupPlace& place, int half, const Scales& of, Each&& each) {
  const vi w = F::Numbers::template step<Step>(place.numbers, half);
  unrolled<4>([&](auto byte) __attribute__((always_inline)) {
    const vf number = byte_to_float<byte, !F::kHasMinimum>(w);
    each(byte, F::kHasMinimum ? fma(number, of.scale, of.minimum) : number * of.scale);
  });
}

// each(step, scales of the vector of outputs) for the eight steps of a group.
template <class F, class Each>
[[gnu::always_inline]] inline void over_steps(const GroupPlace& place, int half, Each&& each) {
  constexpr int kSteps = 8 / F::kSubs;
  unrolled<F::kSubs>([&](auto sub) __attribute__((always_inline)) {
    const Scales of = F::scales(place.head, place.inner, sub, half);
    unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
      each(std::integral_constant<int, sub * kSteps + step>{}, of);
    });
  });
}

// One group as 32 lines of kPanel floats, `stride` apart.
template <class F>
void decode_group(const GroupPlace& place, float* target, std::int64_t stride) {
  for (int half = 0; half < kHalves; ++half)
    over_steps<F>(place, half, [&](auto step, const Scales& of) __attribute__((always_inline)) {
      decode_step<F, step>(place, half, of, [&](auto byte, vf weights) __attribute__((always_inline)) {
        weights.store(target + (step * 4 + byte) * stride + half * vf::W);
      });
    });
}

// Rows of floats times `inputs` lines of `Vectors` vectors of decoded weights, added to sums.
template <int R, int Vectors>
void multiply_floats(const float* weights, std::int64_t inputs, const float* x, std::int64_t x_stride,
                     vf (&sums)[R][Vectors]) {
  for (std::int64_t k = 0; k < inputs; ++k) {
    vf w[Vectors];
    for (int j = 0; j < Vectors; ++j) w[j] = vf::load(weights + (k * Vectors + j) * vf::W);
    for (int r = 0; r < R; ++r) {
      const vf a = vf::set(x[r * x_stride + k]);
      for (int j = 0; j < Vectors; ++j) sums[r][j] = fma(a, w[j], sums[r][j]);
    }
  }
}

// Calls block(row, integral_constant R) so that all rows are covered by blocks of at most `Most` rows.
template <int Most, class Block>
void in_row_blocks(std::int64_t rows, Block&& block) {
  std::int64_t row = 0;
  for (; row + Most <= rows; row += Most) block(row, std::integral_constant<int, Most>{});
  if constexpr (Most > 8)
    for (; row + 8 <= rows; row += 8) block(row, std::integral_constant<int, 8>{});
  if constexpr (Most > 4)
    for (; row + 4 <= rows; row += 4) block(row, std::integral_constant<int, 4>{});
  for (; row + 2 <= rows; row += 2) block(row, std::integral_constant<int, 2>{});
  for (; row < rows; ++row) block(row, std::integral_constant<int, 1>{});
}

}  // namespace hp::grouped
