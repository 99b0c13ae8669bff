#include "apps/fathom/bench/step_gaps.h"

#include <utility>

namespace fathom::app {

class StepGaps::MarkedModel final : public model::DeepSeekV4 {
 public:
  MarkedModel(StepGaps& gaps, std::unique_ptr<model::DeepSeekV4> model)
      : gaps_(gaps), model_(std::move(model)) {}

  Status Forward(const model::ForwardBatch& batch, const model::KvCacheView& kv, float* logits,
                 device::Stream& stream, model::ChoiceRecorder* recorder) override {
    gaps_.steps_.push_back(
        {static_cast<int>(batch.token_ids.size()), static_cast<int>(batch.num_computed.size())});
    gaps_.timeline_->Mark(stream);
    const Status status = model_->Forward(batch, kv, logits, stream, recorder);
    gaps_.timeline_->Mark(stream);
    return status;
  }
  Status Health() override { return model_->Health(); }

 private:
  StepGaps& gaps_;
  const std::unique_ptr<model::DeepSeekV4> model_;
};

std::unique_ptr<model::DeepSeekV4> StepGaps::Watch(std::unique_ptr<model::DeepSeekV4> model) {
  return std::make_unique<MarkedModel>(*this, std::move(model));
}

Result<std::vector<double>> StepGaps::BetweenDecodes(int num_seqs) {
  ASSIGN_OR_RETURN(const std::vector<double> times, timeline_->Take());
  const auto is_decode = [num_seqs](const Step& step) {
    return step.num_seqs == num_seqs && step.num_tokens == num_seqs;
  };
  std::vector<double> gaps;
  for (size_t i = 0; i + 1 < steps_.size(); ++i) {
    if (is_decode(steps_[i]) && is_decode(steps_[i + 1])) gaps.push_back(times[2 * i + 1]);
  }
  steps_.clear();
  return gaps;
}

}  // namespace fathom::app
