#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/collective/packets.cuh"
#include "kernels/grouped_gemm/expert_plan.cuh"
#include "kernels/grouped_gemm/expert_stream.cuh"
#include "kernels/grouped_gemm/experts_stream_cuda.h"
#include "kernels/grouped_gemm/swiglu.cuh"

namespace fathom::kernels {
namespace {

constexpr int kSharedExpert = -1;   // as an expert's id
constexpr int kSlimColumns = 1024;  // whole stages of one token's slim items
// Of one token, each alone on its multiprocessor (route_direct.cuh). Slim items leave them that: a
// cluster that waited for them would be late, and the next boundary gets ready there meanwhile.
constexpr int kRoutingBlocks = 16;

// How the first product's items are dealt out to the clusters: a tile of tokens times 128 columns
// of t. First come the shared expert's, in rounds. An FP8 item takes as long as `weight` FP4 items:
// clusters without one in the last round take that many routed items first; then these, too, go
// round.
struct Deal {
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
struct Work {
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
  Deal deal;
};

// Blocks of a cluster.
template <bool kSlim>
constexpr int kCluster = kSlim ? 4 : 2;

// The items of a block, as warp 16 asks for them: first its cluster's of the first product, then
// one of the second that is its own, then whatever of the second nobody has taken. Block `rank` of
// a cluster of two has 64 of the 128 columns of t, w1's rows and w3's; of one of four, whose items
// are slim, either w1's or w3's. Of the second product, where blocks go their own ways, an item is
// 128 rows of w2, or 64.
template <bool kSlim>
class ExpertItems {
 public:
  __device__ ExpertItems(const CudaExpertParams& p, const Work& work)
      : p_(p),
        work_(work),
        cluster_(static_cast<int>(blockIdx.x) / kCluster<kSlim>),
        rank_(static_cast<int>(blockIdx.x) % kCluster<kSlim>),
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
      const auto expert = static_cast<int>(words.first.value & 0xffff),
                 group = static_cast<int>(words.first.value >> 16);
      return tile_ = {expert, group, (tokens + 7) / 8 + routed, min(8, tokens - group * 8)};
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
    const Deal& deal = work_.deal;
    const auto parts = static_cast<int>(work_.down_rows / 64), block = static_cast<int>(blockIdx.x);
    const int first = deal.first_apart() * kCluster<kSlim>;
    const int apart = deal.busy() * kCluster<kSlim> - first;
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
    item.is_apart = routed && work_.are_apart(), item.tokens = tokens_;
    return item;
  }
  __device__ ExpertItem Down(int index, int part) {
    const ExpertTile& tile = Tile(index);
    const ExpertTiles& w = tile.expert != kSharedExpert ? p_.routed : p_.shared;
    ExpertItem item = Make(tile, w, w.down, w.down_scales, work_.down_rows, p_.intermediate,
                           kSlim ? part : part * 2, 1, p_.t, tile.pair_group);
    item.part = part, item.tile = index, item.is_down = true;
    return item;
  }

  const CudaExpertParams& p_;
  const Work& work_;
  const int cluster_, rank_, num_shared_;
  const uint32_t launch_;  // of the plan
  int next_ = 0;
  int num_tiles_ = -1;  // not known yet
  int down_ = 0;        // what it has of the second product, in routed items
  int taken_ = 0;       // lane 0: the next of those
  int tile_index_ = -1;
  ExpertTile tile_;   // that one
  NamedTile tokens_;  // likewise, if it names them
};

// What the blocks of a cluster tell each other, for two items in turn. Two: the largest magnitude
// of each token's 64 columns.
template <int kTokens>
struct Largest {
  float of[2][2][kTokens];  // [item][rank][token]
  uint64_t full[2];
};
// Four, whose items are slim: all of their sums.
struct ClusterSums {
  alignas(16) float of[2][4][64];  // [item][rank][row]
  uint64_t full[2];
};

// t of one token, as packets.
class Packets {
 public:
  __device__ Packets(const CudaExpertParams& p, const Work& work, uint64_t number)
      : tags_(Tags(number)),
        num_blocks_(static_cast<int>(p.intermediate / 128)),
        packets_(work.by_packets ? p.t_packets + (number & 1) * (1 + p.num_chosen) * num_blocks_ *
                                                     kPacketsOfBlock
                                 : nullptr) {}

  __device__ bool exist() const { return packets_ != nullptr; }
  __device__ uint2 tags() const { return tags_; }
  __device__ uint4* At(int tile, int block) const {
    return packets_ + (tile * num_blocks_ + block) * kPacketsOfBlock;
  }

