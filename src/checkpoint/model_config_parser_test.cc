#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

using config::DraftKind;
using config::ExpertDType;
using config::LayerKind;
using config::ModelConfig;
using config::RoutingKind;
using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const Result<ModelConfig> config = ParseModelConfig(text, "config.json");
  EXPECT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), StatusCode::kBadModel);
  return config.status().message();
}

TEST(ModelConfigParser, ReadsTheFlashConfig) {
  const ModelConfig c = MustParseConfig(PresetText("flash"));
  EXPECT_EQ(c.num_layers, 43);
  EXPECT_EQ(c.hidden_size, 4096);
  EXPECT_EQ(c.vocab_size, 129280);
  EXPECT_EQ(c.max_position_embeddings, 1048576);
  EXPECT_EQ(c.num_heads, 64);
  EXPECT_EQ(c.q_lora_rank, 1024);
  EXPECT_EQ(c.o_groups, 8);
  EXPECT_EQ(c.index_topk, 512);
  EXPECT_EQ(c.num_experts, 256);
  EXPECT_EQ(c.num_experts_per_token, 6);
  EXPECT_EQ(c.moe_intermediate_size, 2048);
  EXPECT_DOUBLE_EQ(c.routed_scaling_factor, 1.5);
  EXPECT_DOUBLE_EQ(c.swiglu_limit, 10);
  EXPECT_DOUBLE_EQ(c.compress_rope_theta, 160000);
  EXPECT_DOUBLE_EQ(c.yarn.factor, 16);
  EXPECT_EQ(c.expert_dtype, ExpertDType::kFp4);
  EXPECT_EQ(c.num_layers_of(LayerKind::kWindow), 2);
  EXPECT_EQ(c.num_layers_of(LayerKind::kC4), 21);
  EXPECT_EQ(c.num_layers_of(LayerKind::kC128), 20);
  EXPECT_EQ(c.routing_kind(2), RoutingKind::kHash);
  EXPECT_EQ(c.routing_kind(3), RoutingKind::kScore);
  EXPECT_EQ(c.draft, DraftKind::kMtp);
  EXPECT_EQ(c.num_draft_blocks, 1);
}

TEST(ModelConfigParser, ReadsTheProConfig) {
  const ModelConfig c = MustParseConfig(PresetText("pro"));
  EXPECT_EQ(c.num_layers, 61);
  EXPECT_EQ(c.num_heads, 128);
  EXPECT_EQ(c.index_topk, 1024);
  EXPECT_EQ(c.num_layers_of(LayerKind::kC4), 30);
  EXPECT_EQ(c.num_layers_of(LayerKind::kC128), 31);
}

TEST(ModelConfigParser, TakesTheDraftKindFromTheFields) {
  const ModelConfig dspark = MustParseConfig(DSparkFlashText());
  EXPECT_EQ(dspark.draft, DraftKind::kDSpark);
  EXPECT_EQ(dspark.num_draft_blocks, 3);
  EXPECT_EQ(dspark.dspark.block_size, 5);
  EXPECT_EQ(dspark.dspark.target_layer_ids, (std::vector<int>{40, 41, 42}));
  const ModelConfig none = MustParseConfig(WithFields(
      "tiny", {{"num_nextn_predict_layers", "0"}, {"compress_ratios", "[0,0,4,128,4,128,4]"}}));
  EXPECT_EQ(none.draft, DraftKind::kNone);
  EXPECT_EQ(none.num_draft_blocks, 0);
}

TEST(ModelConfigParser, ReadsFp8ExpertsAndTheNewNameOfTheRopeType) {
  const ModelConfig c = MustParseConfig(WithFields(
      "tiny", {{"expert_dtype", "\"fp8\""},
               {"rope_scaling",
                R"({"rope_type":"yarn","factor":8,"original_max_position_embeddings":4096})"}}));
  EXPECT_EQ(c.expert_dtype, ExpertDType::kFp8);
  EXPECT_DOUBLE_EQ(c.yarn.factor, 8);
  EXPECT_DOUBLE_EQ(c.yarn.beta_fast, 32);
}

