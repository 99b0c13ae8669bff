// Tokenizer: text to token ids and back, from a Hugging Face tokenizer.json (byte-level BPE, the
// V3/V4 pre-tokenizer, added tokens). Immutable after Load; any thread. Ids equal those of the
// `tokenizers` library.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace fathom::text {

class Tokenizer {
 public:
  // `path`: a model folder's tokenizer.json. kBadModel names the field that is wrong.
  static Result<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  // From the file's bytes (`name` is for messages).
  static Result<std::unique_ptr<Tokenizer>> Parse(std::string_view contents,
                                                  const std::string& name);
  virtual ~Tokenizer() = default;

  enum class AddedTokens {
    kMatch,    // text of added tokens becomes their ids: control text that we wrote
    kAsPlain,  // it is ordinary text: anything from users, tools and documents
  };
  // Appends the ids of `text` (valid UTF-8). Adds no BOS.
  virtual void Encode(std::string_view text, AddedTokens mode, std::vector<int32_t>* ids) const = 0;

  // The bytes of one token; a control token's bytes are its text. Empty for ids outside the
  // vocabulary.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  // The id of an added token's exact text, or -1.
  virtual int32_t AddedTokenId(std::string_view text) const = 0;
  virtual bool IsAddedToken(int32_t id) const = 0;
  // One past the highest id.
  virtual int32_t vocab_size() const = 0;

  // The whole text of a list of ids: bytes concatenated, invalid UTF-8 to U+FFFD per maximal
  // subpart.
  virtual std::string Decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const = 0;
};

// The tokens that V4's prompt format and output parser need, by id; Find fails naming the first
// that is missing.
struct SpecialTokens {
  int32_t bos = -1, eos = -1, user = -1, assistant = -1, think_begin = -1, think_end = -1,
          dsml = -1;
  static Result<SpecialTokens> Find(const Tokenizer& tokenizer);
};

}  // namespace fathom::text
