// BytePairEncoder: the merges of a byte-level vocabulary. Within a piece the pair of lowest rank is
// merged first, the leftmost of equals, until no pair has a rank. Immutable after Build; any
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fathom::text {

struct Merge {
  int32_t left = 0;
  int32_t right = 0;
  int32_t result = 0;
};

class BytePairEncoder {
 public:
  static constexpr int32_t kMaxId = (1 << 21) - 2;
  static constexpr size_t kMaxMerges = (1 << 22) - 1;

  // `byte_ids`: the token of each single byte. `merges` in rank order; of a pair given twice the
  // later rank counts, as in the `tokenizers` library. `whole_pieces`: pieces that are found in the
  // vocabulary skip the merges, even where those would not build them ("ignore_merges").
  struct Vocabulary {
    std::vector<std::string_view> token_bytes;
    std::array<int32_t, 256> byte_ids;
    std::vector<Merge> merges;
    bool whole_pieces = false;
  };
  explicit BytePairEncoder(const Vocabulary& vocabulary);

  // Appends the ids of one piece. Time O(n log n), memory about 30 bytes a byte of the piece.
  void Encode(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  struct WholePiece {
    const char* data = nullptr;
    uint32_t size = 0;
    int32_t id = -1;
  };
  void AddMerges(const std::vector<Merge>& merges);
  void AddWholePieces(const Vocabulary& vocabulary);
  // The rank of merging two tokens, or kNoRank.
  uint32_t FindRank(int32_t left, int32_t right) const;
  int32_t FindWholePiece(std::string_view piece) const;
  void MergeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergeLong(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergePiece(std::string_view piece, std::vector<int32_t>* ids) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<int32_t> results_;  // by rank
  // Open addressing, at most half full. One word for a pair and its rank, because lookups wait for
  // memory.
  std::vector<uint64_t> pairs_;
  // A bit set for each pair's hash, small enough to stay in a core's cache: most pairs of a text
  // have no merge.
  std::vector<uint64_t> pair_filter_;
  std::vector<WholePiece> whole_pieces_;  // pieces that become one token; likewise
  size_t longest_whole_piece_ = 0;
};

}  // namespace fathom::text
