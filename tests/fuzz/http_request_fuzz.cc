// Any bytes from a connection: a request, an error, or more is wanted. A request is the same in
// whatever pieces it comes; an error may be found earlier in larger ones.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "http/request_parser.h"

namespace {

using fathom::http::Limits;
using fathom::http::RequestParser;
using Phase = RequestParser::Phase;

constexpr int64_t kMaxBodyBytes = 1000;

// The way of a connection where so many bytes arrive at a time; how many are left over.
size_t FeedInPieces(RequestParser& parser, std::string_view bytes, size_t piece) {
  std::string input;
  for (size_t begin = 0; begin < bytes.size(); begin += piece) {
    input += bytes.substr(begin, piece);
    bool goes_on = true;
    while (goes_on && !parser.error() && parser.phase() != Phase::kDone) {
      const Phase before = parser.phase();
      const size_t used = parser.Feed(input);
      CHECK_LE(used, input.size());
      input.erase(0, used);
      goes_on = used > 0 || parser.phase() != before;
    }
  }
  return input.size();
}

bool IsRequest(const RequestParser& parser) {
  return !parser.error() && parser.phase() == Phase::kDone;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Limits limits = {
      .max_body_bytes = kMaxBodyBytes, .max_header_bytes = 2000, .max_header_fields = 20};
  RequestParser whole(limits);
  const size_t left = FeedInPieces(whole, bytes, size + 1);
  CHECK_LE(static_cast<int64_t>(whole.request().body.size()), kMaxBodyBytes);
  for (const size_t piece : {1, 2, 5}) {
    RequestParser parser(limits);
    const size_t left_of_pieces = FeedInPieces(parser, bytes, piece);
    CHECK_EQ(IsRequest(parser), IsRequest(whole));
    if (!IsRequest(whole)) continue;
    CHECK(parser.request().body == whole.request().body);
    CHECK(parser.request().path == whole.request().path);
    CHECK_EQ(parser.request().headers.size(), whole.request().headers.size());
    CHECK_EQ(left_of_pieces, left);
  }
  return 0;
}
