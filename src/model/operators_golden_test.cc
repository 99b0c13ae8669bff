// Every operator alone, on stored inputs, against the independent implementation
// (tests/golden/ops).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/compressor/compressor.h"
#include "kernels/compressor/pooling.h"
#include "kernels/gemm/gemm.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/index_vector.h"
#include "kernels/indexer/indexer.h"
#include "kernels/kv_entry/kv_entry.h"
#include "kernels/moe_route/moe_route.h"
#include "kernels/norm/norm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "model/golden.h"

namespace fathom::model {
namespace {

using kernels::EntrySlot;
using kernels::kIsOfficial;
using kernels::PagedEntries;
using kernels::WeightMatrix;

template <typename T>
class OperatorsGolden : public testing::Test {
 protected:
  OperatorsGolden()
      : device_(device::MakeCpuDevice(2)), stream_(std::move(device_->MakeStream().value())) {}

  // x as the product with `w` sees it, then the product.
  template <typename Y>
  std::vector<Y> Multiply(std::vector<T> x, const WeightMatrix& w, int groups = 1) {
    const int64_t size = w.cols * groups;
    const auto m = static_cast<int64_t>(x.size()) / size;
    if constexpr (kIsOfficial<T>) {
      if (w.is_quantized() && groups == 1) {
        Launch(kernels::QuantizeParams<T>{.x = x.data(),
                                          .x_stride = size,
                                          .y = x.data(),
                                          .y_stride = size,
                                          .num_rows = m,
                                          .size = size},
               *stream_);
      }
    }
    std::vector<Y> y(static_cast<size_t>(m * w.rows));
    Launch(kernels::GemmParams<T, Y>{.x = x.data(),
                                     .x_stride = size,
                                     .m = m,
                                     .w = w,
                                     .groups = groups,
                                     .y = y.data(),
                                     .y_stride = w.rows},
           *stream_);
    return y;
  }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
};

using BothNumerics = testing::Types<BFloat16, float>;
TYPED_TEST_SUITE(OperatorsGolden, BothNumerics);

TYPED_TEST(OperatorsGolden, Linear) {
  using T = TypeParam;
  for (const char* name : {"ops/linear_fp8", "ops/linear_fp8_ragged", "ops/linear_fp4"}) {
    const GoldenFile file(name);
    ExpectMatches(
        this->template Multiply<T>(file.Activations<T>("x"), file.Matrix("weight", "scale")),
        file.Expected<T>("y"));
  }
  const GoldenFile file("ops/linear_bf16");
  const auto x = file.Activations<T>("x");
  ExpectMatches(this->template Multiply<T>(x, file.Matrix("weight")), file.Expected<T>("y"));
  ExpectMatches(this->template Multiply<float>(x, file.Matrix("weight")),
                file.Floats("y_unrounded"));
}

TYPED_TEST(OperatorsGolden, GroupedOutputProjection) {
  using T = TypeParam;
  const GoldenFile file("ops/grouped_output");
  ExpectMatches(
      this->template Multiply<T>(file.Activations<T>("o"), file.Matrix("weight", "scale"), 2),
      file.Expected<T>("y"));
}

TYPED_TEST(OperatorsGolden, RmsNorm) {
  using T = TypeParam;
  const GoldenFile file("ops/rms_norm");
  const auto x = file.Activations<T>("x");
  const auto weight = file.BFloat16s("weight");
  std::vector<T> y(x.size());
  Launch(kernels::RmsNormParams<T>{.x = x.data(),
                                   .weight = weight.data(),
                                   .y = y.data(),
                                   .num_rows = 9,
                                   .size = 384,
                                   .x_stride = 384,
                                   .y_stride = 384,
                                   .eps = 1e-6f},
         *this->stream_);
  ExpectMatches(y, file.Expected<T>("y"));
}

TYPED_TEST(OperatorsGolden, HeadNorm) {
  using T = TypeParam;
  const GoldenFile file("ops/head_norm");
  auto q = file.Activations<T>("q");
  Launch(kernels::HeadNormParams<T>{.q = q.data(), .num_rows = 15, .size = 512, .eps = 1e-6f},
         *this->stream_);
  ExpectMatches(q, file.Expected<T>("y"));
}

TYPED_TEST(OperatorsGolden, Rope) {
  using T = TypeParam;
  const GoldenFile file("ops/rope");
  const auto positions = file.Ints("positions");
  const config::ModelConfig config;
  for (const bool yarn : {false, true}) {
    const std::string prefix = yarn ? "yarn." : "plain.";
    const auto frequencies = kernels::RopeFrequencies(
        config, yarn ? config::LayerKind::kC4 : config::LayerKind::kWindow);
    ExpectMatches(frequencies, file.Floats(prefix + "frequencies"));
    // The angles of the stored frequencies, so that one unit there does not count twice.
    const auto stored = file.Floats(prefix + "frequencies");
    std::vector<float> angles(positions.size() * 64);
    Launch(kernels::RopeAnglesParams{.positions = positions.data(),
                                     .num_tokens = 10,
                                     .frequencies = stored,
                                     .angles = angles.data()},
           *this->stream_);
    const auto cosines = file.Floats(prefix + "cos"), sines = file.Floats(prefix + "sin");
    for (size_t i = 0; i < cosines.size(); ++i) {
      EXPECT_NEAR(angles[2 * i], cosines[i], 1e-7) << i;
      EXPECT_NEAR(angles[2 * i + 1], sines[i], 1e-7) << i;
    }
    for (const bool inverse : {false, true}) {
      auto x = file.Activations<T>("x");
      Launch(kernels::RopeParams<T>{.x = x.data(),
                                    .num_tokens = 10,
                                    .num_heads = 2,
                                    .head_dim = 128,
                                    .rope_dim = 64,
                                    .angles = angles.data(),
                                    .inverse = inverse},
             *this->stream_);
      ExpectMatches(x, file.Expected<T>(prefix + (inverse ? "inverse" : "forward")));
    }
  }
}

TYPED_TEST(OperatorsGolden, HyperConnection) {
  using T = TypeParam;
  const GoldenFile file("ops/hyper_connection");
  auto streams = file.Activations<T>("streams");
  const auto y = file.Activations<T>("y");
  const auto base = file.Floats("base"), scale = file.Floats("scale");
  const auto head_base = file.Floats("head_base"), head_scale = file.Floats("head_scale");
  const kernels::HyperConnectionConstants constants{1e-6f, 1e-6f, 20};
  const std::vector<BFloat16> ones(128, BFloat16(1.0f));
  const auto mixes = this->template Multiply<float>(streams, file.Matrix("fn"));
  std::vector<T> in(6 * 128), head(6 * 128);
  std::vector<float> post(6 * 4), comb(6 * 16);
  Launch(kernels::HyperConnectionPreParams<T>{.streams = streams.data(),
                                              .num_tokens = 6,
                                              .hidden = 128,
                                              .mixes = mixes.data(),
                                              .scale = scale.data(),
                                              .base = base.data(),
                                              .norm_weight = ones.data(),
                                              .constants = constants,
                                              .y = in.data(),
                                              .post = post.data(),
                                              .comb = comb.data()},
         *this->stream_);
  ExpectMatches(post, file.Floats("post"));
  ExpectMatches(comb, file.Floats("comb"));
  // The stored input is before the norm.
  auto expected_in = file.Expected<T>("in");
  std::vector<T> normed(expected_in.size());
  for (size_t i = 0; i < normed.size(); ++i) normed[i] = kernels::FromFloat<T>(expected_in[i]);
  for (int64_t t = 0; t < 6; ++t) {
    T* row = normed.data() + t * 128;
    kernels::RmsNormRow(row, ones.data(), 1e-6f, 128, row);
  }
  std::vector<float> expected_normed;
  for (const T x : normed) expected_normed.push_back(kernels::ToFloat(x));
  ExpectMatches(in, expected_normed);

  const auto head_mixes = this->template Multiply<float>(streams, file.Matrix("head_fn"));
  Launch(kernels::HyperConnectionHeadParams<T>{.streams = streams.data(),
                                               .num_tokens = 6,
                                               .hidden = 128,
                                               .mixes = head_mixes.data(),
                                               .scale = head_scale.data(),
                                               .base = head_base.data(),
                                               .constants = constants,
                                               .y = head.data()},
         *this->stream_);
  ExpectMatches(head, file.Expected<T>("head"));
  Launch(kernels::HyperConnectionPostParams<T>{.streams = streams.data(),
                                               .num_tokens = 6,
                                               .hidden = 128,
                                               .y = y.data(),
                                               .post = post.data(),
                                               .comb = comb.data()},
         *this->stream_);
  ExpectMatches(streams, file.Expected<T>("out"));
}

TYPED_TEST(OperatorsGolden, Routing) {
  using T = TypeParam;
  const GoldenFile file("ops/routing");
  auto logits = this->template Multiply<float>(file.Activations<T>("x"), file.Matrix("gate"));
  const auto bias = file.Floats("bias");
  std::vector<int32_t> ids(40 * 6);
  std::vector<float> weights(40 * 6);
  Launch(kernels::MoeRouteParams{.logits = logits.data(),
                                 .num_tokens = 40,
                                 .num_experts = 24,
                                 .num_chosen = 6,
                                 .bias = bias.data(),
                                 .scaling = 1.5f,
                                 .expert_ids = ids.data(),
                                 .weights = weights.data()},
         *this->stream_);
  ExpectMatches(logits, file.Floats("scores"));
  // Stored best first; ours ascend.
  const auto best = file.Ints("ids");
  const auto best_weights = file.Floats("weights");
  for (size_t t = 0; t < 40; ++t) {
    std::vector<std::pair<int32_t, float>> expected;
    for (size_t i = 0; i < 6; ++i) expected.emplace_back(best[t * 6 + i], best_weights[t * 6 + i]);
    std::sort(expected.begin(), expected.end());
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(ids[t * 6 + i], expected[i].first) << t;
      EXPECT_NEAR(weights[t * 6 + i], expected[i].second, 1e-6) << t;
    }
  }
}

// One expert for every token: the sum over experts has one term.
template <typename T>
std::vector<T> RunExpert(const GoldenFile& file, float limit, bool shared, device::Stream& stream) {
  const kernels::ExpertMatrices expert{file.Matrix("w1.weight", "w1.scale"),
                                       file.Matrix("w2.weight", "w2.scale"),
                                       file.Matrix("w3.weight", "w3.scale")};
  auto x = file.Activations<T>("x");
  if constexpr (kIsOfficial<T>) {
    Launch(kernels::QuantizeParams<T>{.x = x.data(),
                                      .x_stride = 128,
                                      .y = x.data(),
                                      .y_stride = 128,
                                      .num_rows = 6,
                                      .size = 128},
           stream);
  }
  std::vector<T> y(6 * 128), t(12 * 128), pair_y(12 * 128);
  std::vector<int32_t> pair_token(12), pair_of(12), first_pair(4), ids(6, 0);
  std::vector<float> pair_weight(12);
  const auto weights = file.Floats("weight");
  Launch(kernels::ExpertParams<T>{.x = x.data(),
                                  .num_tokens = 6,
                                  .hidden = 128,
                                  .experts = {&expert, 1},
                                  .shared = shared ? &expert : nullptr,
                                  .num_chosen = shared ? 0 : 1,
                                  .expert_ids = ids.data(),
                                  .weights = weights.data(),
                                  .swiglu_limit = limit,
                                  .y = y.data(),
                                  .workspace = {.max_tokens = 4,
                                                .max_intermediate = 128,
                                                .t = t.data(),
                                                .y = pair_y.data(),
                                                .pair_token = pair_token.data(),
                                                .pair_of = pair_of.data(),
                                                .first_pair = first_pair.data(),
                                                .pair_weight = pair_weight.data()}},
         stream);
  return y;
}

TYPED_TEST(OperatorsGolden, Experts) {
  using T = TypeParam;
  for (const char* name : {"ops/expert_fp4", "ops/expert_fp8"}) {
    const GoldenFile file(name);
    ExpectMatches(RunExpert<T>(file, 10, false, *this->stream_), file.Expected<T>("routed"));
    ExpectMatches(RunExpert<T>(file, 10, true, *this->stream_), file.Expected<T>("shared"));
    ExpectMatches(RunExpert<T>(file, 0, true, *this->stream_), file.Expected<T>("unclamped"));
  }
}

// A pool of one page that holds `entries` of `data_bytes` and `scale_bytes`.
struct OnePage {
  OnePage(int entries, int data_bytes, int scale_bytes)
      : bytes(static_cast<size_t>(entries * (data_bytes + scale_bytes))),
        view{bytes.data(), static_cast<int64_t>(bytes.size()), 0, entries, data_bytes,
             scale_bytes} {}
  std::vector<std::byte> bytes;
  PagedEntries view;
};

TYPED_TEST(OperatorsGolden, KvEntryOfAPooledRow) {
  using T = TypeParam;
  const GoldenFile file("ops/kv_entry");
  const auto pooled = file.Floats("pooled");
  const auto norm = file.BFloat16s("norm");
  const auto frequencies = kernels::RopeFrequencies(config::ModelConfig(), config::LayerKind::kC4);
  for (const int ratio : {4, 128}) {
    // The first row of each group has all the weight, so it is what is pooled.
    const int tokens = 6 * ratio, width = ratio == 4 ? 1024 : 512;
    std::vector<float> c(static_cast<size_t>(tokens * width)), z(c.size(), -1000.0f);
    const std::vector<float> ape(static_cast<size_t>(ratio * width));
    for (int j = 0; j < 6; ++j) {
      const int64_t row = int64_t{j} * ratio * width + width - 512;
      std::copy_n(pooled.begin() + j * 512, 512, c.begin() + row);
      std::fill_n(z.begin() + row, 512, 0.0f);
    }
    const std::vector<int32_t> cu{0, tokens}, zero{0};
    kernels::BatchView batch{.cu_seqlens_q = cu,
                             .num_computed = zero,
                             .block_tables = zero,
                             .max_blocks = 1,
                             .state_slots = zero};
    std::vector<kernels::CompressedEntry> entries(7);
    ASSERT_EQ(kernels::PlanCompressedEntries(batch, ratio, entries), 6);
    entries.resize(6);
    const int data_bytes = kernels::KvDataBytes<T>(512, 64);
    OnePage page(6, data_bytes, kIsOfficial<T> ? 8 : 0);
    std::vector<std::byte> state(1 << 20);
    Launch(kernels::CompressorParams<T>{.batch = batch,
                                        .entries = entries,
                                        .ratio = ratio,
                                        .dim = 512,
                                        .rope_dim = 64,
                                        .c = c.data(),
                                        .z = z.data(),
                                        .ape = ape.data(),
                                        .norm_weight = norm.data(),
                                        .norm_eps = 1e-6f,
                                        .frequencies = frequencies,
                                        .cache = page.view,
                                        .state = state.data(),
                                        .ring_rows = 16,
                                        .max_rollback = 8},
           *this->stream_);
    std::vector<T> values;
    for (int j = 0; j < 6; ++j) {
      float entry[512];
      kernels::LoadKvEntry<T>(page.view.At(0, j), 512, 64, entry);
      for (const float v : entry) values.push_back(kernels::FromFloat<T>(v));
    }
    ExpectMatches(values, file.Expected<T>("entry_" + std::to_string(ratio)));
    if (!kIsOfficial<T>) continue;
    const auto codes = file.Bytes("codes_" + std::to_string(ratio));
    const auto scales = file.Bytes("scales_" + std::to_string(ratio));
    for (int j = 0; j < 6; ++j) {
      const EntrySlot slot = page.view.At(0, j);
      EXPECT_TRUE(std::equal(slot.data, slot.data + 448, codes.data() + j * 448)) << j;
      EXPECT_TRUE(std::equal(slot.scales, slot.scales + 7, scales.data() + j * 7)) << j;
      EXPECT_EQ(slot.scales[7], std::byte{0});
    }
  }
}

TYPED_TEST(OperatorsGolden, SparseAttention) {
  using T = TypeParam;
  const GoldenFile file("ops/sparse_attention");
  auto q = file.Activations<T>("q");
  const auto keys = file.Floats("keys"), sink = file.Floats("sink");
  const auto mask = file.Bytes("mask");
  OnePage page(90, kernels::KvDataBytes<T>(512, 64), kIsOfficial<T> ? 8 : 0);
  for (int j = 0; j < 90; ++j) {
    kernels::StoreKvEntry<T>(keys.data() + j * 512, 512, 64, page.view.At(0, j));
  }
  // The first visible key is the token's own, in a window of one; the others are selected entries.
  std::vector<T> fresh(5 * 512);
  std::vector<int32_t> selected(5 * 90), counts(5), token_seq(5, 0), positions{0, 1, 2, 3, 4};
  for (size_t t = 0; t < 5; ++t) {
    bool first = true;
    for (int j = 0; j < 90; ++j) {
      if (mask[t * 90 + static_cast<size_t>(j)] == std::byte{0}) continue;
      if (first) {
        for (size_t i = 0; i < 512; ++i) {
          fresh[t * 512 + i] = kernels::FromFloat<T>(keys[static_cast<size_t>(j) * 512 + i]);
        }
        first = false;
      } else {
        selected[t * 90 + static_cast<size_t>(counts[t]++)] = j;
      }
    }
    ASSERT_FALSE(first);
  }
  const std::vector<int32_t> cu{0, 5}, zero{0};
  std::vector<float> scratch(static_cast<size_t>(2 * kernels::AttentionScratchFloats(4, 512, 91)));
  Launch(kernels::SparseAttentionParams<T>{.batch = {.cu_seqlens_q = cu,
                                                     .num_computed = zero,
                                                     .token_seq = token_seq,
                                                     .positions = positions,
                                                     .block_tables = zero,
                                                     .max_blocks = 1,
                                                     .window_tables = zero,
                                                     .max_window_pages = 1,
                                                     .first_window_page = zero,
                                                     .state_slots = zero},
                                           .q = q.data(),
                                           .num_heads = 4,
                                           .head_dim = 512,
                                           .rope_dim = 64,
                                           .window = 1,
                                           .scale = 1.0f / std::sqrt(512.0f),
                                           .sink = sink.data(),
                                           .fresh = fresh.data(),
                                           .pages = page.view,
                                           .ratio = 4,
                                           .compressed = page.view,
                                           .selected = selected.data(),
                                           .counts = counts.data(),
                                           .topk = 90,
                                           .scratch = scratch.data(),
                                           .max_keys = 91},
         *this->stream_);
  ExpectMatches(q, file.Expected<T>("o"));
}

TEST(OperatorsGoldenOfficial, Quantization) {
  for (const int block : {128, 64}) {
    const GoldenFile file("ops/quantize_fp8_" + std::to_string(block));
    const auto x = file.Floats("x");
    const auto codes = file.Bytes("codes"), scales = file.Bytes("scales");
    for (size_t i = 0; i < x.size(); i += static_cast<size_t>(block)) {
      std::vector<uint8_t> actual(static_cast<size_t>(block));
      const uint8_t scale = kernels::QuantizeFp8(x.data() + i, block, actual.data());
      EXPECT_EQ(scale, static_cast<uint8_t>(scales[i / static_cast<size_t>(block)]));
      for (size_t k = 0; k < actual.size(); ++k) {
        ASSERT_EQ(actual[k], static_cast<uint8_t>(codes[i + k])) << x[i + k];
      }
    }
  }
  const GoldenFile file("ops/quantize_fp8_128");
  const auto x = file.BFloat16s("x");
  std::vector<BFloat16> values(x.size());
  for (size_t row = 0; row < 16; ++row) {
    kernels::QuantizeRow(x.data() + row * 256, 256, values.data() + row * 256);
  }
  const auto expected = file.BFloat16s("values");
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i].bits, expected[i].bits) << i;

  const GoldenFile fp4("ops/quantize_fp4");
  const auto x4 = fp4.Floats("x");
  const auto codes = fp4.Bytes("codes"), scales = fp4.Bytes("scales");
  for (size_t i = 0; i < x4.size(); i += 32) {
    uint8_t actual[16];
    EXPECT_EQ(kernels::QuantizeFp4(x4.data() + i, 32, actual),
              static_cast<uint8_t>(scales[i / 32]));
    for (size_t k = 0; k < 16; ++k)
      ASSERT_EQ(actual[k], static_cast<uint8_t>(codes[i / 2 + k])) << i;
  }
}

