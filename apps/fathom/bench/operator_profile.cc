#include "apps/fathom/bench/operator_profile.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "device/timeline.h"

namespace fathom::app {
namespace {

// The products (model/roofline.h) that an operator (deepseek_v4_cuda.cc) computes.
const std::multimap<std::string_view, std::string_view>& ProductsOfOperators() {
  static const std::multimap<std::string_view, std::string_view> products = {
      {"boundary", "hyper-connection mixes"},
      {"input products", "wq_a, wkv"},
      {"input products", "compressors, ratio 4"},
      {"input products", "compressors, ratio 128"},
      {"query products", "wq_b"},
      {"query products", "indexer wq_b"},
      {"input products", "indexer weights_proj"},
      {"index selection", "indexer scores"},
      {"attention", "attention, window"},
      {"attention", "attention, ratio 4"},
      {"attention", "attention, ratio 128"},
      {"grouped output product", "wo_a"},
      {"output product", "wo_b"},
      {"routing", "router gate"},
      {"experts", "routed experts"},
      {"experts", "shared expert"},
      {"head", "head"}};
  return products;
}

// Marks the stream before each operator.
class OperatorMarker final : public model::ChoiceRecorder {
 public:
  struct Operator {
    std::string_view name;
    int layer;
  };

  OperatorMarker(device::Timeline& timeline, device::Stream& stream)
      : timeline_(timeline), stream_(stream) {}
  bool wants_choices() const override { return false; }
  bool wants_streams() const override { return false; }
  void OnRouting(int, int, std::span<const int32_t>) override {}
  void OnIndex(int, int, std::span<const int32_t>) override {}
  void OnOperator(const char* name, int layer) override {
    // The host must be ahead: a launch and a mark take it longer than a short operator runs.
    constexpr int kHostLeadUs = 8000;
    if (operators_.empty()) {
      timeline_.Delay(stream_, kHostLeadUs);
      timeline_.Mark(stream_);  // an interval without work
    }
    timeline_.Mark(stream_);
    operators_.push_back({name, layer});
  }
  const std::vector<Operator>& operators() const { return operators_; }

 private:
  device::Timeline& timeline_;
  device::Stream& stream_;
  std::vector<Operator> operators_;
};

const char* KindName(const config::ModelConfig& config, int layer) {
  if (layer < 0) return "";
  switch (config.layer_kind(layer)) {
    case config::LayerKind::kWindow:
      return "window";
    case config::LayerKind::kC4:
      return "ratio 4";
    case config::LayerKind::kC128:
      return "ratio 128";
  }
  return "";
}

// The model with this layer alone, for its share of a step's costs; -1: with none.
config::ModelConfig OneLayer(const config::ModelConfig& config, int layer) {
  config::ModelConfig one = config;
  one.draft = config::DraftKind::kNone;
  one.num_draft_blocks = 0;
  one.num_layers = layer < 0 ? 0 : 1;
  one.compress_ratios.clear();
  if (layer >= 0) {
    one.compress_ratios.push_back(config.compress_ratios[static_cast<size_t>(layer)]);
  }
  return one;
}

void AddCosts(const StepBench& bench, model::StepShape shape, const ExpertCounts& experts,
              const OperatorMarker::Operator& op, OperatorTime& out) {
  const config::ModelConfig& config = bench.session().config;
  if (op.layer >= 0) shape.distinct_experts = experts[static_cast<size_t>(op.layer)];
  std::vector<model::ProductCost> costs;
  const auto [begin, end] = ProductsOfOperators().equal_range(op.name);
  for (model::ProductCost& cost :
       CostsOfRank(bench.session(), OneLayer(config, op.layer), bench.layout(), shape)) {
    if (std::none_of(begin, end, [&](const auto& p) { return p.second == cost.name; })) continue;
    if (op.name == "boundary") {  // one of the layer's two
      cost.weight_bytes /= 2;
      cost.flops /= 2;
    }
    out.bytes += cost.weight_bytes + cost.kv_bytes;
    out.flops += cost.flops;
    costs.push_back(std::move(cost));
  }
  out.floor_us += model::Price(costs, model::H200Ceilings()).floor_us();
}

// Medians over the repeats: runs[repeat][interval].
std::vector<double> Medians(std::vector<std::vector<double>> runs) {
  std::vector<double> medians;
  for (size_t i = 0; i < runs[0].size(); ++i) {
    std::vector<double> times;
    for (const std::vector<double>& run : runs) times.push_back(run[i]);
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                     times.end());
    medians.push_back(times[times.size() / 2]);
  }
  return medians;
}

}  // namespace

Result<std::vector<OperatorTime>> ProfileOperators(StepBench& bench, const model::StepShape& shape,
                                                   const ExpertCounts& experts, int repeats) {
  const auto timeline = device::MakeTimeline(device::DeviceKind::kCuda);
  std::vector<std::vector<double>> runs;
  std::vector<OperatorMarker::Operator> operators;
  bench.Prepare(shape);
  for (int i = 0; i < repeats; ++i) {
    OperatorMarker marker(*timeline, bench.stream());
    RETURN_IF_ERROR(bench.Forward(&marker));
    timeline->Mark(bench.stream());
    ASSIGN_OR_RETURN(runs.emplace_back(), timeline->Take());
    operators = marker.operators();
    CHECK_EQ(runs.back().size(), operators.size() + 1);
  }
  const std::vector<double> times = Medians(std::move(runs));
  const config::ModelConfig& config = bench.session().config;
  std::vector<OperatorTime> out;
  for (size_t i = 0; i < operators.size(); ++i) {
    const OperatorMarker::Operator& op = operators[i];
    const std::string kind = KindName(config, op.layer);
    auto it = std::find_if(out.begin(), out.end(), [&](const OperatorTime& t) {
      return t.name == op.name && t.layer_kind == kind;
    });
    if (it == out.end()) {
      out.push_back({.name = std::string(op.name), .layer_kind = kind});
      it = out.end() - 1;
    }
    ++it->count;
    it->us += std::max(0.0, times[i + 1] - times[0]);
    AddCosts(bench, shape, experts, op, *it);
  }
  return out;
}

std::vector<OperatorTime> MergeLayerKinds(const std::vector<OperatorTime>& operators) {
  std::vector<OperatorTime> out;
  for (const OperatorTime& op : operators) {
    auto it = std::find_if(out.begin(), out.end(),
                           [&](const OperatorTime& t) { return t.name == op.name; });
    if (it == out.end()) {
      out.push_back({.name = op.name});
      it = out.end() - 1;
    }
    it->count += op.count;
    it->us += op.us;
    it->floor_us += op.floor_us;
    it->bytes += op.bytes;
    it->flops += op.flops;
  }
  return out;
}

}  // namespace fathom::app
