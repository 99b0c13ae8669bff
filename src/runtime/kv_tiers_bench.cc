// How fast a prefix comes back from pinned host memory and from disk, beside what the machine can
// do, measured in the same run; and what 1M tokens take on the device. The real layout of all of
// Flash's layers; no model.
//   kv_tiers_bench cuda|cpu DISK_DIRECTORY [TOKENS [READ_THREADS]]
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic_checkpoint.h"
#include "kv_cache/pool_plan.h"
#include "kv_store/disk_store.h"
#include "kv_store/file.h"
#include "runtime/kv_cache.h"

namespace fathom::runtime {
namespace {

using kv_store::File;
using request::KvCopy;
using request::KvRecord;
using request::KvStoreRequest;

constexpr int kWindow = 128;
constexpr int64_t kDirectAlignment = 4096;
constexpr int64_t kReadBytes = int64_t{4} << 20;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double TimeOf(const std::function<void()>& work) {
  const SystemClock clock;
  const TimePoint start = clock.Now();
  work();
  return Seconds(clock.Now() - start);
}

struct Times {
  double best = 1e30, median = 0;
};
Times Repeat(int count, const std::function<double()>& measure) {
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) seconds.push_back(measure());
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2]};
}

void Print(const char* what, int64_t bytes, const Times& t) {
  const auto gigabytes = static_cast<double>(bytes) * 1e-9;
  std::printf("%-52s %9.2f ms (best %9.2f)  %6.2f GB/s\n", what, t.median * 1e3, t.best * 1e3,
              gigabytes / t.median);
  std::fflush(stdout);
}

// The page cache forgets a file that has been written out.
void DropFromPageCache(const std::filesystem::path& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  CHECK(file.ok());
  fdatasync(file.fd());
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
}

class Bench {
 public:
  Bench(std::unique_ptr<device::Device> device, std::filesystem::path directory, int64_t num_tokens)
      : device_(std::move(device)), directory_(std::move(directory)) {
    const config::ModelConfig config =
        checkpoint::ParseModelConfig(checkpoint::PresetConfigText("flash").value(), "flash")
            .value();
    layout_ =
        kv_cache::MakeKvLayout(config, config::Numerics::kOfficial, kv_cache::IndexKeyDType::kFp4);
    num_blocks_ = static_cast<int32_t>(num_tokens / kv_cache::kBlockTokens);
    snapshot_bytes_ = kv_cache::SnapshotBytesWithPages(layout_, kWindow);
    bytes_ = num_blocks_ * layout_.block_bytes + snapshot_bytes_;
    stream_ = std::move(device_->MakeStream().value());
  }

  // The pools of one sequence of 1M tokens, as they are planned and as the device counts them.
  void MeasureOneMillionTokens() {
    constexpr int64_t kTokens = int64_t{1} << 20;
    const kv_cache::PoolDemand one{.max_num_seqs = 1,
                                   .max_num_batched_tokens = 2048,
                                   .max_model_len = kTokens,
                                   .sliding_window = kWindow};
    const auto sizes = kv_cache::PlanPools(layout_, one, kv_cache::MaxUsefulBytes(layout_, one));
    Check(sizes.status());
    const int64_t planned = kv_cache::PoolBytes(layout_, *sizes), taken = BytesOnDevice(*sizes);
    std::printf(
        "1M tokens of one sequence, all layers: %lld bytes planned, %lld taken of the device\n",
        static_cast<long long>(planned), static_cast<long long>(taken));
    std::printf("  a token: %.1f bytes of history; %.1f with all of the above\n",
                layout_.bytes_per_token(), static_cast<double>(taken) / double{kTokens});
    constexpr int kSlots = 64;
    std::printf(
        "  a running sequence beyond its blocks and pages: %lld bytes planned, %.0f taken\n",
        static_cast<long long>(layout_.state.slot_bytes),
        static_cast<double>(BytesOnDevice({.num_state_slots = kSlots})) / kSlots);
  }

