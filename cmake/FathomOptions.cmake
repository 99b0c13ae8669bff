# Build options and the compile flags that every target shares.
option(FATHOM_SANITIZE_ADDRESS "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(FATHOM_SANITIZE_THREAD "ThreadSanitizer" OFF)
option(FATHOM_RACECHECK "Kernels whose barriers compute-sanitizer's racecheck can follow" OFF)
option(FATHOM_FUZZ "libFuzzer programs of tests/fuzz (clang)" OFF)
option(FATHOM_WERROR "Warnings are errors" ON)
set(FATHOM_CUDA AUTO CACHE STRING "CUDA code: AUTO (compiled when nvcc is found), ON (required), OFF")

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
if(FATHOM_WERROR)
  list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_LIST_DIR}/run_nvcc)
endif()

include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)

add_library(fathom_flags INTERFACE)
target_include_directories(fathom_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
# -ffp-contract=off: products and sums are rounded where the source says so, on every compiler and level;
# kernels that want fused multiply-add ask for it by name.
target_compile_options(fathom_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -ffp-contract=off -fstack-protector-strong -fcf-protection
  -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>
  $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xcompiler=-Wall,-Wextra,-ffp-contract=off,-fstack-protector-strong>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105651: "literal" + std::string is reported as an overlapping copy.
  target_compile_options(fathom_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(FATHOM_WERROR)
  target_compile_options(fathom_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
target_link_options(fathom_flags INTERFACE -Wl,-z,relro,-z,now)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_definitions(fathom_flags INTERFACE _FORTIFY_SOURCE=2)
endif()
if(FATHOM_SANITIZE_ADDRESS OR FATHOM_FUZZ)
  target_compile_options(fathom_flags INTERFACE -UNDEBUG)  # libraries' asserts, too: no input may reach one
endif()
if(FATHOM_SANITIZE_ADDRESS)
  # vptr opens files to look at memory: a server that ran out of descriptors fails it.
  target_compile_options(fathom_flags INTERFACE -fsanitize=address,undefined -fno-sanitize=vptr
                                                -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(fathom_flags INTERFACE -fsanitize=address,undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Of instrumented code GCC believes that empty optionals of Boost are read.
    target_compile_options(fathom_flags INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
if(FATHOM_FUZZ)
  target_compile_options(fathom_flags INTERFACE -fsanitize=fuzzer-no-link,address,undefined
                                                -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(fathom_flags INTERFACE -fsanitize=address,undefined)
endif()
if(FATHOM_RACECHECK)
  target_compile_definitions(fathom_flags INTERFACE FATHOM_RACECHECK)
endif()
if(FATHOM_SANITIZE_THREAD)
  target_compile_options(fathom_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(fathom_flags INTERFACE -fsanitize=thread)
endif()
