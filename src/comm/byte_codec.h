// ByteWriter, ByteReader: values as bytes for another node of the same build: integers little
// endian, strings with their length before them. A reader takes any bytes: once something is
// missing or too long, all it gives are zeros and empty strings, and ok() is false. Values; any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace fathom::comm {

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_integral_v<T>);
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i)));
    }
  }
  void PutBytes(std::string_view bytes) { bytes_ += bytes; }
  void PutString(std::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }

  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Get() {
    static_assert(std::is_integral_v<T>);
    const std::string_view bytes = GetBytes(sizeof(T));
    std::make_unsigned_t<T> value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value = static_cast<std::make_unsigned_t<T>>(
          value | static_cast<std::make_unsigned_t<T>>(static_cast<unsigned char>(bytes[i]))
                      << (8 * i));
    }
    return static_cast<T>(value);
  }
  // A part of the reader's bytes, `size` long.
  std::string_view GetBytes(size_t size) {
    ok_ = ok_ && size <= rest_.size();
    if (!ok_) return {};
    const std::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }
  std::string GetString(size_t max_size) {
    const auto size = Get<uint32_t>();
    ok_ = ok_ && size <= max_size;
    return std::string(GetBytes(ok_ ? size : 0));
  }

  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace fathom::comm
