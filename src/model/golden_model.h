// A whole-model case of tests/golden/model: its config, and the weights that its recipes make. The
// README there says how an element follows from a recipe. Tests only; a missing file or tensor ends
// the test program.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace fathom::model {

class GoldenModel final : public checkpoint::TensorSource {
 public:
  explicit GoldenModel(const std::string& name);

  const config::ModelConfig& config() const { return config_; }

  const std::vector<checkpoint::TensorInfo>& tensors() const override { return tensors_; }
  const checkpoint::TensorInfo* Find(std::string_view name) const override;
  Status Read(const checkpoint::TensorInfo& tensor, int64_t offset,
              std::span<std::byte> out) const override;

 private:
  struct Recipe {
    double center = 0;
    double spread = 0;
    uint64_t seed = 0;
  };

  config::ModelConfig config_;
  std::vector<checkpoint::TensorInfo> tensors_;
  std::vector<Recipe> recipes_;  // by index in tensors_
};

}  // namespace fathom::model
