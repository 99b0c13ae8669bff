#include "apps/fathom/launch_environment.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <string_view>

namespace fathom::app {
namespace {

constexpr int kMaxNodes = 1024;

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool Has(const char* name) const { return !Text(name).empty(); }
  std::string Text(const char* name) const {
    const auto found = environment_.find(name);
    return found == environment_.end() ? "" : found->second;
  }

  Result<int> Number(const char* name, int low, int high) const {
    const std::string text = Text(name);
    int value = 0;
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stopped == end && value >= low && value <= high) return value;
    return InvalidArgument(
        fmt::format("the launcher's variable {} is '{}'; expected a number from {} to {}", name,
                    text, low, high));
  }

 private:
  const Environment& environment_;
};

struct RankVariables {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

// The launch of one that numbers its processes and says how many it started on this host.
Result<Launch> ReadRanks(const Variables& variables, const RankVariables& names) {
  Launch launch;
  launch.launcher = names.launcher;
  ASSIGN_OR_RETURN(launch.num_nodes, variables.Number(names.size, 1, kMaxNodes));
  ASSIGN_OR_RETURN(launch.node_rank, variables.Number(names.rank, 0, launch.num_nodes - 1));
  if (!variables.Has(names.local_size)) return launch;
  ASSIGN_OR_RETURN(const int local_size, variables.Number(names.local_size, 1, launch.num_nodes));
  if (local_size > 1) {
    ASSIGN_OR_RETURN(launch.local_device, variables.Number(names.local_rank, 0, local_size - 1));
  }
  if (local_size == launch.num_nodes) launch.master_addr = "127.0.0.1";
  return launch;
}

Result<Launch> ReadSlurm(const Variables& variables) {
  Launch launch;
  launch.launcher = "Slurm";
  ASSIGN_OR_RETURN(launch.num_nodes, variables.Number("SLURM_NTASKS", 1, kMaxNodes));
  ASSIGN_OR_RETURN(launch.node_rank, variables.Number("SLURM_PROCID", 0, launch.num_nodes - 1));
  ASSIGN_OR_RETURN(const int num_hosts, variables.Number("SLURM_NNODES", 1, kMaxNodes));
  if (launch.num_nodes > num_hosts) {
    ASSIGN_OR_RETURN(launch.local_device,
                     variables.Number("SLURM_LOCALID", 0, launch.num_nodes - 1));
  }
  ASSIGN_OR_RETURN(launch.master_addr, FirstHost(variables.Text("SLURM_STEP_NODELIST")));
  return launch;
}

Result<Launch> ReadLeaderWorkerSet(const Variables& variables) {
  Launch launch;
  launch.launcher = "LeaderWorkerSet";
  ASSIGN_OR_RETURN(launch.num_nodes, variables.Number("LWS_GROUP_SIZE", 1, kMaxNodes));
  ASSIGN_OR_RETURN(launch.node_rank, variables.Number("LWS_WORKER_INDEX", 0, launch.num_nodes - 1));
  launch.master_addr = variables.Text("LWS_LEADER_ADDRESS");
  return launch;
}

// Of those that number their processes but do not say how many there are.
Result<Launch> ReadIndex(const Variables& variables, const char* launcher, const char* name,
                         const LaunchFlags& flags) {
  Launch launch;
  if (!flags.num_nodes) return launch;
  launch.launcher = launcher;
  launch.num_nodes = *flags.num_nodes;
  ASSIGN_OR_RETURN(launch.node_rank, variables.Number(name, 0, launch.num_nodes - 1));
  return launch;
}

Result<Launch> ReadLauncher(const Variables& variables, const LaunchFlags& flags) {
  if (variables.Has("RANK") && variables.Has("WORLD_SIZE")) {
    return ReadRanks(variables,
                     {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  }
  if (variables.Has("OMPI_COMM_WORLD_RANK")) {
    return ReadRanks(variables, {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  }
  // A batch script outside of srun has a SLURM_PROCID too, but no step's list.
  if (variables.Has("SLURM_PROCID") && variables.Has("SLURM_STEP_NODELIST")) {
    return ReadSlurm(variables);
  }
  if (variables.Has("PMI_RANK")) {
    return ReadRanks(variables,
                     {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  }
  if (variables.Has("PMIX_RANK")) return ReadIndex(variables, "PMIx", "PMIX_RANK", flags);
  if (variables.Has("LWS_GROUP_SIZE")) return ReadLeaderWorkerSet(variables);
  if (variables.Has("JOB_COMPLETION_INDEX")) {
    return ReadIndex(variables, "Kubernetes", "JOB_COMPLETION_INDEX", flags);
  }
  return Launch{};
}

Status CheckFlags(const LaunchFlags& flags) {
  const auto check = [](const char* name, const std::optional<int>& value, int low, int high) {
    if (!value || (*value >= low && *value <= high)) return OkStatus();
    return InvalidArgument(fmt::format("{} is {}; expected {} to {}", name, *value, low, high));
  };
  RETURN_IF_ERROR(check("--nnodes", flags.num_nodes, 1, kMaxNodes));
  RETURN_IF_ERROR(check("--node-rank", flags.node_rank, 0, kMaxNodes - 1));
  return check("--master-port", flags.master_port, 1, UINT16_MAX);
}

// Flags in the place of what the launcher says.
Status ApplyFlags(const LaunchFlags& flags, Launch* launch) {
  if (flags.num_nodes && !flags.node_rank && launch->num_nodes != *flags.num_nodes) {
    if (launch->launcher.empty()) {
      return InvalidArgument(fmt::format("--nnodes {} needs --node-rank: 0 to {}, another on each",
                                         *flags.num_nodes, *flags.num_nodes - 1));
    }
    return InvalidArgument(fmt::format("--nnodes is {}, but {} started {}; leave --nnodes out",
                                       *flags.num_nodes, launch->launcher, launch->num_nodes));
  }
  if (flags.num_nodes) launch->num_nodes = *flags.num_nodes;
  if (flags.node_rank) launch->node_rank = *flags.node_rank;
  if (launch->node_rank >= launch->num_nodes) {
    return InvalidArgument(
        fmt::format("--node-rank is {}; expected less than --nnodes, which is {}",
                    launch->node_rank, launch->num_nodes));
  }
  return OkStatus();
}

// A flag, or what the launcher's own variables say, or MASTER_ADDR and MASTER_PORT.
Status FindMaster(const Variables& variables, const LaunchFlags& flags, Launch* launch) {
  if (variables.Has("MASTER_ADDR")) launch->master_addr = variables.Text("MASTER_ADDR");
  if (flags.master_addr) launch->master_addr = *flags.master_addr;
  if (variables.Has("MASTER_PORT")) {
    ASSIGN_OR_RETURN(launch->master_port, variables.Number("MASTER_PORT", 1, UINT16_MAX - 1));
    // torchrun's agent listens there itself.
    if (variables.Text("TORCHELASTIC_USE_AGENT_STORE") == "True") ++launch->master_port;
  }
  if (flags.master_port) launch->master_port = *flags.master_port;
  if (!launch->master_addr.empty()) return OkStatus();
  return InvalidArgument(
      "several nodes need --master-addr (or MASTER_ADDR): the host name or address of node 0, "
      "which all can reach");
}

}  // namespace

Result<Launch> ReadLaunch(const LaunchFlags& flags, const Environment& environment) {
  RETURN_IF_ERROR(CheckFlags(flags));
  const bool is_alone = flags.num_nodes == 1 && flags.node_rank.value_or(0) == 0;
  if (is_alone) return Launch{};
  const Variables variables(environment);
  Launch launch;
  const bool is_told = flags.num_nodes && flags.node_rank;
  if (!is_told) {
    ASSIGN_OR_RETURN(launch, ReadLauncher(variables, flags));
  }
  RETURN_IF_ERROR(ApplyFlags(flags, &launch));
  if (launch.num_nodes == 1) return Launch{};
  RETURN_IF_ERROR(FindMaster(variables, flags, &launch));
  return launch;
}

Result<std::string> FirstHost(const std::string& node_list) {
  std::string host;
  bool in_brackets = false, is_skipping = false;
  for (const char c : node_list) {
    if (c == '[' && !in_brackets) {
      in_brackets = true;
    } else if (c == ']' && in_brackets) {
      in_brackets = is_skipping = false;
    } else if (c == ',' && !in_brackets) {
      break;
    } else if (in_brackets && (c == '-' || c == ',')) {
      is_skipping = true;
    } else if (!is_skipping) {
      host += c;
    }
  }
  if (!host.empty() && !in_brackets && host.find_first_of("[] ") == std::string::npos) return host;
  return InvalidArgument(fmt::format(
      "the launcher's variable SLURM_STEP_NODELIST is '{}'; expected hosts like gpu[01-04]",
      node_list));
}

}  // namespace fathom::app
