#include <fmt/format.h>

#include "apps/fathom/commands.h"
#include "apps/fathom/model_session.h"
#include "apps/fathom/progress.h"
#include "base/thread_pool.h"
#include "checkpoint/synthetic_checkpoint.h"

namespace fathom::app {

Result<std::string> ReadConfigText(const std::string& name_or_file, int layers) {
  auto text = checkpoint::PresetConfigText(name_or_file);
  if (!text.ok()) text = ReadTextFile(name_or_file);
  if (!text.ok()) {
    return InvalidArgument(
        fmt::format("{} is neither flash, pro or tiny nor a readable config.json ({})",
                    name_or_file, text.status().message()));
  }
  if (layers > 0) return checkpoint::CutLayers(*text, layers);
  return text;
}

Status RunSynth(const SynthOptions& options) {
  checkpoint::SynthOptions synth;
  ASSIGN_OR_RETURN(synth.config_text, ReadConfigText(options.config, options.layers));
  synth.seed = options.seed;
  synth.dir = options.out;
  synth.num_threads = options.num_threads > 0 ? options.num_threads : NumUsableCores();
  ProgressLine progress("writing " + options.out);
  return checkpoint::WriteSyntheticCheckpoint(
      synth, [&](int64_t done, int64_t total) { progress.Update(done, total); });
}

}  // namespace fathom::app
