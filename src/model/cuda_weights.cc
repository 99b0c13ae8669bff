#include "model/cuda_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "device/free_memory.h"
#include "kernels/grouped_gemm/experts_large.h"
#include "model/weight_transfer.h"

namespace fathom::model {
namespace {

using kernels::TiledMatrix;
using kernels::TileKind;
using kernels::WeightDType;

int64_t DataBytes(const WeightMatrix& w) {
  const int64_t values = w.rows * w.cols;
  switch (w.dtype) {
    case WeightDType::kF32:
      return values * 4;
    case WeightDType::kBF16:
      return values * 2;
    case WeightDType::kFp8:
      return values;
    case WeightDType::kFp4:
      return values / 2;
  }
  return 0;
}

int64_t ScaleBytes(const WeightMatrix& w) {
  if (w.dtype == WeightDType::kFp4) return w.rows * w.cols / 32;
  return w.dtype == WeightDType::kFp8 ? (w.rows + 127) / 128 * ((w.cols + 127) / 128) : 0;
}

Status CheckMemory(int64_t weight_bytes, int64_t workspace_bytes, const device::Device& device) {
  const int64_t needed = weight_bytes + workspace_bytes;
  const int64_t free = device::AwaitFreeMemory(
      needed, device.total_memory_bytes(), [&] { return device.free_memory_bytes(); },
      [&](int64_t now) {
        LogInfo(
            "{} has {} bytes free of the {} that are needed: waiting for what a process that has "
            "just ended gives back",
            device.name(), now, needed);
      });
  if (needed <= free) return OkStatus();
  return OutOfMemory(
      fmt::format("{} has {} bytes free; {} are needed for the weights, {} for the workspace of a "
                  "step (less with a smaller --max-num-batched-tokens), and more for the KV cache",
                  device.name(), free, weight_bytes, workspace_bytes));
}

// Those of which the rank has something; they follow each other.
std::span<const kernels::ExpertMatrices> OwnExperts(
    std::span<const kernels::ExpertMatrices> experts) {
  const auto is_own = [](const kernels::ExpertMatrices& e) {
    return e.w1.rows > 0 || e.w2.rows > 0;
  };
  const auto begin = std::find_if(experts.begin(), experts.end(), is_own);
  return {begin, std::find_if_not(begin, experts.end(), is_own)};
}

// Gives every weight its place in one range of device memory and plans what brings it there. Run
// twice: to count the bytes, and with the memory.
class Planner {
 public:
  Planner(const config::ModelConfig& config, const Weights& host, int64_t unit_bytes,
          std::byte* base)
      : config_(config), host_(host), unit_bytes_(unit_bytes), base_(base) {}

  void Run(CudaWeights& weights) {
    weights.embed = Bf16(host_.embed);
    if (host_.head.data != nullptr) {
      weights.head = Tiled(host_.head, TileKind::kBf16);
      weights.norm = Norm(host_.norm, config_.hidden_size);
      weights.hc_head = HyperConnection(host_.hc_head, 4);
    }
    for (const BlockWeights& block : host_.layers) weights.layers.push_back(Block(block));
  }

  int64_t bytes() const { return bytes_; }
  const std::vector<WeightUnit>& units() const { return units_; }
  // What is made of tiles when all are there.
  Status Finish(device::Stream& stream) const {
    for (const LargestScalesOf& of : largest_) {
      kernels::LaunchLargestScales(of.tiles, of.rows / 64, of.cols / 128, of.out, stream);
    }
    return stream.Synchronize();
  }

 private:
  struct LargestScalesOf {
    const std::byte* tiles;
    int64_t rows, cols;
    uint8_t* out;
  };

  std::byte* Allocate(int64_t bytes) {
    constexpr int64_t kAlignment = 1024;
    const int64_t place = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return base_ + place;
  }

  WeightUnit::Read ReadOf(const void* data, int64_t offset, int64_t bytes, int64_t place,
                          DummyKind kind) const {
    return {&host_.TensorAt(data), offset, bytes, place, kind};
  }

