#include "kv_cache/chain_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <string>

#include "base/check.h"
#include "kv_cache/kv_layout.h"

namespace fathom::kv_cache {

ChainHash::ChainHash(const HashKey& key) {
  XXH3_generateSecret(secret_.data(), secret_.size(), key.data(), key.size());
}

request::KvHash ChainHash::Root(std::string_view salt) const {
  const XXH128_hash_t h =
      XXH3_128bits_withSecret(salt.data(), salt.size(), secret_.data(), secret_.size());
  return {h.high64, h.low64};
}

request::KvHash ChainHash::Next(const request::KvHash& parent,
                                std::span<const int32_t> token_ids) const {
  CHECK_LE(token_ids.size(), static_cast<size_t>(kBlockTokens));
  std::array<char, sizeof(parent) + kBlockTokens * sizeof(int32_t)> bytes;
  std::memcpy(bytes.data(), &parent, sizeof(parent));
  std::memcpy(bytes.data() + sizeof(parent), token_ids.data(), token_ids.size_bytes());
  const XXH128_hash_t h = XXH3_128bits_withSecret(
      bytes.data(), sizeof(parent) + token_ids.size_bytes(), secret_.data(), secret_.size());
  return {h.high64, h.low64};
}

HashKey DeriveKey(std::span<const std::string_view> parts) {
  HashKey key = {};
  for (const std::string_view part : parts) {
    // Each half by a seed of its own, over the key so far and the part.
    std::string bytes(reinterpret_cast<const char*>(key.data()), key.size());
    bytes += part;
    for (uint64_t half = 0; half < 2; ++half) {
      const XXH128_hash_t h = XXH3_128bits_withSeed(bytes.data(), bytes.size(), half);
      std::memcpy(key.data() + half * sizeof(h), &h, sizeof(h));
    }
  }
  return key;
}

}  // namespace fathom::kv_cache
