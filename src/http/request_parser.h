// RequestParser: the bytes of one HTTP/1.x request to a Request, strictly. Beast's parser does the
// grammar; this adds what it lets through: obs-fold, unknown transfer codings, a missing or second
// Host, repeated Content-Length, too many fields, a header sent in endless small parts. One thread,
// one request.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "http/limits.h"
#include "http/message.h"

namespace fathom::http {

struct ParseError {
  int status = 400;  // 400, 413, 431 or 505
  std::string message;
};

class RequestParser {
 public:
  enum class Phase { kStart, kHeader, kBody, kDone };

  explicit RequestParser(const Limits& limits);  // which outlive it
  explicit RequestParser(Limits&&) = delete;
  ~RequestParser();

  // `bytes` starts at the first byte not yet consumed. Returns how many were consumed; stops at the
  // end of the header once, so that the caller can refuse a request before its body is read. After
  // an error the connection cannot be used further.
  size_t Feed(std::string_view bytes);

  Phase phase() const { return phase_; }
  const std::optional<ParseError>& error() const { return error_; }
  Request& request();
  // Of a complete header:
  bool keep_alive() const;
  bool is_http_1_0() const;
  bool expects_continue() const;

 private:
  class Grammar;

  size_t FeedHeader(std::string_view bytes);
  size_t FeedBody(std::string_view bytes);
  // Looks at the bytes that came since the last call. Returns the header's length when its end is
  // there.
  std::optional<size_t> ScanHeader(std::string_view bytes);
  void CheckHeader();
  void Fail(int status, std::string message);

  const Limits& limits_;
  std::unique_ptr<Grammar> grammar_;
  Phase phase_ = Phase::kStart;
  std::optional<ParseError> error_;
  int num_empty_lines_ = 0;
  size_t scanned_ = 0;        // bytes at the front of the next Feed that ScanHeader has seen
  int line_end_matched_ = 0;  // how many bytes of CR LF CR LF were just seen
  size_t header_bytes_ = 0;   // consumed by the grammar
};

}  // namespace fathom::http
