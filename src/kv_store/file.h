// File: an open file descriptor that closes itself, and reads and writes that go on after a short
// one. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace fathom::kv_store {

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File();
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;

  bool ok() const { return fd_ >= 0; }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Fills all of `out`, or returns false (errno is 0 at the file's end).
bool ReadAll(int fd, std::span<std::byte> out, int64_t offset);
// Appends both parts, or returns false with errno.
bool WriteAll(int fd, std::span<const std::byte> head, std::span<const std::byte> rest);

}  // namespace fathom::kv_store
