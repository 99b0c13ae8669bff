#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm_rows.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/quantize/quantize.h"

namespace fathom::kernels {
template <typename T>
ExpertPiece<T>::ExpertPiece(const ExpertParams<T>& params, int64_t first_token, int64_t num_tokens)
    : p_(params),
      w_(params.workspace),
      first_token_(first_token),
      num_tokens_(num_tokens),
      num_groups_(static_cast<int>(params.experts.size()) + (params.shared != nullptr ? 1 : 0)),
      slots_(params.num_chosen + (params.shared != nullptr ? 1 : 0)) {
  GroupPairs();
}

template <typename T>
void ExpertPiece<T>::GateUp(ThreadPool& pool) {
  int64_t rows = 0;
  for (int g = 0; g < num_groups_; ++g) {
    rows = std::max(rows, Matrices(g).w1.rows);
    CHECK_LE(Rows(g).first_intermediate + Matrices(g).w1.rows, w_.max_intermediate);
  }
  ForEachBlock(pool, rows, p_.hidden, &ExpertPiece::GateUpBlock);
  if constexpr (kIsOfficial<T>) QuantizeIntermediate(pool);
}

template <typename T>
void ExpertPiece<T>::Down(ThreadPool& pool) {
  int64_t rows = 0;
  for (int g = 0; g < num_groups_; ++g) rows = std::max(rows, Matrices(g).w2.rows);
  ForEachBlock(pool, rows, w_.max_intermediate, &ExpertPiece::DownBlock);
}

template <typename T>
void ExpertPiece<T>::Combine(ThreadPool& pool) {
  pool.ParallelFor(num_tokens_, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) CombineToken(t);
  });
}

template <typename T>
const ExpertMatrices& ExpertPiece<T>::Matrices(int group) const {
  const auto g = static_cast<size_t>(group);
  return g < p_.experts.size() ? p_.experts[g] : *p_.shared;
}

template <typename T>
const ExpertRows& ExpertPiece<T>::Rows(int group) const {
  return static_cast<size_t>(group) < p_.experts.size() ? p_.routed_rows : p_.shared_rows;
}

template <typename T>
int ExpertPiece<T>::Group(int64_t token, int slot) const {
  if (slot == p_.num_chosen) return num_groups_ - 1;
  return p_.expert_ids[(first_token_ + token) * p_.num_chosen + slot];
}

// A counting sort.
template <typename T>
void ExpertPiece<T>::GroupPairs() {
  std::fill(w_.first_pair, w_.first_pair + num_groups_ + 1, 0);
  for (int64_t t = 0; t < num_tokens_; ++t) {
    for (int s = 0; s < slots_; ++s) ++w_.first_pair[Group(t, s) + 1];
  }
  for (int g = 0; g < num_groups_; ++g) w_.first_pair[g + 1] += w_.first_pair[g];
  for (int64_t t = 0; t < num_tokens_; ++t) {
    for (int s = 0; s < slots_; ++s) {
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

template <typename T>
typename ExpertPiece<T>::PairBlock ExpertPiece<T>::BlockAt(int64_t index,
                                                           int64_t block_rows) const {
  int group = 0;
  while (index >= NumBlocks(group, block_rows)) index -= NumBlocks(group++, block_rows);
  const int64_t begin = index * block_rows;
  return {group, w_.first_pair[group] + begin, std::min(block_rows, NumPairs(group) - begin)};
}

// Calls (this->*multiply)(block, begin, end) for all blocks of pairs and parts of the weight rows;
// `rows` are the most that a group has here.
template <typename T>
void ExpertPiece<T>::ForEachBlock(ThreadPool& pool, int64_t rows, int64_t cols,
                                  void (ExpertPiece::*multiply)(const PairBlock&, int64_t, int64_t)
                                      const) {
  if (rows == 0) return;
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

template <typename T>
void ExpertPiece<T>::GateUpBlock(const PairBlock& pairs, int64_t begin, int64_t end) const {
  const ExpertMatrices& m = Matrices(pairs.group);
  if (begin >= m.w1.rows) return;
  const int64_t first = Rows(pairs.group).first_intermediate;
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
      NarrowRow(t, Intermediate(pairs.first + i) + first + row, n);
    }
  });
}

// gate = weight * silu(b(gate)) * b(up), not yet rounded.
template <typename T>
void ExpertPiece<T>::Activate(float* gate, float* up, float weight, int n) const {
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

template <typename T>
void ExpertPiece<T>::QuantizeIntermediate(ThreadPool& pool) const {
  pool.ParallelFor(w_.first_pair[num_groups_], 16, [&](int64_t begin, int64_t end) {
    int group = 0;
    for (int64_t pair = begin; pair < end; ++pair) {
      while (pair >= w_.first_pair[group + 1]) ++group;
      const ExpertMatrices& m = Matrices(group);
      if (!m.w2.is_quantized()) continue;
      T* const own = Intermediate(pair) + Rows(group).first_intermediate;
      if constexpr (kIsOfficial<T>) QuantizeRow(own, m.w1.rows, own);
    }
  });
}

template <typename T>
void ExpertPiece<T>::DownBlock(const PairBlock& pairs, int64_t begin, int64_t end) const {
  const WeightMatrix& w2 = Matrices(pairs.group).w2;
  if (begin >= w2.rows) return;
  const int64_t first = Rows(pairs.group).first_output;
  RowBlock block;
  block.Load(pairs.size, w2.cols, [&](int64_t i) { return Intermediate(pairs.first + i); });
  ForEachPanel(begin, std::min(end, w2.rows), w2.cols, [&](int64_t row, int n) {
    alignas(64) float y[RowBlock::kMaxRows * kMaxPanelRows];
    block.Multiply(w2, row, n, y);
    for (int64_t i = 0; i < pairs.size; ++i) {
      NarrowRow(y + i * kMaxPanelRows, Output(pairs.first + i) + first + row, n);
    }
  });
}

template <typename T>
void ExpertPiece<T>::CombineToken(int64_t t) const {
  T* y = p_.y + (first_token_ + t) * p_.hidden;
  float sum[64];
  for (int64_t begin = 0; begin < p_.hidden; begin += 64) {
    const int64_t n = std::min<int64_t>(64, p_.hidden - begin);
    std::fill(sum, sum + n, 0.0f);
    for (int s = 0; s < slots_; ++s) {
      const T* out = Output(w_.pair_of[t * slots_ + s]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + ToFloat(out[i]);
    }
    for (int64_t i = 0; i < n; ++i) y[begin + i] = FromFloat<T>(sum[i]);
  }
}

template <typename T>
void Launch(const ExpertParams<T>& p, device::Stream& stream) {
  ThreadPool& pool = stream.thread_pool();
  for (int64_t first = 0; first < p.num_tokens; first += p.workspace.max_tokens) {
    ExpertPiece<T> piece(p, first, std::min(p.workspace.max_tokens, p.num_tokens - first));
    piece.GateUp(pool);
    piece.Down(pool);
    piece.Combine(pool);
  }
}

template class ExpertPiece<BFloat16>;
template class ExpertPiece<float>;
template void Launch(const ExpertParams<BFloat16>&, device::Stream&);
template void Launch(const ExpertParams<float>&, device::Stream&);

}  // namespace fathom::kernels
