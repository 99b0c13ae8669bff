#include "apps/fathom/join_nodes.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "apps/fathom/model_session.h"
#include "base/log.h"

namespace fathom::app {
namespace {

// A node that hangs is noticed by its heartbeat. A rank of one that lives may compute for long
// while another, with fewer tokens, waits for it.
constexpr auto kExchangeTimeout = std::chrono::minutes(5);

constexpr const char* kSecretVariable = "FATHOM_CLUSTER_SECRET";

Environment ReadEnvironment() {
  Environment environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return environment;
}

// The secret of the file, without the end of its line, or of the environment.
Result<std::string> ReadSecret(const ModelOptions& options) {
  std::string secret;
  if (!options.cluster_secret_file.empty()) {
    ASSIGN_OR_RETURN(secret, ReadTextFile(options.cluster_secret_file));
    while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  } else if (const char* text = std::getenv(kSecretVariable); text != nullptr) {
    secret = text;
  }
  if (!secret.empty()) return secret;
  return InvalidArgument(
      fmt::format("several nodes need a secret: set {} to the same text on all of them, or give "
                  "--cluster-secret-file",
                  kSecretVariable));
}

// What must be the same everywhere, by the flags' names.
std::vector<comm::Agreement> Agreements(const ModelOptions& options, const std::string& model) {
  const auto number = [](auto value) { return fmt::format("{}", value); };
  return {
      {"model", model},
      {"--load-format", options.load_format == LoadFormat::kDummy ? "dummy" : "auto"},
      {"--seed", number(options.load_format == LoadFormat::kDummy ? options.seed : 0)},
      {"--numerics", options.numerics == config::Numerics::kFp32 ? "fp32" : "official"},
      {"--attention-config",
       number(options.index_dtype ? static_cast<int>(*options.index_dtype) : -1)},
      {"--tensor-parallel-size", number(options.parallel.tensor_parallel_size)},
      {"--data-parallel-size", number(options.parallel.data_parallel_size)},
      {"--pipeline-parallel-size", number(options.parallel.pipeline_parallel_size)},
      {"--enable-expert-parallel", number(options.parallel.enable_expert_parallel)},
      {"--disable-custom-all-reduce", number(options.disable_custom_all_reduce)},
      {"--max-model-len", number(options.max_model_len)},
      {"--max-num-seqs", number(options.max_num_seqs)},
      {"--max-num-batched-tokens", number(options.max_num_batched_tokens)},
      {"--kv-cache-memory", number(options.kv_cache_bytes)},
      {"--kv-host-size", number(options.kv.host_bytes)},
      {"--kv-disk-dir", options.kv.disk_directory.empty() ? "none" : "given"},
      {"--kv-disk-size", number(options.kv.disk_bytes)},
      {"--kv-disk-write-bandwidth", number(options.kv.disk_write_bytes_per_second)},
      {"--[no-]enable-prefix-caching", number(options.kv.prefix_caching)},
  };
}

}  // namespace

Result<JoinedNodes> JoinNodes(const ModelOptions& options, const std::string& model) {
  const int world = options.parallel.world_size();
  // A model on one device is a process of its own, whatever started several of them.
  ASSIGN_OR_RETURN(const Launch launch,
                   ReadLaunch(options.launch, world > 1 ? ReadEnvironment() : Environment()));
  if (world % launch.num_nodes != 0) {
    return InvalidArgument(fmt::format(
        "{} ranks (tensor x data x pipeline) do not spread evenly over {} nodes{}: change --nnodes "
        "or a --...-parallel-size",
        world, launch.num_nodes,
        launch.launcher.empty() ? "" : fmt::format(", which {} started", launch.launcher)));
  }
  JoinedNodes joined{.group = nullptr,
                     .num_local_ranks = world / launch.num_nodes,
                     .local_device = launch.local_device};
  if (world == 1) return joined;
  comm::JoinOptions join{.num_nodes = launch.num_nodes,
                         .node_rank = launch.node_rank,
                         .num_local_ranks = joined.num_local_ranks,
                         .world_size = world,
                         .master_addr = launch.master_addr,
                         .master_port = launch.master_port,
                         .secret = {},
                         .agreements = Agreements(options, model),
                         .exchange_timeout = kExchangeTimeout};
  if (launch.num_nodes > 1) {
    ASSIGN_OR_RETURN(join.secret, ReadSecret(options));
    LogInfo("node {} of {}{}: meeting at {}:{}", launch.node_rank, launch.num_nodes,
            launch.launcher.empty() ? "" : fmt::format(" (by {})", launch.launcher),
            launch.master_addr, launch.master_port);
  }
  ASSIGN_OR_RETURN(joined.group, comm::NodeGroup::Join(join));
  return joined;
}

}  // namespace fathom::app
