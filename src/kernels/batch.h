// The step as the cache-facing operators see it: which sequence and position each token is, and
// where the sequence's blocks, window pages and state are. Host memory on the CPU; a view, filled
// once a step.
#pragma once

#include <cstdint>
#include <span>

namespace fathom::kernels {

struct BatchView {
  std::span<const int32_t> cu_seqlens_q = {};  // [S + 1]
  std::span<const int32_t> num_computed = {};  // [S]
  std::span<const int32_t> token_seq = {};     // [T], the sequence of each token
  std::span<const int32_t> positions = {};     // [T]
  std::span<const int32_t> block_tables = {};  // [S, max_blocks]
  int max_blocks = 0;
  std::span<const int32_t> window_tables = {};  // [S, max_window_pages]
  int max_window_pages = 0;
  std::span<const int32_t> first_window_page = {};  // [S]
  std::span<const int32_t> state_slots = {};        // [S]

  int num_seqs() const { return static_cast<int>(num_computed.size()); }
  int num_tokens() const { return static_cast<int>(positions.size()); }
  // Tokens of a sequence after this step.
  int32_t end(int seq) const {
    const auto s = static_cast<size_t>(seq);
    return num_computed[s] + cu_seqlens_q[s + 1] - cu_seqlens_q[s];
  }
  // The token row of a position that this step computes.
  int32_t row(int seq, int32_t position) const {
    const auto s = static_cast<size_t>(seq);
    return cu_seqlens_q[s] + position - num_computed[s];
  }
};

}  // namespace fathom::kernels
