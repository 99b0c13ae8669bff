// The experts of a layer: for every token its k routed experts and the shared one.
//   gate = b(w1 x), up = b(w3 x), clamped to L = swiglu_limit; t = b(weight * silu(gate) * up);
//   y = b(sum of b(w2 t) over the chosen experts by ascending id, then the shared expert), the sum
//   in FP32.
// Official numerics: x holds FP8 values (kernels/quantize), t is quantized likewise before w2.
// Tokens are gathered per expert; a result does not depend on which tokens are together.
//
// Ranks that share the experts run the steps of ExpertPiece one by one and complete rows between
// them: each has some experts, or some rows of w1 and w3 (columns of t) and of w2 (columns of the
// outputs). No sum is split, so that the bits do not depend on the number of ranks.
#pragma once

#include <cstdint>
#include <span>

#include "device/device.h"
#include "kernels/activation.h"
#include "kernels/weight_matrix.h"

namespace fathom::kernels {

struct ExpertMatrices {
  WeightMatrix w1, w2, w3;  // gate [I, H], down [H, I], up [I, H]
};

// Scratch for up to max_tokens at once; a longer batch runs in pieces.
struct ExpertWorkspace {
  int64_t max_tokens = 0;
  int64_t max_intermediate = 0;
  void* t = nullptr;              // T [max_tokens * (k + 1), max_intermediate]
  void* y = nullptr;              // T [max_tokens * (k + 1), H]
  int32_t* pair_token = nullptr;  // [max_tokens * (k + 1)]
  int32_t* pair_of = nullptr;     // [max_tokens, k + 1]
  int32_t* first_pair = nullptr;  // [num_experts + 2]
  float* pair_weight = nullptr;   // [max_tokens * (k + 1)]
};

// Where a rank's rows stand in an expert: of w1 and w3 in the intermediate size, of w2 in H.
struct ExpertRows {
  int64_t first_intermediate = 0;
  int64_t first_output = 0;
};

template <typename T>
struct ExpertParams {
  const T* x = nullptr;  // [num_tokens, H]
  int64_t num_tokens = 0;
  int64_t hidden = 0;  // H
  std::span<const ExpertMatrices> experts;
  const ExpertMatrices* shared = nullptr;  // null: none
  ExpertRows routed_rows = {}, shared_rows = {};
  int num_chosen = 0;                   // k
  const int32_t* expert_ids = nullptr;  // [num_tokens, k], ascending
  const float* weights = nullptr;       // [num_tokens, k]
  float swiglu_limit = 0;               // 0: no clamp
  T* y = nullptr;                       // [num_tokens, H]
  ExpertWorkspace workspace;
};

template <typename T>
void Launch(const ExpertParams<T>& params, device::Stream& stream);

// Tokens [first_token, first_token + num_tokens) of a batch, at most workspace.max_tokens and at
// least one. Pairs are (token, expert), sorted by expert, then token; the shared expert counts as
// the last, with every token and weight 1. The steps run in this order; `params` lives that long.
template <typename T>
class ExpertPiece {
 public:
  ExpertPiece(const ExpertParams<T>& params, int64_t first_token, int64_t num_tokens);

  void GateUp(ThreadPool& pool);   // t, quantized: the rank's columns
  void Down(ThreadPool& pool);     // outputs: the rank's columns
  void Combine(ThreadPool& pool);  // y, from whole outputs

  // Pairs of routed expert e: [first_pair(e), first_pair(e + 1)); of the shared one: from
  // num_routed_pairs() on, one a token.
  int64_t first_pair(int64_t expert) const { return w_.first_pair[expert]; }
  int64_t num_routed_pairs() const { return first_pair(static_cast<int64_t>(p_.experts.size())); }
  T* Intermediate(int64_t pair) const { return static_cast<T*>(w_.t) + pair * w_.max_intermediate; }
  T* Output(int64_t pair) const { return static_cast<T*>(w_.y) + pair * p_.hidden; }

 private:
  // Pairs [first, first + size) of one group: a routed expert, or the shared one.
  struct PairBlock {
    int group = 0;
    int64_t first = 0;
    int64_t size = 0;
  };

  const ExpertMatrices& Matrices(int group) const;
  const ExpertRows& Rows(int group) const;
  int64_t NumPairs(int group) const { return w_.first_pair[group + 1] - w_.first_pair[group]; }
  int64_t NumBlocks(int group, int64_t block_rows) const {
    return (NumPairs(group) + block_rows - 1) / block_rows;
  }
  int Group(int64_t token, int slot) const;
  void GroupPairs();
  PairBlock BlockAt(int64_t index, int64_t block_rows) const;
  void ForEachBlock(ThreadPool& pool, int64_t rows, int64_t cols,
                    void (ExpertPiece::*multiply)(const PairBlock&, int64_t, int64_t) const);
  void GateUpBlock(const PairBlock& pairs, int64_t begin, int64_t end) const;
  void Activate(float* gate, float* up, float weight, int n) const;
  void QuantizeIntermediate(ThreadPool& pool) const;
  void DownBlock(const PairBlock& pairs, int64_t begin, int64_t end) const;
  void CombineToken(int64_t t) const;

  const ExpertParams<T>& p_;
  const ExpertWorkspace& w_;
  int64_t first_token_;
  int64_t num_tokens_;
  int num_groups_;
  int slots_;
};

}  // namespace fathom::kernels
