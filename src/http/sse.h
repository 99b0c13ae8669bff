// Server-sent events: the framing of one event. Pure functions.
#pragma once

#include <string>
#include <string_view>

namespace fathom::http {

// "data: …\n\n"; every line of `data` becomes a data field.
std::string SseData(std::string_view data);
// "event: NAME\ndata: …\n\n"
std::string SseEvent(std::string_view name, std::string_view data);
// ": text\n\n", which clients skip. `text` is one line.
std::string SseComment(std::string_view text);

}  // namespace fathom::http
