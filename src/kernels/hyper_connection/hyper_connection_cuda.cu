#include <algorithm>

#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/gates.cuh"
#include "kernels/hyper_connection/hyper_connection_cuda.h"
#include "kernels/hyper_connection/milestone.cuh"
#include "kernels/hyper_connection/output_quads.cuh"
#include "kernels/launch.cuh"
#include "kernels/moe_route/moe_route_cuda.h"
#include "kernels/numbered_words.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {
namespace {

constexpr int kThreads = 384;
constexpr int kWarps = kThreads / 32;
constexpr int kS = kNumStreams;
constexpr int kMaxColumnBlocks = 64;
constexpr int kCombMade = 1, kStreamsMade = 2;  // named barriers

// Warps of a block. Column warps have 128 columns of a token each, which stay in registers from the
// streams' post to the norm: all that the sub-layer's input depends on is theirs, and pre's mixes
// alone. The other warps make the mixes that the next launch reads, beside that.
//
// kTokens: of a cluster; the last cluster may have one less, whose sums are nobody's.
template <bool kHead, Ranks kRanks, int kTokens>
class Boundary {
 public:
  static constexpr bool kIsSent = OutputQuads<kRanks>::kIsSent;
  static constexpr bool kTells = !kHead && kTokens == 1;
  static constexpr int kMixes = kHead ? kS : kNumMixes;
  static constexpr int kLate = kNumMixes - kS;  // mixes: post's and C's
  static constexpr int kGroups = kLate / kS;    // of late mixes
  static constexpr int kEarly = kS + 1;         // sums: pre's mixes, squares of the streams
  static constexpr int kEarlyRow = 8;
  // Some warps are left besides the column warps, however wide the model is.
  static_assert(kTokens * ((kMaxColumnBlocks + kMaxCluster - 1) / kMaxCluster) < kWarps);

  struct OfToken {
    alignas(16) float comb[kS * kS];
    alignas(16) float post[kS];
    float squares[kMaxColumnBlocks];  // of the input, before its norm; no columns: 0
  };
  struct alignas(128) Shared {  // so is what is copied behind it
    OfToken of[kTokens];
    int rows[kWarps][kMaxChosen];  // of the experts' outputs; or the packets where these begin
    uint64_t pre_full, mixers_full, early_full, late_full, squares_full;
  };

  // memory: DynamicBytes of the block's shared memory.
  __device__ Boundary(const CudaHyperConnectionParams& params, int cluster, int slice,
                      float inverse_hidden, float4* memory)
      : p_(params),
        cluster_(cluster),
        rank_(static_cast<int>(ClusterRank())),
        slice_(slice),
        hidden_(static_cast<int>(params.hidden)),
        inverse_hidden_(inverse_hidden),
        column0_(rank_ * slice),
        blocks_(min(slice, hidden_ - column0_) / 128),
        first_row_(int64_t{blockIdx.x / static_cast<unsigned>(cluster)} * kTokens),
        s_(*reinterpret_cast<Shared*>(memory)),
        x_(reinterpret_cast<__nv_bfloat16*>(reinterpret_cast<std::byte*>(memory) + sizeof(Shared))),
        kept_(Kept(slice)),
        mixers_(reinterpret_cast<float*>(x_ + kTokens * kS * slice)),
        sums_(mixers_ + SharedMixes(slice) * kS * slice),
        column_warps_(kTokens * blocks_),
        token_(kTokens > 1 && warp() >= blocks_ ? 1 : 0),
        block_(warp() - token_ * blocks_),
        column_(block_ * 128 + lane() * 4) {}

  // Mixes of a group whose mixers lie in shared memory. Of one token, where a warp makes no more
  // than one group, the last mix's are in its registers: that leaves room beside two blocks of a
  // rank's output product.
  __host__ __device__ static int Kept(int64_t slice) {
    const auto blocks = static_cast<int>(slice / 128);
    return kTokens == 1 && kGroups * blocks <= kWarps - blocks ? kS - 1 : kS;
  }
  __host__ __device__ static int SharedMixes(int64_t slice) {
    return kHead ? kS : kS + kGroups * Kept(slice);
  }
  static size_t DynamicBytes(int64_t hidden, int64_t slice) {
    const auto streams = static_cast<size_t>(kS * slice), parts = static_cast<size_t>(hidden / 128);
    return sizeof(Shared) +
           streams * (kTokens * sizeof(__nv_bfloat16) + SharedMixes(slice) * sizeof(float)) +
           parts * kTokens * (kEarlyRow + kLate) * sizeof(float);
  }

