// The options of the commands as CLI11 has them, checked with the texts of flag_builders.h, and its
// errors as the one line that a user sees.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "apps/fathom/flag_builders.h"

namespace fathom::app {

// A number from `low` to `high`, or several where Value is a vector.
template <typename Value, typename T>
CLI::Option* AddNumber(CLI::App* command, const std::string& names, Value* value, T low, T high,
                       const std::string& help) {
  return command->add_option(names, *value, help)
      ->type_name("N")
      ->check([low, high](const std::string& text) {
        return ToNumber(text, low, high) ? "" : NotANumber(text, low, high);
      });
}

// One of the values, by its name.
template <typename T>
CLI::Option* AddChoice(CLI::App* command, const std::string& name, T* value,
                       std::type_identity_t<Choices<T>> choices, const std::string& help) {
  const auto take = [choices](const std::string& given) {
    const auto choice = ToChoice(given, choices);
    if (!choice) throw CLI::ValidationError(NotAvailable(given, NamesOf(choices)));
    return std::to_string(static_cast<int>(*choice));  // which CLI11 reads
  };
  return command->add_option(name, *value, help)
      ->type_name(fmt::format("{}", fmt::join(NamesOf(choices), "|")))
      ->transform(take);
}
// The name itself.
inline CLI::Option* AddChoice(CLI::App* command, const std::string& name, std::string* value,
                              const FlagValues& choices, const std::string& help) {
  return command->add_option(name, *value, help)
      ->type_name(fmt::format("{}", fmt::join(choices, "|")))
      ->check([choices](const std::string& given) {
        const bool is_known = std::find(choices.begin(), choices.end(), given) != choices.end();
        return is_known ? "" : NotAvailable(given, choices);
      });
}

// What was wrong with a command line that `app` did not take, and where to look.
std::string UsageLine(const CLI::App& app, const CLI::ParseError& error);

}  // namespace fathom::app
