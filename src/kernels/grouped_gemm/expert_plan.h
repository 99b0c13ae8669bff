// Which rows each expert computes, made on the device by moe_route and read by the expert products.
// A pair is a token at one of its experts; pairs are rows of the intermediate activations:
//   rows [0, padded tokens): the shared expert, row t for token t;
//   then, by groups of 8 rows, the routed experts.
// Up to kDirectTokens: for each eight tokens one group an expert that one of them chose, row t % 8
// of it for token t, whether it was chosen or not (the product is as wide anyway), so that nothing
// is gathered. More, and prefill: an expert's pairs in their order, padded to whole groups, and the
// tokens' activations are gathered; or, of up to kWordTokens tokens of a decode, each tile names
// its tokens, whose activations the experts take from where they are.
#pragma once

#include <cstdint>

#include "config/model_config.h"

namespace fathom::kernels {

// One block's tokens: rows of one expert.
struct alignas(16) ExpertTile {
  int32_t expert;
  int32_t x_group;     // first group of its activations
  int32_t pair_group;  // first group of its pairs
  int32_t num_rows;
};

// Up to here nothing is gathered: of ten tokens the groups of two are 3% more than experts, of
// sixteen 10%.
inline constexpr int kDirectTokens = 12;
inline constexpr int kDirectGroups = (kDirectTokens + 7) / 8;

// Up to here tiles can be told as words (ExpertPlan::as_words).
inline constexpr int kWordTokens = 64;

inline constexpr int kMaxChosen = 16;  // experts of a token
inline constexpr int kMaxExperts = 512;
// Of kWordTokens tokens at most: a tile has eight of an expert's, the last one those that are left.
inline constexpr int kMaxWordTiles = kMaxExperts + kWordTokens * kMaxChosen / 8;

// A tile of up to kDirectTokens tokens, as a word.
struct DirectTile {
  int expert = 0, group = 0;  // of eight tokens
  uint32_t users = 0;         // those of them that chose the expert, a bit each

  constexpr uint32_t word() const {
    return users << 24 | static_cast<uint32_t>(group) << 16 | static_cast<uint32_t>(expert);
  }
  static constexpr DirectTile Of(uint32_t word) {
    return {static_cast<int>(word & 0xffff), static_cast<int>(word >> 16 & 0xff), word >> 24};
  }
};

// Tiles told word by word: each carries the number of the launch that made it, so that the experts
// see it before that launch has ended. Zero at first; another stream's launches need another one.
struct PlanBoard {
  struct alignas(8) Word {
    uint32_t value, launch;
  };
  // Of more than kDirectTokens tokens, in two words that come together. The expert; from bit 9 on
  // one less than how many tokens there are; six bits for each of them, of the first three from bit
  // 12 on, of the others in the second word.
  struct alignas(16) Tile {
    Word first, second;
  };
  uint32_t launch;  // the number to wait for, there before the experts' blocks start
  uint32_t input;   // that number, as soon as the activations are there; ranks' one token awaits it
  Word num_tiles;
  Word tiles[kDirectTokens * kMaxChosen];  // DirectTile
  Tile more_tiles[kMaxWordTiles];
};

struct ExpertPlan {
  // More than kDirectTokens tokens, and prefill; not if as_words.
  int32_t* num_tiles = nullptr;  // [2]: all, and how many of them come before the narrow ones
  ExpertTile* tiles = nullptr;   // [MaxExpertTiles]
  int32_t* pair_of = nullptr;    // [num_tokens, k]: the row of each choice
  float* pair_weight = nullptr;  // [rows]; of no pair: negative. Not read of the shared expert
  // [NumProgress], zero: how far a step of decodes has come (experts_stream_cuda.h).
  int32_t* progress = nullptr;
  PlanBoard* board = nullptr;  // up to kDirectTokens tokens, and if as_words
  // Of more than kDirectTokens tokens, up to kWordTokens of a decode: tiles are told word by word,
  // and nothing is gathered. Routing does so where it RoutesAtOnce.
  bool as_words = false;
  bool is_large = false;    // for experts_large.h, where AreLargeExperts
  bool has_narrow = false;  // of FP4 there: narrow tiles behind the others
};

// Whole stages of columns, which one token's kernel takes.
inline constexpr int kAloneColumns = 512;
constexpr bool AreExpertsAlone(int64_t num_tokens, int64_t hidden, int64_t intermediate) {
  return num_tokens == 1 && hidden % kAloneColumns == 0 && intermediate % kAloneColumns == 0;
}

// From here on, and for prefill, experts_large.h computes a step's experts. It multiplies FP8
// weights by 64 tokens at least, FP4 ones by as many as there are.
inline constexpr int kLargeFp4Tokens = 193, kLargeFp8Tokens = 513;
constexpr bool AreLargeExperts(int64_t num_tokens, bool prefill, config::ExpertDType dtype) {
  return prefill ||
         num_tokens >= (dtype == config::ExpertDType::kFp4 ? kLargeFp4Tokens : kLargeFp8Tokens);
}

// Tokens of a tile, by the number of tokens in the step.
constexpr int ExpertTileRows(int64_t num_tokens) { return num_tokens <= 192 ? 8 : 16; }

// How an expert's tokens are split into tiles: of up to `rows` each, but where has_narrow what is
// left of up to kNarrowTileRows in a narrow one.
inline constexpr int kNarrowTileRows = 64, kWideTileRows = 224;
struct ExpertTileSplit {
  int rows = 0;  // 0: all tiles are narrow
  bool has_narrow = false;

