// What the fuzz targets of request bodies share: a server that generates nothing, and what every
// refusal must look like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/scripted_engine.h"
#include "base/check.h"

namespace fathom {

inline api::ApiOptions FuzzOptions() {
  api::ApiOptions options;
  options.served_model_names = {"m"};
  options.grammar.num_threads = 0;
  return options;
}

inline const api::ServerContext& FuzzContext() {
  static const auto tokenizer =
      *text::Tokenizer::Load(FATHOM_SOURCE_DIR "/models/fathom-tiny/tokenizer.json");
  static api::ScriptedEngine engine(  // nothing is generated here
      [](const request::Request&) { return std::vector<int32_t>(); }, 1, 4096);
  static MetricsRegistry metrics;
  static const api::ServerContext context{
      .options = FuzzOptions(),
      .model = {.root = "m", .special_tokens = *text::SpecialTokens::Find(*tokenizer)},
      .engine = engine,
      .tokenizer = *tokenizer,
      .metrics = metrics,
      .start_time = 0};
  return context;
}

// One line, of the client's making.
inline void CheckError(const api::ApiError& error) {
  CHECK(error.status >= 400 && error.status < 500);
  CHECK(!error.message.empty());
  CHECK_EQ(error.message.find('\n'), std::string::npos);
}

}  // namespace fathom
