// ForcedChoices: the experts and index entries that another run chose (`fathom score --trace`), for
// a run on a GPU to take instead of its own. Two correct implementations round differently, and now
// and then choose differently; with the same choices they can be compared to rounding.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/safetensors_header.h"
#include "config/model_config.h"
#include "model/model.h"
#include "runtime/scorer.h"

namespace fathom::app {

class ForcedChoices final : public model::ChoiceRecorder {
 public:
  // kBadModel names what is not as --trace writes it.
  static Result<std::unique_ptr<ForcedChoices>> Open(const std::string& path,
                                                     const config::ModelConfig& config);

  // The tokens of the step that runs next.
  void SetRows(std::span<const runtime::TokenPlace> rows) { rows_ = rows; }

  bool wants_choices() const override { return false; }
  bool wants_streams() const override { return false; }
  void OnRouting(int, int, std::span<const int32_t>) override {}
  void OnIndex(int, int, std::span<const int32_t>) override {}
  std::span<const int32_t> ForcedRouting(int layer) override;
  std::span<const int32_t> ForcedIndex(int layer) override;

 private:
  explicit ForcedChoices(const config::ModelConfig& config) : config_(config) {}
  std::span<const int32_t> Choices(char kind, int layer, size_t width);

  const config::ModelConfig& config_;
  // By the first letter of the kind, list and layer: [tokens, width].
  std::map<std::tuple<char, size_t, int>, std::vector<int32_t>> choices_;
  std::span<const runtime::TokenPlace> rows_;
  std::vector<int32_t> step_;  // what was asked for last
};

}  // namespace fathom::app
