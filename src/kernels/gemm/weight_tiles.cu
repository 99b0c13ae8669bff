// One thread moves one 16-byte chunk of a tile (FP4: of the codes; the scales are separate chunks).
#include <cuda_runtime.h>

#include <algorithm>

#include "base/check.h"
#include "kernels/gemm/weight_tiles.h"

namespace fathom::kernels {
namespace {

struct Source {
  const uint8_t* data;
  const uint8_t* scales;
  int64_t rows, cols;
};

// Row r of the tile, columns of a 16-byte chunk of a swizzled tile.
__device__ uint4 SwizzledChunk(const Source& w, int64_t row0, int64_t block, int index,
                               int bytes_per_value) {
  const int row = index / 8, chunk = (index % 8) ^ (row % 8);
  if (row0 + row >= w.rows) return {};
  const int64_t row_bytes = w.cols * bytes_per_value;
  return *reinterpret_cast<const uint4*>(w.data + (row0 + row) * row_bytes + block * 128 +
                                         chunk * 16);
}

// Codes in bytes 0 and 2 and in bytes 1 and 3 as WidenFp8 takes them.
__device__ uint32_t PackForWidening(uint32_t word) {
  const uint32_t first = word & 0x00ff00ffu, second = word >> 8 & 0x00ff00ffu;
  return (first & 0x00800080u) << 8 | (first & 0x007f007fu) << 4 | (second & 0x00700070u) << 8 |
         (second & 0x00800080u) << 4 | (second & 0x000f000fu);
}

// Chunk c of thread t: two k16 steps, for each the codes of a[0..3], two of them in a word, with
// two columns each.
__device__ uint4 Bf16FragmentChunk(const Source& w, int64_t row0, int64_t block, int index) {
  const int c = index / 128, t = index % 128, g = t / 32 * 16 + t % 32 / 4;
  alignas(16) uint8_t bytes[16];
  for (int step = 0; step < 2; ++step) {
    for (int reg = 0; reg < 4; ++reg) {
      const int row = g + reg % 2 * 8;
      const int col = (c * 2 + step) * 16 + reg / 2 * 8 + t % 4 * 2;
      for (int i = 0; i < 2; ++i) {
        bytes[step * 8 + reg / 2 * 4 + reg % 2 + i * 2] =
            row0 + row < w.rows ? w.data[(row0 + row) * w.cols + block * 128 + col + i] : 0;
      }
    }
  }
  const auto* words = reinterpret_cast<const uint32_t*>(bytes);
  return {PackForWidening(words[0]), PackForWidening(words[1]), PackForWidening(words[2]),
          PackForWidening(words[3])};
}

__device__ uint32_t Fp4Code(const Source& w, int64_t row, int64_t col) {
  if (row >= w.rows) return 0;
  const uint8_t pair = w.data[row * (w.cols / 2) + col / 2];
  return col % 2 == 0 ? pair & 15 : pair >> 4;
}

// Chunk c of thread t: k32 steps 2c and 2c + 1; for each, one word of row g and one of row g + 8.
// A word holds 8 codes: the magnitudes of columns 4q..4q+3 in nibbles 0..3 and of 16 + 4q.. in
// nibbles 4..7; sign i of the first four in bit 8 i + 7, of the others in bit 8 i + 3, where the
// expanded bytes want them.
__device__ uint4 Fp4FragmentChunk(const Source& w, int64_t row0, int64_t block, int index) {
  const int c = index / 128, t = index % 128, g = t / 32 * 16 + t % 32 / 4;
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t row = row0 + g + i % 2 * 8;
    const int64_t col = block * 128 + (c * 2 + i / 2) * 32 + t % 4 * 4;
    uint32_t word = 0;
    for (int j = 0; j < 4; ++j) {
      const uint32_t a = Fp4Code(w, row, col + j), b = Fp4Code(w, row, col + 16 + j);
      word |= (a & 7) << (4 * j) | (b & 7) << (16 + 4 * j);
      word |= (a >> 3) << (8 * j + 7) | (b >> 3) << (8 * j + 3);
    }
    words[i] = word;
  }
  return {words[0], words[1], words[2], words[3]};
}

// 16 bytes of the scales of an FP4 tile: four rows.
__device__ uint4 Fp4Scales(const Source& w, int64_t row0, int64_t block, int index) {
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t row = row0 + index * 4 + i;
    words[i] = row < w.rows
                   ? *reinterpret_cast<const uint32_t*>(w.scales + row * (w.cols / 32) + block * 4)
                   : 0x7f7f7f7fu;
  }
  return {words[0], words[1], words[2], words[3]};
}

