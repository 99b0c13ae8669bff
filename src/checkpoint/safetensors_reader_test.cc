#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/safetensors_header.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/test_configs.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kIndex = "model.safetensors.index.json";

// A small checkpoint in two or more shards, made once; tests copy it.
class SafetensorsReader : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    original_ = new TempFolder;
    const SynthOptions options = {.config_text = SmallText(),
                                  .seed = 7,
                                  .dir = *original_ / "model",
                                  .num_threads = 2,
                                  .shard_bytes = 1'500'000};
    const Status status = WriteSyntheticCheckpoint(options, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  static void TearDownTestSuite() { delete original_; }

  void SetUp() override { fs::copy(*original_ / "model", dir_, fs::copy_options::recursive); }

  Result<std::unique_ptr<TensorSource>> Open() const {
    return OpenCheckpoint(dir_, MustParseConfig(SmallText()));
  }
  std::string Error() const {
    const auto source = Open();
    EXPECT_FALSE(source.ok());
    if (source.ok()) return "";
    EXPECT_EQ(source.status().code(), StatusCode::kBadModel);
    EXPECT_EQ(source.status().message().find('\n'), std::string::npos);
    return source.status().message();
  }

  // The shard that holds a tensor, by the index.
  std::string ShardOf(const std::string& tensor) const {
    const json::Value index = json::Parse(ReadText(dir_ + "/" + kIndex)).value();
    return index.Find("weight_map")->Find(tensor)->AsString();
  }
  // Rewrites the header of the shard that holds `tensor`, of the same length.
  void EditHeader(const std::string& tensor, const std::function<void(json::Value&)>& edit) const {
    const std::string path = dir_ + "/" + ShardOf(tensor);
    std::string bytes = ReadText(path);
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    json::Value header = json::Parse(bytes.substr(8, length)).value();
    edit(header);
    const std::string text = json::Dump(header);
    const uint64_t new_length = text.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &new_length, 8);
    WriteText(path, out + text + bytes.substr(8 + length));
  }
  void EditIndex(const std::function<void(json::Value&)>& edit) const {
    json::Value index = json::Parse(ReadText(dir_ + "/" + kIndex)).value();
    edit(*index.Find("weight_map"));
    WriteText(dir_ + "/" + kIndex, json::Dump(index));
  }

  static TempFolder* original_;
  TempFolder folder_;
  std::string dir_ = folder_ / "model";
};
TempFolder* SafetensorsReader::original_ = nullptr;

TEST_F(SafetensorsReader, ReadsEveryTensorAsItWasMade) {
  const auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status().message();
  const auto synthetic = MakeSyntheticSource(MustParseConfig(SmallText()), 7);
  ASSERT_EQ((*source)->tensors().size(), synthetic->tensors().size());
  for (const TensorInfo& tensor : (*source)->tensors()) {
    std::vector<std::byte> found(static_cast<size_t>(tensor.bytes));
    std::vector<std::byte> expected(found.size());
    ASSERT_TRUE((*source)->Read(tensor, 0, found).ok());
    ASSERT_TRUE(synthetic->Read(*synthetic->Find(tensor.name), 0, expected).ok());
    EXPECT_EQ(found, expected) << tensor.name;
  }
  EXPECT_EQ((*source)->Find("layers.9.attn.wkv.weight"), nullptr);
}

TEST_F(SafetensorsReader, ReadsASingleFileWithoutIndex) {
  const auto synthetic = MakeSyntheticSource(MustParseConfig(SmallText()), 7);
  fs::remove_all(dir_);
  fs::create_directory(dir_);
  auto writer =
      SafetensorsWriter::Create(dir_ + "/model.safetensors", synthetic->tensors()).value();
  for (const TensorInfo& tensor : synthetic->tensors()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    ASSERT_TRUE(synthetic->Read(tensor, 0, bytes).ok());
    ASSERT_TRUE(writer->Append(bytes).ok());
  }
  EXPECT_FALSE(fs::exists(dir_ + "/model.safetensors"));
  ASSERT_TRUE(writer->Finish().ok());
  const auto source = Open();
  ASSERT_TRUE(source.ok()) << source.status().message();
  EXPECT_EQ((*source)->tensors().size(), synthetic->tensors().size());
}

