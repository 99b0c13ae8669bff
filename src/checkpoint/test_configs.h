// Configs that the tests of this folder share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "json/json.h"

namespace fathom::checkpoint {

inline std::string PresetText(const std::string& name) { return PresetConfigText(name).value(); }

// A preset with some fields replaced: {"field", "JSON value"}; an empty value removes the field.
inline std::string WithFields(const std::string& preset,
                              const std::vector<std::pair<std::string, std::string>>& fields) {
  json::Value root = json::Parse(PresetText(preset)).value();
  for (const auto& [field, value] : fields) {
    if (value.empty()) {
      std::erase_if(root.members(), [&](const json::Member& m) { return m.key == field; });
    } else {
      root.Set(field, json::Parse(value).value());
    }
  }
  return json::Dump(root);
}

inline config::ModelConfig MustParseConfig(const std::string& text) {
  Result<config::ModelConfig> config = ParseModelConfig(text, "config.json");
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : config::ModelConfig{};
}

inline std::string DSparkFlashText() {
  json::Value root = json::Parse(PresetText("flash")).value();
  auto& ratios = root.Find("compress_ratios")->items();
  ratios.insert(ratios.end(), 2, json::Value::Number(int64_t{0}));
  return WithFields("flash", {{"compress_ratios", json::Dump(*root.Find("compress_ratios"))},
                              {"dspark_block_size", "5"},
                              {"dspark_markov_rank", "256"},
                              {"dspark_target_layer_ids", "[40,41,42]"},
                              {"dspark_noise_token_id", "128799"}});
}

// The smallest config that has every kind of layer, for tests that write files.
inline std::string SmallText() {
  return WithFields("tiny", {{"num_hidden_layers", "3"},
                             {"num_hash_layers", "1"},
                             {"compress_ratios", "[0,4,128,0]"},
                             {"n_routed_experts", "4"},
                             {"hidden_size", "128"},
                             {"vocab_size", "300"}});
}

// A folder that goes away with the test.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "checkpoint-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(std::string_view name) const {
    return (std::filesystem::path(path_) / name).string();
  }

 private:
  std::string path_;
};

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void WriteText(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace fathom::checkpoint