  void MakePools() {
    const kv_cache::PoolSizes sizes{.num_blocks = num_blocks_ + 7,
                                    .num_window_pages = 8,
                                    .num_state_slots = 2,
                                    .num_snapshots = 2};
    auto memory = KvCache::Make(
        layout_, sizes, *device_,
        {.num_blocks = num_blocks_ + 3, .num_snapshots = 2, .snapshot_bytes = snapshot_bytes_});
    Check(memory.status());
    memory_ = *std::move(memory);
    std::mt19937_64 random(5);
    const auto host = Slot(KvRecord::Kind::kBlock, 0);
    auto* words = reinterpret_cast<uint64_t*>(host.data());
    const int64_t num_words = (num_blocks_ + 3) * layout_.block_bytes / 8;
    for (int64_t i = 0; i < num_words; ++i) words[i] = random();
    // As they lie after a while: nowhere in order.
    for (int32_t i = 0; i < num_blocks_; ++i) order_.push_back(i);
    std::shuffle(order_.begin(), order_.end(), random);
    std::printf("%d blocks of %lld bytes and a snapshot of %lld: %.1f MB for %lld tokens\n",
                num_blocks_, static_cast<long long>(layout_.block_bytes),
                static_cast<long long>(snapshot_bytes_), static_cast<double>(bytes_) * 1e-6,
                static_cast<long long>(int64_t{num_blocks_} * kv_cache::kBlockTokens));
  }

  void MeasureHostMemory() {
    const std::byte* host = Slot(KvRecord::Kind::kBlock, 0).data();
    const auto ceiling = Repeat(15, [&] {
      return TimeOf([&] {
        Check(stream_->Copy(memory_.view().blocks, host, num_blocks_ * layout_.block_bytes));
        Check(stream_->Synchronize());
      });
    });
    Print("one copy of as many bytes (the ceiling)", num_blocks_ * layout_.block_bytes, ceiling);
    const std::vector<KvCopy> copies = CopiesOfPrefix();
    const auto restore = Repeat(15, [&] { return TimeOf([&] { Run(copies); }); });
    Print("the prefix from pinned host memory", bytes_, restore);
    const auto snapshot = Repeat(15, [&] { return TimeOf([&] { Run({copies.back()}); }); });
    Print("  its snapshot alone", snapshot_bytes_, snapshot);
    std::printf("  %.0f%% of the ceiling\n", 100 * ceiling.median / restore.median);
    CheckBlocks();
  }