TEST_F(SafetensorsReader, LeavesUnknownTensorsUnread) {
  EditHeader("norm.weight", [](json::Value& header) {
    header.Set("mtp.0.head.weight",
               json::Parse(R"({"dtype":"BF16","shape":[0],"data_offsets":[0,0]})").value());
  });
  EXPECT_TRUE(Open().ok());
}

TEST_F(SafetensorsReader, RefusesAFolderWithoutWeights) {
  fs::remove_all(dir_);
  fs::create_directory(dir_);
  EXPECT_THAT(
      Error(),
      HasSubstr("no weights here, expected model.safetensors.index.json or model.safetensors"));
}

TEST_F(SafetensorsReader, RefusesATruncatedFile) {
  const std::string path = dir_ + "/" + ShardOf("norm.weight");
  fs::resize_file(path, fs::file_size(path) - 1);
  EXPECT_THAT(Error(), AllOf(HasSubstr(ShardOf("norm.weight")), HasSubstr("leave the file's")));
  fs::resize_file(path, 100);
  EXPECT_THAT(Error(), HasSubstr("it is truncated"));
  fs::resize_file(path, 3);
  EXPECT_THAT(Error(), HasSubstr("3 bytes, expected a safetensors file"));
  fs::resize_file(path, 0);
  EXPECT_THAT(Error(), HasSubstr("0 bytes, expected a safetensors file"));
}

TEST_F(SafetensorsReader, RefusesBytesAfterTheData) {
  const std::string path = dir_ + "/" + ShardOf("norm.weight");
  WriteText(path, ReadText(path) + "PK");
  EXPECT_THAT(Error(), HasSubstr("after its header"));
}

TEST_F(SafetensorsReader, RefusesAMissingFile) {
  fs::remove(dir_ + "/" + ShardOf("norm.weight"));
  EXPECT_THAT(Error(),
              AllOf(HasSubstr(ShardOf("norm.weight")), HasSubstr("is the download complete?")));
}

TEST_F(SafetensorsReader, RefusesAnIndexThatLeavesTheFolder) {
  for (const char* name : {"\"../../etc/passwd\"", "\"/etc/passwd\"", "\"..\"", "\"\"", "\"a/b\"",
                           "7", "\"x\\u0000y\""}) {
    EditIndex([&](json::Value& map) { map.Set("norm.weight", json::Parse(name).value()); });
    EXPECT_THAT(Error(), AllOf(HasSubstr(kIndex), HasSubstr("\"norm.weight\" lies in"),
                               HasSubstr("expected a file name inside the folder")));
  }
}

TEST_F(SafetensorsReader, RefusesAnIndexThatIsNone) {
  for (const char* text :
       {"", "{}", "[]", "{\"weight_map\":[]}", "{\"weight_map\":{}}", "{\"weight_map\":"}) {
    WriteText(dir_ + "/" + kIndex, text);
    EXPECT_THAT(Error(), HasSubstr(kIndex)) << text;
  }
}

TEST_F(SafetensorsReader, RefusesAnIndexThatNamesTheWrongFile) {
  const std::string other = ShardOf("embed.weight");
  ASSERT_NE(other, ShardOf("norm.weight"));
  EditIndex([&](json::Value& map) { map.Set("norm.weight", json::Value::String(other)); });
  EXPECT_THAT(Error(),
              HasSubstr("the index places it in " + other + ", where it is not; it is in"));
}

TEST_F(SafetensorsReader, RefusesLinksThatLeaveTheFolder) {
  const std::string shard = ShardOf("norm.weight");
  fs::rename(dir_ + "/" + shard, folder_ / "elsewhere");
  fs::create_symlink(folder_ / "elsewhere", dir_ + "/" + shard);
  EXPECT_THAT(Error(), AllOf(HasSubstr(shard + " is a link to"),
                             HasSubstr("outside of the model's folder")));
}