TEST(OperatorsGoldenOfficial, IndexVectors) {
  const GoldenFile file("ops/index_vectors");
  auto x = file.Floats("x");
  const auto rotated = file.Floats("rotated");
  for (size_t row = 0; row < 24; ++row) {
    float* v = x.data() + row * 128;
    kernels::RotateIndexVector<BFloat16>(v, 128);
    std::byte data[128], scales[4];
    kernels::StoreIndexKey(rotated.data() + row * 128, 128, config::IndexKeyDType::kFp4,
                           {data, scales});
    EXPECT_TRUE(std::equal(data, data + 64, file.Bytes("codes").data() + row * 64)) << row;
    EXPECT_TRUE(std::equal(scales, scales + 4, file.Bytes("scales").data() + row * 4)) << row;
    kernels::StoreIndexKey(rotated.data() + row * 128, 128, config::IndexKeyDType::kFp8,
                           {data, scales});
    EXPECT_TRUE(std::equal(data, data + 128, file.Bytes("fp8_codes").data() + row * 128)) << row;
    float scale;
    std::copy(scales, scales + 4, reinterpret_cast<std::byte*>(&scale));
    EXPECT_EQ(scale, Ue8m0ToFloat(static_cast<uint8_t>(file.Bytes("fp8_scales")[row])));
  }
  std::vector<BFloat16> actual;
  for (const float v : x) actual.emplace_back(v);
  ExpectMatches(actual, rotated);
}

