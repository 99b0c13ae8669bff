#include <fmt/format.h>

#include <map>
#include <sstream>

#include "apps/fathom/commands.h"
#include "apps/fathom/forced_choices.h"
#include "apps/fathom/model_session.h"
#include "checkpoint/safetensors_writer.h"
#include "json/json.h"
#include "kv_cache/kv_layout.h"
#include "runtime/logprobs.h"
#include "runtime/scorer.h"

namespace fathom::app {
namespace {

using checkpoint::FileDType;
using checkpoint::SafetensorsWriter;
using checkpoint::TensorInfo;
using TokenLists = std::vector<std::vector<int32_t>>;

Result<std::vector<int32_t>> ParseLine(const std::string& line) {
  ASSIGN_OR_RETURN(const json::Value value, json::Parse(line));
  const json::Value* tokens = value.Find("tokens");
  if (tokens == nullptr || !tokens->is_array())
    return InvalidArgument("expected {\"tokens\": [ids]}");
  std::vector<int32_t> ids;
  for (const json::Value& item : tokens->items()) {
    const auto id = item.ToInt64();
    if (!id || *id < 0 || *id > INT32_MAX) {
      return InvalidArgument("token " + json::Dump(item) + " is not an id");
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  if (ids.empty()) return InvalidArgument("an empty list of tokens, expected at least one");
  return ids;
}

Result<TokenLists> ReadTokenLists(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string contents, ReadTextFile(path));
  TokenLists lists;
  std::istringstream lines(contents);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    auto tokens = ParseLine(line);
    if (!tokens.ok()) {
      return InvalidArgument(fmt::format("{}:{}: {}", path, number, tokens.status().message()));
    }
    lists.push_back(*std::move(tokens));
  }
  if (lists.empty()) return InvalidArgument(path + ": no token lists");
  return lists;
}

TensorInfo Tensor(std::string name, FileDType dtype, std::vector<int64_t> shape) {
  int64_t bytes = checkpoint::BytesPerElement(dtype);
  for (const int64_t size : shape) bytes *= size;
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape), .bytes = bytes};
}

// Prints a line for every list, in the lists' order, and writes the logits where they are wanted.
class ScorePrinter final : public runtime::ScoreVisitor {
 public:
  ScorePrinter(const TokenLists& lists, int num_top, SafetensorsWriter* logits)
      : lists_(lists), num_top_(num_top), logits_(logits), lines_(lists.size()) {}

  void OnStep(std::span<const runtime::TokenPlace> rows) override {
    rows_ = rows;
    if (forced_ != nullptr) forced_->SetRows(rows);
  }
  void set_forced(ForcedChoices* forced) { forced_ = forced; }
  std::span<const runtime::TokenPlace> rows() const { return rows_; }

  void OnLogits(const runtime::TokenPlace& place, std::span<const float> logits) override {
    const std::vector<int32_t>& tokens = lists_[place.sequence_idx];
    const auto position = static_cast<size_t>(place.position);
    const bool is_last = position + 1 == tokens.size();
    Line& line = lines_[place.sequence_idx];
    const auto scored =
        runtime::ComputeLogprobs(logits, is_last ? 0 : tokens[position + 1], num_top_);
    if (!is_last) line.logprobs.push_back(scored.chosen.logprob);
    if (num_top_ > 0) line.top.push_back(scored.top);
    if (logits_ != nullptr && write_status_.ok()) {
      write_status_ = logits_->WriteAt(place.sequence_idx,
                                       place.position * static_cast<int64_t>(logits.size_bytes()),
                                       std::as_bytes(logits));
    }
    line.done = is_last;
    PrintFinished();
  }

  const Status& write_status() const { return write_status_; }

 private:
  struct Line {
    std::vector<float> logprobs;
    std::vector<std::vector<request::TokenLogprob>> top;
    bool done = false;
  };

  void PrintFinished() {
    while (next_ < lines_.size() && lines_[next_].done) {
      Print(lines_[next_]);
      lines_[next_++] = Line();
    }
  }

