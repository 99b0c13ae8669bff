// DiskStore: the records of the KV cache in a directory, read and written by threads of its own.
// Owned by the runtime; Submit, TakeEvents and WaitForEvent on one thread. Host slots that are
// given to Submit stay untouched until their event.
//
// A process has one, with a folder for each part: what the ranks of a stage and a data rank have.
// All share the threads, the bandwidth, and the end.
//
// A record is a file (segment.h): written under another name, then renamed, so that no reader sees
// half of it; named by its content, so that nothing is ever written twice. Files of earlier runs
// are found in the background; what is not ours or damaged is deleted. Writes keep to a bandwidth.
// When the disk is full or fails, the store is off: it says so once (for each part), answers
// everything with "no", and the server goes on. No fsync: after a power cut the checksums tell what
// was lost.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "kv_store/file.h"
#include "kv_store/segment.h"
#include "request/kv_transfers.h"

namespace fathom::kv_store {

struct DiskPart {
  std::string name;               // of its folder: the model's and layout's. Others are beside it
  int64_t payload_bytes[2] = {};  // of a block and a snapshot
};

struct DiskStoreOptions {
  std::filesystem::path directory;
  std::vector<DiskPart> parts;
  // Of the records, where another process has it; else the first part's folder keeps one.
  std::optional<StoreKey> key = {};
  int64_t write_bytes_per_second = 0;  // 0: no limit
  int num_read_threads = 8;
};

class DiskStore {
 public:
  // Makes the folders and the key where there are none, and takes the folders' locks.
  // kInvalidArgument when they cannot be used: not a directory, somebody else's, or another
  // server's at the moment.
  static Result<std::unique_ptr<DiskStore>> Open(const DiskStoreOptions& options);
  ~DiskStore();  // what waits is given up

  // Of the hashes of the records, too; the same as long as the first part's folder lives.
  const StoreKey& key() const { return key_; }

  // `slots`: where each of the part's ranks has the record's bytes, which are the same; none for a
  // delete.
  void Submit(size_t part, const request::KvStoreRequest& request,
              std::vector<std::span<std::byte>> slots);
  // The oldest; a few thousand at most, for a step that tells them to another node.
  std::vector<request::KvStoreEvent> TakeEvents(size_t part);
  // Returns when a part has events, or all have nothing to do, and at the latest after `timeout`.
  void WaitForEvent(Duration timeout);

 private:
  static constexpr size_t kMostEvents = 4096;
  struct Job {
    size_t part = 0;
    request::KvStoreRequest request;
    std::vector<std::span<std::byte>> slots;
  };
  DiskStore(const DiskStoreOptions& options, StoreKey key, std::vector<File> locks);
  std::filesystem::path FolderOf(size_t part) const;
  std::filesystem::path PathOf(const Job& job) const;
  void RunReader();
  void RunWriter();
  void Scan(size_t part);
  bool ScanFile(size_t part, const std::filesystem::path& path);
  bool Read(const Job& job);
  Status Write(const Job& job, int64_t& file_bytes);
  void Answer(const Job& job, bool ok, int64_t file_bytes = 0);
  void AddAnswer(const Job& job, bool ok, int64_t file_bytes);
  void TurnOff(const Status& why, const Job& failed);
  void Pace(int64_t bytes);

  const DiskStoreOptions options_;
  const StoreKey key_;
  const std::vector<File> locks_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, event_;
  std::deque<Job> reads_, writes_;                         // writes and deletes
  std::vector<std::deque<request::KvStoreEvent>> events_;  // of each part
  size_t num_open_;  // requests without an answer, and parts that are looked through
  bool off_ = false;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace fathom::kv_store
