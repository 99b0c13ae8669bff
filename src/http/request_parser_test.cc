#include "http/request_parser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fathom::http {
namespace {

using Phase = RequestParser::Phase;

constexpr Limits kDefaultLimits;

// Feeds `text` in parts of `step` bytes the way a connection does. Returns what was left over.
std::string FeedAll(RequestParser* parser, const std::string& text, size_t step) {
  std::string input;
  for (size_t at = 0; at < text.size(); at += step) {
    input += text.substr(at, step);
    while (!parser->error() && parser->phase() != Phase::kDone) {
      const Phase before = parser->phase();
      const size_t used = parser->Feed(input);
      input.erase(0, used);
      if (used == 0 && parser->phase() == before) break;
    }
  }
  return input;
}

int StatusOf(const std::string& text, const Limits& limits = kDefaultLimits) {
  int status = -1;
  for (const size_t step : {text.size(), size_t{1}, size_t{7}}) {
    RequestParser parser(limits);
    FeedAll(&parser, text, step);
    const int now = parser.error()                   ? parser.error()->status
                    : parser.phase() == Phase::kDone ? 200
                                                     : 0;
    if (status == -1) status = now;
    EXPECT_EQ(now, status) << "another answer when fed in parts of " << step;
  }
  return status;
}

TEST(RequestParser, GivesTheSameRequestForEverySplit) {
  const std::string text =
      "POST //v1/chat/?a=b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
      "Content-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\n";
  for (size_t step = 1; step <= text.size(); ++step) {
    RequestParser parser(kDefaultLimits);
    const std::string left = FeedAll(&parser, text, step);
    ASSERT_EQ(parser.phase(), Phase::kDone) << step;
    EXPECT_EQ(parser.request().method, "POST");
    EXPECT_EQ(parser.request().path, "/v1/chat");
    EXPECT_EQ(parser.request().query, "a=b");
    EXPECT_EQ(parser.request().body, "hello");
    EXPECT_EQ(*parser.request().FindHeader("content-TYPE"), "application/json");
    EXPECT_TRUE(parser.keep_alive());
    EXPECT_EQ(left, "GET / HTTP/1.1\r\n");
  }
}

TEST(RequestParser, ReadsChunkedBodiesAndDropsTrailers) {
  const std::string text =
      "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n"
      "3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\nnext";
  for (size_t step = 1; step <= text.size(); ++step) {
    RequestParser parser(kDefaultLimits);
    const std::string left = FeedAll(&parser, text, step);
    ASSERT_EQ(parser.phase(), Phase::kDone) << step;
    EXPECT_EQ(parser.request().body, "abc0123456789");
    EXPECT_EQ(parser.request().FindHeader("X-Trailer"), nullptr);
    EXPECT_EQ(left, "next");
  }
}

TEST(RequestParser, AcceptsAnEmptyChunkedBody) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const std::string last_chunk : {"0\r\n\r\n", "00\r\n\r\n", "0;a\r\nX: 1\r\n\r\n"}) {
    EXPECT_EQ(StatusOf(head + last_chunk), 200) << last_chunk;
  }
}

TEST(RequestParser, StopsAtTheEndOfTheHeaderOnce) {
  RequestParser parser(kDefaultLimits);
  const std::string text = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab";
  const size_t used = parser.Feed(text);
  EXPECT_EQ(text.substr(used), "ab");
  EXPECT_EQ(parser.phase(), Phase::kBody);
  EXPECT_EQ(parser.Feed("ab"), 2u);
  EXPECT_EQ(parser.phase(), Phase::kDone);
}

TEST(RequestParser, AcceptsHttp10WithoutHost) {
  RequestParser parser(kDefaultLimits);
  FeedAll(&parser, "GET /health HTTP/1.0\r\n\r\n", 100);
  EXPECT_EQ(parser.phase(), Phase::kDone);
  EXPECT_TRUE(parser.is_http_1_0());
  EXPECT_FALSE(parser.keep_alive());
}

TEST(RequestParser, SkipsOneOrTwoEmptyLinesBeforeTheRequest) {
  const std::string request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
  EXPECT_EQ(StatusOf("\r\n" + request), 200);
  EXPECT_EQ(StatusOf("\r\n\r\n" + request), 200);
  EXPECT_EQ(StatusOf("\r\n\r\n\r\n" + request), 400);
}

TEST(RequestParser, RefusesWhatCouldSmuggleASecondRequest) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\n";
  for (const std::string fields : {
           "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
           "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
           "Content-Length: 3\r\nContent-Length: 4\r\n",
           "Content-Length: 3\r\nContent-Length: 3\r\n",
           "Content-Length: 3, 3\r\n",
           "Content-Length: +3\r\n",
           "Content-Length: -3\r\n",
           "Content-Length: 0x3\r\n",
           "Content-Length: 99999999999999999999\r\n",
           "Transfer-Encoding: xchunked\r\n",
           "Transfer-Encoding: identity\r\n",
           "Transfer-Encoding: gzip, chunked\r\n",
           "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
           "X: a\r\n b\r\n",
           "X: a\r\n\tb\r\n",
           "X : a\r\n",
           "Host: y\r\n",
       }) {
    EXPECT_EQ(StatusOf(head + fields + "\r\nabc"), 400) << fields;
  }
}

