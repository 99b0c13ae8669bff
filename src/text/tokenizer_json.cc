#include "text/tokenizer_json.h"

#include <fmt/format.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "json/json.h"
#include "text/unicode.h"

namespace fathom::text {
namespace {

using json::Value;

// Real vocabularies have up to some 300,000 tokens; the bounds keep a hostile file's tables small.
constexpr int64_t kMaxId = BytePairEncoder::kMaxId;
constexpr int64_t kMaxNodes = 8'000'000;
constexpr size_t kMaxAddedTokenBytes = 1024;

// ByteLevel with use_regex splits by this itself.
constexpr char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A text or value as an error message shows it.
std::string ShowText(std::string_view text) {
  return text.size() <= 80 ? json::Quote(text) : fmt::format("a text of {} bytes", text.size());
}

std::string Show(const Value* value) {
  if (value == nullptr) return "nothing";
  switch (value->kind()) {
    case Value::Kind::kArray:
      return "a list";
    case Value::Kind::kObject:
      return "an object";
    case Value::Kind::kString:
      return ShowText(value->AsString());
    case Value::Kind::kNumber:
      return value->lexeme().size() <= 80 ? value->lexeme() : "a very long number";
    default:
      return json::Dump(*value);
  }
}

Status Expected(const std::string& field, const Value* found, std::string_view expected) {
  return BadModel(fmt::format("{}: found {}, expected {}", field, Show(found), expected));
}

bool IsNullOr(const Value* value, bool (*is_neutral)(const Value&)) {
  return value == nullptr || value->is_null() || is_neutral(*value);
}
bool IsFalse(const Value& value) { return value.is_bool() && !value.AsBool(); }
bool IsEmptyString(const Value& value) { return value.is_string() && value.AsString().empty(); }
bool IsZero(const Value& value) { return value.is_number() && value.ToDouble() == 0.0; }

std::optional<int32_t> TokenId(const Value* value) {
  const auto id = value != nullptr ? value->ToInt64() : std::nullopt;
  if (!id.has_value() || *id < 0 || *id > kMaxId) return std::nullopt;
  return static_cast<int32_t>(*id);
}

Status ExpectedTokenId(const std::string& field, const Value* found) {
  return Expected(field, found, fmt::format("a token id of 0 to {}", kMaxId));
}

Result<bool> OptionalBool(const Value& object, std::string_view key, bool otherwise,
                          const std::string& field) {
  const Value* value = object.Find(key);
  if (value == nullptr || value->is_null()) return otherwise;
  if (!value->is_bool()) return Expected(fmt::format("{}.{}", field, key), value, "true or false");
  return value->AsBool();
}

std::string TypeOf(const Value& object) {
  const Value* type = object.Find("type");
  return type != nullptr && type->is_string() ? type->AsString() : "";
}

// GPT-2's alphabet: every byte as one printable character. Printable bytes stand for themselves,
// the others are numbered from U+0100 on.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    byte_of_.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      byte_of_[printable ? byte : next++] = static_cast<int16_t>(byte);
    }
  }

  // False when a character is not of the alphabet.
  bool Decode(std::string_view key, std::string* bytes) const {
    bytes->clear();
    for (size_t pos = 0; pos < key.size();) {
      const DecodedChar c = DecodeUtf8(key, pos);
      if (c.code_point >= byte_of_.size() || byte_of_[c.code_point] < 0) return false;
      bytes->push_back(static_cast<char>(byte_of_[c.code_point]));
      pos += c.num_bytes;
    }
    return true;
  }

 private:
  std::array<int16_t, 0x144> byte_of_;
};

// Fills one TokenizerFile from one document.
class Reader {
 public:
  explicit Reader(const Value& root) : root_(root) {}

  Result<TokenizerFile> Read() {
    RETURN_IF_ERROR(CheckNormalizer());
    RETURN_IF_ERROR(CheckDecoder());
    RETURN_IF_ERROR(ReadPreTokenizer());
    RETURN_IF_ERROR(ReadModel());
    RETURN_IF_ERROR(ReadAddedTokens());
    return std::move(file_);
  }

