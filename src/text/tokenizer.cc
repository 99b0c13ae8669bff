#include "text/tokenizer.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <unordered_map>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/detokenizer.h"
#include "text/pre_tokenizer.h"
#include "text/tokenizer_json.h"

namespace fathom::text {
namespace {

constexpr int64_t kMaxFileBytes = 256 << 20;

class ByteLevelBpe final : public Tokenizer {
 public:
  ByteLevelBpe(TokenizerFile file, std::unique_ptr<PreTokenizer> pre_tokenizer)
      : token_bytes_(std::move(file.token_bytes)),
        added_tokens_(std::move(file.added_tokens)),
        encoder_(MakeVocabulary(file)),
        pre_tokenizer_(std::move(pre_tokenizer)),
        raw_matcher_(MatcherTexts(false)),
        normalized_matcher_(MatcherTexts(true)),
        is_added_(token_bytes_.size()),
        is_special_(token_bytes_.size()) {
    for (const AddedToken& token : added_tokens_) {
      id_of_added_token_.emplace(token.content, token.id);
      is_added_[token.id] = true;
      is_special_[token.id] = token.special;
    }
  }

  void Encode(std::string_view text, AddedTokens mode, std::vector<int32_t>* ids) const override {
    if (mode == AddedTokens::kAsPlain) return EncodePlain(text, ids);
    // The library matches in two passes: tokens marked "normalized" only in what the others left.
    EncodeMatching(raw_matcher_, text, ids, [&](std::string_view gap) {
      EncodeMatching(normalized_matcher_, gap, ids,
                     [&](std::string_view inner_gap) { EncodePlain(inner_gap, ids); });
    });
  }

  std::string_view TokenBytes(int32_t id) const override {
    return InVocabulary(id) ? std::string_view(token_bytes_[id]) : std::string_view();
  }

  int32_t AddedTokenId(std::string_view text) const override {
    const auto it = id_of_added_token_.find(text);
    return it != id_of_added_token_.end() ? it->second : -1;
  }

  bool IsAddedToken(int32_t id) const override { return InVocabulary(id) && is_added_[id]; }
  int32_t vocab_size() const override { return static_cast<int32_t>(token_bytes_.size()); }

  std::string Decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const override {
    std::string bytes;
    for (const int32_t id : ids) {
      if (skip_special_tokens && InVocabulary(id) && is_special_[id]) continue;
      bytes.append(TokenBytes(id));
    }
    return SanitizeUtf8(bytes, nullptr);
  }

 private:
  bool InVocabulary(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < token_bytes_.size();
  }

  BytePairEncoder::Vocabulary MakeVocabulary(const TokenizerFile& file) const {
    BytePairEncoder::Vocabulary vocabulary;
    vocabulary.token_bytes.resize(token_bytes_.size());
    for (size_t id = 0; id < token_bytes_.size(); ++id) {
      if (file.is_mergeable[id]) vocabulary.token_bytes[id] = token_bytes_[id];
    }
    vocabulary.byte_ids = file.byte_ids;
    vocabulary.merges = file.merges;
    vocabulary.whole_pieces = file.ignore_merges;
    return vocabulary;
  }

  std::vector<AddedTokenText> MatcherTexts(bool normalized) const {
    std::vector<AddedTokenText> texts;
    for (const AddedToken& token : added_tokens_) {
      if (token.normalized == normalized) texts.push_back({token.content, token.id});
    }
    return texts;
  }

  template <typename EncodeGap>
  static void EncodeMatching(const AddedTokenMatcher& matcher, std::string_view text,
                             std::vector<int32_t>* ids, const EncodeGap& encode_gap) {
    size_t done = 0;
    while (done < text.size()) {
      const AddedTokenMatcher::Match match = matcher.Find(text, done);
      encode_gap(text.substr(done, match.begin - done));
      if (match.begin == std::string_view::npos) return;
      ids->push_back(match.id);
      done = match.begin + match.size;
    }
  }

  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
    pre_tokenizer_->Split(text, [&](std::string_view piece) { encoder_.Encode(piece, ids); });
  }

  const std::vector<std::string> token_bytes_;
  const std::vector<AddedToken> added_tokens_;
  const BytePairEncoder encoder_;
  const std::unique_ptr<PreTokenizer> pre_tokenizer_;
  const AddedTokenMatcher raw_matcher_;
  const AddedTokenMatcher normalized_matcher_;
  std::unordered_map<std::string_view, int32_t> id_of_added_token_;
  std::vector<bool> is_added_;
  std::vector<bool> is_special_;
};

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const int64_t size = in ? static_cast<int64_t>(in.tellg()) : -1;
  if (size < 0) return BadModel(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  if (size > kMaxFileBytes) {
    return BadModel(fmt::format("{}: {} bytes, expected at most {}", path, size, kMaxFileBytes));
  }
  std::string contents(size, '\0');
  in.seekg(0);
  in.read(contents.data(), size);
  if (!in) return BadModel(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  return contents;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string contents, ReadFile(path));
  return Parse(contents, path);
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view contents,
                                                    const std::string& name) {
  ASSIGN_OR_RETURN(TokenizerFile file, ReadTokenizerJson(contents, name));
  auto pre_tokenizer = MakePreTokenizer(file.patterns);
  if (!pre_tokenizer.ok()) {
    return BadModel(fmt::format("{}: pre_tokenizer: {}", name, pre_tokenizer.status().message()));
  }
  return std::unique_ptr<Tokenizer>(
      std::make_unique<ByteLevelBpe>(std::move(file), std::move(*pre_tokenizer)));
}

Result<SpecialTokens> SpecialTokens::Find(const Tokenizer& tokenizer) {
  SpecialTokens tokens;
  const std::pair<const char*, int32_t*> wanted[] = {
      {"<｜begin▁of▁sentence｜>", &tokens.bos},
      {"<｜end▁of▁sentence｜>", &tokens.eos},
      {"<｜User｜>", &tokens.user},
      {"<｜Assistant｜>", &tokens.assistant},
      {"<think>", &tokens.think_begin},
      {"</think>", &tokens.think_end},
      {"｜DSML｜", &tokens.dsml},
  };
  for (const auto& [text, id] : wanted) {
    *id = tokenizer.AddedTokenId(text);
    if (*id < 0) {
      return BadModel(
          fmt::format("tokenizer.json: added_tokens: no {}, expected V4's control tokens", text));
    }
  }
  return tokens;
}

}  // namespace fathom::text
