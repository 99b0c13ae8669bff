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

// Some of a matrix's rows or columns, counted in the values that its codes stand for.
struct Cut {
  int axis = 0;
  int64_t whole = 0;  // of the axis
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
    const Slice& slice = slices_[i];
    if (slice.row_bytes == slice.whole_row_bytes) {
      return whole_.Read(*slice.whole, slice.begin + offset, out);
    }
    return ReadColumns(slice, offset, out);
  }

 private:
  // In bytes: rows, `begin` into the whole tensor and a whole row apart.
  struct Slice {
    const TensorInfo* whole = nullptr;
    int64_t begin = 0;
    int64_t row_bytes = 0;
    int64_t whole_row_bytes = 0;
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
    const bool sums = shard_.split == Split::kSums;
    const auto groups = [&](int axis, int64_t each) {
      return Cut{
          axis, config_.o_groups * each, {shard_.groups.begin * each, shard_.groups.end * each}};
    };
    const auto is = [&](std::string_view part) {
      return name.find(part) != std::string_view::npos;
    };
    if (name == "head.weight") return Cut{0, config_.vocab_size, shard_.vocabulary};
    if (is(".attn.wq_b.")) return groups(0, group_heads * config_.head_dim);
    if (is(".attn.attn_sink")) return groups(0, group_heads);
    if (is(".attn.wo_a.")) return groups(0, config_.o_lora_rank);
    if (is(".attn.wo_b.")) {
      return sums ? groups(1, config_.o_lora_rank) : Cut{0, hidden, shard_.outputs};
    }
    const bool shared = is(".shared_experts.");
    if (!shared && !is(".experts.")) return {};
    const Range& up = shared ? shard_.shared_up : shard_.routed_up;
    if (!is(".w2.")) return Cut{0, intermediate, up};
    if (sums) return Cut{1, intermediate, up};
    return Cut{0, hidden, shared ? shard_.outputs : shard_.routed_down};
  }

  std::pair<TensorInfo, Slice> Take(const TensorInfo& tensor, std::string name) const {
    std::vector<int64_t> shape = tensor.shape;
    const int64_t row_bytes = shape[0] == 0 ? 0 : tensor.bytes / shape[0];
    Slice slice{.whole = &tensor, .begin = 0, .row_bytes = row_bytes, .whole_row_bytes = row_bytes};
    if (const std::optional<Cut> cut = CutOf(tensor.name)) {
      int64_t& size = shape[static_cast<size_t>(cut->axis)];
      const int64_t element_bytes = cut->axis == 0 ? row_bytes : row_bytes / size;
      // One scale stands for many values, one byte for two of FP4.
      const auto unit = static_cast<int64_t>(
          std::bit_ceil(static_cast<uint64_t>((cut->whole + size - 1) / size)));
      const int64_t begin = cut->part.begin / unit;
      slice.begin = begin * element_bytes;
      size = cut->part.size() == 0 ? 0 : (cut->part.end + unit - 1) / unit - begin;
      if (cut->axis == 1) slice.row_bytes = size * element_bytes;
    }
    return {MakeTensorInfo(std::move(name), tensor.dtype, std::move(shape)), slice};
  }

  // Reads whole rows, piece by piece, and keeps the columns.
  Status ReadColumns(const Slice& slice, int64_t offset, std::span<std::byte> out) const {
    constexpr int64_t kPieceBytes = int64_t{1} << 20;
    if (out.empty()) return OkStatus();
    std::vector<std::byte> rows;
    const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / slice.whole_row_bytes);
    const auto end = offset + static_cast<int64_t>(out.size());
    std::byte* to = out.data();
    while (offset < end) {
      const int64_t row = offset / slice.row_bytes;
      const int64_t piece_end = std::min(end, (row + piece_rows) * slice.row_bytes);
      const int64_t last_row = (piece_end - 1) / slice.row_bytes;
      // From the first wanted column of the first row to the end of the last row's columns.
      rows.resize(static_cast<size_t>((last_row - row) * slice.whole_row_bytes + slice.row_bytes));
      RETURN_IF_ERROR(whole_.Read(*slice.whole, slice.begin + row * slice.whole_row_bytes, rows));
      for (int64_t r = row; r <= last_row; ++r) {
        const int64_t first = std::max(offset, r * slice.row_bytes);
        const int64_t count = std::min(piece_end, (r + 1) * slice.row_bytes) - first;
        std::memcpy(to,
                    rows.data() + (r - row) * slice.whole_row_bytes + (first - r * slice.row_bytes),
                    static_cast<size_t>(count));
        to += count;
      }
      offset = piece_end;
    }
    return OkStatus();
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