 private:
  Status CheckNormalizer() const;
  Status CheckDecoder() const;
  Status ReadPreTokenizer();
  Status ReadSplit(const Value& step, const std::string& field);
  Status ReadByteLevel(const Value& step, const std::string& field);
  Status ReadModel();
  Status ReadVocabulary(const Value& vocab);
  Status ReadMerges(const Value& merges);
  Status ReadMerge(const Value& value);
  Result<int32_t> MergeToken(std::string_view key) const;
  Status ReadAddedTokens();
  Status ReadAddedToken(const Value& value, const std::string& field);
  std::string* Slot(int32_t id);

  const Value& root_;
  const ByteAlphabet alphabet_;
  TokenizerFile file_;
  std::unordered_map<std::string_view, int32_t> id_of_key_;  // the vocabulary's
  std::unordered_set<std::string_view> added_contents_;
};

Status Reader::CheckNormalizer() const {
  const Value* normalizer = root_.Find("normalizer");
  if (normalizer == nullptr || normalizer->is_null()) return OkStatus();
  const Value* steps = normalizer->Find("normalizers");
  if (TypeOf(*normalizer) == "Sequence" && steps != nullptr && steps->is_array()) {
    if (steps->items().empty()) return OkStatus();
    return Expected("normalizer.normalizers[0].type", steps->items()[0].Find("type"),
                    "no normalizer (text is encoded as it is)");
  }
  return Expected("normalizer.type", normalizer->Find("type"),
                  "no normalizer (text is encoded as it is)");
}

Status Reader::CheckDecoder() const {
  const Value* decoder = root_.Find("decoder");
  if (decoder == nullptr || TypeOf(*decoder) == "ByteLevel") return OkStatus();
  return Expected("decoder.type", decoder->Find("type"), "\"ByteLevel\"");
}

Status Reader::ReadPreTokenizer() {
  const Value* pre_tokenizer = root_.Find("pre_tokenizer");
  if (pre_tokenizer == nullptr || !pre_tokenizer->is_object()) {
    return Expected("pre_tokenizer", pre_tokenizer, "an object");
  }
  if (TypeOf(*pre_tokenizer) != "Sequence") return ReadByteLevel(*pre_tokenizer, "pre_tokenizer");
  const Value* steps = pre_tokenizer->Find("pretokenizers");
  if (steps == nullptr || !steps->is_array() || steps->items().empty()) {
    return Expected("pre_tokenizer.pretokenizers", steps, "a list of steps");
  }
  const size_t num_steps = steps->items().size();
  for (size_t i = 0; i < num_steps; ++i) {
    const Value& step = steps->items()[i];
    const std::string field = fmt::format("pre_tokenizer.pretokenizers[{}]", i);
    if (i + 1 == num_steps) return ReadByteLevel(step, field);
    RETURN_IF_ERROR(ReadSplit(step, field));
  }
  return OkStatus();
}

Status Reader::ReadSplit(const Value& step, const std::string& field) {
  const std::string type = TypeOf(step);
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, OptionalBool(step, "individual_digits", false, field));
    file_.patterns.push_back(individual ? R"(\p{N})" : R"(\p{N}+)");
    return OkStatus();
  }
  if (type != "Split") {
    return Expected(field + ".type", step.Find("type"),
                    "\"Split\" or \"Digits\", \"ByteLevel\" last");
  }
  const Value* behavior = step.Find("behavior");
  if (behavior == nullptr || !behavior->is_string() || behavior->AsString() != "Isolated") {
    return Expected(field + ".behavior", behavior, "\"Isolated\"");
  }
  if (!IsNullOr(step.Find("invert"), IsFalse)) {
    return Expected(field + ".invert", step.Find("invert"), "false");
  }
  const Value* pattern = step.Find("pattern");
  const Value* regex = pattern != nullptr ? pattern->Find("Regex") : nullptr;
  if (regex == nullptr || !regex->is_string()) {
    return Expected(field + ".pattern.Regex", regex, "a regular expression");
  }
  file_.patterns.push_back(regex->AsString());
  return OkStatus();
}

