// A random step for tests of the cache-facing CUDA kernels: sequences with their blocks, window
// pages and slots scattered over pools of a real layout, on the host and on the device. Tests only.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/batch_cuda.h"
#include "kernels/cuda_testing.h"
#include "kernels/kv_entry/kv_entry.h"

namespace fathom::kernels {

struct TestSequence {
  int num_computed = 0;
  int num_tokens = 0;
};

// Pools of one layer of each kind (the second of two in window pages), 576 + 8 bytes a KV entry.
struct TestPools {
  static constexpr int64_t kC4Bytes = 64 * 584, kIndexBytes = 64 * 132, kC128Bytes = 1280;
  static constexpr int64_t kBlockBytes = kC4Bytes + kIndexBytes + kC128Bytes;
  static constexpr int64_t kPageBytes = 2 * kC4Bytes;

  static PagedEntries C4(std::byte* blocks) { return {blocks, kBlockBytes, 0, 64, 576, 8}; }
  static PagedEntries Index(std::byte* blocks, config::IndexKeyDType dtype) {
    const int bytes = IndexKeyDataBytes(128, dtype);
    return {blocks, kBlockBytes, kC4Bytes, 64, bytes, 4};
  }
  static PagedEntries C128(std::byte* blocks) {
    return {blocks, kBlockBytes, kC4Bytes + kIndexBytes, 2, 576, 8};
  }
  static PagedEntries Window(std::byte* pages) { return {pages, kPageBytes, kC4Bytes, 64, 576, 8}; }
};

// Sequences keep their blocks and slots over steps; pages, too, from the first that a step reaches.
class TestBatch {
 public:
  // `max_tokens`: no sequence grows longer.
  TestBatch(int num_seqs, int max_tokens, uint32_t seed)
      : num_seqs_(num_seqs), max_blocks_(max_tokens / 256 + 1), max_pages_(max_tokens / 64 + 1) {
    std::mt19937 random(seed);
    block_tables_ = Shuffled(num_seqs * max_blocks_, random);
    all_pages_ = Shuffled(num_seqs * max_pages_, random);
    state_slots_ = Shuffled(num_seqs, random);
  }

  int num_blocks() const { return num_seqs_ * max_blocks_; }
  int num_pages() const { return num_seqs_ * max_pages_; }

  void SetStep(const std::vector<TestSequence>& sequences) {
    cu_ = {0};
    num_computed_.clear(), token_seq_.clear(), positions_.clear(), first_page_.clear();
    window_tables_.assign(all_pages_.size(), -1);
    for (int s = 0; s < num_seqs_; ++s) {
      const TestSequence& q = sequences[static_cast<size_t>(s)];
      num_computed_.push_back(q.num_computed);
      first_page_.push_back(std::max(0, q.num_computed - 127) / 64);
      for (int p = first_page_.back(); p < max_pages_; ++p) {
        const int page = s * max_pages_ + p;
        window_tables_[static_cast<size_t>(page - first_page_.back())] =
            all_pages_[static_cast<size_t>(page)];
      }
      for (int i = 0; i < q.num_tokens; ++i) {
        token_seq_.push_back(s);
        positions_.push_back(q.num_computed + i);
      }
      cu_.push_back(static_cast<int32_t>(positions_.size()));
    }
  }

  BatchView view() const {
    return {.cu_seqlens_q = cu_,
            .num_computed = num_computed_,
            .token_seq = token_seq_,
            .positions = positions_,
            .block_tables = block_tables_,
            .max_blocks = max_blocks_,
            .window_tables = window_tables_,
            .max_window_pages = max_pages_,
            .first_window_page = first_page_,
            .state_slots = state_slots_};
  }

  // `upload` makes a device buffer of a vector; the buffers live in `buffers`. `padding` tokens and
  // as many sequences are added.
  template <typename Upload>
  CudaBatch OnDevice(const Upload& upload, std::vector<device::Buffer>& buffers,
                     int padding = 0) const {
    const auto put = [&](std::vector<int32_t> values, int extra, int32_t fill) {
      values.insert(values.end(), static_cast<size_t>(extra), fill);
      buffers.push_back(upload(values));
      return As<const int32_t>(buffers.back());
    };
    CudaBatch batch;
    batch.cu_seqlens_q = put(cu_, padding, cu_.back());
    batch.num_computed = put(num_computed_, padding, 0);
    batch.token_seq = put(token_seq_, padding, -1);
    batch.positions = put(positions_, padding, 0);
    batch.block_tables = put(block_tables_, padding * max_blocks_, -1);
    batch.window_tables = put(window_tables_, padding * max_pages_, -1);
    batch.first_window_page = put(first_page_, padding, 0);
    batch.state_slots = put(state_slots_, padding, -1);
    batch.max_blocks = max_blocks_;
    batch.max_window_pages = max_pages_;
    batch.num_seqs = num_seqs_ + padding;
    batch.num_tokens = static_cast<int>(positions_.size()) + padding;
    return batch;
  }

  int num_tokens() const { return static_cast<int>(positions_.size()); }

 private:
  static std::vector<int32_t> Shuffled(int n, std::mt19937& random) {
    std::vector<int32_t> values(static_cast<size_t>(n));
    std::iota(values.begin(), values.end(), 0);
    std::shuffle(values.begin(), values.end(), random);
    return values;
  }

  int num_seqs_, max_blocks_, max_pages_;
  std::vector<int32_t> block_tables_, all_pages_, state_slots_;
  std::vector<int32_t> cu_, num_computed_, token_seq_, positions_, window_tables_, first_page_;
};

// Random KV entries in every slot of one layer.
inline void FillEntries(const PagedEntries& entries, int num_pages, uint32_t seed,
                        float scale = 1) {
  std::mt19937 random(seed);
  std::vector<float> values(512);
  const auto noise = RandomFloats(1 << 16, seed);
  for (int page = 0; page < num_pages; ++page) {
    for (int e = 0; e < entries.entries_per_page; ++e) {
      const size_t start = random() % (noise.size() - 512);
      for (size_t i = 0; i < 512; ++i) values[i] = RoundToBFloat16(scale * noise[start + i]);
      StoreKvEntry<BFloat16>(values.data(), 512, 64, entries.At(page, e));
    }
  }
}

}  // namespace fathom::kernels
