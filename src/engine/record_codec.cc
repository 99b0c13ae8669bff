#include "engine/step_format.h"
#include "kv_cache/kv_layout.h"

namespace fathom::engine {
namespace {

using request::KvHash;
using request::KvRecord;

void PutHash(const KvHash& hash, comm::ByteWriter& out) {
  out.Put(hash.high);
  out.Put(hash.low);
}

KvHash GetHash(comm::ByteReader& in) {
  const auto high = in.Get<uint64_t>();
  return {.high = high, .low = in.Get<uint64_t>()};
}

}  // namespace

void PutRecord(const KvRecord& record, comm::ByteWriter& out) {
  out.Put(static_cast<uint8_t>(record.kind));
  PutHash(record.hash, out);
  out.Put(record.num_tokens);
  if (record.kind == KvRecord::Kind::kSnapshot) return;
  PutHash(record.parent, out);
  for (const int32_t id : record.token_ids) out.Put(id);
}

bool GetRecord(comm::ByteReader& in, int vocab_size, KvRecord& record) {
  const auto kind = in.Get<uint8_t>();
  record.kind = static_cast<KvRecord::Kind>(kind);
  record.hash = GetHash(in);
  record.num_tokens = in.Get<int32_t>();
  if (!in.ok() || kind > static_cast<uint8_t>(KvRecord::Kind::kSnapshot) ||
      record.num_tokens < kv_cache::kBlockTokens ||
      record.num_tokens % kv_cache::kBlockTokens != 0) {
    return false;
  }
  if (record.kind == KvRecord::Kind::kSnapshot) return true;
  record.parent = GetHash(in);
  for (int i = 0; i < kv_cache::kBlockTokens; ++i) {
    const auto id = in.Get<int32_t>();
    if (id < 0 || id >= vocab_size) return false;
    record.token_ids.push_back(id);
  }
  return in.ok();
}

}  // namespace fathom::engine
