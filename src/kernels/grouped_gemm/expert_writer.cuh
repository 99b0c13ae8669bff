// What becomes of the sums of an item of the experts' stream (warp 18), and how others hear of it
// (warp 19). Device code only.
#pragma once

#include <type_traits>

#include "kernels/grouped_gemm/expert_items.cuh"
#include "kernels/grouped_gemm/swiglu.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/sm90.cuh"
#include "kernels/warp_sums.cuh"

namespace fathom::kernels {

// What the blocks of a cluster tell each other, for two items in turn. Two: the largest magnitude
// of each token's 64 columns.
template <int kTokens>
struct LargestOfColumns {
  float of[2][2][kTokens];  // [item][rank][token]
  uint64_t full[2];
};
// Four, whose items are slim: all of their sums.
struct SumsOfCluster {
  alignas(16) float of[2][4][64];  // [item][rank][row]
  uint64_t full[2];
};

// What the warp that writes hands over to the one that tells others: two items in turn.
struct WrittenItems {
  int tile[2], part[2];
  uint64_t full[2], empty[2];

  template <typename Progress>
  __device__ void TellAll(const Progress& progress) {
    for (int n = 0;; ++n) {
      BarrierWait(&full[n & 1], n / 2 & 1);
      if (tile[n & 1] < 0) return;
      progress.Tell(tile[n & 1], part[n & 1]);
      WarpArrive(&empty[n & 1]);
    }
  }
};

template <typename Stream>
using ToldInCluster =
    std::conditional_t<Stream::kSlim, SumsOfCluster, LargestOfColumns<Stream::kFp8Tokens>>;

// The first product's sums become t = b(weight * silu(gate) * up) of this block's 64 columns, as
// FP8; the second one's rows of y. One warp; rows of no pair are left out.
template <typename Stream, typename Progress>
class ExpertWriter {
 public:
  using Told = ToldInCluster<Stream>;

  __device__ ExpertWriter(const CudaExpertParams& p, const Progress& progress, Told& told,
                          WrittenItems& written)
      : p_(p),
        progress_(progress),
        told_to_us_(told),
        written_(written),
        rank_(static_cast<int>(blockIdx.x) % kExpertCluster<Stream::kSlim>) {}

  __device__ void Begin(const ExpertItem& item) {
    const bool exists = lane() < item.num_tokens, weighted = exists && item.expert != kSharedExpert;
    weight_ = weighted ? p_.plan.pair_weight[item.pair_group * 8 + lane()] : 1.0f;
    tokens_ = __ballot_sync(0xffffffffu, exists && !(weight_ < 0));
  }
  __device__ void Finish(const ExpertItem& item, typename Stream::Inbox& inbox) {
    if constexpr (Stream::kSlim) {
      FinishSlim(item, inbox);
    } else {
      item.is_down ? WriteOutputs(item, inbox) : WriteIntermediate(item, inbox);
    }
  }
  // Once, behind the last item.
  __device__ void End() { HandOver(-1, 0); }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void WriteOutputs(const ExpertItem& item, const typename Stream::Inbox& inbox) const {
    const int column = 4 * lane();
    __nv_bfloat16* const y = p_.outputs(item.expert == kSharedExpert);
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const float2 a = Stream::Sum(inbox, token, column), b = Stream::Sum(inbox, token, column + 2);
      const uint2 four{PackBf16(a.x, a.y), PackBf16(b.x, b.y)};
      if (progress_.SendsOutputs()) {
        progress_.SendOutputs(item.pair_group, item.part * 128 + column, four);
        continue;
      }
      const int64_t pair = int64_t{item.pair_group} * 8 + token;
      *reinterpret_cast<uint2*>(y + pair * p_.y_stride + item.part * 128 + column) = four;
    }
  }

