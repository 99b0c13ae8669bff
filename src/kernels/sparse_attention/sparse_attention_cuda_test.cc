// Attention against the CPU's head norm, rope, attention and inverse rope. Both round probabilities
// to BF16, the device relative to the running maximum, so outputs may differ by 2^-8 of the largest
// value and their own rounding.
#include "kernels/sparse_attention/sparse_attention_cuda.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cuda_batch_testing.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace fathom::kernels {
namespace {

struct Shape {
  int num_heads;
  int ratio;
  int topk;
  std::vector<TestSequence> sequences;
  float compressed_scale = 1;  // of the compressed entries' values
  int padding = 2;             // tokens
  bool prefill = false;
};

// Entries of a step's own tokens: as the GPU reads them, and their values.
struct FreshEntries {
  std::vector<uint8_t> rows;
  std::vector<BFloat16> values;

  void Add(const float* noise) {
    float entry[512];
    for (size_t i = 0; i < 512; ++i) entry[i] = RoundToBFloat16(noise[i]);
    rows.resize(rows.size() + kRowBytes);
    auto* row = reinterpret_cast<std::byte*>(rows.data() + rows.size() - kRowBytes);
    StoreKvEntry<BFloat16>(entry, 512, 64, {row, row + 576});
    LoadKvEntry<BFloat16>({row, row + 576}, 512, 64, entry);
    for (const float v : entry) values.push_back(BFloat16(v));
  }
  static constexpr int kRowBytes = 1024;
};

class SparseAttentionCudaTest : public CudaTest {
 protected:
  void Run(const Shape& shape) {
    int longest = 0;
    for (const TestSequence& s : shape.sequences) {
      longest = std::max(longest, s.num_computed + s.num_tokens);
    }
    TestBatch batch(static_cast<int>(shape.sequences.size()), longest, 11);
    batch.SetStep(shape.sequences);
    const BatchView view = batch.view();
    const int tokens = batch.num_tokens(), heads = shape.num_heads;
    const int padding = shape.padding;
    std::vector<uint8_t> blocks(static_cast<size_t>(batch.num_blocks() * TestPools::kBlockBytes));
    std::vector<uint8_t> pages(static_cast<size_t>(batch.num_pages() * TestPools::kPageBytes));
    const auto compressed = [&](std::byte* pool) {
      return shape.ratio == 4 ? TestPools::C4(pool) : TestPools::C128(pool);
    };
    const auto host_blocks = compressed(reinterpret_cast<std::byte*>(blocks.data()));
    const auto host_pages = TestPools::Window(reinterpret_cast<std::byte*>(pages.data()));
    FillEntries(host_blocks, batch.num_blocks(), 1, shape.compressed_scale);
    FillEntries(host_pages, batch.num_pages(), 2);
    auto q = RandomActivations<BFloat16>(int64_t{tokens} * heads * 512, 3, 4.0f);
    const auto noise = RandomFloats(tokens * 512, 4);
    FreshEntries fresh;
    for (int t = 0; t < tokens; ++t) fresh.Add(noise.data() + t * 512);
    const auto sink = RandomFloats(heads, 5);
    std::vector<float> angles(static_cast<size_t>((tokens + padding) * 64)), frequencies;
    for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(10000.0f, -i / 32.0f));
    for (int t = 0; t < tokens; ++t) {
      RopeAngles(view.positions[static_cast<size_t>(t)], frequencies, angles.data() + t * 64);
    }
    std::vector<int32_t> selected(static_cast<size_t>((tokens + padding) * shape.topk)), counts;
    Select(view, shape.topk, selected, counts);

