// What a launch of the experts' stream computes (ExpertWork, which the host fills), and which items
// of it a block has, one after another: ExpertItems, of warp 16 (expert_stream.cuh).
#pragma once

#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/grouped_gemm/expert_stream.cuh"
#include "kernels/grouped_gemm/experts_cuda.h"
#include "kernels/launch.cuh"

namespace fathom::kernels {

inline constexpr int kSharedExpert = -1;  // as an expert's id

// How the first product's items are dealt out to the clusters: a tile of tokens times 128 columns
// of t. First come the shared expert's, in rounds. An FP8 item takes as long as `weight` FP4 items:
// clusters without one in the last round take that many routed items first; then these, too, go
// round.
struct ExpertDeal {
  int items_of_tile = 0;  // 0: not this launch's product
  int num_shared = 0;     // items
  int num_routed = 0;
  int num_clusters = 0;
  int weight = 0;

  __device__ int NumShared(int cluster) const {
    return (num_shared - cluster + num_clusters - 1) / num_clusters;
  }
  // The clusters that have one shared item more than the others.
  __device__ int busy() const { return num_shared % num_clusters; }

  // From here to busy() they have no routed item, too.
  __device__ int first_apart() const {
    return min(max(num_routed - weight * (num_clusters - busy()), 0), busy());
  }

  // The j-th routed item of a cluster.
  __device__ int Routed(int cluster, int j) const {
    const int idle = num_clusters - busy();
    if (cluster < busy()) return weight * idle + j * num_clusters + cluster;
    if (j < weight) return j * idle + cluster - busy();
    return weight * idle + (j - weight) * num_clusters + cluster;
  }
};

// What a launch computes.
struct ExpertWork {
  bool gate_up = false, down = false;     // which of the products
  bool once = false;                      // most experts have one tile: weights are read once
  int64_t gate_up_rows = 0;               // of w1, and of w3
  int64_t down_rows = 0;                  // of w2
  int first_block = 0;                    // of t, of 128 columns: what gate_up begins with
  int shared_rows = 0, shared_tiles = 0;  // tokens of a tile of the shared expert; tiles
  int max_tiles = 0;                      // of routed experts
  // Up to kDirectTokens tokens, and more if as_words: activations were complete before the launch's
  // predecessor began, or it tells when they are (kStartsEarly), and the plan is told word by word.
  // Else the predecessor gathers, and the plan was complete.
  bool by_words = false;
  bool is_direct = false;  // up to kDirectTokens: tiles have eight tokens in a row
  // Whether routed experts' tokens lie apart.
  __host__ __device__ bool are_apart() const { return by_words && !is_direct; }
  bool by_packets = false;  // t
  ExpertDeal deal;
};

// Blocks of a cluster.
template <bool kSlim>
constexpr int kExpertCluster = kSlim ? 4 : 2;

// The items of a block, as warp 16 asks for them: first its cluster's of the first product, then
// one of the second that is its own, then whatever of the second nobody has taken. Block `rank` of
// a cluster of two has 64 of the 128 columns of t, w1's rows and w3's; of one of four, whose items
// are slim, either w1's or w3's. Of the second product, where blocks go their own ways, an item is
// 128 rows of w2, or 64.
template <typename Stream>
class ExpertItems {
  static constexpr bool kSlim = Stream::kSlim;

 public:
  __device__ ExpertItems(const CudaExpertParams& p, const ExpertWork& work)
      : p_(p),
        work_(work),
        cluster_(static_cast<int>(blockIdx.x) / kExpertCluster<kSlim>),
        rank_(static_cast<int>(blockIdx.x) % kExpertCluster<kSlim>),
        num_shared_(work.deal.NumShared(cluster_)),
        launch_(work.by_words ? PlanLaunch(*p.plan.board) : 0) {}

  __device__ ExpertItem operator()() {
    const int i = next_++;
    if (i < num_shared_) {
      const int item = cluster_ + i * work_.deal.num_clusters;
      return GateUp(item / work_.deal.items_of_tile, item % work_.deal.items_of_tile);
    }
    const int item = work_.deal.num_shared + work_.deal.Routed(cluster_, i - num_shared_);
    if (num_tiles_ < 0) ReadPlan(item / max(work_.deal.items_of_tile, 1));
    if (item < num_tiles_ * work_.deal.items_of_tile) {
      return GateUp(item / work_.deal.items_of_tile, item % work_.deal.items_of_tile);
    }
    if constexpr (kSlim) return NextSlimDown();
    return work_.down ? NextDown() : ExpertItem{};
  }

