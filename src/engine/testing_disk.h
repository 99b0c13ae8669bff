// What tests of the KV cache on disk share: a directory for it, requests, and what a server says
// of it.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/metrics.h"
#include "engine/make_engine.h"
#include "engine/testing.h"

namespace fathom::engine {

// A folder of the test's own, with nothing in it.
class DiskDirectory {
 public:
  DiskDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "fathom-disk-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  ~DiskDirectory() {
    if (!root_.empty()) std::filesystem::remove_all(root_);
  }
  DiskDirectory(DiskDirectory&& other) noexcept : root_(std::exchange(other.root_, {})) {}
  DiskDirectory& operator=(DiskDirectory&& other) noexcept {
    std::swap(root_, other.root_);
    return *this;
  }

  KvTierOptions Tiers() const {
    return {.host_bytes = int64_t{64} << 20,
            .disk_directory = root_ / "kv",
            .disk_write_bytes_per_second = 0,
            .model_fingerprint = "model"};
  }
  void Clear() { std::filesystem::remove_all(root_ / "kv"); }

  // Of the folders whose names end so.
  std::vector<std::filesystem::path> Records(std::string_view folder = "") const {
    std::vector<std::filesystem::path> files;
    std::error_code error;  // files come and go
    for (auto it = std::filesystem::recursive_directory_iterator(root_ / "kv", error);
         !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
      const auto extension = it->path().extension();
      const bool is_record = extension == ".block" || extension == ".snapshot";
      if (is_record && it->path().string().find(folder) != std::string::npos) {
        files.push_back(it->path());
      }
    }
    return files;
  }
  int64_t RecordBytes() const {
    int64_t bytes = 0;
    std::error_code error;
    for (const auto& file : Records()) {
      const auto size = std::filesystem::file_size(file, error);
      if (!error) bytes += static_cast<int64_t>(size);
    }
    return bytes;
  }
  std::filesystem::path Folder(std::string_view end) const {
    for (const auto& entry : std::filesystem::directory_iterator(root_ / "kv")) {
      if (entry.path().string().ends_with(end)) return entry.path();
    }
    ADD_FAILURE() << "no folder " << end;
    return {};
  }

 private:
  std::filesystem::path root_;
};

// Of all data ranks.
inline int64_t SumOfMetric(const MetricsRegistry& metrics, std::string_view name,
                           std::string_view label = "") {
  std::istringstream text(metrics.ExposeText());
  double sum = 0;
  for (std::string line; std::getline(text, line);) {
    if (!line.starts_with(std::string(name) + "{")) continue;
    if (line.find(label) == std::string::npos) continue;
    sum += std::stod(line.substr(line.rfind(' ')));
  }
  return static_cast<int64_t>(sum);
}

struct CachedAnswer {
  std::vector<int32_t> token_ids;
  int num_cached_tokens = 0;
};

// 20 tokens, greedy; `request` says whose.
inline CachedAnswer Ask20(Engine& engine, request::Request request) {
  request.id = engine.NextRequestId();
  request.sampling.temperature = 0;
  request.sampling.max_tokens = 20;
  request.sampling.ignore_eos = true;
  request.arrival = SystemClock().Now();
  const auto sink = std::make_shared<CollectingSink>();
  EXPECT_TRUE(engine.Submit(std::move(request), sink).ok());
  const request::TokenEvent last = sink->Wait();
  EXPECT_EQ(last.finish_reason, request::FinishReason::kLength) << last.error.message();
  return {sink->token_ids(), last.num_cached_tokens};
}

inline void WaitUntil(const std::function<bool()>& done) {
  for (int i = 0; i < 6000 && !done(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(done());
}

}  // namespace fathom::engine
