// Frames: what a control connection carries: a length in 4 bytes, a kind in one, and that many
// bytes. FrameParser takes what arrives in any pieces; memory grows with what has arrived, not with
// the length that was announced. Values; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace fathom::comm {

enum class FrameKind : uint8_t {
  kMessage = 1,    // ControlLink::Broadcast, Send
  kHeartbeat = 2,  // no bytes
  kAbort = 3,      // why the group ends
  kEnd = 4,        // no bytes; nothing follows it
  kHello = 5,      // JoinRequest
  kRoster = 6,     // Roster
  kRefusal = 7,    // why the group does not begin
};

struct Frame {
  FrameKind kind;
  std::string bytes;
};

struct FrameHead {
  size_t num_bytes = 0;  // that follow
  FrameKind kind{};
};

inline constexpr size_t kFrameHeadBytes = 5;

// kPeer: too long, or of no known kind.
Result<FrameHead> DecodeFrameHead(std::string_view head, size_t max_bytes);

std::string EncodeFrame(FrameKind kind, std::string_view bytes);

class FrameParser {
 public:
  explicit FrameParser(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Appends the frames that these bytes complete. kPeer: as above; nothing can be parsed after it.
  Status Parse(std::string_view bytes, std::vector<Frame>* frames);

 private:
  size_t max_bytes_;
  std::string head_;   // of the next frame, until it is complete
  std::string bytes_;  // of the next frame, so far
};

}  // namespace fathom::comm
