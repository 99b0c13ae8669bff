#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ModelFolder : public ::testing::Test {
 protected:
  // A repository in the cache whose refs/main holds `ref`.
  void MakeRepository(const std::string& ref) {
    fs::create_directories(repository_ + "/refs");
    fs::create_directories(repository_ + "/snapshots/0123abc");
    WriteText(repository_ + "/refs/main", ref);
  }
  std::string Error(const std::string& model) {
    const auto folder = ResolveModelFolder(model, home_.path());
    EXPECT_FALSE(folder.ok());
    if (folder.ok()) return *folder;
    EXPECT_EQ(folder.status().code(), StatusCode::kBadModel);
    return folder.status().message();
  }

  TempFolder home_;
  std::string repository_ = home_ / "hub/models--deepseek-ai--DeepSeek-V4-Flash";
};

TEST_F(ModelFolder, IsTheFolderThatWasNamed) {
  EXPECT_EQ(*ResolveModelFolder(home_.path(), "/nowhere"), home_.path());
}

TEST_F(ModelFolder, IsTheSnapshotOfARepositoryInTheCache) {
  MakeRepository("0123abc\n");
  EXPECT_EQ(*ResolveModelFolder("deepseek-ai/DeepSeek-V4-Flash", home_.path()),
            repository_ + "/snapshots/0123abc");
}

TEST_F(ModelFolder, TellsHowToDownloadWhatIsNotThere) {
  EXPECT_THAT(Error("deepseek-ai/DeepSeek-V4-Flash"),
              HasSubstr("hf download deepseek-ai/DeepSeek-V4-Flash"));
  MakeRepository("fffffff");
  EXPECT_THAT(Error("deepseek-ai/DeepSeek-V4-Flash"),
              HasSubstr("hf download deepseek-ai/DeepSeek-V4-Flash"));
}

TEST_F(ModelFolder, DoesNotFollowARevisionOutOfTheCache) {
  MakeRepository("../../../..");
  EXPECT_THAT(Error("deepseek-ai/DeepSeek-V4-Flash"), HasSubstr("holds no revision"));
}

TEST_F(ModelFolder, RefusesNamesThatAreNeither) {
  WriteText(home_ / "file", "x");
  EXPECT_THAT(Error(home_ / "file"), HasSubstr("is a file, expected a model folder"));
  for (const char* name :
       {"nothing", "../a/b", "a/b/c", "/no/such/folder", "a/..", "", "a/b c", ".a/b"}) {
    EXPECT_THAT(Error(name),
                HasSubstr("does not exist; expected a model folder or a Hugging Face repository"))
        << name;
  }
}

TEST_F(ModelFolder, LoadsTheConfigWithItsPathInErrors) {
  WriteText(home_ / "config.json", PresetText("tiny"));
  EXPECT_EQ(LoadModelConfig(home_.path())->num_layers, 7);
  WriteText(home_ / "config.json", "{}");
  EXPECT_THAT(LoadModelConfig(home_.path()).status().message(), HasSubstr(home_ / "config.json"));
  fs::remove(home_ / "config.json");
  const Status missing = LoadModelConfig(home_.path()).status();
  EXPECT_EQ(missing.code(), StatusCode::kBadModel);
  EXPECT_THAT(missing.message(), HasSubstr("config.json: No such file"));
}

}  // namespace
}  // namespace fathom::checkpoint
