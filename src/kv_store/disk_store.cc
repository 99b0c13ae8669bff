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

Result<File> LockDirectory(const fs::path& path) {
  File file(open((path / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file.ok()) return DirectoryError(path, "cannot make a lock file");
  if (flock(file.fd(), LOCK_EX | LOCK_NB) == 0) return file;
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
  CHECK(!options.parts.empty());
  RETURN_IF_ERROR(MakePrivateDirectory(options.directory));
  std::vector<File> locks;
  for (const DiskPart& part : options.parts) {
    const fs::path folder = options.directory / part.name;
    RETURN_IF_ERROR(MakePrivateDirectory(folder));
    ASSIGN_OR_RETURN(File lock, LockDirectory(folder));
    locks.push_back(std::move(lock));
  }
  StoreKey key;
  if (options.key) {
    key = *options.key;
  } else {
    ASSIGN_OR_RETURN(key, ReadOrMakeKey(options.directory / options.parts[0].name));
  }
  return std::unique_ptr<DiskStore>(new DiskStore(options, key, std::move(locks)));
}

DiskStore::DiskStore(const DiskStoreOptions& options, StoreKey key, std::vector<File> locks)
    : options_(options),
      key_(key),
      locks_(std::move(locks)),
      events_(options.parts.size()),
      num_open_(options.parts.size()) {
  threads_.emplace_back([this] { RunWriter(); });
  for (int i = 0; i < options.num_read_threads; ++i) {
    threads_.emplace_back([this] { RunReader(); });
  }
}

fs::path DiskStore::FolderOf(size_t part) const {
  return options_.directory / options_.parts[part].name;
}

fs::path DiskStore::PathOf(const Job& job) const {
  return FolderOf(job.part) / SegmentPath(job.request.record);
}

DiskStore::~DiskStore() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DiskStore::Submit(size_t part, const KvStoreRequest& request,
                       std::vector<std::span<std::byte>> slots) {
  std::lock_guard lock(mutex_);
  const bool is_delete = request.kind == KvStoreRequest::Kind::kDelete;
  Job job{.part = part, .request = request, .slots = std::move(slots)};
  if (!is_delete) ++num_open_;
  if (off_) return AddAnswer(job, false, 0);
  const bool is_read = request.kind == KvStoreRequest::Kind::kRead;
  (is_read ? reads_ : writes_).push_back(std::move(job));
  work_.notify_all();
}

void DiskStore::Answer(const Job& job, bool ok, int64_t file_bytes) {
  std::lock_guard lock(mutex_);
  AddAnswer(job, ok, file_bytes);
}

// Under the mutex.
void DiskStore::AddAnswer(const Job& job, bool ok, int64_t file_bytes) {
  if (job.request.kind == KvStoreRequest::Kind::kDelete) return;
  const bool is_read = job.request.kind == KvStoreRequest::Kind::kRead;
  events_[job.part].push_back(
      {.kind = is_read ? KvStoreEvent::Kind::kRead : KvStoreEvent::Kind::kWrite,
       .record = job.request.record,
       .host_slot = job.request.host_slot,
       .file_bytes = file_bytes,
       .ok = ok});
  --num_open_;
  event_.notify_all();
}

std::vector<KvStoreEvent> DiskStore::TakeEvents(size_t part) {
  std::lock_guard lock(mutex_);
  std::deque<KvStoreEvent>& events = events_[part];
  std::vector<KvStoreEvent> taken;
  while (!events.empty() && taken.size() < kMostEvents) {
    taken.push_back(std::move(events.front()));
    events.pop_front();
  }
  return taken;
}

void DiskStore::WaitForEvent(Duration timeout) {
  std::unique_lock lock(mutex_);
  event_.wait_for(lock, timeout, [this] {
    return num_open_ == 0 || std::any_of(events_.begin(), events_.end(),
                                         [](const auto& events) { return !events.empty(); });
  });
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
  for (size_t part = 0; part < options_.parts.size(); ++part) Scan(part);
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
      unlink(PathOf(job).c_str());
      continue;
    }
    int64_t file_bytes = 0;
    const Status status = Write(job, file_bytes);
    if (!status.ok()) return TurnOff(status, job);
    Answer(job, true, file_bytes);
    Pace(file_bytes);
  }
}

