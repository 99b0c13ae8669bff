#include "http/message.h"

#include <algorithm>

namespace fathom::http {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c = Lower(c);
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

bool EqualsIgnoringCase(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return Lower(x) == Lower(y); });
}

const std::string* Request::FindHeader(std::string_view name) const {
  for (const Header& header : headers) {
    if (EqualsIgnoringCase(header.name, name)) return &header.value;
  }
  return nullptr;
}

std::string_view ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    case 529:
      return "Overloaded";
    default:
      return "Unknown";
  }
}

bool SplitTarget(std::string_view target, std::string* path, std::string* query) {
  if (target.empty() || target.front() != '/') return false;
  const size_t mark = target.find('?');
  if (mark != std::string_view::npos) *query = target.substr(mark + 1);
  path->clear();
  for (const char c : target.substr(0, mark)) {
    if (c != '/' || path->empty() || path->back() != '/') *path += c;
  }
  if (path->size() > 1 && path->back() == '/') path->pop_back();
  return true;
}

std::string PercentDecode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? HexDigit(text[i + 1]) : -1;
    const int low = high >= 0 ? HexDigit(text[i + 2]) : -1;
    if (low < 0) {
      out += text[i];
      continue;
    }
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

}  // namespace fathom::http
