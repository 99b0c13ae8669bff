// What a Hugging Face tokenizer.json says, checked: everything that the tokenizer would have to do
// differently from a byte-level BPE is refused by the field's name. Values; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/bpe.h"

namespace fathom::text {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool special = false;     // dropped by Decode(skip_special_tokens)
  bool normalized = false;  // matched after the others, in what they left
};

struct TokenizerFile {
  std::vector<std::string> patterns;     // of the pre-tokenizer, in order
  std::vector<std::string> token_bytes;  // by id; empty in holes; added tokens have their text
  // Whether merging can give the id: it is in the vocabulary and written in the byte alphabet.
  std::vector<bool> is_mergeable;
  std::array<int32_t, 256> byte_ids;
  std::vector<Merge> merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added_tokens;
};

// kBadModel: "<name>: <field>: what was found, what was expected".
Result<TokenizerFile> ReadTokenizerJson(std::string_view contents, const std::string& name);

}  // namespace fathom::text
