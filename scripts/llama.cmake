# Read by CMake right after llama-cpp-python's project() (CMAKE_PROJECT_INCLUDE, set by scripts/build_llama).
# The bindings ask for llama.cpp's "common" library by a cache entry; nothing in the Python package loads it, and it is
# a third of the compile time. A plain variable hides the cache entry (policy CMP0126).
set(LLAMA_BUILD_COMMON OFF)

# CUDA's libraries are looked for where the packages nvidia-cublas and nvidia-cuda-runtime put them (13 in one folder, 12
# in two), and where the toolkit was that this is built with: its folder need not be one that the loader knows.
function(glmserve_find_cuda)
  if(TARGET ggml-cuda)
    set(packages "$ORIGIN/../../nvidia")
    set(places "$ORIGIN;${packages}/cu13/lib;${packages}/cublas/lib;${packages}/cuda_runtime/lib")
    if(GGML_NATIVE)
      find_package(CUDAToolkit QUIET) # what the CUDA folder found is known in there only
      list(APPEND places ${CUDAToolkit_LIBRARY_DIR})
    endif()
    set_target_properties(ggml-cuda PROPERTIES INSTALL_RPATH "${places}")
  endif()
endfunction()
if(PROJECT_NAME STREQUAL "llama_cpp")
  cmake_language(DEFER CALL glmserve_find_cuda)
endif()