TEST(ModelConfigParser, RefusesOtherModelsByName) {
  EXPECT_EQ(ErrorOf(WithFields("flash", {{"model_type", "\"deepseek_v41\""},
                                         {"architectures", "[\"DeepseekV41ForCausalLM\"]"}})),
            "config.json: this is model_type deepseek_v41 (DeepseekV41ForCausalLM); Fathom serves "
            "deepseek_v4");
  EXPECT_THAT(ErrorOf(R"({"model_type":"llama","architectures":["LlamaForCausalLM"]})"),
              HasSubstr("this is model_type llama (LlamaForCausalLM)"));
  EXPECT_THAT(ErrorOf(R"({"model_type":"deepseek_v4","architectures":["DeepseekV3ForCausalLM"]})"),
              HasSubstr("DeepseekV3ForCausalLM"));
  EXPECT_THAT(ErrorOf("{}"), HasSubstr("model_type is missing"));
}

struct BadField {
  const char* field;
  const char* value;  // empty: the field is missing
  const char* found;
};

class RefusedField : public ::testing::TestWithParam<BadField> {};

TEST_P(RefusedField, IsNamedWithWhatWasFound) {
  const auto& [field, value, found] = GetParam();
  EXPECT_THAT(ErrorOf(WithFields("flash", {{field, value}})),
              HasSubstr(std::string("config.json: ") + found));
}

INSTANTIATE_TEST_SUITE_P(
    ModelConfigParser, RefusedField,
    ::testing::Values(
        BadField{"num_hidden_layers", "-1",
                 "num_hidden_layers is -1, expected an integer from 1 to 512"},
        BadField{"num_hidden_layers", "1000000000", "num_hidden_layers is 1000000000"},
        BadField{"num_hidden_layers", "43.5", "num_hidden_layers is 43.5"},
        BadField{"num_hidden_layers", "\"43\"", "num_hidden_layers is \"43\""},
        BadField{"num_hidden_layers", "", "num_hidden_layers is missing"},
        BadField{"num_hidden_layers", "42", "compress_ratios has 44 entries, expected 43"},
        BadField{"hidden_size", "4100", "hidden_size is 4100, expected a multiple of 128"},
        BadField{"hidden_size", "0", "hidden_size is 0"},
        BadField{"q_lora_rank", "1000", "q_lora_rank is 1000, expected a multiple of 128"},
        BadField{"moe_intermediate_size", "100", "moe_intermediate_size is 100"},
        BadField{"o_lora_rank", "1023", "o_lora_rank is 1023, expected o_groups 8 times it"},
        BadField{"o_groups", "7", "o_groups is 7, expected a divisor of num_attention_heads 64"},
        BadField{"n_routed_experts", "0", "n_routed_experts is 0"},
        BadField{"num_experts_per_tok", "257",
                 "num_experts_per_tok is 257, expected an integer from 1 to 256"},
        BadField{"n_shared_experts", "2", "n_shared_experts is 2, expected 1"},
        BadField{"num_hash_layers", "44", "num_hash_layers is 44"},
        BadField{"head_dim", "256", "head_dim is 256, expected 512"},
        BadField{"qk_rope_head_dim", "128", "qk_rope_head_dim is 128, expected 64"},
        BadField{"num_key_value_heads", "8", "num_key_value_heads is 8, expected 1"},
        BadField{"sliding_window", "4096", "sliding_window is 4096, expected 128"},
        BadField{"index_head_dim", "96", "index_head_dim is 96, expected a power of two"},
        BadField{"index_head_dim", "32", "index_head_dim is 32"},
        BadField{"index_topk", "0", "index_topk is 0"},
        BadField{"hc_mult", "2", "hc_mult is 2, expected 4"},
        BadField{"hc_sinkhorn_iters", "0", "hc_sinkhorn_iters is 0"},
        BadField{"rms_norm_eps", "0", "rms_norm_eps is 0"},
        BadField{"rms_norm_eps", "1e40", "rms_norm_eps is 1e40"},
        BadField{"rope_theta", "0", "rope_theta is 0"},
        BadField{"compress_rope_theta", "1e30", "compress_rope_theta is 1e30"},
        BadField{"rope_scaling", "null", "rope_scaling is null, expected an object"},
        BadField{"vocab_size", "99999999999999999999", "vocab_size is 99999999999999999999"},
        BadField{"eos_token_id", "129280",
                 "eos_token_id is 129280, expected an integer from 0 to 129279"},
        BadField{"max_position_embeddings", "0", "max_position_embeddings is 0"},
        BadField{"scoring_func", "\"sigmoid\"",
                 "scoring_func is \"sigmoid\", expected \"sqrtsoftplus\""},
        BadField{"topk_method", "\"greedy\"", "topk_method is \"greedy\""},
        BadField{"norm_topk_prob", "false", "norm_topk_prob is false, expected true"},
        BadField{"tie_word_embeddings", "true", "tie_word_embeddings is true, expected false"},
        BadField{"hidden_act", "\"gelu\"", "hidden_act is \"gelu\""},
        BadField{"expert_dtype", "\"nvfp4\"",
                 "expert_dtype is \"nvfp4\", expected \"fp4\" or \"fp8\""},
        BadField{"quantization_config", "", "quantization_config is missing"},
        BadField{"quantization_config", R"({"quant_method":"modelopt"})",
                 "quantization_config.quant_method is \"modelopt\", expected \"fp8\""},
        BadField{"quantization_config",
                 R"({"quant_method":"fp8","scale_fmt":"ue8m0","weight_block_size":[64,128]})",
                 "quantization_config.weight_block_size is [64,128], expected [128,128]"},
        BadField{"rope_scaling", R"({"type":"linear","factor":2})",
                 "rope_scaling.type is \"linear\", expected \"yarn\""},
        BadField{"rope_scaling",
                 R"({"type":"yarn","factor":0.5,"original_max_position_embeddings":4096})",
                 "rope_scaling.factor is 0.5"},
        BadField{
            "rope_scaling",
            R"({"type":"yarn","factor":4,"original_max_position_embeddings":4096,"beta_fast":0.5})",
            "rope_scaling.beta_fast is 0.5, expected at least beta_slow 1"},
        BadField{"num_nextn_predict_layers", "2", "num_nextn_predict_layers is 2"},
        BadField{"num_nextn_predict_layers", "0", "compress_ratios has 44 entries, expected 43"},
        BadField{"compress_ratios", "4", "compress_ratios is 4, expected a list"},
        BadField{"dspark_block_size", "5", "dspark_markov_rank is missing"}));

