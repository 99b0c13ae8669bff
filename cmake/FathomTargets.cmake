include(GoogleTest)

# fathom_library(NAME SOURCES a.cc … DEPS other folders and libraries …): the static library of one folder.
# A .cu file is compiled only where CUDA is there.
function(fathom_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;CUDA_SOURCES;DEPS" ${ARGN})
  if(FATHOM_HAS_CUDA)
    list(APPEND ARG_SOURCES ${ARG_CUDA_SOURCES})
  endif()
  if(ARG_SOURCES)
    add_library(fathom_${name} STATIC ${ARG_SOURCES})
    target_link_libraries(fathom_${name} PUBLIC fathom_flags)
    set(visibility PUBLIC)
  else()
    add_library(fathom_${name} INTERFACE)
    target_link_libraries(fathom_${name} INTERFACE fathom_flags)
    set(visibility INTERFACE)
  endif()
  foreach(dep ${ARG_DEPS})
    if(TARGET fathom_${dep})
      target_link_libraries(fathom_${name} ${visibility} fathom_${dep})
    else()
      target_link_libraries(fathom_${name} ${visibility} ${dep})
    endif()
  endforeach()
endfunction()

# fathom_test(FOLDER a_test.cc …): one test program a folder, each of its tests known to ctest.
function(fathom_test name)
  add_executable(${name}_test ${ARGN})
  target_link_libraries(${name}_test PRIVATE fathom_${name} GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name}_test PRIVATE FATHOM_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  gtest_discover_tests(${name}_test TEST_PREFIX "${name}." DISCOVERY_MODE PRE_TEST)
endfunction()

# fathom_program(NAME main.cc … DEPS folders …): an executable in the top of the build folder that carries its
# C++ runtime with it, so that it needs nothing but libc of the machine it runs on.
function(fathom_program name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  list(TRANSFORM ARG_DEPS PREPEND fathom_)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  target_compile_definitions(${name} PRIVATE FATHOM_VERSION="${PROJECT_VERSION}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
  if(NOT FATHOM_SANITIZE_ADDRESS AND NOT FATHOM_SANITIZE_THREAD)  # their runtimes are shared libraries
    target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endfunction()
