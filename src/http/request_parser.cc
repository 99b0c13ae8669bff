#include "http/request_parser.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <utility>

namespace fathom::http {

namespace beast = boost::beast;
namespace bhttp = boost::beast::http;

namespace {
// Before the request line; some clients leave one after a body.
constexpr int kMaxEmptyLines = 2;
// A chunk's size line with its extensions.
constexpr size_t kMaxChunkHeaderBytes = 4096;
// The shortest end of a chunked body. Beast asserts that all of it is there when it looks at a last
// chunk for the second time.
constexpr std::string_view kLastChunk = "0\r\n\r\n";
}  // namespace

// Receives Beast's events and keeps what they say.
class RequestParser::Grammar final : public bhttp::basic_parser<true> {
 public:
  explicit Grammar(const Limits& limits) : limits_(limits) {
    body_limit(static_cast<uint64_t>(limits.max_body_bytes));
    header_limit(static_cast<uint32_t>(limits.max_header_bytes));
    eager(true);
  }

  Request request;
  std::optional<ParseError> error;  // found here, more exact than the error code
  bool is_http_1_0 = false;
  int num_hosts = 0;
  bool expects_continue = false;

 private:
  using ErrorCode = beast::error_code;
  using View = beast::string_view;

  void Refuse(int status, std::string message, ErrorCode& ec) {
    error = ParseError{status, std::move(message)};
    ec = bhttp::error::bad_field;
  }

  void on_request_impl(bhttp::verb, View method, View target, int version, ErrorCode& ec) override {
    request.method = std::string(method);
    is_http_1_0 = version == 10;
    if (target == "*" && method == "OPTIONS") {
      request.path = "*";
    } else if (!SplitTarget({target.data(), target.size()}, &request.path, &request.query)) {
      Refuse(400, "the request target must be a path that begins with '/'", ec);
    }
  }

  void on_field_impl(bhttp::field field, View name, View value, ErrorCode& ec) override {
    if (++num_fields_ > limits_.max_header_fields) {
      return Refuse(431,
                    "the header has more fields than the limit of " +
                        std::to_string(limits_.max_header_fields),
                    ec);
    }
    if (is_header_done()) return;  // a trailer: counted and dropped
    const std::string_view text(value.data(), value.size());
    switch (field) {
      case bhttp::field::host:
        ++num_hosts;
        break;
      case bhttp::field::content_length:
        if (std::exchange(has_content_length_, true) || text.find(',') != text.npos) {
          return Refuse(400, "Content-Length is given more than once", ec);
        }
        break;
      case bhttp::field::transfer_encoding:
        if (is_http_1_0 || !EqualsIgnoringCase(text, "chunked")) {
          return Refuse(400, "the only Transfer-Encoding that is understood is chunked", ec);
        }
        break;
      case bhttp::field::expect:
        if (!EqualsIgnoringCase(text, "100-continue")) {
          return Refuse(417, "the only Expect that is understood is 100-continue", ec);
        }
        expects_continue = !is_http_1_0;
        break;
      default:
        break;
    }
    request.headers.push_back({std::string(name), std::string(text)});
  }

  size_t Append(View bytes) {
    request.body.append(bytes.data(), bytes.size());
    return bytes.size();
  }
  size_t on_body_impl(View bytes, ErrorCode&) override { return Append(bytes); }
  size_t on_chunk_body_impl(uint64_t, View bytes, ErrorCode&) override { return Append(bytes); }

  void on_response_impl(int, View, int, ErrorCode&) override {}
  void on_header_impl(ErrorCode&) override {}
  void on_body_init_impl(const boost::optional<uint64_t>&, ErrorCode&) override {}
  void on_chunk_header_impl(uint64_t, View, ErrorCode&) override {}
  void on_finish_impl(ErrorCode&) override {}

