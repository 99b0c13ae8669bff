#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm_rows.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/quantize/quantize.h"

namespace fathom::kernels {
namespace {

// A piece of at most workspace.max_tokens tokens. Pairs are (token, expert), sorted by expert, then
// token; the shared expert counts as the last, with every token and weight 1.
template <typename T>
class ExpertPiece {
 public:
  ExpertPiece(const ExpertParams<T>& params, int64_t first_token, int64_t num_tokens)
      : p_(params),
        w_(params.workspace),
        first_token_(first_token),
        num_tokens_(num_tokens),
        num_groups_(static_cast<int>(params.experts.size()) + (params.shared != nullptr ? 1 : 0)),
        slots_(params.num_chosen + (params.shared != nullptr ? 1 : 0)) {}

  void Run(ThreadPool& pool) {
    GroupPairs();
    int64_t intermediate = 0;
    for (int g = 0; g < num_groups_; ++g)
      intermediate = std::max(intermediate, Matrices(g).w1.rows);
    CHECK_LE(intermediate, w_.max_intermediate);
    if (w_.first_pair[num_groups_] > 0) {
      ForEachBlock(pool, intermediate, p_.hidden, &ExpertPiece::GateUp);
      if constexpr (kIsOfficial<T>) QuantizeIntermediate(pool);
      ForEachBlock(pool, p_.hidden, intermediate, &ExpertPiece::Down);
    }
    pool.ParallelFor(num_tokens_, 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) Combine(t);
    });
  }

 private:
  const ExpertMatrices& Matrices(int group) const {
    const auto g = static_cast<size_t>(group);
    return g < p_.experts.size() ? p_.experts[g] : *p_.shared;
  }
  int64_t NumPairs(int group) const { return w_.first_pair[group + 1] - w_.first_pair[group]; }
  T* Intermediate(int64_t pair) const { return static_cast<T*>(w_.t) + pair * w_.max_intermediate; }
  T* Output(int64_t pair) const { return static_cast<T*>(w_.y) + pair * p_.hidden; }

  int Group(int64_t token, int slot) const {
    if (slot == p_.num_chosen) return num_groups_ - 1;
    return p_.expert_ids[(first_token_ + token) * p_.num_chosen + slot];
  }

  bool IsHere(int group) const { return Matrices(group).w1.rows > 0; }

  // A counting sort. What another rank has is no pair.
  void GroupPairs() {
    std::fill(w_.first_pair, w_.first_pair + num_groups_ + 1, 0);
    for (int64_t t = 0; t < num_tokens_; ++t) {
      for (int s = 0; s < slots_; ++s)
        w_.first_pair[Group(t, s) + 1] += IsHere(Group(t, s)) ? 1 : 0;
    }
    for (int g = 0; g < num_groups_; ++g) w_.first_pair[g + 1] += w_.first_pair[g];
    for (int64_t t = 0; t < num_tokens_; ++t) {
      for (int s = 0; s < slots_; ++s) {
        w_.pair_of[t * slots_ + s] = -1;
        if (!IsHere(Group(t, s))) continue;
        const int32_t pair = w_.first_pair[Group(t, s)]++;
        w_.pair_of[t * slots_ + s] = pair;
        w_.pair_token[pair] = static_cast<int32_t>(first_token_ + t);
        w_.pair_weight[pair] =
            s == p_.num_chosen ? 1.0f : p_.weights[(first_token_ + t) * p_.num_chosen + s];
      }
    }
    for (int g = num_groups_; g > 0; --g) w_.first_pair[g] = w_.first_pair[g - 1];
    w_.first_pair[0] = 0;
  }

  // Pairs [first, first + size) of one group.
  struct PairBlock {
    int group = 0;
    int64_t first = 0;
    int64_t size = 0;
  };

  int64_t NumBlocks(int group, int64_t block_rows) const {
    return (NumPairs(group) + block_rows - 1) / block_rows;
  }

  PairBlock BlockAt(int64_t index, int64_t block_rows) const {
    int group = 0;
    while (index >= NumBlocks(group, block_rows)) index -= NumBlocks(group++, block_rows);
    const int64_t begin = index * block_rows;
    return {group, w_.first_pair[group] + begin, std::min(block_rows, NumPairs(group) - begin)};
  }

  // Calls (this->*multiply)(block, begin, end) for all blocks of pairs and parts of the weight
  // rows.
  void ForEachBlock(ThreadPool& pool, int64_t rows, int64_t cols,
                    void (ExpertPiece::*multiply)(const PairBlock&, int64_t, int64_t) const) {
    const int64_t block_rows = RowBlock::MaxRows(cols);
    int64_t num_blocks = 0;
    for (int g = 0; g < num_groups_; ++g) num_blocks += NumBlocks(g, block_rows);
    const int64_t num_pairs = w_.first_pair[num_groups_];
    const int64_t task_rows =
        TaskRows(rows, cols, num_blocks, num_pairs / num_blocks, pool.num_threads());
    const int64_t parts = (rows + task_rows - 1) / task_rows;
    pool.ParallelFor(num_blocks * parts, 1, [&](int64_t task, int64_t) {
      const int64_t begin = task % parts * task_rows;
      (this->*multiply)(BlockAt(task / parts, block_rows), begin, begin + task_rows);
    });
  }