  __device__ void Run() {
    AllowSuccessor();
    if (thread() == 0) InitBarriers();
    if (thread() >= hidden_ / 128 && thread() < kMaxColumnBlocks) {
      for (OfToken& token : s_.of) token.squares[thread()] = 0;
    }
    __syncthreads();
    ClusterArrive();
    // A copy takes its warp up to 30 ns, which column warps do not have.
    if (warp() == column_warps_) FetchMixers();
    if (kTells && p_.told.words != nullptr) told_number_ = ValueOf(p_.told.number);
    if constexpr (kRanks != Ranks::kAll) number_ = ExchangeNumber(p_.gather.exchange);
    const bool has_columns = warp() < column_warps_;
    if (const int mix = has_columns ? lane() % kEarlyRow : kS + lane(); mix < kMixes) {
      scale_ = p_.scale[min(mix / kS, 2)];
      base_ = p_.base[mix];
    }
    if (has_columns) {
      LoadBefore();
      ClusterWait();  // the barriers of all blocks are ready
      if constexpr (!kIsSent) WaitForPredecessor();
      Post();
      SendEarly();
      Finish();
      // So that what comes behind this launch comes behind that one, too.
      if constexpr (kIsSent) WaitForPredecessor();
    } else {
      Mixers last{};
      if constexpr (!kHead && kTokens == 1) LoadLast(last);
      if (p_.output.y != nullptr && warp() == kWarps - 1) MakeComb();
      ClusterWait();
      if constexpr (!kHead) MakeLate(last);
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
  __device__ int64_t Row(int token) const { return first_row_ + token; }
  __device__ bool Exists(int token) const { return token == 0 || Row(token) < p_.num_tokens; }
  // Of the model; the last one's for what does not exist.
  __device__ int64_t Token(int token) const {
    const int64_t row = Row(Exists(token) ? token : 0);
    return kHead ? p_.rows[row] : row;
  }
  __device__ uint2& X(int token, int stream, int column) const {
    return *reinterpret_cast<uint2*>(x_ + (token * kS + stream) * slice_ + column);
  }
  __device__ __nv_bfloat16* Streams(int stream) const {
    return p_.streams + (Token(token_) * kS + stream) * hidden_ + column0_ + column_;
  }
  // Of 128 columns of the cluster's: early sums, and in the first block late ones.
  __device__ float& Early(int token, int part, int i) const {
    return sums_[(token * (hidden_ / 128) + part) * kEarlyRow + i];
  }
  __device__ float& Late(int token, int part, int i) const {
    return Early(kTokens, 0, (token * (hidden_ / 128) + part) * kLate + i);
  }
  __device__ int CombThreads() const { return (column_warps_ + 1) * 32; }

  __device__ void InitBarriers() {
    BarrierInit(&s_.pre_full, 1);
    BarrierInit(&s_.mixers_full, 1);
    BarrierInit(&s_.early_full, 1);
    BarrierInit(&s_.late_full, 1);
    BarrierInit(&s_.squares_full, 1);
    BarrierInitFence();
    const int parts = kTokens * (hidden_ / 128);
    BarrierExpectBytes(&s_.early_full, static_cast<uint32_t>(parts * kEarly * 4));
    BarrierExpectBytes(&s_.late_full, static_cast<uint32_t>(parts * kLate * 4));
    BarrierExpectBytes(&s_.squares_full, static_cast<uint32_t>(parts * 4));
  }

  // The mixers are weights: they are on their way before the predecessor has ended. Pre's come
  // first: a block that found room late has the others' when they are needed.
  __device__ void FetchMixers() {
    constexpr int kPreRows = kS * kS;
    FetchMixers(0, kPreRows, &s_.pre_full);
    if constexpr (!kHead) FetchMixers(kPreRows, SharedMixes(slice_) * kS, &s_.mixers_full);
  }
  __device__ void FetchMixers(int begin, int end, uint64_t* full) {
    const auto bytes = static_cast<uint32_t>(blocks_ * 128 * sizeof(float));
    if (lane() == 0) BarrierExpectBytes(full, static_cast<uint32_t>(end - begin) * bytes);
    __syncwarp();
    for (int i = begin + lane(); i < end; i += 32) {
      const int group = max(i / kS - kS, 0) / kept_, row = i + group * (kS - kept_) * kS;
      BulkCopyOnce(mixers_ + i * slice_, p_.fn + row * hidden_ + column0_, bytes, full);
    }
  }

  // Of a column warp, what is older than the predecessor.
  __device__ void LoadBefore() {
    norm_ = LoadBits(p_.norm_weight + column0_ + column_);
    if (p_.output.y == nullptr) return;
    LoadStreams();
    if (p_.output.pair_of == nullptr) return;
    if (lane() < p_.output.num_chosen) {
      const int row = p_.output.pair_of[Token(token_) * p_.output.num_chosen + lane()];
      const auto packet = static_cast<int>(RowPacket(row / 8, hidden_, 0));
      s_.rows[warp()][lane()] = kRanks == Ranks::kRows ? packet : row;
    }
    __syncwarp();
  }
  __device__ void LoadStreams() {
    for (int j = 0; j < kS; ++j) streams_[j] = LoadBits(Streams(j));
  }

  // One warp; of every four lanes, a token's, lane j has row j of C.
  __device__ void MakeComb() {
    const int j = lane() % kS, token = lane() / kS % kTokens;
    const int64_t at = Token(token) * kS + j;
    const float post = p_.before.post[at];
    const float4 row = *reinterpret_cast<const float4*>(p_.before.comb_logits + at * kS);
    *reinterpret_cast<float4*>(&s_.of[token].comb[j * kS]) = Sinkhorn(row, p_.constants);
    s_.of[token].post[j] = post;
    NamedBarrierArrive(kCombMade, CombThreads());
  }

  // x_k = b(post_k y + sum_j C[j][k] x_j), for this warp in registers, for others in shared memory.
  __device__ void Post() {
    if (p_.output.y == nullptr) {
      LoadStreams();
    } else {
      float4 y{};
      const int64_t column = column0_ + column_;
      if (Exists(token_)) {
        y = OutputQuads<kRanks>(p_, Row(token_), Token(token_), s_.rows[warp()], number_)(column);
      }
      NamedBarrier(kCombMade, CombThreads());
      Mix(y);
    }
    if constexpr (!kHead) {
      for (int k = 0; k < kS; ++k) X(token_, k, column_) = streams_[k];
    }
  }
  __device__ void Mix(float4 y) {
    const OfToken& own = s_.of[token_];
    float4 in[kS];
    for (int j = 0; j < kS; ++j) in[j] = WidenQuad(streams_[j]);
    for (int k = 0; k < kS; ++k) {
      float4 mixed = own.comb[k] * in[0];
      for (int j = 1; j < kS; ++j) mixed = mixed + own.comb[j * kS + k] * in[j];
      const float4 out = own.post[k] * y + mixed;
      streams_[k] = {PackBf16(out.x, out.y), PackBf16(out.z, out.w)};
    }
  }

  // This warp's part of pre's raw mixes and of the sum of squares, to all blocks of the cluster.
  __device__ void SendEarly() {
    float4 x[kS];
    float sums[kEarlyRow] = {};
    for (int k = 0; k < kS; ++k) {
      x[k] = WidenQuad(streams_[k]);
      sums[kS] += Dot(x[k], x[k]);
    }
    BarrierWait(&s_.pre_full, 0);
#pragma unroll
    for (int m = 0; m < kS; ++m) {
      for (int k = 0; k < kS; ++k) sums[m] += Dot(Mixer(m, k, column_), x[k]);
    }
    // The other warps' loads do not get between these.
    if constexpr (!kHead) NamedBarrierArrive(kStreamsMade, kThreads);
    const float sum = TransposedSum(sums);
    constexpr int kLanes = 32 / kEarlyRow;
    const int i = lane() / kLanes;
    if (i < kEarly) {
      for (int to = lane() % kLanes; to < cluster_; to += kLanes) {
        SendToBlock(&Early(token_, column0_ / 128 + block_, i), sum, &s_.early_full,
                    static_cast<uint32_t>(to));
      }
    }
    __syncwarp();
    if (p_.output.y == nullptr || !Exists(token_)) return;
    for (int k = 0; k < kS; ++k) *reinterpret_cast<uint2*>(Streams(k)) = streams_[k];
  }
  __device__ float4 Mixer(int mix, int stream, int column) const {
    return *reinterpret_cast<const float4*>(mixers_ + (mix * kS + stream) * slice_ + column);
  }

  // Of a token, on lane i and every eighth one behind it: raw mix i of pre; sum kS: of squares.
  __device__ float EarlySum(int token) {
    BarrierWaitCluster(&s_.early_full, 0);
    float sum = 0;
#pragma unroll 8
    for (int i = lane() / kEarlyRow; i < hidden_ / 128; i += 32 / kEarlyRow) {
      sum += Early(token, i, lane() % kEarlyRow);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 16);
  }
  // The streams' norm, of EarlySum.
  __device__ float Inverse(float early) const {
    const float mean = __shfl_sync(0xffffffffu, early, kS) * inverse_hidden_ / kS;
    return InverseSqrt(mean + p_.constants.norm_eps);
  }

  // The sub-layer's input.
  __device__ void Finish() {
    const float sum = EarlySum(token_);
    const float gate = Sigmoid(sum * Inverse(sum) * scale_ + base_) + p_.constants.hc_eps;
    float4 y = __shfl_sync(0xffffffffu, gate, 0) * WidenQuad(streams_[0]);
    for (int k = 1; k < kS; ++k) {
      y = y + __shfl_sync(0xffffffffu, gate, k) * WidenQuad(streams_[k]);
    }
    y = RoundQuad(y);
    if constexpr (kTells) TellQuad(y);
    const float own = WarpSum(Dot(y, y));
    if constexpr (kTells) TellSquares(own);
    float* const squares = s_.of[token_].squares;
    if (lane() < cluster_) {
      SendToBlock(&squares[column0_ / 128 + block_], own, &s_.squares_full,
                  static_cast<uint32_t>(lane()));
    }
    BarrierWaitCluster(&s_.squares_full, 0);
    const float mean = WarpSum(squares[lane()] + squares[lane() + 32]) * inverse_hidden_;
    if (!Exists(token_)) return;
    Normalize(Row(token_), column0_ + column_, InverseSqrt(mean + p_.constants.norm_eps) * y);
  }

  // For who does the norm itself.
  __device__ void TellQuad(float4 y) const {
    if (p_.told.words == nullptr) return;
    StoreTwoNumbered(p_.told.words + (column0_ + column_) / 2,
                     {PackBf16(y.x, y.y), PackBf16(y.z, y.w)}, told_number_);
  }
  __device__ void TellSquares(float squares) const {
    if (p_.told.words == nullptr || lane() != 0) return;
    StoreNumbered(p_.told.words + hidden_ / 2 + column0_ / 128 + block_, __float_as_uint(squares),
                  told_number_);
  }

  __device__ void Normalize(int64_t row, int64_t k, float4 scaled) const {
    const float4 weight = WidenQuad(norm_);
    const float4 h = RoundQuad(
        {scaled.x * weight.x, scaled.y * weight.y, scaled.z * weight.z, scaled.w * weight.w});
    if (!kTells || p_.told.words == nullptr) {
      auto* const tiles = reinterpret_cast<std::byte*>(p_.h.values);
      StoreQuad(reinterpret_cast<__nv_bfloat16*>(tiles + Bf16TileOffset(row, k, p_.h.row_groups)),
                h);
    }
    if constexpr (!kHead) {
      const float largest =
          WarpMax(fmaxf(fmaxf(fabsf(h.x), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w))));
      const uint32_t scale = Fp8Scale(largest);
      const float inverse = Ue8m0Inverse(scale);
      auto* const codes =
          reinterpret_cast<uint32_t*>(p_.h_fp8.codes + Fp8TileOffset(row, k, p_.h_fp8.row_groups));
      const uint32_t quad = Fp8Codes(h.x * inverse, h.y * inverse, h.z * inverse, h.w * inverse);
      *codes = quad;
      if (lane() == 0) {
        p_.h_fp8.scales[k / 128 * p_.h_fp8.row_groups * 8 + row] = Ue8m0Value(scale);
      }
    }
  }

  // The mixes of post and C, a group of them and 128 columns a warp, to the first block.
  __device__ int LateWarps() const { return kWarps - column_warps_; }
  using Mixers = float4[kS];  // of a mix, of all streams
  // What the warp's only group has in registers.
  __device__ void LoadLast(Mixers& last) const {
    const int i = warp() - column_warps_, mix = (1 + i % kGroups) * kS + kS - 1;
    if (kept_ == kS || i >= kGroups * blocks_) return;
    const float* const from =
        p_.fn + mix * kS * hidden_ + column0_ + i / kGroups * 128 + lane() * 4;
    for (int k = 0; k < kS; ++k) last[k] = *reinterpret_cast<const float4*>(from + k * hidden_);
  }
  __device__ void MakeLate(const Mixers& last) {
    NamedBarrier(kStreamsMade, kThreads);
    if (blockIdx.x == 0 && thread() == kThreads - 1) Leave(p_.milestone);
    BarrierWait(&s_.mixers_full, 0);
#pragma unroll 1
    for (int i = warp() - column_warps_; i < kGroups * blocks_; i += LateWarps()) {
      MixGroup(i % kGroups, i / kGroups, last);
    }
    const int token = kWarps - 1 - warp();
    if (rank_ == 0 && token < kTokens && Exists(token)) WriteState(token);
  }
  __device__ void MixGroup(int group, int block, const Mixers& last) {
    const int column = block * 128 + lane() * 4;
    float4 x[kTokens][kS];
    for (int t = 0; t < kTokens; ++t) {
      for (int k = 0; k < kS; ++k) x[t][k] = WidenQuad(X(t, k, column));
    }
    float sums[kTokens * kS] = {};
#pragma unroll
    for (int m = 0; m < kS; ++m) {
      for (int k = 0; k < kS; ++k) {
        const bool is_last = kTokens == 1 && m == kS - 1 && kept_ < kS;
        const float4 mixer = is_last ? last[k] : Mixer(kS + group * kept_ + m, k, column);
        for (int t = 0; t < kTokens; ++t) sums[t * kS + m] += Dot(mixer, x[t][k]);
      }
    }
    const float sum = TransposedSum(sums);
    constexpr int kLanes = 32 / (kTokens * kS);
    if (lane() % kLanes != 0) return;
    const int token = lane() / kLanes / kS, m = lane() / kLanes % kS;
    SendToBlock(&Late(token, column0_ / 128 + block, group * kS + m), sum, &s_.late_full, 0);
  }
  // What the next launch makes of them.
  __device__ void WriteState(int token) {
    const float inverse = Inverse(EarlySum(token));
    BarrierWaitCluster(&s_.late_full, 0);
    const int i = lane();
    if (i >= kLate) return;
    float sum = 0;
#pragma unroll 8
    for (int block = 0; block < hidden_ / 128; ++block) sum += Late(token, block, i);
    const float mix = sum * inverse * scale_ + base_;
    const int64_t at = Token(token) * kS;
    if (i < kS) {
      p_.after.post[at + i] = 2.0f * Sigmoid(mix);
    } else {
      p_.after.comb_logits[at * kS + i - kS] = mix;
    }
  }

  const CudaHyperConnectionParams& p_;
  const int cluster_, rank_, slice_, hidden_;
  const float inverse_hidden_;
  const int column0_, blocks_;
  const int64_t first_row_;
  Shared& s_;
  __nv_bfloat16* x_;  // [kTokens][4][slice], the new streams
  const int kept_;    // mixes of a late group in shared memory
  float* mixers_;     // [SharedMixes][4][slice]
  float* sums_;       // Early, then Late
  const int column_warps_;
  // A column warp's token, its 128 columns of the block's, and where a lane's four begin.
  const int token_, block_, column_;
  uint2 streams_[kS] = {}, norm_ = {};
  float scale_ = 0, base_ = 0;
  uint64_t number_ = 0;  // of the exchange
  uint32_t told_number_ = 0;
};

// So many threads could have a multiprocessor's registers. A block has half of them, and of the
// shared memory, so it gets ready beside the product before; what awaits the experts' rows has
// more, as it comes after one of their blocks, which has all. (A value that spills comes from the
// L2 cache: who waits for a cluster forgets the first level.)
template <Ranks kRanks>
constexpr int kThreadsOfRegisters = kRanks == Ranks::kRows ? 640 : 2 * kThreads;

template <bool kHead, Ranks kRanks, int kTokens>
__global__ void __launch_bounds__(kThreadsOfRegisters<kRanks>)
    BoundaryKernel(const __grid_constant__ CudaHyperConnectionParams params, int cluster, int slice,
                   float inverse_hidden) {
  extern __shared__ float4 memory[];
  Boundary<kHead, kRanks, kTokens>(params, cluster, slice, inverse_hidden, memory).Run();
}

struct Slices {
  explicit Slices(int64_t hidden) {
    const auto blocks = static_cast<int>(hidden / 128);
    const int each = (blocks + kMaxCluster - 1) / kMaxCluster;
    CHECK_LE(blocks, kMaxColumnBlocks);
    size = each * 128;
    cluster = (blocks + each - 1) / each;
  }
  int size;     // columns of a block
  int cluster;  // blocks
};

template <bool kHead, Ranks kRanks, int kTokens>
void Run(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const auto kernel = BoundaryKernel<kHead, kRanks, kTokens>;
  const Slices slices(params.hidden);
  device::CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  const auto cluster = static_cast<unsigned>(slices.cluster);
  const auto clusters = static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens);
  LaunchClusters(kernel, clusters * cluster, cluster, kThreads,
                 Boundary<kHead, kRanks, kTokens>::DynamicBytes(params.hidden, slices.size), stream,
                 params, slices.cluster, slices.size, 1.0f / static_cast<float>(params.hidden));
}

// More clusters than that do not find room beside the product before them.
constexpr int64_t kMostSingleTokens = 6;

template <bool kHead, Ranks kRanks>
void RunTokens(const CudaHyperConnectionParams& params, device::Stream& stream) {
  params.num_tokens <= kMostSingleTokens ? Run<kHead, kRanks, 1>(params, stream)
                                         : Run<kHead, kRanks, 2>(params, stream);
}

// Of clusters of two tokens that run at once.
template <bool kHead, Ranks kRanks>
int64_t MaxExchangeTokens(int64_t hidden) {
  const auto kernel = BoundaryKernel<kHead, kRanks, 2>;
  const Slices slices(hidden);
  device::CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                    __FILE__, __LINE__);
  return int64_t{2} * MaxClusters(kernel, static_cast<unsigned>(slices.cluster), kThreads,
                                  Boundary<kHead, kRanks, 2>::DynamicBytes(hidden, slices.size));
}

