#include "comm/secret_proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/check.h"
#include "comm/byte_codec.h"

namespace fathom::comm {
namespace {

unsigned char* Bytes(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

std::string Hmac(std::string_view key, std::string_view text) {
  std::string out(kProofBytes, '\0');
  unsigned int size = 0;
  CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(), Bytes(out),
             &size) != nullptr);
  CHECK_EQ(size, kProofBytes);
  return out;
}

}  // namespace

std::string NewChallenge() {
  std::string out(kChallengeBytes, '\0');
  CHECK(RAND_bytes(Bytes(out), static_cast<int>(out.size())) == 1);
  return out;
}

std::string MakeProof(std::string_view secret, ProofSide side, const ProofSubject& subject) {
  ByteWriter text;
  text.Put(static_cast<char>(side));
  text.PutString(subject.purpose);
  text.PutString(subject.identity);
  text.PutString(subject.listener_challenge);
  text.PutString(subject.caller_challenge);
  return Hmac(secret, text.Take());
}

bool IsProof(std::string_view proof, std::string_view secret, ProofSide side,
             const ProofSubject& subject) {
  const std::string right = MakeProof(secret, side, subject);
  return proof.size() == right.size() &&
         CRYPTO_memcmp(proof.data(), right.data(), right.size()) == 0;
}

std::string SessionSecret(std::string_view secret, std::string_view session_id) {
  ByteWriter text;
  text.PutString("fathom session");
  text.PutString(session_id);
  return Hmac(secret, text.Take());
}

}  // namespace fathom::comm
