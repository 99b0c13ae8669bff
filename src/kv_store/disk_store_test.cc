#include "kv_store/disk_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

namespace fathom::kv_store {
namespace {

using request::KvRecord;
using request::KvStoreEvent;
using request::KvStoreRequest;
namespace fs = std::filesystem;

constexpr int64_t kBlockBytes = 5000, kSnapshotBytes = 700;

class DiskStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "fathom-kv-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    Open();
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(root_);
  }
  DiskStoreOptions Options() const {
    return {.directory = root_ / "kv",
            .parts = {{.name = "model", .payload_bytes = {kBlockBytes, kSnapshotBytes}}}};
  }
  void Open() {
    store_.reset();
    auto store = DiskStore::Open(Options());
    ASSERT_TRUE(store.ok()) << store.status().message();
    store_ = *std::move(store);
  }

  static KvRecord Record(uint64_t n, KvRecord::Kind kind = KvRecord::Kind::kBlock) {
    KvRecord record{.kind = kind, .hash = {n, n * 77}, .num_tokens = 256};
    if (kind == KvRecord::Kind::kBlock) {
      record.parent = {n, 1};
      record.token_ids.assign(256, static_cast<int32_t>(n));
    }
    return record;
  }
  static std::vector<std::byte> Bytes(const KvRecord& record) {
    const bool is_block = record.kind == KvRecord::Kind::kBlock;
    return std::vector<std::byte>(static_cast<size_t>(is_block ? kBlockBytes : kSnapshotBytes),
                                  static_cast<std::byte>(record.hash.high));
  }
  std::vector<KvStoreEvent> WaitForEvents(size_t count) {
    std::vector<KvStoreEvent> events;
    for (int i = 0; i < 3000 && events.size() < count; ++i) {
      store_->WaitForEvent(std::chrono::milliseconds(20));
      for (KvStoreEvent& e : store_->TakeEvents(0)) {
        if (e.kind != KvStoreEvent::Kind::kIndexed) events.push_back(std::move(e));
      }
    }
    return events;
  }
  // What an earlier run left, when all of it has been looked at.
  std::vector<KvStoreEvent> WaitUntilIndexed() {
    std::vector<KvStoreEvent> events;
    for (int i = 0; i < 3000; ++i) {
      store_->WaitForEvent(std::chrono::milliseconds(20));
      for (KvStoreEvent& e : store_->TakeEvents(0)) {
        if (e.kind == KvStoreEvent::Kind::kIndexed) return events;
        events.push_back(std::move(e));
      }
    }
    ADD_FAILURE() << "the directory was not looked through";
    return events;
  }
  bool Write(const KvRecord& record) {
    auto bytes = Bytes(record);
    store_->Submit(0, {KvStoreRequest::Kind::kWrite, record, 3}, {bytes});
    const auto events = WaitForEvents(1);
    return events.size() == 1 && events[0].ok && events[0].host_slot == 3;
  }
  bool Read(const KvRecord& record) {
    std::vector<std::byte> bytes(Bytes(record).size());
    store_->Submit(0, {KvStoreRequest::Kind::kRead, record, 4}, {bytes});
    const auto events = WaitForEvents(1);
    EXPECT_EQ(events.size(), 1u);
    return events[0].ok && bytes == Bytes(record);
  }
  fs::path FileOf(const KvRecord& record) const {
    return root_ / "kv" / "model" / SegmentPath(record);
  }

  fs::path root_;
  std::unique_ptr<DiskStore> store_;
};

TEST_F(DiskStoreTest, ReadsWhatItWrote) {
  for (const auto kind : {KvRecord::Kind::kBlock, KvRecord::Kind::kSnapshot}) {
    const KvRecord record = Record(5, kind);
    EXPECT_TRUE(Write(record));
    EXPECT_TRUE(Read(record));
  }
  EXPECT_FALSE(Read(Record(6)));
}

