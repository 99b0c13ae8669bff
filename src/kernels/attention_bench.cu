// Time of the attention kernels at the real shapes of V4 Flash and Pro, one layer of each kind, and
// their share of what the memory (4.55 TB/s) or the tensor cores (785 TFLOP/s BF16, 1,320 FP8)
// could do, whichever bounds them. Launches are timed in a graph of 16 layers, so that caches do
// not hold the keys. `attention_bench [decode|few|prefill|ranks|long]`; all otherwise.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/attention_prologue/attention_prologue_cuda.h"
#include "kernels/cuda_bench.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/rope/rope_cuda.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"

namespace fathom::kernels {
namespace {

constexpr int kLayers = 16;
constexpr double kBf16PerUs = 785e6, kFp8PerUs = 1320e6;

// Every byte of a word below 0x40: an FP8 number under 2, a BF16 number under 2, scales 2^-63 and
// more when read as ue8m0, all harmless.
constexpr uint32_t kHarmless = 0x3f3f3f3f;

class Bench : public CudaBench {
 public:
  std::byte* Memory(int64_t bytes, uint32_t mask = kHarmless) {
    auto* const words = Allocate<uint32_t>((bytes + 3) / 4);
    Fill(words, bytes / 4, 12345, MaskedWord{mask});
    return reinterpret_cast<std::byte*>(words);
  }
  template <typename T>
  T* Array(int64_t count, uint32_t mask = kHarmless) {
    return reinterpret_cast<T*>(Memory(count * static_cast<int64_t>(sizeof(T)), mask));
  }
  // FP4 keys whose scales are 2^-15 to 1, so that scores differ as real ones do.
  void FillKeys(std::byte* blocks, int64_t num_blocks, int64_t block_bytes, int64_t offset,
                int64_t bytes) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      Fill(reinterpret_cast<uint32_t*>(blocks + b * block_bytes + offset), bytes / 4,
           static_cast<uint32_t>(b) * 40503u, MaskedWord{0x0f0f0f0f, 0x70707070});
    }
  }
};

struct Model {
  const char* name;
  int num_heads, q_lora_rank, topk;
};
constexpr Model kFlash{"Flash", 64, 1024, 512}, kPro{"Pro", 128, 1536, 1024};
// A tensor rank's, of 2 and of 4.
constexpr Model kFlashHalf{"Half", 32, 1024, 512}, kFlashQuarter{"Quarter", 16, 1024, 512};
constexpr Model kProEighth{"Eighth", 16, 1536, 1024};  // of 8

struct Step {
  int num_seqs, tokens_per_seq, num_computed;
};

// The step's arrays and pools; sequence s has its own blocks and pages.
class Layer {
 public:
  Layer(Bench& bench, const Model& model, const Step& step)
      : bench_(bench), model_(model), step_(step), tokens_(step.num_seqs * step.tokens_per_seq) {
    const int end = step.num_computed + step.tokens_per_seq;
    batch_.max_blocks = 16;  // tables as wide as the engine's
    while (batch_.max_blocks < end / 256 + 1) batch_.max_blocks *= 2;
    batch_.max_window_pages = (step.tokens_per_seq + 127) / 64 + 2;
    batch_.num_seqs = step.num_seqs, batch_.num_tokens = tokens_;
    std::vector<int32_t> cu{0}, computed, seq, positions, blocks, pages, first, slots;
    for (int s = 0; s < step.num_seqs; ++s) {
      computed.push_back(step.num_computed);
      for (int i = 0; i < step.tokens_per_seq; ++i) {
        seq.push_back(s), positions.push_back(step.num_computed + i);
      }
      cu.push_back(static_cast<int32_t>(seq.size()));
      for (int b = 0; b < batch_.max_blocks; ++b) blocks.push_back(b * step.num_seqs + s);
      for (int p = 0; p < batch_.max_window_pages; ++p) pages.push_back(p * step.num_seqs + s);
      first.push_back(std::max(0, step.num_computed - 127) / 64);
      slots.push_back(s);
    }
    batch_.cu_seqlens_q = bench.Upload(cu), batch_.num_computed = bench.Upload(computed);
    batch_.token_seq = bench.Upload(seq), batch_.positions = bench.Upload(positions);
    batch_.block_tables = bench.Upload(blocks), batch_.window_tables = bench.Upload(pages);
    batch_.first_window_page = bench.Upload(first), batch_.state_slots = bench.Upload(slots);
    const int64_t num_blocks = int64_t{batch_.max_blocks} * step.num_seqs;
    block_pool_ = bench.Memory(num_blocks * kBlockBytes);
    bench.FillKeys(block_pool_, num_blocks, kBlockBytes, kLayers * kEntries, kLayers * kKeys);
    page_pool_ = bench.Memory(int64_t{batch_.max_window_pages} * step.num_seqs * kPageBytes);
    angles_ = bench.Array<float>(int64_t{tokens_} * 64);
    rows_ = (tokens_ + 7) / 8 * 8;
  }

