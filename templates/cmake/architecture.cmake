# attention_autotuner_use_own_architecture(<target> <source>): compile a kernel for the architecture that it needs.
#
# Some families exist for one architecture only, whatever the others beside them are compiled for. Such a source has a
# file of its name with the suffix .architecture beside it, which holds what CUDA_ARCHITECTURES is to be; codegen/build.py
# and `attention-autotuner render` write it.

function(attention_autotuner_use_own_architecture target source)
  get_filename_component(folder "${source}" DIRECTORY)
  get_filename_component(name "${source}" NAME_WE)
  if(EXISTS "${folder}/${name}.architecture")
    file(READ "${folder}/${name}.architecture" architecture)
    string(STRIP "${architecture}" architecture)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architecture}")
  endif()
endfunction()
