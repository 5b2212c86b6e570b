// How weights in groups lie in memory once they are packed for multiplying: panels of 16 outputs. A panel has the heads
// of its super-blocks (scales, for 16 outputs each) and after them the numbers of its groups of 32 inputs.
//
// Within a group, step s = 0..7 is four inputs of 16 outputs, 64 bytes when unpacked: the order of instructions for dot
// products, and of tiles. Packed, a byte holds the nibbles of two steps; further bits lie in planes of their own.
#pragma once

#include "common.h"
#include "gguf_blocks.h"

namespace hp::grouped {

inline constexpr std::int64_t kPanel = 16;                       // outputs
inline constexpr std::int64_t kGroup = 32;                       // inputs
inline constexpr std::int64_t kHalves = kPanel / vf::W;          // vectors side by side in a panel
inline constexpr std::int64_t kHalfBytes = std::int64_t{sizeof(float)} * vf::W;
inline constexpr std::int64_t kStepBytes = 4 * kPanel;

// What a group's numbers mean: weight = scale * q + minimum, for one vector of outputs.
struct Scales {
  vf scale, minimum;
};

template <int Bits>
struct Planes;

template <>
struct Planes<4> {
  static constexpr std::int64_t kBytes = 4 * kStepBytes;
  template <int Step>
  static vi step(const std::uint8_t* group, int half) {
    const vi both = vi::load(group + Step / 2 * kStepBytes + half * kHalfBytes);
    return (Step % 2 ? down<4>(both) : both) & vi::set(0x0f0f0f0f);
  }
  static void place(const std::uint8_t* q, int output, std::uint8_t* group) {
    for (int i = 0; i < kGroup; ++i)
      group[i / 8 * kStepBytes + output * 4 + i % 4] |= static_cast<std::uint8_t>((q[i] & 15) << (i / 4 % 2 * 4));
  }
};

template <>
struct Planes<5> {
  static constexpr std::int64_t kBytes = Planes<4>::kBytes + kStepBytes;
  template <int Step>
  static vi step(const std::uint8_t* group, int half) {
    const vi bits = vi::load(group + Planes<4>::kBytes + half * kHalfBytes);
    vi moved = bits;
    if constexpr (Step < 4) moved = up<4 - Step>(bits);
    if constexpr (Step > 4) moved = down<Step - 4>(bits);
    return Planes<4>::step<Step>(group, half) | (moved & vi::set(0x10101010));
  }
  static void place(const std::uint8_t* q, int output, std::uint8_t* group) {
    Planes<4>::place(q, output, group);
    for (int i = 0; i < kGroup; ++i)
      group[Planes<4>::kBytes + output * 4 + i % 4] |= static_cast<std::uint8_t>((q[i] >> 4 & 1) << (i / 4));
  }
};

template <>
struct Planes<6> {
  static constexpr std::int64_t kBytes = Planes<4>::kBytes + 2 * kStepBytes;
  template <int Step>
  static vi step(const std::uint8_t* group, int half) {
    const vi high = vi::load(group + Planes<4>::kBytes + Step / 4 * kStepBytes + half * kHalfBytes);
    constexpr int kField = Step % 4;
    vi moved = high;
    if constexpr (kField == 0) moved = up<4>(high);
    if constexpr (kField == 1) moved = up<2>(high);
    if constexpr (kField == 3) moved = down<2>(high);
    return Planes<4>::step<Step>(group, half) | (moved & vi::set(0x30303030));
  }
  static void place(const std::uint8_t* q, int output, std::uint8_t* group) {
    Planes<4>::place(q, output, group);
    for (int i = 0; i < kGroup; ++i)
      group[Planes<4>::kBytes + i / 16 * kStepBytes + output * 4 + i % 4] |=
          static_cast<std::uint8_t>((q[i] >> 4 & 3) << (i / 4 % 4 * 2));
  }
};

template <>
struct Planes<8> {
  static constexpr std::int64_t kBytes = 8 * kStepBytes;
  template <int Step>
  static vi step(const std::uint8_t* group, int half) {
    return vi::load(group + Step * kStepBytes + half * kHalfBytes);
  }
  static void place(const std::uint8_t* q, int output, std::uint8_t* group) {
    for (int i = 0; i < kGroup; ++i)
      group[i / 4 * kStepBytes + output * 4 + i % 4] = kSignedBytes ? q[i] ^ 0x80 : q[i];
  }
};

// Formats. kSubs: scales in a group of 32 inputs; kHead: bytes of a super-block's head; kHasMinimum: whether minimums
// are other than zero. pack_row() adds one output's row to a panel that is all zeros; scales() is for group `group` of
// the super-block and part `sub` of it.
//
// Those of files: super-blocks are the blocks of the file, a row is its bytes.
template <class Block, class Format>
struct FromFile {
  static constexpr int kBits = Block::kBits;
  static constexpr int kGroups = Block::kElements / kGroup;  // of a block
  static constexpr int kSubs = kGroup / Block::kGroup;
  static constexpr bool kHasMinimum = !(kBits == 8 && kSignedBytes);
  using Numbers = Planes<kBits>;
  using Row = const std::uint8_t*;