  __device__ void WriteIntermediate(const ExpertItem& item, typename Stream::Inbox& inbox) {
    auto& largest = told_to_us_.of[items_ & 1];
    uint64_t* const full = &told_to_us_.full[items_ & 1];
#pragma unroll 2
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const float weight = __shfl_sync(0xffffffffu, weight_, token);
      const float2 gate = Stream::Sum(inbox, token, 2 * lane());
      const float2 up = Stream::Sum(inbox, token, 64 + 2 * lane());
      const float2 v{Intermediate(gate.x, up.x, weight, p_.swiglu_limit),
                     Intermediate(gate.y, up.y, weight, p_.swiglu_limit)};
      *Value(inbox, token) = v;
      const float max = WarpMax(fmaxf(fabsf(v.x), fabsf(v.y)));
      if (lane() < 2) SendToBlock(&largest[rank_][token], max, full, static_cast<uint32_t>(lane()));
    }
    if (lane() == 0) {
      BarrierExpectBytes(full, static_cast<uint32_t>(2 * __popc(tokens_)) * sizeof(float));
    }
    BarrierWaitCluster(full, items_ / 2 & 1);
    const int column = item.part * 128 + rank_ * 64 + 2 * lane();
#pragma unroll 2
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const uint32_t scale = Fp8Scale(fmaxf(largest[0][token], largest[1][token]));
      const float inverse = Ue8m0Inverse(scale);
      const float2 v = *Value(inbox, token);
      const uint32_t two = Fp8Codes(v.x * inverse, v.y * inverse);
      if (progress_.packets().exist()) {
        SendPackets(item, two, scale);
        break;
      }
      const int64_t pair = int64_t{item.pair_group} * 8 + token;
      auto* const codes = p_.t.codes + Fp8TileOffset(pair, column, p_.t.row_groups);
      progress_.Store(reinterpret_cast<uint16_t*>(codes), static_cast<uint16_t>(two));
      if (lane() == 0 && rank_ == 0) {
        progress_.Store(p_.t.scales + item.part * p_.t.row_groups * 8 + pair, Ue8m0Value(scale));
      }
    }
    ++items_;
    if (progress_.packets().exist()) return;
    FenceAsyncProxy();
    HandOver(item.tile, item.part);
  }
  // The only token's 64 sums.
  __device__ void FinishSlim(const ExpertItem& item, const typename Stream::Inbox& inbox) {
    const float2 own = Stream::SlimSum(inbox, 2 * lane());
    if (!item.is_down) return ShareSums(item, own);
    const int column = item.part * 64 + 2 * lane();
    const uint32_t two = PackBf16(own.x, own.y);
    if (progress_.SendsOutputs()) {
      const uint32_t more = __shfl_down_sync(0xffffffffu, two, 1);
      if (lane() % 2 == 0) progress_.SendOutputs(item.pair_group, column, {two, more});
      return;
    }
    __nv_bfloat16* const y = p_.outputs(item.expert == kSharedExpert);
    const int64_t pair = int64_t{item.pair_group} * 8;
    *reinterpret_cast<uint32_t*>(y + pair * p_.y_stride + column) = two;
  }
  // To all four blocks, who each make all 128 columns and send 32 of them.
  __device__ void ShareSums(const ExpertItem& item, float2 own) {
    auto& sums = told_to_us_.of[items_ & 1];
    uint64_t* const full = &told_to_us_.full[items_ & 1];
    const float* const place = &sums[rank_][2 * lane()];
    for (uint32_t to = 0; to < 4; ++to) {
      SendToBlock(place, own.x, full, to);
      SendToBlock(place + 1, own.y, full, to);
    }
    if (lane() == 0) BarrierExpectBytes(full, sizeof(sums));
    BarrierWaitCluster(full, items_ / 2 & 1);
    ++items_;
    const float4 gate = reinterpret_cast<const float4*>(sums[0])[lane()];
    const float4 up = reinterpret_cast<const float4*>(sums[2])[lane()];
    const float weight = __shfl_sync(0xffffffffu, weight_, 0), limit = p_.swiglu_limit;
    const float4 v{
        Intermediate(gate.x, up.x, weight, limit), Intermediate(gate.y, up.y, weight, limit),
        Intermediate(gate.z, up.z, weight, limit), Intermediate(gate.w, up.w, weight, limit)};
    const uint32_t scale =
        Fp8Scale(WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)))));
    const float inverse = Ue8m0Inverse(scale);
    const uint32_t four = Fp8Codes(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    const uint32_t more = __shfl_down_sync(0xffffffffu, four, 1);
    uint4* const to = progress_.packets().At(item.tile, item.part);
    if (lane() / 8 == rank_ && lane() % 2 == 0) progress_.Send(to + lane() / 2, {four, more});
    if (lane() == 1 && rank_ == 3) {
      progress_.Send(to + kPacketsOfBlock - 1, {__float_as_uint(Ue8m0Value(scale)), 0});
    }
  }
  // The only token's 64 columns, two a lane.
  __device__ void SendPackets(const ExpertItem& item, uint32_t two, uint32_t scale) const {
    const uint32_t four = (two & 0xffff) | __shfl_down_sync(0xffffffffu, two, 1) << 16;
    const uint32_t more = __shfl_down_sync(0xffffffffu, four, 2);
    uint4* const to = progress_.packets().At(item.tile, item.part);
    if (lane() % 4 == 0) progress_.Send(to + rank_ * 8 + lane() / 4, {four, more});
    if (lane() == 1 && rank_ == 0) {
      progress_.Send(to + kPacketsOfBlock - 1, {__float_as_uint(Ue8m0Value(scale)), 0});
    }
  }
  __device__ void HandOver(int tile, int part) {
    const int n = told_ & 1;
    __syncwarp();
    if (lane() != 0) return;
    if (told_ >= 2) BarrierWait(&written_.empty[n], (told_ / 2 - 1) & 1);
    ++told_;
    written_.tile[n] = tile, written_.part[n] = part;
    BarrierArrive(&written_.full[n]);
  }
  // What this thread keeps there of its own sums.
  __device__ static float2* Value(typename Stream::Inbox& inbox, int token) {
    return reinterpret_cast<float2*>(&inbox[0][token][2 * lane()]);
  }

  const CudaExpertParams& p_;
  const Progress& progress_;
  Told& told_to_us_;
  WrittenItems& written_;
  const int rank_;
  int items_ = 0;        // of the first product, so far
  int told_ = 0;         // lane 0: of those, handed over
  float weight_ = 1;     // of the token that is this lane's number
  uint32_t tokens_ = 0;  // of an item, a bit each: those that are written
};

}  // namespace fathom::kernels
