#include "apps/fathom/bench/step_gaps.h"

#include <numeric>
#include <utility>

namespace fathom::app {

class StepGaps::MarkedModel final : public model::DeepSeekV4 {
 public:
  MarkedModel(StepGaps& gaps, std::unique_ptr<model::DeepSeekV4> model)
      : gaps_(gaps), model_(std::move(model)) {}

  Status Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv, float* logits,
                 device::Stream& stream, model::ChoiceRecorder* recorder) override {
    Step step = {.num_tokens = static_cast<int>(batch.token_ids.size()),
                 .has_prompt = batch.has_prompt};
    if (const auto& tokens = batch.data_rank_tokens; !tokens.empty()) {
      step.num_tokens = std::accumulate(tokens.begin(), tokens.end(), 0);
      step.has_prompt = !batch.data_ranks_decode;
    }
    gaps_.steps_.push_back({.run = gaps_.run_, .step = step});
    gaps_.timeline_->Mark(stream);
    const Status status = model_->Forward(batch, kv, logits, stream, recorder);
    gaps_.timeline_->Mark(stream);
    return status;
  }
  int CaptureDecodes(const model::KvCacheView& kv, float* logits, const int32_t* sampled,
                     device::Stream& stream) override {
    return model_->CaptureDecodes(kv, logits, sampled, stream);
  }
  Status Health() override { return model_->Health(); }

 private:
  StepGaps& gaps_;
  const std::unique_ptr<model::DeepSeekV4> model_;
};

std::unique_ptr<model::DeepSeekV4> StepGaps::Watch(std::unique_ptr<model::DeepSeekV4> model) {
  return std::make_unique<MarkedModel>(*this, std::move(model));
}

Result<std::vector<StepGaps::Step>> StepGaps::Take() {
  ASSIGN_OR_RETURN(const std::vector<double> times, timeline_->Take());
  std::vector<Step> steps;
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i].run != run_) continue;
    Step& step = steps.emplace_back(steps_[i].step);
    step.us = times[2 * i];
    if (2 * i + 1 < times.size()) step.us_to_next = times[2 * i + 1];
  }
  steps_.clear();
  return steps;
}

}  // namespace fathom::app