TEST_F(SafetensorsReader, FollowsTheLinksOfAHuggingFaceSnapshot) {
  const std::string repository = folder_ / "hub/models--org--name";
  fs::create_directories(repository + "/snapshots");
  fs::create_directories(repository + "/blobs");
  const std::string snapshot = repository + "/snapshots/0123abc";
  fs::create_directory(snapshot);
  for (const auto& file : fs::directory_iterator(dir_)) {
    const std::string name = file.path().filename().string();
    fs::rename(file.path(), repository + "/blobs/" + name + "-blob");
    fs::create_symlink("../../blobs/" + name + "-blob", snapshot + "/" + name);
  }
  dir_ = snapshot;
  const auto config = LoadModelConfig(dir_);
  ASSERT_TRUE(config.ok()) << config.status().message();
  const auto source = Open();
  EXPECT_TRUE(source.ok()) << source.status().message();
}

TEST_F(SafetensorsReader, RefusesWhatIsNoRegularFile) {
  const std::string path = dir_ + "/" + ShardOf("norm.weight");
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(Error(), HasSubstr("is a pipe, expected a regular file"));
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_THAT(Error(), HasSubstr("is a folder, expected a regular file"));
}

TEST_F(SafetensorsReader, RefusesAnUnreadableFile) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads every file";
  fs::permissions(dir_ + "/" + ShardOf("norm.weight"), fs::perms::none);
  EXPECT_THAT(Error(), HasSubstr("Permission denied"));
}

TEST_F(SafetensorsReader, SaysSoWhenAFileShrinksWhileItIsRead) {
  const auto source = Open();
  ASSERT_TRUE(source.ok());
  fs::resize_file(dir_ + "/" + ShardOf("norm.weight"), 64);
  const TensorInfo* tensor = (*source)->Find("norm.weight");
  std::vector<std::byte> bytes(static_cast<size_t>(tensor->bytes));
  const Status status = (*source)->Read(*tensor, 0, bytes);
  EXPECT_EQ(status.code(), StatusCode::kBadModel);
  EXPECT_THAT(status.message(), HasSubstr("is it being rewritten?"));
}

TEST_F(SafetensorsReader, RefusesAMissingTensor) {
  const std::string name = "layers.2.attn.compressor.ape";
  EditHeader(name, [&](json::Value& header) {
    for (json::Member& member : header.members()) {
      if (member.key == name) member.key = "layers.2.attn.compressor.epa";
    }
  });
  EditIndex([&](json::Value& map) {
    std::erase_if(map.members(), [&](const json::Member& m) { return m.key == name; });
  });
  EXPECT_THAT(Error(), AllOf(HasSubstr("tensor layers.2.attn.compressor.ape is missing"),
                             HasSubstr("expected F32 [128, 512] by config.json")));
}

TEST_F(SafetensorsReader, RefusesAWrongShape) {
  EditHeader("layers.0.attn.wkv.scale", [](json::Value& header) {
    *header.Find("layers.0.attn.wkv.scale")->Find("shape") = json::Parse("[1,4]").value();
  });
  EXPECT_THAT(
      Error(),
      AllOf(
          HasSubstr(ShardOf("layers.0.attn.wkv.scale")),
          HasSubstr("tensor layers.0.attn.wkv.scale is F8_E8M0 [1, 4], expected F8_E8M0 [4, 1]")));
}

TEST_F(SafetensorsReader, RefusesAWrongDType) {
  EditHeader("norm.weight", [](json::Value& header) {
    *header.Find("norm.weight")->Find("dtype") = json::Value::String("F16");
  });
  EXPECT_THAT(Error(), HasSubstr("tensor norm.weight is F16 [128], expected BF16 [128]"));
}

TEST_F(SafetensorsReader, RefusesTensorsThatOverlap) {
  EditHeader("layers.0.attn.wq_a.weight", [](json::Value& header) {
    // wkv is as large as four of wq_a: it now begins where wq_a does.
    json::Value& offsets = *header.Find("layers.0.attn.wkv.weight")->Find("data_offsets");
    const json::Value& first = *header.Find("layers.0.attn.wq_a.weight")->Find("data_offsets");
    const int64_t begin = *first.items()[0].ToInt64();
    offsets =
        json::Value::Array({json::Value::Number(begin), json::Value::Number(begin + 512 * 128)});
  });
  EXPECT_THAT(Error(), HasSubstr("overlap"));
}

