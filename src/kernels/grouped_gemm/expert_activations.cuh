// Brings the activations and FP8 scales of the items of the experts' stream (expert_stream.cuh) to
// its ring: warp 17, of slim items beside warp 19, and warp 20. Device code only.
#pragma once

#include "kernels/collective/packets.cuh"
#include "kernels/grouped_gemm/expert_stream.cuh"
#include "kernels/quantize/quantize.cuh"

namespace fathom::kernels {

// A warp's, behind Stream::Init.
template <typename Stream>
class ExpertActivations {
  using Place = typename Stream::Place;
  static constexpr bool kSlim = Stream::kSlim, kAlone = Stream::kAlone, kPairs = Stream::kPairs;
  static constexpr bool kNamesTokens = Stream::kNamesTokens;
  static constexpr int kN = Stream::kTokens, kFp8Tokens = Stream::kFp8Tokens;
  static constexpr int kFp4Blocks = Stream::kFp4Blocks, kFp8Blocks = Stream::kFp8Blocks;
  static constexpr int kFp8X = Stream::kFp8X, kFp8XBytes = Stream::kFp8XBytes;
  static constexpr int kXArrivals = Stream::kXArrivals;

 public:
  __device__ explicit ExpertActivations(Stream& stream) : stream_(stream), s_(stream.shared()) {}

  // Warp 17. source.Await(item): returns when the item's activations are there; or one token's come
  // as packets, at source.packets(item), null otherwise. Of a slim item's packets two warps take
  // turns, which are 0 and 1; the first one has all else.
  template <typename Source>
  __device__ void Fetch(const Source& source, int turn = 0) {
    Place stage;
    [[maybe_unused]] Place landing;
    [[maybe_unused]] uint32_t spread = 0;  // stages that are zero where no pair's tokens lie
    for (int i = 0;; ++i) {
      const ExpertItem& item = stream_.Take(i);
      if (item.num_blocks == 0) return;
      if constexpr (kAlone) {
        if (const uint4* const packets = source.packets(item)) {
          FetchPackets(item, source, packets, stage, turn);
        } else if (kSlim && turn != 0) {
          stage.Skip(item.num_blocks / Stream::BlocksOf(item.kind));
        } else {
          source.Await(item);
          FetchToken(item, stage);
        }
        continue;
      }
      source.Await(item);
      if constexpr (kPairs) {
        if (item.rows == ItemRows::kPair) {
          FetchPair(item, stage, spread);
          continue;
        }
        spread = 0;
      }
      if constexpr (kNamesTokens) {
        if (item.rows == ItemRows::kApart) {
          FetchApart(item, stage, landing);
          continue;
        }
      }
      FetchTogether(item, stage);
    }
  }

