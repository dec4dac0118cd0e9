# attention_autotuner_add_kernel(<target> <source>): one artifact, a shared library of one rendered kernel.
#
# Callers set ATTENTION_AUTOTUNER_INCLUDE_DIR (templates/include) and ATTENTION_AUTOTUNER_CUTLASS_DIR (the folder that
# holds cute/ and cutlass/), and CMAKE_CUDA_ARCHITECTURES: "80" for SASS and PTX, "80-real" for SASS alone.
# This file decides what a kernel is compiled with, and so takes part in the identity of every artifact.

function(attention_autotuner_add_kernel target source)
  add_library(${target} MODULE ${source})
  target_include_directories(${target} PRIVATE "${ATTENTION_AUTOTUNER_INCLUDE_DIR}")
  # SYSTEM: warnings inside CUTLASS are not ours to act on.
  target_include_directories(${target} SYSTEM PRIVATE "${ATTENTION_AUTOTUNER_CUTLASS_DIR}")
  target_compile_definitions(${target} PRIVATE NDEBUG)
  # -Xptxas -v: registers, spills and stack go into the build record. No fast math: the kernels choose their own
  # approximations, and everything else stays IEEE.
  target_compile_options(${target} PRIVATE -O3 --expt-relaxed-constexpr -Xptxas=-v)
  # Undefined symbols fail the link and not the load; what the static CUDA runtime brings stays inside, so that two
  # kernels in one process never share it.
  target_link_options(${target} PRIVATE LINKER:-z,defs LINKER:--exclude-libs,ALL LINKER:--gc-sections)
  set_target_properties(
    ${target}
    PROPERTIES PREFIX ""
               SUFFIX ".so"
               CUDA_STANDARD 17
               CUDA_STANDARD_REQUIRED ON
               CUDA_EXTENSIONS OFF
               CUDA_RUNTIME_LIBRARY Static
               CUDA_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
endfunction()
