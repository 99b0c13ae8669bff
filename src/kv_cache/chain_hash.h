// ChainHash: names a block by its tokens and everything before them: a keyed 128-bit hash over the
// parent's name and the block's tokens (XXH3 with a secret made of the key). Who does not know the
// key cannot look for collisions, and a collision is no harm: tokens are compared on every hit. A
// value; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "request/kv_transfers.h"

namespace fathom::kv_cache {

using HashKey = std::array<uint8_t, 32>;

class ChainHash {
 public:
  explicit ChainHash(const HashKey& key);

  // What the first block of a salt has for a parent.
  request::KvHash Root(std::string_view salt) const;
  request::KvHash Next(const request::KvHash& parent, std::span<const int32_t> token_ids) const;

 private:
  std::array<uint8_t, 192> secret_;
};

// A key that depends on the parts, in order: the key of a directory, a model, a layout.
HashKey DeriveKey(std::span<const std::string_view> parts);

struct KvHashHasher {
  size_t operator()(const request::KvHash& hash) const { return hash.low; }
};

}  // namespace fathom::kv_cache
