// DeviceBatch: one step's sequences as the flat arrays that the model reads (model::ForwardBatch).
// Its memory is kept from step to step. Owned by a ModelRunner or Scorer; one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.h"
#include "request/scheduled_batch.h"

namespace fathom::runtime {

class DeviceBatch {
 public:
  void Clear();

  // Appends tokens that stand at positions num_computed... The table covers them and is copied.
  void AddSequence(std::span<const int32_t> token_ids, int32_t num_computed,
                   const request::BlockTable& table);

  // Appends one token that only the device knows: sampled[source].
  void AddSampledToken(int32_t source, int32_t num_computed, const request::BlockTable& table);

  // The sequence that was added last is still in its prompt.
  void MarkPrompt() { has_prompt_ = true; }

  // Asks for the logits of a token of the sequence that was added last; offsets ascend.
  void AddLogitsRow(size_t offset_in_sequence);

  size_t num_logits_rows() const { return logits_rows_.size(); }

  // A view of the arrays, valid until the next change.
  model::ForwardBatch View();

 private:
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> token_sources_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> num_computed_;
  std::vector<int32_t> first_window_page_;
  std::vector<int32_t> state_slots_;
  std::vector<int32_t> logits_rows_;
  bool has_prompt_ = false;
  std::vector<std::vector<int32_t>> blocks_, window_pages_;  // ragged; [0, num_sequences) in use
  std::vector<int32_t> block_tables_, window_tables_;        // padded
};

}  // namespace fathom::runtime
