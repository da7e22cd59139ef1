# Read by CMake right after llama-cpp-python's project() (CMAKE_PROJECT_INCLUDE, set by scripts/build_llama).
# The bindings ask for llama.cpp's "common" library by a cache entry; nothing in the Python package loads it, and it is
# a third of the compile time. A plain variable hides the cache entry (policy CMP0126).
set(LLAMA_BUILD_COMMON OFF)
