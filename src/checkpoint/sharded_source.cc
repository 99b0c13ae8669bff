#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "checkpoint/shard.h"
#include "checkpoint/tensor_list.h"

namespace fathom::checkpoint {
namespace {

// Some of a matrix's rows, counted in those of its codes.
struct Cut {
  int64_t whole = 0;
  Range part;
};

// A tensor's name without its block: "layers.12.attn.wq_b.weight" is layer 12's "attn.wq_b.weight".
struct BlockName {
  int layer = 0;
  std::string_view rest;
};
std::optional<BlockName> InLayer(std::string_view name) {
  constexpr std::string_view kPrefix = "layers.";
  if (!name.starts_with(kPrefix)) return {};
  const std::string_view from = name.substr(kPrefix.size());
  BlockName block;
  const auto [end, error] = std::from_chars(from.data(), from.data() + from.size(), block.layer);
  CHECK(error == std::errc());
  block.rest = from.substr(static_cast<size_t>(end - from.data()) + 1);
  return block;
}

class ShardedSource final : public TensorSource {
 public:
  ShardedSource(const TensorSource& whole, const config::ModelConfig& config, const Shard& shard)
      : whole_(whole), config_(config), shard_(shard) {
    std::vector<std::pair<TensorInfo, Slice>> kept;
    for (const TensorInfo& tensor : whole.tensors()) {
      if (std::optional<std::string> name = OwnName(tensor.name)) {
        kept.push_back(Take(tensor, std::move(*name)));
      }
    }
    std::sort(kept.begin(), kept.end(),
              [](const auto& a, const auto& b) { return a.first.name < b.first.name; });
    for (auto& [tensor, slice] : kept) {
      tensors_.push_back(std::move(tensor));
      slices_.push_back(slice);
    }
  }

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const TensorInfo* Find(std::string_view name) const override {
    return FindTensor(tensors_, name);
  }

  Status Read(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const override {
    CheckRange(tensor, offset, out.size());
    const auto i = static_cast<size_t>(&tensor - tensors_.data());
    CHECK_LT(i, slices_.size());
    return whole_.Read(*slices_[i].whole, slices_[i].begin + offset, out);
  }

 private:
  // From byte `begin` of the whole tensor on.
  struct Slice {
    const TensorInfo* whole = nullptr;
    int64_t begin = 0;
  };

  // What the tensor is called here; nothing: another rank holds it.
  std::optional<std::string> OwnName(const std::string& name) const {
    const bool several_stages = !shard_.has_embedding || !shard_.has_head;
    if (name.starts_with("embed.")) {
      return shard_.has_embedding ? std::optional(name) : std::nullopt;
    }
    if (name.starts_with("mtp.")) {
      return several_stages || !HasExpert(name) ? std::nullopt : std::optional(name);
    }
    const std::optional<BlockName> block = InLayer(name);
    if (!block) return shard_.has_head ? std::optional(name) : std::nullopt;
    if (block->layer < shard_.layers.begin || block->layer >= shard_.layers.end) return {};
    if (!HasExpert(name)) return {};
    return fmt::format("layers.{}.{}", block->layer - shard_.layers.begin, block->rest);
  }

  bool HasExpert(std::string_view name) const {
    constexpr std::string_view kExperts = ".experts.";
    const size_t place = name.find(kExperts);
    if (place == std::string_view::npos) return true;
    const std::string_view number = name.substr(place + kExperts.size());
    int64_t expert = 0;
    std::from_chars(number.data(), number.data() + number.size(), expert);
    return expert >= shard_.experts.begin && expert < shard_.experts.end;
  }

  std::optional<Cut> CutOf(std::string_view name) const {
    const int64_t group_heads = config_.num_heads / config_.o_groups;
    const int64_t hidden = config_.hidden_size, intermediate = config_.moe_intermediate_size;
    const auto groups = [&](int64_t each) {
      return Cut{config_.o_groups * each, {shard_.groups.begin * each, shard_.groups.end * each}};
    };
    const auto is = [&](std::string_view part) {
      return name.find(part) != std::string_view::npos;
    };
    if (name == "head.weight") return Cut{config_.vocab_size, shard_.vocabulary};
    if (shard_.whole_attention && is(".attn.")) return {};
    if (is(".attn.wq_b.")) return groups(group_heads * config_.head_dim);
    if (is(".attn.attn_sink")) return groups(group_heads);
    if (is(".attn.wo_a.")) return groups(config_.o_lora_rank);
    if (is(".attn.wo_b.")) return Cut{hidden, shard_.outputs};
    const bool shared = is(".shared_experts.");
    if (!shared && !is(".experts.")) return {};
    if (!is(".w2.")) return Cut{intermediate, shared ? shard_.shared_up : shard_.routed_up};
    return Cut{hidden, shared ? shard_.shared_down : shard_.routed_down};
  }

  std::pair<TensorInfo, Slice> Take(const TensorInfo& tensor, std::string name) const {
    std::vector<int64_t> shape = tensor.shape;
    const int64_t row_bytes = shape[0] == 0 ? 0 : tensor.bytes / shape[0];
    Slice slice{.whole = &tensor};
    if (const std::optional<Cut> cut = CutOf(tensor.name)) {
      // One row of scales stands for many of codes.
      const auto unit = static_cast<int64_t>(
          std::bit_ceil(static_cast<uint64_t>((cut->whole + shape[0] - 1) / shape[0])));
      const int64_t begin = cut->part.begin / unit;
      slice.begin = begin * row_bytes;
      shape[0] = cut->part.size() == 0 ? 0 : (cut->part.end + unit - 1) / unit - begin;
    }
    return {MakeTensorInfo(std::move(name), tensor.dtype, std::move(shape)), slice};
  }

  const TensorSource& whole_;
  const config::ModelConfig config_;
  const Shard shard_;
  std::vector<TensorInfo> tensors_;
  std::vector<Slice> slices_;  // of each tensor
};

}  // namespace

std::unique_ptr<TensorSource> MakeShardedSource(const TensorSource& whole,
                                                const config::ModelConfig& config,
                                                const Shard& shard) {
  return std::make_unique<ShardedSource>(whole, config, shard);
}

}  // namespace fathom::checkpoint
