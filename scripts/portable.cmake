# In place of llama.cmake, for machines that are not here (GLMSERVE_PORTABLE=on): a CPU library for each generation of
# processors, the best of which is chosen when the server starts; devices as libraries that may fail to load (no driver,
# no GPU); the compiler's runtime inside.
include(${CMAKE_CURRENT_LIST_DIR}/llama.cmake)
if(PROJECT_NAME STREQUAL "llama_cpp")
  set(GGML_NATIVE OFF CACHE BOOL "")
  set(GGML_BACKEND_DL ON CACHE BOOL "")
  set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "")
  set(GGML_CUDA_NCCL OFF CACHE BOOL "") # only --split-mode tensor uses it, and it need not be there where the wheel goes
  set(CMAKE_INSTALL_BINDIR llama_cpp/lib CACHE PATH "") # where ggml installs libraries that it loads at run time
  set(CMAKE_INSTALL_RPATH "$ORIGIN")
  foreach(library libgomp.so.1 libstdc++.so.6 libgcc_s.so.1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library} OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
    file(REAL_PATH ${path} path)
    install(FILES ${path} DESTINATION llama_cpp/lib RENAME ${library})
  endforeach()
endif()
