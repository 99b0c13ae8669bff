// PresetConfigText and CutLayers: where the config of a synthetic checkpoint comes from.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/embedded_files.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "json/json.h"

namespace fathom::checkpoint {

Result<std::string> PresetConfigText(const std::string& name) {
  if (name == "flash") return std::string(kFlashConfig);
  if (name == "pro") return std::string(kProConfig);
  if (name == "tiny") return std::string(kTinyConfig);
  return NotFound(fmt::format("no preset is called {}; the presets are flash, pro and tiny", name));
}

Result<std::string> CutLayers(const std::string& config_text, int num_layers) {
  ASSIGN_OR_RETURN(const config::ModelConfig config, ParseModelConfig(config_text, "config.json"));
  if (num_layers < 1 || num_layers > config.num_layers) {
    return InvalidArgument(fmt::format("layers is {}, expected 1 to {} for this config", num_layers,
                                       config.num_layers));
  }
  ASSIGN_OR_RETURN(json::Value root, json::Parse(config_text));
  root.Set("num_hidden_layers", json::Value::Number(int64_t{num_layers}));
  root.Set("num_hash_layers",
           json::Value::Number(int64_t{std::min(config.num_hash_layers, num_layers)}));
  std::vector<json::Value>& ratios = root.Find("compress_ratios")->items();
  ratios.erase(ratios.begin() + num_layers, ratios.begin() + config.num_layers);
  if (config.draft == config::DraftKind::kDSpark) {
    // The draft reads the last layers: their ids move down with the end of the model.
    std::vector<json::Value> ids;
    for (const int id : config.dspark.target_layer_ids) {
      const int64_t moved = int64_t{id} - (config.num_layers - num_layers);
      if (moved < 0) {
        return InvalidArgument(
            fmt::format("layers is {}: too few for dspark_target_layer_ids, which reach "
                        "{} layers back",
                        num_layers, config.num_layers - id));
      }
      ids.push_back(json::Value::Number(moved));
    }
    root.Set("dspark_target_layer_ids", json::Value::Array(std::move(ids)));
  }
  return json::DumpPython(root) + "\n";
}

}  // namespace fathom::checkpoint
