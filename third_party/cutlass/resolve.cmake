# attention_autotuner_resolve_cutlass(<variable>): the folder that holds cute/ and cutlass/, in the order that
# codegen/cutlass.py follows: CUTLASS_DIR, a checkout in this folder, the PyPI package of Python3_EXECUTABLE.

# The same pin as PINNED_VERSION in codegen/cutlass.py; a test compares them.
set(ATTENTION_AUTOTUNER_CUTLASS_VERSION 4.2.0)

function(attention_autotuner_resolve_cutlass variable)
  set(places "")
  if(CUTLASS_DIR)
    list(APPEND places "${CUTLASS_DIR}/include" "${CUTLASS_DIR}")
  elseif(DEFINED ENV{ATTENTION_AUTOTUNER_CUTLASS_DIR})
    list(APPEND places "$ENV{ATTENTION_AUTOTUNER_CUTLASS_DIR}/include" "$ENV{ATTENTION_AUTOTUNER_CUTLASS_DIR}")
  else()
    list(APPEND places "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/include")
    find_package(Python3 COMPONENTS Interpreter QUIET)
    if(Python3_FOUND)
      execute_process(
        COMMAND
          "${Python3_EXECUTABLE}" -c
          "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE package
        OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(package)
        list(APPEND places "${package}/source/include")
      endif()
    endif()
  endif()
  foreach(place IN LISTS places)
    if(EXISTS "${place}/cute/layout.hpp" AND EXISTS "${place}/cutlass/version.h")
      file(STRINGS "${place}/cutlass/version.h" lines REGEX "^#define CUTLASS_(MAJOR|MINOR|PATCH) ")
      string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
      list(JOIN numbers "." version)
      if(NOT version VERSION_EQUAL ATTENTION_AUTOTUNER_CUTLASS_VERSION)
        message(WARNING "CUTLASS ${version} at ${place}; kernels are tested with ${ATTENTION_AUTOTUNER_CUTLASS_VERSION}")
      endif()
      set(${variable} "${place}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(
    FATAL_ERROR
      "no CUTLASS headers (cute/layout.hpp) in: ${places}. Install them with\n"
      "  pip install --no-deps nvidia-cutlass==${ATTENTION_AUTOTUNER_CUTLASS_VERSION}.0\n"
      "or point CUTLASS_DIR at a checkout.")
endfunction()
