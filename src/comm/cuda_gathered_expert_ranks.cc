#include <algorithm>
#include <utility>

#include "comm/cuda_expert_kinds.h"
#include "kernels/collective/expert_pieces_cuda.h"

namespace fathom::comm {
namespace {

constexpr int64_t kPieceBytes = int64_t{16} << 20;  // of all ranks' parts

// At least one.
int64_t PairsOfPiece(const kernels::ExpertExchangeLayout& layout) {
  const int size = layout.data_ranks * layout.tensor_ranks;
  return std::max<int64_t>(1, kPieceBytes / (size * layout.hidden * int64_t{2}));
}

// In the collectives' shared memory: the layout, then a piece.
class GatheredExpertRanks final : public CudaExpertRanks {
 public:
  GatheredExpertRanks(std::shared_ptr<CudaCollectives> all,
                      const kernels::ExpertExchangeLayout& layout, int num_experts)
      : CudaExpertRanks(all->rank(), layout, all->shared_memory()), all_(std::move(all)) {
    own_.rank = rank();
    own_.size = size();
    own_.memory[rank()] = all_->shared_memory();
    for (int r = 0; r <= size(); ++r) experts_.begin[r] = int64_t{num_experts} * r / size();
  }

  bool is_captured() const override { return all_->is_captured(); }

  void Send(kernels::CudaSendTokensParams params, int64_t slots, device::Stream& stream) override {
    params.to = {{own_, 0}, layout(), slots};
    kernels::Launch(params, stream);
    const int64_t blocks = layout().hidden / 128, chosen = layout().num_chosen;
    const kernels::GatheredMatrix tokens[] = {
        OfDataRanks(layout().codes_offset, slots * 128, blocks),
        OfDataRanks(layout().scales_offset, slots * 4, blocks),
        OfDataRanks(layout().ids_offset, slots * chosen * 4, 1),
        OfDataRanks(layout().weights_offset, slots * chosen * 4, 1)};
    Keep(all_->Gather(tokens, stream));
  }
  void Take(kernels::CudaTakeTokensParams params, int64_t slots, device::Stream& stream) override {
    params.from = {{own_, 0}, layout(), slots};
    kernels::Launch(params, stream);
  }
  void Return(kernels::CudaReturnOutputsParams params, int64_t slots,
              device::Stream& stream) override {
    const int64_t of_data_rank = slots * layout().num_chosen;
    const int64_t all = layout().data_ranks * of_data_rank, most = PairsOfPiece(layout());
    kernels::CudaTakePieceParams take{.piece = {},
                                      .num_ranks = size(),
                                      .experts = experts_,
                                      .expert_ids = At<int32_t>(layout().ids_offset),
                                      .first_own = rank() / layout().tensor_ranks * of_data_rank,
                                      .num_own = of_data_rank,
                                      .y = outputs() + layout().shared_rows() * layout().hidden};
    for (int64_t first = 0; first < all; first += most) {
      take.piece = {.first = first,
                    .count = std::min(most, all - first),
                    .hidden = layout().hidden,
                    .parts = At<__nv_bfloat16>(layout().bytes)};
      kernels::Launch(kernels::CudaPutPieceParams{take.piece, rank(), params.pair_of, params.y},
                      stream);
      const kernels::GatheredMatrix parts = OfAllRanks(take.piece);
      Keep(all_->Gather({&parts, 1}, stream));
      kernels::Launch(take, stream);
    }
  }

  void EndStep(device::Stream& stream) override { all_->EndStep(stream); }

  Status Check() const override { return status_.ok() ? all_->Check() : status_; }

 private:
  // Rows of all data ranks' parts, so many bytes each, of which the first tensor rank of each has
  // its own: the others have the same.
  kernels::GatheredMatrix OfDataRanks(int64_t offset, int64_t bytes, int64_t height) const {
    kernels::GatheredMatrix matrix{.data = At<std::byte>(offset),
                                   .pitch = layout().data_ranks * bytes};
    for (int d = 0; d < layout().data_ranks; ++d) {
      matrix.of[d * layout().tensor_ranks] = {d * bytes, bytes, height};
    }
    return matrix;
  }
  kernels::GatheredMatrix OfAllRanks(const kernels::ExpertPiece& piece) const {
    const int64_t bytes = piece.count * piece.hidden * int64_t{sizeof(__nv_bfloat16)};
    kernels::GatheredMatrix matrix{.data = reinterpret_cast<std::byte*>(piece.parts),
                                   .pitch = size() * bytes};
    for (int r = 0; r < size(); ++r) matrix.of[r] = {r * bytes, bytes, 1};
    return matrix;
  }
  void Keep(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  const std::shared_ptr<CudaCollectives> all_;
  kernels::PeerView own_;  // of this rank's memory alone
  kernels::RankParts experts_;
  Status status_;  // the first error of an exchange
};

}  // namespace

CudaGroupOptions ExpertGroupOptions(size_t num_ranks, const CudaExpertOptions& options) {
  const auto layout = ExpertLayout(num_ranks, options);
  const int64_t piece_bytes =
      static_cast<int64_t>(num_ranks) * PairsOfPiece(layout) * layout.hidden * 2;
  // Of a token: 128 of its codes, or its choices.
  const int64_t widest = std::max(128, layout.num_chosen * 4);
  return {.hidden = options.hidden,
          .shared_bytes = layout.bytes + piece_bytes,
          .max_row_bytes = std::max(layout.data_ranks * layout.max_slots * widest, piece_bytes),
          .custom_all_reduce = options.custom_all_reduce,
          .timeout = options.timeout};
}

Result<CudaExpertGroup> MakeGatheredExpertRanks(const CudaGroup& all, std::span<const int> gpus,
                                                const CudaExpertOptions& options) {
  const auto layout = ExpertLayout(all.size(), options);
  CudaExpertGroup ranks;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    RETURN_IF_ERROR(WritePairRows(gpus[rank], layout, all[rank]->shared_memory()));
    ranks.push_back(std::make_shared<GatheredExpertRanks>(all[rank], layout, options.num_experts));
  }
  return ranks;
}

}  // namespace fathom::comm