  void GateUp(const PairBlock& pairs, int64_t begin, int64_t end) const {
    const ExpertMatrices& m = Matrices(pairs.group);
    RowBlock block;
    block.Load(pairs.size, m.w1.cols,
               [&](int64_t i) { return p_.x + w_.pair_token[pairs.first + i] * m.w1.cols; });
    ForEachPanel(begin, std::min(end, m.w1.rows), m.w1.cols, [&](int64_t row, int n) {
      alignas(64) float gate[RowBlock::kMaxRows * kMaxPanelRows];
      alignas(64) float up[RowBlock::kMaxRows * kMaxPanelRows];
      block.Multiply(m.w1, row, n, gate);
      block.Multiply(m.w3, row, n, up);
      for (int64_t i = 0; i < pairs.size; ++i) {
        float* t = gate + i * kMaxPanelRows;
        Activate(t, up + i * kMaxPanelRows, w_.pair_weight[pairs.first + i], n);
        NarrowRow(t, Intermediate(pairs.first + i) + row, n);
      }
    });
  }

  // gate = weight * silu(b(gate)) * b(up), not yet rounded.
  void Activate(float* gate, float* up, float weight, int n) const {
    if constexpr (kIsOfficial<T>) {
      Simd().round_to_bf16(gate, gate, n);
      Simd().round_to_bf16(up, up, n);
    }
    const float limit = p_.swiglu_limit;
    float e[kMaxPanelRows];
    for (int j = 0; j < n; ++j) {
      if (limit > 0) {
        up[j] = std::clamp(up[j], -limit, limit);
        gate[j] = std::min(gate[j], limit);
      }
      e[j] = -gate[j];
    }
    Simd().exp(e, e, n);
    for (int j = 0; j < n; ++j) gate[j] = weight * (gate[j] / (1.0f + e[j]) * up[j]);
  }

  void QuantizeIntermediate(ThreadPool& pool) {
    pool.ParallelFor(w_.first_pair[num_groups_], 16, [&](int64_t begin, int64_t end) {
      int group = 0;
      for (int64_t pair = begin; pair < end; ++pair) {
        while (pair >= w_.first_pair[group + 1]) ++group;
        const WeightMatrix& w2 = Matrices(group).w2;
        if (w2.is_quantized()) QuantizeRow(Intermediate(pair), w2.cols, Intermediate(pair));
      }
    });
  }

  void Down(const PairBlock& pairs, int64_t begin, int64_t end) const {
    const WeightMatrix& w2 = Matrices(pairs.group).w2;
    RowBlock block;
    block.Load(pairs.size, w2.cols, [&](int64_t i) { return Intermediate(pairs.first + i); });
    ForEachPanel(begin, std::min(end, w2.rows), w2.cols, [&](int64_t row, int n) {
      alignas(64) float y[RowBlock::kMaxRows * kMaxPanelRows];
      block.Multiply(w2, row, n, y);
      for (int64_t i = 0; i < pairs.size; ++i) {
        NarrowRow(y + i * kMaxPanelRows, Output(pairs.first + i) + row, n);
      }
    });
  }

  void Combine(int64_t t) {
    const int64_t hidden = p_.hidden;
    T* y = p_.y + (first_token_ + t) * hidden;
    float sum[64];
    for (int64_t begin = 0; begin < hidden; begin += 64) {
      const int64_t n = std::min<int64_t>(64, hidden - begin);
      std::fill(sum, sum + n, 0.0f);
      for (int s = 0; s < slots_; ++s) {
        const int32_t pair = w_.pair_of[t * slots_ + s];
        if (pair < 0) continue;
        const T* out = Output(pair) + begin;
        for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + ToFloat(out[i]);
      }
      for (int64_t i = 0; i < n; ++i) y[begin + i] = FromFloat<T>(sum[i]);
    }
  }

  const ExpertParams<T>& p_;
  const ExpertWorkspace& w_;
  int64_t first_token_;
  int64_t num_tokens_;
  int num_groups_;
  int slots_;
};

}  // namespace

template <typename T>
void Launch(const ExpertParams<T>& p, device::Stream& stream) {
  for (int64_t first = 0; first < p.num_tokens; first += p.workspace.max_tokens) {
    const int64_t n = std::min(p.workspace.max_tokens, p.num_tokens - first);
    ExpertPiece<T>(p, first, n).Run(stream.thread_pool());
  }
}

template void Launch(const ExpertParams<BFloat16>&, device::Stream&);
template void Launch(const ExpertParams<float>&, device::Stream&);

}  // namespace fathom::kernels
