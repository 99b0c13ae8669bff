// Two boundaries and the head on a GPU against the CPU's operators one after the other. Sums are
// taken in another order, so BF16 results may be one unit off, few of them.
#include "kernels/hyper_connection/hyper_connection_cuda.h"

#include <cmath>

#include "kernels/cuda_testing.h"
#include "kernels/gemm/gemm.h"
#include "kernels/hyper_connection/boundary_large.h"
#include "kernels/hyper_connection/mixer_testing.h"
#include "kernels/norm/norm.h"

namespace fathom::kernels {
namespace {

constexpr HyperConnectionConstants kConstants{1e-6f, 1e-6f, 20};

class HyperConnectionCudaTest : public CudaTest {
 protected:
  // The CPU's pre: h, and what the next post needs.
  struct Pre {
    std::vector<BFloat16> h;
    std::vector<float> post, comb;
  };
  Pre PreOnCpu(const TestMixer& m, const std::vector<BFloat16>& streams, int64_t tokens,
               int64_t hidden) {
    std::vector<float> mixes(static_cast<size_t>(tokens * 24));
    Launch(GemmParams<BFloat16, float>{.x = streams.data(),
                                       .x_stride = 4 * hidden,
                                       .m = tokens,
                                       .w = m.fn.view,
                                       .y = mixes.data(),
                                       .y_stride = 24},
           *cpu_stream_);
    Pre pre;
    pre.h.resize(static_cast<size_t>(tokens * hidden));
    pre.post.resize(static_cast<size_t>(tokens * 4));
    pre.comb.resize(static_cast<size_t>(tokens * 16));
    Launch(HyperConnectionPreParams<BFloat16>{.streams = streams.data(),
                                              .num_tokens = tokens,
                                              .hidden = hidden,
                                              .mixes = mixes.data(),
                                              .scale = m.scale.data(),
                                              .base = m.base.data(),
                                              .norm_weight = m.norm.data(),
                                              .constants = kConstants,
                                              .y = pre.h.data(),
                                              .post = pre.post.data(),
                                              .comb = pre.comb.data()},
           *cpu_stream_);
    return pre;
  }

  static void ExpectClose(const std::vector<BFloat16>& actual,
                          const std::vector<BFloat16>& expected, const char* what,
                          float near_zero = 0x1p-10f) {
    size_t different = 0, far = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const float a = ToFloat(actual[i]), e = ToFloat(expected[i]);
      different += a == e ? 0 : 1;
      far += std::fabs(a - e) <= std::fabs(e) * 0x1p-6f + 0x1p-10f ? 0 : 1;
      ASSERT_LE(std::fabs(a - e), std::fabs(e) * 0x1p-6f + near_zero) << what << " " << i;
    }
    EXPECT_LE(different, expected.size() / 50 + 2) << what;
    EXPECT_LE(far, expected.size() / 1000 + 1) << what;
  }

