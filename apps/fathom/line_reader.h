// LineReader: one line from the terminal at a time, with editing and a history that is kept between
// runs. Plain reading when standard input is no terminal. The one adapter over libedit; main
// thread.
#pragma once

#include <optional>
#include <string>

namespace fathom::app {

class LineReader {
 public:
  // `history_file` may be empty: then nothing is kept. At most 1,000 lines are.
  explicit LineReader(std::string history_file);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // The next line without its newline; nothing at the end of input (Ctrl-D).
  std::optional<std::string> Read(const std::string& prompt);

 private:
  std::string history_file_;
  bool interactive_;
};

}  // namespace fathom::app
