# xgrammar's C++ core as a static library, from the source that scripts/setup unpacks. Its own CMakeLists
# brings Python, link-time optimization and a C++17 dialect; the core needs none of them.
set(FATHOM_XGRAMMAR_DIR ${CMAKE_SOURCE_DIR}/third_party/xgrammar CACHE PATH "Unpacked and patched xgrammar source")
if(NOT EXISTS ${FATHOM_XGRAMMAR_DIR}/include/xgrammar/checkpoint.h)
  message(FATAL_ERROR "xgrammar was not found in ${FATHOM_XGRAMMAR_DIR}: run scripts/setup, or set FATHOM_XGRAMMAR_DIR")
endif()
file(GLOB_RECURSE xgrammar_sources CONFIGURE_DEPENDS ${FATHOM_XGRAMMAR_DIR}/cpp/*.cc)
list(FILTER xgrammar_sources EXCLUDE REGEX "/cpp/tvm_ffi/")
add_library(xgrammar STATIC ${xgrammar_sources})
target_link_libraries(xgrammar PRIVATE fathom_flags)
# XGRAMMAR_LOG_CUSTOMIZE: the messages go to src/text/grammar_compiler.cc.
target_compile_definitions(xgrammar PUBLIC XGRAMMAR_LOG_CUSTOMIZE=1 XGRAMMAR_ENABLE_CPPTRACE=0
                                           XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
target_compile_options(xgrammar PRIVATE -w)
set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17)  # clang refuses it as C++20
target_include_directories(xgrammar SYSTEM PUBLIC
  ${FATHOM_XGRAMMAR_DIR}/include ${FATHOM_XGRAMMAR_DIR}/3rdparty/picojson
  ${FATHOM_XGRAMMAR_DIR}/3rdparty/dlpack/include)