  void Prologue(int ratio) {
    CudaAttentionPrologueParams p;
    p.batch = batch_, p.norm_eps = 1e-6f, p.angles = angles_;
    p.qr_stride = p.q_lora_rank = model_.q_lora_rank;
    p.qr = bench_.Array<__nv_bfloat16>(int64_t{tokens_} * p.q_lora_rank);
    p.q_norm = bench_.Array<__nv_bfloat16>(p.q_lora_rank);
    p.q = {bench_.Array<uint8_t>(rows_ * p.q_lora_rank),
           bench_.Array<float>(rows_ * p.q_lora_rank / 128), rows_ / 8};
    p.kv_stride = 512, p.kv = bench_.Array<__nv_bfloat16>(int64_t{tokens_} * 512);
    p.kv_norm = bench_.Array<__nv_bfloat16>(512);
    p.fresh = bench_.Array<uint8_t>(int64_t{tokens_} * 1024);
    p.ratio = ratio;
    const int width = ratio == 4 ? 1024 : 512;
    p.main.row_stride = 2 * width;
    p.main.c = bench_.Array<float>(int64_t{tokens_} * 2 * width);
    p.main.z = p.main.c + width;
    p.main.ape = bench_.Array<float>(128 * 1024), p.main.norm = bench_.Array<__nv_bfloat16>(512);
    p.index.row_stride = 512, p.index.c = bench_.Array<float>(int64_t{tokens_} * 512);
    p.index.z = p.index.c + 256, p.index.ape = p.main.ape, p.index.norm = p.main.norm;
    p.slot_bytes = 1 << 18;
    std::vector<int32_t> states(static_cast<size_t>(step_.num_seqs * p.slot_bytes / 4));
    for (int64_t i = 0; i < step_.num_seqs; ++i) {  // merged_end of ratio 128
      states[static_cast<size_t>(i * p.slot_bytes / 4)] = std::max(0, step_.num_computed - 8);
    }
    p.main.state = reinterpret_cast<std::byte*>(bench_.Upload(states));
    p.index.state = p.main.state + (1 << 17);
    p.frequencies = bench_.Array<float>(32);
    const double us = bench_.Time(kLayers, [&](int layer) {
      p.pages = Window(layer), p.main.cache = Compressed(layer, ratio),
      p.index.cache = Index(layer);
      Launch(p, bench_.stream());
    });
    const double bytes = tokens_ * (model_.q_lora_rank * 3.0 + 512 * 4 + (ratio ? width * 8 : 0) +
                                    (ratio == 4 ? 2048 : 0));
    Print(ratio == 0   ? "prologue 0"
          : ratio == 4 ? "prologue 4"
                       : "prologue 128",
          us, bytes / kBytesPerUs, bytes, 0);
  }

