// A cluster of eight blocks samples one row: each holds an eighth of its logits in shared memory,
// so that they are read once.
#include <cstddef>

#include "kernels/launch.cuh"
#include "kernels/sampling/sampling_cuda.h"
#include "kernels/sampling/sorted_walk.cuh"

namespace fathom::kernels {
namespace {

constexpr double kMinTemperature = 1e-5;  // below it a row is greedy
constexpr double kLogprobFloor = -9999;

struct RowShared {
  WalkShared walk;
  Exchange exchange;
  SampledRow result;
};

constexpr uint32_t kBadLogit = 1, kFiniteLogit = 2, kOtherLeft = 4, kStopLeft = 8;

class RowSampler {
 public:
  __device__ RowSampler(const CudaSamplingParams& p, RowShared& shared, float* logits,
                        int slice_size)
      : p_(p),
        row_(p.rows[blockIdx.x / kRowBlocks]),
        raw_(p.logits + row_.logits_row * p.vocab),
        s_(shared),
        values_(shared.exchange),
        rank_(static_cast<int>(ClusterRank())) {
    const int vocab = static_cast<int>(p.vocab);
    const int begin = min(vocab, rank_ * slice_size);
    slice_ = {logits, begin, min(vocab - begin, slice_size),
              (slice_size + 32 * kRowWarps - 1) / (32 * kRowWarps) * 32};
  }

  __device__ void Run() {
    const Best raw = Load();
    int32_t token = kLogitsNotFinite;
    if ((raw.flags & (kBadLogit | kFiniteLogit)) == kFiniteLogit) {
      if (row_.num_logprobs >= 0) ReportTop(raw);
      token = Choose(raw);
    }
    if (token >= 0 && row_.num_logprobs >= 0) ReportChosen(token);
    WriteResult(token);
    ClusterSync();  // nobody leaves while its shared memory is read
  }

 private:
  __device__ bool is_first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  __device__ Best Load() {
    Best best = Best::None();
    const auto take = [&](int i, float x) {
      best.flags |= x < INFINITY ? 0 : kBadLogit;
      if (x <= best.logit) return;  // a thread's ids ascend
      best.logit = x;
      best.token_id = slice_.first + i;
    };
    if (p_.vocab % 4 == 0) {  // then every part of it is aligned
      const auto* raw = reinterpret_cast<const float4*>(raw_ + slice_.first);
      auto* logits = reinterpret_cast<float4*>(slice_.logits);
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < slice_.size / 4; i += kRowThreads) {
        const float4 x = raw[i];
        logits[i] = x;
        take(4 * i, x.x), take(4 * i + 1, x.y), take(4 * i + 2, x.z), take(4 * i + 3, x.w);
      }
      __syncthreads();  // other threads go on with what this one loaded
    } else {
      slice_.ForEach([&](int i) { take(i, slice_.logits[i] = raw_[slice_.first + i]); });
    }
    if (best.logit > -INFINITY) best.flags |= kFiniteLogit;
    return values_.OverCluster(best, Better());
  }

  __device__ int32_t Choose(Best best) {
    if (row_.mask_row >= 0 || row_.num_edits > 0) {
      if (!Edit()) return kNoTokenLeft;
      best = FindBest();
    }
    if (row_.temperature < kMinTemperature) return best.token_id;
    return Draw(best.logit);
  }

  __device__ Best FindBest() {
    Best best = Best::None();
    slice_.ForEach([&](int i) { best = Better()(best, {slice_.logits[i], slice_.first + i, 0}); });
    return values_.OverCluster(best, Better());
  }

  __device__ bool IsMasked(int token) const {
    if (row_.mask_row < 0) return false;
    const int64_t words = (p_.vocab + 31) / 32;
    return (p_.masks[row_.mask_row * words + token / 32] >> (token % 32) & 1u) == 0;
  }
  __device__ float Biased(const LogitEdit& edit) const {
    const bool out = IsMasked(edit.token_id) || (edit.flags & LogitEdit::kRuledOut) != 0;
    return out ? -INFINITY : raw_[edit.token_id] + edit.bias;
  }
  // Calls take(edit, its place in the slice) for the edits of this block's tokens.
  template <typename Take>
  __device__ void ForEachEdit(const Take& take) const {
    for (int e = static_cast<int>(threadIdx.x); e < row_.num_edits; e += kRowThreads) {
      const LogitEdit edit = p_.edits[row_.first_edit + e];
      const int i = edit.token_id - slice_.first;
      if (i >= 0 && i < slice_.size) take(edit, i);
    }
  }

