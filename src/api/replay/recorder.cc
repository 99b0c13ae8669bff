#include "api/replay/recorder.h"

#include <algorithm>
#include <utility>

namespace fathom::api {

ReplayRecorder::ReplayRecorder(ReplayStore& store, std::string scope, bool in_reasoning,
                               int32_t think_end)
    : store_(store), scope_(std::move(scope)), think_end_(think_end) {
  record_.turn.in_reasoning = in_reasoning;
}

void ReplayRecorder::Add(const ChoiceDelta& delta) {
  std::vector<int32_t>& ids = record_.turn.token_ids;
  ids.insert(ids.end(), delta.token_ids.begin(), delta.token_ids.end());
  record_.message.Add(delta.events);
  if (delta.finish) Remember(*delta.finish);
}

void ReplayRecorder::Remember(const ChoiceFinish& finish) {
  std::vector<int32_t>& ids = record_.turn.token_ids;
  if (finish.stop_token_id && !ids.empty() && ids.back() == *finish.stop_token_id) ids.pop_back();
  const auto& calls = record_.message.tool_calls;
  const bool shows_all =
      !finish.stop_string && !finish.dropped_calls &&
      std::ranges::all_of(calls, [](const auto& call) { return call.is_complete; });
  if (scope_.empty() || keys_.empty() || ids.empty() || !shows_all) return;
  if (record_.turn.in_reasoning) {
    const auto end = std::find(ids.begin(), ids.end(), think_end_);
    record_.turn.answer_begin.reset();
    if (end != ids.end()) record_.turn.answer_begin = static_cast<size_t>(end - ids.begin()) + 1;
  }
  store_.Put(scope_, keys_, std::move(record_));
}

}  // namespace fathom::api
