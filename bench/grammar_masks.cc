// What grammars add to a step: N sequences, each held to a form of its own, over a real vocabulary.
//
//   grammar_masks_bench TOKENIZER_JSON [SEQUENCES] [STEPS] [FORWARD_MS]
//
// A step is: Start, a forward pass (here a sleep), Wait, and the choice of a token by greedy
// sampling over random logits, as in ModelRunner::Run. Printed are quantiles over steps of what
// stands in the step's way: Start, Wait, and masked sampling beyond sampling without a mask.
#include "runtime/grammar_masks.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "runtime/sampler.h"
#include "text/grammar_compiler.h"
#include "text/output_format.h"

namespace {

using namespace fathom;
using Clock = std::chrono::steady_clock;

constexpr int kMaxOutput = 500;  // tokens, then a sequence begins anew

double ThreadCpuMs() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

json::Value Json(std::string_view text) { return *json::Parse(text); }

std::vector<std::string> Formats() {
  const json::Value schema = Json(R"({"type":"object","properties":{
      "title":{"type":"string","maxLength":120},"year":{"type":"integer","minimum":1900,"maximum":2100},
      "tags":{"type":"array","items":{"type":"string"}},"kind":{"enum":["book","film","song"]},
      "people":{"type":"array","items":{"type":"object","properties":{"name":{"type":"string"},
        "role":{"type":"string"},"age":{"type":"number"}},"required":["name","role"]}}},
      "required":["title","year","tags","kind","people"]})");
  json::Value tools = json::Value::Array();
  for (const char* name : {"read_file", "write_file", "search", "run", "fetch"}) {
    json::Value function = Json(R"({"parameters":{"type":"object","properties":{
        "path":{"type":"string"},"content":{"type":"string"},"limit":{"type":"integer"},
        "options":{"type":"object","properties":{"all":{"type":"boolean"}}}},"required":["path"]}})");
    function.Set("name", json::Value::String(name));
    tools.items().push_back(json::Value::Object({{"function", function}}));
  }
  using text::StructuralTag;
  return {
      StructuralTag({.content = text::JsonSchemaFormat(schema)}),
      StructuralTag({.content = text::JsonObjectFormat()}),
      StructuralTag({.calls = text::ToolCallFormat{.tools = tools, .is_required = true}}),
      StructuralTag({.in_reasoning = true, .content = text::JsonSchemaFormat(schema)}),
      StructuralTag({.content = text::RegexFormat("([A-Z][a-z]+ )+[0-9]{4}-[0-9]{2}-[0-9]{2}")})};
}

std::vector<std::shared_ptr<const text::Grammar>> Compile(text::GrammarCompiler& compiler) {
  std::vector<std::shared_ptr<const text::Grammar>> grammars;
  for (const std::string& format : Formats()) {
    const auto start = Clock::now();
    std::promise<text::GrammarCompiler::Compiled> promise;
    compiler.Compile(format, [&](const auto& compiled) { promise.set_value(compiled); });
    const auto compiled = promise.get_future().get();
    if (!compiled.ok()) {
      std::fprintf(stderr, "%s\n", compiled.status().message().c_str());
      std::exit(1);
    }
    std::printf("format %zu: compiled in %.0f ms, %.1f MB\n", grammars.size(), MsSince(start),
                static_cast<double>((*compiled)->memory_bytes()) / 1e6);
    grammars.push_back(*compiled);
  }
  return grammars;
}

void Print(const char* name, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) {
    return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
  };
  std::printf("%-44s p50 %7.3f  p90 %7.3f  p99 %7.3f  max %7.3f ms\n", name, at(0.5), at(0.9),
              at(0.99), values.back());
}

// One sequence: its grammar, its output so far and this step's logits.
struct Sequence {
  std::shared_ptr<const text::Grammar> grammar;
  std::shared_ptr<request::TokenConstraint> constraint;
  std::vector<int32_t> tokens;  // a prompt of one, then the output
};

class Bench {
 public:
  Bench(const text::Tokenizer& tokenizer, int num_sequences, int num_threads)
      : vocab_(static_cast<size_t>(tokenizer.vocab_size())),
        compiler_(
            text::GrammarCompiler::Make(tokenizer, *text::SpecialTokens::Find(tokenizer), {})),
        eos_(text::SpecialTokens::Find(tokenizer)->eos),
        masks_(tokenizer.vocab_size(), num_threads),
        sampler_(tokenizer.vocab_size(), {eos_}, nullptr),
        grammars_(Compile(*compiler_)) {
    std::normal_distribution<float> normal;
    // Rows at other places of one long table of random logits.
    table_.resize(vocab_ + 4096 * static_cast<size_t>(num_sequences));
    for (float& x : table_) x = normal(random_);
    request_.prompt_token_ids = {0};
    request_.sampling.temperature = 0;
    for (int i = 0; i < num_sequences; ++i) {
      const auto& grammar = grammars_[static_cast<size_t>(i) % grammars_.size()];
      sequences_.push_back({grammar, grammar->NewConstraint(), {0}});
    }
  }

  // Each form by itself: the time to take a token and to find the next mask.
  void RunAlone(int num_steps);
  void Run(int num_steps, double forward_ms);

