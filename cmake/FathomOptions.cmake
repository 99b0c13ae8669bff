# Build options and the compile flags that every target shares.
option(FATHOM_SANITIZE_ADDRESS "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(FATHOM_SANITIZE_THREAD "ThreadSanitizer" OFF)
set(FATHOM_CUDA AUTO CACHE STRING "CUDA code: AUTO (compiled when nvcc is found), ON (required), OFF")

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

add_library(fathom_flags INTERFACE)
target_include_directories(fathom_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
# -ffp-contract=off: products and sums are rounded where the source says so, on every compiler and level;
# kernels that want fused multiply-add ask for it by name.
target_compile_options(fathom_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Werror -ffp-contract=off -fstack-protector-strong
  -fcf-protection>)
target_link_options(fathom_flags INTERFACE -Wl,-z,relro,-z,now)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_definitions(fathom_flags INTERFACE _FORTIFY_SOURCE=2)
endif()
if(FATHOM_SANITIZE_ADDRESS)
  target_compile_options(fathom_flags INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all
                                                -fno-omit-frame-pointer)
  target_link_options(fathom_flags INTERFACE -fsanitize=address,undefined)
endif()
if(FATHOM_SANITIZE_THREAD)
  target_compile_options(fathom_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(fathom_flags INTERFACE -fsanitize=thread)
endif()

include(CheckLanguage)
set(FATHOM_HAS_CUDA OFF)
if(NOT FATHOM_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "CUDA architectures")
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 20)
    set(FATHOM_HAS_CUDA ON)
  elseif(FATHOM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FATHOM_CUDA=ON but nvcc was not found: run scripts/setup --cuda, or set CUDACXX")
  endif()
endif()
message(STATUS "CUDA code: ${FATHOM_HAS_CUDA} (FATHOM_CUDA=${FATHOM_CUDA})")