    std::vector<device::Buffer> keep;
    const auto upload = [this](const auto& v) { return Upload(v); };
    const auto gpu_q = Upload(q), gpu_fresh = Upload(fresh.rows), gpu_sink = Upload(sink);
    const auto gpu_angles = Upload(angles), gpu_blocks = Upload(blocks), gpu_pages = Upload(pages);
    const auto gpu_selected = Upload(selected);
    const int64_t rows = (tokens + padding + 7) / 8 * 8;
    const auto out = Poisoned(rows * heads * 1024);
    const auto workspace = Poisoned(SparseAttentionWorkspaceBytes(heads));
    CudaSparseAttentionParams p;
    p.batch = batch.OnDevice(upload, keep, padding);
    p.q = As<const __nv_bfloat16>(gpu_q);
    p.num_heads = heads;
    p.norm_eps = 1e-6f;
    p.angles = As<const float>(gpu_angles);
    p.sink = As<const float>(gpu_sink);
    p.fresh = As<const uint8_t>(gpu_fresh);
    p.pages = TestPools::Window(gpu_pages.data());
    p.ratio = shape.ratio;
    p.compressed = compressed(gpu_blocks.data());
    p.selected = As<const int32_t>(gpu_selected);
    p.topk = shape.topk;
    p.out = {As<__nv_bfloat16>(out), rows / 8};
    p.workspace = As<float>(workspace);
    const auto wide = PoisonedWide();
    p.prefill = shape.prefill;
    p.wide = {As<uint8_t>(wide), wide.bytes()};
    p.num_fresh = tokens;
    EXPECT_EQ(WidensKeys(p), shape.prefill);
    p.allows_early = heads <= 32;  // as on ranks
    Launch(p, *gpu_stream_);
    const auto actual = output_ = Download<BFloat16>(out);
    if (AwaitsWords(p)) ExpectSameOfWords(p, q, selected, out);

    Launch(
        HeadNormParams<BFloat16>{
            .q = q.data(), .num_rows = int64_t{tokens} * heads, .size = 512, .eps = 1e-6f},
        *cpu_stream_);
    Rope(q, tokens, heads, angles, false);
    const int64_t max_keys = 128 + std::max(shape.topk, longest / 128 + 1);
    std::vector<float> scratch(
        static_cast<size_t>(4 * AttentionScratchFloats(heads, 512, max_keys)));
    Launch(SparseAttentionParams<BFloat16>{.batch = view,
                                           .q = q.data(),
                                           .num_heads = heads,
                                           .head_dim = 512,
                                           .rope_dim = 64,
                                           .window = 128,
                                           .scale = 1 / std::sqrt(512.0f),
                                           .sink = sink.data(),
                                           .fresh = fresh.values.data(),
                                           .pages = host_pages,
                                           .ratio = shape.ratio,
                                           .compressed = host_blocks,
                                           .selected = selected.data(),
                                           .counts = counts.data(),
                                           .topk = shape.topk,
                                           .scratch = scratch.data(),
                                           .max_keys = max_keys},
           *cpu_stream_);
    Rope(q, tokens, heads, angles, true);
    double error = 0, size = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < heads * 512; ++k) {
        const float e = ToFloat(q[static_cast<size_t>(t * heads * 512 + k)]);
        const float a = ToFloat(actual[static_cast<size_t>(Bf16TileOffset(t, k, rows / 8) / 2)]);
        // Values are near 1, at most 6.
        ASSERT_NEAR(a, e, 6 * shape.compressed_scale * 0x1p-8 + std::fabs(e) * 0x1p-7)
            << t << ' ' << k / 512 << ' ' << k % 512;
        error += (a - e) * (a - e), size += e * e;
      }
    }
    EXPECT_LE(std::sqrt(error / size), 0x1p-8);
    for (int64_t t = tokens; t < tokens + padding; ++t) {
      const auto at = static_cast<size_t>(Bf16TileOffset(t, 0, rows / 8) / 2);
      EXPECT_EQ(actual[at].bits, 0xffff) << "a padding token was written";
    }
  }

  // Room for 16K keys.
  device::Buffer PoisonedWide() { return Poisoned(int64_t{16} << 20); }

  // Of queries and entries as numbered words, over what `out` holds.
  void ExpectSameOfWords(CudaSparseAttentionParams p, const std::vector<BFloat16>& q,
                         const std::vector<int32_t>& selected, const device::Buffer& out) {
    const auto expected = Download<uint16_t>(out);
    constexpr uint32_t kOfStep = 40, kIndex = 3, kNumber = kOfStep + 2 * kIndex + 1;
    std::vector<uint2> q_words, entries;
    for (size_t i = 0; i < q.size(); i += 2) {
      q_words.push_back({q[i].bits | uint32_t{q[i + 1].bits} << 16, kNumber});
    }
    for (const int32_t entry : selected) entries.push_back({static_cast<uint32_t>(entry), kNumber});
    const auto gpu_q = Upload(q_words), gpu_entries = Upload(entries);
    const auto of_step = Upload(std::vector<uint32_t>{kOfStep}), again = Poisoned(out.bytes());
    p.q = nullptr, p.selected = nullptr;
    p.words = {
        As<const uint2>(gpu_q), As<const uint2>(gpu_entries), {As<uint32_t>(of_step), kIndex}};
    p.out.values = As<__nv_bfloat16>(again);
    Launch(p, *gpu_stream_);
    EXPECT_TRUE(Download<uint16_t>(again) == expected);
  }

  // Up to topk visible entries of each token, ascending.
  static void Select(const BatchView& view, int topk, std::vector<int32_t>& selected,
                     std::vector<int32_t>& counts) {
    std::mt19937 random(9);
    for (int t = 0; t < view.num_tokens(); ++t) {
      const int visible = (view.positions[static_cast<size_t>(t)] + 1) / 4;
      int taken = 0;
      for (int j = 0; j < visible && taken < topk; ++j) {
        const int left = visible - j, wanted = topk - taken;
        if (left > wanted && static_cast<int>(random() % static_cast<unsigned>(left)) >= wanted) {
          continue;
        }
        const int at = t * topk + taken++;
        selected[static_cast<size_t>(at)] = j;
      }
      counts.push_back(taken);
    }
  }

  void Rope(std::vector<BFloat16>& x, int tokens, int heads, const std::vector<float>& angles,
            bool inverse) {
    Launch(RopeParams<BFloat16>{.x = x.data(),
                                .num_tokens = tokens,
                                .num_heads = heads,
                                .head_dim = 512,
                                .rope_dim = 64,
                                .angles = angles.data(),
                                .inverse = inverse},
           *cpu_stream_);
  }

  std::vector<BFloat16> output_;  // of the last run, tiles
};

