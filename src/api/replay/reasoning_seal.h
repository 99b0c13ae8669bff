// ReasoningSeal: the opaque strings that stand for reasoning at the client: signatures of text that
// it holds, and sealed text that only this server can read. Both are bound to a scope (whose they
// are) and carry the id by which replay knows the turn. Immutable; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fathom::api {

class ReasoningSeal {
 public:
  // Servers of one secret read each other's strings. Empty: a random secret of this process.
  explicit ReasoningSeal(std::string_view secret);

  // 16 random bytes.
  static std::string NewId();

  // `id`: 16 bytes. About 70 characters, whatever the text.
  std::string Sign(std::string_view scope, std::string_view id, std::string_view text) const;
  // The id of a signature made here for this scope, if the text is the one that was signed or was
  // left out (empty).
  std::optional<std::string> VerifiedId(std::string_view scope, std::string_view signature,
                                        std::string_view text) const;

  struct Sealed {
    std::string id;
    std::string text;
  };
  // The text encrypted and authenticated. Empty for a text of more than 8 MiB.
  std::string Seal(std::string_view scope, const Sealed& sealed) const;
  // Nothing for anything that Seal did not make for this scope.
  std::optional<Sealed> Open(std::string_view scope, std::string_view token) const;

 private:
  std::string sign_key_;  // 32 bytes each
  std::string seal_key_;
};

// The key by which replay knows a turn by the id in its signature or seal.
inline std::string SignatureKey(std::string_view id) { return "signature " + std::string(id); }

}  // namespace fathom::api
