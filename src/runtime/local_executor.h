// LocalExecutor: the ranks of this process, each with a thread of its own. All run the same steps;
// when one fails, the others are woken, so that every step ends on all of them; a GPU that waits
// for one that broke, in a library that knows no end of it, is not waited for. What a step asks of
// the disk is asked when it has ended on all.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/bounded_queue.h"
#include "comm/transport.h"
#include "config/parallel_config.h"
#include "runtime/executor.h"
#include "runtime/model_runner.h"
#include "runtime/rank_disk.h"
#include "runtime/worker.h"

namespace fathom::runtime {

// The rank whose results are the data rank's: of the last stage, tensor rank 0.
inline config::RankPlace ResultPlace(const config::ParallelConfig& parallel, int data_rank) {
  return {.tensor = 0, .data = data_rank, .pipeline = parallel.pipeline_parallel_size - 1};
}

// What a rank does with logits when so many steps are in flight.
Sampling SamplingOf(const config::ParallelConfig& parallel, const config::RankPlace& place,
                    int max_in_flight);

class LocalExecutor final : public Executor {
 public:
  struct Rank {
    config::RankPlace place;
    std::unique_ptr<ModelRunner> runner;
    comm::Transport* transport = nullptr;  // null: the only rank; outlives the executor
  };
  // `max_in_flight`: at most ModelRunner's, and 1 with several stages, whose first one needs tokens
  // that the last one samples. `disk` keeps what the ranks' host slots are written to; null: there
  // is none.
  LocalExecutor(const config::ParallelConfig& parallel, std::vector<Rank> ranks, int max_in_flight,
                std::unique_ptr<RankDisk> disk);

  // Has no errors.
  Status Start(std::span<const request::ScheduledBatch> batches) override;
  // Of data ranks whose results another process has: what the disk here told, nothing else.
  Result<std::vector<request::StepResult>> Wait() override;
  int max_in_flight() const override { return max_in_flight_; }

 private:
  struct Device {
    size_t data_rank = 0;
    bool tells_results = false;
    std::unique_ptr<Worker> worker;
  };
  struct Told {
    size_t device;
    Result<request::StepResult> result;
  };
  const size_t num_data_ranks_;
  const int max_in_flight_;
  BoundedQueue<Told> told_;  // the devices', one each at most
  std::vector<Device> devices_;
  std::deque<std::span<const request::ScheduledBatch>> in_flight_;  // oldest first
  std::unique_ptr<RankDisk> disk_;  // last: its threads use the ranks' host slots
};

}  // namespace fathom::runtime
