#include "kv_cache/prefix_tree.h"

#include <algorithm>

#include "base/check.h"
#include "kv_cache/kv_layout.h"

namespace fathom::kv_cache {

using request::KvHash;

PrefixNode& PrefixTree::Add(const KvHash& hash, int64_t num_tokens) {
  auto node = std::make_unique<PrefixNode>();
  node->hash = hash;
  node->num_tokens = num_tokens;
  node->serial = next_serial_++;
  PrefixNode& out = *node;
  CHECK(nodes_.emplace(hash, std::move(node)).second);
  return out;
}

PrefixNode* PrefixTree::FindHash(const KvHash& hash) const {
  const auto it = nodes_.find(hash);
  return it == nodes_.end() ? nullptr : it->second.get();
}

PrefixNode& PrefixTree::Root(std::string_view salt) {
  const KvHash hash = hash_.Root(salt);
  PrefixNode* node = FindHash(hash);
  return node != nullptr ? *node : Add(hash, 0);
}

PrefixNode* PrefixTree::Find(const PrefixNode& parent, const KvHash& hash,
                             std::span<const int32_t> token_ids) const {
  PrefixNode* node = FindHash(hash);
  if (node == nullptr || node->parent != &parent) return nullptr;
  return std::equal(token_ids.begin(), token_ids.end(), node->token_ids.begin(),
                    node->token_ids.end())
             ? node
             : nullptr;
}

PrefixNode* PrefixTree::FindOrAdd(PrefixNode& parent, const KvHash& hash,
                                  std::span<const int32_t> token_ids) {
  PrefixNode* node = FindHash(hash);
  if (node == nullptr) {
    node = &Add(hash, parent.num_tokens + kBlockTokens);
  } else if (!node->token_ids.empty() || node->num_tokens != parent.num_tokens + kBlockTokens) {
    return Find(parent, hash, token_ids);
  }
  node->token_ids.assign(token_ids.begin(), token_ids.end());
  node->parent = &parent;
  ++parent.num_children;
  return node;
}

PrefixNode* PrefixTree::AddFound(const request::KvRecord& record) {
  if (record.num_tokens < kBlockTokens || record.num_tokens % kBlockTokens != 0) return nullptr;
  if (record.kind == PartKind::kSnapshot) {
    PrefixNode* node = FindHash(record.hash);
    if (node == nullptr) return &Add(record.hash, record.num_tokens);
    return node->num_tokens == record.num_tokens ? node : nullptr;
  }
  if (record.token_ids.size() != kBlockTokens) return nullptr;
  PrefixNode* parent = FindHash(record.parent);
  if (parent == nullptr) parent = &Add(record.parent, record.num_tokens - kBlockTokens);
  if (parent->num_tokens != record.num_tokens - kBlockTokens) return nullptr;
  return FindOrAdd(*parent, record.hash, record.token_ids);
}

bool PrefixTree::IsNeeded(const PrefixNode& node) {
  return node.num_children > 0 || node.num_users > 0 || !node.tails.empty() ||
         node.part(PartKind::kBlock).kept() || node.part(PartKind::kSnapshot).kept();
}

PrefixNode* PrefixTree::Erase(PrefixNode& node) {
  PrefixNode* parent = node.parent;
  nodes_.erase(node.hash);
  if (parent != nullptr) --parent->num_children;
  return parent;
}

void PrefixTree::Prune(PrefixNode* node) {
  while (node != nullptr && !IsNeeded(*node)) node = Erase(*node);
}

void PrefixTree::PruneAll() {
  for (PrefixNode* node : Nodes()) {
    if (!IsNeeded(*node)) Erase(*node);
  }
}

void CountSession(PrefixNode& node, uint64_t session) {
  if (node.sessions.size() < kMaxCountedSessions &&
      std::find(node.sessions.begin(), node.sessions.end(), session) == node.sessions.end()) {
    node.sessions.push_back(session);
  }
}

void PrefixTree::Attach(PrefixTail& tail, PrefixNode& node) {
  if (tail.node == &node) return;
  Detach(tail);
  tail.node = &node;
  node.tails.push_back(&tail);
}

void PrefixTree::Detach(PrefixTail& tail) {
  if (tail.node == nullptr) return;
  std::erase(tail.node->tails, &tail);
  tail.node = nullptr;
}

std::vector<PrefixNode*> PrefixTree::Nodes() const {
  std::vector<PrefixNode*> nodes;
  nodes.reserve(nodes_.size());
  for (const auto& [hash, node] : nodes_) nodes.push_back(node.get());
  std::sort(nodes.begin(), nodes.end(), [](const PrefixNode* a, const PrefixNode* b) {
    return a->num_tokens != b->num_tokens ? a->num_tokens > b->num_tokens : a->serial < b->serial;
  });
  return nodes;
}

uint64_t EvictionGroup(const PrefixNode& node) {
  return node.sessions.size() == 1 ? node.sessions[0] : kSharedGroup;
}

EvictionKey MakeEvictionKey(const PrefixNode& node, PartKind kind, uint64_t session_credit) {
  const uint64_t num_others = node.sessions.empty() ? 0 : node.sessions.size() - 1;
  return {.time = node.part(kind).last_use + num_others * session_credit,
          .order = -node.num_tokens,
          .serial = node.serial};
}

}  // namespace fathom::kv_cache