template <bool kHead>
void RunTokens(const CudaHyperConnectionParams& params, device::Stream& stream) {
  const PeerView& peers = params.gather.exchange.peers;
  if (peers.size == 1) return RunTokens<kHead, Ranks::kAll>(params, stream);
  CHECK(params.output.y != nullptr);
  CHECK_LT(params.num_tokens, LargeBoundaryTokens(params.hidden));  // else not all run at once
  using Sent = OutputExchange::Sent;
  if (params.gather.sent == Sent::kRows) {
    CHECK(params.num_tokens == 1 && params.output.pair_of != nullptr);
    CHECK_LE(RowPacket(params.output.num_chosen + 1, params.hidden, 0), kMaxPackets);
    return Run<kHead, Ranks::kRows, 1>(params, stream);
  }
  if constexpr (!kHead) {
    if (params.gather.sent == Sent::kSums) {
      CHECK(peers.size == 2 || peers.size == 4);
      CHECK_LE(params.num_tokens * params.hidden / 2, kMaxPackets);
      return peers.size == 2 ? RunTokens<kHead, Ranks::kSumsOf2>(params, stream)
                             : RunTokens<kHead, Ranks::kSumsOf4>(params, stream);
    }
  }
  CHECK_LE(params.num_tokens * params.hidden / 4, kMaxPackets);
  CHECK_GT(params.gather.columns.least(peers.size), 0);  // else who waits would wait for ever
  RunTokens<kHead, Ranks::kColumns>(params, stream);
}

}  // namespace

void Launch(const CudaHyperConnectionParams& params, device::Stream& stream) {
  if (params.num_tokens == 0) return;
  CHECK_EQ(params.hidden % 128, 0);
  CHECK(params.told.words == nullptr ||
        (params.num_tokens == 1 && !params.prefill && params.rows == nullptr));
  if (IsLargeBoundary(params)) return LaunchLargeBoundary(params, stream);
  params.rows != nullptr ? RunTokens<true>(params, stream) : RunTokens<false>(params, stream);
}

int64_t MaxExchangeTokens(int64_t hidden) {
  return std::min({MaxExchangeTokens<false, Ranks::kColumns>(hidden),
                   MaxExchangeTokens<false, Ranks::kSumsOf2>(hidden),
                   MaxExchangeTokens<false, Ranks::kSumsOf4>(hidden),
                   MaxExchangeTokens<true, Ranks::kColumns>(hidden),
                   LargeBoundaryTokens(hidden) - 1});
}

}  // namespace fathom::kernels