// Steps of a prompt, the keys of earlier ones in pages: one sequence with some tokens computed
// before the whole step.
class PrefillAttentionCudaTest : public SparseAttentionCudaTest {
 protected:
  static constexpr int kHeads = 64, kMostBefore = 4200, kTotal = kMostBefore + kWholeStep;
  struct Heads {
    int first = 0, count = kHeads;
  };

  void SetUp() override {
    SparseAttentionCudaTest::SetUp();
    if (gpu_ == nullptr) return;
    q_ = RandomActivations<BFloat16>(int64_t{kWholeStep} * kHeads * 512, 3, 4.0f);
    sink_ = RandomFloats(kHeads, 5);
    batch_.SetStep({{0, kTotal}});
    FillWindow();
    Prepare(300, 192);
  }

  void Prepare(int before, int topk) {
    before_ = before, topk_ = topk;
    batch_.SetStep({{before, kWholeStep}});
    std::vector<int32_t> counts;
    selected_.assign(size_t{kWholeStep} * static_cast<size_t>(topk), 0);
    Select(batch_.view(), topk, selected_, counts);
  }

  // The same entries in pages and as rows of steps.
  void FillWindow() {
    const auto noise = RandomFloats(kTotal * 512, 7);
    std::vector<uint8_t> pages(static_cast<size_t>(batch_.num_pages() * TestPools::kPageBytes));
    const auto entries = TestPools::Window(reinterpret_cast<std::byte*>(pages.data()));
    for (size_t position = 0; position < kTotal; ++position) {
      fresh_.Add(noise.data() + position * 512);
      const uint8_t* row = fresh_.rows.data() + position * FreshEntries::kRowBytes;
      const EntrySlot slot =
          entries.At(batch_.view().window_tables[position / 64], static_cast<int>(position % 64));
      std::memcpy(slot.data, row, 576);
      std::memcpy(slot.scales, row + 576, 8);
    }
    pages_ = Upload(pages);
  }

