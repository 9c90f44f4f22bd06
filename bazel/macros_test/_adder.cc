#include <pybind11/pybind11.h>

#include "bazel/macros_test/adder.h"

PYBIND11_MODULE(_adder, module) { module.def("add", &swe_rl::macros_test::Add); }
