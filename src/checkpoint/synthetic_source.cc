// MakeSyntheticSource: the tensors of a config with synthetic values, in no file.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic_values.h"
#include "checkpoint/tensor_list.h"
#include "checkpoint/tensor_specs.h"

namespace fathom::checkpoint {
namespace {

class SyntheticSource final : public TensorSource {
 public:
  SyntheticSource(const config::ModelConfig& config, uint64_t seed)
      : seed_(seed), specs_(MakeTensorSpecs(config)) {
    std::sort(specs_.begin(), specs_.end(),
              [](const TensorSpec& a, const TensorSpec& b) { return a.info.name < b.info.name; });
    tensors_.reserve(specs_.size());
    for (const TensorSpec& spec : specs_) tensors_.push_back(spec.info);
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }

  const TensorInfo* Find(std::string_view name) const override {
    return FindTensor(tensors_, name);
  }

  Status Read(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const override {
    const TensorInfo* own = Find(tensor.name);
    CHECK(own != nullptr);
    CheckRange(*own, offset, out.size());
    SyntheticValues(specs_[static_cast<size_t>(own - tensors_.data())], seed_).Fill(offset, out);
    return OkStatus();
  }

 private:
  uint64_t seed_;
  std::vector<TensorSpec> specs_;  // ordered by name, as tensors_
  std::vector<TensorInfo> tensors_;
};

}  // namespace

std::unique_ptr<TensorSource> MakeSyntheticSource(const config::ModelConfig& config,
                                                  uint64_t seed) {
  return std::make_unique<SyntheticSource>(config, seed);
}

}  // namespace fathom::checkpoint
