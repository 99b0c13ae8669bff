#include "apps/fathom/serve_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

namespace fathom::app {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> Fold(const std::vector<std::string>& args) {
  auto folded = FoldDottedFlags(args);
  EXPECT_TRUE(folded.ok()) << folded.status().message();
  return folded.ok() ? *folded : std::vector<std::string>();
}

const ServeFlag& Flag(const std::string& name) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (flag.name == name) return flag;
  }
  ADD_FAILURE() << "no flag " << name;
  return ServeFlags().front();
}

TEST(ServeFlags, DottedFormsFoldIntoOneJsonValue) {
  EXPECT_THAT(Fold({"serve", "m", "--speculative-config.method", "mtp", "--port", "1",
                    "--speculative-config.num_speculative_tokens=2"}),
              ElementsAre("serve", "m", "--speculative-config",
                          R"({"method":"mtp","num_speculative_tokens":2})", "--port", "1"));
}

TEST(ServeFlags, JsonAndDottedFormsOfOneFlagMergeAndTheLaterWins) {
  EXPECT_THAT(Fold({"--default-chat-template-kwargs", R"({"thinking":false,"a":1})",
                    "--default-chat-template-kwargs.thinking=True"}),
              ElementsAre("--default-chat-template-kwargs", R"({"thinking":true,"a":1})"));
}

TEST(ServeFlags, UnderscoresInNamesAreDashes) {
  EXPECT_THAT(
      Fold({"--attention_config.use_fp4_indexer_cache=True", "--max_model_len=4k"}),
      ElementsAre("--attention-config", R"({"use_fp4_indexer_cache":true})", "--max-model-len=4k"));
}

TEST(ServeFlags, ABadJsonValueIsRefusedByName) {
  EXPECT_THAT(
      FoldDottedFlags(std::vector<std::string>{"--compilation-config={bad"}).status().message(),
      HasSubstr("--compilation-config: invalid JSON"));
}

TEST(ServeFlags, VllmsTwoLettersAreLongNames) {
  const std::vector<std::string> args = {"-tp", "2", "-dp=4", "-ep", "-x"};
  EXPECT_EQ(Fold(args),
            (std::vector<std::string>{"--tensor-parallel-size", "2", "--data-parallel-size=4",
                                      "--enable-expert-parallel", "-x"}));
}

TEST(ServeFlags, NamesAreUniqueAndEveryRowSaysWhatItMeans) {
  std::set<std::string> names;
  for (const ServeFlag& flag : ServeFlags()) {
    EXPECT_TRUE(names.insert(flag.name).second) << flag.name;
    EXPECT_FALSE(flag.help.empty()) << flag.name;
    EXPECT_TRUE(flag.effect == FlagEffect::kNoEffect || flag.apply) << flag.name;
  }
}

TEST(ServeFlags, SizesTakeSuffixesAndAutoMeansAuto) {
  ServeOptions options;
  EXPECT_TRUE(Flag("max-model-len").apply({"256k"}, options).ok());
  EXPECT_EQ(options.model.max_model_len, 256 * 1024);
  EXPECT_TRUE(Flag("max-model-len").apply({"auto"}, options).ok());
  EXPECT_EQ(options.model.max_model_len, 0);
  EXPECT_FALSE(Flag("max-model-len").apply({"12x"}, options).ok());
}

TEST(ServeFlags, ZeroIsTakenWhereTheHelpGivesItAMeaning) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (flag.kind != FlagKind::kValue || flag.help.find("0: ") == std::string::npos) continue;
    ServeOptions options;
    EXPECT_TRUE(flag.apply({"0"}, options).ok()) << flag.name;
  }
  ServeOptions options;
  EXPECT_TRUE(Flag("kv-host-size").apply({"0"}, options).ok());
  EXPECT_FALSE(Flag("kv-cache-memory").apply({"0"}, options).ok());
}

TEST(ServeFlags, WhatIsNotAvailableSaysWhatIs) {
  ServeOptions options;
  EXPECT_THAT(Flag("tensor-parallel-size").apply({"0"}, options).message(), HasSubstr("1 to 1024"));
  EXPECT_THAT(Flag("block-size").apply({"64"}, options).message(), HasSubstr("use 256"));
  EXPECT_THAT(Flag("kv-cache-dtype").apply({"nvfp4"}, options).message(),
              HasSubstr("use fp8 or auto"));
  EXPECT_FALSE(Flag("kv-transfer-config").apply({"{}"}, options).ok());
}

TEST(ServeFlags, WhatAVariableThatIsNotSetLeavesIsRefused) {
  for (const char* name : {"api-key", "host", "served-model-name"}) {
    ServeOptions options;
    EXPECT_THAT(Flag(name).apply({""}, options).message(), HasSubstr("'' says nothing")) << name;
    EXPECT_TRUE(Flag(name).apply({"x"}, options).ok()) << name;
  }
  ServeOptions options;
  EXPECT_FALSE(Flag("api-key").apply({"one", ""}, options).ok());
  EXPECT_TRUE(options.api_keys.empty());
}

TEST(ServeFlags, TheManualHasTheTable) {
  std::ifstream file(FATHOM_SOURCE_DIR "/docs/operations.md");
  std::stringstream contents;
  contents << file.rdbuf();
  EXPECT_THAT(contents.str(), HasSubstr(ServeFlagsMarkdown()))
      << "docs/operations.md must hold this table:\n"
      << ServeFlagsMarkdown();
}

}  // namespace
}  // namespace fathom::app
