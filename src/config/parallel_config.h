// ParallelConfig: how a model is spread over ranks, each of which drives one device. Values; any
// thread. The flags' names are vLLM's.
//
// Ranks are numbered with the tensor rank fastest, then the data rank, then the pipeline stage, so
// that ranks that talk in every layer are neighbours: those of one stage are on as few hosts as
// possible.
//   tensor:   heads, output groups, the shared expert and the head's vocabulary are split; the KV
//             cache is replicated.
//   data:     each data rank has sequences and a KV cache of its own.
//   experts:  the routed experts are split over all tensor x data ranks of a stage: by expert with
//             enable_expert_parallel, else each expert's intermediate size. GPUs that are data
//             ranks have them by expert in any case.
//   pipeline: consecutive layers.
#pragma once

namespace fathom::config {

struct ParallelConfig {
  int tensor_parallel_size = 1;
  int data_parallel_size = 1;
  int pipeline_parallel_size = 1;
  bool enable_expert_parallel = false;

  int stage_size() const { return tensor_parallel_size * data_parallel_size; }
  int world_size() const { return stage_size() * pipeline_parallel_size; }
  // Whether the ranks of a stage on GPUs have whole experts each.
  bool gpus_have_whole_experts() const {
    return stage_size() > 1 && (enable_expert_parallel || data_parallel_size > 1);
  }
};

struct RankPlace {
  int tensor = 0;
  int data = 0;
  int pipeline = 0;
};

inline RankPlace PlaceOf(const ParallelConfig& parallel, int rank) {
  const int tensor = parallel.tensor_parallel_size, data = parallel.data_parallel_size;
  return {rank % tensor, rank / tensor % data, rank / (tensor * data)};
}

inline int RankOf(const ParallelConfig& parallel, const RankPlace& place) {
  return (place.pipeline * parallel.data_parallel_size + place.data) *
             parallel.tensor_parallel_size +
         place.tensor;
}

}  // namespace fathom::config
