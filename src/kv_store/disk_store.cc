#include "kv_store/disk_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "kv_store/file.h"

namespace fathom::kv_store {

using request::KvRecord;
using request::KvStoreEvent;
using request::KvStoreRequest;

namespace fs = std::filesystem;

namespace {

Status DirectoryError(const fs::path& path, const char* what) {
  return InvalidArgument(
      fmt::format("--kv-disk-dir {}: {}: {}", path.string(), what, std::strerror(errno)));
}

// Ours and nobody else's to write: what is in it is taken for our own.
Status MakePrivateDirectory(const fs::path& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return DirectoryError(path, "mkdir");
  struct stat info{};
  if (stat(path.c_str(), &info) != 0) return DirectoryError(path, "stat");
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return InvalidArgument(fmt::format(
        "--kv-disk-dir {}: it must be a directory of this user that nobody else can write to "
        "(chmod 700)",
        path.string()));
  }
  return OkStatus();
}

Result<int> LockDirectory(const fs::path& path) {
  const int fd = open((path / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return DirectoryError(path, "cannot make a lock file");
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  close(fd);
  return InvalidArgument(fmt::format(
      "--kv-disk-dir {}: another server uses it: give each server a directory of its own",
      path.string()));
}

Result<StoreKey> ReadOrMakeKey(const fs::path& path) {
  StoreKey key;
  {
    const File file(open((path / "key").c_str(), O_RDONLY | O_CLOEXEC));
    if (file.ok() && ReadAll(file.fd(), std::as_writable_bytes(std::span(key)), 0)) return key;
  }
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    return DirectoryError(path, "getrandom");
  }
  const fs::path part = path / "key.part";
  const File file(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file.ok() || !WriteAll(file.fd(), std::as_bytes(std::span(key)), {}) ||
      fsync(file.fd()) != 0 || rename(part.c_str(), (path / "key").c_str()) != 0) {
    return DirectoryError(path, "cannot write the key");
  }
  return key;
}

}  // namespace

Result<std::unique_ptr<DiskStore>> DiskStore::Open(const DiskStoreOptions& options) {
  RETURN_IF_ERROR(MakePrivateDirectory(options.directory));
  const fs::path directory = options.directory / options.content_name;
  RETURN_IF_ERROR(MakePrivateDirectory(directory));
  ASSIGN_OR_RETURN(const int lock_fd, LockDirectory(directory));
  auto key = ReadOrMakeKey(directory);
  if (!key.ok()) {
    close(lock_fd);
    return key.status();
  }
  return std::unique_ptr<DiskStore>(new DiskStore(options, directory, *key, lock_fd));
}

DiskStore::DiskStore(const DiskStoreOptions& options, fs::path directory, StoreKey key, int lock_fd)
    : options_(options), directory_(std::move(directory)), key_(key), lock_fd_(lock_fd) {
  threads_.emplace_back([this] { RunWriter(); });
  for (int i = 0; i < options.num_read_threads; ++i) {
    threads_.emplace_back([this] { RunReader(); });
  }
}

DiskStore::~DiskStore() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  close(lock_fd_);
}

void DiskStore::Submit(const KvStoreRequest& request, std::span<std::byte> slot) {
  {
    std::lock_guard lock(mutex_);
    if (!off_) {
      const bool is_read = request.kind == KvStoreRequest::Kind::kRead;
      (is_read ? reads_ : writes_).push_back({request, slot});
      work_.notify_all();
      return;
    }
  }
  Answer({request, slot}, false);
}

void DiskStore::Answer(const Job& job, bool ok, int64_t file_bytes) {
  if (job.request.kind == KvStoreRequest::Kind::kDelete) return;
  const bool is_read = job.request.kind == KvStoreRequest::Kind::kRead;
  std::lock_guard lock(mutex_);
  events_.push_back({.kind = is_read ? KvStoreEvent::Kind::kRead : KvStoreEvent::Kind::kWrite,
                     .record = job.request.record,
                     .host_slot = job.request.host_slot,
                     .file_bytes = file_bytes,
                     .ok = ok});
  event_.notify_all();
}

std::vector<KvStoreEvent> DiskStore::TakeEvents() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

void DiskStore::WaitForEvent(Duration timeout) {
  std::unique_lock lock(mutex_);
  event_.wait_for(lock, timeout, [this] { return !events_.empty(); });
}

void DiskStore::RunReader() {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !reads_.empty(); });
      if (stopping_) return;
      job = std::move(reads_.front());
      reads_.pop_front();
    }
    Answer(job, Read(job));
  }
}

void DiskStore::RunWriter() {
  Scan();
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !writes_.empty(); });
      if (stopping_) return;
      job = std::move(writes_.front());
      writes_.pop_front();
    }
    if (job.request.kind == KvStoreRequest::Kind::kDelete) {
      unlink((directory_ / SegmentPath(job.request.record)).c_str());
      continue;
    }
    int64_t file_bytes = 0;
    const Status status = Write(job, file_bytes);
    Answer(job, status.ok(), file_bytes);
    if (!status.ok()) {
      TurnOff(status);
      return;
    }
    Pace(file_bytes);
  }
}