constexpr size_t kMaxMatrices = 64;  // what a launch's parameters hold

struct Matrix {
  Source source;
  uint4* tiles;
  int num_tiles;
  TileKind kind;
  int interleave;
};
struct Matrices {
  Matrix of[kMaxMatrices];
};

template <TileKind kKind>
__device__ void MakeTile(const Matrix& matrix, int64_t tile) {
  constexpr int kChunks = static_cast<int>(TileMatrixBytes(kKind)) / 16;
  const Source& w = matrix.source;
  const int64_t blocks = w.cols / TileMatrixCols(kKind);
  const int64_t row_tile = tile / blocks, block = tile % blocks;
  const int64_t row0 = row_tile * kTileMatrixRows;
  const int64_t place = row_tile / 2 * 2 * matrix.interleave + row_tile % 2;
  uint4* const out = matrix.tiles + (place * blocks + block) * kChunks;
  for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += static_cast<int>(blockDim.x)) {
    uint4 chunk;
    if constexpr (kKind == TileKind::kFp8) {
      chunk = SwizzledChunk(w, row0, block, i, 1);
    } else if constexpr (kKind == TileKind::kBf16) {
      chunk = SwizzledChunk(w, row0, block, i, 2);
    } else if constexpr (kKind == TileKind::kFp8AsBf16) {
      chunk = Bf16FragmentChunk(w, row0, block, i);
    } else {
      chunk = i < 256 ? Fp4FragmentChunk(w, row0, block, i) : Fp4Scales(w, row0, block, i - 256);
    }
    out[i] = chunk;
  }
}

// A block makes one tile of matrix blockIdx.y.
__global__ void TileKernel(const __grid_constant__ Matrices matrices) {
  const Matrix& matrix = matrices.of[blockIdx.y];
  const auto tile = static_cast<int>(blockIdx.x);
  if (tile >= matrix.num_tiles) return;
  switch (matrix.kind) {
    case TileKind::kFp8:
      return MakeTile<TileKind::kFp8>(matrix, tile);
    case TileKind::kBf16:
      return MakeTile<TileKind::kBf16>(matrix, tile);
    case TileKind::kFp8AsBf16:
      return MakeTile<TileKind::kFp8AsBf16>(matrix, tile);
    case TileKind::kFp4:
      return MakeTile<TileKind::kFp4>(matrix, tile);
  }
}

WeightDType DTypeOf(TileKind kind) {
  if (kind == TileKind::kBf16) return WeightDType::kBF16;
  return kind == TileKind::kFp4 ? WeightDType::kFp4 : WeightDType::kFp8;
}

Matrix ToMatrix(const MatrixToTile& m) {
  const WeightMatrix& w = m.matrix;
  CHECK(w.dtype == DTypeOf(m.kind));
  CHECK_EQ(w.cols % TileMatrixCols(m.kind), 0);
  const int64_t num_tiles =
      (w.rows + kTileMatrixRows - 1) / kTileMatrixRows * (w.cols / TileMatrixCols(m.kind));
  return {{reinterpret_cast<const uint8_t*>(w.data), w.scales, w.rows, w.cols},
          reinterpret_cast<uint4*>(m.tiles),
          static_cast<int>(num_tiles),
          m.kind,
          m.interleave};
}

}  // namespace

void LaunchTileWeights(std::span<const MatrixToTile> matrices, device::Stream& stream) {
  while (!matrices.empty()) {
    const auto now = matrices.first(std::min(matrices.size(), kMaxMatrices));
    matrices = matrices.subspan(now.size());
    Matrices launch;
    std::transform(now.begin(), now.end(), launch.of, ToMatrix);
    int most_tiles = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      most_tiles = std::max(most_tiles, launch.of[i].num_tiles);
    }
    const dim3 grid(static_cast<unsigned>(most_tiles), static_cast<unsigned>(now.size()));
    TileKernel<<<grid, 256, 0, static_cast<cudaStream_t>(stream.native_handle())>>>(launch);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
  }
}

TiledMatrix LaunchTileWeights(const WeightMatrix& w, TileKind kind, std::byte* tiles,
                              device::Stream& stream, int interleave) {
  const MatrixToTile matrix{w, kind, tiles, interleave};
  LaunchTileWeights(std::span(&matrix, 1), stream);
  return {kind, w.rows, w.cols, tiles, w.scales};
}

}  // namespace fathom::kernels
