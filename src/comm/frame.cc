#include "comm/frame.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/byte_codec.h"

namespace fathom::comm {
namespace {

// Moves bytes from the front of `from` until `to` has `size`; whether it has.
bool Fill(std::string& to, size_t size, std::string_view& from) {
  const size_t part = std::min(size - to.size(), from.size());
  to += from.substr(0, part);
  from.remove_prefix(part);
  return to.size() == size;
}

}  // namespace

std::string EncodeFrame(FrameKind kind, std::string_view bytes) {
  CHECK_LE(bytes.size(), size_t{UINT32_MAX});
  ByteWriter writer;
  writer.Put(static_cast<uint32_t>(bytes.size()));
  writer.Put(static_cast<uint8_t>(kind));
  writer.PutBytes(bytes);
  return writer.Take();
}

Result<FrameHead> DecodeFrameHead(std::string_view head, size_t max_bytes) {
  ByteReader reader(head);
  const auto size = reader.Get<uint32_t>();
  const auto kind = reader.Get<uint8_t>();
  if (size > max_bytes) {
    return PeerError(fmt::format("it sends a message of {} bytes; at most {}", size, max_bytes));
  }
  if (kind < static_cast<uint8_t>(FrameKind::kMessage) ||
      kind > static_cast<uint8_t>(FrameKind::kRefusal)) {
    return PeerError(fmt::format("it sends a message of the unknown kind {}", kind));
  }
  return FrameHead{size, static_cast<FrameKind>(kind)};
}

Status FrameParser::Parse(std::string_view bytes, std::vector<Frame>* frames) {
  while (!bytes.empty()) {
    if (!Fill(head_, kFrameHeadBytes, bytes)) break;
    ASSIGN_OR_RETURN(const FrameHead head, DecodeFrameHead(head_, max_bytes_));
    if (!Fill(bytes_, head.num_bytes, bytes)) break;
    frames->push_back({head.kind, std::move(bytes_)});
    head_.clear();
    bytes_.clear();
  }
  return OkStatus();
}

}  // namespace fathom::comm
