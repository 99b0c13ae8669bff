#include "config/model_config.h"

#include "base/check.h"

namespace fathom::config {

LayerKind ModelConfig::layer_kind(int layer) const {
  CHECK_LT(static_cast<size_t>(layer), compress_ratios.size());
  switch (compress_ratios[static_cast<size_t>(layer)]) {
    case 0:
      return LayerKind::kWindow;
    case 4:
      return LayerKind::kC4;
    default:
      return LayerKind::kC128;
  }
}

RoutingKind ModelConfig::routing_kind(int layer) const {
  return layer < num_hash_layers ? RoutingKind::kHash : RoutingKind::kScore;
}

int ModelConfig::num_layers_of(LayerKind kind) const {
  int count = 0;
  for (int layer = 0; layer < num_layers; ++layer) count += layer_kind(layer) == kind ? 1 : 0;
  return count;
}

}  // namespace fathom::config
