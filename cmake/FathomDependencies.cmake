# Third-party libraries. Static or header-only, so that the binary runs on other machines.
find_package(Threads REQUIRED)
find_package(Boost 1.81 REQUIRED)          # headers: Asio, Beast, JSON
set(OPENSSL_USE_STATIC_LIBS ON)
find_package(OpenSSL 3 REQUIRED)
find_package(GTest REQUIRED)

find_path(FMT_INCLUDE_DIR fmt/core.h REQUIRED)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
find_path(HIGHWAY_INCLUDE_DIR hwy/highway.h REQUIRED)
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
find_path(PCRE2_INCLUDE_DIR pcre2.h REQUIRED)
find_library(PCRE2_LIBRARY NAMES libpcre2-8.a REQUIRED)