  void Print(const Line& line) const {
    fmt::print("{{\"logprobs\": [{}]", fmt::join(line.logprobs, ", "));
    if (num_top_ > 0) {
      fmt::print(", \"top_logprobs\": [");
      for (size_t i = 0; i < line.top.size(); ++i) {
        fmt::print("{}[", i == 0 ? "" : ", ");
        for (size_t j = 0; j < line.top[i].size(); ++j) {
          fmt::print("{}{{\"token\": {}, \"logprob\": {}}}", j == 0 ? "" : ", ",
                     line.top[i][j].token_id, line.top[i][j].logprob);
        }
        fmt::print("]");
      }
      fmt::print("]");
    }
    fmt::print("}}\n");
  }

  const TokenLists& lists_;
  const int num_top_;
  SafetensorsWriter* const logits_;
  std::vector<Line> lines_;
  size_t next_ = 0;
  std::span<const runtime::TokenPlace> rows_;
  ForcedChoices* forced_ = nullptr;
  Status write_status_;
};

// Writes what an oracle compares layer by layer: routing.LIST.LAYER [tokens, experts per token] of
// score-routed layers, index.LIST.LAYER [tokens, index_topk], padded with -1, of ratio-4 layers,
// and streams.LIST.LAYER [tokens, hc_mult, hidden], the residual streams after each layer.
class TraceWriter final : public model::ChoiceRecorder {
 public:
  static Result<std::unique_ptr<TraceWriter>> Create(const std::string& path,
                                                     const TokenLists& lists,
                                                     const config::ModelConfig& config,
                                                     config::Numerics numerics,
                                                     const ScorePrinter& places) {
    auto writer = std::unique_ptr<TraceWriter>(new TraceWriter(config, places));
    std::vector<TensorInfo> tensors;
    const auto add = [&](const char* kind, size_t list, int layer, FileDType dtype,
                         std::vector<int64_t> row) {
      writer->tensor_of_[{kind[0], list, layer}] = tensors.size();
      row.insert(row.begin(), static_cast<int64_t>(lists[list].size()));
      tensors.push_back(Tensor(fmt::format("{}.{}.{}", kind, list, layer), dtype, std::move(row)));
    };
    const FileDType activation =
        numerics == config::Numerics::kFp32 ? FileDType::kF32 : FileDType::kBF16;
    for (size_t list = 0; list < lists.size(); ++list) {
      for (int layer = 0; layer < config.num_layers; ++layer) {
        if (config.routing_kind(layer) == config::RoutingKind::kScore) {
          add("routing", list, layer, FileDType::kI32, {config.num_experts_per_token});
        }
        if (config.layer_kind(layer) == config::LayerKind::kC4) {
          add("index", list, layer, FileDType::kI32, {config.index_topk});
        }
        add("streams", list, layer, activation, {config.hc_mult, config.hidden_size});
      }
    }
    ASSIGN_OR_RETURN(writer->file_, SafetensorsWriter::Create(path, tensors));
    return writer;
  }

  void OnRouting(int layer, int row, std::span<const int32_t> ids) override {
    Write('r', layer, row, std::as_bytes(ids));
  }
  void OnIndex(int layer, int row, std::span<const int32_t> entries) override {
    std::vector<int32_t> padded(static_cast<size_t>(config_.index_topk), -1);
    std::copy(entries.begin(), entries.end(), padded.begin());
    Write('i', layer, row, std::as_bytes(std::span(padded)));
  }
  void OnStreams(int layer, std::span<const std::byte> streams) override {
    const size_t row_bytes = streams.size() / places_.rows().size();
    for (size_t row = 0; row < places_.rows().size(); ++row) {
      Write('s', layer, static_cast<int>(row), streams.subspan(row * row_bytes, row_bytes));
    }
  }
  Status Finish() {
    RETURN_IF_ERROR(first_error_);
    return file_->Finish();
  }

 private:
  TraceWriter(const config::ModelConfig& config, const ScorePrinter& places)
      : config_(config), places_(places) {}

