// ForcedChoices: the experts and index entries that another run chose (`fathom score --trace`), for
// a run on a GPU to take instead of its own; with its residual streams, too, every layer runs on
// the other run's inputs. Two correct implementations round differently, and now and then choose
// differently; on the same inputs and with the same choices they can be compared layer by layer.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/safetensors_header.h"
#include "config/model_config.h"
#include "model/model.h"
#include "runtime/scorer.h"

namespace fathom::app {

class ForcedChoices final : public model::ChoiceRecorder {
 public:
  // kBadModel names what is not as --trace writes it.
  static Result<std::unique_ptr<ForcedChoices>> Open(const std::string& path,
                                                     const config::ModelConfig& config,
                                                     bool with_streams);

  // Sees what the model does; may be null.
  void set_trace(model::ChoiceRecorder* trace) { trace_ = trace; }
  // The tokens of the step that runs next.
  void SetRows(std::span<const runtime::TokenPlace> rows) { rows_ = rows; }

  bool wants_choices() const override { return trace_ != nullptr; }
  bool wants_streams() const override { return trace_ != nullptr || with_streams_; }
  void OnRouting(int layer, int row, std::span<const int32_t> ids) override {
    if (trace_ != nullptr) trace_->OnRouting(layer, row, ids);
  }
  void OnIndex(int layer, int row, std::span<const int32_t> entries) override {
    if (trace_ != nullptr) trace_->OnIndex(layer, row, entries);
  }
  void OnStreams(int layer, std::span<const std::byte> streams) override {
    if (trace_ != nullptr) trace_->OnStreams(layer, streams);
  }
  std::span<const int32_t> ForcedRouting(int layer) override;
  std::span<const int32_t> ForcedIndex(int layer) override;

  std::span<const std::byte> ForcedStreams(int layer) override;

 private:
  ForcedChoices(const config::ModelConfig& config, bool with_streams)
      : config_(config), with_streams_(with_streams) {}
  Status Read(const checkpoint::InputFile& file, const checkpoint::TensorPlace& place);
  // Bytes a token; 0: the file has none such.
  size_t RowBytes(char kind) const;
  std::span<const std::byte> Rows(char kind, int layer);
  std::span<const int32_t> Choices(char kind, int layer);

  const config::ModelConfig& config_;
  const bool with_streams_;
  model::ChoiceRecorder* trace_ = nullptr;
  // By the first letter of the kind, list and layer: [tokens, RowBytes].
  std::map<std::tuple<char, size_t, int>, std::vector<std::byte>> rows_of_;
  std::span<const runtime::TokenPlace> rows_;
  std::vector<std::byte> step_;  // what was asked for last
};

}  // namespace fathom::app
