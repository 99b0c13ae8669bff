#include "kv_store/segment.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace fathom::kv_store {

using request::KvRecord;

namespace {

constexpr std::array<char, 8> kMagic = {'F', 'A', 'T', 'H', 'O', 'M', 'K', 'V'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kBlockTokens = 256;
constexpr size_t kChecked = offsetof(SegmentHeader, header_checksum);

struct Checksum {
  uint64_t words[2];
};

class Checksums {
 public:
  explicit Checksums(const StoreKey& key) {
    XXH3_generateSecret(secret_.data(), secret_.size(), key.data(), key.size());
  }
  Checksum Of(const void* data, size_t bytes) const {
    const XXH128_hash_t h = XXH3_128bits_withSecret(data, bytes, secret_.data(), secret_.size());
    return {{h.high64, h.low64}};
  }
  // Of the header's checked part and the token ids.
  Checksum OfHead(std::span<const std::byte> head) const {
    std::string checked(reinterpret_cast<const char*>(head.data()), kChecked);
    checked.append(reinterpret_cast<const char*>(head.data()) + sizeof(SegmentHeader),
                   head.size() - sizeof(SegmentHeader));
    return Of(checked.data(), checked.size());
  }

 private:
  std::array<unsigned char, 192> secret_;
};

uint32_t NumTokenIds(KvRecord::Kind kind) {
  return kind == KvRecord::Kind::kBlock ? kBlockTokens : 0;
}

SegmentHeader HeaderOf(std::span<const std::byte> head) {
  SegmentHeader header;
  std::memcpy(&header, head.data(), sizeof(header));
  return header;
}

}  // namespace

size_t SegmentHeadBytes(KvRecord::Kind kind) {
  return sizeof(SegmentHeader) + NumTokenIds(kind) * sizeof(int32_t);
}

std::vector<std::byte> MakeSegmentHead(const KvRecord& record, std::span<const std::byte> payload,
                                       const StoreKey& key) {
  const Checksums checksums(key);
  SegmentHeader header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.kind = static_cast<uint32_t>(record.kind);
  header.hash[0] = record.hash.high;
  header.hash[1] = record.hash.low;
  header.parent[0] = record.parent.high;
  header.parent[1] = record.parent.low;
  header.num_tokens = static_cast<uint32_t>(record.num_tokens);
  header.num_token_ids = static_cast<uint32_t>(record.token_ids.size());
  header.payload_bytes = payload.size();
  const Checksum payload_sum = checksums.Of(payload.data(), payload.size());
  std::memcpy(header.payload_checksum, payload_sum.words, sizeof(payload_sum));
  std::vector<std::byte> head(sizeof(header) + record.token_ids.size() * sizeof(int32_t));
  std::memcpy(head.data(), &header, sizeof(header));
  if (!record.token_ids.empty()) {
    std::memcpy(head.data() + sizeof(header), record.token_ids.data(),
                record.token_ids.size() * sizeof(int32_t));
  }
  const Checksum head_sum = checksums.OfHead(head);
  std::memcpy(head.data() + kChecked, head_sum.words, sizeof(head_sum));
  return head;
}

Result<KvRecord> ParseSegmentHead(std::span<const std::byte> head, int64_t file_bytes,
                                  const StoreKey& key) {
  if (head.size() < sizeof(SegmentHeader)) return InvalidArgument("shorter than a header");
  const SegmentHeader header = HeaderOf(head);
  if (header.magic != kMagic || header.version != kVersion || header.kind > 1) {
    return InvalidArgument("not a segment of this version");
  }
  KvRecord record;
  record.kind = static_cast<KvRecord::Kind>(header.kind);
  if (header.num_token_ids != NumTokenIds(record.kind) ||
      head.size() < SegmentHeadBytes(record.kind)) {
    return InvalidArgument("the tokens are not all there");
  }
  head = head.first(SegmentHeadBytes(record.kind));
  const Checksum sum = Checksums(key).OfHead(head);
  if (std::memcmp(sum.words, header.header_checksum, sizeof(sum)) != 0) {
    return InvalidArgument("the header's checksum is wrong");
  }
  if (header.payload_bytes + head.size() != static_cast<uint64_t>(file_bytes)) {
    return InvalidArgument("the file is truncated");
  }
  record.hash = {header.hash[0], header.hash[1]};
  record.parent = {header.parent[0], header.parent[1]};
  record.num_tokens = static_cast<int32_t>(header.num_tokens);
  record.token_ids.resize(header.num_token_ids);
  if (!record.token_ids.empty()) {
    std::memcpy(record.token_ids.data(), head.data() + sizeof(header),
                record.token_ids.size() * sizeof(int32_t));
  }
  return record;
}

bool IsPayloadIntact(std::span<const std::byte> head, std::span<const std::byte> payload,
                     const StoreKey& key) {
  const SegmentHeader header = HeaderOf(head);
  const Checksum sum = Checksums(key).Of(payload.data(), payload.size());
  return std::memcmp(sum.words, header.payload_checksum, sizeof(sum)) == 0;
}

std::string SegmentPath(const KvRecord& record) {
  const std::string name = fmt::format("{:016x}{:016x}", record.hash.high, record.hash.low);
  const bool is_block = record.kind == KvRecord::Kind::kBlock;
  return fmt::format("{}/{}.{}", name.substr(0, 2), name, is_block ? "block" : "snapshot");
}

}  // namespace fathom::kv_store
