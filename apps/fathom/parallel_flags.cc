// The flags about how a model is spread over devices, and over hosts.
#include "apps/fathom/flag_builders.h"

namespace fathom::app {
namespace {

using config::ParallelConfig;

constexpr const char* kHowHostsMeet =
    "hosts share any layout by --nnodes, --node-rank and --master-addr, and only node 0 listens";

ApplyFlag SetSize(int ParallelConfig::* member, const char* flag) {
  return [=](const FlagValues& values, ServeOptions& options) -> Status {
    ASSIGN_OR_RETURN(options.model.parallel.*member, ParseNumber<int>(values[0], 1, 1024, flag));
    return OkStatus();
  };
}

ApplyFlag SetNodeNumber(std::optional<int> LaunchFlags::* member, int low, int high,
                        const char* flag) {
  return [=](const FlagValues& values, ServeOptions& options) -> Status {
    ASSIGN_OR_RETURN(options.model.launch.*member, ParseNumber<int>(values[0], low, high, flag));
    return OkStatus();
  };
}

void AddLayoutFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works("tensor-parallel-size", "N",
                         "devices that share each layer's heads and experts, for speed (default 1)",
                         SetSize(&ParallelConfig::tensor_parallel_size, "tensor-parallel-size")));
  flags->push_back(Works(
      "data-parallel-size", "N",
      "groups of devices with requests and a KV cache of their own, for throughput (default 1)",
      SetSize(&ParallelConfig::data_parallel_size, "data-parallel-size")));
  flags->push_back(
      Works("pipeline-parallel-size", "N",
            "groups of devices that hold consecutive layers, for memory (default 1)",
            SetSize(&ParallelConfig::pipeline_parallel_size, "pipeline-parallel-size")));
  flags->push_back(Works(
      "enable-expert-parallel", "",
      "spread whole experts over tensor and data ranks, instead of a part of each expert",
      [](const FlagValues& v, ServeOptions& o) {
        o.model.parallel.enable_expert_parallel = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch));
  flags->push_back(Works(
      "disable-custom-all-reduce", "",
      "leave what a stage's ranks exchange on GPUs to NCCL or host memory instead of kernels over "
      "peer memory",
      [](const FlagValues& v, ServeOptions& o) {
        o.model.disable_custom_all_reduce = v[0] == "true";
        return OkStatus();
      },
      FlagKind::kSwitch));
  for (const char* name : {"distributed-executor-backend", "data-parallel-backend"}) {
    flags->push_back(NoEffect(name, FlagKind::kValue, "a host's ranks are threads of one process"));
  }
  flags->push_back(NoEffect("all2all-backend", FlagKind::kValue,
                            "the fastest that the GPUs allow is taken; see "
                            "--disable-custom-all-reduce"));
  flags->push_back(NoEffect("api-server-count", FlagKind::kValue,
                            "one server answers for all data ranks; see --io-threads"));
  flags->push_back(NoEffect("enable-eplb", FlagKind::kSwitch, "experts stay where they are"));
}

void AddNodeFlags(std::vector<ServeFlag>* flags) {
  flags->push_back(Works("nnodes", "N",
                         "processes, one a host, that serve the model together (default: what "
                         "torchrun, Slurm, MPI or LeaderWorkerSet say, or 1)",
                         SetNodeNumber(&LaunchFlags::num_nodes, 1, 1024, "nnodes")));
  flags->push_back(Works("node-rank", "N", "of this process; 0 listens and serves",
                         SetNodeNumber(&LaunchFlags::node_rank, 0, 1023, "node-rank")));
  flags->push_back(Works("master-addr", "HOST", "of node 0, as the others reach it",
                         [](const FlagValues& v, ServeOptions& o) {
                           o.model.launch.master_addr = v[0];
                           return OkStatus();
                         }));
  flags->push_back(Works("master-port", "PORT", "where node 0 meets the others (default 29501)",
                         SetNodeNumber(&LaunchFlags::master_port, 1, 65535, "master-port")));
  flags->push_back(Works("cluster-secret-file", "FILE",
                         "a secret that all nodes share and no one else knows; or the variable "
                         "FATHOM_CLUSTER_SECRET",
                         [](const FlagValues& v, ServeOptions& o) {
                           o.model.cluster_secret_file = v[0];
                           return OkStatus();
                         }));
  for (const char* name : {"data-parallel-size-local", "data-parallel-start-rank",
                           "data-parallel-address", "data-parallel-rpc-port"}) {
    flags->push_back(Refused(name, FlagKind::kValue, kHowHostsMeet));
  }
  flags->push_back(Refused("headless", FlagKind::kSwitch, kHowHostsMeet));
}

}  // namespace

void AddParallelFlags(std::vector<ServeFlag>* flags) {
  AddLayoutFlags(flags);
  AddNodeFlags(flags);
}

}  // namespace fathom::app
