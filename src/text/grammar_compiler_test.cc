#include "text/grammar_compiler.h"

#include <gtest/gtest.h>

#include <future>

#include "text/output_format.h"
#include "text/test_files.h"

namespace fathom::text {
namespace {

std::string Tag(const std::string& pattern) {
  return StructuralTag({.in_reasoning = false, .content = RegexFormat(pattern), .calls = {}});
}

class GrammarCompilerTest : public testing::Test {
 protected:
  std::unique_ptr<GrammarCompiler> Make(GrammarCompilerOptions options) {
    return GrammarCompiler::Make(*tokenizer_, *SpecialTokens::Find(*tokenizer_), options);
  }
  static GrammarCompiler::Compiled Wait(GrammarCompiler& compiler, const std::string& format) {
    auto promise = std::make_shared<std::promise<GrammarCompiler::Compiled>>();
    compiler.Compile(format, [promise](const auto& compiled) { promise->set_value(compiled); });
    return promise->get_future().get();
  }

  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::Load(TinyTokenizerPath());
};

TEST_F(GrammarCompilerTest, GivesTheSameGrammarForTheSameFormat) {
  const auto compiler = Make({});
  const auto first = Wait(*compiler, Tag("a+"));
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_EQ(*first, *Wait(*compiler, Tag("a+")));
  EXPECT_NE(*first, *Wait(*compiler, Tag("b+")));
}

TEST_F(GrammarCompilerTest, RemembersRefusals) {
  const auto compiler = Make({.budget = {.num_steps = 5'000}});
  EXPECT_FALSE(Wait(*compiler, Tag("(a|b)*a.{0,100}z")).ok());
  const size_t bytes = compiler->cache_bytes();
  EXPECT_GT(bytes, 0u);
  bool answered_now = false;
  compiler->Compile(Tag("(a|b)*a.{0,100}z"), [&](const auto& compiled) {
    EXPECT_EQ(compiled.status().code(), StatusCode::kInvalidArgument);
    answered_now = true;
  });
  EXPECT_TRUE(answered_now);
}

TEST_F(GrammarCompilerTest, KeepsItsCacheBounded) {
  constexpr size_t kMaxBytes = 200'000;
  const auto compiler = Make({.max_cache_bytes = kMaxBytes});
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(Wait(*compiler, Tag("word" + std::to_string(i) + "[a-z]{3}")).ok());
    ASSERT_LE(compiler->cache_bytes(), kMaxBytes);
  }
  EXPECT_GT(compiler->cache_bytes(), kMaxBytes / 2);
}

TEST_F(GrammarCompilerTest, RefusesMoreThanMayWait) {
  std::atomic<int> num_done = 0;
  std::atomic<int> num_unavailable = 0;
  {
    const auto compiler = Make({.num_threads = 1, .max_waiting = 2});
    for (int i = 0; i < 50; ++i) {
      compiler->Compile(Tag("(a|b|c)*a.{0,120}z" + std::to_string(i)), [&](const auto& compiled) {
        ++num_done;
        if (compiled.status().code() == StatusCode::kUnavailable) ++num_unavailable;
      });
    }
  }  // what waits is cancelled
  EXPECT_EQ(num_done, 50);
  EXPECT_GE(num_unavailable, 40);
}

TEST_F(GrammarCompilerTest, NeverGivesControlTokens) {
  const auto compiler = Make({});
  const SpecialTokens special = *SpecialTokens::Find(*tokenizer_);
  const auto grammar = Wait(*compiler, StructuralTag({.in_reasoning = true}));
  ASSERT_TRUE(grammar.ok()) << grammar.status().message();
  std::vector<uint32_t> mask((static_cast<size_t>(tokenizer_->vocab_size()) + 31) / 32);
  ASSERT_TRUE((*grammar)->NewConstraint()->FillNextTokenMask(mask));
  const auto allows = [&](int32_t id) {
    return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
  };
  EXPECT_TRUE(allows(special.think_end));
  EXPECT_TRUE(allows(special.dsml));
  for (const int32_t id :
       {special.bos, special.eos, special.user, special.assistant, special.think_begin}) {
    EXPECT_FALSE(allows(id)) << id;
  }
}

}  // namespace
}  // namespace fathom::text
