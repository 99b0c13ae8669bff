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
    const int64_t hidden = Matrices(0).w1.cols;
    int64_t intermediate = 0;
    for (int g = 0; g < num_groups_; ++g)
      intermediate = std::max(intermediate, Matrices(g).w1.rows);
    CHECK_LE(intermediate, w_.max_intermediate);
    ForEachBlock(pool, intermediate, WeightBlockRows(hidden),
                 [&](int g, int64_t row, int n) { GateUp(g, row, n); });
    if constexpr (kIsOfficial<T>) QuantizeIntermediate(pool);
    ForEachBlock(pool, hidden, WeightBlockRows(intermediate),
                 [&](int g, int64_t row, int n) { Down(g, row, n); });
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
  T* Output(int64_t pair) const { return static_cast<T*>(w_.y) + pair * Matrices(0).w1.cols; }

  int Group(int64_t token, int slot) const {
    if (slot == p_.num_chosen) return num_groups_ - 1;
    return p_.expert_ids[(first_token_ + token) * p_.num_chosen + slot];
  }

  // A counting sort.
  void GroupPairs() {
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

  // Calls body(group, first weight row, number of rows) for all blocks of the experts that have
  // tokens.
  template <typename Body>
  void ForEachBlock(ThreadPool& pool, int64_t rows, int block, const Body& body) {
    const int64_t blocks = (rows + block - 1) / block;
    pool.ParallelFor(num_groups_ * blocks, 1, [&](int64_t task, int64_t) {
      const int group = static_cast<int>(task / blocks);
      const int64_t row = task % blocks * block;
      if (NumPairs(group) > 0) body(group, row, block);
    });
  }

  void GateUp(int group, int64_t row, int block) {
    const ExpertMatrices& m = Matrices(group);
    const int n = static_cast<int>(std::min<int64_t>(block, m.w1.rows - row));
    if (n <= 0) return;
    const int64_t first = w_.first_pair[group];
    const auto x = [&](int64_t i) { return p_.x + w_.pair_token[first + i] * m.w1.cols; };
    MultiplyRows(m.w1, row, n, NumPairs(group), x, [&](int64_t i0, int rows, const float* y) {
      for (int i = 0; i < rows; ++i) {
        T* t = Intermediate(first + i0 + i) + row;
        for (int j = 0; j < n; ++j) t[j] = FromFloat<T>(y[i * kMaxBlockRows + j]);
      }
    });
    MultiplyRows(m.w3, row, n, NumPairs(group), x, [&](int64_t i0, int rows, const float* y) {
      for (int i = 0; i < rows; ++i) {
        const int64_t pair = first + i0 + i;
        T* t = Intermediate(pair) + row;
        for (int j = 0; j < n; ++j) {
          const float up = Round<T>(y[i * kMaxBlockRows + j]);
          t[j] = Activate(ToFloat(t[j]), up, w_.pair_weight[pair]);
        }
      }
    });
  }

  T Activate(float gate, float up, float weight) const {
    const float limit = p_.swiglu_limit;
    if (limit > 0) {
      up = std::clamp(up, -limit, limit);
      gate = std::min(gate, limit);
    }
    const float silu = gate / (1.0f + std::exp(-gate));
    return FromFloat<T>(weight * (silu * up));
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

  void Down(int group, int64_t row, int block) {
    const WeightMatrix& w2 = Matrices(group).w2;
    const int n = static_cast<int>(std::min<int64_t>(block, w2.rows - row));
    const int64_t first = w_.first_pair[group];
    MultiplyRows(
        w2, row, n, NumPairs(group), [&](int64_t i) { return Intermediate(first + i); },
        [&](int64_t i0, int rows, const float* y) {
          for (int i = 0; i < rows; ++i) {
            T* out = Output(first + i0 + i) + row;
            for (int j = 0; j < n; ++j) out[j] = FromFloat<T>(y[i * kMaxBlockRows + j]);
          }
        });
  }

  void Combine(int64_t t) {
    const int64_t hidden = Matrices(0).w1.cols;
    T* y = p_.y + (first_token_ + t) * hidden;
    float sum[64];
    for (int64_t begin = 0; begin < hidden; begin += 64) {
      const int64_t n = std::min<int64_t>(64, hidden - begin);
      std::fill(sum, sum + n, 0.0f);
      for (int s = 0; s < slots_; ++s) {
        const T* out = Output(w_.pair_of[t * slots_ + s]) + begin;
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
