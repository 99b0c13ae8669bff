#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "apps/fathom/model_session.h"

namespace fathom::app {

std::string HuggingFaceHome() {
  if (const char* hf_home = std::getenv("HF_HOME"); hf_home != nullptr && *hf_home != '\0')
    return hf_home;
  const char* home = std::getenv("HOME");
  return std::string(home == nullptr ? "" : home) + "/.cache/huggingface";
}

Result<std::string> ReadTextFile(const std::string& path) {
  const bool is_stdin = path == "-";
  std::FILE* file = is_stdin ? stdin : std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    return InvalidArgument(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  }
  std::string out;
  char buffer[1 << 16];
  size_t n = 0;
  while ((n = std::fread(buffer, 1, sizeof(buffer), file)) > 0) out.append(buffer, n);
  const bool failed = std::ferror(file) != 0;
  const int error = errno;
  if (!is_stdin) std::fclose(file);
  if (failed) return InvalidArgument(fmt::format("cannot read {}: {}", path, std::strerror(error)));
  return out;
}

}  // namespace fathom::app