 private:
  const uint2 tags_;
  const int num_blocks_;
  uint4* const packets_;
};

// Which columns of a tile of t are complete, told to the warps that fetch them by the two blocks
// that have written 128 columns.
//
// One GPU, or a launch of one product: a counter a tile.
class OwnProgress {
 public:
  __device__ OwnProgress(const CudaExpertParams& p, const Work& work, const ExpertRank& /*rank*/)
      : p_(p), work_(work), packets_(p, work, work.by_packets ? PlanLaunch(*p.plan.board) : 0) {}

  struct AllPatience {
    __device__ bool Wait(int /*rank*/) const { return true; }
  };
  __device__ AllPatience patience() const { return {}; }
  __device__ int OwnerOf(int /*block*/) const { return 0; }
  __device__ const Packets& packets() const { return packets_; }
  __device__ void Send(uint4* to, uint2 words) const { StorePacket(to, words, packets_.tags()); }

  template <typename U>
  __device__ void Store(U* to, U value) const {
    *to = value;
  }
  __device__ bool SendsOutputs() const { return false; }
  __device__ void SendOutputs(int /*group*/, int /*column*/, uint2 /*four*/) const {}
  // By a warp: this block has stored its part of 128 columns of a tile.
  __device__ void Tell(int tile, int /*part*/) const {
    if (threadIdx.x % 32 == 0) ReleaseAdd(Counter(tile), 1);
  }
  // By a warp, before it fetches t for an item of the second product.
  __device__ void Await(const ExpertItem& item) const {
    if (!work_.gate_up) return;  // the predecessor wrote it
    if (threadIdx.x % 32 == 0) {
      while (AcquireLoad(Counter(item.tile)) < work_.deal.items_of_tile * kArrivalsOfBlock) {
      }
    }
    __syncwarp();
    FenceAsyncProxy();  // it was written by stores and is read by copies
  }

 private:
  __device__ int32_t* Counter(int tile) const { return p_.plan.progress + 1 + tile; }

  const CudaExpertParams& p_;
  const Work& work_;
  const Packets packets_;
};

// Ranks: each writes its columns to all of them, then, for every item and block, a flag that only
// grows, the number of the exchange. No rank waits before its own first product is done, so every
// one comes to its end; and every launch waits for each rank, as an exchange does
// (collective/peer_view.h).
class RankProgress {
 public:
  __device__ RankProgress(const CudaExpertParams& p, const Work& work, const ExpertRank& rank)
      : rank_(rank),
        peers_(rank.exchange.peers),
        blocks_(rank.blocks),
        arrived_(rank.arrived),
        num_blocks_(static_cast<int>(p.intermediate / 128)),
        hidden_(p.hidden),
        number_(ExchangeNumber(rank.exchange)),
        packets_(p, work, number_) {}

  __device__ Patience patience() const { return {peers_, peers_.rank}; }
  // Of 128 columns of t.
  __device__ int OwnerOf(int block) const {
    int owner = 0;
    while (block >= blocks_.begin[owner + 1]) ++owner;
    return owner;
  }
  __device__ const Packets& packets() const { return packets_; }
  __device__ void Send(uint4* to, uint2 words) const {
    for (int rank = 0; rank < peers_.size; ++rank) {
      StorePacket(There(to, rank), words, packets_.tags());
    }
  }

  template <typename U>
  __device__ void Store(U* to, U value) const {
    for (int rank = 0; rank < peers_.size; ++rank) *There(to, rank) = value;
  }
  __device__ bool SendsOutputs() const { return rank_.outputs.peers.size > 1; }
  // Four of this rank's columns of the only token's row in a group.
  __device__ void SendOutputs(int group, int column, uint2 four) const {
    const uint64_t number = number_ + (rank_.outputs.index - rank_.exchange.index);
    SendPacketToAll(rank_.outputs.peers, number,
                    RowPacket(group, hidden_, rank_.first_output + column), four);
  }
  __device__ void Tell(int tile, int part) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, half = static_cast<int>(blockIdx.x) % 2;
    if (lane < peers_.size) RaiseFlag(There(Flag(tile, part * 2 + half), lane), number_);
  }
  __device__ void Await(const ExpertItem& item) const {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < num_blocks_ * 2; i += 32) {
      AwaitFlag(peers_, Flag(item.tile, i), number_, OwnerOf(i / 2));
    }
    __syncwarp();
    FenceAsyncProxy();
  }

