// The flag table of `fathom serve`: vLLM's flags with vLLM's meaning, and Fathom's own. Each row
// says whether the flag works, is accepted without effect (and says so once), or is refused with
// what is available. The command line, --help and docs/operations.md are all made from this table.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "apps/fathom/serve_options.h"
#include "base/status.h"

namespace fathom::app {

enum class FlagKind {
  kSwitch,  // --name; --no-name where `negatable`
  kValue,   // --name VALUE
  kList,    // --name A B …
  kJson,    // --name '{"a":{"b":1}}' or --name.a.b 1
};

enum class FlagEffect { kWorks, kNoEffect, kRefused };

struct ServeFlag {
  std::string name;  // without dashes
  FlagKind kind = FlagKind::kValue;
  FlagEffect effect = FlagEffect::kWorks;
  std::string value_name;  // shown in --help
  std::string help;        // what it does; why it has no effect; what is available instead
  bool negatable = false;
  // Checks and applies a value ("true"/"false" for a switch; the JSON text of a kJson). A message
  // names what is accepted. Null: any value is taken.
  std::function<Status(const std::vector<std::string>& values, ServeOptions& options)> apply;
};

const std::vector<ServeFlag>& ServeFlags();

// Rewrites arguments to the table's spelling: `--a_b` to `--a-b`, `-tp` to its long name, and every
// `--name.x.y V` of a kJson flag folded into one `--name JSON` (later values win). Other arguments
// pass through.
Result<std::vector<std::string>> FoldDottedFlags(std::span<const std::string> args);

// The table as Markdown, for docs/operations.md.
std::string ServeFlagsMarkdown();

}  // namespace fathom::app
