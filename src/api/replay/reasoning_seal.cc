#include "api/replay/reasoning_seal.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <memory>

#include "api/base64.h"
#include "base/check.h"

namespace fathom::api {
namespace {

constexpr size_t kIdBytes = 16;
constexpr size_t kMacBytes = 16;  // truncated
constexpr size_t kKeyBytes = 32;
constexpr size_t kNonceBytes = 12;
constexpr size_t kTagBytes = 16;
constexpr size_t kMaxSealedBytes = size_t{8} << 20;
constexpr char kVersion = 1;

unsigned char* Bytes(std::string* text) { return reinterpret_cast<unsigned char*>(text->data()); }
const unsigned char* Bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string Random(size_t size) {
  std::string out(size, '\0');
  CHECK(RAND_bytes(Bytes(&out), static_cast<int>(size)) == 1);
  return out;
}

std::string Hmac(std::string_view key, std::string_view text) {
  std::string out(kKeyBytes, '\0');
  unsigned int size = 0;
  CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), Bytes(text), text.size(),
             Bytes(&out), &size) != nullptr);
  return out;
}

// Over parts of known length before one of any: no two lists of parts give the same text.
std::string Mac(std::string_view key, char purpose, std::string_view scope, std::string_view id,
                std::string_view text) {
  std::string all(1, purpose);
  all += Hmac(key, scope);
  all += id;
  all += text;
  return Hmac(key, all).substr(0, kMacBytes);
}

bool AreEqual(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

using Cipher = std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)>;

Cipher NewCipher() {
  Cipher cipher(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  CHECK(cipher != nullptr);
  return cipher;
}

}  // namespace

ReasoningSeal::ReasoningSeal(std::string_view secret) {
  const std::string root = secret.empty() ? Random(kKeyBytes) : std::string(secret);
  sign_key_ = Hmac(root, "fathom reasoning signature");
  seal_key_ = Hmac(root, "fathom reasoning seal");
}

std::string ReasoningSeal::NewId() { return Random(kIdBytes); }

std::string ReasoningSeal::Sign(std::string_view scope, std::string_view id,
                                std::string_view text) const {
  std::string out(1, kVersion);
  out += id;
  out += Mac(sign_key_, 'i', scope, id, "");
  out += Mac(sign_key_, 't', scope, id, text);
  return Base64(out);
}

std::optional<std::string> ReasoningSeal::VerifiedId(std::string_view scope,
                                                     std::string_view signature,
                                                     std::string_view text) const {
  const std::optional<std::string> bytes = FromBase64(signature);
  if (!bytes || bytes->size() != 1 + kIdBytes + 2 * kMacBytes || bytes->front() != kVersion)
    return std::nullopt;
  const std::string_view id = std::string_view(*bytes).substr(1, kIdBytes);
  const std::string_view id_mac = std::string_view(*bytes).substr(1 + kIdBytes, kMacBytes);
  const std::string_view text_mac = std::string_view(*bytes).substr(1 + kIdBytes + kMacBytes);
  if (!AreEqual(id_mac, Mac(sign_key_, 'i', scope, id, ""))) return std::nullopt;
  if (!text.empty() && !AreEqual(text_mac, Mac(sign_key_, 't', scope, id, text)))
    return std::nullopt;
  return std::string(id);
}

std::string ReasoningSeal::Seal(std::string_view scope, const Sealed& sealed) const {
  const std::string plain = sealed.id + sealed.text;
  if (sealed.text.size() > kMaxSealedBytes) return "";
  const std::string nonce = Random(kNonceBytes);
  const std::string owner = Hmac(seal_key_, scope);
  std::string body(plain.size(), '\0');
  std::string tag(kTagBytes, '\0');
  const Cipher cipher = NewCipher();
  int size = 0;
  const bool ok =
      EVP_EncryptInit_ex(cipher.get(), EVP_aes_256_gcm(), nullptr,
                         Bytes(std::string_view(seal_key_)), Bytes(std::string_view(nonce))) == 1 &&
      EVP_EncryptUpdate(cipher.get(), nullptr, &size, Bytes(std::string_view(owner)),
                        static_cast<int>(owner.size())) == 1 &&
      EVP_EncryptUpdate(cipher.get(), Bytes(&body), &size, Bytes(std::string_view(plain)),
                        static_cast<int>(plain.size())) == 1 &&
      EVP_EncryptFinal_ex(cipher.get(), Bytes(&tag), &size) == 1 &&
      EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, tag.data()) == 1;
  CHECK(ok);
  return Base64(kVersion + nonce + tag + body);
}

std::optional<ReasoningSeal::Sealed> ReasoningSeal::Open(std::string_view scope,
                                                         std::string_view token) const {
  if (token.size() > 2 * kMaxSealedBytes) return std::nullopt;
  std::optional<std::string> bytes = FromBase64(token);
  constexpr size_t kHeadBytes = 1 + kNonceBytes + kTagBytes;
  if (!bytes || bytes->size() < kHeadBytes + kIdBytes || bytes->front() != kVersion)
    return std::nullopt;
  const std::string_view all = *bytes;
  const std::string_view nonce = all.substr(1, kNonceBytes);
  std::string tag(all.substr(1 + kNonceBytes, kTagBytes));
  const std::string_view body = all.substr(kHeadBytes);
  const std::string owner = Hmac(seal_key_, scope);
  std::string plain(body.size(), '\0');
  const Cipher cipher = NewCipher();
  int size = 0;
  const bool ok =
      EVP_DecryptInit_ex(cipher.get(), EVP_aes_256_gcm(), nullptr,
                         Bytes(std::string_view(seal_key_)), Bytes(nonce)) == 1 &&
      EVP_DecryptUpdate(cipher.get(), nullptr, &size, Bytes(std::string_view(owner)),
                        static_cast<int>(owner.size())) == 1 &&
      EVP_DecryptUpdate(cipher.get(), Bytes(&plain), &size, Bytes(body),
                        static_cast<int>(body.size())) == 1 &&
      EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, tag.data()) == 1 &&
      EVP_DecryptFinal_ex(cipher.get(), Bytes(&tag), &size) == 1;
  if (!ok) return std::nullopt;
  return Sealed{plain.substr(0, kIdBytes), plain.substr(kIdBytes)};
}

}  // namespace fathom::api
