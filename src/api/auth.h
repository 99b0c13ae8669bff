// ApiKeys: which requests may pass. Keys are kept and compared as SHA-256 digests in constant time.
// Immutable; any thread.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.h"

namespace fathom::api {

// What is kept for a caller is kept under this and found by nobody else: the digest of the key that
// the request brings, right or wrong, and its cache salt.
std::string CallerScope(const http::Request& request, std::string_view cache_salt);

class ApiKeys {
 public:
  explicit ApiKeys(const std::vector<std::string>& keys);

  // By "Authorization: Bearer KEY", or, without an Authorization header, "x-api-key: KEY". Without
  // keys everything passes; an empty one is none.
  bool Allow(const http::Request& request) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest Hash(std::string_view key);

  std::vector<Digest> digests_;
};

}  // namespace fathom::api
