"""Data: Jinja instantiations, the CUDA headers they include, and the CMake project that builds them."""
