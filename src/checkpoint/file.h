// Files of a model folder. Reading: regular files only, by pread, so that a file that shrinks is an
// error and never a signal. Messages name the path and the remedy. Reads may run on many threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom::checkpoint {

// Owns a file descriptor; movable.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { Close(); }
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  int get() const { return fd_; }
  void Close();

 private:
  int fd_ = -1;
};

class InputFile {
 public:
  // kBadModel when it is missing, unreadable, or no regular file (a folder, a pipe, a device).
  static Result<InputFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }  // when opened
  Status ReadAt(int64_t offset, std::span<std::byte> out) const;

 private:
  InputFile(FileDescriptor fd, std::string path, int64_t bytes);
  FileDescriptor fd_;
  std::string path_;
  int64_t bytes_;
};

// The whole of a small file; kBadModel when it is larger than max_bytes.
Result<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);

// A file that appears under its name only when whole: written as PATH.partial, which Commit renames
// and the destructor removes. WriteAt may run on many threads.
class OutputFile {
 public:
  static Result<OutputFile> Create(const std::string& path);
  ~OutputFile();
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  Status WriteAt(int64_t offset, std::span<const std::byte> bytes) const;
  Status Commit();

 private:
  OutputFile(FileDescriptor fd, std::string path);
  FileDescriptor fd_;
  std::string path_;
  bool pending_ = true;  // the partial file exists
};

// Writes a small file whole or not at all.
Status WriteSmallFile(const std::string& path, std::string_view text);

}  // namespace fathom::checkpoint