TEST_F(DiskStoreTest, FindsEarlierRecordsAndKeepsItsKey) {
  const StoreKey key = store_->key();
  for (uint64_t n = 1; n <= 5; ++n) ASSERT_TRUE(Write(Record(n)));
  ASSERT_TRUE(Write(Record(9, KvRecord::Kind::kSnapshot)));
  Open();
  EXPECT_EQ(store_->key(), key);
  const auto events = WaitForEvents(6);
  ASSERT_EQ(events.size(), 6u);
  for (const KvStoreEvent& e : events) {
    EXPECT_EQ(e.kind, KvStoreEvent::Kind::kFound);
    EXPECT_EQ(e.record, Record(e.record.hash.high, e.record.kind));
    EXPECT_EQ(e.file_bytes, static_cast<int64_t>(fs::file_size(FileOf(e.record))));
  }
  EXPECT_TRUE(Read(Record(3)));
}

TEST_F(DiskStoreTest, SaysWhenItHasToldAll) {
  ASSERT_TRUE(Write(Record(1)));
  Open();
  std::vector<KvStoreEvent> events;
  for (int i = 0; i < 3000 && events.size() < 2; ++i) {
    store_->WaitForEvent(std::chrono::milliseconds(20));
    for (KvStoreEvent& e : store_->TakeEvents(0)) events.push_back(std::move(e));
  }
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, KvStoreEvent::Kind::kFound);
  EXPECT_EQ(events[1].kind, KvStoreEvent::Kind::kIndexed);
}

TEST_F(DiskStoreTest, DeletesWhatIsTruncatedDamagedForeignOrHalfWritten) {
  for (uint64_t n = 1; n <= 5; ++n) ASSERT_TRUE(Write(Record(n)));
  store_.reset();
  fs::resize_file(FileOf(Record(1)), 3000);                                // truncated
  fs::rename(FileOf(Record(2)), FileOf(Record(7)));                        // not what its name says
  std::fstream(FileOf(Record(3)), std::ios::in | std::ios::out).put('x');  // a damaged head
  std::ofstream(FileOf(Record(4)).string() + ".part") << "half";
  std::ofstream(root_ / "kv" / "model" / "notes.txt") << "hello";
  Open();
  const auto events = WaitUntilIndexed();
  ASSERT_EQ(events.size(), 2u);
  for (const KvStoreEvent& e : events) EXPECT_THAT(e.record.hash.high, testing::AnyOf(4u, 5u));
  size_t num_files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root_ / "kv")) {
    num_files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(num_files, 4u);  // two records, the key and the lock
}

TEST_F(DiskStoreTest, ADamagedPayloadIsNotReadAndGone) {
  const KvRecord record = Record(1);
  ASSERT_TRUE(Write(record));
  std::fstream file(FileOf(record), std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end);
  file.put('x');
  file.close();
  EXPECT_FALSE(Read(record));
  EXPECT_FALSE(fs::exists(FileOf(record)));
}

TEST_F(DiskStoreTest, DeletesOnRequest) {
  ASSERT_TRUE(Write(Record(1)));
  store_->Submit(0, {KvStoreRequest::Kind::kDelete, Record(1), -1}, {});
  ASSERT_TRUE(Write(Record(2)));  // after the delete
  EXPECT_FALSE(fs::exists(FileOf(Record(1))));
}

TEST_F(DiskStoreTest, AFullDiskTurnsItOffAndEverythingIsAnswered) {
  ASSERT_TRUE(Write(Record(1)));
  // A file-size limit fails a write as a full disk does.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{1000, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  std::vector<std::vector<std::byte>> slots;
  for (uint64_t n = 2; n < 7; ++n) slots.push_back(Bytes(Record(n)));
  for (uint64_t n = 2; n < 7; ++n) {
    store_->Submit(0, {KvStoreRequest::Kind::kWrite, Record(n), static_cast<int32_t>(n)},
                   {slots[n - 2]});
  }
  const auto events = WaitForEvents(6);
  setrlimit(RLIMIT_FSIZE, &old);
  ASSERT_EQ(events.size(), 6u);
  int num_off = 0;
  for (const KvStoreEvent& e : events) {
    num_off += e.kind == KvStoreEvent::Kind::kOff ? 1 : 0;
    EXPECT_FALSE(e.ok);
  }
  EXPECT_EQ(num_off, 1);
  EXPECT_FALSE(Write(Record(8)));
  EXPECT_FALSE(Read(Record(1)));
  EXPECT_FALSE(fs::exists(FileOf(Record(2)).string() + ".part"));
}

