#include "api/openai/routed_experts.h"

#include <fmt/format.h>

#include <algorithm>

#include "api/base64.h"

namespace fathom::api::openai {
namespace {

// Magic, version 1.0, and a header that is padded so that the data begins at a multiple of 64.
std::string NpyHead(std::string_view dtype, int64_t tokens, int layers, int experts) {
  std::string text =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}, {}, {}), }}", dtype,
                  tokens, layers, experts);
  constexpr size_t kFixedBytes = 10;
  text.resize((kFixedBytes + text.size() + 1 + 63) / 64 * 64 - kFixedBytes - 1, ' ');
  text += '\n';
  std::string head("\x93NUMPY\x01\x00", 8);
  head += static_cast<char>(text.size() % 256);
  head += static_cast<char>(text.size() / 256);
  return head + text;
}

}  // namespace

std::string EncodeRoutedExperts(std::span<const uint16_t> ids, int64_t num_tokens,
                                const ModelInfo& model) {
  const auto row = int64_t{model.num_layers} * model.num_experts_per_token;
  if (row == 0) return "";
  const int64_t rows = std::clamp<int64_t>(num_tokens, 0, static_cast<int64_t>(ids.size()) / row);
  const bool is_byte = model.num_experts <= 256;
  std::string file =
      NpyHead(is_byte ? "|u1" : "<u2", rows, model.num_layers, model.num_experts_per_token);
  for (const uint16_t id : ids.first(static_cast<size_t>(rows * row))) {
    file += static_cast<char>(id % 256);
    if (!is_byte) file += static_cast<char>(id / 256);
  }
  return Base64(file);
}

}  // namespace fathom::api::openai