  const Limits& limits_;
  int num_fields_ = 0;
  bool has_content_length_ = false;
};

namespace {

ParseError TooLarge(int status, const char* what, int64_t limit_bytes) {
  return {status, std::string("the request ") + what + " is larger than the limit of " +
                      std::to_string(limit_bytes) + " bytes"};
}

ParseError FromBeast(const beast::error_code& ec, const Limits& limits) {
  if (ec == bhttp::error::body_limit) return TooLarge(413, "body", limits.max_body_bytes);
  if (ec == bhttp::error::header_limit) return TooLarge(431, "header", limits.max_header_bytes);
  if (ec == bhttp::error::bad_version) return {505, "the HTTP version must be 1.0 or 1.1"};
  return {400, "malformed HTTP request: " + ec.message()};
}

}  // namespace

RequestParser::RequestParser(const Limits& limits)
    : limits_(limits), grammar_(std::make_unique<Grammar>(limits)) {}
RequestParser::~RequestParser() = default;

Request& RequestParser::request() { return grammar_->request; }
bool RequestParser::keep_alive() const { return grammar_->keep_alive(); }
bool RequestParser::is_http_1_0() const { return grammar_->is_http_1_0; }
bool RequestParser::expects_continue() const { return grammar_->expects_continue; }

void RequestParser::Fail(int status, std::string message) {
  error_ = ParseError{status, std::move(message)};
}

size_t RequestParser::Feed(std::string_view bytes) {
  if (error_ || phase_ == Phase::kDone) return 0;
  if (phase_ == Phase::kBody) return FeedBody(bytes);
  size_t skipped = 0;
  if (phase_ == Phase::kStart) {
    while (num_empty_lines_ < kMaxEmptyLines && bytes.substr(skipped, 2) == "\r\n") {
      ++num_empty_lines_;
      skipped += 2;
    }
    if (bytes.size() == skipped || bytes.substr(skipped) == "\r") return skipped;
    phase_ = Phase::kHeader;
  }
  return skipped + FeedHeader(bytes.substr(skipped));
}

std::optional<size_t> RequestParser::ScanHeader(std::string_view bytes) {
  constexpr std::string_view kEnd = "\r\n\r\n";
  while (scanned_ < bytes.size()) {
    const char c = bytes[scanned_++];
    if (line_end_matched_ == 2 && (c == ' ' || c == '\t')) {
      Fail(400, "a header line must not begin with white space");
      return std::nullopt;
    }
    if (c == '\n' && line_end_matched_ % 2 == 0) {
      Fail(400, "a header line must end with CR LF");
      return std::nullopt;
    }
    if (c == kEnd[static_cast<size_t>(line_end_matched_)]) {
      if (++line_end_matched_ == 4) return scanned_;
    } else {
      line_end_matched_ = c == '\r' ? 1 : 0;
    }
  }
  return std::nullopt;
}

size_t RequestParser::FeedHeader(std::string_view bytes) {
  const std::optional<size_t> end = ScanHeader(bytes);
  if (error_) return 0;
  const std::string_view header = bytes.substr(0, end.value_or(bytes.size()));
  if (header_bytes_ + header.size() > static_cast<size_t>(limits_.max_header_bytes)) {
    error_ = TooLarge(431, "header", limits_.max_header_bytes);
    return 0;
  }
  size_t used = 0;
  beast::error_code ec;
  while (used < header.size() && !grammar_->is_header_done()) {
    const size_t n = grammar_->put({header.data() + used, header.size() - used}, ec);
    used += n;
    if (ec || n == 0) break;
  }
  header_bytes_ += used;
  scanned_ -= used;
  if (ec && ec != bhttp::error::need_more) {
    error_ = grammar_->error ? *grammar_->error : FromBeast(ec, limits_);
  } else if (grammar_->is_header_done()) {
    CheckHeader();
    phase_ = grammar_->is_done() ? Phase::kDone : Phase::kBody;
  } else if (end) {  // Beast waits for the rest of a request line that has none
    Fail(400, "malformed HTTP request: the request line is cut short");
  }
  return used;
}

void RequestParser::CheckHeader() {
  const int num_hosts = grammar_->num_hosts;
  if (num_hosts > 1 || (num_hosts == 0 && !grammar_->is_http_1_0)) {
    Fail(400, "exactly one Host header is expected");
  }
}

size_t RequestParser::FeedBody(std::string_view bytes) {
  const bool may_be_last_chunk = grammar_->chunked() && bytes.substr(0, 1) == "0";
  if (may_be_last_chunk && bytes.size() < kLastChunk.size()) return 0;
  size_t used = 0;
  beast::error_code ec;
  while (used < bytes.size() && !grammar_->is_done()) {
    const size_t n = grammar_->put({bytes.data() + used, bytes.size() - used}, ec);
    used += n;
    if (ec || n == 0) break;
  }
  if (ec && ec != bhttp::error::need_more) {
    error_ = grammar_->error ? *grammar_->error : FromBeast(ec, limits_);
  } else if (grammar_->is_done()) {
    phase_ = Phase::kDone;
  } else if (ec == bhttp::error::need_more && bytes.size() - used > kMaxChunkHeaderBytes) {
    Fail(400, "a chunk header or trailer is longer than 4096 bytes");
  }
  return used;
}

}  // namespace fathom::http