  void FillBlocks(int ratio) {
    std::vector<uint8_t> blocks(static_cast<size_t>(batch_.num_blocks() * TestPools::kBlockBytes));
    auto* pool = reinterpret_cast<std::byte*>(blocks.data());
    FillEntries(ratio == 4 ? TestPools::C4(pool) : TestPools::C128(pool), batch_.num_blocks(), 1);
    blocks_ = Upload(blocks);
  }

  template <typename U>
  device::Buffer UploadRows(const std::vector<U>& all, int64_t first, int64_t count,
                            int64_t width) {
    const auto begin = all.begin() + first * width;
    return Upload(std::vector<U>(begin, begin + count * width));
  }

  device::Buffer UploadQueries(const TestStep& step, const Heads& heads) {
    std::vector<BFloat16> rows;
    for (int t = step.first; t < step.first + step.num_tokens; ++t) {
      const auto begin = q_.begin() + (int64_t{t} * kHeads + heads.first) * 512;
      rows.insert(rows.end(), begin, begin + heads.count * 512);
    }
    return Upload(rows);
  }

  // [num_tokens, heads.count * 512]
  std::vector<BFloat16> Run(int ratio, const TestStep& step, const Heads& heads) {
    batch_.SetStep({{before_ + step.first, step.num_tokens}});
    const int64_t tokens = step.num_tokens, rows = (tokens + 7) / 8 * 8;
    std::vector<float> angles(static_cast<size_t>(tokens * 64)), frequencies;
    for (int i = 0; i < 32; ++i) frequencies.push_back(std::pow(10000.0f, -i / 32.0f));
    for (int64_t t = 0; t < tokens; ++t) {
      RopeAngles(before_ + step.first + static_cast<int>(t), frequencies, angles.data() + t * 64);
    }
    std::vector<device::Buffer> keep;
    const auto upload = [this](const auto& v) { return Upload(v); };
    const auto q = UploadQueries(step, heads);
    const auto sink = UploadRows(sink_, heads.first, heads.count, 1);
    const auto fresh =
        UploadRows(fresh_.rows, before_ + step.first, tokens, FreshEntries::kRowBytes);
    const auto selected = UploadRows(selected_, step.first, tokens, topk_);
    const auto gpu_angles = Upload(angles), out = Poisoned(rows * heads.count * 1024);
    const auto workspace = Poisoned(SparseAttentionWorkspaceBytes(heads.count));
    CudaSparseAttentionParams p;
    p.batch = batch_.OnDevice(upload, keep);
    p.prefill = is_prefill_;
    p.q = As<const __nv_bfloat16>(q);
    p.num_heads = heads.count;
    p.norm_eps = 1e-6f;
    p.angles = As<const float>(gpu_angles);
    p.sink = As<const float>(sink);
    p.fresh = As<const uint8_t>(fresh);
    p.pages = TestPools::Window(pages_.data());
    p.ratio = ratio;
    p.compressed = ratio == 4 ? TestPools::C4(blocks_.data()) : TestPools::C128(blocks_.data());
    p.selected = As<const int32_t>(selected);
    p.topk = topk_;
    p.out = {As<__nv_bfloat16>(out), rows / 8};
    p.workspace = As<float>(workspace);
    const auto wide = PoisonedWide();
    p.wide = {As<uint8_t>(wide), wide.bytes()};
    p.num_fresh = step.num_tokens;
    EXPECT_EQ(WidensKeys(p), is_prefill_ && step.num_tokens >= 512);
    Launch(p, *gpu_stream_);
    const auto tiles = Download<BFloat16>(out);
    std::vector<BFloat16> values;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < heads.count * 512; ++k) {
        values.push_back(tiles[static_cast<size_t>(Bf16TileOffset(t, k, rows / 8) / 2)]);
      }
    }
    return values;
  }

  void ExpectSameBitsOfHeads(int ratio, const TestStep& step) {
    FillBlocks(ratio);
    const auto all = Run(ratio, step, {});
    for (const Heads& heads :
         Sweep<Heads>({{32, 32}, {48, 16}, {8, 40}, {3, 1}}, {{8, 40}, {3, 1}})) {
      const auto some = Run(ratio, step, heads);
      for (int t = 0; t < step.num_tokens; ++t) {
        ASSERT_EQ(0, std::memcmp(some.data() + int64_t{t} * heads.count * 512,
                                 all.data() + (int64_t{t} * kHeads + heads.first) * 512,
                                 static_cast<size_t>(heads.count) * 1024))
            << "ratio " << ratio << ", token " << t << " of " << step.num_tokens << ", "
            << heads.count << " heads";
      }
    }
  }

  bool is_prefill_ = true;
  int before_ = 0;  // tokens that were computed before the whole step
  int topk_ = 0;
  TestBatch batch_{1, kTotal, 11};
  std::vector<BFloat16> q_;
  FreshEntries fresh_;
  std::vector<int32_t> selected_;
  std::vector<float> sink_;
  device::Buffer pages_, blocks_;
};

