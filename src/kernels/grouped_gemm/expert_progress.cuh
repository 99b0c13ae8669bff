// How the blocks of the experts' stream tell each other what the first product has made, t, on one
// GPU or on all ranks, and where the second one finds it. Device code only.
#pragma once

#include "kernels/collective/packets.cuh"
#include "kernels/grouped_gemm/expert_items.cuh"
#include "kernels/launch.cuh"

namespace fathom::kernels {

// t of one token, as packets.
class IntermediatePackets {
 public:
  __device__ IntermediatePackets(const CudaExpertParams& p, const ExpertWork& work, uint64_t number)
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
  __device__ OwnProgress(const CudaExpertParams& p, const ExpertWork& work,
                         const ExpertRank& /*rank*/)
      : p_(p), work_(work), packets_(p, work, work.by_packets ? PlanLaunch(*p.plan.board) : 0) {}

  struct AllPatience {
    __device__ bool Wait(int /*rank*/) const { return true; }
  };
  __device__ AllPatience patience() const { return {}; }
  __device__ int OwnerOf(int /*block*/) const { return 0; }
  __device__ const IntermediatePackets& packets() const { return packets_; }
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
  const ExpertWork& work_;
  const IntermediatePackets packets_;
};

// Ranks: each writes its columns to all of them, then, for every item and block, a flag that only
// grows, the number of the exchange. No rank waits before its own first product is done, so every
// one comes to its end; and every launch waits for each rank, as an exchange does
// (collective/peer_view.h).
class RankProgress {
 public:
  __device__ RankProgress(const CudaExpertParams& p, const ExpertWork& work, const ExpertRank& rank)
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
  __device__ const IntermediatePackets& packets() const { return packets_; }
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
  const IntermediatePackets packets_;
};

// Where warp 17 finds the activations of items.
template <typename Progress>
class ItemActivations {
 public:
  __device__ ItemActivations(const ExpertWork& work, const Progress& progress)
      : work_(work), progress_(progress) {}

  __device__ const uint4* packets(const ExpertItem& item) const {
    const IntermediatePackets& packets = progress_.packets();
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
  const ExpertWork& work_;
  const Progress& progress_;
};

}  // namespace fathom::kernels
