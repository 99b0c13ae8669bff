#include "text/bpe.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "base/check.h"

namespace fathom::text {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
// Up to here a scan over all pairs for the lowest rank is cheaper than a heap.
constexpr size_t kMaxShortPiece = 48;
// Positions in a long piece are 32 bits wide.
constexpr size_t kMaxPiece = size_t{1} << 31;

constexpr int kIdBits = 21;
constexpr int kRankBits = 22;
constexpr uint64_t kEmptySlot = ~uint64_t{0};  // of no pair, since ids end below 2^21 - 1
static_assert(BytePairEncoder::kMaxId < (1 << kIdBits) - 1);
static_assert(BytePairEncoder::kMaxMerges < (1 << kRankBits));

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << kIdBits | static_cast<uint64_t>(right);
}

size_t HashKey(uint64_t key) {
  key ^= key >> 32;
  key *= 0x9E3779B97F4A7C15;
  return key ^ key >> 29;
}

// Eight bits a slot of the pair table: about one pair in sixteen passes without being there.
size_t FilterWords(size_t num_slots) { return num_slots * 8 / 64; }
uint64_t FilterBit(size_t hash) { return uint64_t{1} << (hash & 63); }

size_t TableSize(size_t num_entries) {
  return std::bit_ceil(std::max<size_t>(2 * num_entries, 16));
}

}  // namespace

BytePairEncoder::BytePairEncoder(const Vocabulary& vocabulary) : byte_ids_(vocabulary.byte_ids) {
  AddMerges(vocabulary.merges);
  AddWholePieces(vocabulary);
}

void BytePairEncoder::AddMerges(const std::vector<Merge>& merges) {
  CHECK_LE(merges.size(), kMaxMerges);
  results_.reserve(merges.size());
  pairs_.resize(TableSize(merges.size()), kEmptySlot);
  pair_filter_.resize(FilterWords(pairs_.size()));
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    const uint64_t key = PairKey(merge.left, merge.right);
    const size_t hash = HashKey(key);
    pair_filter_[hash >> 6 & (pair_filter_.size() - 1)] |= FilterBit(hash);
    size_t slot = hash & (pairs_.size() - 1);
    while (pairs_[slot] != kEmptySlot && pairs_[slot] >> kRankBits != key) {
      slot = (slot + 1) & (pairs_.size() - 1);
    }
    pairs_[slot] = key << kRankBits | rank;
    results_.push_back(merge.result);
  }
}

void BytePairEncoder::AddWholePieces(const Vocabulary& vocabulary) {
  whole_pieces_.resize(TableSize(vocabulary.token_bytes.size()));
  std::vector<int32_t> ids;
  for (size_t id = 0; id < vocabulary.token_bytes.size(); ++id) {
    const std::string_view bytes = vocabulary.token_bytes[id];
    if (bytes.empty()) continue;
    ids.clear();
    if (!vocabulary.whole_pieces) MergePiece(bytes, &ids);
    const bool merges_to_itself = ids.size() == 1 && ids[0] == static_cast<int32_t>(id);
    if (!vocabulary.whole_pieces && !merges_to_itself) continue;
    size_t slot = XXH3_64bits(bytes.data(), bytes.size()) & (whole_pieces_.size() - 1);
    while (whole_pieces_[slot].id >= 0) slot = (slot + 1) & (whole_pieces_.size() - 1);
    whole_pieces_[slot] = {bytes.data(), static_cast<uint32_t>(bytes.size()),
                           static_cast<int32_t>(id)};
    longest_whole_piece_ = std::max(longest_whole_piece_, bytes.size());
  }
}

uint32_t BytePairEncoder::FindRank(int32_t left, int32_t right) const {
  const uint64_t key = PairKey(left, right);
  const size_t hash = HashKey(key);
  if ((pair_filter_[hash >> 6 & (pair_filter_.size() - 1)] & FilterBit(hash)) == 0) return kNoRank;
  for (size_t slot = hash & (pairs_.size() - 1);; slot = (slot + 1) & (pairs_.size() - 1)) {
    if (pairs_[slot] >> kRankBits == key) return pairs_[slot] & ((1 << kRankBits) - 1);
    if (pairs_[slot] == kEmptySlot) return kNoRank;
  }
}