 private:
  // How many tiles there are, and at once `tile`, should this block have it.
  __device__ void ReadPlan(int tile) {
    const int routed = min(max(tile - work_.shared_tiles, 0), work_.max_tiles - 1);
    if (!work_.by_words) {
      Tile(work_.shared_tiles + routed);
      num_tiles_ = work_.shared_tiles + *p_.plan.num_tiles;
      return;
    }
    PlanBoard::Word count;
    PlanBoard::Tile words;
    do {
      count = LoadWord(&p_.plan.board->num_tiles);
      words = LoadWords(routed);
    } while (count.launch != launch_);
    num_tiles_ = work_.shared_tiles + static_cast<int>(count.value);
    if (AreThere(words)) TileOf(words, work_.shared_tiles + routed);
  }
  // Of a direct plan's tile: its only word, twice.
  __device__ PlanBoard::Tile LoadWords(int routed) const {
    const PlanBoard& board = *p_.plan.board;
    if (!work_.is_direct) return LoadTile(&board.more_tiles[routed]);
    const PlanBoard::Word word = LoadWord(&board.tiles[routed]);
    return {word, word};
  }
  __device__ bool AreThere(const PlanBoard::Tile& words) const {
    return words.first.launch == launch_ && words.second.launch == launch_;
  }
  __device__ const ExpertTile& AwaitTile(int index) {
    PlanBoard::Tile words;
    do words = LoadWords(index - work_.shared_tiles);
    while (!AreThere(words));
    return TileOf(words, index);
  }
  __device__ const ExpertTile& TileOf(const PlanBoard::Tile& words, int index) {
    const auto tokens = static_cast<int>(p_.num_tokens);
    const int routed = index - work_.shared_tiles;
    tile_index_ = index;
    if (work_.is_direct) {
      const DirectTile tile = DirectTile::Of(words.first.value);
      if constexpr (Stream::kPairs) tokens_ = UsersOf(tile);
      return tile_ = {tile.expert, tile.group, (tokens + 7) / 8 + routed,
                      min(8, tokens - tile.group * 8)};
    }
    tokens_ = {words.first.value, words.second.value};
    return tile_ = {tokens_.expert(), 0, static_cast<int>(SharedPairRows(tokens)) / 8 + routed,
                    tokens_.count()};
  }

  // In order of tiles, the shared expert's longer items first; the first ones go to the last
  // blocks, who have least of the first product. A block takes items before it has time for them,
  // so it takes no more than its share and a quarter: few should not be a few blocks'.
  __device__ ExpertItem NextDown() {
    const auto parts = static_cast<int>(work_.down_rows / 128),
               blocks = static_cast<int>(gridDim.x);
    const int weight = work_.deal.weight;
    const int all = (num_tiles_ + (weight - 1) * work_.shared_tiles) * parts;
    const int share = (all + blocks - 1) / blocks, most = share + share / 4;
    if (down_ >= most) return {};
    const int item = down_ == 0 ? blocks - 1 - static_cast<int>(blockIdx.x)
                                : blocks + __shfl_sync(0xffffffffu, taken_, 0);
    if (item >= num_tiles_ * parts) {
      down_ = most;
      return {};
    }
    const int tile = item / parts;
    down_ += tile < work_.shared_tiles ? weight : 1;
    if (down_ < most) TakeNext();  // while this one is fetched
    return Down(tile, item % parts);
  }
  // Slim items are all dealt out beforehand: the shared expert's, whose columns of t are there
  // first, to the blocks that had nothing else in the first product, the routed ones to the others.
  __device__ ExpertItem NextSlimDown() {
    const ExpertDeal& deal = work_.deal;
    const auto parts = static_cast<int>(work_.down_rows / 64), block = static_cast<int>(blockIdx.x);
    const int first = deal.first_apart() * kExpertCluster<kSlim>;
    const int apart = deal.busy() * kExpertCluster<kSlim> - first;
    const int shared = apart > 0 ? work_.shared_tiles * parts : 0, turn = down_++;
    if (block >= first && block < first + apart) {
      const int item = block - first + turn * apart;
      return item < shared ? Down(item / parts, item % parts) : ExpertItem{};
    }
    const int others = static_cast<int>(gridDim.x) - apart;
    const int place = (block < first ? block : block - apart) + turn * others;
    const int item = num_tiles_ * parts - 1 - place;
    return item >= shared ? Down(item / parts, item % parts) : ExpertItem{};
  }
  __device__ void TakeNext() {
    WaitForPredecessor();  // who clears the counter
    taken_ = 0;
    if (threadIdx.x % 32 == 0) taken_ = atomicAdd(p_.plan.progress, 1);
  }