  void Write(char kind, int layer, int row, std::span<const std::byte> bytes) {
    const runtime::TokenPlace& place = places_.rows()[static_cast<size_t>(row)];
    const auto tensor = tensor_of_.find({kind, place.sequence_idx, layer});
    if (tensor == tensor_of_.end() || !first_error_.ok()) return;  // hash-routed
    first_error_ =
        file_->WriteAt(tensor->second, place.position * static_cast<int64_t>(bytes.size()), bytes);
  }

  const config::ModelConfig& config_;
  const ScorePrinter& places_;
  std::map<std::tuple<char, size_t, int>, size_t> tensor_of_;
  std::unique_ptr<SafetensorsWriter> file_;
  Status first_error_;
};

Result<std::unique_ptr<SafetensorsWriter>> CreateLogitsFile(const std::string& path,
                                                            const TokenLists& lists,
                                                            int vocab_size) {
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < lists.size(); ++i) {
    tensors.push_back(Tensor(fmt::format("logits.{}", i), FileDType::kF32,
                             {static_cast<int64_t>(lists[i].size()), vocab_size}));
  }
  return SafetensorsWriter::Create(path, tensors);
}

}  // namespace

Status RunScore(const ScoreOptions& options) {
  ASSIGN_OR_RETURN(const TokenLists lists, ReadTokenLists(options.input));
  size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list.size());

  ModelOptions model_options = options.model;
  const int num_seqs = std::min(options.batch, static_cast<int>(lists.size()));
  const int step_tokens = MaxBatchedTokens(model_options, device::DeviceKind::kCpu);
  const int chunk = options.chunk > 0 ? options.chunk : std::max(1, step_tokens / num_seqs);
  model_options.max_num_seqs = num_seqs;
  model_options.max_num_batched_tokens = std::min(chunk, static_cast<int>(longest)) * num_seqs;
  if (model_options.max_model_len == 0) model_options.max_model_len = static_cast<int64_t>(longest);
  ASSIGN_OR_RETURN(const ModelSession session, OpenModel(model_options, SessionText::kTokensOnly));

  const kv_cache::KvLayout layout =
      kv_cache::MakeKvLayout(session.config, session.numerics, session.index_dtype);
  ASSIGN_OR_RETURN(
      const auto scorer,
      runtime::Scorer::Make({.vocab_size = session.config.vocab_size,
                             .sliding_window = session.config.sliding_window,
                             .chunk_tokens = std::min(chunk, static_cast<int>(longest)),
                             .num_seqs = num_seqs,
                             .max_model_len = session.limits.max_model_len,
                             .limits = session.limits},
                            layout, session.model(), session.device()));
  std::unique_ptr<SafetensorsWriter> logits;
  if (!options.logits.empty()) {
    ASSIGN_OR_RETURN(logits, CreateLogitsFile(options.logits, lists, session.config.vocab_size));
  }
  ScorePrinter printer(lists, options.top_logprobs, logits.get());
  std::unique_ptr<TraceWriter> trace;
  if (!options.trace.empty()) {
    ASSIGN_OR_RETURN(trace, TraceWriter::Create(options.trace, lists, session.config,
                                                session.numerics, printer));
  }
  std::unique_ptr<ForcedChoices> forced;
  if (!options.choices.empty() || !options.replay.empty()) {
    if (!session.on_gpu()) {
      return InvalidArgument("--choices and --replay are for a GPU");
    }
    const bool replay = !options.replay.empty();
    ASSIGN_OR_RETURN(forced, ForcedChoices::Open(replay ? options.replay : options.choices,
                                                 session.config, replay));
    forced->set_trace(trace.get());
    printer.set_forced(forced.get());
  }
  model::ChoiceRecorder* recorder = trace.get();
  if (forced != nullptr) recorder = forced.get();
  RETURN_IF_ERROR(scorer->Run(lists, printer, recorder));
  RETURN_IF_ERROR(printer.write_status());
  if (logits) RETURN_IF_ERROR(logits->Finish());
  if (trace) RETURN_IF_ERROR(trace->Finish());
  return OkStatus();
}

}  // namespace fathom::app
