// The sampling that a request gets where it says nothing: generation_config.json's values, with
// overrides on top.
#pragma once

#include <string>

#include "base/status.h"
#include "json/json.h"
#include "request/sampling_params.h"

namespace fathom::app {

// `folder` may be empty, and its generation_config.json absent: then only `overrides` count.
// kBadModel and kInvalidArgument name the field that is out of range.
Result<request::SamplingParams> SamplingDefaults(const std::string& folder,
                                                 const json::Value& overrides);

}  // namespace fathom::app
