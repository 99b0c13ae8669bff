#include "checkpoint/synthetic_checkpoint.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "checkpoint/embedded_files.h"
#include "checkpoint/file.h"
#include "checkpoint/safetensors_writer.h"
#include "json/json.h"

namespace fathom::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kChunkBytes = 8 << 20;

// One file of weights.
struct Shard {
  std::string name;
  std::vector<TensorInfo> tensors;
};

// A piece of a tensor: the unit of work of a thread.
struct Chunk {
  size_t shard;
  size_t tensor;  // in the shard
  int64_t offset;
  int64_t bytes;
};

std::vector<Shard> PlanShards(std::vector<TensorInfo> tensors, int64_t shard_bytes) {
  std::vector<Shard> shards;
  int64_t bytes = 0;
  for (TensorInfo& tensor : tensors) {
    if (shards.empty() || bytes + tensor.bytes > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    // Wide elements first, so that every tensor is aligned to its element.
    std::stable_sort(shards[i].tensors.begin(), shards[i].tensors.end(),
                     [](const TensorInfo& a, const TensorInfo& b) {
                       return BytesPerElement(a.dtype) > BytesPerElement(b.dtype);
                     });
  }
  return shards;
}

// The shards take turns: writes to one file wait for each other, those to several do not.
std::vector<Chunk> PlanChunks(const std::vector<Shard>& shards) {
  std::vector<std::vector<Chunk>> of_shard(shards.size());
  size_t longest = 0;
  for (size_t s = 0; s < shards.size(); ++s) {
    for (size_t t = 0; t < shards[s].tensors.size(); ++t) {
      const int64_t bytes = shards[s].tensors[t].bytes;
      for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
        of_shard[s].push_back({s, t, offset, std::min(kChunkBytes, bytes - offset)});
      }
    }
    longest = std::max(longest, of_shard[s].size());
  }
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < longest; ++i) {
    for (const std::vector<Chunk>& shard : of_shard) {
      if (i < shard.size()) chunks.push_back(shard[i]);
    }
  }
  return chunks;
}

std::string MakeIndex(const std::vector<Shard>& shards) {
  std::vector<json::Member> map;
  int64_t total_bytes = 0;
  for (const Shard& shard : shards) {
    for (const TensorInfo& tensor : shard.tensors) {
      map.push_back({tensor.name, json::Value::String(shard.name)});
      total_bytes += tensor.bytes;
    }
  }
  json::Value index = json::Value::Object();
  index.Set("metadata", json::Value::Object({{"total_size", json::Value::Number(total_bytes)}}));
  index.Set("weight_map", json::Value::Object(std::move(map)));
  return json::Dump(index) + "\n";
}

// The folder exists, is empty, and has room.
Status PrepareFolder(const std::string& dir, int64_t bytes) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) {
    return InvalidArgument(fmt::format("cannot make the folder {}: {}", dir, error.message()));
  }
  const fs::directory_iterator first(dir, error);
  if (error) {
    return InvalidArgument(fmt::format("cannot read the folder {}: {}", dir, error.message()));
  }
  if (first != fs::directory_iterator()) {
    return InvalidArgument(
        fmt::format("{} is not empty: it holds {}; choose a folder that is, or a "
                    "new one",
                    dir, first->path().filename().string()));
  }
  struct statvfs info{};
  if (statvfs(dir.c_str(), &info) != 0) return OkStatus();
  const auto free_bytes = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
  if (free_bytes >= static_cast<double>(bytes)) return OkStatus();
  return InternalError(
      fmt::format("{} has {:.3f} GB free, the checkpoint needs {:.3f} GB; free some space, "
                  "choose another folder or fewer layers",
                  dir, free_bytes / 1e9, static_cast<double>(bytes) / 1e9));
}

// Removes the files that were finished, unless all were.
class FolderWriter {
 public:
  explicit FolderWriter(std::string dir) : dir_(std::move(dir)) {}
  ~FolderWriter() {
    std::error_code ignored;
    for (const std::string& path : finished_) fs::remove(path, ignored);
  }
  FolderWriter(const FolderWriter&) = delete;
  FolderWriter& operator=(const FolderWriter&) = delete;

  std::string PathOf(std::string_view name) const { return (fs::path(dir_) / name).string(); }

