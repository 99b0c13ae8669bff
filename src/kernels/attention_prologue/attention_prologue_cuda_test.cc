// The prologue against the CPU's operators, over steps of one set of sequences: prefill, single
// tokens, drafts that are taken back, groups that fill in the middle of a chunk. Norms are summed
// in another order and expf differs by an ulp, so single codes may differ.
#include "kernels/attention_prologue/attention_prologue_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "kernels/compressor/compressor.h"
#include "kernels/cuda_batch_testing.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_cuda.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace fathom::kernels {
namespace {

using config::IndexKeyDType;
constexpr int kMaxTokens = 1200, kRank = 1024, kSeqs = 3;
constexpr int64_t kC4StateBytes = 16 * 4 * (512 + 128) * 4;
constexpr int64_t kC128StateBytes = 64 + (3 + 32) * 512 * 4;

class AttentionPrologueCudaTest : public CudaTest {
 protected:
  struct Side {
    std::vector<uint8_t> blocks, pages, states;
  };
  struct Inputs {
    std::vector<BFloat16> qr, kv;
    std::vector<float> main, index;  // [T, 2 w]: c, then z
  };

  void Prepare(int ratio, IndexKeyDType dtype) {
    ratio_ = ratio, dtype_ = dtype;
    width_ = ratio == 4 ? 1024 : 512;
    q_norm_ = RandomActivations<BFloat16>(kRank, 1);
    kv_norm_ = RandomActivations<BFloat16>(512, 2);
    main_norm_ = RandomActivations<BFloat16>(512, 3);
    index_norm_ = RandomActivations<BFloat16>(128, 4);
    main_ape_ = RandomFloats(std::max(ratio, 1) * width_, 5);
    index_ape_ = RandomFloats(4 * 256, 6);
    frequencies_.clear();
    for (int i = 0; i < 32; ++i) frequencies_.push_back(std::pow(10000.0f, -i / 32.0f));
    cpu_side_.blocks.assign(static_cast<size_t>(batch_.num_blocks() * TestPools::kBlockBytes),
                            0xff);
    cpu_side_.pages.assign(static_cast<size_t>(batch_.num_pages() * TestPools::kPageBytes), 0xff);
    cpu_side_.states.assign(static_cast<size_t>(kSeqs * slot_bytes()), 0xff);
    gpu_blocks_ = Upload(cpu_side_.blocks), gpu_pages_ = Upload(cpu_side_.pages);
    gpu_states_ = Upload(cpu_side_.states);
  }
  int64_t slot_bytes() const { return ratio_ == 4 ? kC4StateBytes : kC128StateBytes; }

  void Compress(const Inputs& in, bool index) {
    const int w = index ? 256 : width_;
    const auto& both = index ? in.index : in.main;
    std::vector<float> c, z;
    for (int t = 0; t < batch_.num_tokens(); ++t) {
      c.insert(c.end(), both.begin() + 2 * w * t, both.begin() + 2 * w * t + w);
      z.insert(z.end(), both.begin() + 2 * w * t + w, both.begin() + 2 * w * (t + 1));
    }
    const BatchView view = batch_.view();
    std::vector<CompressedEntry> entries(static_cast<size_t>(batch_.num_tokens() / ratio_ + kSeqs));
    entries.resize(static_cast<size_t>(PlanCompressedEntries(view, ratio_, entries)));
    auto* blocks = reinterpret_cast<std::byte*>(cpu_side_.blocks.data());
    auto* states = reinterpret_cast<std::byte*>(cpu_side_.states.data());
    Launch(
        CompressorParams<BFloat16>{
            .batch = view,
            .entries = entries,
            .ratio = ratio_,
            .dim = index ? 128 : 512,
            .rope_dim = 64,
            .c = c.data(),
            .z = z.data(),
            .ape = index ? index_ape_.data() : main_ape_.data(),
            .norm_weight = index ? index_norm_.data() : main_norm_.data(),
            .norm_eps = 1e-6f,
            .frequencies = frequencies_,
            .output = index ? CompressorOutput::kIndexKey : CompressorOutput::kKvEntry,
            .index_dtype = dtype_,
            .cache = index ? TestPools::Index(blocks, dtype_)
                           : (ratio_ == 4 ? TestPools::C4(blocks) : TestPools::C128(blocks)),
            .state = states + (index ? 16 * 4 * 512 * 4 : 0),
            .slot_bytes = slot_bytes(),
            .ring_rows = kCompressorRingRows,
            .max_rollback = kCompressorMaxRollback},
        *cpu_stream_);
  }

