// Any bytes from another node: frames in any pieces, or what nodes tell each other when they meet.
// Refused, or the same when it is written and read again. The first byte says which.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "comm/frame.h"
#include "comm/roster.h"

namespace {

using fathom::comm::Encode;
using fathom::comm::Frame;
using fathom::comm::FrameParser;

constexpr size_t kMaxFrameBytes = 1000;

// The frames and whether the bytes were taken, given in pieces of this size.
bool ParseInPieces(std::string_view bytes, size_t piece, std::vector<Frame>* frames) {
  FrameParser parser(kMaxFrameBytes);
  for (size_t begin = 0; begin < bytes.size(); begin += piece) {
    if (!parser.Parse(bytes.substr(begin, piece), frames).ok()) return false;
  }
  return true;
}

void CheckFrames(std::string_view bytes) {
  std::vector<Frame> whole, pieces;
  const bool is_ok = ParseInPieces(bytes, bytes.size() + 1, &whole);
  CHECK_EQ(ParseInPieces(bytes, 1, &pieces), is_ok);
  CHECK_EQ(pieces.size(), whole.size());
  std::string again;
  for (size_t i = 0; i < whole.size(); ++i) {
    CHECK(whole[i].kind == pieces[i].kind && whole[i].bytes == pieces[i].bytes);
    CHECK_LE(whole[i].bytes.size(), kMaxFrameBytes);
    again += EncodeFrame(whole[i].kind, whole[i].bytes);
  }
  CHECK(bytes.starts_with(again));
}

void CheckJoinRequest(std::string_view bytes) {
  const auto request = fathom::comm::DecodeJoinRequest(bytes);
  if (!request.ok()) return;
  CHECK(Encode(*request) == bytes);
  fathom::comm::JoinRequest own;
  own.num_nodes = 2;
  own.host_name = "here";
  own.agreements = {{"model", "tiny"}};
  CHECK(FindDifference(*request, *request) != "");  // two of one node rank
  FindDifference(own, *request);
}

void CheckRoster(std::string_view bytes) {
  const auto roster = fathom::comm::DecodeRoster(bytes);
  if (!roster.ok()) return;
  CHECK(Encode(*roster) == bytes);
  CHECK_LE(roster->nodes.size(), static_cast<size_t>(fathom::comm::kMaxNodes));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      CheckFrames(bytes);
      break;
    case 1:
      CheckJoinRequest(bytes);
      break;
    default:
      CheckRoster(bytes);
  }
  return 0;
}
