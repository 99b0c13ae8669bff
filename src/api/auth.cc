#include "api/auth.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

namespace fathom::api {
namespace {

constexpr std::string_view kBearer = "Bearer ";

// The key that a request brings, or an empty one.
std::string_view KeyOf(const http::Request& request) {
  if (const std::string* authorization = request.FindHeader("Authorization")) {
    const std::string_view text = *authorization;
    if (!http::EqualsIgnoringCase(text.substr(0, kBearer.size()), kBearer)) return "";
    return text.substr(kBearer.size());
  }
  const std::string* key = request.FindHeader("x-api-key");
  return key == nullptr ? std::string_view() : std::string_view(*key);
}

}  // namespace

std::string CallerScope(const http::Request& request, std::string_view cache_salt) {
  const std::string_view key = KeyOf(request);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return std::string(digest.begin(), digest.end()).append(cache_salt);
}

ApiKeys::Digest ApiKeys::Hash(std::string_view key) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), digest.data());
  return digest;
}

ApiKeys::ApiKeys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) digests_.push_back(Hash(key));
}

bool ApiKeys::Allow(const http::Request& request) const {
  if (digests_.empty()) return true;
  const std::string_view key = KeyOf(request);
  if (key.empty()) return false;
  const Digest digest = Hash(key);
  int matches = 0;
  for (const Digest& known : digests_) {
    matches += CRYPTO_memcmp(digest.data(), known.data(), digest.size()) == 0 ? 1 : 0;
  }
  return matches > 0;
}

}  // namespace fathom::api
