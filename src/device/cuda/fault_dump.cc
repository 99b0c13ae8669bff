#include "device/cuda/fault_dump.h"

#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

namespace fathom::device {
namespace {

// Types of sections.
constexpr uint32_t kRelocatedCode = SHT_LOUSER + 7;
constexpr uint32_t kGridTable = SHT_LOUSER + 12;
constexpr uint32_t kWarpTable = SHT_LOUSER + 14;

// Entries as they have always been; newer drivers add to their ends.
struct GridEntry {
  uint64_t grid, context, function, entry_address, module, parent, params_offset;
  uint32_t kind, origin, status, num_registers;
  uint32_t grid_dim[3], block_dim[3];
};
struct WarpEntry {
  uint64_t error_address;
  uint32_t warp, valid_lanes, active_lanes, is_broken, has_error_address, padding;
};

// A T at an offset; zeros where that is not within.
template <typename T>
T ReadAt(std::span<const std::byte> bytes, uint64_t offset) {
  T value{};
  if (offset <= bytes.size() && sizeof(T) <= bytes.size() - offset) {
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
  }
  return value;
}
std::span<const std::byte> Within(std::span<const std::byte> bytes, uint64_t offset,
                                  uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) return {};
  return bytes.subspan(offset, size);
}

// The sections of an ELF file; none, where it is not one.
class Elf {
 public:
  explicit Elf(std::span<const std::byte> image)
      : image_(image), header_(ReadAt<Elf64_Ehdr>(image, 0)) {
    if (std::memcmp(header_.e_ident, ELFMAG, SELFMAG) != 0) return;
    if (header_.e_shentsize < sizeof(Elf64_Shdr)) return;
    const auto first = SectionAt(0);  // has what does not fit into the header
    const uint64_t count = header_.e_shnum == 0 ? first.sh_size : header_.e_shnum;
    num_sections_ = std::min(count, image.size() / header_.e_shentsize);
    names_ =
        Contents(SectionAt(header_.e_shstrndx == SHN_XINDEX ? first.sh_link : header_.e_shstrndx));
  }

  // visit(section), until it returns true.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (uint64_t i = 0; i < num_sections_; ++i) {
      if (visit(SectionAt(i))) return;
    }
  }
  // visit(entry) for each of a table, until it returns true.
  template <typename Entry, typename Visit>
  void ForEachEntry(uint32_t type, Visit visit) const {
    ForEach([&](const Elf64_Shdr& section) {
      const auto table = Contents(section);
      if (section.sh_type != type || section.sh_entsize < sizeof(Entry)) return false;
      for (uint64_t at = 0; at < table.size(); at += section.sh_entsize) {
        if (visit(ReadAt<Entry>(table, at))) return true;
      }
      return false;
    });
  }
  std::span<const std::byte> Contents(const Elf64_Shdr& section) const {
    if (section.sh_type == SHT_NOBITS) return {};
    return Within(image_, section.sh_offset, section.sh_size);
  }
  std::string_view Name(const Elf64_Shdr& section) const {
    if (section.sh_name >= names_.size()) return {};
    const auto* name = reinterpret_cast<const char*>(names_.data()) + section.sh_name;
    return {name, strnlen(name, names_.size() - section.sh_name)};
  }

 private:
  Elf64_Shdr SectionAt(uint64_t i) const {
    return ReadAt<Elf64_Shdr>(image_, header_.e_shoff + i * header_.e_shentsize);
  }

  const std::span<const std::byte> image_;
  const Elf64_Ehdr header_;
  uint64_t num_sections_ = 0;
  std::span<const std::byte> names_;
};

void EraseAll(std::string& text, std::string_view part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
}

// "void a::(anonymous namespace)::Kernel<1, a::B>(a::C)" becomes "Kernel<1, B>".
std::string ShortName(const std::string& mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> demangled(
      abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), std::free);
  if (demangled == nullptr) return mangled;
  std::string name = demangled.get();
  for (const char* part : {"(anonymous namespace)::", "fathom::", "kernels::"}) {
    EraseAll(name, part);
  }
  if (name.starts_with("void ")) name.erase(0, 5);
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) name.resize(i);
  }
  return name;
}

}  // namespace

std::optional<BrokenKernel> FindBrokenKernel(std::span<const std::byte> dump) {
  const Elf elf(dump);
  std::optional<uint64_t> error_address;
  elf.ForEachEntry<WarpEntry>(kWarpTable, [&](const WarpEntry& warp) {
    if (warp.has_error_address != 0) error_address = warp.error_address;
    return error_address.has_value();
  });
  if (!error_address) return std::nullopt;

  std::optional<BrokenKernel> kernel;
  uint64_t entry_address = 0;
  elf.ForEach([&](const Elf64_Shdr& section) {
    if (section.sh_type != kRelocatedCode) return false;
    const Elf code(elf.Contents(section));
    code.ForEach([&](const Elf64_Shdr& function) {
      constexpr std::string_view kCode = ".text.";
      const std::string_view name = code.Name(function);
      if (!name.starts_with(kCode) || *error_address - function.sh_addr >= function.sh_size) {
        return false;
      }
      kernel = {.name = ShortName(std::string(name.substr(kCode.size())))};
      entry_address = function.sh_addr;
      return true;
    });
    return kernel.has_value();
  });
  if (!kernel) return std::nullopt;
  elf.ForEachEntry<GridEntry>(kGridTable, [&](const GridEntry& grid) {
    if (grid.entry_address != entry_address) return false;
    const auto volume = [](const uint32_t (&d)[3]) { return static_cast<int>(d[0] * d[1] * d[2]); };
    kernel->blocks = volume(grid.grid_dim), kernel->threads = volume(grid.block_dim);
    return true;
  });
  return kernel;
}

}  // namespace fathom::device
