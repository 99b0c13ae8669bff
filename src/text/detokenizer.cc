#include "text/detokenizer.h"

#include "text/unicode.h"

namespace fathom::text {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

}  // namespace

std::string IncrementalDetokenizer::Push(int32_t token_id) {
  pending_.append(tokenizer_.TokenBytes(token_id));
  std::string incomplete;
  std::string text = SanitizeUtf8(pending_, &incomplete);
  pending_ = std::move(incomplete);
  return text;
}

std::string IncrementalDetokenizer::Flush() {
  std::string text = SanitizeUtf8(pending_, nullptr);
  pending_.clear();
  return text;
}

std::string SanitizeUtf8(std::string_view bytes, std::string* incomplete) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t pos = 0; pos < bytes.size();) {
    const DecodedChar c = DecodeUtf8(bytes, pos);
    if (c.valid) {
      text.append(bytes.substr(pos, c.num_bytes));
      pos += c.num_bytes;
      continue;
    }
    bool at_end = false;
    const size_t size = MaximalSubpart(bytes, pos, &at_end);
    if (at_end && incomplete != nullptr) {
      incomplete->assign(bytes.substr(pos));
      return text;
    }
    text.append(kReplacement);
    pos += size;
  }
  if (incomplete != nullptr) incomplete->clear();
  return text;
}

}  // namespace fathom::text