  const std::byte* Place(const void* from, int64_t bytes, DummyKind kind) {
    if (from == nullptr) return nullptr;
    std::byte* const to = Allocate(bytes);
    for (int64_t offset = 0; offset < bytes; offset += unit_bytes_) {
      const int64_t piece = std::min(unit_bytes_, bytes - offset);
      units_.push_back({.reads = {ReadOf(from, offset, piece, 0, kind)},
                        .bytes = piece,
                        .destination = to + offset});
    }
    return to;
  }
  const float* Floats(const float* from, int64_t count) {
    return reinterpret_cast<const float*>(Place(from, count * 4, DummyKind::kF32));
  }
  const __nv_bfloat16* Norm(const BFloat16* from, int64_t count) {
    return reinterpret_cast<const __nv_bfloat16*>(Place(from, count * 2, DummyKind::kOnesBf16));
  }
  const __nv_bfloat16* Bf16(const WeightMatrix& w) {
    CHECK(w.dtype == WeightDType::kBF16);
    return reinterpret_cast<const __nv_bfloat16*>(Place(w.data, DataBytes(w), DummyKind::kBf16));
  }

  // In slices of whole pairs of row tiles, which is what matrices take turns by.
  void TileInto(const WeightMatrix& w, TileKind kind, std::byte* tiles, int interleave) {
    if (w.rows == 0 || w.cols == 0) return;  // other ranks'
    constexpr int64_t kSliceRows = 2 * kernels::kTileMatrixRows;
    const int64_t row_bytes = DataBytes(w) / w.rows;
    const int64_t most = std::max(kSliceRows, unit_bytes_ / row_bytes / kSliceRows * kSliceRows);
    const int64_t tile_row_bytes =
        w.cols / kernels::TileMatrixCols(kind) * kernels::TileMatrixBytes(kind);
    const bool fp4 = w.dtype == WeightDType::kFp4;
    const DummyKind dummy = fp4                             ? DummyKind::kFp4
                            : w.dtype == WeightDType::kBF16 ? DummyKind::kBf16
                                                            : DummyKind::kFp8;
    for (int64_t row = 0; row < w.rows; row += most) {
      const int64_t rows = std::min(most, w.rows - row), data_bytes = rows * row_bytes;
      WeightUnit unit{.reads = {ReadOf(w.data, row * row_bytes, data_bytes, 0, dummy)},
                      .bytes = data_bytes,
                      .matrix = {w.dtype, rows, w.cols},
                      .kind = kind,
                      .tiles = tiles + row / kernels::kTileMatrixRows * interleave * tile_row_bytes,
                      .interleave = interleave};
      if (fp4) {
        const int64_t scale_bytes = rows * w.cols / 32;
        unit.scales_place = (data_bytes + 255) / 256 * 256;
        unit.reads.push_back(ReadOf(w.scales, row * w.cols / 32, scale_bytes, unit.scales_place,
                                    DummyKind::kFp4Scale));
        unit.bytes = unit.scales_place + scale_bytes;
      }
      units_.push_back(std::move(unit));
    }
  }

  TiledMatrix Tiled(const WeightMatrix& w, TileKind kind) {
    std::byte* const tiles = Allocate(kernels::TiledBytes(kind, w.rows, w.cols));
    TileInto(w, kind, tiles, 1);
    TiledMatrix tiled{kind, w.rows, w.cols, tiles, nullptr};
    if (w.dtype == WeightDType::kFp8) {
      tiled.scales =
          reinterpret_cast<const uint8_t*>(Place(w.scales, ScaleBytes(w), DummyKind::kFp8Scale));
    }
    return tiled;
  }

  CudaHyperConnection HyperConnection(const HyperConnectionWeights& w, int64_t mixes) {
    CHECK(w.fn.dtype == WeightDType::kF32);
    return {reinterpret_cast<const float*>(Place(w.fn.data, DataBytes(w.fn), DummyKind::kF32)),
            Floats(w.base, mixes), Floats(w.scale, mixes == 4 ? 1 : 3)};
  }

  CudaCompressorWeights Compressor(const CompressorWeights& w, int64_t dim) {
    if (w.wkv.data == nullptr) return {};
    const int64_t ratio = w.wkv.rows == dim ? 128 : 4;
    return {Tiled(w.wkv, TileKind::kBf16), Tiled(w.wgate, TileKind::kBf16),
            Floats(w.ape, ratio * w.wkv.rows), Norm(w.norm, dim)};
  }

