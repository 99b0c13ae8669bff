#include "model/cuda_weights.h"

#include <algorithm>

#include "base/check.h"
#include "model/dummy_values.h"

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

// Copies what the checkpoint has to the GPU, piece by piece. The first error is kept and ends the
// work.
class Uploader {
 public:
  Uploader(const config::ModelConfig& config, bool dummy, device::Device& device,
           std::unique_ptr<device::Stream> stream, CudaWeights& weights)
      : config_(config),
        dummy_(dummy),
        device_(device),
        stream_(std::move(stream)),
        weights_(weights) {}

  Status Run(const Weights& host) {
    weights_.embed = Bf16(host.embed);
    weights_.head = Tiled(host.head, TileKind::kBf16);
    weights_.norm = Norm(host.norm, config_.hidden_size);
    weights_.hc_head = HyperConnection(host.hc_head, 4);
    for (const BlockWeights& block : host.layers) {
      weights_.layers.push_back(Block(block));
      if (!error_.ok()) return error_;
    }
    const Status done = stream_->Synchronize();
    return error_.ok() ? done : error_;
  }

 private:
  std::byte* Allocate(int64_t bytes) {
    if (!error_.ok()) return nullptr;
    auto buffer = device_.Allocate((bytes + 255) / 256 * 256);
    if (!buffer.ok()) {
      error_ = buffer.status();
      return nullptr;
    }
    weights_.buffers.push_back(std::move(*buffer));
    return weights_.buffers.back().data();
  }

  void Fill(std::byte* to, const void* from, int64_t bytes, DummyKind kind, int limit = 1) {
    if (!error_.ok() || bytes == 0) return;
    if (dummy_) {
      FillDummy(kind, to, bytes, ++seed_, limit, *stream_);
      return;
    }
    const Status status = stream_->Copy(to, from, bytes);
    if (!status.ok()) error_ = status;
  }

