#include "sandbox/native/message.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace swe_rl::sandbox {
namespace {

TEST(Record, RoundTrips) {
  Record sent(Kind::kExec);
  sent.Add("command", "echo a=b\nline two");
  sent.Add("env", "A=1");
  sent.Add("env", "B=");
  sent.Add("timeout_ms", 1500);
  Record got(Kind::kFailure);
  ASSERT_TRUE(Record::Parse(sent.Serialize(), &got));
  EXPECT_EQ(got.kind(), Kind::kExec);
  EXPECT_EQ(got.Get("command"), "echo a=b\nline two");
  EXPECT_EQ(got.GetAll("env"), (std::vector<std::string>{"A=1", "B="}));
  EXPECT_EQ(got.GetInt("timeout_ms", 0), 1500);
  EXPECT_EQ(got.GetInt("absent", 7), 7);
}

TEST(Record, RefusesMalformedPackets) {
  Record got(Kind::kFailure);
  EXPECT_FALSE(Record::Parse("", &got));
  EXPECT_FALSE(Record::Parse("Ckey=value", &got));
  EXPECT_FALSE(Record::Parse(std::string("Ckey\0", 5), &got));
}

TEST(Packet, CarriesDescriptors) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  ASSERT_TRUE(SendPacket(pair[0], "Rx", {pipe_fds[1]}));
  std::string packet;
  std::vector<int> fds;
  ASSERT_EQ(ReceivePacket(pair[1], &packet, &fds), 2);
  ASSERT_EQ(fds.size(), 1u);
  ASSERT_EQ(write(fds[0], "z", 1), 1);
  char byte = 0;
  ASSERT_EQ(read(pipe_fds[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'z');
  for (int fd : {pair[0], pair[1], pipe_fds[0], pipe_fds[1], fds[0]}) close(fd);
}

}  // namespace
}  // namespace swe_rl::sandbox
