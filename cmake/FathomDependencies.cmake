# Third-party libraries. Static or header-only, so that the binary runs on other machines; scripts/setup
# installs them and THIRD_PARTY.md lists them.
find_package(Threads REQUIRED)
find_package(Boost 1.81 REQUIRED)          # headers: Asio, Beast, JSON
set(OPENSSL_USE_STATIC_LIBS ON)
find_package(OpenSSL 3 REQUIRED)
find_package(GTest REQUIRED)

function(require_header variable header)
  find_path(${variable} ${header})
  if(NOT ${variable})
    message(FATAL_ERROR "${header} was not found: run scripts/setup, or set ${variable}")
  endif()
endfunction()

function(require_archive variable archive)
  find_library(${variable} NAMES ${archive})
  if(NOT ${variable})
    message(FATAL_ERROR "${archive} was not found: run scripts/setup, or set ${variable}")
  endif()
endfunction()

require_header(FMT_INCLUDE_DIR fmt/core.h)
require_header(SPDLOG_INCLUDE_DIR spdlog/spdlog.h)
require_header(XXHASH_INCLUDE_DIR xxhash.h)
require_header(HIGHWAY_INCLUDE_DIR hwy/highway.h)
require_header(CLI11_INCLUDE_DIR CLI/CLI.hpp)
require_header(PCRE2_INCLUDE_DIR pcre2.h)
require_archive(PCRE2_LIBRARY libpcre2-8.a)
require_header(LIBEDIT_INCLUDE_DIR editline/readline.h)
require_archive(LIBEDIT_ARCHIVE libedit.a)
require_archive(LIBTINFO_ARCHIVE libtinfo.a)
require_archive(LIBBSD_ARCHIVE libbsd.a)
require_archive(LIBMD_ARCHIVE libmd.a)
