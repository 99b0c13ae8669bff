// Which effort prefixes a checkpoint was trained with: its own encoder file tells, else its draft
// kind.
#include <filesystem>

#include "apps/fathom/model_session.h"
#include "base/log.h"

namespace fathom::app {

text::Effort ParseEffort(const std::string& name) {
  if (name == "low") return text::Effort::kLow;
  if (name == "high") return text::Effort::kHigh;
  if (name == "max") return text::Effort::kMax;
  return text::Effort::kUnset;
}

text::EffortProfile ResolveEffortProfile(const std::string& asked, const std::string& folder,
                                         const config::ModelConfig& config) {
  if (asked == "preview") return text::EffortProfile::kPreview;
  if (asked == "official") return text::EffortProfile::kOfficial;
  if (folder.empty()) return text::EffortProfile::kPreview;
  const std::string encoder = folder + "/encoding/encoding_dsv4.py";
  if (std::filesystem::is_regular_file(encoder)) {
    const auto source = ReadTextFile(encoder);
    if (source.ok()) {
      const bool official = source->find("Beyond maximum") != std::string::npos;
      LogInfo("effort profile {}: read from {}", official ? "official" : "preview", encoder);
      return official ? text::EffortProfile::kOfficial : text::EffortProfile::kPreview;
    }
  }
  const bool official = config.draft == config::DraftKind::kDSpark;
  LogInfo("effort profile {}: the config has {}", official ? "official" : "preview",
          official ? "a DSpark draft" : "no DSpark draft");
  return official ? text::EffortProfile::kOfficial : text::EffortProfile::kPreview;
}

}  // namespace fathom::app