  const std::byte* Place(const void* from, int64_t bytes, DummyKind kind, int limit = 1) {
    if (from == nullptr) return nullptr;
    std::byte* const to = Allocate(bytes);
    Fill(to, from, bytes, kind, limit);
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

  // The matrix as it is on disk, in memory that the next one overwrites (in stream order).
  WeightMatrix Stage(const WeightMatrix& w) {
    const int64_t data_bytes = (DataBytes(w) + 255) / 256 * 256;
    if (staging_.bytes() < data_bytes + ScaleBytes(w)) {
      const Status idle = stream_->Synchronize();
      if (!idle.ok()) error_ = idle;
      auto buffer = device_.Allocate(data_bytes + ScaleBytes(w));
      if (!buffer.ok()) {
        error_ = buffer.status();
        return {};
      }
      staging_ = std::move(*buffer);
    }
    WeightMatrix staged = w;
    staged.data = staging_.data();
    const bool fp4 = w.dtype == WeightDType::kFp4;
    Fill(staging_.data(), w.data, DataBytes(w),
         fp4                             ? DummyKind::kFp4
         : w.dtype == WeightDType::kBF16 ? DummyKind::kBf16
                                         : DummyKind::kFp8);
    if (w.scales != nullptr) {
      std::byte* const scales = staging_.data() + data_bytes;
      Fill(scales, w.scales, ScaleBytes(w), fp4 ? DummyKind::kFp4Scale : DummyKind::kFp8Scale);
      staged.scales = reinterpret_cast<const uint8_t*>(scales);
    }
    return staged;
  }

  void TileInto(const WeightMatrix& w, TileKind kind, std::byte* tiles, int interleave) {
    const WeightMatrix staged = Stage(w);
    if (error_.ok()) kernels::LaunchTileWeights(staged, kind, tiles, *stream_, interleave);
  }

  TiledMatrix Tiled(const WeightMatrix& w, TileKind kind) {
    std::byte* const tiles = Allocate(kernels::TiledBytes(kind, w.rows, w.cols));
    if (!error_.ok()) return {};
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
    const WeightMatrix& w1 = experts[0].w1;
    const TileKind kind = w1.dtype == WeightDType::kFp4 ? TileKind::kFp4 : TileKind::kFp8;
    const auto count = static_cast<int64_t>(experts.size());
    const int64_t gate_up = kernels::TiledBytes(kind, 2 * w1.rows, w1.cols);
    const int64_t down = kernels::TiledBytes(kind, w1.cols, w1.rows);
    std::byte* const gate_up_tiles = Allocate(count * gate_up);
    std::byte* const down_tiles = Allocate(count * down);
    if (!error_.ok()) return {};
    const int64_t second = 2 * w1.cols / 128 * kernels::TileMatrixBytes(kind);
    for (int64_t e = 0; e < count; ++e) {
      const kernels::ExpertMatrices& m = experts[static_cast<size_t>(e)];
      TileInto(m.w1, kind, gate_up_tiles + e * gate_up, 2);
      TileInto(m.w3, kind, gate_up_tiles + e * gate_up + second, 2);
      TileInto(m.w2, kind, down_tiles + e * down, 1);
    }
    kernels::ExpertTiles tiles{.kind = kind, .gate_up = gate_up_tiles, .down = down_tiles};
    if (kind == TileKind::kFp8) PlaceExpertScales(experts, tiles);
    return tiles;
  }

  // Scale rows of w1 and w3 take turns, as their row tiles do.
  void PlaceExpertScales(std::span<const kernels::ExpertMatrices> experts,
                         kernels::ExpertTiles& tiles) {
    std::vector<uint8_t> gate_up, down;
    for (const kernels::ExpertMatrices& m : experts) {
      const int64_t blocks = m.w1.cols / 128;
      for (int64_t r = 0; r < m.w1.rows / 128; ++r) {
        for (const WeightMatrix* w : {&m.w1, &m.w3}) {
          gate_up.insert(gate_up.end(), w->scales + r * blocks, w->scales + (r + 1) * blocks);
        }
      }
      down.insert(down.end(), m.w2.scales, m.w2.scales + ScaleBytes(m.w2));
    }
    const auto place = [this](const std::vector<uint8_t>& scales) {
      const auto* placed =
          Place(scales.data(), static_cast<int64_t>(scales.size()), DummyKind::kFp8Scale);
      const Status done = stream_->Synchronize();  // the host's copy ends here
      if (!done.ok()) error_ = done;
      return reinterpret_cast<const uint8_t*>(placed);
    };
    tiles.gate_up_scales = place(gate_up);
    tiles.down_scales = place(down);
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
    b.sink = Floats(w.attn.sink, c.num_heads);
    b.compressor = Compressor(w.attn.compressor, c.head_dim);
    b.index_compressor = Compressor(w.attn.indexer.compressor, c.index_head_dim);
    if (w.attn.indexer.wq_b.data != nullptr) {
      b.index_wq_b = Tiled(w.attn.indexer.wq_b, TileKind::kFp8);
      b.index_proj = Tiled(w.attn.indexer.weights_proj, TileKind::kBf16);
    }
    b.gate = Tiled(w.ffn.gate, TileKind::kBf16);
    b.bias = Floats(w.ffn.bias, c.num_experts);
    b.tid2eid = reinterpret_cast<const int32_t*>(
        Place(w.ffn.tid2eid, int64_t{c.vocab_size} * c.num_experts_per_token * 4,
              DummyKind::kExpertIds, c.num_experts));
    b.routed = Experts(w.ffn.experts);
    b.shared = Experts({&w.ffn.shared, 1});
    return b;
  }

  const config::ModelConfig& config_;
  const bool dummy_;
  device::Device& device_;
  const std::unique_ptr<device::Stream> stream_;
  CudaWeights& weights_;
  device::Buffer staging_;
  uint32_t seed_ = 0;
  Status error_;
};

}  // namespace

int64_t CudaWeights::bytes() const {
  int64_t bytes = 0;
  for (const device::Buffer& buffer : buffers) bytes += buffer.bytes();
  return bytes;
}

Result<std::unique_ptr<CudaWeights>> MakeCudaWeights(const config::ModelConfig& config,
                                                     const Weights& host, bool dummy,
                                                     device::Device& device) {
  auto weights = std::make_unique<CudaWeights>();
  ASSIGN_OR_RETURN(auto stream, device.MakeStream());
  RETURN_IF_ERROR(Uploader(config, dummy, device, std::move(stream), *weights).Run(host));
  return weights;
}

}  // namespace fathom::model
