// tokenize_lines TOKENIZER.json < TEXTS > IDS: the far side of tests/oracle/tokenizer_parity.py.
// Each text is a 32-bit length and its bytes, each answer a 32-bit count and the ids, all
// little-endian. Processor time and speed on stderr.
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace {

double CpuSeconds(std::clock_t time) { return static_cast<double>(time) / CLOCKS_PER_SEC; }

}  // namespace

int main(int argc, char** argv) {
  using fathom::text::Tokenizer;
  if (argc != 2) {
    std::fprintf(stderr, "usage: tokenize_lines TOKENIZER.json < TEXTS > IDS\n");
    return 2;
  }
  const std::clock_t load_start = std::clock();
  const auto tokenizer = Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().message().c_str());
    return fathom::ExitCode(tokenizer.status());
  }
  const double load_seconds = CpuSeconds(std::clock() - load_start);
  std::clock_t encoding = 0;
  double num_bytes = 0;
  uint32_t size = 0;
  std::string text;
  std::vector<int32_t> ids;
  while (std::fread(&size, sizeof(size), 1, stdin) == 1) {
    text.resize(size);
    if (std::fread(text.data(), 1, size, stdin) != size) return 1;
    ids.clear();
    const std::clock_t start = std::clock();
    (*tokenizer)->Encode(text, Tokenizer::AddedTokens::kMatch, &ids);
    encoding += std::clock() - start;
    num_bytes += size;
    const uint32_t count = static_cast<uint32_t>(ids.size());
    std::fwrite(&count, sizeof(count), 1, stdout);
    std::fwrite(ids.data(), sizeof(int32_t), count, stdout);
  }
  std::fprintf(stderr, "loaded in %.2f s; %.1f MB encoded at %.1f MB/s\n", load_seconds,
               num_bytes / 1e6, num_bytes / 1e6 / CpuSeconds(encoding));
}
