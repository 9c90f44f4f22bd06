#include "bazel/macros_test/adder.h"

#include <gtest/gtest.h>

namespace swe_rl::macros_test {
namespace {

TEST(AdderTest, Adds) { EXPECT_EQ(Add(2, 3), 5); }

}  // namespace
}  // namespace swe_rl::macros_test
