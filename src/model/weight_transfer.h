// WeightTransfer: how weights get from a checkpoint to their places on a GPU. A plan is a list of
// units, small pieces that depend on nothing: some reads of the checkpoint and, where the tensor
// cores want tiles, their repacking on the GPU. Threads read units into pinned memory, ahead of the
// link by so few that they stay in the processor's cache; several go to the GPU in one call. Host
// memory is bounded by those, whatever the checkpoint's size.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "device/device.h"
#include "kernels/gemm/weight_tiles.h"
#include "model/dummy_values.h"

namespace fathom::model {

// What a unit should hold at most (a matrix is not cut below 128 rows). One that is read fits a
// core's own cache twice. With more than two GPUs that are loaded at the same time those on their
// way leave the cache that cores share unless they are half as large. One that is made up is worth
// its launches.
constexpr int64_t ReadUnitBytes(int num_gpus) { return int64_t{num_gpus > 2 ? 512 : 1024} << 10; }
inline constexpr int64_t kDummyUnitBytes = int64_t{2} << 20;

struct WeightUnit {
  struct Read {
    const checkpoint::TensorInfo* tensor = nullptr;
    int64_t offset = 0;  // in the tensor as it stands in memory (ReadTensor)
    int64_t bytes = 0;
    int64_t place = 0;  // in the unit
    DummyKind dummy = DummyKind::kF32;
  };
  std::vector<Read> reads = {};
  int64_t bytes = 0;                 // of the unit
  std::byte* destination = nullptr;  // the bytes go here; null: tiles are made of them
  // The matrix that the unit holds: data at place 0, scales (FP4) after it.
  kernels::WeightMatrix matrix = {};
  int64_t scales_place = 0;
  kernels::TileKind kind = kernels::TileKind::kFp8;
  std::byte* tiles = nullptr;
  int interleave = 1;
};

// Reads all units and waits until they are in place. kBadModel: as LoadWeights; kOutOfMemory,
// kDevice.
Status TransferWeights(const std::vector<WeightUnit>& units, const checkpoint::TensorSource& source,
                       int num_experts, device::Device& device);

// The same with values made on the GPU instead of read.
Status MakeDummyWeights(const std::vector<WeightUnit>& units, int num_experts,
                        device::Device& device);

}  // namespace fathom::model
