// Prompts' products of FP8 weights and BF16 activations, for any number of tokens. Weights are A of
// wgmma: their codes are widened in registers, those of the next columns while these are
// multiplied; up to 256 tokens are B. An item is 128 rows, half of them for each of two warpgroups.
// All columns are one block's: FP32 sums of the tensor core, 16 columns at a time, the same in
// tiles of any number of tokens. (Weights widened into shared memory, as B of 64 tokens each, are
// read there once for each of these: 16 products of a step then took 1.4 times as long as the
// tensor cores.)
#include <algorithm>

#include "kernels/gemm/gemm_large.h"
#include "kernels/gemm/item_stream.cuh"
#include "kernels/gemm/large_output.cuh"
#include "kernels/gemm/stream_products.cuh"

namespace fathom::kernels {
namespace {

constexpr int kRows = 128;  // of an item
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // a warpgroup, which gives registers to the others

// Of a tile's tokens that leave at a time.
constexpr int kOutTokens = 64;
constexpr int kOutBytes = kRows * 2 + 16;  // of a token's row, BF16; 16 for other banks

template <int kN>
struct Tile {
  static constexpr int kHalves = kN <= 64 ? 2 : 1;  // of a column block, in a step
  static constexpr int kSteps = kHalves * 4;        // of 16 columns, in a step
  static constexpr int kTokens = kN <= 64 ? 64 : kN;
  static constexpr int kWide = kN <= 128 ? kN : 128;  // tokens of a product
  static constexpr int kProducts = kN / kWide;
  static constexpr ItemShape kShape{.rows = kRows,
                                    .tokens = kTokens,
                                    .weight_tiles = 2,
                                    .weight_bytes = kHalves * 4096,
                                    .step_bytes = kHalves * 4096,
                                    .x_tiles = kHalves,
                                    .stages = kN <= 64    ? 6
                                              : kN == 128 ? 8
                                                          : 5};
  using Ring = ItemRing<kShape>;
  using Items = typename Ring::Items;
  struct Shared {
    Ring ring;
    alignas(16) std::byte out[kOutTokens][kOutBytes];
  };
};

// kN: at least the tokens of an item.
template <int kN>
class WidenedMultiplier {
  using T = Tile<kN>;
  using Sums = float[T::kProducts][T::kWide / 2];
  using Weights = uint32_t[T::kSteps][4];

 public:
  __device__ WidenedMultiplier(typename T::Shared& shared, const typename T::Items& items)
      : s_(shared), items_(items) {}

  __device__ void Run() {
    const int count = items_.count();
    for (int i = 0; i < count; ++i) {
      const GemmItem item = items_(i);
      Sums d = {};
      Add(item, d);
      item.problem.output == GemmOutput::kFp8Tiles ? WriteFp8(item, d) : Write(item, d);
    }
  }

 private:
  __device__ static int group() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void Add(const GemmItem& item, Sums& d) {
    ItemScales scales(item);
    int k = 0;
    for (; k + 8 <= item.num_steps; k += 8) AddSteps<8>(k, scales, d);
    for (; k + 2 <= item.num_steps; k += 2) AddSteps<2>(k, scales, d);
    for (; k < item.num_steps; ++k) AddSteps<1>(k, scales, d);
  }

  // From k on, which is even where a block is two steps.
  template <int kCount>
  __device__ __forceinline__ void AddSteps(int k, ItemScales& scales, Sums& d) {
    Weights a[2];
    int stages[2];
    Widen(k, scales, a[0]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Start(a[i % 2], d);
      stages[i % 2] = at_.index;
      at_.Next();
      if (i > 0) {
        WgmmaWait<1>();
        WarpHandBack(&s_.ring.empty[stages[(i - 1) % 2]]);
      }
      if (i + 1 < kCount) Widen(k + i + 1, scales, a[(i + 1) % 2]);
    }
    WgmmaWait<0>();
    for (auto& product : d) ReadyRegisters(product);
    WarpHandBack(&s_.ring.empty[stages[(kCount - 1) % 2]]);
  }

  __device__ __forceinline__ void Widen(int k, ItemScales& scales, Weights& a) {
    if (T::kHalves == 2 || k % 2 == 0) scale_ = WideScale(scales(T::kHalves == 2 ? k : k / 2));
    s_.ring.AwaitFull(at_);
    WidenSteps<T::kSteps>(s_.ring.weights[at_.index][group()], 0, scale_, a);
    __syncwarp();
  }
  __device__ __forceinline__ void Start(const Weights& a, Sums& d) {
    WgmmaFence();
#pragma unroll
    for (int q = 0; q < T::kSteps; ++q) {
      const uint64_t x = SmemDescriptor(SharedAddress(s_.ring.x[at_.index][q / 4])) + q % 4 * 2;
#pragma unroll
      for (int i = 0; i < T::kProducts; ++i) {
        Wgmma<WgmmaType::kBf16, T::kWide>::FromRegisters(d[i], a[q], x + i * (T::kWide * 128 / 16),
                                                         1);
      }
    }
    WgmmaCommit();
  }

  // d[i][4 j + 2 h + e]: row Row() + 8 h, token Token(i, j, e).
  __device__ static int Row() { return group() * 64 + ThreadOfGroup() / 32 * 16 + lane() / 4; }
  __device__ static int Token(int i, int j, int e) {
    return i * T::kWide + j * 8 + lane() % 4 * 2 + e;
  }