// Answers every request that waits, and from now on each one at once.
void DiskStore::TurnOff(const Status& why, const Job& failed) {
  LogWarning("the KV cache's disk is off: {}", why.message());
  std::lock_guard lock(mutex_);
  off_ = true;
  AddAnswer(failed, false, 0);
  for (std::deque<Job>* jobs : {&reads_, &writes_}) {
    for (const Job& job : *jobs) AddAnswer(job, false, 0);
    jobs->clear();
  }
  for (auto& events : events_) events.push_back({.kind = KvStoreEvent::Kind::kOff});
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
  const std::span<const std::byte> payload = job.slots.front();
  const std::vector<std::byte> head = MakeSegmentHead(job.request.record, payload, key_);
  const fs::path path = PathOf(job);
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
    if (!WriteAll(file.fd(), head, payload)) return failed("write");
  }
  if (rename(part.c_str(), path.c_str()) != 0) return failed("rename");
  file_bytes = static_cast<int64_t>(head.size() + payload.size());
  return OkStatus();
}

bool DiskStore::Read(const Job& job) {
  const KvRecord& record = job.request.record;
  const fs::path path = PathOf(job);
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (!file.ok() || fstat(file.fd(), &info) != 0) return false;
  const std::span<std::byte> payload = job.slots.front();
  // All of it at once, instead of what the kernel reads ahead by itself.
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_WILLNEED);
  std::vector<std::byte> head(SegmentHeadBytes(record.kind));
  if (ReadAll(file.fd(), head, 0) &&
      ReadAll(file.fd(), payload, static_cast<int64_t>(head.size()))) {
    const auto found = ParseSegmentHead(head, info.st_size, key_);
    if (found.ok() && *found == record && IsPayloadIntact(head, payload, key_)) {
      for (size_t i = 1; i < job.slots.size(); ++i)
        std::ranges::copy(payload, job.slots[i].begin());
      return true;
    }
  }
  LogWarning("the KV cache deletes {}: it is damaged", path.string());
  unlink(path.c_str());
  return false;
}

// What earlier runs left, oldest first, so that the cache takes it for older.
void DiskStore::Scan(size_t part) {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(FolderOf(part), error);
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
    if (ScanFile(part, path)) continue;
    unlink(path.c_str());
    ++num_deleted;
  }
  {
    std::lock_guard lock(mutex_);
    events_[part].push_back({.kind = KvStoreEvent::Kind::kIndexed});
    --num_open_;
    event_.notify_all();
  }
  if (files.empty()) return;
  LogInfo("KV cache on disk: {} records found, {} files deleted that are not intact",
          static_cast<int64_t>(files.size()) - num_deleted, num_deleted);
}

bool DiskStore::ScanFile(size_t part, const fs::path& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (!file.ok() || fstat(file.fd(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const auto bytes = std::min<int64_t>(info.st_size, int64_t{kMaxSegmentHeadBytes});
  std::vector<std::byte> head(static_cast<size_t>(bytes));
  if (!ReadAll(file.fd(), head, 0)) return false;
  const auto record = ParseSegmentHead(head, info.st_size, key_);
  if (!record.ok() || FolderOf(part) / SegmentPath(*record) != path) return false;
  const auto head_bytes = static_cast<int64_t>(SegmentHeadBytes(record->kind));
  const int64_t payload_bytes =
      options_.parts[part].payload_bytes[static_cast<size_t>(record->kind)];
  if (info.st_size != head_bytes + payload_bytes) return false;
  std::lock_guard lock(mutex_);
  events_[part].push_back(
      {.kind = KvStoreEvent::Kind::kFound, .record = *record, .file_bytes = info.st_size});
  event_.notify_all();
  return true;
}

}  // namespace fathom::kv_store
