#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "base/check.h"

namespace fathom::model {

using checkpoint::FileDType;
using checkpoint::TensorInfo;
using config::LayerKind;

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kReadBytes = int64_t{16} << 20;  // the piece one thread reads at a time

int64_t AlignUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Expert ids are I64 on disk and int32 in memory.
int64_t MemoryBytes(const TensorInfo& tensor) {
  return tensor.dtype == FileDType::kI64 ? tensor.bytes / 2 : tensor.bytes;
}

// The block a tensor belongs to ("layers.3.", "mtp.0."), or nothing for the rest.
std::string_view BlockPrefix(std::string_view name) {
  if (!name.starts_with("layers.") && !name.starts_with("mtp.")) return {};
  return name.substr(0, name.find('.', name.find('.') + 1) + 1);
}

}  // namespace

const TensorInfo& Weights::TensorAt(const void* data) const {
  const auto it = tensors_.find(data);
  CHECK(it != tensors_.end());
  return *it->second;
}

int64_t Weights::bytes() const {
  int64_t bytes = 0;
  for (const device::Buffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

// Places tensors into one buffer a block, then reads them all at once.
class WeightLoader {
 public:
  WeightLoader(const config::ModelConfig& config, const checkpoint::TensorSource& source,
               device::Device& device, Weights& weights)
      : config_(config), source_(source), device_(device), weights_(weights) {}

  Status Load() {
    RETURN_IF_ERROR(Place());
    return ReadAll();
  }

  // Everything but the values.
  Status Place() {
    RETURN_IF_ERROR(PlaceAll());
    BindTop();
    for (int i = 0; i < config_.num_layers; ++i) {
      weights_.layers.push_back(Block(fmt::format("layers.{}.", i), i));
    }
    for (int i = 0; i < config_.num_draft_blocks; ++i) {
      weights_.draft_blocks.push_back(Block(fmt::format("mtp.{}.", i), config_.num_layers + i));
    }
    if (config_.draft == config::DraftKind::kMtp) BindMtp();
    if (config_.draft == config::DraftKind::kDSpark) BindDSpark();
    return error_;
  }

 private:
  struct Placed {
    const TensorInfo* tensor;
    std::byte* data;
  };

  // tensors() is ordered by name, so a block's tensors follow each other.
  Status PlaceAll() {
    const std::vector<TensorInfo>& tensors = source_.tensors();
    for (size_t begin = 0; begin < tensors.size();) {
      const std::string_view prefix = BlockPrefix(tensors[begin].name);
      size_t end = begin;
      int64_t bytes = 0;
      for (; end < tensors.size() && BlockPrefix(tensors[end].name) == prefix; ++end) {
        bytes += AlignUp(MemoryBytes(tensors[end]));
      }
      ASSIGN_OR_RETURN(device::Buffer buffer, device_.Allocate(bytes));
      std::byte* data = buffer.data();
      for (; begin < end; ++begin) {
        placed_.push_back({&tensors[begin], data});
        if (tensors[begin].bytes > 0) weights_.tensors_.emplace(data, &tensors[begin]);
        data += AlignUp(MemoryBytes(tensors[begin]));
      }
      weights_.buffers_.push_back(std::move(buffer));
    }
    return OkStatus();
  }

  const Placed* Find(const std::string& name) {
    const auto it =
        std::lower_bound(placed_.begin(), placed_.end(), name,
                         [](const Placed& p, const std::string& n) { return p.tensor->name < n; });
    if (it != placed_.end() && it->tensor->name == name) return &*it;
    if (error_.ok())
      error_ = BadModel(fmt::format("tensor {} is missing from the checkpoint", name));
    return nullptr;
  }

  const std::byte* Data(const std::string& name, FileDType dtype) {
    const Placed* p = Find(name);
    if (p == nullptr) return nullptr;
    if (p->tensor->dtype != dtype && error_.ok()) {
      error_ = BadModel(
          fmt::format("tensor {} is {}: expected {}", name, Name(p->tensor->dtype), Name(dtype)));
    }
    return p->data;
  }
  const float* Floats(const std::string& name) {
    return reinterpret_cast<const float*>(Data(name, FileDType::kF32));
  }
  const BFloat16* Norm(const std::string& name) {
    return reinterpret_cast<const BFloat16*>(Data(name + ".weight", FileDType::kBF16));
  }

  // A matrix without a scale, by its full name.
  WeightMatrix Plain(const std::string& name) {
    const Placed* p = Find(name);
    if (p == nullptr || p->tensor->shape.size() != 2) return {};
    const auto dtype = p->tensor->dtype == FileDType::kF32 ? kernels::WeightDType::kF32
                                                           : kernels::WeightDType::kBF16;
    return {dtype, p->tensor->shape[0], p->tensor->shape[1], p->data};
  }

  // name.weight, with name.scale where it is quantized.
  WeightMatrix Matrix(const std::string& name) {
    const Placed* p = Find(name + ".weight");
    if (p == nullptr || p->tensor->shape.size() != 2) return {};
    const bool fp4 = p->tensor->dtype == FileDType::kI8;
    if (!fp4 && p->tensor->dtype != FileDType::kF8E4M3) return Plain(name + ".weight");
    const auto* scales =
        reinterpret_cast<const uint8_t*>(Data(name + ".scale", FileDType::kF8E8M0));
    return {fp4 ? kernels::WeightDType::kFp4 : kernels::WeightDType::kFp8, p->tensor->shape[0],
            p->tensor->shape[1] * (fp4 ? 2 : 1), p->data, scales};
  }

  HyperConnectionWeights HyperConnection(const std::string& name) {
    return {Plain(name + "_fn"), Floats(name + "_base"), Floats(name + "_scale")};
  }

  CompressorWeights Compressor(const std::string& name) {
    return {Matrix(name + ".wkv"), Matrix(name + ".wgate"), Floats(name + ".ape"),
            Norm(name + ".norm")};
  }

  AttentionWeights Attention(const std::string& name, LayerKind kind) {
    AttentionWeights w{.wq_a = Matrix(name + ".wq_a"),
                       .wq_b = Matrix(name + ".wq_b"),
                       .wkv = Matrix(name + ".wkv"),
                       .wo_a = Matrix(name + ".wo_a"),
                       .wo_b = Matrix(name + ".wo_b"),
                       .q_norm = Norm(name + ".q_norm"),
                       .kv_norm = Norm(name + ".kv_norm"),
                       .sink = Floats(name + ".attn_sink"),
                       .compressor = {},
                       .indexer = {}};
    if (kind != LayerKind::kWindow) w.compressor = Compressor(name + ".compressor");
    if (kind == LayerKind::kC4) {
      w.indexer = {Matrix(name + ".indexer.wq_b"), Matrix(name + ".indexer.weights_proj"),
                   Compressor(name + ".indexer.compressor")};
    }
    return w;
  }

  kernels::ExpertMatrices Expert(const std::string& name) {
    return {Matrix(name + ".w1"), Matrix(name + ".w2"), Matrix(name + ".w3")};
  }

  MoeWeights Moe(const std::string& name, config::RoutingKind routing) {
    MoeWeights w;
    w.gate = Matrix(name + ".gate");
    if (routing == config::RoutingKind::kHash) {
      w.tid2eid = reinterpret_cast<const int32_t*>(Data(name + ".gate.tid2eid", FileDType::kI64));
    } else {
      w.bias = Floats(name + ".gate.bias");
    }
    for (int i = 0; i < config_.num_experts; ++i) {
      const std::string expert = fmt::format("{}.experts.{}", name, i);
      const bool is_here = source_.Find(expert + ".w1.weight") != nullptr;
      w.experts.push_back(is_here ? Expert(expert) : kernels::ExpertMatrices{});
    }
    w.shared = Expert(name + ".shared_experts");
    return w;
  }

  BlockWeights Block(const std::string& prefix, int layer) {
    return {.hc_attn = HyperConnection(prefix + "hc_attn"),
            .hc_ffn = HyperConnection(prefix + "hc_ffn"),
            .attn_norm = Norm(prefix + "attn_norm"),
            .ffn_norm = Norm(prefix + "ffn_norm"),
            .attn = Attention(prefix + "attn", config_.layer_kind(layer)),
            .ffn = Moe(prefix + "ffn", config_.routing_kind(layer))};
  }

  void BindTop() {
    if (source_.Find("embed.weight") != nullptr) weights_.embed = Matrix("embed");
    if (source_.Find("head.weight") == nullptr) return;
    weights_.head = Matrix("head");
    weights_.norm = Norm("norm");
    weights_.hc_head = HyperConnection("hc_head");
  }

  void BindMtp() {
    weights_.mtp = {.e_proj = Matrix("mtp.0.e_proj"),
                    .h_proj = Matrix("mtp.0.h_proj"),
                    .enorm = Norm("mtp.0.enorm"),
                    .hnorm = Norm("mtp.0.hnorm"),
                    .norm = Norm("mtp.0.norm"),
                    .hc_head = HyperConnection("mtp.0.hc_head")};
  }

  void BindDSpark() {
    const std::string last = fmt::format("mtp.{}.", config_.num_draft_blocks - 1);
    weights_.dspark = {.main_proj = Matrix("mtp.0.main_proj"),
                       .markov_w1 = Matrix(last + "markov_head.markov_w1"),
                       .markov_w2 = Matrix(last + "markov_head.markov_w2"),
                       .confidence = Matrix(last + "confidence_head.proj"),
                       .main_norm = Norm("mtp.0.main_norm"),
                       .norm = Norm(last + "norm"),
                       .hc_head = HyperConnection(last + "hc_head")};
  }

  struct Piece {
    const Placed* placed;
    int64_t offset;
    int64_t bytes;
  };

  Status ReadAll() {
    std::vector<Piece> pieces;
    for (const Placed& p : placed_) {
      const int64_t bytes = MemoryBytes(*p.tensor);
      for (int64_t offset = 0; offset < bytes; offset += kReadBytes) {
        pieces.push_back({&p, offset, std::min(kReadBytes, bytes - offset)});
      }
    }
    ASSIGN_OR_RETURN(const std::unique_ptr<device::Stream> stream, device_.MakeStream());
    std::mutex mutex;
    stream->thread_pool().ParallelFor(
        static_cast<int64_t>(pieces.size()), 1, [&](int64_t i, int64_t) {
          const Piece& piece = pieces[static_cast<size_t>(i)];
          const Status status =
              ReadTensor(source_, *piece.placed->tensor, piece.offset, config_.num_experts,
                         {piece.placed->data + piece.offset, static_cast<size_t>(piece.bytes)});
          if (status.ok()) return;
          const std::lock_guard lock(mutex);
          if (error_.ok()) error_ = status;
        });
    return error_;
  }

  const config::ModelConfig& config_;
  const checkpoint::TensorSource& source_;
  device::Device& device_;
  Weights& weights_;
  std::vector<Placed> placed_;
  Status error_;  // the first
};

namespace {

Status ReadExpertIds(const checkpoint::TensorSource& source, const TensorInfo& tensor,
                     int64_t offset, int num_experts, std::span<std::byte> out) {
  std::vector<int64_t> ids(out.size() / sizeof(int32_t));
  RETURN_IF_ERROR(source.Read(tensor, offset * 2, std::as_writable_bytes(std::span(ids))));
  auto* to = reinterpret_cast<int32_t*>(out.data());
  for (const int64_t id : ids) {
    if (id < 0 || id >= num_experts) {
      return BadModel(fmt::format("tensor {} holds the expert {}: expected 0 to {}", tensor.name,
                                  id, num_experts - 1));
    }
    *to++ = static_cast<int32_t>(id);
  }
  return OkStatus();
}

}  // namespace

Status ReadTensor(const checkpoint::TensorSource& source, const TensorInfo& tensor, int64_t offset,
                  int num_experts, std::span<std::byte> out) {
  if (tensor.dtype == FileDType::kI64) {
    return ReadExpertIds(source, tensor, offset, num_experts, out);
  }
  RETURN_IF_ERROR(source.Read(tensor, offset, out));
  if (tensor.dtype == FileDType::kF8E8M0 && std::memchr(out.data(), 255, out.size()) != nullptr) {
    return BadModel(fmt::format("tensor {} holds the scale 255: expected 0 to 254", tensor.name));
  }
  return OkStatus();
}

Result<std::shared_ptr<const Weights>> LoadWeights(const config::ModelConfig& config,
                                                   const checkpoint::TensorSource& source,
                                                   device::Device& device) {
  CHECK(device.kind() == device::DeviceKind::kCpu);
  auto weights = std::make_shared<Weights>();
  RETURN_IF_ERROR(WeightLoader(config, source, device, *weights).Load());
  return std::shared_ptr<const Weights>(std::move(weights));
}

Result<std::shared_ptr<const Weights>> PlaceWeights(const config::ModelConfig& config,
                                                    const checkpoint::TensorSource& source,
                                                    device::Device& device) {
  auto weights = std::make_shared<Weights>();
  RETURN_IF_ERROR(WeightLoader(config, source, device, *weights).Place());
  return std::shared_ptr<const Weights>(std::move(weights));
}

}  // namespace fathom::model
