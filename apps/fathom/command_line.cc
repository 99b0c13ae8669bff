#include "apps/fathom/command_line.h"

#include <algorithm>
#include <numeric>

namespace fathom::app {
namespace {

// Insertions, deletions and changes from one word to the other.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t change = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({change, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

// The flag that was probably meant; empty: none is near.
std::string NearestFlag(const CLI::App& command, const std::string& given) {
  constexpr size_t kFurthest = 2;
  std::string nearest;
  size_t least = kFurthest + 1;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = EditDistance("--" + name, given);
      if (distance < least) least = distance, nearest = "--" + name;
    }
  }
  return nearest;
}

bool IsFlag(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

// What no command or option took.
std::string NotTaken(const CLI::App& command, const std::string& path, const std::string& word) {
  if (!IsFlag(word)) {
    const bool wants_command = !command.get_subcommands({}).empty();
    return fmt::format("'{}' is {}", word, wants_command ? "not a command" : "not expected");
  }
  const std::string flag = word.substr(0, word.find('='));
  const std::string nearest = NearestFlag(command, flag);
  return fmt::format("{} is not a flag of {}{}", flag, path,
                     nearest.empty() ? "" : fmt::format(", {} is", nearest));
}

}  // namespace

std::string UsageLine(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = &app;
  std::string path = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  const std::vector<std::string> words = app.remaining(true);
  const auto flag = std::find_if(words.begin(), words.end(), IsFlag);
  std::string problem = error.what();
  if (!words.empty()) {
    problem = NotTaken(*command, path, flag == words.end() ? words.front() : *flag);
  } else if (!command->get_subcommands({}).empty()) {
    problem = "a command is required";
  }
  return fmt::format("{}; see {} --help", problem, path);
}

}  // namespace fathom::app
