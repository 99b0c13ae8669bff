// Where this process stands among the nodes of its group (comm/node_group.h): from flags, or from
// the variables that a launcher set. Pure: the environment is passed in.
//
// Flags win, one by one; --nnodes 1 makes a server of its own whatever started it. Then the first
// of these that is there:
//   torchrun       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   Open MPI       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; it comes before Slurm,
//                  because mpirun's processes also see the step that Slurm started its daemons in
//   Slurm (srun)   SLURM_PROCID, SLURM_NTASKS, SLURM_NNODES, SLURM_LOCALID, SLURM_STEP_NODELIST
//   PMI, MPICH     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
//   PMIx           PMIX_RANK, with --nnodes
//   LeaderWorkerSet  LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX
//   Kubernetes indexed Job  JOB_COMPLETION_INDEX, with --nnodes
// MASTER_ADDR and MASTER_PORT count for each of them. A launcher that starts several processes on a
// host has started one for each device: each is then a node with one rank.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/status.h"

namespace fathom::app {

using Environment = std::map<std::string, std::string>;

// --nnodes, --node-rank, --master-addr, --master-port, where given.
struct LaunchFlags {
  std::optional<int> num_nodes;
  std::optional<int> node_rank;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
};

struct Launch {
  int num_nodes = 1;
  int node_rank = 0;
  std::string master_addr;  // empty with one node
  int master_port = 29501;
  // Set where the launcher started a process for each device: this one's, of the host's.
  std::optional<int> local_device;
  std::string launcher;  // "torchrun"; empty: flags alone, or nothing
};

// kInvalidArgument: what is there is no number, contradicts itself, or does not suffice.
Result<Launch> ReadLaunch(const LaunchFlags& flags, const Environment& environment);

// The first of Slurm's list of hosts: "gpu003" of "gpu[003-006,9],cpu1".
Result<std::string> FirstHost(const std::string& node_list);

}  // namespace fathom::app