  static void pack_row(Row row, std::int64_t supers, int output, std::uint8_t* heads, std::uint8_t* numbers) {
    std::uint8_t q[Block::kElements];
    for (std::int64_t super = 0; super < supers; ++super) {
      const std::uint8_t* block = row + super * Block::kBytes;
      Format::place_head(block, output, heads + super * Format::kHead);
      Block::values(block, q);
      for (int group = 0; group < kGroups; ++group)
        Numbers::place(q + group * kGroup, output, numbers + (super * kGroups + group) * Numbers::kBytes);
    }
  }
};

// Line `line` of sixteen float16.
inline vf halves_at(const std::uint8_t* head, int line, int half) {
  return halves_to_float(head + 2 * (line * kPanel + half * vf::W));
}

// One scale for each group, as a float16; the zero of q is fixed.
template <class Block>
struct Scaled : FromFile<Block, Scaled<Block>> {
  static constexpr std::int64_t kHead = 2 * kPanel;
  static void place_head(const std::uint8_t* block, int output, std::uint8_t* head) {
    std::memcpy(head + 2 * output, block, 2);
  }
  static Scales scales(const std::uint8_t* head, int, int, int half) {
    const vf scale = halves_at(head, 0, half);
    return {scale, scale * vf::set(-static_cast<float>(Block::kZero))};
  }
};

// Scale and minimum, both float16, in this order in the file as well.
template <class Block>
struct ScaledAbove : FromFile<Block, ScaledAbove<Block>> {
  static constexpr std::int64_t kHead = 4 * kPanel;
  static void place_head(const std::uint8_t* block, int output, std::uint8_t* head) {
    std::memcpy(head + 2 * output, block, 2);
    std::memcpy(head + 2 * (kPanel + output), block + 2, 2);
  }
  static Scales scales(const std::uint8_t* head, int, int, int half) {
    return {halves_at(head, 0, half), halves_at(head, 1, half)};
  }
};

// Two float16 for the super-block, then for each group 16 scales and 16 minimums of 6 bits, in bytes.
template <class Block>
struct Nested : FromFile<Block, Nested<Block>> {
  static constexpr int kGroups = Nested::FromFile::kGroups;
  static constexpr std::int64_t kSixes = 4 * kPanel;
  static constexpr std::int64_t kHead = kSixes + 2 * kPanel * kGroups;
  static void place_head(const std::uint8_t* block, int output, std::uint8_t* head) {
    std::memcpy(head + 2 * output, block, 2);
    std::memcpy(head + 2 * (kPanel + output), block + 2, 2);
    for (int group = 0; group < kGroups; ++group) {
      const auto six = Block::sixes(block, group);
      head[kSixes + 2 * kPanel * group + output] = six.scale;
      head[kSixes + 2 * kPanel * group + kPanel + output] = six.minimum;
    }
  }
  static Scales scales(const std::uint8_t* head, int group, int, int half) {
    const std::uint8_t* sixes = head + kSixes + 2 * kPanel * group + half * vf::W;
    const vf above = halves_at(head, 1, half) * bytes_to_float(sixes + kPanel);
    return {halves_at(head, 0, half) * bytes_to_float(sixes), above * vf::set(-1.0f)};
  }
};

// One float16 for the super-block, then for each sixteen inputs 16 signed bytes.
template <class Block>
struct NestedSigned : FromFile<Block, NestedSigned<Block>> {
  static constexpr int kGroups = NestedSigned::FromFile::kGroups, kSubs = NestedSigned::FromFile::kSubs;
  static constexpr std::int64_t kHead = 2 * kPanel + kPanel * kGroups * kSubs;
  static void place_head(const std::uint8_t* block, int output, std::uint8_t* head) {
    std::memcpy(head + 2 * output, block + Block::kWhole, 2);
    for (int part = 0; part < kGroups * kSubs; ++part) {
      const std::int8_t scale = Block::signed_scale(block, part);
      std::memcpy(head + 2 * kPanel + kPanel * part + output, &scale, 1);
    }
  }
  static Scales scales(const std::uint8_t* head, int group, int sub, int half) {
    const std::uint8_t* bytes = head + 2 * kPanel + kPanel * (group * kSubs + sub) + half * vf::W;
    const vf scale = halves_at(head, 0, half) * bytes_to_float(reinterpret_cast<const std::int8_t*>(bytes));
    return {scale, scale * vf::set(-static_cast<float>(Block::kZero))};
  }
};

}  // namespace hp::grouped