 private:
  // The same place in the memory of `rank`.
  template <typename U>
  __device__ U* There(U* own, int rank) const {
    const int64_t offset = reinterpret_cast<std::byte*>(own) - peers_.memory[peers_.rank];
    return reinterpret_cast<U*>(peers_.memory[rank] + offset);
  }
  __device__ uint64_t* Flag(int tile, int half_block) const {
    return arrived_ + int64_t{tile} * num_blocks_ * 2 + half_block;
  }

  const ExpertRank& rank_;
  const PeerView& peers_;
  const RankParts& blocks_;
  uint64_t* const arrived_;
  const int num_blocks_;  // of t
  const int64_t hidden_;
  const uint64_t number_;
  const Packets packets_;
};

// Where warp 17 finds the activations of items.
template <typename Progress>
class Activations {
 public:
  __device__ Activations(const Work& work, const Progress& progress)
      : work_(work), progress_(progress) {}

  __device__ const uint4* packets(const ExpertItem& item) const {
    const Packets& packets = progress_.packets();
    return item.is_down && packets.exist() ? packets.At(item.tile, 0) : nullptr;
  }
  __device__ uint2 tags() const { return progress_.packets().tags(); }
  __device__ auto patience() const { return progress_.patience(); }
  __device__ int OwnerOf(int block) const { return progress_.OwnerOf(block); }
  __device__ void Await(const ExpertItem& item) const {
    if (item.is_down || !work_.by_words) WaitForPredecessor();
    if (item.is_down) progress_.Await(item);
  }

 private:
  const Work& work_;
  const Progress& progress_;
};

// What the warp that writes hands over to the one that tells others: two items in turn.
struct Written {
  int tile[2], part[2];
  uint64_t full[2], empty[2];

  template <typename Progress>
  __device__ void TellAll(const Progress& progress) {
    for (int n = 0;; ++n) {
      BarrierWait(&full[n & 1], n / 2 & 1);
      if (tile[n & 1] < 0) return;
      progress.Tell(tile[n & 1], part[n & 1]);
      WarpArrive(&empty[n & 1]);
    }
  }
};

template <typename Stream>
using ToldInCluster = std::conditional_t<Stream::kSlim, ClusterSums, Largest<Stream::kFp8Tokens>>;

// The first product's sums become t = b(weight * silu(gate) * up) of this block's 64 columns, as
// FP8; the second one's rows of y. One warp; rows of no pair are left out.
template <typename Stream, typename Progress>
class ExpertWriter {
 public:
  using Told = ToldInCluster<Stream>;

  __device__ ExpertWriter(const CudaExpertParams& p, const Progress& progress, Told& told,
                          Written& written)
      : p_(p),
        progress_(progress),
        told_to_us_(told),
        written_(written),
        rank_(static_cast<int>(blockIdx.x) % kCluster<Stream::kSlim>) {}

  __device__ void Begin(const ExpertItem& item) {
    const bool exists = lane() < item.num_tokens, weighted = exists && item.expert != kSharedExpert;
    weight_ = weighted ? p_.plan.pair_weight[item.pair_group * 8 + lane()] : 1.0f;
    tokens_ = __ballot_sync(0xffffffffu, exists && !(weight_ < 0));
  }
  __device__ void Finish(const ExpertItem& item, typename Stream::Inbox& inbox) {
    if constexpr (Stream::kSlim) {
      FinishSlim(item, inbox);
    } else {
      item.is_down ? WriteOutputs(item, inbox) : WriteIntermediate(item, inbox);
    }
  }
  // Once, behind the last item.
  __device__ void End() { HandOver(-1, 0); }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void WriteOutputs(const ExpertItem& item, const typename Stream::Inbox& inbox) const {
    const int column = 4 * lane();
    __nv_bfloat16* const y = p_.outputs(item.expert == kSharedExpert);
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const float2 a = Stream::Sum(inbox, token, column), b = Stream::Sum(inbox, token, column + 2);
      const uint2 four{PackBf16(a.x, a.y), PackBf16(b.x, b.y)};
      if (progress_.SendsOutputs()) {
        progress_.SendOutputs(item.pair_group, item.part * 128 + column, four);
        continue;
      }
      const int64_t pair = int64_t{item.pair_group} * 8 + token;
      *reinterpret_cast<uint2*>(y + pair * p_.y_stride + item.part * 128 + column) = four;
    }
  }

  __device__ void WriteIntermediate(const ExpertItem& item, typename Stream::Inbox& inbox) {
    auto& largest = told_to_us_.of[items_ & 1];
    uint64_t* const full = &told_to_us_.full[items_ & 1];
#pragma unroll 2
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const float weight = __shfl_sync(0xffffffffu, weight_, token);
      const float2 gate = Stream::Sum(inbox, token, 2 * lane());
      const float2 up = Stream::Sum(inbox, token, 64 + 2 * lane());
      const float2 v{Intermediate(gate.x, up.x, weight, p_.swiglu_limit),
                     Intermediate(gate.y, up.y, weight, p_.swiglu_limit)};
      *Value(inbox, token) = v;
      const float max = WarpMax(fmaxf(fabsf(v.x), fabsf(v.y)));
      if (lane() < 2) SendToBlock(&largest[rank_][token], max, full, static_cast<uint32_t>(lane()));
    }
    if (lane() == 0) {
      BarrierExpectBytes(full, static_cast<uint32_t>(2 * __popc(tokens_)) * sizeof(float));
    }
    BarrierWaitCluster(full, items_ / 2 & 1);
    const int column = item.part * 128 + rank_ * 64 + 2 * lane();
