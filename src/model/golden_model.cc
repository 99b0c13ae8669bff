#include "model/golden_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>

#include "base/check.h"
#include "base/float_types.h"
#include "checkpoint/file.h"

namespace fathom::model {
namespace {

using checkpoint::FileDType;
using checkpoint::TensorInfo;

std::string ReadCaseFile(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/golden/model/" + name;
  return checkpoint::ReadSmallFile(path, int64_t{1} << 20).value();
}

// Word `index` of a splitmix64 stream.
uint64_t Word(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

float RealValue(double center, double spread, uint64_t u) {
  const double signed_unit = (2.0 * static_cast<double>(u >> 48) - 65535.0) / 65536.0;
  return static_cast<float>(center + std::exp2(spread) * signed_unit);
}

// "24x512" to {24, 512}.
std::vector<int64_t> ParseShape(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, 'x');) shape.push_back(std::stoll(part));
  return shape;
}

FileDType ParseDType(const std::string& name) {
  static const std::map<std::string, FileDType> kDTypes = {
      {"BF16", FileDType::kBF16},      {"F32", FileDType::kF32}, {"F8_E4M3", FileDType::kF8E4M3},
      {"F8_E8M0", FileDType::kF8E8M0}, {"I8", FileDType::kI8},   {"I64", FileDType::kI64}};
  return kDTypes.at(name);
}

template <typename U>
void Put(U value, std::byte* out) {
  std::memcpy(out, &value, sizeof(value));
}

}  // namespace

GoldenModel::GoldenModel(const std::string& name)
    : config_(checkpoint::ParseModelConfig(ReadCaseFile(name + ".json"), name).value()) {
  std::map<std::string, std::pair<TensorInfo, Recipe>> by_name;
  std::istringstream in(ReadCaseFile(name + ".tensors"));
  TensorInfo info;
  Recipe recipe;
  for (std::string dtype, shape, seed;
       in >> info.name >> dtype >> shape >> recipe.center >> recipe.spread >> seed;) {
    info.dtype = ParseDType(dtype);
    info.shape = ParseShape(shape);
    info.bytes = checkpoint::BytesPerElement(info.dtype);
    for (const int64_t size : info.shape) info.bytes *= size;
    recipe.seed = std::stoull(seed, nullptr, 16);
    by_name[info.name] = {info, recipe};
  }
  for (const auto& [tensor, made] : by_name) {
    tensors_.push_back(made.first);
    recipes_.push_back(made.second);
  }
  CHECK(!tensors_.empty());
}

const TensorInfo* GoldenModel::Find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors_, name, {}, &TensorInfo::name);
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

Status GoldenModel::Read(const TensorInfo& tensor, int64_t offset, std::span<std::byte> out) const {
  const TensorInfo* const own = Find(tensor.name);
  CHECK(own != nullptr);
  const Recipe& r = recipes_[static_cast<size_t>(own - tensors_.data())];
  const int64_t element = checkpoint::BytesPerElement(own->dtype);
  CHECK_EQ(offset % element, 0);
  const auto center = static_cast<int64_t>(r.center);
  for (size_t at = 0; at < out.size(); at += static_cast<size_t>(element)) {
    const auto i = (offset + static_cast<int64_t>(at)) / element;
    const uint64_t u = Word(r.seed, static_cast<uint64_t>(i));
    std::byte* const to = out.data() + at;
    switch (own->dtype) {
      case FileDType::kBF16:
        Put(BFloat16(RealValue(r.center, r.spread, u)), to);
        break;
      case FileDType::kF32:
        Put(RealValue(r.center, r.spread, u), to);
        break;
      case FileDType::kF8E4M3:
        Put(static_cast<uint8_t>(u >> 63 << 7 | (24 + (u >> 32 & 0xffff) % 56)), to);
        break;
      case FileDType::kF8E8M0:
        Put(static_cast<uint8_t>(center + static_cast<int64_t>((u >> 32) % 3)), to);
        break;
      case FileDType::kI8:
        Put(static_cast<uint8_t>(u >> 56), to);
        break;
      default: {  // I64: one word a row
        const int64_t cols = own->shape.back();
        const auto row = static_cast<int64_t>(Word(r.seed, static_cast<uint64_t>(i / cols)) >> 32);
        Put((row % center + i % cols) % center, to);
      }
    }
  }
  return OkStatus();
}

}  // namespace fathom::model