  void Check(int64_t tokens, int64_t hidden, bool experts) {
    const auto streams = RandomActivations<BFloat16>(tokens * 4 * hidden, 1);
    const auto y = RandomActivations<BFloat16>(tokens * hidden, 2);
    const TestMixer first = RandomMixer(24, hidden, 10), second = RandomMixer(24, hidden, 20);
    const TestMixer head = RandomMixer(4, hidden, 30);

    const Pre pre1 = PreOnCpu(first, streams, tokens, hidden);
    std::vector<BFloat16> after = streams;
    Launch(HyperConnectionPostParams<BFloat16>{.streams = after.data(),
                                               .num_tokens = tokens,
                                               .hidden = hidden,
                                               .y = y.data(),
                                               .post = pre1.post.data(),
                                               .comb = pre1.comb.data()},
           *cpu_stream_);
    const Pre pre2 = PreOnCpu(second, after, tokens, hidden);

    const int64_t rows = (tokens + 7) / 8 * 8;
    const auto gpu_streams = Upload(streams);
    const auto post_a = Poisoned(tokens * 16), comb_a = Poisoned(tokens * 64);
    const auto final_a = Poisoned(tokens * 64), final_b = Poisoned(tokens * 64);
    const auto post_b = Poisoned(tokens * 16), comb_b = Poisoned(tokens * 64);
    const auto h = Poisoned(rows * hidden * 2), codes = Poisoned(rows * hidden);
    const auto scales = Poisoned(rows * hidden / 32);
    std::vector<device::Buffer> kept;
    const auto keep = [&](device::Buffer buffer) {
      kept.push_back(std::move(buffer));
      return kept.back().data();
    };
    const auto params = [&](const TestMixer& m) {
      return CudaHyperConnectionParams{
          .streams = As<__nv_bfloat16>(gpu_streams),
          .num_tokens = tokens,
          .hidden = hidden,
          .fn = reinterpret_cast<const float*>(keep(Upload(m.fn.data))),
          .scale = reinterpret_cast<const float*>(keep(Upload(m.scale))),
          .base = reinterpret_cast<const float*>(keep(Upload(m.base))),
          .norm_weight = reinterpret_cast<const __nv_bfloat16*>(keep(Upload(m.norm))),
          .constants = kConstants,
          .h = {As<__nv_bfloat16>(h), rows / 8},
          .h_fp8 = {As<uint8_t>(codes), As<float>(scales), rows / 8},
          .scratch = reinterpret_cast<float*>(
              keep(Poisoned(BoundaryScratchFloats(tokens, hidden) * int64_t{sizeof(float)})))};
    };
    const auto download_h = [&](int64_t count) {
      const auto tiles = Download<BFloat16>(h);
      std::vector<BFloat16> values(static_cast<size_t>(count * hidden));
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t k = 0; k < hidden; ++k) {
          values[static_cast<size_t>(t * hidden + k)] =
              tiles[static_cast<size_t>(Bf16TileOffset(t, k, rows / 8) / 2)];
        }
      }
      return values;
    };

    CudaHyperConnectionParams p = params(first);
    p.after = {As<float>(post_a), As<float>(comb_a), As<float>(final_a)};
    Launch(p, *gpu_stream_);
    ExpectClose(download_h(tokens), pre1.h, "first input");

    p = params(second);
    p.before = {As<float>(post_a), As<float>(comb_a), As<float>(final_a)};
    p.after = {As<float>(post_b), As<float>(comb_b), As<float>(final_b)};
    if (experts) {  // y as a shared row that is zero and one pair elsewhere
      std::vector<BFloat16> pairs(static_cast<size_t>(2 * tokens * hidden));
      std::copy(y.begin(), y.end(), pairs.begin() + static_cast<std::ptrdiff_t>(y.size()));
      std::vector<int32_t> pair_of;
      for (int64_t t = 0; t < tokens; ++t) pair_of.push_back(static_cast<int32_t>(tokens + t));
      p.output = {reinterpret_cast<const __nv_bfloat16*>(keep(Upload(pairs))),
                  reinterpret_cast<const int32_t*>(keep(Upload(pair_of))), 1};
    } else {
      p.output.y = reinterpret_cast<const __nv_bfloat16*>(keep(Upload(y)));
    }
    Launch(p, *gpu_stream_);
    ExpectClose(Download<BFloat16>(gpu_streams), after, "streams");
    const auto h2 = download_h(tokens);
    // A stream's value of up to 4 that rounds the other way moves a sum near zero by 2^-6 * pre.
    ExpectClose(h2, pre2.h, "second input", 0x1p-7f);
    // Its FP8 form is exactly the quantized BF16 form.
    const HostFp8Tiles expected = MakeFp8Tiles(h2, tokens, hidden, rows);
    const auto actual_codes = Download<uint8_t>(codes);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < hidden; ++k) {
        const auto at = static_cast<size_t>(Fp8TileOffset(t, k, rows / 8));
        ASSERT_EQ(actual_codes[at], expected.codes[at]) << t << " " << k;
      }
    }

    // The head of some tokens, without a sub-layer before it.
    const std::vector<int32_t> wanted{static_cast<int32_t>(tokens - 1)};
    std::vector<float> mixes(4);
    const BFloat16* row = after.data() + (tokens - 1) * 4 * hidden;
    Launch(GemmParams<BFloat16, float>{.x = row,
                                       .x_stride = 4 * hidden,
                                       .m = 1,
                                       .w = head.fn.view,
                                       .y = mixes.data(),
                                       .y_stride = 4},
           *cpu_stream_);
    std::vector<BFloat16> out(static_cast<size_t>(hidden));
    Launch(HyperConnectionHeadParams<BFloat16>{.streams = row,
                                               .num_tokens = 1,
                                               .hidden = hidden,
                                               .mixes = mixes.data(),
                                               .scale = head.scale.data(),
                                               .base = head.base.data(),
                                               .constants = kConstants,
                                               .y = out.data()},
           *cpu_stream_);
    RmsNormRow(out.data(), head.norm.data(), kConstants.norm_eps, hidden, out.data());
    p = params(head);
    p.num_tokens = 1;
    p.rows = reinterpret_cast<const int32_t*>(keep(Upload(wanted)));
    Launch(p, *gpu_stream_);
    ExpectClose(download_h(1), out, "head");
  }
};

