// DiskStore: the records of the KV cache in a directory, read and written by threads of its own.
// Owned by the runtime; Submit, TakeEvents and WaitForEvent on the worker's thread. Host slots that
// are given to Submit stay untouched until their event.
//
// A record is a file (segment.h): written under another name, then renamed, so that no reader sees
// half of it; named by its content, so that nothing is ever written twice. Files of earlier runs
// are found in the background; what is not ours or damaged is deleted. Writes keep to a bandwidth.
// When the disk is full or fails, the store is off: it says so once, answers everything with "no",
// and the server goes on. No fsync: after a power cut the checksums tell what was lost.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "kv_store/segment.h"
#include "request/kv_transfers.h"

namespace fathom::kv_store {

struct DiskStoreOptions {
  std::filesystem::path directory;
  // A directory is for one key: the model's and layout's name. Others have theirs beside it.
  std::string content_name;
  int64_t payload_bytes[2] = {};       // of a block and a snapshot
  int64_t write_bytes_per_second = 0;  // 0: no limit
  int num_read_threads = 8;
};

class DiskStore {
 public:
  // Makes the directory and its key where there are none, and takes its lock. kInvalidArgument when
  // it cannot be used: not a directory, somebody else's, or another server's at the moment.
  static Result<std::unique_ptr<DiskStore>> Open(const DiskStoreOptions& options);
  ~DiskStore();  // what waits is given up

  // Of the hashes of the records, too; the same as long as the directory lives.
  const StoreKey& key() const { return key_; }

  // `slot`: the record's bytes; empty for a delete.
  void Submit(const request::KvStoreRequest& request, std::span<std::byte> slot);
  std::vector<request::KvStoreEvent> TakeEvents();
  // Returns when there are events, and at the latest after `timeout`.
  void WaitForEvent(Duration timeout);

 private:
  struct Job {
    request::KvStoreRequest request;
    std::span<std::byte> slot;
  };
  DiskStore(const DiskStoreOptions& options, std::filesystem::path directory, StoreKey key,
            int lock_fd);
  void RunReader();
  void RunWriter();
  void Scan();
  bool ScanFile(const std::filesystem::path& path);
  bool Read(const Job& job);
  Status Write(const Job& job, int64_t& file_bytes);
  void Answer(const Job& job, bool ok, int64_t file_bytes = 0);
  void TurnOff(const Status& why);
  void Pace(int64_t bytes);

  const DiskStoreOptions options_;
  const std::filesystem::path directory_;
  const StoreKey key_;
  const int lock_fd_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, event_;
  std::deque<Job> reads_, writes_;  // writes and deletes
  std::vector<request::KvStoreEvent> events_;
  bool off_ = false;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace fathom::kv_store