  // Warp 20.
  __device__ void HandOverLanded() {
    Place stage, landing;
    for (int i = 0;; ++i) {
      const ExpertItem& item = stream_.Take(i);
      if (item.num_blocks == 0) return;
      const int full = Stream::BlocksOf(item.kind), stages = (item.num_blocks + full - 1) / full;
      if (item.rows != ItemRows::kApart) {
        stage.Skip(stages);
        continue;
      }
      for (int n = 0; n < stages; ++n, stage.Next(), landing.Next()) {
        BarrierWait(&s_.landed[landing.index], landing.parity);
        FenceSharedForWgmma();
        __syncwarp();
        if (lane() < kXArrivals) BarrierArrive(&s_.full[stage.index]);
      }
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Rows of a tile: bulk copies, lanes 0, 1, … of a column block's activations, from 16 on of their
  // scales.
  __device__ void FetchTogether(const ExpertItem& item, Place& stage) {
    const int full = Stream::BlocksOf(item.kind);
    const int tokens = item.kind == TileKind::kFp4 ? kN : kFp8Tokens;
    const bool is_scale = lane() >= 16;
    const int mine = lane() % 16;
    const int64_t step = is_scale ? item.x_scales_stride * 4 : item.x_block_bytes;
    const std::byte* from =
        (is_scale ? reinterpret_cast<const std::byte*>(item.x_scales) : item.x) + mine * step;
    const int bytes = tokens * (is_scale ? 4 : 128);
    for (int block = 0; block < item.num_blocks; block += full) {
      const int blocks = min(full, item.num_blocks - block);
      if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
      WriteScales(item, block, blocks, stage.index);
      // Each lane speaks for the scale that it wrote itself.
      if (lane() == 0) {
        BarrierExpectBytes(stream_.XFull(stage),
                           static_cast<uint32_t>(blocks * tokens * (128 + 4)));
      } else if (lane() < kXArrivals) {
        BarrierArrive(stream_.XFull(stage));
      }
      __syncwarp();
      if (mine < blocks) {
        std::byte* const to =
            is_scale ? reinterpret_cast<std::byte*>(s_.x_scales[stage.index]) : s_.x[stage.index];
        BulkCopy(to + mine * bytes, from, static_cast<uint32_t>(bytes), stream_.XFull(stage));
        from += full * step;
      }
      stage.Next();
    }
  }

  // Of 16 bytes of one token in a stage of FP4.
  __device__ static int AloneOffset(int block, int unit) {
    return block * 1024 + Fp4AloneOffset(block / (kFp4Blocks / 2), unit);
  }

  // One token's activations, 16 bytes a lane of up to four column blocks, kAhead of these at once.
  __device__ void FetchToken(const ExpertItem& item, Place& stage) {
    constexpr int kAhead = 4;
    const bool fp4 = item.kind == TileKind::kFp4;
    const int full = min(Stream::BlocksOf(item.kind), 4), block = lane() / 8, unit = lane() % 8;
    const int to = fp4 ? AloneOffset(block, unit) : kFp8X + block * kFp8XBytes + unit * 16;
    const int scale_to = lane() * (fp4 ? kN : kFp8Tokens);
#pragma unroll 1
    for (int begin = 0; begin < item.num_blocks; begin += kAhead * full) {
      uint4 x[kAhead];
      float scales[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int first = begin + i * full, blocks = min(full, item.num_blocks - first);
        if (block < blocks) {
          x[i] = *reinterpret_cast<const uint4*>(item.x + (first + block) * item.x_block_bytes +
                                                 unit * 16);
        }
        if (lane() < blocks) scales[i] = item.x_scales[(first + lane()) * item.x_scales_stride];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int first = begin + i * full, blocks = min(full, item.num_blocks - first);
        if (blocks <= 0) break;
        const int place = kSlim && fp4 ? first % kFp4Blocks : 0;
        if (place == 0) {
          if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
          WriteScales(item, first, blocks, stage.index);
        }
        if (block < blocks) {
          *reinterpret_cast<uint4*>(s_.x[stage.index] +
                                    (place == 0 ? to : AloneOffset(place + block, unit))) = x[i];
        }
        if (lane() < blocks) s_.x_scales[stage.index][place + scale_to] = scales[i];
        if (kSlim && fp4 && place == 0) continue;
        FenceSharedForWgmma();
        __syncwarp();
        if (lane() < kXArrivals) BarrierArrive(&s_.x_full[stage.index]);
        stage.Next();
      }
    }
  }

  // Of a pair, as Fp4PairProducts has them: a lane has 16 bytes of each token in a stage, kAhead
  // stages at once. Not by way of the first-level cache, which another item's t may have filled.
  __device__ void FetchPair(const ExpertItem& item, Place& stage, uint32_t& spread) {
    static_assert(kFp4Blocks == 4 && kN == kTileRows);
    constexpr int kAhead = 4;
    const NamedTile tokens = item.tokens;
    const int block = lane() / 8, unit = lane() % 8, count = tokens.count();
    const std::byte* from[2];
    int to[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = tokens[e];
      from[e] = item.x + block * item.x_block_bytes + row * 128 + (unit ^ row) * 16;
      to[e] = block * kTileBytes + Fp4PairOffset(e, unit);
    }
    const int scale_block = lane() / 2 % kFp4Blocks, scale_token = lane() % 2;
    const bool has_scale = lane() < 2 * kFp4Blocks && scale_token < count;
    const float* const scale_from =
        item.x_scales + tokens[scale_token] + scale_block * item.x_scales_stride;
#pragma unroll 1
    for (int begin = 0; begin < item.num_blocks; begin += kAhead * kFp4Blocks) {
      uint4 x[kAhead][2];
      float scales[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int first = begin + i * kFp4Blocks;
        if (first >= item.num_blocks) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (e >= count) break;
          x[i][e] = __ldcg(reinterpret_cast<const uint4*>(from[e] + first * item.x_block_bytes));
        }
        if (has_scale) scales[i] = __ldcg(scale_from + first * item.x_scales_stride);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i * kFp4Blocks >= item.num_blocks) break;
        if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
        std::byte* const place = s_.x[stage.index];
        if ((spread >> stage.index & 1) == 0) {
          for (int j = lane(); j < kFp4Blocks * kTileBytes / 16; j += 32) {
            reinterpret_cast<uint4*>(place)[j] = {};
          }
          spread |= 1u << stage.index;
          __syncwarp();
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (e < count) *reinterpret_cast<uint4*>(place + to[e]) = x[i][e];
        }
        if (has_scale) s_.x_scales[stage.index][scale_block * kN + scale_token] = scales[i];
        FenceSharedForWgmma();
        __syncwarp();
        if (lane() < kXArrivals) BarrierArrive(stream_.XFull(stage));
        stage.Next();
      }
    }
  }