// Two boundaries, experts between them, and the head, of some of the tokens of a whole step.
class PrefillBoundaryCudaTest : public HyperConnectionCudaTest {
 protected:
  static constexpr int kMostChosen = 8;

  void SetUp() override {
    HyperConnectionCudaTest::SetUp();
    if (gpu_ == nullptr) return;
    const int64_t values = kWholeStep * hidden_;
    streams_ = RandomActivations<BFloat16>(4 * values, 1);
    gpu_pairs_ = Upload(RandomActivations<BFloat16>((1 + kMostChosen) * values, 2));
    for (const int mixes : {24, 24, 4}) {
      const TestMixer m = RandomMixer(mixes, hidden_, 10 + static_cast<uint32_t>(mixers_.size()));
      mixers_.push_back({Upload(m.fn.data), Upload(m.scale), Upload(m.base), Upload(m.norm)});
    }
  }

  // Each token's streams, input and its FP8 codes, gates, and input of the head.
  std::vector<std::vector<uint8_t>> Run(const TestStep& step, int num_chosen) {
    const int64_t tokens = step.num_tokens, rows = (tokens + 7) / 8 * 8;
    const auto begin = streams_.begin() + step.first * 4 * hidden_;
    const auto streams = Upload(std::vector<BFloat16>(begin, begin + tokens * 4 * hidden_));
    const auto post_a = Poisoned(tokens * 16), comb_a = Poisoned(tokens * 64);
    const auto final_a = Poisoned(tokens * 64), final_b = Poisoned(tokens * 64);
    const auto post_b = Poisoned(tokens * 16), comb_b = Poisoned(tokens * 64);
    const auto h = Poisoned(rows * hidden_ * 2), codes = Poisoned(rows * hidden_);
    const auto scales = Poisoned(rows * hidden_ / 32);
    const auto scratch = Poisoned(BoundaryScratchFloats(tokens, hidden_) * 4);
    std::vector<int32_t> pair_of, all;
    for (int t = 0; t < tokens; ++t) {
      all.push_back(t);
      for (int k = 1; k <= num_chosen; ++k) pair_of.push_back(kWholeStep * k + t);
    }
    const auto gpu_pair_of = Upload(pair_of), rows_of_head = Upload(all);
    const auto boundary = [&](const Weights& w) {
      return CudaHyperConnectionParams{.streams = As<__nv_bfloat16>(streams),
                                       .num_tokens = tokens,
                                       .prefill = true,
                                       .hidden = hidden_,
                                       .fn = As<const float>(w.fn),
                                       .scale = As<const float>(w.scale),
                                       .base = As<const float>(w.base),
                                       .norm_weight = As<const __nv_bfloat16>(w.norm),
                                       .constants = kConstants,
                                       .h = {As<__nv_bfloat16>(h), rows / 8},
                                       .h_fp8 = {As<uint8_t>(codes), As<float>(scales), rows / 8},
                                       .scratch = As<float>(scratch)};
    };
    // Row `first` of each part is the step's first token.
    const SublayerOutput output{As<const __nv_bfloat16>(gpu_pairs_) + step.first * hidden_,
                                As<const int32_t>(gpu_pair_of), num_chosen};
    std::vector<std::vector<uint8_t>> out(static_cast<size_t>(tokens));
    const auto append = [&](const device::Buffer& buffer, int64_t bytes) {
      const auto all_bytes = Download<uint8_t>(buffer);
      for (int64_t t = 0; t < tokens; ++t) {
        const auto row = all_bytes.begin() + t * bytes;
        auto& to = out[static_cast<size_t>(t)];
        to.insert(to.end(), row, row + bytes);
      }
    };
    const auto append_h = [&](bool fp8) {
      const auto values = Download<uint8_t>(h), all_codes = Download<uint8_t>(codes);
      for (int64_t t = 0; t < tokens; ++t) {
        auto& to = out[static_cast<size_t>(t)];
        for (int64_t k = 0; k < hidden_; ++k) {
          const auto at = static_cast<size_t>(Bf16TileOffset(t, k, rows / 8));
          to.insert(to.end(), {values[at], values[at + 1]});
          if (fp8) to.push_back(all_codes[static_cast<size_t>(Fp8TileOffset(t, k, rows / 8))]);
        }
      }
    };
    CudaHyperConnectionParams p = boundary(mixers_[0]);
    p.after = {As<float>(post_a), As<float>(comb_a), As<float>(final_a)};
    Launch(p, *gpu_stream_);
    append_h(true);
    p = boundary(mixers_[1]);
    p.output = output;
    p.before = {As<float>(post_a), As<float>(comb_a), As<float>(final_a)};
    p.after = {As<float>(post_b), As<float>(comb_b), As<float>(final_b)};
    Launch(p, *gpu_stream_);
    append_h(true);
    append(streams, 8 * hidden_);
    append(post_b, 16);
    append(comb_b, 64);
    p = boundary(mixers_[2]);
    p.output = output;
    p.before = {As<float>(post_b), As<float>(comb_b), As<float>(final_b)};
    p.rows = As<const int32_t>(rows_of_head);
    Launch(p, *gpu_stream_);
    append_h(false);
    return out;
  }

