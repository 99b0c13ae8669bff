// Files that the binary carries (made by cmake/EmbedFile.cmake at build time).
#pragma once

#include <string_view>

namespace fathom::checkpoint {

extern const std::string_view kFlashConfig;
extern const std::string_view kProConfig;
extern const std::string_view kTinyConfig;
extern const std::string_view kTinyTokenizer;
extern const std::string_view kTinyTokenizerConfig;
extern const std::string_view kTinyGenerationConfig;

}  // namespace fathom::checkpoint
