#include "api/base64.h"

#include <openssl/evp.h>

#include <algorithm>

namespace fathom::api {
namespace {

// What OpenSSL's int lengths hold, in whole groups of three bytes.
constexpr size_t kPieceBytes = size_t{3} << 28;

const unsigned char* Bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string Base64(std::string_view bytes) {
  std::string out(4 * ((bytes.size() + 2) / 3) + 1, '\0');
  size_t size = 0;
  for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), kPieceBytes))) {
    const std::string_view piece = bytes.substr(0, kPieceBytes);
    auto* const to = reinterpret_cast<unsigned char*>(out.data() + size);
    size += static_cast<size_t>(EVP_EncodeBlock(to, Bytes(piece), static_cast<int>(piece.size())));
  }
  out.resize(size);
  return out;
}

std::optional<std::string> FromBase64(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0 || text.size() > kPieceBytes) return std::nullopt;
  std::string out(text.size() / 4 * 3, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(out.data()), Bytes(text),
                                   static_cast<int>(text.size()));
  if (size < 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  out.resize(static_cast<size_t>(size) - padding);
  return out;
}

}  // namespace fathom::api