TEST_F(DiskStoreTest, PartsHaveFoldersOfTheirOwnAndEachRankOfAPartGetsItsBytes) {
  store_.reset();
  DiskStoreOptions options = Options();
  options.parts.push_back({.name = "other", .payload_bytes = {9, 9}});
  store_ = *DiskStore::Open(options);
  EXPECT_FALSE(DiskStore::Open({.directory = root_ / "kv", .parts = {{.name = "other"}}}).ok());
  const KvRecord record = Record(1);
  const auto submit = [&](size_t part, KvStoreRequest::Kind kind,
                          std::vector<std::span<std::byte>> slots) {
    store_->Submit(part, {kind, record, 0}, std::move(slots));
    std::vector<KvStoreEvent> events;
    for (int i = 0; i < 500 && events.empty(); ++i) {
      store_->WaitForEvent(std::chrono::milliseconds(20));
      for (KvStoreEvent& e : store_->TakeEvents(part)) {
        if (e.kind != KvStoreEvent::Kind::kIndexed) events.push_back(std::move(e));
      }
      (void)store_->TakeEvents(1 - part);
    }
    return events.size() == 1 && events[0].ok;
  };
  std::vector<std::byte> large = Bytes(record), small(9, std::byte{4});
  EXPECT_TRUE(submit(0, KvStoreRequest::Kind::kWrite, {large}));
  EXPECT_FALSE(submit(1, KvStoreRequest::Kind::kRead, {small}));
  EXPECT_TRUE(submit(1, KvStoreRequest::Kind::kWrite, {small}));
  std::vector<std::byte> first(9), second(9), third(large.size());
  EXPECT_TRUE(submit(1, KvStoreRequest::Kind::kRead, {first, second}));
  EXPECT_EQ(first, small);
  EXPECT_EQ(second, small);
  EXPECT_TRUE(submit(0, KvStoreRequest::Kind::kRead, {third}));
  EXPECT_EQ(third, large);
}

TEST_F(DiskStoreTest, WithTheKeyOfAnotherItKeepsWhatThatOneNamed) {
  ASSERT_TRUE(Write(Record(1)));
  DiskStoreOptions options = Options();
  options.key = store_->key();
  for (const size_t num_found : {1u, 0u}) {
    store_.reset();
    store_ = *DiskStore::Open(options);
    EXPECT_EQ(store_->key(), *options.key);
    EXPECT_EQ(WaitUntilIndexed().size(), num_found);
    ++(*options.key)[0];
  }
}

TEST_F(DiskStoreTest, WritesKeepToTheirBandwidth) {
  store_.reset();
  DiskStoreOptions options = Options();
  options.write_bytes_per_second = 50000;
  store_ = *DiskStore::Open(options);
  const TimePoint begin = SystemClock().Now();
  for (uint64_t n = 1; n <= 4; ++n) ASSERT_TRUE(Write(Record(n)));
  // Three pauses of a tenth of a second stand between four writes.
  EXPECT_GE(SystemClock().Now() - begin, std::chrono::milliseconds(300));
}

TEST_F(DiskStoreTest, TwoServersDoNotShareADirectory) {
  const auto second = DiskStore::Open(Options());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(), testing::HasSubstr("another server uses it"));
}

TEST_F(DiskStoreTest, ADirectoryThatOthersCanWriteToIsRefused) {
  store_.reset();
  chmod((root_ / "kv").c_str(), 0777);
  const auto store = DiskStore::Open(Options());
  ASSERT_FALSE(store.ok());
  EXPECT_THAT(store.status().message(), testing::HasSubstr("chmod 700"));
}

}  // namespace
}  // namespace fathom::kv_store
