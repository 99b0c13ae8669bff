#include "http/sse.h"

namespace fathom::http {

std::string SseData(std::string_view data) {
  std::string out;
  out.reserve(data.size() + 8);
  size_t begin = 0;
  while (true) {
    const size_t end = data.find('\n', begin);
    out += "data: ";
    out += data.substr(begin, end - begin);
    out += '\n';
    if (end == std::string_view::npos) break;
    begin = end + 1;
  }
  return out += '\n';
}

std::string SseEvent(std::string_view name, std::string_view data) {
  return "event: " + std::string(name) + "\n" + SseData(data);
}

std::string SseComment(std::string_view text) { return ": " + std::string(text) + "\n\n"; }

}  // namespace fathom::http
