// HTTP messages as values: what a handler is given and what it answers. No sockets; any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fathom::http {

struct Header {
  std::string name;
  std::string value;
};

struct Request {
  std::string method;
  std::string path;   // begins with '/'; no query, no double or trailing slash; not percent-decoded
  std::string query;  // after '?', raw
  std::string route;  // the pattern that matched; empty: none did
  std::string path_tail;  // what '*' of a "/prefix/*" pattern matched, percent-decoded
  std::vector<Header> headers;
  std::string body;
  std::string peer;  // "address:port"

  // The first header of that name (case-insensitive), or null.
  const std::string* FindHeader(std::string_view name) const;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<Header> headers;  // besides Content-Type, Content-Length, Date and Connection
  std::string body;
};

bool EqualsIgnoringCase(std::string_view a, std::string_view b);
std::string_view ReasonPhrase(int status);

// "//v1/models/?x=1" -> path "/v1/models", query "x=1". False: the target is no origin-form path.
bool SplitTarget(std::string_view target, std::string* path, std::string* query);
// %XX decoded; a malformed escape stays as it is.
std::string PercentDecode(std::string_view text);

}  // namespace fathom::http
