// Secret proofs: how two processes show each other that they know one secret without sending it:
// each answers the other's random challenge with an HMAC-SHA256 of both challenges under the
// secret. The one that connects proves first, so that whoever merely connects learns nothing to
// guess with. Pure but for the random numbers; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fathom::comm {

inline constexpr size_t kChallengeBytes = 32;
inline constexpr size_t kProofBytes = 32;

enum class ProofSide : char { kCaller = 'c', kListener = 'l' };

// What a proof is for: it holds for nothing else.
struct ProofSubject {
  std::string_view purpose;   // "control", "data"
  std::string_view identity;  // of the caller, as sent
  std::string_view listener_challenge;
  std::string_view caller_challenge;
};

std::string NewChallenge();
std::string MakeProof(std::string_view secret, ProofSide side, const ProofSubject& subject);
// Takes as long for any wrong one.
bool IsProof(std::string_view proof, std::string_view secret, ProofSide side,
             const ProofSubject& subject);

// A secret for one group's further connections, which those who know `secret` can all derive.
std::string SessionSecret(std::string_view secret, std::string_view session_id);

}  // namespace fathom::comm
