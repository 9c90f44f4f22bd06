#include "sandbox/native/capped_buffer.h"

#include <gtest/gtest.h>

#include <string>

namespace swe_rl::sandbox {
namespace {

TEST(CappedBuffer, KeepsEverythingBelowTheCap) {
  CappedBuffer buffer(8);
  buffer.Append("abc");
  buffer.Append("defgh");
  EXPECT_EQ(buffer.Kept(), "abcdefgh");
  EXPECT_EQ(buffer.dropped_bytes(), 0u);
}

TEST(CappedBuffer, KeepsHeadAndTail) {
  CappedBuffer buffer(6);
  buffer.Append("0123456789");
  EXPECT_EQ(buffer.Kept(), "012789");
  EXPECT_EQ(buffer.dropped_bytes(), 4u);
}

TEST(CappedBuffer, AgreesWithAPlainStringHoweverItIsCut) {
  std::string text;
  for (int i = 0; i < 500; ++i) text.push_back(static_cast<char>('a' + i % 23));
  for (size_t cap : {1u, 2u, 7u, 64u, 499u, 500u, 501u}) {
    for (size_t step : {1u, 3u, 11u, 63u, 500u}) {
      CappedBuffer buffer(cap);
      for (size_t at = 0; at < text.size(); at += step) buffer.Append(text.substr(at, step));
      const size_t head = cap / 2;
      const std::string want =
          cap >= text.size() ? text : text.substr(0, head) + text.substr(500 - (cap - head));
      EXPECT_EQ(buffer.Kept(), want) << "cap " << cap << " step " << step;
      EXPECT_EQ(buffer.dropped_bytes(), 500 - want.size());
    }
  }
}

TEST(CappedBuffer, ACapOfZeroKeepsNothing) {
  CappedBuffer buffer(0);
  buffer.Append("abc");
  EXPECT_EQ(buffer.Kept(), "");
  EXPECT_EQ(buffer.dropped_bytes(), 3u);
}

}  // namespace
}  // namespace swe_rl::sandbox
