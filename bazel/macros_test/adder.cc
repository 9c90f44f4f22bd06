#include "bazel/macros_test/adder.h"

namespace swe_rl::macros_test {

int Add(int a, int b) { return a + b; }

}  // namespace swe_rl::macros_test
