#include "checkpoint/tensor_specs.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/tensor_list.h"
#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

using Table = std::map<std::string, std::string>;

Table Describe(const std::string& config_text) {
  Table table;
  for (const TensorInfo& tensor : ExpectedTensors(MustParseConfig(config_text))) {
    const bool added =
        table
            .emplace(tensor.name, std::string(Name(tensor.dtype)) + " " + FormatShape(tensor.shape))
            .second;
    EXPECT_TRUE(added) << tensor.name << " stands twice";
  }
  return table;
}

void ExpectRows(const Table& table, const Table& rows) {
  for (const auto& [name, description] : rows) {
    const auto found = table.find(name);
    ASSERT_NE(found, table.end()) << name;
    EXPECT_EQ(found->second, description) << name;
  }
}

TEST(TensorSpecs, OfFlashAreThePublishedOnes) {
  const Table table = Describe(PresetText("flash"));
  ExpectRows(table, {
                        {"embed.weight", "BF16 [129280, 4096]"},
                        {"head.weight", "BF16 [129280, 4096]"},
                        {"norm.weight", "BF16 [4096]"},
                        {"hc_head_fn", "F32 [4, 16384]"},
                        {"hc_head_base", "F32 [4]"},
                        {"hc_head_scale", "F32 [1]"},
                        {"layers.0.hc_attn_fn", "F32 [24, 16384]"},
                        {"layers.0.hc_ffn_base", "F32 [24]"},
                        {"layers.0.hc_ffn_scale", "F32 [3]"},
                        {"layers.0.attn_norm.weight", "BF16 [4096]"},
                        {"layers.0.attn.wq_a.weight", "F8_E4M3 [1024, 4096]"},
                        {"layers.0.attn.wq_a.scale", "F8_E8M0 [8, 32]"},
                        {"layers.0.attn.q_norm.weight", "BF16 [1024]"},
                        {"layers.0.attn.wq_b.weight", "F8_E4M3 [32768, 1024]"},
                        {"layers.0.attn.wq_b.scale", "F8_E8M0 [256, 8]"},
                        {"layers.0.attn.wkv.weight", "F8_E4M3 [512, 4096]"},
                        {"layers.0.attn.wkv.scale", "F8_E8M0 [4, 32]"},
                        {"layers.0.attn.wo_a.weight", "F8_E4M3 [8192, 4096]"},
                        {"layers.0.attn.wo_a.scale", "F8_E8M0 [64, 32]"},
                        {"layers.0.attn.wo_b.weight", "F8_E4M3 [4096, 8192]"},
                        {"layers.0.attn.wo_b.scale", "F8_E8M0 [32, 64]"},
                        {"layers.0.attn.attn_sink", "F32 [64]"},
                        {"layers.2.attn.compressor.ape", "F32 [4, 1024]"},
                        {"layers.3.attn.compressor.ape", "F32 [128, 512]"},
                        {"layers.2.attn.compressor.wkv.weight", "BF16 [1024, 4096]"},
                        {"layers.3.attn.compressor.wgate.weight", "BF16 [512, 4096]"},
                        {"layers.2.attn.compressor.norm.weight", "BF16 [512]"},
                        {"layers.2.attn.indexer.wq_b.weight", "F8_E4M3 [8192, 1024]"},
                        {"layers.2.attn.indexer.wq_b.scale", "F8_E8M0 [64, 8]"},
                        {"layers.2.attn.indexer.weights_proj.weight", "BF16 [64, 4096]"},
                        {"layers.2.attn.indexer.compressor.ape", "F32 [4, 256]"},
                        {"layers.2.attn.indexer.compressor.wkv.weight", "BF16 [256, 4096]"},
                        {"layers.2.attn.indexer.compressor.norm.weight", "BF16 [128]"},
                        {"layers.0.ffn.gate.weight", "BF16 [256, 4096]"},
                        {"layers.2.ffn.gate.tid2eid", "I64 [129280, 6]"},
                        {"layers.3.ffn.gate.bias", "F32 [256]"},
                        {"layers.0.ffn.experts.255.w1.weight", "I8 [2048, 2048]"},
                        {"layers.0.ffn.experts.255.w3.scale", "F8_E8M0 [2048, 128]"},
                        {"layers.0.ffn.experts.0.w2.weight", "I8 [4096, 1024]"},
                        {"layers.0.ffn.experts.0.w2.scale", "F8_E8M0 [4096, 64]"},
                        {"layers.0.ffn.shared_experts.w1.weight", "F8_E4M3 [2048, 4096]"},
                        {"layers.0.ffn.shared_experts.w2.weight", "F8_E4M3 [4096, 2048]"},
                        {"mtp.0.e_proj.weight", "F8_E4M3 [4096, 4096]"},
                        {"mtp.0.h_proj.scale", "F8_E8M0 [32, 32]"},
                        {"mtp.0.enorm.weight", "BF16 [4096]"},
                        {"mtp.0.hc_head_fn", "F32 [4, 16384]"},
                        {"mtp.0.ffn.gate.bias", "F32 [256]"},
                        {"mtp.0.attn.wq_a.weight", "F8_E4M3 [1024, 4096]"},
                    });
  for (const char* absent :
       {"layers.0.attn.compressor.ape", "layers.3.attn.indexer.wq_b.weight",
        "layers.2.ffn.gate.bias", "layers.3.ffn.gate.tid2eid", "mtp.0.attn.compressor.ape",
        "mtp.1.attn_norm.weight", "layers.43.attn_norm.weight"}) {
    EXPECT_FALSE(table.contains(absent)) << absent;
  }
}