  // Activations of up to eight tokens by 16 bytes: lane l has chunk l % 8 of rows l / 8 and
  // l / 8 + 4, and the scale of row l % 8 in block l / 8.
  __device__ void FetchApart(const ExpertItem& item, Place& stage, Place& landing) {
    static_assert(kFp4Blocks == 4 && kFp8Blocks <= 4 && kTileRows == 8);
    const int full = Stream::BlocksOf(item.kind),
              tokens = item.kind == TileKind::kFp4 ? kN : kFp8Tokens;
    const int chunk = lane() % 8, row = lane() / 8, count = item.num_tokens;
    const int64_t step = item.x_block_bytes;
    const std::byte* from[2];
    uint32_t to[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + 4 * i, token = item.tokens[r];
      from[i] = item.x + (token / 8 * kTileBytes + token % 8 * 128 + (chunk ^ token % 8) * 16);
      to[i] = static_cast<uint32_t>(r * 128 + (chunk ^ r) * 16);
    }
    const float* scale = item.x_scales + item.tokens[chunk] + row * item.x_scales_stride;
#pragma unroll 1
    for (int block = 0; block < item.num_blocks; block += full) {
      const int blocks = min(full, item.num_blocks - block);
      if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
      WriteScales(item, block, blocks, stage.index);
      const uint32_t x = SharedAddress(s_.x[stage.index]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + 4 * i >= count) break;
#pragma unroll
        for (int b = 0; b < kFp4Blocks; ++b) {
          if (b >= blocks) break;
          CopyAhead(x + static_cast<uint32_t>(b * tokens * 128) + to[i], from[i] + b * step);
        }
        from[i] += full * step;
      }
      if (row < blocks && chunk < count) {
        CopyAhead4(SharedAddress(&s_.x_scales[stage.index][row * tokens + chunk]), scale);
      }
      scale += full * item.x_scales_stride;
      BarrierAwaitCopies(&s_.landed[landing.index]);
      BarrierArrive(&s_.landed[landing.index]);
      landing.Next();
      stage.Next();
    }
  }

