#include "apps/fathom/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::app {
namespace {

using testing::HasSubstr;

std::string ErrorOf(const LaunchFlags& flags, const Environment& environment) {
  const auto launch = ReadLaunch(flags, environment);
  EXPECT_EQ(launch.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(launch.status().message().find('\n'), std::string::npos);
  return launch.status().message();
}

// As torchrun of PyTorch 2.13 sets them for the sixth of eight processes on two hosts.
Environment Torchrun() {
  return {{"RANK", "5"},
          {"WORLD_SIZE", "8"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "4"},
          {"GROUP_RANK", "1"},
          {"GROUP_WORLD_SIZE", "2"},
          {"ROLE_RANK", "5"},
          {"ROLE_WORLD_SIZE", "8"},
          {"MASTER_ADDR", "gpu01"},
          {"MASTER_PORT", "29500"},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

// As srun of Slurm 23 sets them for the second task of `srun --nodes 2 --ntasks-per-node 1`.
Environment Slurm() {
  return {{"SLURM_JOB_ID", "4711"},
          {"SLURM_JOB_NODELIST", "gpu[001-004]"},
          {"SLURM_JOB_NUM_NODES", "4"},
          {"SLURM_LOCALID", "0"},
          {"SLURM_NNODES", "2"},
          {"SLURM_NODEID", "1"},
          {"SLURM_NTASKS", "2"},
          {"SLURM_NTASKS_PER_NODE", "1"},
          {"SLURM_PROCID", "1"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NODELIST", "gpu[003-004]"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_STEP_NUM_TASKS", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
}

// As mpirun of Open MPI 4.1 sets them for the second of two processes on one host.
Environment OpenMpi() {
  return {{"OMPI_COMM_WORLD_RANK", "1"},
          {"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
          {"OMPI_COMM_WORLD_NODE_RANK", "1"},
          {"OMPI_UNIVERSE_SIZE", "2"},
          {"PMIX_RANK", "1"},
          {"PMIX_NAMESPACE", "2210463745"}};
}

TEST(Launch, NothingIsOneNode) {
  const Launch launch = ReadLaunch({}, {{"HOME", "/root"}}).value();
  EXPECT_EQ(launch.num_nodes, 1);
  EXPECT_EQ(launch.node_rank, 0);
  EXPECT_EQ(launch.launcher, "");
}

TEST(Launch, FlagsAloneAreEnough) {
  const LaunchFlags flags{
      .num_nodes = 2, .node_rank = 1, .master_addr = "10.0.0.1", .master_port = 5000};
  const Launch launch = ReadLaunch(flags, {}).value();
  EXPECT_EQ(launch.num_nodes, 2);
  EXPECT_EQ(launch.node_rank, 1);
  EXPECT_EQ(launch.master_addr, "10.0.0.1");
  EXPECT_EQ(launch.master_port, 5000);
}

TEST(Launch, TheDefaultPortIsVllms) {
  const LaunchFlags flags{.num_nodes = 2, .node_rank = 0, .master_addr = "a", .master_port = {}};
  EXPECT_EQ(ReadLaunch(flags, {}).value().master_port, 29501);
}

TEST(Launch, TorchrunsProcessesAreNodesWithOneDeviceEach) {
  const Launch launch = ReadLaunch({}, Torchrun()).value();
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.num_nodes, 8);
  EXPECT_EQ(launch.node_rank, 5);
  EXPECT_EQ(launch.master_addr, "gpu01");
  EXPECT_EQ(launch.local_device, 1);
}

TEST(Launch, ThePortOfTorchrunsOwnStoreIsLeftToIt) {
  Environment environment = Torchrun();
  EXPECT_EQ(ReadLaunch({}, environment).value().master_port, 29501);
  environment["MASTER_PORT"] = "1234";
  EXPECT_EQ(ReadLaunch({}, environment).value().master_port, 1235);
  environment.erase("TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_EQ(ReadLaunch({}, environment).value().master_port, 1234);
}

TEST(Launch, OneTorchrunProcessAHostHasAllItsDevices) {
  Environment environment = Torchrun();
  environment["WORLD_SIZE"] = "2";
  environment["RANK"] = "1";
  environment["LOCAL_WORLD_SIZE"] = "1";
  environment["LOCAL_RANK"] = "0";
  const Launch launch = ReadLaunch({}, environment).value();
  EXPECT_EQ(launch.num_nodes, 2);
  EXPECT_FALSE(launch.local_device.has_value());
}

TEST(Launch, SlurmsFirstHostOfTheStepIsTheMaster) {
  const Launch launch = ReadLaunch({}, Slurm()).value();
  EXPECT_EQ(launch.launcher, "Slurm");
  EXPECT_EQ(launch.num_nodes, 2);
  EXPECT_EQ(launch.node_rank, 1);
  EXPECT_EQ(launch.master_addr, "gpu003");
  EXPECT_FALSE(launch.local_device.has_value());
}

TEST(Launch, SlurmTasksThatShareAHostHaveADeviceEach) {
  Environment environment = Slurm();
  environment["SLURM_NTASKS"] = "8";
  environment["SLURM_PROCID"] = "6";
  environment["SLURM_LOCALID"] = "2";
  const Launch launch = ReadLaunch({}, environment).value();
  EXPECT_EQ(launch.num_nodes, 8);
  EXPECT_EQ(launch.node_rank, 6);
  EXPECT_EQ(launch.local_device, 2);
}

TEST(Launch, ABatchScriptOutsideOfSrunIsOneNode) {
  Environment environment = Slurm();
  environment.erase("SLURM_STEP_NODELIST");
  EXPECT_EQ(ReadLaunch({}, environment).value().num_nodes, 1);
}

TEST(Launch, MasterAddressAndPortOfTheEnvironmentCountForSlurmToo) {
  Environment environment = Slurm();
  environment["MASTER_ADDR"] = "10.1.1.1";
  environment["MASTER_PORT"] = "7000";
  const Launch launch = ReadLaunch({}, environment).value();
  EXPECT_EQ(launch.master_addr, "10.1.1.1");
  EXPECT_EQ(launch.master_port, 7000);
}

TEST(Launch, OpenMpiOnOneHostNeedsNoAddress) {
  const Launch launch = ReadLaunch({}, OpenMpi()).value();
  EXPECT_EQ(launch.launcher, "Open MPI");
  EXPECT_EQ(launch.num_nodes, 2);
  EXPECT_EQ(launch.node_rank, 1);
  EXPECT_EQ(launch.local_device, 1);
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
}

TEST(Launch, OpenMpiOnSeveralHostsNeedsOne) {
  Environment environment = OpenMpi();
  environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  environment["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  EXPECT_THAT(ErrorOf({}, environment), HasSubstr("--master-addr"));
  LaunchFlags flags;
  flags.master_addr = "gpu01";
  EXPECT_EQ(ReadLaunch(flags, environment).value().master_addr, "gpu01");
}

TEST(Launch, MpirunsProcessesGoBeforeTheSlurmStepOfItsDaemons) {
  Environment environment = Slurm();
  environment.merge(OpenMpi());
  EXPECT_EQ(ReadLaunch({}, environment).value().launcher, "Open MPI");
}

TEST(Launch, MpichsHydraIsRead) {
  const Environment environment{{"PMI_RANK", "3"},
                                {"PMI_SIZE", "4"},
                                {"MPI_LOCALRANKID", "1"},
                                {"MPI_LOCALNRANKS", "2"},
                                {"MASTER_ADDR", "gpu01"}};
  const Launch launch = ReadLaunch({}, environment).value();
  EXPECT_EQ(launch.num_nodes, 4);
  EXPECT_EQ(launch.node_rank, 3);
  EXPECT_EQ(launch.local_device, 1);
}

TEST(Launch, PmixSaysTheRankAndFlagsTheRest) {
  LaunchFlags flags;
  flags.num_nodes = 2;
  flags.master_addr = "gpu01";
  EXPECT_EQ(ReadLaunch(flags, {{"PMIX_RANK", "1"}}).value().node_rank, 1);
  EXPECT_EQ(ReadLaunch({}, {{"PMIX_RANK", "1"}}).value().num_nodes, 1);
}

TEST(Launch, LeaderWorkerSetsPodsAreNodes) {
  const Environment environment{{"LWS_LEADER_ADDRESS", "fathom-0.fathom.default"},
                                {"LWS_GROUP_SIZE", "2"},
                                {"LWS_WORKER_INDEX", "1"}};
  const Launch launch = ReadLaunch({}, environment).value();
  EXPECT_EQ(launch.launcher, "LeaderWorkerSet");
  EXPECT_EQ(launch.num_nodes, 2);
  EXPECT_EQ(launch.node_rank, 1);
  EXPECT_EQ(launch.master_addr, "fathom-0.fathom.default");
}

TEST(Launch, AnIndexedJobSaysTheRankAndFlagsTheRest) {
  LaunchFlags flags;
  flags.num_nodes = 4;
  flags.master_addr = "job-0.svc";
  const Environment environment{{"JOB_COMPLETION_INDEX", "3"}};
  EXPECT_EQ(ReadLaunch(flags, environment).value().node_rank, 3);
  EXPECT_EQ(ReadLaunch({}, environment).value().num_nodes, 1);
}

TEST(Launch, FlagsWin) {
  LaunchFlags flags;
  flags.master_addr = "10.0.0.9";
  flags.master_port = 1;
  const Launch launch = ReadLaunch(flags, Torchrun()).value();
  EXPECT_EQ(launch.node_rank, 5);
  EXPECT_EQ(launch.master_addr, "10.0.0.9");
  EXPECT_EQ(launch.master_port, 1);
  flags.num_nodes = 2;
  flags.node_rank = 1;
  EXPECT_EQ(ReadLaunch(flags, Torchrun()).value().launcher, "");
  EXPECT_FALSE(ReadLaunch(flags, Torchrun()).value().local_device.has_value());
}

TEST(Launch, OneNodeIsOneNodeWhateverStartedIt) {
  LaunchFlags flags;
  flags.num_nodes = 1;
  EXPECT_EQ(ReadLaunch(flags, Torchrun()).value().num_nodes, 1);
  EXPECT_EQ(ReadLaunch(flags, Slurm()).value().master_addr, "");
}

TEST(Launch, ContradictionsAreSaid) {
  LaunchFlags flags;
  flags.num_nodes = 2;
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("--nnodes 2 needs --node-rank"));
  EXPECT_THAT(ErrorOf(flags, Torchrun()), HasSubstr("torchrun started 8"));
  flags.node_rank = 2;
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("less than --nnodes"));
  flags.node_rank = 1;
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("--master-addr"));
  flags.num_nodes.reset();
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("less than --nnodes"));
  flags.num_nodes = 0;
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("--nnodes is 0"));
  flags.num_nodes = 2;
  flags.master_port = 65'536;
  EXPECT_THAT(ErrorOf(flags, {}), HasSubstr("--master-port is 65536"));
}

TEST(Launch, NonsenseInAVariableNamesIt) {
  const auto with = [](Environment environment, const char* name, const char* value) {
    environment[name] = value;
    return ErrorOf({}, environment);
  };
  EXPECT_THAT(with(Torchrun(), "RANK", "8"),
              HasSubstr("RANK is '8'; expected a number from 0 to 7"));
  EXPECT_THAT(with(Torchrun(), "WORLD_SIZE", "many"), HasSubstr("WORLD_SIZE is 'many'"));
  EXPECT_THAT(with(Torchrun(), "LOCAL_RANK", "-1"), HasSubstr("LOCAL_RANK"));
  EXPECT_THAT(with(Torchrun(), "MASTER_PORT", "99999"), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(with(Slurm(), "SLURM_PROCID", "2"), HasSubstr("SLURM_PROCID"));
  EXPECT_THAT(with(Slurm(), "SLURM_NTASKS", ""), HasSubstr("SLURM_NTASKS"));
  EXPECT_THAT(with(Slurm(), "SLURM_STEP_NODELIST", "gpu[1"), HasSubstr("SLURM_STEP_NODELIST"));
  EXPECT_THAT(with(OpenMpi(), "OMPI_COMM_WORLD_SIZE", "0"), HasSubstr("OMPI_COMM_WORLD_SIZE"));
}

TEST(FirstHost, IsTheFirstOfSlurmsList) {
  EXPECT_EQ(FirstHost("gpu7").value(), "gpu7");
  EXPECT_EQ(FirstHost("gpu7,gpu8").value(), "gpu7");
  EXPECT_EQ(FirstHost("gpu[003-006,9],cpu1").value(), "gpu003");
  EXPECT_EQ(FirstHost("gpu[9,11-12]-ib").value(), "gpu9-ib");
  EXPECT_EQ(FirstHost("rack[1-2]n[04-05]").value(), "rack1n04");
  for (const char* wrong : {"", ",gpu1", "gpu[1-2", "gpu]1[", "gpu 1", "gpu[[1]]"}) {
    EXPECT_FALSE(FirstHost(wrong).ok()) << wrong;
  }
}

}  // namespace
}  // namespace fathom::app