  Status WriteText(std::string_view name, std::string_view text) {
    RETURN_IF_ERROR(WriteSmallFile(PathOf(name), text));
    finished_.push_back(PathOf(name));
    return OkStatus();
  }
  Status Finish(const Shard& shard, SafetensorsWriter& writer) {
    RETURN_IF_ERROR(writer.Finish());
    finished_.push_back(PathOf(shard.name));
    return OkStatus();
  }
  void Keep() { finished_.clear(); }

 private:
  std::string dir_;
  std::vector<std::string> finished_;
};

// Fills the shards' tensors from the source on all threads of the pool.
class ShardFiller {
 public:
  ShardFiller(const TensorSource& source, const std::vector<Shard>& shards,
              const std::vector<std::unique_ptr<SafetensorsWriter>>& writers, int64_t total_bytes,
              const WriteProgress& progress)
      : source_(source),
        shards_(shards),
        writers_(writers),
        total_bytes_(total_bytes),
        progress_(progress) {}

  Status Run(ThreadPool& pool) {
    const std::vector<Chunk> chunks = PlanChunks(shards_);
    pool.ParallelFor(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) Write(chunks[static_cast<size_t>(i)]);
    });
    return status_;
  }

 private:
  void Write(const Chunk& chunk) {
    if (failed_.load(std::memory_order_relaxed)) return;
    thread_local std::vector<std::byte> buffer;
    buffer.resize(static_cast<size_t>(chunk.bytes));
    const TensorInfo& tensor = shards_[chunk.shard].tensors[chunk.tensor];
    Status status = source_.Read(tensor, chunk.offset, buffer);
    if (status.ok()) status = writers_[chunk.shard]->WriteAt(chunk.tensor, chunk.offset, buffer);
    const std::lock_guard lock(mutex_);
    if (!status.ok()) {
      failed_ = true;
      status_ = std::move(status);
      return;
    }
    done_bytes_ += chunk.bytes;
    if (progress_) progress_(done_bytes_, total_bytes_);
  }

  const TensorSource& source_;
  const std::vector<Shard>& shards_;
  const std::vector<std::unique_ptr<SafetensorsWriter>>& writers_;
  const int64_t total_bytes_;
  const WriteProgress& progress_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  Status status_;           // guarded by mutex_
  int64_t done_bytes_ = 0;  // guarded by mutex_
};

}  // namespace

Status WriteSyntheticCheckpoint(const SynthOptions& options, const WriteProgress& progress) {
  ASSIGN_OR_RETURN(const config::ModelConfig config,
                   ParseModelConfig(options.config_text, "config.json"));
  const std::unique_ptr<TensorSource> source = MakeSyntheticSource(config, options.seed);
  const std::vector<Shard> shards = PlanShards(ExpectedTensors(config), options.shard_bytes);
  int64_t total_bytes = 0;
  for (const TensorInfo& tensor : source->tensors()) total_bytes += tensor.bytes;
  RETURN_IF_ERROR(PrepareFolder(options.dir, total_bytes));

  FolderWriter folder(options.dir);
  std::vector<std::unique_ptr<SafetensorsWriter>> writers;
  for (const Shard& shard : shards) {
    ASSIGN_OR_RETURN(writers.emplace_back(),
                     SafetensorsWriter::Create(folder.PathOf(shard.name), shard.tensors));
  }
  ThreadPool pool(options.num_threads);
  RETURN_IF_ERROR(ShardFiller(*source, shards, writers, total_bytes, progress).Run(pool));
  for (size_t i = 0; i < shards.size(); ++i) RETURN_IF_ERROR(folder.Finish(shards[i], *writers[i]));
  RETURN_IF_ERROR(folder.WriteText("model.safetensors.index.json", MakeIndex(shards)));
  RETURN_IF_ERROR(folder.WriteText("tokenizer.json", kTinyTokenizer));
  RETURN_IF_ERROR(folder.WriteText("tokenizer_config.json", kTinyTokenizerConfig));
  RETURN_IF_ERROR(folder.WriteText("generation_config.json", kTinyGenerationConfig));
  // Last: a folder with a config is a model.
  RETURN_IF_ERROR(folder.WriteText("config.json", options.config_text));
  folder.Keep();
  return OkStatus();
}

}  // namespace fathom::checkpoint