TEST_F(PrefillAttentionCudaTest, GivesATokenTheSameBitsInEveryStep) {
  for (const int ratio : Sweep({0, 4, 128}, {4})) {
    FillBlocks(ratio);
    for (const Heads& heads : Sweep<Heads>({{0, 8}, {0, 64}}, {{0, 8}})) {
      const auto whole = Run(ratio, {0, kWholeStep}, heads);
      for (const TestStep& step : TestSteps()) {
        const auto part = Run(ratio, step, heads);
        const BFloat16* expected = whole.data() + step.first * heads.count * 512;
        ASSERT_EQ(0, std::memcmp(part.data(), expected, part.size() * 2))
            << "ratio " << ratio << ", " << step.num_tokens << " tokens, " << heads.count
            << " heads";
      }
    }
  }
}

TEST_F(PrefillAttentionCudaTest, GivesAHeadTheSameBitsBesideAnyOthers) {
  const int num_tokens = kIsRacecheck ? 10 : 150;
  for (const int ratio : {0, 4, 128}) ExpectSameBitsOfHeads(ratio, {0, num_tokens});
}

TEST_F(PrefillAttentionCudaTest, DecodesGiveAHeadTheSameBitsBesideAnyOthers) {
  is_prefill_ = false;
  for (const int ratio : {0, 4, 128}) {
    for (const int tokens : Sweep({1, 2, 4, 8, 12, 16, 32, 33, 64, 65, 140}, {1, 4, 12, 13})) {
      ExpectSameBitsOfHeads(ratio, {0, tokens});
    }
  }
  // Of more entries, for some tiles a block.
  for (const int topk : {192, 1024}) {
    Prepare(kMostBefore, topk);
    for (const int tokens : Sweep({1, 4, 5, 12, 13, 32, 33}, {13})) {
      ExpectSameBitsOfHeads(4, {0, tokens});
    }
  }
  // Of few keys, where the sink counts most. Of many tokens, as what is rounded differently shows
  // in one of a million values.
  Prepare(0, 192);
  for (const int ratio : {0, 128}) {
    for (int first = 0; first < (kIsRacecheck ? 12 : 96); first += 12) {
      ExpectSameBitsOfHeads(ratio, {first, 12});
    }
  }
}

TEST_F(SparseAttentionCudaTest, OneTokenMatchesTheCpu) {
  for (const int ratio : {0, 4, 128}) {
    for (const int computed : Sweep({0, 1, 62, 63, 64, 127, 128, 255, 300, 2100}, {0, 128, 2100})) {
      Run({64, ratio, 512, {{computed, 1}}});
    }
  }
}

TEST_F(SparseAttentionCudaTest, WordsOfOneTokenGiveTheSame) {
  for (const int computed : Sweep({5, 126, 600, 2100, 40000}, {126, 2100})) {
    for (const int heads : Sweep({4, 32, 64}, {32})) Run({heads, 4, 512, {{computed, 1}}, 1, 0});
  }
}

