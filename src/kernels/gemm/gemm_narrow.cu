// The products of a prompt's step of few tokens, where reading the weights is all the work, and of
// more tokens where larger tiles would be few (gemm_large.cu): FP8 and BF16. As there tokens are A
// of wgmma and weights B, so that the sums are the same, in the same order. A block has one
// warpgroup and takes one item after another, of up to 64 tokens and as few rows as give many
// multiprocessors one: a block's time is that of its steps, which wait for each other. Two blocks
// find room on a multiprocessor.
#include <algorithm>

#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/item_stream.cuh"
#include "kernels/gemm/wgmma.cuh"

namespace fathom::kernels {
namespace {

constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 64;

constexpr ItemShape NarrowShape(int rows) {
  return {.rows = rows,
          .tokens = kNarrowTokens,
          .weight_tiles = 1,
          .weight_bytes = rows * 128,
          .step_bytes = 8192,
          .x_tiles = 1,
          .stages = rows == 64 ? 6 : 8};
}

// kRows: of an item.
template <int kRows>
class NarrowMultiplier {
 public:
  using Ring = ItemRing<NarrowShape(kRows)>;
  using Items = typename Ring::Items;
  using Sums = float[kRows / 2];

  __device__ NarrowMultiplier(Ring& ring, const Items& items) : ring_(ring), items_(items) {}

  __device__ void Run() {
    const int count = items_.count();
    for (int i = 0; i < count; ++i) {
      const GemmItem item = items_(i);
      Sums d = {};
      item.scales != nullptr ? AddFp8(item, d) : AddBf16(item, d);
      Write(item, d);
    }
  }

 private:
  static constexpr int kFp8Steps = kRows == 64 ? 2 : 4;  // whose products there are registers for
  static constexpr int kBf16Steps = 4;

  __device__ static int Token() {  // and 8 more
    return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  template <WgmmaType kType>
  __device__ __forceinline__ void Start(bool accumulate, Sums& d) {
    ring_.AwaitFull(at_);
    const uint64_t x = SmemDescriptor(SharedAddress(ring_.x[at_.index][0]));
    const uint64_t weights = SmemDescriptor(SharedAddress(ring_.weights[at_.index][0]));
    at_.Next();
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      Wgmma<kType, kRows>::FromSmem(d, x + 2 * q, weights + 2 * q, accumulate || q != 0);
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void AddFp8(const GemmItem& item, Sums& d) {
    ItemScales scales(item);
    int k = 0;
    for (; k + kFp8Steps <= item.num_steps; k += kFp8Steps) AddFp8Steps<kFp8Steps>(k, scales, d);
    for (; k < item.num_steps; ++k) AddFp8Steps<1>(k, scales, d);
  }

  // Sums of 128 columns are the tensor core's own, scaled and added up in FP32.
  template <int kSteps>
  __device__ __forceinline__ void AddFp8Steps(int k, ItemScales& scales, Sums& d) {
    float products[kSteps][kRows / 2];
#pragma unroll
    for (auto& product : products) Start<WgmmaType::kE4m3>(false, product);
    Finish<kSteps, 0>(k, scales, products, d);
  }

  template <int kSteps, int kStep>
  __device__ __forceinline__ void Finish(int k, ItemScales& scales,
                                         float (&products)[kSteps][kRows / 2], Sums& d) {
    const float weight_scale = scales(k + kStep);
    const float* x_scales = ring_.x_scales[done_.index] + Token();
    const float low = x_scales[0], high = x_scales[8];
    WgmmaWait<kSteps - 1 - kStep>();
    ReadyRegisters(products[kStep]);
    WarpHandBackBehind(&ring_.empty[done_.index], true, low, high, UnknownZero());
    done_.Next();
    const float low_scale = low * weight_scale, high_scale = high * weight_scale;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      d[4 * j] += products[kStep][4 * j] * low_scale;
      d[4 * j + 1] += products[kStep][4 * j + 1] * low_scale;
      d[4 * j + 2] += products[kStep][4 * j + 2] * high_scale;
      d[4 * j + 3] += products[kStep][4 * j + 3] * high_scale;
    }
    if constexpr (kStep + 1 < kSteps) Finish<kSteps, kStep + 1>(k, scales, products, d);
  }

  __device__ __forceinline__ void AddBf16(const GemmItem& item, Sums& d) {
    int k = 0;
    for (; k + kBf16Steps <= item.num_steps; k += kBf16Steps) AddBf16Steps<kBf16Steps>(d);
    for (; k < item.num_steps; ++k) AddBf16Steps<1>(d);
  }

  template <int kSteps>
  __device__ __forceinline__ void AddBf16Steps(Sums& d) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Start<WgmmaType::kBf16>(true, d);
    WgmmaWait<0>();
    ReadyRegisters(d);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      WarpArrive(&ring_.empty[done_.index]);
      done_.Next();
    }
  }

  __device__ void Write(const GemmItem& item, const Sums& d) const {
    const GemmProblem& g = item.problem;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = item.token + Token() + half * 8;
      if (token >= items_.p.num_tokens) continue;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const int64_t row = item.row + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
        if (row >= g.w.rows) continue;
        const int64_t at = token * g.y_stride + row;
        const float a = d[4 * j + 2 * half], b = d[4 * j + 2 * half + 1];
        if (g.output == GemmOutput::kBf16) {
          *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(g.y) + at) = PackBf16(a, b);
        } else {
          *reinterpret_cast<float2*>(static_cast<float*>(g.y) + at) = {a, b};
        }
      }
    }
  }

  Ring& ring_;
  const Items& items_;
  typename Ring::Place at_, done_;
};

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    GemmNarrowKernel(const __grid_constant__ CudaGemmParams params,
                     const __grid_constant__ ItemGrid grid) {
  using Multiplier = NarrowMultiplier<kRows>;
  extern __shared__ __align__(1024) std::byte shared[];
  auto& ring = *reinterpret_cast<typename Multiplier::Ring*>(shared);
  ring.Init(kConsumers / 32);
  const typename Multiplier::Items items{params, grid};
  if (threadIdx.x >= kConsumers) return ring.Produce(items, kConsumers);
  Multiplier(ring, items).Run();
}

template <int kRows>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  const ItemGrid grid = MakeItemGrid(params, kRows, kNarrowTokens);
  LaunchKernel(GemmNarrowKernel<kRows>,
               static_cast<unsigned>(std::min(grid.num_items(), 2 * NumMultiprocessors())),
               kThreads, sizeof(typename NarrowMultiplier<kRows>::Ring), stream, params, grid);
}

}  // namespace

void LaunchNarrow(const CudaGemmParams& params, device::Stream& stream) {
  // So many that no more than a quarter of the multiprocessors have none.
  const auto are_enough = [&](int rows) {
    return MakeItemGrid(params, rows, kNarrowTokens).num_items() >= NumMultiprocessors() * 3 / 4;
  };
  if (are_enough(64)) return Run<64>(params, stream);
  if (are_enough(32)) return Run<32>(params, stream);
  are_enough(16) ? Run<16>(params, stream) : Run<8>(params, stream);
}

}  // namespace fathom::kernels