  struct GpuRows {
    std::vector<uint8_t> codes, fresh;  // codes in tiles of whole eight rows
  };
  // The batch's step.
  GpuRows RunOnGpu(const Inputs& in, int padding) {
    const int64_t tokens = batch_.num_tokens(), rows = (tokens + padding + 7) / 8 * 8;
    std::vector<device::Buffer> keep;
    const auto upload = [this](const auto& v) { return Upload(v); };
    const auto put = [&](const auto& v) {
      keep.push_back(Upload(v));
      return keep.back().data();
    };
    const auto poison = [&](int64_t bytes) {
      keep.push_back(Poisoned(bytes));
      return keep.back().data();
    };
    const auto padded = [&](auto v, int64_t width) {
      v.insert(v.end(), static_cast<size_t>(padding * width), {});
      return put(v);
    };
    CudaAttentionPrologueParams p;
    p.batch = batch_.OnDevice(upload, keep, padding);
    p.norm_eps = 1e-6f;
    p.frequencies = reinterpret_cast<const float*>(put(frequencies_));
    auto* angles = reinterpret_cast<float*>(poison((tokens + padding) * 64 * 4));
    auto* plain = reinterpret_cast<float*>(poison((tokens + padding) * 64 * 4));
    Launch(CudaRopeAnglesParams{p.batch.positions, p.batch.num_tokens, p.frequencies, p.frequencies,
                                plain, angles},
           *gpu_stream_);
    p.angles = angles;
    p.qr = reinterpret_cast<const __nv_bfloat16*>(padded(in.qr, kRank));
    p.num_queries = num_queries_;
    p.qr_stride = kRank, p.q_lora_rank = kRank;
    p.q_norm = reinterpret_cast<const __nv_bfloat16*>(put(q_norm_));
    auto* codes = poison(rows * kRank);
    auto* scales = poison(rows * kRank / 128 * 4);
    p.q = {reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(scales), rows / 8};
    p.kv = reinterpret_cast<const __nv_bfloat16*>(padded(in.kv, 512));
    p.kv_stride = 512;
    p.kv_norm = reinterpret_cast<const __nv_bfloat16*>(put(kv_norm_));
    auto* fresh = poison((tokens + padding) * 1024);
    p.fresh = reinterpret_cast<uint8_t*>(fresh);
    p.pages = TestPools::Window(gpu_pages_.data());
    p.ratio = ratio_;
    if (ratio_ != 0) {
      p.main.c = reinterpret_cast<const float*>(padded(in.main, 2 * width_));
      p.main.z = p.main.c + width_, p.main.row_stride = 2 * width_;
      p.main.ape = reinterpret_cast<const float*>(put(main_ape_));
      p.main.norm = reinterpret_cast<const __nv_bfloat16*>(put(main_norm_));
      p.main.cache =
          ratio_ == 4 ? TestPools::C4(gpu_blocks_.data()) : TestPools::C128(gpu_blocks_.data());
      p.main.state = gpu_states_.data();
      p.index.c = reinterpret_cast<const float*>(padded(in.index, 512));
      p.index.z = p.index.c + 256, p.index.row_stride = 512;
      p.index.ape = reinterpret_cast<const float*>(put(index_ape_));
      p.index.norm = reinterpret_cast<const __nv_bfloat16*>(put(index_norm_));
      p.index.cache = TestPools::Index(gpu_blocks_.data(), dtype_);
      p.index.state = gpu_states_.data() + 16 * 4 * 512 * 4;
    }
    p.slot_bytes = slot_bytes();
    p.index_dtype = dtype_;
    if (in_two_launches_) {
      p.has_entries = false;
      Launch(p, *gpu_stream_);
      p.has_entries = true, p.num_queries = 0;
    }
    Launch(p, *gpu_stream_);
    return {Bytes(codes, rows * kRank), Bytes(fresh, tokens * 1024)};
  }

