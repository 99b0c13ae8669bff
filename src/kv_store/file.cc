#include "kv_store/file.h"

#include <unistd.h>

#include <cerrno>

namespace fathom::kv_store {

namespace {

bool WritePart(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return true;
}

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

bool ReadAll(int fd, std::span<std::byte> out, int64_t offset) {
  while (!out.empty()) {
    const ssize_t n = pread(fd, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = 0;
    if (n <= 0) return false;
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return true;
}

bool WriteAll(int fd, std::span<const std::byte> head, std::span<const std::byte> rest) {
  return WritePart(fd, head) && WritePart(fd, rest);
}

}  // namespace fathom::kv_store
