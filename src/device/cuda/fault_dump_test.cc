#include "device/cuda/fault_dump.h"

#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace fathom::device {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
void Append(Bytes& to, const T& value) {
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), from, from + sizeof(T));
}

// An ELF file of these sections, its names in the last one.
struct Section {
  std::string name;
  uint32_t type = 0;
  Bytes contents = {};
  uint64_t entry_size = 0, address = 0;
  uint64_t size = 0;  // 0: that of the contents
};
Bytes MakeElf(std::vector<Section> sections, bool has_many = false) {
  Section names{.name = "names", .type = SHT_STRTAB};
  sections.insert(sections.begin(), Section{});
  sections.push_back(names);
  Bytes image(sizeof(Elf64_Ehdr)), table;
  std::vector<Elf64_Shdr> headers;
  for (const Section& s : sections) {
    Elf64_Shdr header{};
    header.sh_name = static_cast<uint32_t>(names.contents.size());
    for (const char c : s.name + '\0') Append(names.contents, c);
    header.sh_type = s.type, header.sh_entsize = s.entry_size, header.sh_addr = s.address;
    header.sh_offset = image.size();
    header.sh_size = s.size != 0 ? s.size : s.contents.size();
    image.insert(image.end(), s.contents.begin(), s.contents.end());
    headers.push_back(header);
  }
  headers.back().sh_offset = image.size(), headers.back().sh_size = names.contents.size();
  image.insert(image.end(), names.contents.begin(), names.contents.end());
  Elf64_Ehdr elf{};
  std::memcpy(elf.e_ident, ELFMAG, SELFMAG);
  elf.e_shoff = image.size(), elf.e_shentsize = sizeof(Elf64_Shdr);
  elf.e_shnum = static_cast<Elf64_Half>(headers.size());
  elf.e_shstrndx = static_cast<Elf64_Half>(headers.size() - 1);
  if (has_many) {  // as where there are more than a header can count
    headers[0].sh_size = elf.e_shnum, headers[0].sh_link = elf.e_shstrndx;
    elf.e_shnum = 0, elf.e_shstrndx = SHN_XINDEX;
  }
  std::memcpy(image.data(), &elf, sizeof(elf));
  for (const Elf64_Shdr& header : headers) Append(image, header);
  return image;
}

constexpr uint64_t kGood = 0x7f0000001000, kBad = 0x7f0000002000, kFunctionBytes = 0x800;
constexpr const char* kMangled =
    "_ZN6fathom7kernels12_GLOBAL__N_110GateKernelILi2ENS0_4TileEEEvNS0_6ParamsE";

Section Code() {
  const auto function = [](const std::string& name, uint64_t address) {
    return Section{
        .name = ".text." + name, .type = SHT_PROGBITS, .address = address, .size = kFunctionBytes};
  };
  return {.name = ".cudbg.relfimg.dev0.ctx0",
          .type = SHT_LOUSER + 7,
          .contents = MakeElf({function("good", kGood), function(kMangled, kBad)})};
}
// Longer entries than are known, as of a newer driver.
Section Warps(const std::vector<uint64_t>& error_addresses) {
  Section warps{.name = ".cudbg.wptbl.dev0.sm3.cta0", .type = SHT_LOUSER + 14, .entry_size = 56};
  for (const uint64_t address : error_addresses) {
    Append(warps.contents, address);
    for (const uint32_t field : {4u, ~0u, ~0u, 0u, address != 0 ? 1u : 0u, 0u}) {
      Append(warps.contents, field);
    }
    warps.contents.resize((warps.contents.size() + 55) / 56 * 56);
  }
  return warps;
}
Section Grids() {
  Section grids{.name = ".cudbg.gridtbl.dev0", .type = SHT_LOUSER + 12, .entry_size = 136};
  for (const uint64_t entry : {kGood, kBad}) {
    for (const uint64_t field :
         {uint64_t{7}, uint64_t{1}, uint64_t{2}, entry, uint64_t{3}, uint64_t{0}, uint64_t{528}}) {
      Append(grids.contents, field);
    }
    const uint32_t x = entry == kBad ? 66 : 1;
    for (const uint32_t field : {2u, 0u, 2u, 34u, x, 2u, 1u, 32u, 4u, 2u}) {
      Append(grids.contents, field);
    }
    grids.contents.resize((grids.contents.size() + 135) / 136 * 136);
  }
  return grids;
}

TEST(FaultDump, NamesTheKernelOfTheFirstWarpThatFaulted) {
  for (const bool has_many : {false, true}) {
    const Bytes dump =
        MakeElf({Code(), Grids(), Warps({0, 0}), Warps({0, kBad + 0x40, kGood})}, has_many);
    const auto kernel = FindBrokenKernel(dump);
    ASSERT_TRUE(kernel);
    EXPECT_EQ(kernel->name, "GateKernel<2, Tile>");
    EXPECT_EQ(kernel->blocks, 132);
    EXPECT_EQ(kernel->threads, 256);
  }
}

TEST(FaultDump, IsOfNoKernelWhereNoWarpFaultedOrItsCodeIsNotThere) {
  EXPECT_FALSE(FindBrokenKernel(MakeElf({Code(), Grids(), Warps({0, 0})})));
  EXPECT_FALSE(FindBrokenKernel(MakeElf({Code(), Grids(), Warps({kBad + kFunctionBytes})})));
  EXPECT_FALSE(FindBrokenKernel(MakeElf({Grids(), Warps({kBad})})));
  EXPECT_FALSE(FindBrokenKernel(Bytes{}));
}

TEST(FaultDump, MayBeDamagedAnywhere) {
  const Bytes dump = MakeElf({Code(), Grids(), Warps({kBad})});
  for (size_t size = 0; size < dump.size(); ++size) {
    const Bytes part(dump.begin(), dump.begin() + static_cast<int64_t>(size));
    (void)FindBrokenKernel(part);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    Bytes damaged = dump;
    for (int k = 0; k < 4; ++k) {
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    }
    (void)FindBrokenKernel(damaged);
  }
}

}  // namespace
}  // namespace fathom::device