#pragma unroll 2
    for (uint32_t left = tokens_; left != 0; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const uint32_t scale = Fp8Scale(fmaxf(largest[0][token], largest[1][token]));
      const float inverse = Ue8m0Inverse(scale);
      const float2 v = *Value(inbox, token);
      const uint32_t two = Fp8Codes(v.x * inverse, v.y * inverse);
      if (progress_.packets().exist()) {
        SendPackets(item, two, scale);
        break;
      }
      const int64_t pair = int64_t{item.pair_group} * 8 + token;
      auto* const codes = p_.t.codes + Fp8TileOffset(pair, column, p_.t.row_groups);
      progress_.Store(reinterpret_cast<uint16_t*>(codes), static_cast<uint16_t>(two));
      if (lane() == 0 && rank_ == 0) {
        progress_.Store(p_.t.scales + item.part * p_.t.row_groups * 8 + pair, Ue8m0Value(scale));
      }
    }
    ++items_;
    if (progress_.packets().exist()) return;
    FenceAsyncProxy();
    HandOver(item.tile, item.part);
  }
  // The only token's 64 sums.
  __device__ void FinishSlim(const ExpertItem& item, const typename Stream::Inbox& inbox) {
    const float2 own = Stream::SlimSum(inbox, 2 * lane());
    if (!item.is_down) return ShareSums(item, own);
    const int column = item.part * 64 + 2 * lane();
    const uint32_t two = PackBf16(own.x, own.y);
    if (progress_.SendsOutputs()) {
      const uint32_t more = __shfl_down_sync(0xffffffffu, two, 1);
      if (lane() % 2 == 0) progress_.SendOutputs(item.pair_group, column, {two, more});
      return;
    }
    __nv_bfloat16* const y = p_.outputs(item.expert == kSharedExpert);
    const int64_t pair = int64_t{item.pair_group} * 8;
    *reinterpret_cast<uint32_t*>(y + pair * p_.y_stride + column) = two;
  }
  // To all four blocks, who each make all 128 columns and send 32 of them.
  __device__ void ShareSums(const ExpertItem& item, float2 own) {
    auto& sums = told_to_us_.of[items_ & 1];
    uint64_t* const full = &told_to_us_.full[items_ & 1];
    const float* const place = &sums[rank_][2 * lane()];
    for (uint32_t to = 0; to < 4; ++to) {
      SendToBlock(place, own.x, full, to);
      SendToBlock(place + 1, own.y, full, to);
    }
    if (lane() == 0) BarrierExpectBytes(full, sizeof(sums));
    BarrierWaitCluster(full, items_ / 2 & 1);
    ++items_;
    const float4 gate = reinterpret_cast<const float4*>(sums[0])[lane()];
    const float4 up = reinterpret_cast<const float4*>(sums[2])[lane()];
    const float weight = __shfl_sync(0xffffffffu, weight_, 0), limit = p_.swiglu_limit;
    const float4 v{
        Intermediate(gate.x, up.x, weight, limit), Intermediate(gate.y, up.y, weight, limit),
        Intermediate(gate.z, up.z, weight, limit), Intermediate(gate.w, up.w, weight, limit)};
    const uint32_t scale =
        Fp8Scale(WarpMax(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)))));
    const float inverse = Ue8m0Inverse(scale);
    const uint32_t four = Fp8Codes(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    const uint32_t more = __shfl_down_sync(0xffffffffu, four, 1);
    uint4* const to = progress_.packets().At(item.tile, item.part);
    if (lane() / 8 == rank_ && lane() % 2 == 0) progress_.Send(to + lane() / 2, {four, more});
    if (lane() == 1 && rank_ == 3) {
      progress_.Send(to + kPacketsOfBlock - 1, {__float_as_uint(Ue8m0Value(scale)), 0});
    }
  }
  // The only token's 64 columns, two a lane.
  __device__ void SendPackets(const ExpertItem& item, uint32_t two, uint32_t scale) const {
    const uint32_t four = (two & 0xffff) | __shfl_down_sync(0xffffffffu, two, 1) << 16;
    const uint32_t more = __shfl_down_sync(0xffffffffu, four, 2);
    uint4* const to = progress_.packets().At(item.tile, item.part);
    if (lane() % 4 == 0) progress_.Send(to + rank_ * 8 + lane() / 4, {four, more});
    if (lane() == 1 && rank_ == 0) {
      progress_.Send(to + kPacketsOfBlock - 1, {__float_as_uint(Ue8m0Value(scale)), 0});
    }
  }
  __device__ void HandOver(int tile, int part) {
    const int n = told_ & 1;
    __syncwarp();
    if (lane() != 0) return;
    if (told_ >= 2) BarrierWait(&written_.empty[n], (told_ / 2 - 1) & 1);
    ++told_;
    written_.tile[n] = tile, written_.part[n] = part;
    BarrierArrive(&written_.full[n]);
  }
  // What this thread keeps there of its own sums.
  __device__ static float2* Value(typename Stream::Inbox& inbox, int token) {
    return reinterpret_cast<float2*>(&inbox[0][token][2 * lane()]);
  }

  const CudaExpertParams& p_;
  const Progress& progress_;
  Told& told_to_us_;
  Written& written_;
  const int rank_;
  int items_ = 0;        // of the first product, so far
  int told_ = 0;         // lane 0: of those, handed over
  float weight_ = 1;     // of the token that is this lane's number
  uint32_t tokens_ = 0;  // of an item, a bit each: those that are written
};

