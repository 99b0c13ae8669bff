#include "apps/fathom/line_reader.h"

#include <editline/readline.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

namespace fathom::app {

LineReader::LineReader(std::string history_file)
    : history_file_(std::move(history_file)), interactive_(isatty(STDIN_FILENO) == 1) {
  if (!interactive_) return;
  using_history();
  stifle_history(1000);
  if (!history_file_.empty()) read_history(history_file_.c_str());
}

LineReader::~LineReader() {
  if (!interactive_ || history_file_.empty()) return;
  const mode_t old_mask = umask(0077);  // what a person typed is theirs alone
  write_history(history_file_.c_str());
  umask(old_mask);
}

std::optional<std::string> LineReader::Read(const std::string& prompt) {
  if (!interactive_) {
    std::string line;
    if (!std::getline(std::cin, line)) return std::nullopt;
    return line;
  }
  char* raw = readline(prompt.c_str());
  if (raw == nullptr) return std::nullopt;
  std::string line(raw);
  std::free(raw);
  if (!line.empty()) add_history(line.c_str());
  return line;
}

}  // namespace fathom::app