  struct Weights {
    device::Buffer fn, scale, base, norm;
  };
  const int64_t hidden_ = kIsRacecheck ? 256 : 2048;
  std::vector<BFloat16> streams_;
  std::vector<Weights> mixers_;
  device::Buffer gpu_pairs_;
};

TEST_F(PrefillBoundaryCudaTest, GivesATokenTheSameBitsInEveryStep) {
  for (const int num_chosen : {6, kMostChosen}) {
    const auto whole = Run({0, kWholeStep}, num_chosen);
    for (const TestStep& step : TestSteps()) {
      const auto tokens = Run(step, num_chosen);
      for (int t = 0; t < step.num_tokens; ++t) {
        ASSERT_EQ(tokens[static_cast<size_t>(t)], whole[static_cast<size_t>(step.first + t)])
            << "token " << t << " of " << step.num_tokens << ", " << num_chosen << " experts";
      }
    }
  }
}

TEST_F(HyperConnectionCudaTest, BoundariesOfFewTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({1, 2, 7, 16}, {1, 16})) {
    Check(tokens, 256, false);
    Check(tokens, 1024, true);
  }
}

// Clusters of 14 and 16 blocks.
TEST_F(HyperConnectionCudaTest, WideBoundariesOfFewTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({3, 11}, {1, 7})) Check(tokens, 4096, tokens <= 3);
  for (const int64_t tokens : Sweep<int64_t>({5, 12}, {1})) Check(tokens, 7168, tokens > 5);
}

TEST_F(HyperConnectionCudaTest, BoundariesOfManyTokensMatchTheCpu) {
  for (const int64_t tokens : Sweep<int64_t>({17, 67, 128, 256, 300}, {67, 300})) {
    Check(tokens, 256, false);
    Check(tokens, 1024, true);
  }
  Check(15, 7168, true);
  Check(64, 7168, false);
  Check(270, 7168, true);
}

// Those of fewer tokens are no large boundaries; of more there is no room for the packets.
TEST(LargeBoundaryTest, ExchangesDecodesOfUpTo64TokensOfFlashAnd36OfPro) {
  struct Model {
    int64_t hidden, first, last;
  };
  for (const Model& m : {Model{4096, 17, 64}, Model{7168, 15, 36}}) {
    for (int64_t tokens = 1; tokens <= 256; ++tokens) {
      EXPECT_EQ(LargeBoundaryExchanges(tokens, m.hidden, 6), m.first <= tokens && tokens <= m.last)
          << tokens << " tokens of " << m.hidden;
    }
  }
  // Sizes that its kernels do not take.
  EXPECT_TRUE(LargeBoundaryExchanges(20, 8192, 8));
  EXPECT_FALSE(LargeBoundaryExchanges(20, 8192, 9));
  EXPECT_FALSE(LargeBoundaryExchanges(20, 8320, 8));
}

}  // namespace
}  // namespace fathom::kernels
