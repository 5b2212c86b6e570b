// Blocks of GGUF files, as they lie there: how many weights in how many bytes, and what each means. A weight is
// scale * q + minimum with q an unsigned number of few bits; types without a minimum have a fixed zero of q instead.
//
// Scales multiply exactly in float32, so a decoded weight has the same bits however the product is taken apart.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "common.h"
#include "linear_grouped_simd.h"

namespace hp::gguf {

inline std::uint16_t half_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}
inline float float_at(const std::uint8_t* p) { return half_to_float(half_at(p)); }

struct Affine {
  float scale, minimum;
};

// 32 nibbles in 16 bytes: the first half in the low ones, the second half in the high ones.
inline void nibble_halves(const std::uint8_t* bytes, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = bytes[i] & 15;
    q[i + 16] = bytes[i] >> 4;
  }
}

// Every type: kElements weights in kBytes, groups of kGroup weights with one scale; values() writes kElements numbers
// q, affine() gives what group `index` of the block makes of them.
struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18, kGroup = 32, kBits = 4, kZero = 8;
  static void values(const std::uint8_t* block, std::uint8_t* q) { nibble_halves(block + 2, q); }
  static Affine affine(const std::uint8_t* block, int) {
    const float scale = float_at(block);
    return {scale, -kZero * scale};
  }
};

struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20, kGroup = 32, kBits = 4, kZero = 0;
  static void values(const std::uint8_t* block, std::uint8_t* q) { nibble_halves(block + 4, q); }
  static Affine affine(const std::uint8_t* block, int) { return {float_at(block), float_at(block + 2)}; }
};

// The fifth bits of 32 weights lie together, before the nibbles.
inline void nibbles_and_bits(const std::uint8_t* bits, std::uint8_t* q) {
  nibble_halves(bits + 4, q);
  for (int i = 0; i < 32; ++i) q[i] |= static_cast<std::uint8_t>((bits[i / 8] >> (i % 8) & 1) << 4);
}

struct Q5_0 {
  static constexpr int kElements = 32, kBytes = 22, kGroup = 32, kBits = 5, kZero = 16;
  static void values(const std::uint8_t* block, std::uint8_t* q) { nibbles_and_bits(block + 2, q); }
  static Affine affine(const std::uint8_t* block, int) {
    const float scale = float_at(block);
    return {scale, -kZero * scale};
  }
};

struct Q5_1 {
  static constexpr int kElements = 32, kBytes = 24, kGroup = 32, kBits = 5, kZero = 0;
  static void values(const std::uint8_t* block, std::uint8_t* q) { nibbles_and_bits(block + 4, q); }
  static Affine affine(const std::uint8_t* block, int) { return {float_at(block), float_at(block + 2)}; }
};

struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34, kGroup = 32, kBits = 8, kZero = 128;
  static void values(const std::uint8_t* block, std::uint8_t* q) {
    for (int i = 0; i < 32; ++i) q[i] = block[2 + i] ^ 0x80;
  }
  static Affine affine(const std::uint8_t* block, int) {
    const float scale = float_at(block);
    return {scale, -kZero * scale};
  }
};

// Super-blocks of eight groups: scale and minimum of each in 6 bits, times two halves of the whole.
struct Q4_K {
  static constexpr int kElements = 256, kBytes = 144, kGroup = 32, kBits = 4, kZero = 0;
  struct Sixes {
    std::uint8_t scale, minimum;
  };
  // Twelve bytes: the first four groups' scales, then minimums, in the low 6 bits; the other four's low 4 bits last,
  // with their upper 2 bits above the first eight.
  static Sixes sixes(const std::uint8_t* block, int index) {
    const std::uint8_t* packed = block + 4;
    if (index < 4)
      return {static_cast<std::uint8_t>(packed[index] & 63), static_cast<std::uint8_t>(packed[index + 4] & 63)};
    const std::uint8_t low = packed[index + 4];
    return {static_cast<std::uint8_t>((low & 15) | (packed[index - 4] >> 6) << 4),
            static_cast<std::uint8_t>((low >> 4) | (packed[index] >> 6) << 4)};
  }
  static void values(const std::uint8_t* block, std::uint8_t* q) {
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; ++i) {
        const std::uint8_t both = block[16 + pair * 32 + i];
        q[pair * 64 + i] = both & 15;
        q[pair * 64 + 32 + i] = both >> 4;
      }
  }
  static Affine affine(const std::uint8_t* block, int index) {
    const Sixes six = sixes(block, index);
    return {float_at(block) * six.scale, -(float_at(block + 2) * six.minimum)};
  }
};

// The same with a fifth bit: bit `index` of 32 bytes for group `index`.
struct Q5_K : Q4_K {
  static constexpr int kBytes = 176, kBits = 5;
  static void values(const std::uint8_t* block, std::uint8_t* q) {
    Q4_K::values(block + 32, q);
    for (int i = 0; i < kElements; ++i) q[i] |= static_cast<std::uint8_t>((block[16 + i % 32] >> (i / 32) & 1) << 4);
  }
};

// Super-blocks of sixteen groups with a signed byte each, times one half; the lower 4 and upper 2 bits lie apart.
struct Q6_K {
  static constexpr int kElements = 256, kBytes = 210, kGroup = 16, kBits = 6, kZero = 32;
  static constexpr int kScales = 192, kWhole = 208;
  static void values(const std::uint8_t* block, std::uint8_t* q) {
    for (int half = 0; half < 2; ++half) {
      const std::uint8_t* low = block + 64 * half;
      const std::uint8_t* high = block + 128 + 32 * half;
      for (int i = 0; i < 128; ++i) {
        const int nibble = i < 64 ? low[i] & 15 : low[i - 64] >> 4;
        q[128 * half + i] = static_cast<std::uint8_t>(nibble | (high[i % 32] >> (i / 32 * 2) & 3) << 4);
      }
    }
  }
  static std::int8_t signed_scale(const std::uint8_t* block, int index) {
    return static_cast<std::int8_t>(block[kScales + index]);
  }
  static Affine affine(const std::uint8_t* block, int index) {
    const float scale = float_at(block + kWhole) * signed_scale(block, index);
    return {scale, -kZero * scale};
  }
};

// visit(block type) for the type of that name. Throws for one that is not known.
template <class Visit>
auto with_type(const std::string& name, Visit&& visit) {
  if (name == "Q4_0") return visit(Q4_0{});
  if (name == "Q4_1") return visit(Q4_1{});
  if (name == "Q5_0") return visit(Q5_0{});
  if (name == "Q5_1") return visit(Q5_1{});
  if (name == "Q8_0") return visit(Q8_0{});
  if (name == "Q4_K") return visit(Q4_K{});
  if (name == "Q5_K") return visit(Q5_K{});
  if (name == "Q6_K") return visit(Q6_K{});
  fail("weights of the GGUF type ", name, " have no kernel; allowed: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K");
}

}  // namespace hp::gguf
