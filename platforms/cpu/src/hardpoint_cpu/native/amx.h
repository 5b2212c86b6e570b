// The matrix unit of some x86 processors: eight tiles of 16 rows of 64 bytes.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace hp::amx {

inline constexpr std::int64_t kTileRows = 16, kTileBytes = 64;

// Whether the operating system lets this process use tiles, whose registers it must save. It is asked once; all threads
// share its answer.
inline bool is_allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

struct TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);
inline constexpr TileShapes kFullTiles;

// Tiles of full size for the calling thread, as long as this lives. Outside they are free, which keeps the thread's
// state small.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kFullTiles); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace hp::amx

#endif
