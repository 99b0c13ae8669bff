#include "checkpoint/shard_summary.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "checkpoint/tensor_list.h"
#include "checkpoint/tensor_specs.h"

namespace fathom::checkpoint {
namespace {

// Tensors without values.
class TensorList final : public TensorSource {
 public:
  explicit TensorList(std::vector<TensorInfo> tensors) : tensors_(std::move(tensors)) {
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const TensorInfo* Find(std::string_view name) const override {
    return FindTensor(tensors_, name);
  }
  Status Read(const TensorInfo& tensor, int64_t, std::span<std::byte>) const override {
    return InternalError(tensor.name + " has no values");
  }

 private:
  std::vector<TensorInfo> tensors_;
};

constexpr std::string_view kExperts = ".experts.";

bool IsExpert(std::string_view name) { return name.find(kExperts) != std::string_view::npos; }
bool IsLaterExpert(std::string_view name) {
  return IsExpert(name) && !name.substr(name.find(kExperts) + kExperts.size()).starts_with("0.");
}

// "layers.12.attn.wq_b.weight" is "attn.wq_b.weight" in its layer; other names stay.
std::string_view NameInLayer(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  if (!name.starts_with(kLayers)) return name;
  return name.substr(name.find('.', kLayers.size()) + 1);
}

}  // namespace

ShardSummary::ShardSummary(const config::ModelConfig& config) : config_(config) {
  std::vector<TensorInfo> tensors;
  for (TensorSpec& spec : MakeTensorSpecs(config)) {
    if (IsLaterExpert(spec.info.name)) continue;
    auto part = std::find(parts_.begin(), parts_.end(), PartName(spec));
    if (part == parts_.end()) part = parts_.insert(parts_.end(), PartName(spec));
    part_of_.emplace(NameInLayer(spec.info.name), static_cast<size_t>(part - parts_.begin()));
    tensors.push_back(std::move(spec.info));
  }
  tensors_ = std::make_unique<TensorList>(std::move(tensors));
}

std::vector<PartBytes> ShardSummary::Of(const Shard& shard) const {
  std::vector<PartBytes> parts;
  for (const std::string& name : parts_) parts.push_back({.name = name});
  Shard with_first_expert = shard;
  with_first_expert.experts = {0, 1};
  const auto own = MakeShardedSource(*tensors_, config_, with_first_expert);
  for (const TensorInfo& tensor : own->tensors()) {
    const auto part = part_of_.find(NameInLayer(tensor.name));
    CHECK(part != part_of_.end());
    const int64_t count = IsExpert(tensor.name) ? shard.experts.size() : 1;
    parts[part->second].bytes += count * tensor.bytes;
  }
  return parts;
}

}  // namespace fathom::checkpoint