TEST(RequestParser, RefusesMalformedRequests) {
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\r\n\r\n"), 400);                     // no Host
  EXPECT_EQ(StatusOf("GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n"), 400);  // absolute form
  EXPECT_EQ(StatusOf("CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n"), 400);
  EXPECT_EQ(StatusOf("GET /\r\n\r\n"), 400);  // HTTP/0.9
  EXPECT_EQ(StatusOf("GET / H\r\n\r\n"), 400);
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\nHost: x\n\n"), 400);  // bare LF
  EXPECT_EQ(StatusOf("GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n"), 400);
  EXPECT_EQ(StatusOf(std::string("GET / HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 33)), 400);
  EXPECT_EQ(StatusOf("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505);
  EXPECT_EQ(StatusOf("GET / HTTP/2.0\r\nHost: x\r\n\r\n"), 505);
  const std::string tls_hello("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  EXPECT_EQ(StatusOf(tls_hello), 400);
  EXPECT_EQ(StatusOf("POST / HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n"), 417);
}

TEST(RequestParser, RefusesMalformedChunks) {
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const std::string chunk :
       {"-2\r\nab\r\n", "+2\r\nab\r\n", "g\r\n", "2\r\nabc\r\n0\r\n\r\n"}) {
    EXPECT_EQ(StatusOf(head + chunk), 400) << chunk;
  }
  EXPECT_EQ(StatusOf(head + "12345678901234567\r\n"), 400);
  EXPECT_EQ(StatusOf(head + "FFFFFFFFFFFFFFFF\r\n"), 413);
  EXPECT_EQ(StatusOf(head + "2;" + std::string(10'000, 'a')), 400);
}

TEST(RequestParser, HoldsTheLimits) {
  Limits limits;
  limits.max_body_bytes = 10;
  limits.max_header_bytes = 1000;
  limits.max_header_fields = 10;
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\n";
  EXPECT_EQ(StatusOf(head + "Content-Length: 10\r\n\r\n0123456789", limits), 200);
  EXPECT_EQ(StatusOf(head + "Content-Length: 11\r\n\r\n", limits), 413);
  EXPECT_EQ(StatusOf(head + "Transfer-Encoding: chunked\r\n\r\n8\r\n01234567\r\n8\r\n", limits),
            413);
  EXPECT_EQ(StatusOf(head + "A: " + std::string(1000, 'a'), limits), 431);
  std::string fields;
  for (int i = 0; i < 9; ++i) fields += "A: b\r\n";
  EXPECT_EQ(StatusOf(head + fields + "\r\n", limits), 200);
  EXPECT_EQ(StatusOf(head + fields + "A: b\r\n\r\n", limits), 431);
}

TEST(RequestParser, SaysWhichLimitWasPassed) {
  Limits limits;
  limits.max_body_bytes = 10;
  limits.max_header_bytes = 1000;
  limits.max_header_fields = 3;
  const auto message = [&](const std::string& after_host) {
    RequestParser parser(limits);
    FeedAll(&parser, "POST / HTTP/1.1\r\nHost: x\r\n" + after_host, 1000);
    return parser.error() ? parser.error()->message : "";
  };
  EXPECT_EQ(message("Content-Length: 11\r\n\r\n"),
            "the request body is larger than the limit of 10 bytes");
  EXPECT_EQ(message("A: " + std::string(1000, 'a')),
            "the request header is larger than the limit of 1000 bytes");
  EXPECT_EQ(message("A: b\r\nA: b\r\nA: b\r\n\r\n"),
            "the header has more fields than the limit of 3");
}

TEST(RequestParser, CountsAHeaderThatComesInManySmallLines) {
  Limits limits;
  limits.max_header_bytes = 2000;
  RequestParser parser(limits);
  std::string text = "GET / HTTP/1.1\r\nHost: x\r\n";
  for (int i = 0; i < 90; ++i) text += "A: 01234567890123456789\r\n";
  FeedAll(&parser, text, 25);
  ASSERT_TRUE(parser.error());
  EXPECT_EQ(parser.error()->status, 431);
}

TEST(RequestParser, ReadsAMillionOneByteChunksWithoutKeepingThem) {
  RequestParser parser(kDefaultLimits);
  std::string input = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  input.erase(0, parser.Feed(input));
  for (int i = 0; i < 1'000'000; ++i) {
    input += "1\r\nx\r\n";
    input.erase(0, parser.Feed(input));
    ASSERT_LT(input.size(), 16u);
  }
  EXPECT_FALSE(parser.error());
  EXPECT_EQ(parser.request().body.size(), 1'000'000u);
}

}  // namespace
}  // namespace fathom::http