int32_t BytePairEncoder::FindWholePiece(std::string_view piece) const {
  if (piece.size() > longest_whole_piece_) return -1;
  size_t slot = XXH3_64bits(piece.data(), piece.size()) & (whole_pieces_.size() - 1);
  for (;; slot = (slot + 1) & (whole_pieces_.size() - 1)) {
    const WholePiece& candidate = whole_pieces_[slot];
    if (candidate.id < 0) return -1;
    if (candidate.size == piece.size() &&
        std::memcmp(candidate.data, piece.data(), piece.size()) == 0) {
      return candidate.id;
    }
  }
}

void BytePairEncoder::Encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (piece.size() == 1) return ids->push_back(byte_ids_[static_cast<uint8_t>(piece[0])]);
  const int32_t whole = FindWholePiece(piece);
  if (whole >= 0) return ids->push_back(whole);
  for (; piece.size() > kMaxPiece; piece.remove_prefix(kMaxPiece)) {
    MergePiece(piece.substr(0, kMaxPiece), ids);
  }
  MergePiece(piece, ids);
}

void BytePairEncoder::MergePiece(std::string_view piece, std::vector<int32_t>* ids) const {
  piece.size() <= kMaxShortPiece ? MergeShort(piece, ids) : MergeLong(piece, ids);
}

void BytePairEncoder::MergeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  // ranks[i] is that of merging tokens[i] with tokens[i + 1].
  std::array<int32_t, kMaxShortPiece> tokens;
  std::array<uint32_t, kMaxShortPiece> ranks;
  size_t n = piece.size();
  const auto update = [&](size_t i) {
    ranks[i] = i + 1 < n ? FindRank(tokens[i], tokens[i + 1]) : kNoRank;
  };
  for (size_t i = 0; i < n; ++i) tokens[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i < n; ++i) update(i);
  while (n > 1) {
    const size_t at = std::min_element(ranks.begin(), ranks.begin() + n - 1) - ranks.begin();
    if (ranks[at] == kNoRank) break;
    tokens[at] = results_[ranks[at]];
    std::copy(tokens.begin() + at + 2, tokens.begin() + n, tokens.begin() + at + 1);
    std::copy(ranks.begin() + at + 2, ranks.begin() + n, ranks.begin() + at + 1);
    --n;
    update(at);
    if (at > 0) update(at - 1);
  }
  ids->insert(ids->end(), tokens.begin(), tokens.begin() + n);
}

void BytePairEncoder::MergeLong(std::string_view piece, std::vector<int32_t>* ids) const {
  // A doubly linked list of tokens at the position of their first byte, and a heap of (rank,
  // position). An entry whose pair has changed since is recognised by its rank and dropped.
  constexpr uint32_t kEnd = std::numeric_limits<uint32_t>::max();
  constexpr int32_t kMerged = -1;
  struct Node {
    int32_t token;
    uint32_t previous;
    uint32_t next;
  };
  const uint32_t n = static_cast<uint32_t>(piece.size());
  std::vector<Node> nodes(n);
  for (uint32_t i = 0; i < n; ++i) {
    nodes[i] = {byte_ids_[static_cast<uint8_t>(piece[i])], i == 0 ? kEnd : i - 1,
                i + 1 == n ? kEnd : i + 1};
  }
  const auto rank_at = [&](uint32_t i) {
    const uint32_t next = nodes[i].next;
    return next == kEnd ? kNoRank : FindRank(nodes[i].token, nodes[next].token);
  };

  std::vector<uint64_t> heap;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t rank = rank_at(i);
    if (rank != kNoRank) heap.push_back(uint64_t{rank} << 32 | i);
  }
  const auto later = std::greater<uint64_t>();
  std::make_heap(heap.begin(), heap.end(), later);
  const auto push = [&](uint32_t i) {
    const uint32_t rank = rank_at(i);
    if (rank == kNoRank) return;
    heap.push_back(uint64_t{rank} << 32 | i);
    std::push_heap(heap.begin(), heap.end(), later);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const uint64_t top = heap.back();
    heap.pop_back();
    const uint32_t at = static_cast<uint32_t>(top);
    if (nodes[at].token == kMerged) continue;
    const uint32_t rank = static_cast<uint32_t>(top >> 32);
    if (rank_at(at) != rank) continue;
    const uint32_t right = nodes[at].next;
    nodes[at].token = results_[rank];
    nodes[at].next = nodes[right].next;
    if (nodes[right].next != kEnd) nodes[nodes[right].next].previous = at;
    nodes[right].token = kMerged;
    push(at);
    if (nodes[at].previous != kEnd) push(nodes[at].previous);
  }
  for (uint32_t i = 0; i != kEnd; i = nodes[i].next) ids->push_back(nodes[i].token);
}

}  // namespace fathom::text
