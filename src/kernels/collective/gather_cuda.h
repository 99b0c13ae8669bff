// Gathers over the ranks of a group (peer_view.h), enqueued by each rank with the same sizes and
// indices: every rank has a part of something, and all get the whole of it. Nothing is added up, so
// a value has the same bits on every rank, and as many ranks as there are. No host takes part: they
// can be captured. hyper_connection_cuda.h does the same exchange itself for few tokens.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/tiles.cuh"

namespace fathom::kernels {

// A matrix in memory that every rank has alike. Of rank r come `height` rows of `width` bytes, from
// `offset` on.
struct GatheredMatrix {
  struct Part {
    int64_t offset = 0;
    int64_t width = 0;
    int64_t height = 0;
    constexpr int64_t bytes() const { return width * height; }
  };
  std::byte* data = nullptr;
  int64_t pitch = 0;  // from row to row
  Part of[kMaxPeers] = {};
};
// Each rank has some columns of all rows, which follow each other.
GatheredMatrix GatheredColumns(void* data, int64_t num_rows, int64_t value_bytes,
                               const RankParts& columns, int size);
// Each rank has the first `width` bytes of some rows.
GatheredMatrix GatheredRows(void* data, int64_t pitch, int64_t width, const RankParts& rows,
                            int size);

// As plain values, for many: the matrices are in the group's shared memory; data, pitch, offset and
// width are multiples of 16 bytes.
inline constexpr int kMaxGatheredMatrices = 4;
struct CudaGatherParams {
  PeerExchange exchange;
  GatheredMatrix matrices[kMaxGatheredMatrices];
  int num_matrices = 0;
};
void Launch(const CudaGatherParams& params, device::Stream& stream);

// FP8 activations of which each rank has some blocks of 128 columns: rows [0, num_tokens), and with
// pair_of [num_tokens, num_chosen] the rows that it names, the same on all ranks. As packets, or as
// plain values: the tiles are in shared memory.
struct CudaGatherTilesParams {
  PeerExchange exchange;
  Fp8Tiles tiles;
  RankParts blocks;
  int64_t num_tokens = 0;
  const int32_t* pair_of = nullptr;
  int num_chosen = 0;
  int64_t num_rows = 0;  // that are in use, these among them
};
void Launch(const CudaGatherTilesParams& params, device::Stream& stream);
// Codes and scales of all rows in use.
void MatricesOf(const CudaGatherTilesParams& params, int size, GatheredMatrix (&matrices)[2]);

// y [num_tokens, hidden] = a sub-layer's output as one row a token: experts' pairs are added in
// FP32 and rounded once. Columns are multiples of 128.
struct CudaCombineParams {
  SublayerOutput output;
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;
  __nv_bfloat16* y = nullptr;
};
void Launch(const CudaCombineParams& params, device::Stream& stream);

// The same of all columns, of which each rank has some. As packets, or as plain values: y is in
// shared memory.
struct CudaGatherOutputParams {
  PeerExchange exchange;
  SublayerOutput output;
  RankParts columns;
  int64_t num_tokens = 0;
  __nv_bfloat16* y = nullptr;  // may be the output's when that has no pairs
  // Where tokens are shared out: rank r needs those of its range alone. Empty: all do.
  RankParts tokens = {};
};
void Launch(const CudaGatherOutputParams& params, device::Stream& stream);

// Columns of `values` [num_rows, begin[size]], even. As packets, to any memory, in as many
// exchanges as they need.
struct CudaGatherColumnsParams {
  PeerExchange exchange;  // the first of NumExchanges
  float* values = nullptr;
  int64_t num_rows = 0;
  RankParts columns;
};
int64_t NumExchanges(const CudaGatherColumnsParams& params);
void Launch(const CudaGatherColumnsParams& params, device::Stream& stream);

// Ends a step of so many exchanges.
struct CudaEndExchangesParams {
  PeerView peers;
  uint32_t num_exchanges = 0;
};
void Launch(const CudaEndExchangesParams& params, device::Stream& stream);

}  // namespace fathom::kernels
