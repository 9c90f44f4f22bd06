// What the macros' own tests compile.
#pragma once

namespace swe_rl::macros_test {

int Add(int a, int b);

}  // namespace swe_rl::macros_test
