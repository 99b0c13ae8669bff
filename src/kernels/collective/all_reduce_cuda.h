// Sums and gathers over the ranks of a group (peer_view.h), enqueued by each rank with the same
// sizes and indices. A sum is comm::Group's: BF16 values added in FP32 in the order of the ranks,
// rounded once, so all ranks have the same bits. No host takes part: they can be captured.
// hyper_connection_cuda.h does the same exchange itself for few tokens.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "kernels/collective/peer_view.h"
#include "kernels/hyper_connection/hyper_connection_cuda.h"

namespace fathom::kernels {

// y = a sub-layer's output as one row a token: experts' pairs are added in FP32 and rounded once.
struct CudaCombineParams {
  SublayerOutput output;
  int64_t num_tokens = 0;
  int64_t hidden = 0;  // a multiple of 128
  __nv_bfloat16* y = nullptr;
};
void Launch(const CudaCombineParams& params, device::Stream& stream);

// The sum over all ranks of what CudaCombineParams makes, as packets to y. num_tokens * hidden <=
// 4 num_packets of the layout. y may be the output's y when that has no pairs.
struct CudaPacketSumParams {
  PeerExchange exchange;
  CudaCombineParams combine;
};
void Launch(const CudaPacketSumParams& params, device::Stream& stream);

// The same in two phases, for many tokens: up to the layout's max_values. combine.y is ignored: the
// sums are where TwoPhaseSums says, until the rank's next such exchange.
struct CudaTwoPhaseSumParams {
  PeerExchange exchange;
  CudaCombineParams combine;
};
void Launch(const CudaTwoPhaseSumParams& params, device::Stream& stream);

inline __nv_bfloat16* TwoPhaseSums(const PeerView& peers) {
  return reinterpret_cast<__nv_bfloat16*>(peers.memory[peers.rank] + peers.layout.sums_offset);
}

// Columns [begin[r], begin[r + 1]) of `values` become rank r's; its own are there.
struct GatheredColumns {
  int64_t begin[kMaxPeers + 1] = {};  // even, ascending

  int64_t count(int rank) const { return begin[rank + 1] - begin[rank]; }
  int64_t most(int size) const {
    int64_t most = 0;
    for (int r = 0; r < size; ++r) most = count(r) > most ? count(r) : most;
    return most;
  }
};
struct CudaGatherColumnsParams {
  PeerExchange exchange;    // the first of NumGatherExchanges
  float* values = nullptr;  // [num_rows, begin[size]]
  int64_t num_rows = 0;
  GatheredColumns columns;
};
void Launch(const CudaGatherColumnsParams& params, device::Stream& stream);

// Rows of one exchange, as many as packets have room for.
inline int64_t RowsOfGather(const PeerView& peers, const GatheredColumns& columns) {
  return peers.layout.num_packets / (columns.most(peers.size) / 2);
}
inline int64_t NumGatherExchanges(const CudaGatherColumnsParams& p) {
  const int64_t rows = RowsOfGather(p.exchange.peers, p.columns);
  return (p.num_rows + rows - 1) / rows;
}

// Ends a step of so many exchanges.
struct CudaEndExchangesParams {
  PeerView peers;
  uint32_t num_exchanges = 0;
};
void Launch(const CudaEndExchangesParams& params, device::Stream& stream);

}  // namespace fathom::kernels