TEST(OperatorsGoldenOfficial, IndexSelection) {
  const GoldenFile file("ops/index_scores");
  const auto q = file.BFloat16s("q"), projected = file.BFloat16s("projected");
  const auto keys = file.Floats("k");
  auto positions = file.Ints("positions");
  // There are 61 entries, even for a token that would see more.
  for (int32_t& position : positions) position = std::min(position, 4 * 61 - 1);
  OnePage page(61, 64, 4);
  for (int j = 0; j < 61; ++j) {
    const EntrySlot slot = page.view.At(0, j);
    kernels::StoreIndexKey(keys.data() + j * 128, 128, config::IndexKeyDType::kFp4, slot);
    float stored[128];
    kernels::LoadIndexKey(slot, 128, config::IndexKeyDType::kFp4, stored);
    ASSERT_TRUE(std::equal(stored, stored + 128, keys.begin() + j * 128)) << j;
  }
  const std::vector<int32_t> token_seq(13, 0), zero{0};
  std::vector<uint64_t> scratch(2 * 64);
  std::vector<int32_t> selected(13 * 16, -1), counts(13);
  auto device = device::MakeCpuDevice(2);
  auto stream = device->MakeStream();
  Launch(kernels::IndexSelectParams<BFloat16>{.batch = {.token_seq = token_seq,
                                                        .positions = positions,
                                                        .block_tables = zero,
                                                        .max_blocks = 1},
                                              .q = q.data(),
                                              .projected = projected.data(),
                                              .weight_scale =
                                                  static_cast<float>(1 / std::sqrt(128.0 * 16.0)),
                                              .num_heads = 16,
                                              .dim = 128,
                                              .topk = 16,
                                              .keys = page.view,
                                              .scratch = scratch.data(),
                                              .max_entries = 64,
                                              .selected = selected.data(),
                                              .counts = counts.data()},
         **stream);
  EXPECT_EQ(selected, file.Ints("selected"));
}