  kernels::ExpertTiles Experts(std::span<const kernels::ExpertMatrices> experts) {
    if (experts.empty()) return {};  // other ranks'
    const WeightMatrix &w1 = experts[0].w1, &w2 = experts[0].w2;
    const TileKind kind = w1.dtype == WeightDType::kFp4 ? TileKind::kFp4 : TileKind::kFp8;
    const auto count = static_cast<int64_t>(experts.size());
    const int64_t gate_up = kernels::TiledBytes(kind, 2 * w1.rows, w1.cols);
    const int64_t down = kernels::TiledBytes(kind, w2.rows, w2.cols);
    std::byte* const gate_up_tiles = Allocate(count * gate_up);
    std::byte* const down_tiles = Allocate(count * down);
    const int64_t second = 2 * w1.cols / 128 * kernels::TileMatrixBytes(kind);
    for (int64_t e = 0; e < count; ++e) {
      const kernels::ExpertMatrices& m = experts[static_cast<size_t>(e)];
      TileInto(m.w1, kind, gate_up_tiles + e * gate_up, 2);
      TileInto(m.w3, kind, gate_up_tiles + e * gate_up + second, 2);
      TileInto(m.w2, kind, down_tiles + e * down, 1);
    }
    kernels::ExpertTiles tiles{.kind = kind, .gate_up = gate_up_tiles, .down = down_tiles};
    if (kind == TileKind::kFp8) {
      PlaceExpertScales(experts, tiles);
    } else {
      tiles.gate_up_largest = LargestScales(gate_up_tiles, count * 2 * w1.rows, w1.cols);
      tiles.down_largest = LargestScales(down_tiles, count * w2.rows, w2.cols);
    }
    return tiles;
  }

  const uint8_t* LargestScales(const std::byte* tiles, int64_t rows, int64_t cols) {
    auto* const largest = reinterpret_cast<uint8_t*>(Allocate(rows));
    if (rows > 0) largest_.push_back({tiles, rows, cols, largest});
    return largest;
  }

  // Scale rows of w1 and w3 take turns, as their row tiles do. One unit an expert.
  void PlaceExpertScales(std::span<const kernels::ExpertMatrices> experts,
                         kernels::ExpertTiles& tiles) {
    const WeightMatrix &w1 = experts[0].w1, &w2 = experts[0].w2;
    const auto count = static_cast<int64_t>(experts.size());
    const int64_t row_bytes = w1.cols / 128, rows = w1.rows / 128;
    const int64_t gate_up_bytes = 2 * rows * row_bytes, down_bytes = ScaleBytes(w2);
    std::byte* const gate_up = Allocate(count * gate_up_bytes);
    std::byte* const down = Allocate(count * down_bytes);
    for (int64_t e = 0; e < count; ++e) {
      const kernels::ExpertMatrices& m = experts[static_cast<size_t>(e)];
      WeightUnit unit{.bytes = gate_up_bytes, .destination = gate_up + e * gate_up_bytes};
      for (int64_t r = 0; r < rows; ++r) {
        for (const WeightMatrix* w : {&m.w1, &m.w3}) {
          unit.reads.push_back(ReadOf(w->scales, r * row_bytes, row_bytes,
                                      (2 * r + (w == &m.w3 ? 1 : 0)) * row_bytes,
                                      DummyKind::kFp8Scale));
        }
      }
      if (gate_up_bytes > 0) units_.push_back(std::move(unit));
      if (down_bytes == 0) continue;
      units_.push_back({.reads = {ReadOf(m.w2.scales, 0, down_bytes, 0, DummyKind::kFp8Scale)},
                        .bytes = down_bytes,
                        .destination = down + e * down_bytes});
    }
    tiles.gate_up_scales = reinterpret_cast<const uint8_t*>(gate_up);
    tiles.down_scales = reinterpret_cast<const uint8_t*>(down);
  }