TEST_F(SparseAttentionCudaTest, EveryNumberOfHeadsMatchesTheCpu) {
  for (const int heads : Sweep({4, 8, 16, 32, 64, 128}, {4, 32, 128})) {
    Run({heads, 4, 512, {{700, 2}, {2500, 1}}});
    Run({heads, 128, 512, {{20000, 1}}});
  }
  Run({128, 0, 512, {{700, 7}}});
}

TEST_F(SparseAttentionCudaTest, ManySequencesMatchTheCpu) {
  std::vector<TestSequence> sequences;
  for (int s = 0; s < (kIsRacecheck ? 20 : 140); ++s) sequences.push_back({s * 19, 1});
  Run({64, 4, 512, sequences});
  sequences.resize(16);
  for (const size_t count : Sweep<size_t>({16, 8, 5, 2}, {16, 8})) {
    sequences.resize(count);
    Run({64, 4, 512, sequences});
    Run({64, 128, 512, sequences});
  }
  // Splits of a tile, or two, or none of their keys: two of them, or eight.
  for (const int count : Sweep({5, 12, 13, 30}, {5, 13})) {
    sequences.clear();
    for (int s = 0; s < count; ++s) sequences.push_back({s * (count < 13 ? 701 : 97) % 5000, 1});
    for (const int heads : Sweep({8, 16, 40, 128}, {16})) {
      if (count < 13) {
        Run({heads, 4, 1024, sequences});
        continue;
      }
      Run({heads, 0, 512, sequences});
      Run({heads, 4, 192, sequences});
    }
  }
  // Of more tokens these splits are no clusters, up to 29.
  for (const int count : Sweep({13, 16, 29, 30}, {13})) {
    sequences.clear();
    for (int s = 0; s < count; ++s) sequences.push_back({s * 701 % 5000, 1});
    for (const int heads : Sweep({8, 16, 40}, {16})) Run({heads, 4, 1024, sequences});
  }
  sequences.assign(kIsRacecheck ? 3 : 9, {700, 1});
  for (TestSequence& s : sequences) s.num_tokens = 4;
  Run({64, 128, 512, sequences});
}

TEST_F(SparseAttentionCudaTest, ChunksOfAPromptMatchTheCpu) {
  Run({16, 4, 128, {{150, 14}, {700, 5}}});
  if (kIsRacecheck) return;
  Run({64, 4, 512, {{0, 200}}});
  Run({16, 4, 128, {{150, 140}, {700, 65}}});
  Run({64, 128, 512, {{300, 150}}});
  Run({64, 0, 512, {{63, 150}}});
}

// Needs no GPU.
TEST(WidensKeys, OfPromptsOf512TokensWhereTheKeysFindRoom) {
  const auto widens = [](int tokens, int context, int64_t bytes, bool prefill = true) {
    CudaSparseAttentionParams p;
    p.prefill = prefill, p.ratio = 4, p.compressed.entries_per_page = 64;
    p.batch.max_blocks = context / 256, p.batch.num_seqs = 1, p.batch.num_tokens = tokens;
    p.num_fresh = tokens, p.wide.bytes = bytes;
    return WidensKeys(p);
  };
  constexpr int64_t kRow = 1024, kRoom = int64_t{1} << 30;
  EXPECT_TRUE(widens(512, 8192, kRoom));
  EXPECT_FALSE(widens(511, 8192, kRoom));
  EXPECT_FALSE(widens(512, 8192, kRoom, /*prefill=*/false));
  // A table's entries, a window before the step and the step's own.
  EXPECT_TRUE(widens(512, 8192, (2048 + 128 + 512) * kRow));
  EXPECT_FALSE(widens(512, 8192, (2048 + 128 + 512) * kRow - 1));
  // Up to 64 keys a token.
  EXPECT_TRUE(widens(8192, 1 << 20, kRoom));
  EXPECT_FALSE(widens(512, 1 << 20, kRoom));
}