 private:
  // Milliseconds to sample all rows, with their masks or without; keeps the tokens when masked.
  double Sample(std::span<const runtime::GrammarMasks::Mask> masks, bool masked);

  const size_t vocab_;
  const std::unique_ptr<text::GrammarCompiler> compiler_;
  const int32_t eos_;
  runtime::GrammarMasks masks_;
  runtime::Sampler sampler_;
  std::mt19937 random_{1};
  std::vector<float> table_;
  request::Request request_;
  const std::vector<std::shared_ptr<const text::Grammar>> grammars_;
  std::vector<Sequence> sequences_;
};

double Bench::Sample(std::span<const runtime::GrammarMasks::Mask> masks, bool masked) {
  std::vector<runtime::SampleRow> rows;
  std::vector<request::SequenceResult> results(sequences_.size());
  std::vector<request::SequenceResult*> pointers;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const std::span<const float> logits(table_.data() + random_() % (table_.size() - vocab_),
                                        vocab_);
    rows.push_back({.logits = logits,
                    .request = &request_,
                    .all_token_ids = sequences_[i].tokens,
                    .mask = masked ? masks[i].words : std::span<const uint32_t>()});
    pointers.push_back(&results[i]);
  }
  const auto start = Clock::now();
  sampler_.Sample(rows, pointers);
  const double ms = MsSince(start);
  for (size_t i = 0; masked && i < sequences_.size(); ++i) {
    Sequence& sequence = sequences_[i];
    if (!results[i].status.ok()) std::printf("%s\n", results[i].status.message().c_str());
    const bool ended = results[i].sampled_token_ids.empty() ||
                       results[i].sampled_token_ids[0] == eos_ ||
                       sequence.tokens.size() > kMaxOutput;
    if (ended) {
      sequence.constraint = sequence.grammar->NewConstraint();
      sequence.tokens = {0};
    } else {
      sequence.tokens.push_back(results[i].sampled_token_ids[0]);
    }
  }
  return ms;
}

void Bench::RunAlone(int num_steps) {
  std::vector<uint32_t> mask((vocab_ + 31) / 32);
  for (size_t i = 0; i < grammars_.size(); ++i) {
    std::vector<double> times;
    auto constraint = grammars_[i]->NewConstraint();
    int32_t token = -1;
    for (int step = 0; step < num_steps; ++step) {
      const auto start = ThreadCpuMs();
      if (token >= 0) constraint->AcceptToken(token);
      const bool masked = constraint->FillNextTokenMask(mask);
      times.push_back(ThreadCpuMs() - start);
      token = static_cast<int32_t>(random_() % vocab_);
      while (masked && (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) {
        token = static_cast<int32_t>((static_cast<size_t>(token) + 1) % vocab_);
      }
      if (token != eos_ && step % kMaxOutput != kMaxOutput - 1) continue;
      constraint = grammars_[i]->NewConstraint();
      token = -1;
    }
    Print(("format " + std::to_string(i) + ", one sequence, CPU time").c_str(), times);
  }
}

void Bench::Run(int num_steps, double forward_ms) {
  std::vector<double> fill, added, sampling;
  for (int step = 0; step < num_steps; ++step) {
    std::vector<runtime::GrammarMasks::Sequence> work;
    for (const Sequence& s : sequences_) {
      work.push_back({s.constraint.get(), std::span(s.tokens).subspan(1)});
    }
    // Two steps of three have a forward; the third shows how long the masks take by themselves.
    const bool has_forward = step % 3 != 0;
    const auto start = Clock::now();
    masks_.Start(work);
    double in_the_way = MsSince(start);
    if (has_forward)
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(forward_ms));
    const auto wait = Clock::now();
    const auto masks = masks_.Wait();
    if (!has_forward) fill.push_back(MsSince(start));
    in_the_way += MsSince(wait);
    const double free = Sample(masks, false);
    const double masked = Sample(masks, true);
    if (!has_forward) continue;
    sampling.push_back(masked - free);
    added.push_back(in_the_way + masked - free);
  }
  Print("all masks, by themselves", fill);
  Print("masked sampling beyond sampling, on one core", sampling);
  Print("added to a step", added);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s TOKENIZER_JSON [SEQUENCES] [STEPS] [FORWARD_MS]\n", argv[0]);
    return 2;
  }
  const auto tokenizer = text::Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().message().c_str());
    return 2;
  }
  const int num_sequences = argc > 2 ? std::stoi(argv[2]) : 32;
  const int num_steps = argc > 3 ? std::stoi(argv[3]) : 900;
  const double forward_ms = argc > 4 ? std::stod(argv[4]) : 10;
  const int num_threads = std::clamp(NumUsableCores() / 2, 1, 8);
  std::printf("%d sequences, %d tokens, %d mask threads, a forward of %.0f ms\n", num_sequences,
              (*tokenizer)->vocab_size(), num_threads, forward_ms);
  Bench bench(**tokenizer, num_sequences, num_threads);
  bench.RunAlone(num_steps);
  bench.Run(num_steps, forward_ms);
  return 0;
}