  // Of one token, kPacketBlocks column blocks at a time: a lane has packet lane % 16 of every
  // second one, lanes 0, 1, … their scales.
  static constexpr int kPacketBlocks = 8;
  using Packets = uint4[kPacketBlocks / 2 + 1];  // the last: a scale

  template <typename Source>
  __device__ void FetchPackets(const ExpertItem& item, const Source& source, const uint4* packets,
                               Place& stage, int turn) {
    const bool fp4 = item.kind == TileKind::kFp4;
    const int full = Stream::BlocksOf(item.kind), scales = fp4 ? kN : kFp8Tokens;
#pragma unroll 1
    for (int begin = 0; begin < item.num_blocks; begin += kPacketBlocks) {
      const int count = min(kPacketBlocks, item.num_blocks - begin);
      if (kSlim && begin / kPacketBlocks % 2 != turn) {
        stage.Skip(count / full);
        continue;
      }
      Packets own;
      ReceivePackets(source, packets, begin, count, own);
#pragma unroll
      for (int i = 0; i < kPacketBlocks; i += 2) {
        if (i >= count) break;
        const int first = i / full * full, blocks = min(full, count - first);
        if (i == first) {
          if (!stage.first_round) BarrierWait(&s_.empty[stage.index], stage.parity ^ 1);
          WriteScales(item, begin + i, blocks, stage.index);
          if (lane() >= first && lane() < first + blocks) {
            const uint4& scale = own[kPacketBlocks / 2];
            s_.x_scales[stage.index][(lane() - first) * scales] = __uint_as_float(scale.x);
          }
        }
        if (i + lane() / 16 < count) {
          const int block = i - first + lane() / 16, piece = lane() % 16;
          const int to = fp4 ? AloneOffset(block, piece / 2) + piece % 2 * 8
                             : kFp8X + block * kFp8XBytes + piece * 8;
          *reinterpret_cast<uint2*>(s_.x[stage.index] + to) = {own[i / 2].x, own[i / 2].z};
        }
        if (i + 2 < first + blocks) continue;
        FenceSharedForWgmma();
        __syncwarp();
        if (lane() < kXArrivals) BarrierArrive(&s_.x_full[stage.index]);
        stage.Next();
      }
    }
  }
  template <typename Source>
  __device__ void ReceivePackets(const Source& source, const uint4* packets, int begin, int count,
                                 Packets& own) const {
    const uint2 tags = source.tags();
    auto patience = source.patience();
    const uint4* const from = packets + begin * kPacketsOfBlock;
    int missing;  // a block
    do {
      missing = -1;
#pragma unroll
      for (int i = 0; i <= kPacketBlocks / 2; ++i) {
        const bool is_scale = i == kPacketBlocks / 2;
        const int block = is_scale ? lane() : 2 * i + lane() / 16;
        const int packet = is_scale ? kPacketsOfBlock - 1 : lane() % 16;
        if (block < count) own[i] = LoadTogether(from + block * kPacketsOfBlock + packet);
      }
#pragma unroll
      for (int i = 0; i <= kPacketBlocks / 2; ++i) {
        const int block = i == kPacketBlocks / 2 ? lane() : 2 * i + lane() / 16;
        if (block < count && !HasTags(own[i], tags)) missing = begin + block;
      }
    } while (missing >= 0 && patience.Wait(source.OwnerOf(missing)));
    __syncwarp();
  }

  // FP8: lane l < 2 * blocks has that of row tile l % 2.
  __device__ void WriteScales(const ExpertItem& item, int block, int blocks, int stage) {
    if (item.scales == nullptr || lane() >= 2 * blocks) return;
    const int i = lane() / 2, t = lane() % 2;
    s_.weight_scales[stage][i][t] = Ue8m0Value(item.scales[t * item.scales_stride + block + i]);
  }

  Stream& stream_;
  typename Stream::Shared& s_;
};

}  // namespace fathom::kernels
