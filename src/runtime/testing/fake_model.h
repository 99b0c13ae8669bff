// FakeModel: a DeepSeekV4 whose logits a test writes, so that scheduler, runtime, engine and API
// are tested without weights. It keeps every token in the KV cache that it is given, where a real
// model keeps entries, and reads the whole sequence back from there: a wrong block, page, slot or
// position ends the test (CHECK).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::runtime {

// A layout that holds what FakeModel writes, and its config.
kv_cache::KvLayout FakeLayout();

// The experts that it reports: of token t in layer l (t % 100) * 6 + l * 3 + {0, 1, 2}.
inline constexpr int kFakeLayers = 2;
inline constexpr int kFakeExpertsPerToken = 3;
inline constexpr int kFakeExperts = 600;

class FakeModel final : public model::DeepSeekV4 {
 public:
  // Fills the logits [vocab] that follow `token_ids`, of which the first num_prompt_tokens are the
  // prompt. The prompt's end is the end of the last step in which the sequence ran more than one
  // token, began, or was taken back: right unless a sequence is preempted, or the last chunk of a
  // prompt is a single token.
  using Script = std::function<void(std::span<const int32_t> token_ids, int64_t num_prompt_tokens,
                                    std::span<float> logits)>;

  FakeModel(int vocab_size, Script script) : vocab_size_(vocab_size), script_(std::move(script)) {}

  Status Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv, float* logits,
                 device::Stream& stream, model::ChoiceRecorder* recorder) override;

  int64_t num_steps() const { return num_steps_; }

 private:
  const int vocab_size_;
  const Script script_;
  std::atomic<int64_t> num_steps_{0};
};

// Answers a prompt with the tokens that `reply` gives for it, and then with `eos_token_id`,
// whatever the temperature.
FakeModel::Script ReplyWith(
    std::function<std::vector<int32_t>(std::span<const int32_t> prompt)> reply,
    int32_t eos_token_id);

}  // namespace fathom::runtime
