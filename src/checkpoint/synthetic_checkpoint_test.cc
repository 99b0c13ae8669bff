#include "checkpoint/synthetic_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "checkpoint/embedded_files.h"
#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::map<std::string, std::string> FilesOf(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const auto& file : fs::directory_iterator(dir)) {
    files[file.path().filename().string()] = ReadText(file.path().string());
  }
  return files;
}

SynthOptions Small(const std::string& dir, int num_threads) {
  return {.config_text = SmallText(),
          .seed = 3,
          .dir = dir,
          .num_threads = num_threads,
          .shard_bytes = 1'000'000};
}

TEST(SyntheticCheckpoint, HasTheSameBytesOnAnyNumberOfThreads) {
  TempFolder folder;
  ASSERT_TRUE(WriteSyntheticCheckpoint(Small(folder / "one", 1), nullptr).ok());
  ASSERT_TRUE(WriteSyntheticCheckpoint(Small(folder / "five", 5), nullptr).ok());
  const auto one = FilesOf(folder / "one");
  EXPECT_EQ(one, FilesOf(folder / "five"));
  EXPECT_TRUE(one.contains("model-00006-of-00006.safetensors")) << one.size();
  EXPECT_EQ(one.at("config.json"), SmallText());
  EXPECT_EQ(one.at("tokenizer.json"),
            ReadText(FATHOM_SOURCE_DIR "/models/fathom-tiny/tokenizer.json"));
}

TEST(SyntheticCheckpoint, TellsItsProgress) {
  TempFolder folder;
  int64_t last = 0;
  int64_t total = 0;
  ASSERT_TRUE(WriteSyntheticCheckpoint(Small(folder / "model", 3), [&](int64_t done_bytes,
                                                                       int64_t total_bytes) {
                EXPECT_GT(done_bytes, last);
                last = done_bytes;
                total = total_bytes;
              }).ok());
  EXPECT_GT(total, 0);
  EXPECT_EQ(last, total);
}

TEST(SyntheticCheckpoint, LeavesAFolderAloneThatHoldsAnything) {
  TempFolder folder;
  WriteText(folder / "notes.txt", "{}");
  const Status status = WriteSyntheticCheckpoint(Small(folder.path(), 1), nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("is not empty: it holds notes.txt; choose"));
  EXPECT_EQ(FilesOf(folder.path()).size(), 1u);
}

TEST(SyntheticCheckpoint, RefusesABadConfigBeforeItWrites) {
  TempFolder folder;
  SynthOptions options = Small(folder / "model", 1);
  options.config_text = WithFields("tiny", {{"hidden_size", "100"}});
  EXPECT_EQ(WriteSyntheticCheckpoint(options, nullptr).code(), StatusCode::kBadModel);
  EXPECT_FALSE(fs::exists(folder / "model"));
}

TEST(SyntheticCheckpoint, SaysWhichFolderItCannotMake) {
  TempFolder folder;
  WriteText(folder / "file", "");
  const Status status = WriteSyntheticCheckpoint(Small(folder / "file/model", 1), nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("cannot make the folder " + folder / "file/model"));
}

TEST(SyntheticCheckpoint, LeavesNothingBehindWhenAWriteFails) {
  TempFolder folder;
  // A folder stands where the tokenizer goes: everything before it succeeds, its rename fails.
  const auto obstruct = [&](int64_t, int64_t) {
    fs::create_directories(folder / "model/tokenizer.json/x");
  };
  const Status status = WriteSyntheticCheckpoint(Small(folder / "model", 2), obstruct);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.message(), HasSubstr("cannot write " + folder / "model/tokenizer.json"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "model"), {}), 1);
}

TEST(SyntheticCheckpoint, SaysHowMuchRoomItNeeds) {
  TempFolder folder;
  const Status status = WriteSyntheticCheckpoint(
      {.config_text = WithFields("pro", {{"n_routed_experts", "2048"}}), .dir = folder / "model"},
      nullptr);
  ASSERT_FALSE(status.ok()) << "the machine has more than 4 TB to spare";
  EXPECT_THAT(status.message(), HasSubstr("GB free, the checkpoint needs"));
}

TEST(Presets, AreTheFilesThatTheyEmbed) {
  EXPECT_EQ(kTinyConfig, ReadText(FATHOM_SOURCE_DIR "/models/fathom-tiny/config.json"));
  EXPECT_EQ(kFlashConfig, ReadText(FATHOM_SOURCE_DIR "/src/checkpoint/presets/flash.json"));
  EXPECT_EQ(kProConfig, ReadText(FATHOM_SOURCE_DIR "/src/checkpoint/presets/pro.json"));
  EXPECT_THAT(PresetConfigText("huge").status().message(), HasSubstr("flash, pro and tiny"));
}

TEST(CutLayers, KeepsTheFirstLayersAndTheDraftBlock) {
  const auto config = MustParseConfig(CutLayers(PresetText("flash"), 4).value());
  EXPECT_EQ(config.num_layers, 4);
  EXPECT_EQ(config.compress_ratios, (std::vector<int>{0, 0, 4, 128, 0}));
  EXPECT_EQ(config.num_hash_layers, 3);
  EXPECT_EQ(config.draft, config::DraftKind::kMtp);
  EXPECT_EQ(MustParseConfig(CutLayers(PresetText("flash"), 1).value()).num_hash_layers, 1);
}

TEST(CutLayers, MovesTheTargetsOfADSparkDraftDown) {
  const auto config = MustParseConfig(CutLayers(DSparkFlashText(), 5).value());
  EXPECT_EQ(config.compress_ratios, (std::vector<int>{0, 0, 4, 128, 4, 0, 0, 0}));
  EXPECT_EQ(config.dspark.target_layer_ids, (std::vector<int>{2, 3, 4}));
  EXPECT_THAT(CutLayers(DSparkFlashText(), 2).status().message(),
              HasSubstr("dspark_target_layer_ids"));
}

TEST(CutLayers, RefusesMoreLayersThanThereAre) {
  EXPECT_THAT(CutLayers(PresetText("flash"), 44).status().message(), HasSubstr("expected 1 to 43"));
  EXPECT_FALSE(CutLayers(PresetText("flash"), 0).ok());
  EXPECT_EQ(MustParseConfig(CutLayers(PresetText("flash"), 43).value()).num_layers, 43);
}

}  // namespace
}  // namespace fathom::checkpoint