// Steps of prompts of so many tokens that their keys are widened first: of some sequences, whose
// window begins before the step, with it, or before the sequence.
TEST_F(SparseAttentionCudaTest, KeysOfPromptsThatAreWidenedFirstMatchTheCpu) {
  const std::vector<TestSequence> sequences{{150, 330}, {0, 120}, {700, 65}, {127, 1}, {5000, 2}};
  for (const int ratio : {0, 4, 128}) {
    Run({kIsRacecheck ? 8 : 40, ratio, 128, sequences, 1, 2, /*prefill=*/true});
  }
  if (kIsRacecheck) return;
  Run({128, 4, 512, {{0, 520}}, 1, 0, true});
  Run({64, 128, 512, {{20000, 512}}, 1, 2, true});
  Run({64, 4, 512, {{2500, 512}}, 300, 2, true});
}

// A block's tokens one after another: of a tile each, of more and more, and of both in turn.
TEST_F(SparseAttentionCudaTest, ManyShortPromptsMatchTheCpu) {
  const int prompts = kIsRacecheck ? 3 : 24;
  std::vector<TestSequence> sequences(static_cast<size_t>(prompts), {0, 50});
  Run({64, 0, 512, sequences});
  Run({16, 0, 512, {{0, prompts * 25}}});
  for (size_t s = 0; s < sequences.size(); s += 2) sequences[s] = {900, 40};
  Run({40, 4, 512, sequences});
}

// Compressed entries with scores far above those of the window, which come first.
TEST_F(SparseAttentionCudaTest, ScoresThatGrowAlongTheKeysMatchTheCpu) {
  for (const int heads : Sweep({16, 32, 64}, {16})) {
    for (const float scale : Sweep<float>({30.0f, 300.0f}, {300.0f})) {
      const int num_tokens = kIsRacecheck ? 14 : 140;
      Run({heads, 4, 512, {{2500, num_tokens}}, scale});
      Run({heads, 128, 512, {{20000, num_tokens}}, scale});
      Run({heads, 128, 512, {{100000, 1}}, scale});
    }
  }
}

// Of so many keys that the parts are FP16.
TEST_F(SparseAttentionCudaTest, OneTokenOfTheLongestContextsMatchesTheCpu) {
  const auto run = [this](int heads, int computed, float scale) {
    Run({heads, 128, 512, {{computed, 1}}, scale, 0});
  };
  for (const int computed : Sweep({560000, 1048574}, {560000})) run(64, computed, 1);
  for (const float scale : {30.0f, 300.0f}) run(16, 540000, scale);
  // A head has the same bits beside any others: tests give those that they share the same queries.
  run(128, 530000, 1);
  const std::vector<BFloat16> all = output_;
  for (const int heads : {4, 32}) {
    run(heads, 530000, 1);
    ASSERT_EQ(0, std::memcmp(output_.data(), all.data(), output_.size() * sizeof(BFloat16)))
        << heads;
  }
}

// Of tables of so many keys that 66 splits have a tile each, or none.
TEST_F(SparseAttentionCudaTest, OneTokenOfALongContextMatchesTheCpu) {
  const auto run = [this](int heads, int computed, float scale) {
    Run({heads, 128, 512, {{computed, 1}}, scale, 0});
  };
  for (const int computed : Sweep({262400, 330000, 520000, 557000}, {262400})) {
    run(64, computed, 1);
  }
  for (const int heads : Sweep({4, 16, 32, 128}, {16})) run(heads, 270000, 1);
  for (const float scale : Sweep<float>({30.0f, 300.0f}, {300.0f})) run(32, 300000, scale);
}

TEST_F(SparseAttentionCudaTest, LongContextsMatchTheCpu) {
  Run({64, 128, 512, {{70000, 1}}, 1, 0});
  Run({64, 128, 512, {{300000, 1}}});
  Run({64, 128, 512, {{600000, 1}}});
  Run({64, 128, 512, {{40000, 2}, {100000, 1}}});
}

}  // namespace
}  // namespace fathom::kernels