  __device__ __forceinline__ void Write(const GemmItem& item, const Sums& d) {
    const GemmProblem& g = item.problem;
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int i = n / (T::kWide / 2), in = n % (T::kWide / 2);
      const int64_t token = item.token + Token(i, in / 4, in % 2);
      const int64_t row = item.row + Row() + in % 4 / 2 * 8;
      if (token >= items_.p.num_tokens || row >= g.w.rows) continue;
      const int64_t at = token * g.y_stride + row;
      if (g.output == GemmOutput::kBf16) {
        StoreMirrored(static_cast<__nv_bfloat16*>(g.y) + at, __float2bfloat16_rn(d[i][in]),
                      &items_.p.mirrors);
      } else {
        static_cast<float*>(g.y)[at] = d[i][in];
      }
    }
  }

  // By way of shared memory, where a token's 128 rows meet, which share a scale.
  __device__ __forceinline__ void WriteFp8(const GemmItem& item, const Sums& d) {
#pragma unroll
    for (int first = 0; first < T::kTokens; first += kOutTokens) {
      NamedBarrier(1, kConsumers);  // what was there has been read
      Keep(d[first / T::kWide], first % T::kWide);
      NamedBarrier(1, kConsumers);
      WriteRow(item, first);
    }
  }

  // Of tokens `first` and on of a product, up to kOutTokens, as BF16.
  __device__ __forceinline__ void Keep(const float (&d)[T::kWide / 2], int first) const {
#pragma unroll
    for (int j = 0; j < kOutTokens / 8; j += 2) {
      if (first + j * 8 >= T::kWide) continue;
      uint32_t values[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (first / 8 + j + i / 2) * 4 + i % 2 * 2;
        if (at < T::kWide / 2) values[i] = PackBf16(d[at], d[at + 1]);
      }
      const int token = (j + lane() / 16) * 8 + lane() % 8;
      const int row = group() * 64 + ThreadOfGroup() / 32 * 16 + lane() / 8 % 2 * 8;
      StoreTransposed(SharedAddress(s_.out[token]) + row * 2, values);
    }
  }

  // Four threads a token, 32 rows each.
  __device__ __forceinline__ void WriteRow(const GemmItem& item, int first) const {
    const int place = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    const int64_t token = item.token + first + place;
    const auto* chunks = reinterpret_cast<const uint4*>(s_.out[place]) + part * 4;
    float v[4][8], largest = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      UnpackEight(chunks[c], v[c]);
      for (const float x : v[c]) largest = fmaxf(largest, fabsf(x));
    }
    const uint32_t scale = Fp8Scale(QuadMax(largest));
    if (token >= items_.p.num_tokens) return;
    const float inverse = Ue8m0Inverse(scale);
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* x = v[i / 2] + i % 2 * 4;
      codes[i] = Fp8Codes(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    }
    const Fp8Tiles& y = item.problem.y_fp8;
    const Mirrors* const mirrors = &items_.p.mirrors;
    const int64_t column = item.row + part * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      StoreMirrored(y.codes + Fp8TileOffset(token, column + i * 16, y.row_groups),
                    uint4{codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]},
                    mirrors);
    }
    if (part != 0) return;
    StoreMirrored(&y.scales[item.row / 128 * y.row_groups * 8 + token], Ue8m0Value(scale), mirrors);
  }

  typename T::Shared& s_;
  const typename T::Items& items_;
  typename T::Ring::Place at_;
  __nv_bfloat162 scale_;
};

template <int kN>
__global__ void __launch_bounds__(kThreads, 1)
    GemmWidenedKernel(const __grid_constant__ CudaGemmParams params,
                      const __grid_constant__ ItemGrid grid) {
  using T = Tile<kN>;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory);
  shared.ring.Init(kConsumers / 32);
  const typename T::Items items{params, grid};
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<40>();
    return shared.ring.Produce(items, kConsumers);
  }
  TakeRegisters<232>();
  WidenedMultiplier<kN>(shared, items).Run();
  if (params.mirrors.count > 0) __threadfence_system();
}

template <int kN>
void Run(const CudaGemmParams& params, device::Stream& stream) {
  const ItemGrid grid = MakeItemGrid(params, kRows, Tile<kN>::kTokens);
  LaunchKernel(GemmWidenedKernel<kN>,
               static_cast<unsigned>(std::min(grid.num_items(), NumMultiprocessors())), kThreads,
               sizeof(typename Tile<kN>::Shared), stream, params, grid);
}

// Microseconds of an item's columns, measured.
template <int kN>
int Time(const CudaGemmParams& params, int of_item) {
  const int items = MakeItemGrid(params, kRows, Tile<kN>::kTokens).num_items();
  return (items + NumMultiprocessors() - 1) / NumMultiprocessors() * of_item;
}

}  // namespace

void LaunchWidened(const CudaGemmParams& params, device::Stream& stream) {
  if (params.num_tokens <= 8) return Run<8>(params, stream);
  if (params.num_tokens <= 16) return Run<16>(params, stream);
  if (params.num_tokens <= 32) return Run<32>(params, stream);
  const int few = Time<64>(params, 20), some = Time<128>(params, 28), many = Time<256>(params, 45);
  if (few <= std::min(some, many)) return Run<64>(params, stream);
  some <= many ? Run<128>(params, stream) : Run<256>(params, stream);
}

}  // namespace fathom::kernels
