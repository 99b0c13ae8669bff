#include "text/grammar_compiler.h"

#include <pthread.h>

#include <deque>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bounded_queue.h"
#include "base/check.h"

namespace fathom::text {
namespace {

// Formats nest, and the code that reads them recurses.
constexpr size_t kStackBytes = 64ull << 20;  // reserved, used as far as it is needed
// What a cache entry takes besides its format and its grammar.
constexpr size_t kEntryBytes = 512;

// A thread with a large stack.
class DeepThread {
 public:
  explicit DeepThread(std::function<void()> run) : run_(std::move(run)) {
    pthread_attr_t attributes;
    CHECK_EQ(pthread_attr_init(&attributes), 0);
    CHECK_EQ(pthread_attr_setstacksize(&attributes, kStackBytes), 0);
    const auto start = [](void* self) -> void* {
      static_cast<DeepThread*>(self)->run_();
      return nullptr;
    };
    CHECK_EQ(pthread_create(&thread_, &attributes, start, this), 0);
    pthread_attr_destroy(&attributes);
  }
  ~DeepThread() { pthread_join(thread_, nullptr); }
  DeepThread(const DeepThread&) = delete;
  DeepThread& operator=(const DeepThread&) = delete;

 private:
  const std::function<void()> run_;
  pthread_t thread_{};
};

class ThreadedCompiler final : public GrammarCompiler {
 public:
  ThreadedCompiler(const Tokenizer& tokenizer, const SpecialTokens& special,
                   const GrammarCompilerOptions& options)
      : tokenizer_(tokenizer), special_(special), options_(options), formats_(options.max_waiting) {
    for (int i = 0; i < options.num_threads; ++i) {
      threads_.push_back(std::make_unique<DeepThread>([this] { Run(); }));
    }
  }
  ~ThreadedCompiler() override { Stop(); }

  void Stop() override {
    stopping_ = true;
    formats_.Close();
    const std::lock_guard lock(threads_mutex_);
    threads_.clear();
  }

  void Compile(const std::string& format, Done done) override;

  size_t cache_bytes() const override {
    const std::lock_guard lock(mutex_);
    return cache_bytes_;
  }

 private:
  struct Entry {
    Compiled compiled;
    size_t bytes;
    std::list<std::string>::iterator use;  // in uses_
  };

  void Run();
  const GrammarVocabulary& vocabulary();
  void Keep(const std::string& format, const Compiled& compiled);  // under mutex_

  const Tokenizer& tokenizer_;
  const SpecialTokens special_;
  const GrammarCompilerOptions options_;
  std::once_flag vocabulary_made_;
  std::shared_ptr<const GrammarVocabulary> vocabulary_;

  mutable std::mutex mutex_;
  std::unordered_map<std::string, Entry> cache_;
  std::list<std::string> uses_;  // formats of the cache, the latest used first
  size_t cache_bytes_ = 0;
  std::unordered_map<std::string, std::vector<Done>> pending_;

  std::atomic<bool> stopping_{false};
  BoundedQueue<std::string> formats_;
  std::mutex threads_mutex_;
  std::vector<std::unique_ptr<DeepThread>> threads_;  // guarded by threads_mutex_
};

void ThreadedCompiler::Compile(const std::string& format, Done done) {
  std::unique_lock lock(mutex_);
  if (const auto it = cache_.find(format); it != cache_.end()) {
    uses_.splice(uses_.begin(), uses_, it->second.use);
    const Compiled compiled = it->second.compiled;
    lock.unlock();
    return done(compiled);
  }
  if (const auto it = pending_.find(format); it != pending_.end()) {
    it->second.push_back(std::move(done));
    return;
  }
  if (formats_.TryPush(format)) {
    pending_[format].push_back(std::move(done));
    return;
  }
  lock.unlock();
  done(Unavailable("too many output formats are being compiled: try again later"));
}

void ThreadedCompiler::Run() {
  while (const auto format = formats_.Pop()) {
    const Compiled compiled = Grammar::Compile(vocabulary(), *format, options_.budget, stopping_);
    std::vector<Done> waiting;
    {
      const std::lock_guard lock(mutex_);
      Keep(*format, compiled);
      waiting = std::move(pending_.at(*format));
      pending_.erase(*format);
    }
    for (const Done& done : waiting) done(compiled);
  }
}

const GrammarVocabulary& ThreadedCompiler::vocabulary() {
  std::call_once(vocabulary_made_, [this] {
    GrammarVocabulary::Tokens tokens;
    for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
      // Of the control tokens only those that are part of an answer's text.
      const bool is_text =
          !tokenizer_.IsAddedToken(id) || id == special_.think_end || id == special_.dsml;
      tokens.bytes.emplace_back(is_text ? tokenizer_.TokenBytes(id) : "");
    }
    tokens.end_token_ids = {special_.eos};
    vocabulary_ = GrammarVocabulary::Make(tokens);
  });
  return *vocabulary_;
}

void ThreadedCompiler::Keep(const std::string& format, const Compiled& compiled) {
  if (!compiled.ok() && compiled.status().code() != StatusCode::kInvalidArgument) return;
  const size_t bytes =
      kEntryBytes + 2 * format.size() + (compiled.ok() ? (*compiled)->memory_bytes() : 0);
  if (bytes > options_.max_cache_bytes) return;
  while (cache_bytes_ + bytes > options_.max_cache_bytes) {
    const auto oldest = cache_.find(uses_.back());
    cache_bytes_ -= oldest->second.bytes;
    cache_.erase(oldest);
    uses_.pop_back();
  }
  uses_.push_front(format);
  cache_.emplace(format, Entry{compiled, bytes, uses_.begin()});
  cache_bytes_ += bytes;
}

}  // namespace

std::unique_ptr<GrammarCompiler> GrammarCompiler::Make(const Tokenizer& tokenizer,
                                                       const SpecialTokens& special,
                                                       const GrammarCompilerOptions& options) {
  return std::make_unique<ThreadedCompiler>(tokenizer, special, options);
}

}  // namespace fathom::text