// Of one token on ranks the launch starts before its activations are there (route_alone.cuh).
template <typename Stream, typename Progress>
constexpr bool kStartsEarly = Stream::kAlone && std::is_same_v<Progress, RankProgress>;

// Progress: OwnProgress; or RankProgress, of `rank`.
template <typename Stream, typename Progress>
__global__ void __launch_bounds__(Stream::kThreads, 1)
    ExpertStreamKernel(const __grid_constant__ CudaExpertParams p,
                       const __grid_constant__ Work work, const __grid_constant__ ExpertRank rank) {
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ ToldInCluster<Stream> told;
  __shared__ Written written;
  if (threadIdx.x == 0) {
    for (auto& barrier : told.full) BarrierInit(&barrier, 1);
    for (auto& barrier : written.full) BarrierInit(&barrier, 1);
    for (auto& barrier : written.empty) BarrierInit(&barrier, kWarpArrivals);
  }
  Stream stream(*reinterpret_cast<typename Stream::Shared*>(shared));
  stream.Init();
  ClusterArrive();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 16) {
    stream.Multiply();
  } else if (warp == 16) {
    stream.FetchWeights(ExpertItems<Stream::kSlim>(p, work), work.once);
  } else if (warp == 17 || (Stream::kSlim && warp == 19)) {
    const Progress progress(p, work, rank);
    if (warp == 19) {
      WaitForPredecessor();
      AllowSuccessor();
    } else if constexpr (kStartsEarly<Stream, Progress>) {
      AwaitInput(*p.plan.board, PlanLaunch(*p.plan.board));
    }
    stream.FetchActivations(Activations<Progress>(work, progress), warp == 19 ? 1 : 0);
  } else if (warp == 18) {
    const Progress progress(p, work, rank);
    WaitForPredecessor();
    ClusterWait();  // the other block has made its barriers
    ExpertWriter<Stream, Progress> writer(p, progress, told, written);
    stream.Write(writer);
    writer.End();
    return;
  } else if (warp == 20) {
    if constexpr (Stream::kNamesTokens) {
      // Else nothing would wait for this warp, and items be overwritten before it has read them.
      if (work.are_apart()) stream.HandOverLanded();
    }
  } else {
    const Progress progress(p, work, rank);
    WaitForPredecessor();
    AllowSuccessor();
    written.TellAll(progress);
  }
  ClusterWait();
}