  void Select() {
    CudaIndexSelectParams p;
    p.batch = batch_, p.num_heads = 64, p.angles = angles_, p.topk = model_.topk;
    p.q = bench_.Array<__nv_bfloat16>(int64_t{tokens_} * 64 * 128, 0xbfffbfff);
    p.projected = bench_.Array<__nv_bfloat16>(int64_t{tokens_} * 64, 0xbfffbfff);
    p.projected_stride = 64, p.weight_scale = 0.011f;
    p.max_entries = batch_.max_blocks * 64;
    p.workspace_bytes =
        std::max(MinIndexWorkspaceBytes(tokens_, 64, p.max_entries),
                 std::min(IndexWorkspaceBytes(tokens_, 64, p.max_entries), int64_t{1} << 30));
    p.workspace = bench_.Memory(p.workspace_bytes);
    p.lists = bench_.Memory(IndexListsBytes(), 0);
    const CudaRopeAnglesParams step = CountedStep();
    p.selected = bench_.Array<int32_t>(int64_t{tokens_} * p.topk);
    p.counts = bench_.Array<int32_t>(tokens_);
    const double us = bench_.Time(kLayers, [&](int layer) {
      if (layer == 0) Launch(step, bench_.stream());
      p.keys = Index(layer), p.number = {step.number, static_cast<uint32_t>(layer)};
      Launch(p, bench_.stream());
    });
    double pairs = 0;
    for (int i = 0; i < step_.tokens_per_seq; ++i) {
      const int visible = (step_.num_computed + i + 1) / 4;
      if (visible > p.topk) pairs += visible;
    }
    pairs *= step_.num_seqs;
    const double flops = pairs * 64 * 128 * 2;
    const double bytes = step_.num_seqs * (step_.num_computed / 4.0) * 68 + tokens_ * 64.0 * 256;
    Print("index select", us, std::max(bytes / kBytesPerUs, flops / kFp8PerUs), bytes, flops);
  }

  // A step's first launch, so that those of a graph have numbers of their own each time.
  CudaRopeAnglesParams CountedStep() {
    auto* const frequencies = bench_.Array<float>(32);
    auto* const unused = bench_.Array<float>(64);
    return {.positions = batch_.positions,
            .num_tokens = 1,
            .frequencies_plain = frequencies,
            .frequencies_compressed = frequencies,
            .angles_plain = unused,
            .angles_compressed = unused,
            .number = bench_.Array<uint32_t>(1, 0),
            .num_numbers = kLayers};
  }

  void Attend(int ratio) {
    CudaSparseAttentionParams p;
    p.batch = batch_, p.num_heads = model_.num_heads, p.norm_eps = 1e-6f, p.angles = angles_;
    p.q = bench_.Array<__nv_bfloat16>(int64_t{tokens_} * p.num_heads * 512, 0xbfffbfff);
    p.sink = bench_.Array<float>(p.num_heads);
    p.fresh = bench_.Array<uint8_t>(int64_t{tokens_} * 1024);
    p.ratio = ratio, p.topk = model_.topk, p.q_is_early = ratio == 4;
    std::vector<int32_t> selected;
    double keys = 0;
    for (int s = 0; s < step_.num_seqs; ++s) {
      for (int i = 0; i < step_.tokens_per_seq; ++i) {
        const int position = step_.num_computed + i, visible = (position + 1) / 4;
        const int count = std::min(visible, p.topk);
        for (int k = 0; k < p.topk; ++k) {
          selected.push_back(static_cast<int32_t>(int64_t{k} * visible / p.topk));
        }
        keys += std::min(position + 1, 128) + (ratio == 4 ? count : ratio ? position / 128 : 0);
      }
    }
    p.selected = bench_.Upload(selected);
    p.out = {bench_.Array<__nv_bfloat16>(rows_ * p.num_heads * 512), rows_ / 8};
    p.workspace = bench_.Array<float>(SparseAttentionWorkspaceBytes(p.num_heads) / 4);
    p.prefill = step_.tokens_per_seq > 1;
    if (p.prefill) {
      p.num_fresh = tokens_, p.wide.bytes = int64_t{1} << 30;
      p.wide.rows = bench_.Array<uint8_t>(p.wide.bytes);
    }
    const double us = bench_.Time(kLayers, [&](int layer) {
      p.pages = Window(layer), p.compressed = Compressed(layer, ratio);
      Launch(p, bench_.stream());
    });
    const double flops = keys * p.num_heads * 512 * 4;
    const double q_bytes = tokens_ * p.num_heads * 2048.0;
    const double bytes = q_bytes + (step_.tokens_per_seq == 1 ? keys * 584 : 0);
    Print(ratio == 0   ? "attention 0"
          : ratio == 4 ? "attention 4"
                       : "attention 128",
          us, std::max(bytes / kBytesPerUs, flops / kBf16PerUs), bytes, flops);
  }

