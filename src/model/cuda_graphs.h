// CudaGraphs: decode steps that were captured, to be replayed when a step of the same shape comes.
// A step is captured ahead, or when its shape is first seen. So many are kept; then the one that
// was used longest ago makes room. One thread, one stream.
#pragma once

#include <cuda_runtime.h>

#include <compare>
#include <cstdint>
#include <map>

#include "model/cuda_step.h"

namespace fathom::model {

class CudaGraphs {
 public:
  explicit CudaGraphs(size_t capacity) : capacity_(capacity) {}
  ~CudaGraphs();
  CudaGraphs(const CudaGraphs&) = delete;
  CudaGraphs& operator=(const CudaGraphs&) = delete;

  // Enqueues the step; enqueue(step) does so launch by launch.
  template <typename Enqueue>
  void Replay(const CudaStep& step, const Enqueue& enqueue) {
    Launch(step, Capture(step, enqueue));
  }
  // For a Replay to come.
  template <typename Enqueue>
  const auto& Capture(const CudaStep& step, const Enqueue& enqueue) {
    Entry& entry = entries_[KeyOf(step)];
    entry.last_use = ++num_uses_;
    if (entry.graph == nullptr) {
      BeginCapture(step);
      enqueue(step);
      EndCapture(step, entry);
    }
    return entry;
  }
  size_t size() const { return entries_.size(); }

 private:
  // What a captured step depends on besides the contents of its arrays.
  struct Key {
    int num_tokens, max_blocks, max_window_pages;
    bool any_index_scoring;
    const void* sampled;
    const void* logits;
    const void* blocks;
    const void* window_pages;
    const void* state_slots;
    auto operator<=>(const Key&) const = default;
  };
  struct Entry {
    cudaGraphExec_t graph = nullptr;
    uint64_t last_use = 0;
  };
  static Key KeyOf(const CudaStep& step);
  static void BeginCapture(const CudaStep& step);
  void EndCapture(const CudaStep& step, Entry& entry);
  static void Launch(const CudaStep& step, const Entry& entry);
  void MakeRoom(const CudaStep& step);

  const size_t capacity_;
  std::map<Key, Entry> entries_;
  uint64_t num_uses_ = 0;
};

}  // namespace fathom::model