  constexpr int NumWide(int tokens) const {
    const int others = tokens - (has_narrow ? kNarrowTileRows : 0);
    return rows == 0 || others <= 0 ? 0 : (others + rows - 1) / rows;
  }
  constexpr int NumNarrow(int tokens) const {
    const int left = tokens - NumWide(tokens) * rows;
    return !has_narrow || left <= 0 ? 0 : (left + kNarrowTileRows - 1) / kNarrowTileRows;
  }
};
// Of experts_large.h: wide tiles where experts get so many tokens that reading the weights is not
// all the work. Of FP8 there are no others then.
constexpr bool HasWideTiles(bool has_narrow, int64_t num_tokens, int num_experts, int num_chosen) {
  return num_tokens * num_chosen > int64_t{has_narrow ? 16 : 64} * num_experts;
}
constexpr ExpertTileSplit SplitOfTiles(const ExpertPlan& plan, int64_t num_tokens, int num_experts,
                                       int num_chosen) {
  if (!plan.is_large) return {.rows = ExpertTileRows(num_tokens)};
  const bool wide = HasWideTiles(plan.has_narrow, num_tokens, num_experts, num_chosen);
  if (!plan.has_narrow) return {.rows = wide ? kWideTileRows : kNarrowTileRows};
  return {.rows = wide ? kWideTileRows : 0, .has_narrow = true};
}
// Of up to kDirectTokens.
constexpr int MaxDirectTiles(int num_tokens, int num_experts, int num_chosen) {
  const int pairs = num_tokens * num_chosen, groups = (num_tokens + 7) / 8 * num_experts;
  return pairs < groups ? pairs : groups;
}
constexpr int64_t MaxExpertTiles(int64_t num_tokens, int num_experts, int num_chosen) {
  if (num_tokens <= kDirectTokens) {
    return MaxDirectTiles(static_cast<int>(num_tokens), num_experts, num_chosen);
  }
  const int64_t pairs = num_tokens * num_chosen;
  const int64_t experts = pairs < num_experts ? pairs : num_experts;
  return experts + pairs / (num_tokens >= kLargeFp8Tokens ? 64 : ExpertTileRows(num_tokens));
}
// Likewise of the shared expert, which has all tokens; as many tiles as that makes.
constexpr int SharedTileRows(int64_t num_tokens) { return 2 * ExpertTileRows(num_tokens); }
constexpr int NumSharedTiles(int64_t num_shared_tokens, int64_t num_tokens) {
  return static_cast<int>((num_shared_tokens + SharedTileRows(num_tokens) - 1) /
                          SharedTileRows(num_tokens));
}
constexpr int NumSharedTiles(int64_t num_tokens) { return NumSharedTiles(num_tokens, num_tokens); }
// Counters of a step: of items, and for each tile, the shared expert's first.
constexpr int64_t NumProgress(int64_t num_tokens, int num_experts, int num_chosen) {
  return 1 + NumSharedTiles(num_tokens) + MaxExpertTiles(num_tokens, num_experts, num_chosen);
}
// Flags of such a step on ranks (experts_cuda.h, ExpertRank): of each tile and 128 of the columns
// of the intermediate activations, one for each of the two blocks that write them.
inline constexpr int kArrivalsOfBlock = 2;
constexpr int64_t NumArrivals(int64_t num_tokens, int num_experts, int num_chosen,
                              int64_t intermediate) {
  return (NumProgress(num_tokens, num_experts, num_chosen) - 1) * (intermediate / 128) *
         kArrivalsOfBlock;
}
// The intermediate activations of one token go from block to block as packets, values beside the
// launch's number: nobody waits for stores to land, nor for a flag behind them. Of 128 columns: 16
// packets of eight codes, one of their scale. Two launches in turn.
inline constexpr int kPacketsOfBlock = 17;
constexpr int64_t NumPackets(int num_chosen, int64_t intermediate) {
  return int64_t{2} * (1 + num_chosen) * (intermediate / 128) * kPacketsOfBlock;
}
// Of more than kDirectTokens tokens, and prefill: the shared expert's rows, before all others.
constexpr int64_t SharedPairRows(int64_t num_tokens) { return (num_tokens + 63) / 64 * 64; }
// Rows of the intermediate activations for a step of num_tokens, what a tile may overrun included.
constexpr int64_t MaxPairRows(int64_t num_tokens, int num_experts, int num_chosen) {
  const int64_t shared = SharedPairRows(num_tokens);
  if (num_tokens <= kDirectTokens) {
    return shared + MaxExpertTiles(num_tokens, num_experts, num_chosen) * 8 + 64;
  }
  const int64_t pairs = num_tokens * num_chosen;
  const int64_t experts = pairs < num_experts ? pairs : num_experts;
  return shared + (pairs + experts * 7 + 71) / 8 * 8 + 64;
}

}  // namespace fathom::kernels