  __device__ const ExpertTile& Tile(int index) {
    if (index == tile_index_) return tile_;
    if (index >= work_.shared_tiles && work_.by_words) return AwaitTile(index);
    tile_index_ = index;
    if (index >= work_.shared_tiles) return tile_ = p_.plan.tiles[index - work_.shared_tiles];
    const int first = index * work_.shared_rows;
    return tile_ = {kSharedExpert, first / 8, first / 8,
                    static_cast<int>(min(int64_t{work_.shared_rows}, p_.shared_tokens() - first))};
  }
  __device__ ExpertItem Make(const ExpertTile& tile, const ExpertTiles& w, const std::byte* tiles,
                             const uint8_t* scales, int64_t rows, int64_t cols, int row_tile,
                             int row_tiles_apart, const Fp8Tiles& x, int x_group) const {
    const int64_t col_blocks = cols / 128, row_tile_bytes = col_blocks * TileMatrixBytes(w.kind);
    const int64_t expert = max(tile.expert, 0);
    return {.kind = w.kind,
            .num_blocks = static_cast<int>(col_blocks),
            .num_tokens = tile.num_rows,
            .weights = tiles + (expert * (rows / 64) + row_tile) * row_tile_bytes,
            .row_tile_bytes = row_tiles_apart * row_tile_bytes,
            .scales = w.kind == TileKind::kFp4
                          ? nullptr
                          : scales + (expert * (rows / 128) + row_tile / 2) * col_blocks,
            .scales_stride = kSlim ? 0 : row_tiles_apart / 2 * col_blocks,
            .x = reinterpret_cast<const std::byte*>(x.codes) + int64_t{x_group} * kTileBytes,
            .x_block_bytes = x.row_groups * kTileBytes,
            .x_scales = x.scales + x_group * 8,
            .x_scales_stride = x.row_groups * 8,
            .pair_group = tile.pair_group,
            .expert = tile.expert};
  }
  __device__ ExpertItem GateUp(int index, int part) {
    const ExpertTile& tile = Tile(index);
    const bool routed = tile.expert != kSharedExpert;
    const ExpertTiles& w = routed ? p_.routed : p_.shared;
    const Fp8Tiles& x = routed && !work_.by_words ? p_.gathered : p_.x;
    ExpertItem item = Make(tile, w, w.gate_up, w.gate_up_scales, 2 * work_.gate_up_rows, p_.hidden,
                           part * 4 + rank_, 2, x, tile.x_group);
    item.part = work_.first_block + part, item.tile = index, item.is_down = false;
    if (routed && work_.are_apart()) item.rows = ItemRows::kApart;
    item.tokens = tokens_;
    SetPair(item);
    return item;
  }
  __device__ ExpertItem Down(int index, int part) {
    const ExpertTile& tile = Tile(index);
    const ExpertTiles& w = tile.expert != kSharedExpert ? p_.routed : p_.shared;
    ExpertItem item = Make(tile, w, w.down, w.down_scales, work_.down_rows, p_.intermediate,
                           kSlim ? part : part * 2, 1, p_.t, tile.pair_group);
    item.part = part, item.tile = index, item.is_down = true;
    SetPair(item);
    return item;
  }
  // Of a direct plan's tile: how many users it has, the first and the last one.
  __device__ static NamedTile UsersOf(const DirectTile& tile) {
    const auto users = static_cast<int>(tile.users);
    NamedTile named;
    named.Begin(tile.expert, __popc(tile.users));
    named.Set(0, __ffs(users) - 1), named.Set(1, 31 - __clz(users));
    return named;
  }
  // If it is one of a tile with few users, the one that was looked at last.
  __device__ void SetPair(ExpertItem& item) const {
    if constexpr (Stream::kPairs) {
      const bool is_pair = item.kind == TileKind::kFp4 && tokens_.count() <= 2 &&
                           item.num_blocks % Stream::kFp4Blocks == 0;
      if (is_pair) item.rows = ItemRows::kPair, item.tokens = tokens_;
    }
  }

  const CudaExpertParams& p_;
  const ExpertWork& work_;
  const int cluster_, rank_, num_shared_;
  const uint32_t launch_;  // of the plan
  int next_ = 0;
  int num_tiles_ = -1;  // not known yet
  int down_ = 0;        // what it has of the second product, in routed items
  int taken_ = 0;       // lane 0: the next of those
  int tile_index_ = -1;
  ExpertTile tile_;   // that one
  NamedTile tokens_;  // likewise, if it names them; kPairs: UsersOf
};

}  // namespace fathom::kernels