TEST_F(SafetensorsReader, RefusesATensorInTwoFiles) {
  EditHeader("embed.weight", [](json::Value& header) {
    header.Set("norm.weight",
               json::Parse(R"({"dtype":"BF16","shape":[0],"data_offsets":[0,0]})").value());
  });
  EXPECT_THAT(Error(), HasSubstr("tensor \"norm.weight\" stands in both"));
}

TEST_F(SafetensorsReader, RefusesMoreDraftBlocksThanTheConfigHas) {
  EditHeader("norm.weight", [](json::Value& header) {
    header.Set("mtp.1.norm.weight",
               json::Parse(R"({"dtype":"BF16","shape":[0],"data_offsets":[0,0]})").value());
  });
  EXPECT_THAT(Error(), HasSubstr("tensor \"mtp.1.norm.weight\": config.json has 1 draft blocks"));
}

TEST_F(SafetensorsReader, RefusesExpertsOfAnotherTypeThanTheConfigSays) {
  const auto source =
      OpenCheckpoint(dir_, MustParseConfig(WithFields("tiny", {{"expert_dtype", "\"fp8\""}})));
  ASSERT_FALSE(source.ok());
  EXPECT_EQ(source.status().code(), StatusCode::kBadModel);
}

TEST_F(SafetensorsReader, TakesTheConfidenceHeadInBothPublishedTypes) {
  json::Value config = json::Parse(SmallText()).value();
  config.Set("dspark_block_size", json::Value::Number(int64_t{5}));
  config.Set("dspark_markov_rank", json::Value::Number(int64_t{8}));
  config.Set("dspark_target_layer_ids", json::Parse("[0,2]").value());
  config.Set("dspark_noise_token_id", json::Value::Number(int64_t{3}));
  const std::string text = json::Dump(config);
  dir_ = folder_ / "dspark";
  ASSERT_TRUE(WriteSyntheticCheckpoint({.config_text = text, .dir = dir_}, nullptr).ok());
  EXPECT_TRUE(OpenCheckpoint(dir_, MustParseConfig(text)).ok());
  // As BF16 the tensor takes half the bytes; the other half becomes a tensor that nobody knows.
  const std::string name = "mtp.0.confidence_head.proj.weight";
  EditHeader(name, [&](json::Value& header) {
    json::Value& tensor = *header.Find(name);
    std::vector<json::Value>& offsets = tensor.Find("data_offsets")->items();
    const int64_t begin = *offsets[0].ToInt64();
    const int64_t end = *offsets[1].ToInt64();
    const int64_t middle = (begin + end) / 2;
    *tensor.Find("dtype") = json::Value::String("BF16");
    offsets[1] = json::Value::Number(middle);
    json::Value rest = tensor;
    *rest.Find("data_offsets") =
        json::Value::Array({json::Value::Number(middle), json::Value::Number(end)});
    header.Set("rest", rest);
  });
  const auto source = OpenCheckpoint(dir_, MustParseConfig(text));
  ASSERT_TRUE(source.ok()) << source.status().message();
  EXPECT_EQ((*source)->Find(name)->dtype, FileDType::kBF16);
}

TEST_F(SafetensorsReader, TurnsDraftsOffWhenThereAreNoDraftTensors) {
  EXPECT_EQ(LoadModelConfig(dir_)->draft, config::DraftKind::kMtp);
  EditIndex([](json::Value& map) {
    std::erase_if(map.members(), [](const json::Member& m) { return m.key.starts_with("mtp."); });
  });
  const auto config = LoadModelConfig(dir_);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->draft, config::DraftKind::kNone);
  EXPECT_EQ(config->compress_ratios.size(), 3u);
}

}  // namespace
}  // namespace fathom::checkpoint
