// ReplayRecorder: gathers one answer while it is sampled and, when it is complete, remembers it.
// One thread, one choice.
#pragma once

#include <string>
#include <vector>

#include "api/choice_text.h"
#include "api/replay/replay_store.h"

namespace fathom::api {

class ReplayRecorder {
 public:
  // `scope`: empty for an answer that is not to be remembered. `in_reasoning`: the prompt ended
  // with <think>. `think_end`: the id of </think>.
  ReplayRecorder(ReplayStore& store, std::string scope, bool in_reasoning, int32_t think_end);

  // Something that the client was told and may send back: an id of a call, response or item.
  void AddKey(std::string key) { keys_.push_back(std::move(key)); }
  // To be given every delta, the last one after its keys were added. An answer that shows less than
  // was sampled (cut at a stop string or in a call, or with calls left out) is not remembered.
  void Add(const ChoiceDelta& delta);

 private:
  void Remember(const ChoiceFinish& finish);

  ReplayStore& store_;
  const std::string scope_;
  const int32_t think_end_;
  std::vector<std::string> keys_;
  ReplayRecord record_;
};

}  // namespace fathom::api
