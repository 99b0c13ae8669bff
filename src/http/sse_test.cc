#include "http/sse.h"

#include <gtest/gtest.h>

namespace fathom::http {
namespace {

TEST(Sse, FramesData) { EXPECT_EQ(SseData("{\"a\":1}"), "data: {\"a\":1}\n\n"); }

TEST(Sse, GivesEveryLineItsOwnField) {
  EXPECT_EQ(SseData("a\n\nb"), "data: a\ndata: \ndata: b\n\n");
}

TEST(Sse, NamesEvents) { EXPECT_EQ(SseEvent("ping", "{}"), "event: ping\ndata: {}\n\n"); }

TEST(Sse, FramesComments) { EXPECT_EQ(SseComment("keep-alive"), ": keep-alive\n\n"); }

}  // namespace
}  // namespace fathom::http