Status Reader::ReadByteLevel(const Value& step, const std::string& field) {
  if (TypeOf(step) != "ByteLevel") {
    return Expected(field + ".type", step.Find("type"), "\"ByteLevel\" as the last step");
  }
  if (!IsNullOr(step.Find("add_prefix_space"), IsFalse)) {
    return Expected(field + ".add_prefix_space", step.Find("add_prefix_space"), "false");
  }
  ASSIGN_OR_RETURN(const bool use_regex, OptionalBool(step, "use_regex", true, field));
  if (use_regex) file_.patterns.push_back(kGpt2Pattern);
  return OkStatus();
}

Status Reader::ReadModel() {
  const Value* model = root_.Find("model");
  if (model == nullptr || !model->is_object()) return Expected("model", model, "an object");
  const Value* type = model->Find("type");
  if (type != nullptr && TypeOf(*model) != "BPE") return Expected("model.type", type, "\"BPE\"");
  if (!IsNullOr(model->Find("dropout"), IsZero)) {
    return Expected("model.dropout", model->Find("dropout"), "null");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!IsNullOr(model->Find(key), IsEmptyString)) {
      return Expected(fmt::format("model.{}", key), model->Find(key), "null");
    }
  }
  ASSIGN_OR_RETURN(file_.ignore_merges, OptionalBool(*model, "ignore_merges", false, "model"));
  const Value* vocab = model->Find("vocab");
  if (vocab == nullptr || !vocab->is_object()) return Expected("model.vocab", vocab, "an object");
  const Value* merges = model->Find("merges");
  if (merges == nullptr || !merges->is_array()) return Expected("model.merges", merges, "a list");
  RETURN_IF_ERROR(ReadVocabulary(*vocab));
  return ReadMerges(*merges);
}

std::string* Reader::Slot(int32_t id) {
  if (static_cast<size_t>(id) >= file_.token_bytes.size()) {
    file_.token_bytes.resize(id + 1);
    file_.is_mergeable.resize(id + 1);
  }
  return &file_.token_bytes[id];
}

Status Reader::ReadVocabulary(const Value& vocab) {
  file_.byte_ids.fill(-1);
  id_of_key_.reserve(vocab.members().size());
  std::string bytes;
  for (const json::Member& member : vocab.members()) {
    const auto field = [&] { return fmt::format("model.vocab[{}]", ShowText(member.key)); };
    const auto id = TokenId(&member.value);
    if (!id.has_value()) return ExpectedTokenId(field(), &member.value);
    std::string* slot = Slot(*id);
    if (!slot->empty()) return BadModel(fmt::format("{}: id {} is used twice", field(), *id));
    if (member.key.empty()) return BadModel(fmt::format("{}: an empty token", field()));
    file_.is_mergeable[*id] = alphabet_.Decode(member.key, &bytes);
    *slot = file_.is_mergeable[*id] ? bytes : member.key;
    if (bytes.size() == 1) file_.byte_ids[static_cast<uint8_t>(bytes[0])] = *id;
    id_of_key_.emplace(member.key, *id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (file_.byte_ids[byte] >= 0) continue;
    return BadModel(
        fmt::format("model.vocab: no token for byte 0x{:02x}, expected one for each byte", byte));
  }
  return OkStatus();
}

Status Reader::ReadMerges(const Value& merges) {
  if (merges.items().size() > BytePairEncoder::kMaxMerges) {
    return BadModel(fmt::format("model.merges: {} merges, expected at most {}",
                                merges.items().size(), BytePairEncoder::kMaxMerges));
  }
  file_.merges.reserve(merges.items().size());
  for (size_t i = 0; i < merges.items().size(); ++i) {
    const Status status = ReadMerge(merges.items()[i]);
    if (!status.ok()) return BadModel(fmt::format("model.merges[{}]: {}", i, status.message()));
  }
  return OkStatus();
}

Status Reader::ReadMerge(const Value& value) {
  // Files have "left right" or, since tokens may contain spaces, ["left", "right"].
  std::string_view left;
  std::string_view right;
  if (value.is_string()) {
    const std::string_view both = value.AsString();
    const size_t space = both.find(' ');
    if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos) {
      return BadModel(fmt::format("found {}, expected two tokens and a space", Show(&value)));
    }
    left = both.substr(0, space);
    right = both.substr(space + 1);
  } else if (value.is_array() && value.items().size() == 2 && value.items()[0].is_string() &&
             value.items()[1].is_string()) {
    left = value.items()[0].AsString();
    right = value.items()[1].AsString();
  } else {
    return BadModel(fmt::format("found {}, expected two tokens", Show(&value)));
  }
  Merge merge;
  ASSIGN_OR_RETURN(merge.left, MergeToken(left));
  ASSIGN_OR_RETURN(merge.right, MergeToken(right));
  ASSIGN_OR_RETURN(merge.result, MergeToken(std::string(left).append(right)));
  file_.merges.push_back(merge);
  return OkStatus();
}