  void MeasureDisk(int num_threads) {
    auto disk = kv_store::DiskStore::Open(
        {.directory = directory_,
         .parts = {{.name = "bench", .payload_bytes = {layout_.block_bytes, snapshot_bytes_}}},
         .num_read_threads = num_threads});
    Check(disk.status());
    const double write = TimeOf([&] { RunStore(**disk, KvStoreRequest::Kind::kWrite); });
    Print("records written", bytes_, {write, write});
    const std::filesystem::path big = directory_ / "one-file";
    WriteBigFile(big);
    const auto plain = Repeat(3, [&] { return ReadBigFile(big, 1, false); });
    Print("one file, one thread", bytes_, plain);
    const auto direct = Repeat(3, [&] { return ReadBigFile(big, 8, true); });
    Print("one file, 8 threads, O_DIRECT (the ceiling)", bytes_, direct);
    const auto records = Repeat(3, [&] {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_)) {
        if (entry.is_regular_file()) DropFromPageCache(entry.path());
      }
      std::memset(Slot(KvRecord::Kind::kBlock, 0).data(), 0,
                  static_cast<size_t>(num_blocks_ * layout_.block_bytes));
      return TimeOf([&] { RunStore(**disk, KvStoreRequest::Kind::kRead); });
    });
    Print("the prefix's records, verified", bytes_, records);
    std::printf("  %.0f%% of one thread's bandwidth, %.0f%% of the ceiling\n",
                100 * plain.median / records.median, 100 * direct.median / records.median);
    std::filesystem::remove_all(directory_ / "bench");
    std::filesystem::remove(big);
  }

 private:
  // By what of its memory is free before and after.
  int64_t BytesOnDevice(const kv_cache::PoolSizes& sizes) {
    const int64_t free_before = device_->free_memory_bytes();
    const auto memory = KvCache::Make(layout_, sizes, *device_);
    Check(memory.status());
    return free_before - device_->free_memory_bytes();
  }
  std::span<std::byte> Slot(KvRecord::Kind kind, int32_t slot) const {
    return memory_.host_slot(kind, slot);
  }
  std::vector<KvCopy> CopiesOfPrefix() const {
    std::vector<KvCopy> copies;
    for (int32_t i = 0; i < num_blocks_; ++i) {
      copies.push_back({.kind = KvCopy::Kind::kBlockFromHost,
                        .from = order_[static_cast<size_t>(i)],
                        .to = order_[static_cast<size_t>(num_blocks_ - 1 - i)]});
    }
    copies.push_back({.kind = KvCopy::Kind::kSnapshotFromHost,
                      .from = 0,
                      .to = 1,
                      .position = num_blocks_ * kv_cache::kBlockTokens,
                      .pages = {3, 5}});
    return copies;
  }
  void Run(const std::vector<KvCopy>& copies) {
    Check(memory_.Run(copies, *stream_));
    Check(stream_->Synchronize());
  }
  // Every block has arrived where it belongs.
  void CheckBlocks() {
    std::vector<std::byte> block(static_cast<size_t>(layout_.block_bytes));
    for (int32_t i = 0; i < num_blocks_; ++i) {
      const int32_t to = order_[static_cast<size_t>(num_blocks_ - 1 - i)];
      Check(stream_->Copy(block.data(), memory_.view().blocks + to * layout_.block_bytes,
                          layout_.block_bytes));
      Check(stream_->Synchronize());
      const auto from = Slot(KvRecord::Kind::kBlock, order_[static_cast<size_t>(i)]);
      CHECK_EQ(0, std::memcmp(block.data(), from.data(), block.size()));
    }
  }

  KvRecord Record(int32_t i) const {
    const bool snapshot = i == num_blocks_;
    KvRecord record{.kind = snapshot ? KvRecord::Kind::kSnapshot : KvRecord::Kind::kBlock,
                    .hash = {0x9e3779b97f4a7c15u * static_cast<uint64_t>(i + 1), 1},
                    .num_tokens = (i + 1) * kv_cache::kBlockTokens};
    if (!snapshot) record.token_ids.assign(kv_cache::kBlockTokens, i);
    return record;
  }
  void RunStore(kv_store::DiskStore& disk, KvStoreRequest::Kind kind) {
    for (int32_t i = 0; i <= num_blocks_; ++i) {
      const KvRecord record = Record(i);
      const int32_t slot = i == num_blocks_ ? 0 : i;
      disk.Submit(0, {kind, record, slot}, {Slot(record.kind, slot)});
    }
    int32_t done = 0;
    while (done <= num_blocks_) {
      disk.WaitForEvent(std::chrono::milliseconds(5));
      for (const request::KvStoreEvent& event : disk.TakeEvents(0)) {
        if (event.host_slot < 0) continue;
        CHECK(event.ok);
        ++done;
      }
    }
  }

  void WriteBigFile(const std::filesystem::path& path) {
    const File file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    const auto bytes = static_cast<size_t>(bytes_ - snapshot_bytes_);
    CHECK(file.ok() && kv_store::WriteAll(file.fd(), Slot(KvRecord::Kind::kBlock, 0).first(0), {}));
    const std::span<const std::byte> all(Slot(KvRecord::Kind::kBlock, 0).data(), bytes);
    CHECK(kv_store::WriteAll(file.fd(), all, Slot(KvRecord::Kind::kSnapshot, 0)));
  }
  double ReadBigFile(const std::filesystem::path& path, int num_threads, bool direct) {
    DropFromPageCache(path);
    const int64_t share =
        (bytes_ / num_threads + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    return TimeOf([&] {
      std::vector<std::thread> threads;
      for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
          const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0)));
          CHECK(file.ok());
          void* buffer = std::aligned_alloc(kDirectAlignment, kReadBytes);
          for (int64_t at = t * share; at < std::min(bytes_, (t + 1) * share); at += kReadBytes) {
            CHECK(pread(file.fd(), buffer, kReadBytes, at) > 0);
          }
          std::free(buffer);
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }

  const std::unique_ptr<device::Device> device_;
  const std::filesystem::path directory_;
  kv_cache::KvLayout layout_;
  int32_t num_blocks_ = 0;
  int64_t snapshot_bytes_ = 0, bytes_ = 0;
  std::unique_ptr<device::Stream> stream_;
  KvCache memory_;
  std::vector<int32_t> order_;
};

int Main(int argc, char** argv) {
  const std::string kind = argc > 1 ? argv[1] : "";
  if (argc < 3 || (kind != "cuda" && kind != "cpu")) {
    std::fprintf(stderr, "usage: kv_tiers_bench cuda|cpu DISK_DIRECTORY [TOKENS [THREADS]]\n");
    return 2;
  }
  std::unique_ptr<device::Device> device;
  if (kind == "cuda") {
    auto cuda = device::MakeCudaDevice(0);
    Check(cuda.status());
    device = *std::move(cuda);
  } else {
    device = device::MakeCpuDevice(1);
  }
  Bench bench(std::move(device), argv[2], argc > 3 ? std::atoll(argv[3]) : 100'000);
  if (kind == "cuda") bench.MeasureOneMillionTokens();
  bench.MakePools();
  bench.MeasureHostMemory();
  bench.MeasureDisk(argc > 4 ? std::atoi(argv[4]) : kv_store::DiskStoreOptions().num_read_threads);
  return 0;
}

}  // namespace
}  // namespace fathom::runtime

int main(int argc, char** argv) { return fathom::runtime::Main(argc, argv); }
