#include "checkpoint/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace fathom::checkpoint {
namespace {

constexpr size_t kMaxTransferBytes = size_t{1} << 30;  // Linux moves at most 2 GiB a call
constexpr const char* kPartialSuffix = ".partial";

std::string ErrorText(int error) { return std::strerror(error); }

Status WriteError(const std::string& path, int error) {
  const char* remedy = "";
  if (error == ENOSPC || error == EDQUOT) remedy = "; free some space or choose another folder";
  if (error == EACCES || error == EPERM || error == EROFS)
    remedy = "; choose a folder you may write to";
  return InternalError(fmt::format("cannot write {}: {}{}", path, ErrorText(error), remedy));
}

const char* KindOf(const struct stat& info) {
  if (S_ISDIR(info.st_mode)) return "a folder";
  if (S_ISFIFO(info.st_mode)) return "a pipe";
  if (S_ISSOCK(info.st_mode)) return "a socket";
  return "a device";
}

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  Close();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

void FileDescriptor::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

InputFile::InputFile(FileDescriptor fd, std::string path, int64_t bytes)
    : fd_(std::move(fd)), path_(std::move(path)), bytes_(bytes) {}

Result<InputFile> InputFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a pipe that nobody writes to must not wait.
  FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return BadModel(fmt::format("cannot open {}: {}", path, ErrorText(errno)));
  struct stat info{};
  if (fstat(fd.get(), &info) != 0) {
    return BadModel(fmt::format("cannot read {}: {}", path, ErrorText(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return BadModel(fmt::format("{} is {}, expected a regular file", path, KindOf(info)));
  }
  return InputFile(std::move(fd), path, info.st_size);
}

Status InputFile::ReadAt(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = pread(fd_.get(), out.data(), std::min(out.size(), kMaxTransferBytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return BadModel(fmt::format("cannot read {}: {}", path_, ErrorText(errno)));
    if (n == 0) {
      return BadModel(
          fmt::format("{} ends at byte {}, {} bytes more were there when it was opened; is it "
                      "being rewritten?",
                      path_, offset, out.size()));
    }
    out = out.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

Result<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes) {
  ASSIGN_OR_RETURN(const InputFile file, InputFile::Open(path));
  if (file.bytes() > max_bytes) {
    return BadModel(
        fmt::format("{} has {} bytes, expected at most {}", path, file.bytes(), max_bytes));
  }
  std::string text(static_cast<size_t>(file.bytes()), '\0');
  RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(text))));
  return text;
}

OutputFile::OutputFile(FileDescriptor fd, std::string path)
    : fd_(std::move(fd)), path_(std::move(path)) {}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : fd_(std::move(other.fd_)),
      path_(std::move(other.path_)),
      pending_(std::exchange(other.pending_, false)) {}

OutputFile::~OutputFile() {
  if (pending_) unlink((path_ + kPartialSuffix).c_str());
}

Result<OutputFile> OutputFile::Create(const std::string& path) {
  const std::string partial = path + kPartialSuffix;
  FileDescriptor fd(open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (fd.get() < 0) return WriteError(partial, errno);
  return OutputFile(std::move(fd), path);
}

Status OutputFile::WriteAt(int64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n =
        pwrite(fd_.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return WriteError(path_, errno);
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return OkStatus();
}

Status OutputFile::Commit() {
  fd_.Close();
  if (std::rename((path_ + kPartialSuffix).c_str(), path_.c_str()) != 0)
    return WriteError(path_, errno);
  pending_ = false;
  return OkStatus();
}

Status WriteSmallFile(const std::string& path, std::string_view text) {
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  RETURN_IF_ERROR(file.WriteAt(0, std::as_bytes(std::span(text))));
  return file.Commit();
}

}  // namespace fathom::checkpoint
