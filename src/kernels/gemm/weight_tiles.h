// Weights as the tensor cores read them: tiles of 64 rows by one block of columns, in an order that
// one bulk copy fetches and that needs no shuffling on the way to wgmma. Made once, at load, on the
// device. Rows are padded with zeros to a multiple of 64.
//   kFp8        64 x 128 codes, 128-byte rows, swizzled (chunk ^ row % 8): 8 KB.
//   kBf16       64 x 64 values, likewise: 8 KB.
//   kFp8AsBf16  64 x 128 codes in the order of bf16 A fragments (thread by thread): 8 KB. For
//               BF16 activations: the codes are widened in registers (their bits: WidenFp8).
//   kFp4        64 x 128 codes in the order of e4m3 A fragments, then 64 x 4 scales: 4,352 bytes.
// A matrix is [row tiles][column blocks] tiles. FP8 scales stay apart, as the checkpoint has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/device.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

enum class TileKind : int32_t { kFp8, kBf16, kFp8AsBf16, kFp4 };

inline constexpr int kTileMatrixRows = 64;
constexpr int64_t TileMatrixBytes(TileKind kind) { return kind == TileKind::kFp4 ? 4352 : 8192; }
constexpr int TileMatrixCols(TileKind kind) { return kind == TileKind::kBf16 ? 64 : 128; }

struct TiledMatrix {
  TileKind kind = TileKind::kFp8;
  int64_t rows = 0;  // without padding
  int64_t cols = 0;
  const std::byte* tiles = nullptr;
  const uint8_t* scales = nullptr;  // FP8 kinds: ue8m0 [ceil(rows / 128), cols / 128]
  int64_t matrix_cols = 0;          // of the matrix that these are some columns of; 0: all
  constexpr int64_t row_tiles() const { return (rows + kTileMatrixRows - 1) / kTileMatrixRows; }
  constexpr int64_t col_blocks() const { return cols / TileMatrixCols(kind); }
  constexpr bool is_whole() const { return matrix_cols == 0 || matrix_cols == cols; }
  // From a row tile to the next one.
  constexpr int64_t matrix_col_blocks() const {
    return (is_whole() ? cols : matrix_cols) / TileMatrixCols(kind);
  }
};

inline int64_t TiledBytes(TileKind kind, int64_t rows, int64_t cols) {
  return (rows + 63) / 64 * (cols / TileMatrixCols(kind)) * TileMatrixBytes(kind);
}

// A matrix in device memory and where its tiles go. `interleave` matrices of the same shape can
// share one range, taking turns by two row tiles (128 rows); `tiles` is then the place of this
// one's first tile.
struct MatrixToTile {
  WeightMatrix matrix;
  TileKind kind = TileKind::kFp8;
  std::byte* tiles = nullptr;
  int interleave = 1;
};

// Makes the tiles (TiledBytes) of all, in stream order; up to 64 matrices are one launch. The
// columns are a multiple of TileMatrixCols. The matrix's type: FP8 for the FP8 kinds, BF16, FP4.
void LaunchTileWeights(std::span<const MatrixToTile> matrices, device::Stream& stream);

// Of one matrix.
TiledMatrix LaunchTileWeights(const WeightMatrix& w, TileKind kind, std::byte* tiles,
                              device::Stream& stream, int interleave = 1);

}  // namespace fathom::kernels