  CudaBlockWeights Block(const BlockWeights& w) {
    const config::ModelConfig& c = config_;
    CudaBlockWeights b;
    b.hc_attn = HyperConnection(w.hc_attn, 24);
    b.hc_ffn = HyperConnection(w.hc_ffn, 24);
    b.attn_norm = Norm(w.attn_norm, c.hidden_size);
    b.ffn_norm = Norm(w.ffn_norm, c.hidden_size);
    b.wq_a = Tiled(w.attn.wq_a, TileKind::kFp8);
    b.wq_b = Tiled(w.attn.wq_b, TileKind::kFp8);
    b.wkv = Tiled(w.attn.wkv, TileKind::kFp8);
    b.wo_a = Tiled(w.attn.wo_a, TileKind::kFp8AsBf16);
    b.wo_b = Tiled(w.attn.wo_b, TileKind::kFp8);
    b.q_norm = Norm(w.attn.q_norm, c.q_lora_rank);
    b.kv_norm = Norm(w.attn.kv_norm, c.head_dim);
    b.sink = Floats(w.attn.sink, w.attn.wq_b.rows / c.head_dim);
    b.compressor = Compressor(w.attn.compressor, c.head_dim);
    b.index_compressor = Compressor(w.attn.indexer.compressor, c.index_head_dim);
    if (w.attn.indexer.wq_b.data != nullptr) {
      b.index_wq_b = Tiled(w.attn.indexer.wq_b, TileKind::kFp8);
      b.index_proj = Tiled(w.attn.indexer.weights_proj, TileKind::kBf16);
    }
    b.gate = Tiled(w.ffn.gate, TileKind::kBf16);
    b.bias = Floats(w.ffn.bias, c.num_experts);
    b.tid2eid = reinterpret_cast<const int32_t*>(Place(
        w.ffn.tid2eid, int64_t{c.vocab_size} * c.num_experts_per_token * 4, DummyKind::kExpertIds));
    b.routed = Experts(OwnExperts(w.ffn.experts));
    b.shared = Experts(OwnExperts({&w.ffn.shared, 1}));
    return b;
  }

  const config::ModelConfig& config_;
  const Weights& host_;
  const int64_t unit_bytes_;  // of a unit at most
  std::byte* const base_;
  int64_t bytes_ = 0;
  std::vector<WeightUnit> units_;
  std::vector<LargestScalesOf> largest_;
};

// What the kernels run is a tensor rank's part of every expert, or all of some experts and of the
// shared one.
Status CheckParts(const Weights& weights) {
  for (const BlockWeights& block : weights.layers) {
    const kernels::ExpertMatrices& shared = block.ffn.shared;
    for (const kernels::ExpertMatrices& expert : OwnExperts(block.ffn.experts)) {
      if (expert.w1.rows == shared.w1.rows && expert.w2.rows == shared.w2.rows) continue;
      return BadModel(
          "the GPU kernels run as large a part of every expert as of the shared one: "
          "checkpoint::MakeGpuShard makes such shards");
    }
  }
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<CudaWeights>> MakeCudaWeights(const config::ModelConfig& config,
                                                     const checkpoint::TensorSource& source,
                                                     bool dummy, int64_t workspace_bytes,
                                                     int num_gpus, device::Device& device) {
  // The checkpoint's tensors by where the model uses them, without values behind them.
  const auto host = device::MakeCpuDevice(1);
  ASSIGN_OR_RETURN(const auto directory, PlaceWeights(config, source, *host));
  RETURN_IF_ERROR(CheckParts(*directory));
  const int64_t unit_bytes = dummy ? kDummyUnitBytes : ReadUnitBytes(num_gpus);
  auto weights = std::make_unique<CudaWeights>();
  {
    // Counts; nothing is read or written where it points to.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    Planner sizes(config, *directory, unit_bytes, reinterpret_cast<std::byte*>(uintptr_t{1} << 30));
    CudaWeights ignored;
    sizes.Run(ignored);
    RETURN_IF_ERROR(CheckMemory(sizes.bytes(), workspace_bytes, device));
    ASSIGN_OR_RETURN(weights->buffer, device.Allocate(sizes.bytes()));
  }
  Planner planner(config, *directory, unit_bytes, weights->buffer.data());
  planner.Run(*weights);
  RETURN_IF_ERROR(dummy ? MakeDummyWeights(planner.units(), config.num_experts, device)
                        : TransferWeights(planner.units(), source, config.num_experts, device));
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  RETURN_IF_ERROR(planner.Finish(*stream));
  return weights;
}

}  // namespace fathom::model