Result<int32_t> Reader::MergeToken(std::string_view key) const {
  const auto it = id_of_key_.find(key);
  if (it != id_of_key_.end() && file_.is_mergeable[it->second]) return it->second;
  return BadModel(fmt::format("{} is no byte-level token of model.vocab", ShowText(key)));
}

Status Reader::ReadAddedTokens() {
  const Value* added_tokens = root_.Find("added_tokens");
  if (added_tokens == nullptr || added_tokens->is_null()) return OkStatus();
  if (!added_tokens->is_array()) return Expected("added_tokens", added_tokens, "a list");
  for (size_t i = 0; i < added_tokens->items().size(); ++i) {
    RETURN_IF_ERROR(ReadAddedToken(added_tokens->items()[i], fmt::format("added_tokens[{}]", i)));
  }
  return OkStatus();
}

Status Reader::ReadAddedToken(const Value& value, const std::string& field) {
  AddedToken token;
  const auto id = TokenId(value.Find("id"));
  if (!id.has_value()) return ExpectedTokenId(field + ".id", value.Find("id"));
  token.id = *id;
  const Value* content = value.Find("content");
  if (content == nullptr || !content->is_string() || content->AsString().empty() ||
      content->AsString().size() > kMaxAddedTokenBytes) {
    return Expected(field + ".content", content,
                    fmt::format("a text of 1 to {} bytes", kMaxAddedTokenBytes));
  }
  token.content = content->AsString();
  for (const char* key : {"single_word", "lstrip", "rstrip"}) {
    if (!IsNullOr(value.Find(key), IsFalse)) {
      return Expected(fmt::format("{}.{}", field, key), value.Find(key), "false");
    }
  }
  ASSIGN_OR_RETURN(token.special, OptionalBool(value, "special", false, field));
  ASSIGN_OR_RETURN(token.normalized, OptionalBool(value, "normalized", !token.special, field));

  if (!added_contents_.insert(content->AsString()).second) {
    return BadModel(fmt::format("{}: {} is added twice", field, Show(content)));
  }
  const auto in_vocab = id_of_key_.find(token.content);
  if (in_vocab != id_of_key_.end() && in_vocab->second != token.id) {
    return BadModel(fmt::format("{}: {} has id {} here and {} in model.vocab", field, Show(content),
                                token.id, in_vocab->second));
  }
  std::string* slot = Slot(token.id);
  if (!slot->empty() && in_vocab == id_of_key_.end()) {
    return BadModel(fmt::format("{}: id {} is used twice", field, token.id));
  }
  if (!file_.is_mergeable[token.id]) *slot = token.content;
  file_.added_tokens.push_back(std::move(token));
  return OkStatus();
}

}  // namespace

Result<TokenizerFile> ReadTokenizerJson(std::string_view contents, const std::string& name) {
  auto root = json::Parse(contents, {.max_depth = 32, .max_nodes = kMaxNodes});
  if (!root.ok()) return BadModel(fmt::format("{}: {}", name, root.status().message()));
  auto file = Reader(*root).Read();
  if (!file.ok()) return BadModel(fmt::format("{}: {}", name, file.status().message()));
  return file;
}

}  // namespace fathom::text
