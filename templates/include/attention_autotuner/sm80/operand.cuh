// Where a lane of family sm80 reads an operand of its MMAs.
#pragma once

#include <cstdint>
namespace attention_autotuner {

// Where a lane reads a tile, from a start on by whole matrices: steps within a run of `Width` columns that starts at a
// multiple of that width, plus the 8 columns that lanes may point beyond.
template <typename Tile, int Width>
class Operand {
 public:
  __device__ __forceinline__ Operand(uint32_t tile, int row, int column)
      : tile_(tile), row_(row), column_(column), address_(tile + Tile::offset(row, column)) {}
  __device__ __forceinline__ uint32_t at(int rows, int columns) const {
    if constexpr (Tile::template advances<Width>()) {
      return Tile::advance(address_, rows, columns);
    } else {
      return tile_ + Tile::offset(row_ + rows, column_ + columns);
    }
  }

 private:
  uint32_t tile_;
  int row_, column_;
  uint32_t address_;
};

}  // namespace attention_autotuner
