// TokenConstraint: a grammar's hold on one sequence. Implemented in text/; called by the engine's
// worker side between steps, one thread at a time.
#pragma once

#include <cstdint>
#include <span>

namespace fathom::request {

class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Sets bit t of `mask` (ceil(vocab/32) words) for every token allowed next. Returns false when
  // all are.
  virtual bool FillNextTokenMask(std::span<uint32_t> mask) = 0;
  // Advances by a sampled token; false if the grammar does not allow it.
  virtual bool AcceptToken(int32_t token_id) = 0;
  // Takes back the last `num_tokens` accepted (rejected drafts).
  virtual void Rollback(int num_tokens) = 0;
  // How many tokens it has accepted and not taken back: the first so many of the output.
  virtual int num_accepted() const = 0;
};

}  // namespace fathom::request