  // Runs one step on both sides and compares.
  void Step(const std::vector<TestSequence>& sequences, int padding = 0) {
    batch_.SetStep(sequences);
    const int64_t tokens = batch_.num_tokens(), rows = (tokens + padding + 7) / 8 * 8;
    seed_ += 10;
    Inputs in{RandomActivations<BFloat16>(tokens * kRank, seed_),
              RandomActivations<BFloat16>(tokens * 512, seed_ + 1),
              RandomFloats(tokens * 2 * width_, seed_ + 2), RandomFloats(tokens * 512, seed_ + 3)};
    const GpuRows gpu = RunOnGpu(in, padding);

    // The CPU.
    const BatchView view = batch_.view();
    std::vector<float> cpu_angles(static_cast<size_t>(tokens * 64));
    for (int64_t t = 0; t < tokens; ++t) {
      RopeAngles(view.positions[static_cast<size_t>(t)], frequencies_, cpu_angles.data() + t * 64);
    }
    RmsNorm(in.qr, q_norm_, kRank);
    RmsNorm(in.kv, kv_norm_, 512);
    Launch(RopeParams<BFloat16>{.x = in.kv.data(),
                                .num_tokens = tokens,
                                .head_dim = 512,
                                .rope_dim = 64,
                                .angles = cpu_angles.data()},
           *cpu_stream_);
    const std::vector<uint8_t> fresh = FreshRows(in.kv, tokens);
    Launch(WindowStoreParams<BFloat16>{.batch = view,
                                       .kv = in.kv.data(),
                                       .head_dim = 512,
                                       .rope_dim = 64,
                                       .window = 128,
                                       .max_rollback = kCompressorMaxRollback,
                                       .pages = TestPools::Window(
                                           reinterpret_cast<std::byte*>(cpu_side_.pages.data()))},
           *cpu_stream_);
    if (ratio_ != 0) Compress(in, false);
    if (ratio_ == 4) Compress(in, true);

    const HostFp8Tiles expected = MakeFp8Tiles(in.qr, tokens, kRank, rows);
    size_t different = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < kRank; ++k) {
        const auto at = static_cast<size_t>(Fp8TileOffset(t, k, rows / 8));
        different += gpu.codes[at] != expected.codes[at] ? 1 : 0;
      }
    }
    EXPECT_LE(different * 500, static_cast<size_t>(tokens * kRank)) << "query codes";
    ExpectSame(fresh, gpu.fresh, "fresh");
    ExpectSame(cpu_side_.pages, Download<uint8_t>(gpu_pages_), "window pages");
    ExpectSame(cpu_side_.blocks, Download<uint8_t>(gpu_blocks_), "blocks");
    ExpectSameState(Download<float>(gpu_states_));
  }

  // What steps of `chunk` of one sequence leave: query codes and entries token by token, the cache.
  struct Left {
    std::vector<uint8_t> rows, pages, blocks, states;
  };
  Left RunInSteps(int ratio, int length, int chunk) {
    Prepare(ratio, IndexKeyDType::kFp4);
    const Inputs all{RandomActivations<BFloat16>(length * kRank, 1),
                     RandomActivations<BFloat16>(length * 512, 2),
                     RandomFloats(length * 2 * width_, 3), RandomFloats(length * 512, 4)};
    Left left;
    for (int first = 0; first < length; first += chunk) {
      const int tokens = std::min(chunk, length - first);
      batch_.SetStep({{first, tokens}, {0, 0}, {0, 0}});
      const auto slice = [&](const auto& v, int64_t width) {
        return std::decay_t<decltype(v)>(v.begin() + first * width,
                                         v.begin() + (first + tokens) * width);
      };
      const GpuRows gpu = RunOnGpu({slice(all.qr, kRank), slice(all.kv, 512),
                                    slice(all.main, 2 * width_), slice(all.index, 512)},
                                   0);
      const int64_t row_groups = (tokens + 7) / 8;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t k = 0; k < kRank; ++k) {
          left.rows.push_back(gpu.codes[static_cast<size_t>(Fp8TileOffset(t, k, row_groups))]);
        }
        const auto fresh = gpu.fresh.begin() + t * 1024;
        left.rows.insert(left.rows.end(), fresh, fresh + 1024);
      }
    }
    left.pages = Download<uint8_t>(gpu_pages_);
    left.blocks = Download<uint8_t>(gpu_blocks_);
    left.states = Download<uint8_t>(gpu_states_);
    return left;
  }

  void RmsNorm(std::vector<BFloat16>& x, const std::vector<BFloat16>& weight, int64_t size) {
    Launch(RmsNormParams<BFloat16>{.x = x.data(),
                                   .weight = weight.data(),
                                   .y = x.data(),
                                   .num_rows = static_cast<int64_t>(x.size()) / size,
                                   .size = size,
                                   .x_stride = size,
                                   .y_stride = size,
                                   .eps = 1e-6f},
           *cpu_stream_);
  }

  // The entries of all rows of kv, as the step's own.
  static std::vector<uint8_t> FreshRows(const std::vector<BFloat16>& kv, int64_t tokens) {
    std::vector<uint8_t> rows(static_cast<size_t>(tokens * 1024), 0xff);
    for (int64_t t = 0; t < tokens; ++t) {
      float values[512];
      for (int64_t i = 0; i < 512; ++i) values[i] = ToFloat(kv[static_cast<size_t>(t * 512 + i)]);
      auto* row = reinterpret_cast<std::byte*>(rows.data() + t * 1024);
      StoreKvEntry<BFloat16>(values, 512, 64, {row, row + 576});
    }
    return rows;
  }

  std::vector<uint8_t> Bytes(const std::byte* data, int64_t bytes) {
    std::vector<uint8_t> out(static_cast<size_t>(bytes));
    EXPECT_TRUE(gpu_stream_->Copy(out.data(), data, bytes).ok());
    EXPECT_TRUE(gpu_stream_->Synchronize().ok());
    return out;
  }

  // The same bytes were written, and nearly all are equal.
  static void ExpectSame(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual,
                         const char* what) {
    size_t different = 0, written = 0, misplaced = 0;
    for (size_t i = 0; i < expected.size(); i += 8) {
      const bool expect_written = !AllPoison(expected, i), is_written = !AllPoison(actual, i);
      misplaced += expect_written != is_written ? 1 : 0;
      written += expect_written ? 8 : 0;
      for (size_t k = i; k < i + 8; ++k) different += expected[k] != actual[k] ? 1 : 0;
    }
    EXPECT_EQ(misplaced, 0u) << what;
    EXPECT_LE(different * 200, written + 400) << what;
  }
  static bool AllPoison(const std::vector<uint8_t>& bytes, size_t i) {
    return std::all_of(bytes.begin() + static_cast<int64_t>(i),
                       bytes.begin() + static_cast<int64_t>(i) + 8,
                       [](uint8_t b) { return b == 0xff; });
  }
  void ExpectSameState(const std::vector<float>& actual) {
    std::vector<float> expected(actual.size());
    std::memcpy(expected.data(), cpu_side_.states.data(), cpu_side_.states.size());
    size_t wrong = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      uint32_t a, e;
      std::memcpy(&a, &actual[i], 4), std::memcpy(&e, &expected[i], 4);
      if (a == e) continue;
      wrong += std::fabs(actual[i] - expected[i]) <= 1e-4f * (1 + std::fabs(expected[i])) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0u) << "state";
  }

  TestBatch batch_{kSeqs, kMaxTokens, 7};
  int ratio_ = 0, width_ = 0;
  IndexKeyDType dtype_ = IndexKeyDType::kFp4;
  int num_queries_ = -1;
  bool in_two_launches_ = false;
  uint32_t seed_ = 100;
  std::vector<BFloat16> q_norm_, kv_norm_, main_norm_, index_norm_;
  std::vector<float> main_ape_, index_ape_, frequencies_;
  Side cpu_side_;
  device::Buffer gpu_blocks_, gpu_pages_, gpu_states_;
};

