// ShardSummary: how many bytes of each part of a model the ranks of a layout hold. Made once for a
// config, asked for many ranks; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/shard.h"
#include "config/model_config.h"

namespace fathom::checkpoint {

struct PartBytes {
  std::string name;  // as Summarize has it
  int64_t bytes = 0;
};

class ShardSummary {
 public:
  explicit ShardSummary(const config::ModelConfig& config);

  // All parts of the model, in its order; 0 where the rank holds none.
  std::vector<PartBytes> Of(const Shard& shard) const;

 private:
  const config::ModelConfig config_;
  std::vector<std::string> parts_;
  std::map<std::string, size_t, std::less<>> part_of_;  // by a tensor's name in its layer
  std::unique_ptr<TensorSource> tensors_;  // of a layer's routed experts the first, for all
};

}  // namespace fathom::checkpoint
