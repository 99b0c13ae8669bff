#include "apps/fathom/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

namespace fathom::app {
namespace {

using testing::ElementsAre;

class CommandLineTest : public testing::Test {
 protected:
  CommandLineTest() {
    app_.require_subcommand(1);
    CLI::App* run = app_.add_subcommand("run", "");
    run->add_option("model", model_)->required();
    AddNumber(run, "--count,-n", &count_, 1, 10, "");
    AddNumber(run, "--share", &share_, 0.01, 0.95, "");
    AddNumber(run, "--seed", &seed_, uint64_t{0}, UINT64_MAX, "");
    AddNumber(run, "--lens", &lens_, 1, 99, "")->delimiter(',');
    AddChoice(run, "--device", &device_, kDevices, "");
    AddChoice(run, "--mode", &mode_, {"thinking", "chat"}, "");
    app_.add_subcommand("measure", "")->require_subcommand(1)->add_subcommand("time", "");
  }

  // The line that a user sees; empty: the words were taken.
  std::string Parse(std::vector<std::string> words) {
    std::reverse(words.begin(), words.end());
    try {
      app_.parse(words);
    } catch (const CLI::ParseError& error) {
      return UsageLine(app_, error);
    }
    return "";
  }

  CLI::App app_{"", "fathom"};
  std::string model_, mode_;
  int count_ = 0;
  double share_ = 0;
  std::optional<uint64_t> seed_;
  std::vector<int> lens_;
  DeviceChoice device_ = DeviceChoice::kAuto;
};

TEST_F(CommandLineTest, TakesNumbersAndChoices) {
  EXPECT_EQ(Parse({"run", "m", "-n", "10", "--share=0.5", "--seed", "18446744073709551615",
                   "--lens", "1,99", "--device", "cuda", "--mode", "chat"}),
            "");
  EXPECT_EQ(model_, "m");
  EXPECT_EQ(count_, 10);
  EXPECT_EQ(share_, 0.5);
  EXPECT_EQ(seed_, UINT64_MAX);
  EXPECT_THAT(lens_, ElementsAre(1, 99));
  EXPECT_EQ(device_, DeviceChoice::kCuda);
  EXPECT_EQ(mode_, "chat");
}

TEST_F(CommandLineTest, ANumberOutOfRangeIsToldWithItsRange) {
  EXPECT_EQ(Parse({"run", "m", "-n", "0"}),
            "--count: '0' is not a number from 1 to 10; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--count", "99999999999999999999"}),
            "--count: '99999999999999999999' is not a number from 1 to 10; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--share", "nan"}),
            "--share: 'nan' is not a number from 0.01 to 0.95; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--seed", "-1"}),
            "--seed: '-1' is not a number from 0 to 18446744073709551615; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--lens", "5,x"}),
            "--lens: 'x' is not a number from 1 to 99; see fathom run --help");
}

TEST_F(CommandLineTest, AnUnknownChoiceIsToldWithThoseThatAre) {
  EXPECT_EQ(Parse({"run", "m", "--device", "gpu"}),
            "--device: 'gpu' is not available; use auto or cpu or cuda; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--mode", ""}),
            "--mode: '' is not available; use thinking or chat; see fathom run --help");
}

TEST_F(CommandLineTest, AnUnknownFlagIsToldWithTheNearest) {
  EXPECT_EQ(Parse({"run", "m", "--cuont", "3"}),
            "--cuont is not a flag of fathom run, --count is; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "--frobnicate=3"}),
            "--frobnicate is not a flag of fathom run; see fathom run --help");
  EXPECT_EQ(Parse({"run", "--share", "nan", "--devise", "cpu"}),
            "--devise is not a flag of fathom run, --device is; see fathom run --help");
  EXPECT_EQ(Parse({"--count"}), "--count is not a flag of fathom; see fathom --help");
}

TEST_F(CommandLineTest, WhatIsMissingIsToldWithWhereToLook) {
  EXPECT_EQ(Parse({}), "a command is required; see fathom --help");
  EXPECT_EQ(Parse({"walk"}), "'walk' is not a command; see fathom --help");
  EXPECT_EQ(Parse({"measure"}), "a command is required; see fathom measure --help");
  EXPECT_EQ(Parse({"measure", "space"}), "'space' is not a command; see fathom measure --help");
  EXPECT_EQ(Parse({"measure", "time", "-x"}),
            "-x is not a flag of fathom measure time; see fathom measure time --help");
  EXPECT_EQ(Parse({"run"}), "model is required; see fathom run --help");
  EXPECT_EQ(Parse({"run", "m", "n"}), "'n' is not expected; see fathom run --help");
}

}  // namespace
}  // namespace fathom::app
