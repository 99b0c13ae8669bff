// The files under src/text/testdata, for this folder's tests.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "json/json.h"

namespace fathom::text {

inline std::string ReadTestFile(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/src/text/testdata/" + name;
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline json::Value ParseTestJson(std::string_view text) {
  auto value = json::Parse(text);
  EXPECT_TRUE(value.ok()) << value.status().message() << " in " << text;
  return value.ok() ? *value : json::Value();
}

inline json::Value ReadTestJson(const std::string& name) {
  return ParseTestJson(ReadTestFile(name));
}

inline std::string TinyTokenizerPath() {
  return std::string(FATHOM_SOURCE_DIR) + "/models/fathom-tiny/tokenizer.json";
}

}  // namespace fathom::text