TEST(OperatorsGoldenBoth, CompressorPooling) {
  for (const char* name : {"ops/compressor_4", "ops/compressor_4_index"}) {
    const GoldenFile file(name);
    const auto c = file.Floats("content"), ape = file.Floats("ape"),
               expected = file.Floats("pooled");
    auto z = file.Floats("gate");
    const size_t width = static_cast<size_t>(file.Info("content").shape[1]), dim = width / 2;
    for (size_t i = 0; i < z.size(); ++i) z[i] += ape[i % (4 * width)];
    std::vector<float> pooled(expected.size());
    for (size_t j = 0; j < expected.size() / dim; ++j) {
      std::vector<kernels::PoolRow> rows;
      for (size_t p = j == 0 ? 0 : 4 * j - 4; p < 4 * j + 4; ++p) {
        const size_t offset = p * width + (p >= 4 * j ? dim : 0);
        rows.push_back({c.data() + offset, z.data() + offset});
      }
      kernels::PoolSoftmax(rows.data(), static_cast<int>(rows.size()), static_cast<int>(dim),
                           pooled.data() + j * dim);
    }
    ExpectMatches(pooled, expected);
  }
  const GoldenFile file("ops/compressor_128");
  const auto c = file.Floats("content"), ape = file.Floats("ape");
  auto z = file.Floats("gate");
  std::vector<float> m(512), l(512), acc(512);
  kernels::OnlineSoftmax sum{m.data(), l.data(), acc.data()};
  sum.Clear(512);
  for (size_t i = 0; i < z.size(); ++i) z[i] += ape[i];
  for (size_t p = 0; p < 128; ++p) sum.Merge({c.data() + p * 512, z.data() + p * 512}, 512);
  for (size_t i = 0; i < 512; ++i) acc[i] /= l[i];
  ExpectMatches(acc, file.Floats("pooled"));
}

}  // namespace
}  // namespace fathom::model