 private:
  static constexpr int64_t kEntries = 64 * 584, kKeys = 64 * 68, kFew = 1280;
  static constexpr int64_t kBlockBytes = kLayers * (kEntries + kKeys + kFew);
  static constexpr int64_t kPageBytes = kLayers * kEntries;

  PagedEntries Window(int layer) const {
    return {page_pool_, kPageBytes, layer * kEntries, 64, 576, 8};
  }
  PagedEntries Compressed(int layer, int ratio) const {
    if (ratio == 128) {
      return {block_pool_, kBlockBytes, kLayers * (kEntries + kKeys) + layer * kFew, 2, 576, 8};
    }
    return {block_pool_, kBlockBytes, layer * kEntries, 64, 576, 8};
  }
  PagedEntries Index(int layer) const {
    return {block_pool_, kBlockBytes, kLayers * kEntries + layer * kKeys, 64, 64, 4};
  }
  void Print(const char* what, double us, double floor_us, double bytes, double flops) const {
    std::printf("%-6s %4d x %-5d at %-8d %-14s %9.1f us %8.1f GB/s %7.1f TFLOP/s %5.1f%%\n",
                model_.name, step_.num_seqs, step_.tokens_per_seq, step_.num_computed, what, us,
                bytes / us / 1e3, flops / us / 1e6, 100 * floor_us / us);
    std::fflush(stdout);
  }

  Bench& bench_;
  Model model_;
  Step step_;
  int tokens_;
  int64_t rows_ = 0;
  CudaBatch batch_;
  std::byte* block_pool_ = nullptr;
  std::byte* page_pool_ = nullptr;
  float* angles_ = nullptr;
};

int Run(const char* what) {
  Bench bench;
  const auto all = [&](const Model& model, const Step& step) {
    Layer layer(bench, model, step);
    for (const int ratio : {0, 4, 128}) layer.Prologue(ratio);
    layer.Select();
    for (const int ratio : {0, 4, 128}) layer.Attend(ratio);
    bench.Free();
  };
  const auto chosen = [&](const char* name) {
    return std::strcmp(what, "all") == 0 || std::strcmp(what, name) == 0;
  };
  if (chosen("decode")) {
    for (const int seqs : {1, 2, 4, 8, 16, 32, 64, 128}) all(kFlash, {seqs, 1, 4096});
    for (const int context : {131072, 262144, 1048000}) all(kFlash, {1, 1, context});
    all(kFlash, {8, 1, 131072});
    for (const int seqs : {1, 32}) all(kPro, {seqs, 1, 4096});
  }
  if (chosen("ranks")) {
    for (const Model& model : {kFlashHalf, kFlashQuarter}) {
      for (const Step& step : {Step{1, 8192, 0}, Step{1, 1, 4096}, Step{64, 1, 4096},
                               Step{1, 1, 131072}, Step{1, 1, 262144}, Step{1, 1, 1048000}}) {
        Layer layer(bench, model, step);
        for (const int ratio : {0, 4, 128}) layer.Attend(ratio);
        bench.Free();
      }
    }
    for (const int seqs : {1, 8, 32, 128}) all(kProEighth, {seqs, 1, 4096});
  }
  if (chosen("few")) {
    for (const Model& model : {kFlash, kFlashHalf, kFlashQuarter, kPro, kProEighth}) {
      for (const int seqs : {1, 2, 4, 8, 12, 16, 32, 48, 64}) {
        Layer layer(bench, model, {seqs, 1, 4096});
        for (const int ratio : {0, 4, 128}) layer.Attend(ratio);
        bench.Free();
      }
    }
  }
  if (chosen("long")) all(kFlash, {1, 8192, 253952});
  if (chosen("prefill")) {
    all(kFlash, {1, 8192, 0});
    all(kPro, {1, 8192, 0});
  }
  return 0;
}

}  // namespace
}  // namespace fathom::kernels

int main(int argc, char** argv) { return fathom::kernels::Run(argc > 1 ? argv[1] : "all"); }