// A layer without compressor: 3+3 hyper-connection, 2 norms, 5 FP8 pairs, 2 norms and the sink in
// attention, 2 router tensors, 6 an expert, 6 in the shared expert. A C4 layer adds 4 + 7, C128
// adds 4.
TEST(TensorSpecs, AreAsManyAsTheLayersAskFor) {
  constexpr size_t kFlashBlock = 6 + 2 + 13 + 2 + 6 * 256 + 6;
  constexpr size_t kTop = 6;
  constexpr size_t kMtp = 3 + 4 + 3;
  EXPECT_EQ(Describe(PresetText("flash")).size(),
            44 * kFlashBlock + 21 * 11 + 20 * 4 + kTop + kMtp);
  constexpr size_t kProBlock = 6 + 2 + 13 + 2 + 6 * 384 + 6;
  EXPECT_EQ(Describe(PresetText("pro")).size(), 62 * kProBlock + 30 * 11 + 31 * 4 + kTop + kMtp);
  constexpr size_t kDSpark = 2 + 1 + 1 + 3 + 3;
  EXPECT_EQ(Describe(DSparkFlashText()).size(),
            46 * kFlashBlock + 21 * 11 + 20 * 4 + kTop + kDSpark);
}

TEST(TensorSpecs, OfProAreThePublishedOnes) {
  ExpectRows(Describe(PresetText("pro")),
             {
                 {"layers.0.attn.wq_a.weight", "F8_E4M3 [1536, 7168]"},
                 {"layers.0.attn.wq_a.scale", "F8_E8M0 [12, 56]"},
                 {"layers.60.attn.wq_b.scale", "F8_E8M0 [512, 12]"},
                 {"layers.0.attn.wkv.scale", "F8_E8M0 [4, 56]"},
                 {"layers.0.attn.wo_a.weight", "F8_E4M3 [16384, 4096]"},
                 {"layers.0.attn.wo_b.scale", "F8_E8M0 [56, 128]"},
                 {"layers.0.attn.compressor.ape", "F32 [128, 512]"},
                 {"layers.2.attn.indexer.wq_b.scale", "F8_E8M0 [64, 12]"},
                 {"layers.0.ffn.experts.383.w1.weight", "I8 [3072, 3584]"},
                 {"layers.0.ffn.experts.383.w1.scale", "F8_E8M0 [3072, 224]"},
                 {"layers.0.ffn.experts.0.w2.weight", "I8 [7168, 1536]"},
                 {"layers.0.ffn.experts.0.w2.scale", "F8_E8M0 [7168, 96]"},
                 {"layers.0.hc_attn_fn", "F32 [24, 28672]"},
             });
}

TEST(TensorSpecs, OfDSparkHaveThreeStagesAndOneHead) {
  const Table table = Describe(DSparkFlashText());
  ExpectRows(table, {
                        {"mtp.0.main_proj.weight", "F8_E4M3 [4096, 12288]"},
                        {"mtp.0.main_proj.scale", "F8_E8M0 [32, 96]"},
                        {"mtp.0.main_norm.weight", "BF16 [4096]"},
                        {"mtp.1.attn.wkv.weight", "F8_E4M3 [512, 4096]"},
                        {"mtp.2.norm.weight", "BF16 [4096]"},
                        {"mtp.2.hc_head_base", "F32 [4]"},
                        {"mtp.2.markov_head.markov_w1.weight", "BF16 [129280, 256]"},
                        {"mtp.2.markov_head.markov_w2.weight", "BF16 [129280, 256]"},
                        {"mtp.2.confidence_head.proj.weight", "F32 [1, 4352]"},
                    });
  for (const char* absent :
       {"mtp.0.e_proj.weight", "mtp.0.norm.weight", "mtp.1.main_proj.weight", "mtp.0.hc_head_fn"}) {
    EXPECT_FALSE(table.contains(absent)) << absent;
  }
}

TEST(TensorSpecs, OfFp8ExpertsHaveBlockScales) {
  ExpectRows(Describe(WithFields("flash", {{"expert_dtype", "\"fp8\""}})),
             {
                 {"layers.0.ffn.experts.0.w1.weight", "F8_E4M3 [2048, 4096]"},
                 {"layers.0.ffn.experts.0.w1.scale", "F8_E8M0 [16, 32]"},
                 {"mtp.0.ffn.experts.0.w2.weight", "F8_E4M3 [4096, 2048]"},
                 {"mtp.0.ffn.experts.0.w2.scale", "F8_E8M0 [32, 16]"},
             });
}

}  // namespace
}  // namespace fathom::checkpoint