  // Edits the slice's logits; false when nothing is left in the row.
  __device__ bool Edit() {
    slice_.ForEach([&](int i) {
      if (IsMasked(slice_.first + i)) slice_.logits[i] = -INFINITY;
    });
    __syncthreads();
    Best left = Best::None();
    ForEachEdit([&](const LogitEdit& edit, int i) {
      const float x = Biased(edit);
      const bool stop = (edit.flags & LogitEdit::kStop) != 0;
      if (stop && x > -INFINITY) left.flags |= kStopLeft;
      slice_.logits[i] = stop ? -INFINITY : x;
    });
    __syncthreads();
    slice_.ForEach([&](int i) {
      if (slice_.logits[i] > -INFINITY) left.flags |= kOtherLeft;
    });
    left = values_.OverCluster(left, Better());
    if (left.flags == 0) return false;
    const bool only_stops = left.flags == kStopLeft;
    ForEachEdit([&](const LogitEdit& edit, int i) {
      const bool stop = (edit.flags & LogitEdit::kStop) != 0;
      const float x = stop && only_stops ? Biased(edit) : slice_.logits[i];
      slice_.logits[i] = Penalized(edit, x);
    });
    __syncthreads();
    return true;
  }

  // Products and sums in the reference's order and precision, never fused.
  __device__ float Penalized(const LogitEdit& edit, float x) const {
    if ((edit.flags & LogitEdit::kRepeated) != 0) {
      x = static_cast<float>(x > 0 ? x / row_.repetition_penalty
                                   : __dmul_rn(x, row_.repetition_penalty));
    }
    if (edit.count == 0) return x;
    return x - static_cast<float>(
                   __dadd_rn(__dmul_rn(row_.frequency_penalty, edit.count), row_.presence_penalty));
  }

  __device__ int32_t Draw(float best) {
    const Weights weights(row_, best);
    Mass own{0, 0};
    slice_.ForEach([&](int i) { own = Add()(own, weights.Of(slice_.logits[i])); });
    const Mass all = values_.OverCluster(own, Add());
    const bool cut = row_.top_k > 0 && static_cast<unsigned>(row_.top_k) < all.count;
    if (!cut && row_.top_p >= 1) {
      return TokenAt(Target(all.weight), own,
                     [&](int i) { return weights.Of(slice_.logits[i]).weight; });
    }
    SortedWalk walk(slice_, weights, s_.walk, values_);
    unsigned long long kept = all.weight;
    if (cut) {
      const auto last = static_cast<unsigned long long>(row_.top_k - 1);
      const WalkPlace place = walk.Find(/*by_count=*/true, last);
      kept = place.above.weight + (last - place.above.count + 1) * WeightOf(weights, place);
    }
    if (row_.top_p < 1) {
      const auto wanted =
          static_cast<unsigned long long>(ceil(row_.top_p * static_cast<double>(kept)));
      const unsigned long long target = min(max(wanted, 1ull), kept) - 1;
      const WalkPlace place = walk.Find(/*by_count=*/false, target);
      const unsigned long long each = WeightOf(weights, place);
      kept = place.above.weight + ((target - place.above.weight) / each + 1) * each;
    }
    const unsigned long long target = Target(kept);
    const WalkPlace place = walk.Find(/*by_count=*/false, target);
    // Among equal logits the lowest id comes first.
    const unsigned long long nth = (target - place.above.weight) / WeightOf(weights, place);
    const auto is_there = [&](int i) {
      return OrderedKey(slice_.logits[i]) == place.key ? 1ull : 0ull;
    };
    own = {0, 0};
    slice_.ForEach([&](int i) { own.weight += is_there(i); });
    values_.OverCluster(own, Add());
    return TokenAt(nth, own, is_there);
  }

  __device__ unsigned long long Target(unsigned long long sum) const {
    const auto target = static_cast<unsigned long long>(row_.uniform * static_cast<double>(sum));
    return min(target, sum - 1);
  }
  __device__ static unsigned long long WeightOf(const Weights& weights, const WalkPlace& place) {
    return weights.Of(FromOrderedKey(place.key)).weight;
  }

  // The first token, by id, up to and with which the sum of measure(i) is above `target`, which is
  // less than the sum of all. `own` is this thread's sum, which OverCluster has just added up.
  template <typename Measure>
  __device__ int32_t TokenAt(unsigned long long target, const Mass& own, const Measure& measure) {
    int owner = 0;
    unsigned long long before = 0;
    for (; owner < kRowBlocks - 1; ++owner) {
      const unsigned long long with = before + values_.Of<Mass>(owner).weight;
      if (with > target) break;
      before = with;
    }
    if (rank_ == owner) FindInBlock(target, before, OverWarp(own, Add()).weight, measure);
    ClusterSync();
    const int32_t token = LoadOf(s_.result.token_id, owner);
    ClusterSync();
    return token;
  }

