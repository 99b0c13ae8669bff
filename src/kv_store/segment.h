// A segment: one record of the KV cache (a block, or a snapshot) in a file of its own, named by its
// content's hash, written once and never changed. The header has all that the cache must know to
// find it again; both header and payload are verified by keyed checksums, so what is truncated,
// damaged or written by somebody else is told from what is ours. Pure functions; any thread.
//
//   file: SegmentHeader, int32 token_ids[num_token_ids], payload
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "request/kv_transfers.h"

namespace fathom::kv_store {

using StoreKey = std::array<uint8_t, 32>;  // of a directory, a model and a layout

struct SegmentHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t kind;  // KvRecord::Kind
  uint64_t hash[2];
  uint64_t parent[2];
  uint32_t num_tokens;
  uint32_t num_token_ids;
  uint64_t payload_bytes;
  uint64_t payload_checksum[2];
  uint64_t header_checksum[2];  // of all above and of the token ids
};
static_assert(sizeof(SegmentHeader) == 96);

// The bytes before the payload.
std::vector<std::byte> MakeSegmentHead(const request::KvRecord& record,
                                       std::span<const std::byte> payload, const StoreKey& key);

// The record of a file that begins with `head`; `file_bytes` is the size of all of it. An error
// when it is not a segment of ours.
Result<request::KvRecord> ParseSegmentHead(std::span<const std::byte> head, int64_t file_bytes,
                                           const StoreKey& key);
// Whether the payload is the one that the head was made of.
bool IsPayloadIntact(std::span<const std::byte> head, std::span<const std::byte> payload,
                     const StoreKey& key);

// Bytes before the payload of a record of this kind.
size_t SegmentHeadBytes(request::KvRecord::Kind kind);
inline constexpr size_t kMaxSegmentHeadBytes = sizeof(SegmentHeader) + 256 * sizeof(int32_t);

// "ab/abcdef….block" or ".snapshot", under the store's directory.
std::string SegmentPath(const request::KvRecord& record);

}  // namespace fathom::kv_store