TEST_F(AttentionPrologueCudaTest, StepsOfAnySizeLeaveTheSame) {
  const int length = kIsRacecheck ? 300 : 700;
  for (const int ratio : {0, 4, 128}) {
    const Left whole = RunInSteps(ratio, length, length);
    for (const int chunk : Sweep({1, 2, 3, 31, 33, 64, 130, 255, 256, 300}, {31, 130})) {
      const Left left = RunInSteps(ratio, length, chunk);
      EXPECT_TRUE(left.rows == whole.rows) << "ratio " << ratio << ", steps of " << chunk;
      EXPECT_TRUE(left.blocks == whole.blocks) << "ratio " << ratio << ", steps of " << chunk;
      EXPECT_TRUE(left.states == whole.states) << "ratio " << ratio << ", steps of " << chunk;
      // One step leaves out what no later one can reach.
      size_t different = 0;
      for (size_t i = 0; i < whole.pages.size(); i += 8) {
        if (AllPoison(whole.pages, i)) continue;
        different += std::memcmp(&left.pages[i], &whole.pages[i], 8) == 0 ? 0 : 1;
      }
      EXPECT_EQ(different, 0u) << "ratio " << ratio << ", steps of " << chunk;
    }
  }
}

TEST_F(AttentionPrologueCudaTest, FewerQueriesLeaveTheSameEntries) {
  constexpr int kTokens = 300, kQueries = 128;
  for (const int ratio : {0, 4, 128}) {
    num_queries_ = -1;
    const Left all = RunInSteps(ratio, kTokens, kTokens);
    num_queries_ = kQueries;
    const Left some = RunInSteps(ratio, kTokens, kTokens);
    EXPECT_TRUE(some.pages == all.pages) << ratio;
    EXPECT_TRUE(some.blocks == all.blocks) << ratio;
    EXPECT_TRUE(some.states == all.states) << ratio;
    const size_t row = all.rows.size() / kTokens;
    for (size_t i = 0; i < all.rows.size(); ++i) {
      const bool left_out = i / row >= kQueries && i % row < size_t{kRank};
      ASSERT_EQ(some.rows[i], left_out ? 0xff : all.rows[i]) << "ratio " << ratio << " byte " << i;
    }
  }
}

