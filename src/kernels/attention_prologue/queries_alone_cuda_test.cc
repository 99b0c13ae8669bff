// One launch for the prologue and the query products against two: the same bits, step after step of
// one sequence.
#include "kernels/attention_prologue/queries_alone_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cuda_batch_testing.h"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;
// From token kFirst on; the 128th completes an entry of each ratio.
constexpr int kFirst = kIsRacecheck ? 126 : 0, kLength = kIsRacecheck ? 129 : 140;
constexpr int kRank = 1024, kStateBytes = 1 << 20;
constexpr int64_t kIndexRows = 1024, kQueryRows = 2304;

class QueriesAloneCudaTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (gpu_ == nullptr) return;
    index_w_ = Tiles(kIndexRows, 1), query_w_ = Tiles(kQueryRows, 2);
    norm_ = Upload(RandomActivations<BFloat16>(kRank, 3));
    ape_ = Upload(RandomFloats(128 * 1024, 4));
    std::vector<float> frequencies;
    for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(10000.0f, -i / 32.0f));
    frequencies_ = Upload(frequencies);
    angles_ = Upload(RandomFloats(64, 5));
    step_ = Upload(std::vector<uint32_t>{40});
  }

  TiledMatrix Tiles(int64_t rows, uint32_t seed) {
    const TestMatrix w = RandomMatrix(WeightDType::kFp8, rows, kRank, seed);
    WeightMatrix on_gpu = w.view;
    on_gpu.data = Keep(Upload(w.data)),
    on_gpu.scales = reinterpret_cast<uint8_t*>(Keep(Upload(w.scales)));
    return LaunchTileWeights(on_gpu, TileKind::kFp8,
                             Keep(Poisoned(TiledBytes(TileKind::kFp8, rows, kRank))), *gpu_stream_);
  }
  // All that steps of one token each leave.
  std::vector<std::vector<uint8_t>> Run(int ratio, int num_products, bool alone) {
    TestBatch batch(1, kLength, 7);
    const auto zeros = [](int64_t bytes) {
      return std::vector<uint8_t>(static_cast<size_t>(bytes));
    };
    const device::Buffer blocks = Poisoned(batch.num_blocks() * TestPools::kBlockBytes);
    const device::Buffer pages = Poisoned(batch.num_pages() * TestPools::kPageBytes);
    const device::Buffer state = Upload(zeros(kStateBytes)), begun = Poisoned(4);
    std::vector<std::vector<uint8_t>> left;
    for (int position = kFirst; position < kLength; ++position) {
      const auto seed = static_cast<uint32_t>(10 * position);
      std::vector<device::Buffer> step;
      const auto put = [&](device::Buffer buffer) {
        step.push_back(std::move(buffer));
        return step.back().data();
      };
      batch.SetStep({{position, 1}});
      CudaAttentionPrologueParams p{
          .batch = batch.OnDevice([&](const auto& v) { return Upload(v); }, step),
          .norm_eps = 1e-6f,
          .angles = As<float>(angles_),
          .qr = reinterpret_cast<__nv_bfloat16*>(
              put(Upload(RandomActivations<BFloat16>(kRank, seed)))),
          .qr_stride = kRank,
          .q_lora_rank = kRank,
          .q_norm = As<__nv_bfloat16>(norm_),
          .q = {reinterpret_cast<uint8_t*>(put(Poisoned(8 * kRank))),
                reinterpret_cast<float*>(put(Poisoned(kRank / 128 * 8 * 4))), 1},
          .kv = reinterpret_cast<__nv_bfloat16*>(
              put(Upload(RandomActivations<BFloat16>(512, seed + 1)))),
          .kv_stride = 512,
          .kv_norm = As<__nv_bfloat16>(norm_),
          .fresh = reinterpret_cast<uint8_t*>(put(Poisoned(1024))),
          .pages = TestPools::Window(pages.data()),
          .ratio = ratio,
          .main = {},
          .index = {},
          .slot_bytes = kStateBytes,
          .frequencies = As<float>(frequencies_)};
      const auto compressor = [&](int width, uint32_t rows_seed, const PagedEntries& cache,
                                  int64_t offset) {
        const auto* c = reinterpret_cast<float*>(put(Upload(RandomFloats(2 * width, rows_seed))));
        return CudaCompressor{.c = c,
                              .z = c + width,
                              .row_stride = 2 * width,
                              .ape = As<float>(ape_),
                              .norm = As<__nv_bfloat16>(norm_),
                              .cache = cache,
                              .state = state.data() + offset};
      };
      if (ratio == 128) p.main = compressor(512, seed + 2, TestPools::C128(blocks.data()), 0);
      if (ratio == 4) {
        p.main = compressor(1024, seed + 2, TestPools::C4(blocks.data()), 0);
        p.index = compressor(256, seed + 3, TestPools::Index(blocks.data(), p.index_dtype),
                             kStateBytes / 2);
      }
      CudaGemmParams products{.num_problems = num_products, .num_tokens = 1};
      if (num_products == 2) {
        products.number = {As<uint32_t>(step_), 3, As<uint32_t>(begun)};
        products.problems[0] = {.w = index_w_,
                                .x_fp8 = p.q,
                                .x_bf16 = {},
                                .output = GemmOutput::kNumbered,
                                .y = put(Poisoned(kIndexRows * 4)),
                                .y_stride = kIndexRows,
                                .y_fp8 = {}};
      }
      products.problems[num_products - 1] = {.w = query_w_,
                                             .x_fp8 = p.q,
                                             .x_bf16 = {},
                                             .y = put(Poisoned(kQueryRows * 2)),
                                             .y_stride = kQueryRows,
                                             .y_fp8 = {}};
      EXPECT_TRUE(AreQueriesAlone(products));
      if (alone) {
        Launch(CudaQueriesAloneParams{p, products}, *gpu_stream_);
        if (num_products == 2 && ratio == 4) {
          EXPECT_EQ(Download<uint32_t>(begun)[0], 47u);
        }
      } else {
        Launch(p, *gpu_stream_);
        Launch(products, *gpu_stream_);
      }
      for (int i = 0; i < num_products; ++i) {
        const GemmProblem& q = products.problems[i];
        left.push_back(Bytes(q.y, q.w.rows * (q.output == GemmOutput::kNumbered ? 4 : 2)));
      }
      left.push_back(Bytes(p.fresh, 1024));
    }
    for (const device::Buffer* buffer : {&blocks, &pages, &state}) {
      left.push_back(Download<uint8_t>(*buffer));
    }
    return left;
  }
  std::vector<uint8_t> Bytes(const void* data, int64_t bytes) {
    std::vector<uint8_t> out(static_cast<size_t>(bytes));
    EXPECT_TRUE(gpu_stream_->Copy(out.data(), static_cast<const std::byte*>(data), bytes).ok());
    EXPECT_TRUE(gpu_stream_->Synchronize().ok());
    return out;
  }

  TiledMatrix index_w_, query_w_;
  device::Buffer norm_, ape_, frequencies_, angles_, step_;
};

TEST_F(QueriesAloneCudaTest, OneLaunchLeavesTheBitsOfTwo) {
  for (const int ratio : {0, 4, 128}) {
    for (const int num_products : {1, 2}) {
      EXPECT_TRUE(Run(ratio, num_products, true) == Run(ratio, num_products, false))
          << "ratio " << ratio << ", " << num_products << " products";
    }
  }
}

}  // namespace
}  // namespace fathom::kernels
