#include "runtime/device_batch.h"

#include <algorithm>

#include "base/check.h"

namespace fathom::runtime {
namespace {

// Rows of equal length, padded with -1; returns that length.
int Pad(std::span<const std::vector<int32_t>> rows, std::vector<int32_t>& padded) {
  size_t width = 0;
  for (const std::vector<int32_t>& row : rows) width = std::max(width, row.size());
  padded.assign(rows.size() * width, -1);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(),
              padded.begin() + static_cast<std::ptrdiff_t>(i * width));
  }
  return static_cast<int>(width);
}

}  // namespace

void DeviceBatch::Clear() {
  token_ids_.clear();
  token_sources_.clear();
  cu_seqlens_q_.assign(1, 0);
  num_computed_.clear();
  first_window_page_.clear();
  state_slots_.clear();
  logits_rows_.clear();
  has_prompt_ = false;
}

void DeviceBatch::AddSequence(std::span<const int32_t> token_ids, int32_t num_computed,
                              const request::BlockTable& table) {
  const size_t index = num_computed_.size();
  if (blocks_.size() <= index) {
    blocks_.emplace_back();
    window_pages_.emplace_back();
  }
  blocks_[index] = table.blocks;
  window_pages_[index] = table.window_pages;
  token_ids_.insert(token_ids_.end(), token_ids.begin(), token_ids.end());
  token_sources_.resize(token_ids_.size(), -1);
  cu_seqlens_q_.push_back(static_cast<int32_t>(token_ids_.size()));
  num_computed_.push_back(num_computed);
  first_window_page_.push_back(table.first_window_page);
  state_slots_.push_back(table.state_slot);
}

void DeviceBatch::AddSampledToken(int32_t source, int32_t num_computed,
                                  const request::BlockTable& table) {
  constexpr int32_t kUnknown[] = {0};
  AddSequence(kUnknown, num_computed, table);
  token_sources_.back() = source;
}

void DeviceBatch::AddLogitsRow(size_t offset_in_sequence) {
  const int32_t begin = cu_seqlens_q_[cu_seqlens_q_.size() - 2];
  const int32_t row = begin + static_cast<int32_t>(offset_in_sequence);
  CHECK_LT(row, cu_seqlens_q_.back());
  CHECK(logits_rows_.empty() || row > logits_rows_.back());
  logits_rows_.push_back(row);
}

model::ForwardBatch DeviceBatch::View() {
  const size_t num_sequences = num_computed_.size();
  model::ForwardBatch view;
  view.max_blocks = Pad({blocks_.data(), num_sequences}, block_tables_);
  view.max_window_pages = Pad({window_pages_.data(), num_sequences}, window_tables_);
  view.token_ids = token_ids_;
  view.token_sources = token_sources_;
  view.cu_seqlens_q = cu_seqlens_q_;
  view.num_computed = num_computed_;
  view.block_tables = block_tables_;
  view.window_tables = window_tables_;
  view.first_window_page = first_window_page_;
  view.state_slots = state_slots_;
  view.logits_rows = logits_rows_;
  view.has_prompt = has_prompt_;
  return view;
}

}  // namespace fathom::runtime