TEST_F(AttentionPrologueCudaTest, TwoLaunchesLeaveWhatOneDoes) {
  for (const int ratio : {0, 4, 128}) {
    for (const int tokens : {40, 300}) {
      in_two_launches_ = false;
      const Left one = RunInSteps(ratio, tokens, tokens);
      in_two_launches_ = true;
      const Left two = RunInSteps(ratio, tokens, tokens);
      EXPECT_TRUE(two.rows == one.rows) << ratio << " " << tokens;
      EXPECT_TRUE(two.pages == one.pages) << ratio << " " << tokens;
      EXPECT_TRUE(two.blocks == one.blocks) << ratio << " " << tokens;
      EXPECT_TRUE(two.states == one.states) << ratio << " " << tokens;
    }
  }
}

TEST_F(AttentionPrologueCudaTest, StepsOfAWindowLayerMatchTheCpu) {
  Prepare(0, IndexKeyDType::kFp4);
  Step({{0, 1}, {0, 70}, {0, 300}});
  Step({{1, 1}, {70, 60}, {300, 3}}, 5);
}

TEST_F(AttentionPrologueCudaTest, StepsOfARatioFourLayerMatchTheCpu) {
  for (const IndexKeyDType dtype : {IndexKeyDType::kFp4, IndexKeyDType::kFp8}) {
    Prepare(4, dtype);
    Step({{0, 1}, {0, 70}, {0, 301}});
    Step({{1, 1}, {70, 9}, {301, 17}}, 3);
    for (int i = 0; i < 9; ++i) Step({{2 + i, 1}, {79 + i, 8}, {318 + i, 2}});  // drafts taken back
    Step({{11, 10}, {88, 5}, {327, 200}});
    Step({{21, 0}, {93, 12}, {527, 1}});
  }
}

TEST_F(AttentionPrologueCudaTest, StepsOfARatio128LayerMatchTheCpu) {
  Prepare(128, IndexKeyDType::kFp4);
  Step({{0, 1}, {0, 126}, {0, 700}});
  for (int i = 0; i < 6; ++i) Step({{1 + i, 2}, {126 + i, 8}, {700 + i, 1}}, 2);
  Step({{7, 140}, {132, 125}, {706, 70}});
  Step({{147, 109}, {257, 127}, {776, 120}});
}

}  // namespace
}  // namespace fathom::kernels