// Answers every request that waits, and from now on each one at once.
void DiskStore::TurnOff(const Status& why) {
  LogWarning("the KV cache's disk is off: {}", why.message());
  std::deque<Job> left;
  {
    std::lock_guard lock(mutex_);
    off_ = true;
    left.swap(reads_);
    left.insert(left.end(), writes_.begin(), writes_.end());
    writes_.clear();
  }
  for (const Job& job : left) Answer(job, false);
  std::lock_guard lock(mutex_);
  events_.push_back({.kind = KvStoreEvent::Kind::kOff});
  event_.notify_all();
}

void DiskStore::Pace(int64_t bytes) {
  if (options_.write_bytes_per_second <= 0) return;
  const std::chrono::duration<double> time(static_cast<double>(bytes) /
                                           static_cast<double>(options_.write_bytes_per_second));
  std::unique_lock lock(mutex_);
  work_.wait_for(lock, time, [this] { return stopping_; });
}

Status DiskStore::Write(const Job& job, int64_t& file_bytes) {
  const std::vector<std::byte> head = MakeSegmentHead(job.request.record, job.slot, key_);
  const fs::path path = directory_ / SegmentPath(job.request.record);
  const fs::path part = path.string() + ".part";
  const auto failed = [&](const char* what) {
    const int error = errno;
    unlink(part.c_str());
    return Unavailable(fmt::format("{}: {}: {}", path.string(), what, std::strerror(error)));
  };
  if (mkdir(path.parent_path().c_str(), 0700) != 0 && errno != EEXIST) return failed("mkdir");
  {
    const File file(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.ok()) return failed("open");
    if (!WriteAll(file.fd(), head, job.slot)) return failed("write");
  }
  if (rename(part.c_str(), path.c_str()) != 0) return failed("rename");
  file_bytes = static_cast<int64_t>(head.size() + job.slot.size());
  return OkStatus();
}

bool DiskStore::Read(const Job& job) {
  const KvRecord& record = job.request.record;
  const fs::path path = directory_ / SegmentPath(record);
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (!file.ok() || fstat(file.fd(), &info) != 0) return false;
  // All of it at once, instead of what the kernel reads ahead by itself.
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_WILLNEED);
  std::vector<std::byte> head(SegmentHeadBytes(record.kind));
  if (ReadAll(file.fd(), head, 0) &&
      ReadAll(file.fd(), job.slot, static_cast<int64_t>(head.size()))) {
    const auto found = ParseSegmentHead(head, info.st_size, key_);
    if (found.ok() && *found == record && IsPayloadIntact(head, job.slot, key_)) return true;
  }
  LogWarning("the KV cache deletes {}: it is damaged", path.string());
  unlink(path.c_str());
  return false;
}

// What earlier runs left, oldest first, so that the cache takes it for older.
void DiskStore::Scan() {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(directory_, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const fs::path name = it->path().filename();
    if (name == "lock" || name == "key" || it->is_directory(error)) continue;
    files.emplace_back(it->last_write_time(error), it->path());
  }
  std::sort(files.begin(), files.end());
  int64_t num_deleted = 0;
  for (const auto& [time, path] : files) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    if (ScanFile(path)) continue;
    unlink(path.c_str());
    ++num_deleted;
  }
  {
    std::lock_guard lock(mutex_);
    events_.push_back({.kind = KvStoreEvent::Kind::kIndexed});
    event_.notify_all();
  }
  if (files.empty()) return;
  LogInfo("KV cache on disk: {} records found, {} files deleted that are not intact",
          static_cast<int64_t>(files.size()) - num_deleted, num_deleted);
}

bool DiskStore::ScanFile(const fs::path& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (!file.ok() || fstat(file.fd(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const auto bytes = std::min<int64_t>(info.st_size, int64_t{kMaxSegmentHeadBytes});
  std::vector<std::byte> head(static_cast<size_t>(bytes));
  if (!ReadAll(file.fd(), head, 0)) return false;
  const auto record = ParseSegmentHead(head, info.st_size, key_);
  if (!record.ok() || directory_ / SegmentPath(*record) != path) return false;
  const auto head_bytes = static_cast<int64_t>(SegmentHeadBytes(record->kind));
  const int64_t payload_bytes = options_.payload_bytes[static_cast<size_t>(record->kind)];
  if (info.st_size != head_bytes + payload_bytes) return false;
  std::lock_guard lock(mutex_);
  events_.push_back(
      {.kind = KvStoreEvent::Kind::kFound, .record = *record, .file_bytes = info.st_size});
  event_.notify_all();
  return true;
}

}  // namespace fathom::kv_store