template <typename Stream, typename Progress>
int MostClusters() {
  static const int most = MaxClusters(ExpertStreamKernel<Stream, Progress>, kCluster<Stream::kSlim>,
                                      Stream::kThreads, sizeof(typename Stream::Shared));
  return most;
}

// Blocks wait for what others write: all of them must run at once.
template <typename Stream, typename Progress>
void Run(const CudaExpertParams& p, Work work, const ExpertRank& rank, device::Stream& stream) {
  constexpr unsigned kBlocks = kCluster<Stream::kSlim>;
  work.deal.num_clusters = MostClusters<Stream, Progress>();
  if constexpr (Stream::kSlim) {
    work.deal.num_clusters -= kRoutingBlocks / kBlocks;
    work.deal.weight = 1;
  }
  if (work.deal.num_clusters <= 0) return;  // the device is broken
  LaunchClusters(ExpertStreamKernel<Stream, Progress>,
                 static_cast<unsigned>(work.deal.num_clusters) * kBlocks, kBlocks, Stream::kThreads,
                 sizeof(typename Stream::Shared), stream, p, work, rank);
}

// One token: slim items where there is a cluster for each.
template <typename Progress>
void RunAlone(const CudaExpertParams& p, const Work& work, const ExpertRank& rank,
              device::Stream& stream) {
  using Slim = ExpertStream<1, 5, 1>;
  const bool fits = p.hidden % kSlimColumns == 0 && p.intermediate % kSlimColumns == 0;
  const int items = work.deal.items_of_tile * (1 + p.num_chosen);
  if (work.by_packets && fits && items <= MostClusters<Slim, Progress>()) {
    return Run<Slim, Progress>(p, work, rank, stream);
  }
  Run<ExpertStream<1, 5, 2>, Progress>(p, work, rank, stream);
}

template <typename Progress>
void Run(const CudaExpertParams& p, Work work, const ExpertRank& rank, device::Stream& stream) {
  work.once = p.num_tokens <= kWordTokens;
  work.shared_rows = SharedTileRows(p.num_tokens);
  work.shared_tiles = NumSharedTiles(p.shared_tokens(), p.num_tokens);
  work.max_tiles = static_cast<int>(MaxExpertTiles(p.num_tokens, p.num_experts, p.num_chosen));
  work.is_direct = p.num_tokens <= kDirectTokens;
  work.by_words = work.is_direct || p.plan.as_words;
  CHECK(!p.plan.as_words || p.num_tokens <= kWordTokens);
  const bool alone = AreExpertsAlone(p.num_tokens, p.hidden, p.intermediate);
  work.by_packets = alone && work.gate_up && work.down;
  CHECK(!work.by_packets || p.t_packets != nullptr);
  work.deal.items_of_tile = work.gate_up ? static_cast<int>(work.gate_up_rows / 128) : 0;
  work.deal.num_shared = work.shared_tiles * work.deal.items_of_tile;
  work.deal.num_routed = work.max_tiles * work.deal.items_of_tile;
  work.deal.weight = p.routed.kind == TileKind::kFp4 ? 2 : 1;
  if (alone) return RunAlone<Progress>(p, work, rank, stream);
  ExpertTileRows(p.num_tokens) == 8 ? Run<ExpertStream<8, 5, 2>, Progress>(p, work, rank, stream)
                                    : Run<ExpertStream<16, 3, 2>, Progress>(p, work, rank, stream);
}

}  // namespace

void LaunchStream(const CudaExpertParams& p, bool gate_up, bool down, device::Stream& stream) {
  Work work;
  work.gate_up = gate_up, work.down = down;
  work.gate_up_rows = p.intermediate, work.down_rows = p.hidden;
  Run<OwnProgress>(p, work, {}, stream);
}

void LaunchStream(const CudaExpertParams& p, const ExpertRank& rank, device::Stream& stream) {
  const int own = rank.exchange.peers.rank;
  CHECK(rank.outputs.peers.size == 1 || p.num_tokens == 1);
  Work work;
  work.gate_up = work.down = true;
  work.gate_up_rows = rank.blocks.count(own) * 128, work.down_rows = rank.down_rows;
  work.first_block = static_cast<int>(rank.blocks.begin[own]);
  Run<RankProgress>(p, work, rank, stream);
}

}  // namespace fathom::kernels