TEST(ModelConfigParser, RefusesRatiosThatItDoesNotCompute) {
  EXPECT_THAT(ErrorOf(WithFields("tiny", {{"compress_ratios", "[0,0,4,128,2,128,4,0]"}})),
              HasSubstr("compress_ratios[4] is 2, expected 0, 4 or 128"));
  EXPECT_THAT(ErrorOf(WithFields("tiny", {{"compress_ratios", "[0,0,4,128,4,128,4,4]"}})),
              HasSubstr("compress_ratios[7] is 4, expected 0 for a draft block"));
  EXPECT_THAT(ErrorOf(WithFields("tiny", {{"compress_ratios", "[0,0,4,128,\"x\",128,4,0]"}})),
              HasSubstr("compress_ratios[4] is \"x\""));
}

TEST(ModelConfigParser, RefusesWhatIsNoConfig) {
  EXPECT_THAT(ErrorOf("{"), HasSubstr("config.json: invalid JSON at byte 1"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(ErrorOf(std::string(1000, '[')), HasSubstr("invalid JSON"));
}

TEST(ModelConfigParser, ShowsOnlyTheBeginningOfALongValue) {
  const std::string error =
      ErrorOf(WithFields("tiny", {{"scoring_func", '"' + std::string(10'000, 'x') + '"'}}));
  EXPECT_LT(error.size(), 200u);
}

}  // namespace
}  // namespace fathom::checkpoint