  // `sum`: this warp's.
  template <typename Measure>
  __device__ void FindInBlock(unsigned long long target, unsigned long long before,
                              unsigned long long sum, const Measure& measure) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    Mass* const of_warp = s_.walk.digit;
    if (lane == 0) of_warp[warp].weight = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += of_warp[w].weight;
    if (before > target || before + sum <= target) return;
    for (int base = slice_.warp_begin(); base < slice_.warp_end(); base += 32) {
      const int i = base + lane;
      unsigned long long with = i < slice_.warp_end() ? measure(i) : 0;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, with, offset);
        if (lane >= offset) with += other;
      }
      const uint32_t over = __ballot_sync(0xffffffffu, before + with > target);
      if (over != 0) {
        if (lane == __ffs(static_cast<int>(over)) - 1) s_.result.token_id = slice_.first + i;
        return;
      }
      before += __shfl_sync(0xffffffffu, with, 31);
    }
  }

  __device__ float Logprob(float logit) const {
    return static_cast<float>(max(kLogprobFloor, static_cast<double>(logit) - max_ - log_sum_));
  }

  // The best of the raw logits, which the slice still holds. Into the first block's result.
  __device__ void ReportTop(const Best& raw) {
    max_ = raw.logit;
    Sum own{0};
    slice_.ForEach([&](int i) {
      own.value += ExpNotAbove1(max(-700.0, static_cast<double>(slice_.logits[i]) - max_));
    });
    log_sum_ = log(values_.OverCluster(own, AddSum()).value);
    Best last = raw;
    for (int n = 0; n < row_.num_logprobs && n < p_.vocab; ++n) {
      if (n > 0) last = NextBest(last);
      if (is_first_thread()) s_.result.top[n] = {last.token_id, Logprob(last.logit)};
    }
  }

  __device__ Best NextBest(const Best& last) {
    Best best = Best::None();
    slice_.ForEach([&](int i) {
      const Best b{slice_.logits[i], slice_.first + i, 0};
      const bool after =
          b.logit < last.logit || (b.logit == last.logit && b.token_id > last.token_id);
      if (after) best = Better()(best, b);
    });
    return values_.OverCluster(best, Better());
  }

  __device__ void ReportChosen(int32_t token) {
    const float chosen = raw_[token];
    Mass better{0, 0};
    slice_.ForEach([&](int i) {
      const float x = raw_[slice_.first + i];
      if (x > chosen || (x == chosen && slice_.first + i < token)) ++better.count;
    });
    better = values_.OverCluster(better, Add());
    if (!is_first_thread()) return;
    s_.result.rank = static_cast<int32_t>(better.count) + 1;
    s_.result.logprob = Logprob(chosen);
  }

  __device__ void WriteResult(int32_t token) {
    if (!is_first_thread()) return;
    const int row = static_cast<int>(blockIdx.x) / kRowBlocks;
    p_.token_ids[row] = max(token, 0);
    SampledRow& out = p_.results[row];
    out.token_id = token;
    if (token < 0 || row_.num_logprobs < 0) return;
    out.rank = s_.result.rank;
    out.logprob = s_.result.logprob;
    for (int n = 0; n < row_.num_logprobs; ++n) out.top[n] = s_.result.top[n];
  }

  const CudaSamplingParams& p_;
  const SamplingRow row_;
  const float* const raw_;
  RowShared& s_;
  ClusterValues values_;
  const int rank_;
  RowSlice slice_;
  double max_ = 0, log_sum_ = 0;  // of the raw logits
};

__global__ void __launch_bounds__(kRowThreads, 2)
    SamplingKernel(const __grid_constant__ CudaSamplingParams p, int slice_size) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  WaitForPredecessor();
  AllowSuccessor();
  auto& shared = *reinterpret_cast<RowShared*>(dynamic);
  RowSampler(p, shared, reinterpret_cast<float*>(dynamic + sizeof(RowShared)), slice_size).Run();
}

}  // namespace

static_assert(sizeof(RowShared) % 16 == 0);

int64_t MaxSamplingVocab() {
  // A block's slice is counted in parts of 16 bits.
  return kRowBlocks * (static_cast<int64_t>(kMaxSharedBytes - sizeof(RowShared)) / 4 / 32 * 32);
}

void Launch(const CudaSamplingParams& p, device::Stream& stream) {
  if (p.num_rows == 0) return;
  CHECK_LE(p.vocab, MaxSamplingVocab());
  const auto slice = static_cast<int>((p.vocab + kRowBlocks * 32 - 1) / (kRowBlocks * 32) * 32);
  LaunchClusters(SamplingKernel, static_cast<unsigned>(p.num_rows * kRowBlocks), kRowBlocks,
                 kRowThreads, sizeof(RowShared) + static_cast<size_t>(slice) * sizeof(float),
                 stream, p, slice);
}

}  // namespace fathom::kernels
