// The TCP tree between threads; transfer_test.py adds processes that die and stop.
#include "weightsync/core/tcp_tree.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "weightsync/core/bucket_window.h"
#include "weightsync/core/socket.h"
#include "weightsync/core/tcp_wire.h"

namespace swe_rl::weightsync {
namespace {

constexpr double kTimeoutS = 20.0;
constexpr uint64_t kBucketBytes = (2 << 20) + 77;  // more than one chunk, and no round number
const std::string kToken = "0123456789abcdef";

std::vector<char> Bytes(uint64_t bucket) {
  std::vector<char> bytes(kBucketBytes);
  std::iota(bytes.begin(), bytes.end(), static_cast<char>(bucket * 31));
  return bytes;
}

// With local sockets and without.
class TcpTreeTest : public testing::TestWithParam<bool> {
 protected:
  void Make(uint32_t num_receivers, uint32_t fan_out, double stall_timeout_s = 5.0) {
    const Status status = TcpSender::Create({.host = "127.0.0.1",
                                             .token = kToken,
                                             .epoch = 7,
                                             .num_receivers = num_receivers,
                                             .fan_out = fan_out,
                                             .num_buffers = 2,
                                             .buffer_bytes = kBucketBytes,
                                             .with_checksums = true,
                                             .stall_timeout_s = stall_timeout_s,
                                             .with_local_sockets = GetParam()},
                                            &sender_);
    ASSERT_TRUE(status.ok()) << status.message;
  }

  std::unique_ptr<TcpReceiver> Attach(uint32_t index) {
    std::unique_ptr<TcpReceiver> receiver;
    const Status status =
        TcpReceiver::Attach("127.0.0.1", sender_->port(), kToken, 7, index, kTimeoutS, &receiver);
    EXPECT_TRUE(status.ok()) << status.message;
    return receiver;
  }

  // Takes `num` buckets; false when one was wrong or did not come.
  static bool Take(TcpReceiver* receiver, uint64_t first, uint64_t num,
                   double timeout_s = kTimeoutS) {
    for (uint64_t i = first; i < first + num; ++i) {
      Bucket bucket;
      const Status status = receiver->Next("x", timeout_s, &bucket);
      if (!status.ok()) return false;
      const std::vector<char> wanted = Bytes(i);
      if (bucket.sequence != i || bucket.size != wanted.size() ||
          std::memcmp(bucket.data, wanted.data(), wanted.size()) != 0) {
        ADD_FAILURE() << "bucket " << i << " is wrong";
        return false;
      }
      receiver->Release();
    }
    return true;
  }

  std::future<bool> TakeAll(uint32_t index, uint64_t num) {
    return std::async(std::launch::async, [this, index, num] {
      const auto receiver = Attach(index);
      const bool is_right = receiver != nullptr && Take(receiver.get(), 0, num);
      if (is_right) receiver->Verified(700 + index);
      return is_right;
    });
  }

  Status Send(uint64_t bucket, double timeout_s = kTimeoutS) {
    const auto bytes = std::make_shared<std::vector<char>>(Bytes(bucket));
    return sender_->Send({{bytes->data(), bytes->size(), 0}}, "x", timeout_s, bytes);
  }

  std::unique_ptr<TcpSender> sender_;
};

TEST_P(TcpTreeTest, EveryReceiverGetsEveryBucketAndTheSenderSendsFanOutTimes) {
  constexpr uint64_t kNum = 7;
  for (const uint32_t fan_out : {1u, 2u, 5u}) {
    Make(5, fan_out);
    std::vector<std::future<bool>> receivers;
    for (uint32_t i = 0; i < 5; ++i) receivers.push_back(TakeAll(i, kNum));
    for (uint64_t i = 0; i < kNum; ++i) ASSERT_TRUE(Send(i).ok());
    ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
    for (auto& receiver : receivers) EXPECT_TRUE(receiver.get());
    for (uint32_t i = 0; i < 5; ++i) {
      EXPECT_EQ(sender_->receiver_state(i), ReceiverState::kVerified) << sender_->receiver_error(i);
      EXPECT_TRUE(sender_->was_touched(i));
      EXPECT_EQ(sender_->digest(i), 700 + i);
    }
    EXPECT_EQ(sender_->num_bytes_sent(), fan_out * kNum * kBucketBytes);
  }
}

// More pieces than one call of the kernel takes, of odd sizes, with gaps of every length and one
// that is longer than what gaps are filled from.
TEST_P(TcpTreeTest, PiecesArriveWhereTheyBelongWithZeroesBetween) {
  Make(3, 2);
  std::vector<std::future<std::vector<char>>> receivers;
  for (uint32_t i = 0; i < 3; ++i) {
    receivers.push_back(std::async(std::launch::async, [this, i] {
      std::vector<char> got;
      const auto receiver = Attach(i);
      Bucket bucket;
      if (receiver == nullptr || !receiver->Next("x", kTimeoutS, &bucket).ok()) return got;
      got.assign(bucket.data, bucket.data + bucket.size);
      receiver->Release();
      receiver->Verified();
      return got;
    }));
  }
  const auto bytes = std::make_shared<std::vector<char>>(Bytes(1));
  std::vector<char> wanted(kBucketBytes);
  std::vector<Piece> pieces;
  uint64_t from = 0, offset = 11;
  for (uint64_t i = 0; i < 1500; ++i) {
    const uint64_t size = 1 + i * 7 % 1300;
    pieces.push_back({bytes->data() + from, size, offset});
    std::memcpy(wanted.data() + offset, bytes->data() + from, size);
    from += size;
    offset += size + (i == 700 ? 9000 : i % 64);
  }
  wanted.resize(pieces.back().offset + pieces.back().size);
  ASSERT_TRUE(sender_->Send(pieces, "x", kTimeoutS, bytes).ok());
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  for (auto& receiver : receivers) EXPECT_TRUE(receiver.get() == wanted);
}

TEST_P(TcpTreeTest, AnOwnerIsHeldUntilItsBucketIsReleased) {
  Make(1, 1);
  std::future<bool> receiver = TakeAll(0, 4);
  std::vector<std::weak_ptr<void>> owners;
  for (uint64_t i = 0; i < 4; ++i) {
    const auto bytes = std::make_shared<std::vector<char>>(Bytes(i));
    owners.push_back(bytes);
    ASSERT_TRUE(sender_->Send({{bytes->data(), bytes->size(), 0}}, "x", kTimeoutS, bytes).ok());
  }
  EXPECT_TRUE(owners[0].expired());
  EXPECT_TRUE(owners[1].expired());
  EXPECT_FALSE(owners[3].expired());
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_TRUE(receiver.get());
  sender_->Close();
  EXPECT_TRUE(owners[3].expired());
}

TEST_P(TcpTreeTest, PiecesThatLeaveTheBucketAreRefused) {
  Make(1, 1);
  const std::vector<char> bytes = Bytes(0);
  const Status status = sender_->Send({{bytes.data(), bytes.size(), 1}}, "x", kTimeoutS);
  EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
  EXPECT_NE(status.message.find("bucket 0 (x): piece 0"), std::string::npos) << status.message;
}

// A sender of the test's own, whose checksum is of other bytes than it sends.
INSTANTIATE_TEST_SUITE_P(LocalSockets, TcpTreeTest, testing::Bool());

TEST(ListenerTest, ALocalSocketIsFoundByTheAddressOfItsListener) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::Listen("127.0.0.1", &listener).ok());
  std::unique_ptr<Socket> there;
  EXPECT_EQ(Socket::ConnectLocal("127.0.0.1", listener->port(), &there).code,
            StatusCode::kUnavailable);
  listener->ListenLocally();
  EXPECT_FALSE(Socket::ConnectLocal("127.0.0.2", listener->port(), &there).ok());
  ASSERT_TRUE(Socket::ConnectLocal("127.0.0.1", listener->port(), &there).ok());
  std::unique_ptr<Socket> here;
  ASSERT_TRUE(listener->Accept(After(kTimeoutS), &here).ok());
  // A port is a listener's own: TCP still comes to the same one.
  std::unique_ptr<Socket> there_too, here_too;
  ASSERT_TRUE(Socket::Connect("127.0.0.1", listener->port(), After(kTimeoutS), &there_too).ok());
  ASSERT_TRUE(listener->Accept(After(kTimeoutS), &here_too).ok());
  uint64_t sent = 42, got = 0;
  ASSERT_TRUE(there->Write(&sent, sizeof(sent), After(kTimeoutS)).ok());
  ASSERT_TRUE(here->Read(&got, sizeof(got), After(kTimeoutS)).ok());
  EXPECT_EQ(got, 42u);
  const uint16_t port = listener->port();
  listener.reset();
  EXPECT_FALSE(Socket::ConnectLocal("127.0.0.1", port, &there).ok());
}

TEST(TcpReceiverTest, BytesThatAreNotThoseThatWereSummedAreRefused) {
  std::unique_ptr<Listener> listener;
  ASSERT_TRUE(Listener::Listen("127.0.0.1", &listener).ok());
  auto sending = std::async(std::launch::async, [&] {
    std::unique_ptr<Socket> control, data;
    Hello hello;
    if (!listener->Accept(After(kTimeoutS), &control).ok()) return false;
    if (!control->Read(&hello, sizeof(hello), After(kTimeoutS)).ok()) return false;
    Welcome welcome = {};
    welcome.buffer_bytes = 64;
    welcome.stall_timeout_s = 5;
    welcome.num_buffers = 1;
    welcome.with_checksums = 1;
    if (!control->Write(&welcome, sizeof(welcome), After(kTimeoutS)).ok()) return false;
    if (!WriteMessage(control.get(), MessageType::kParent).ok()) return false;
    if (!listener->Accept(After(kTimeoutS), &data).ok()) return false;
    if (!data->Read(&hello, sizeof(hello), After(kTimeoutS)).ok()) return false;
    const FrameHeader header = {7, 0, 8};
    const char bytes[] = "12345678";
    const uint64_t checksum = 1;
    if (!data->Write(&header, sizeof(header), After(kTimeoutS)).ok()) return false;
    if (!data->Write(bytes, 8, After(kTimeoutS)).ok()) return false;
    if (!data->Write(&checksum, sizeof(checksum), After(kTimeoutS)).ok()) return false;
    Message message;
    std::string text;
    if (!ReadMessage(control.get(), &message, &text).ok()) return false;
    if (message.type != MessageType::kTake) return false;
    if (!WriteMessage(control.get(), MessageType::kGo).ok()) return false;
    return !ReadMessage(control.get(), &message, &text).ok();  // until the receiver ends
  });
  std::unique_ptr<TcpReceiver> receiver;
  ASSERT_TRUE(
      TcpReceiver::Attach("127.0.0.1", listener->port(), kToken, 7, 0, kTimeoutS, &receiver).ok());
  Bucket bucket;
  const Status status = receiver->Next("x", kTimeoutS, &bucket);
  EXPECT_EQ(status.code, StatusCode::kDataLoss) << status.message;
  EXPECT_NE(status.message.find("bucket 0 (x): checksum"), std::string::npos) << status.message;
  receiver.reset();
  EXPECT_TRUE(sending.get());
}

TEST_P(TcpTreeTest, WhoseParentEndsTakesTheRestFromTheSender) {
  constexpr uint64_t kNum = 6;
  Make(3, 1);
  auto parent = Attach(0);
  std::future<bool> second = TakeAll(1, kNum), third = TakeAll(2, kNum);
  auto sending = std::async(std::launch::async, [&] {
    for (uint64_t i = 0; i < kNum; ++i) {
      if (!Send(i).ok()) return false;
    }
    return sender_->Finish(kTimeoutS).ok();
  });
  EXPECT_TRUE(Take(parent.get(), 0, 2));
  parent.reset();
  EXPECT_TRUE(sending.get());
  EXPECT_TRUE(second.get());
  EXPECT_TRUE(third.get());
  EXPECT_EQ(sender_->receiver_state(0), ReceiverState::kFailed);
  EXPECT_TRUE(sender_->was_touched(0));
  EXPECT_EQ(sender_->receiver_state(1), ReceiverState::kVerified);
  EXPECT_EQ(sender_->receiver_state(2), ReceiverState::kVerified);
}

TEST_P(TcpTreeTest, WhoIsLateIsLeftOutAndNamed) {
  Make(2, 1);
  const auto slow = Attach(0);
  std::future<bool> other = TakeAll(1, 4);
  for (uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(Send(i, i < 2 ? kTimeoutS : 0.3).ok());
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_TRUE(other.get());
  EXPECT_EQ(sender_->receiver_error(0),
            "it did not free a buffer for bucket 2 (x) within 0.3 s (it has released 0 "
            "buckets)");
  EXPECT_FALSE(sender_->was_touched(0));
  EXPECT_FALSE(Take(slow.get(), 0, 1));
}

TEST_P(TcpTreeTest, WhoNeverComesIsLeftOut) {
  Make(2, 1);
  std::future<bool> second = TakeAll(1, 1);
  ASSERT_TRUE(Send(0, 0.5).ok());
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_TRUE(second.get()) << "its parent never came";
  EXPECT_EQ(sender_->receiver_state(0), ReceiverState::kFailed);
}

TEST_P(TcpTreeTest, NothingIsTakenAfterAnAbort) {
  Make(1, 1);
  const auto receiver = Attach(0);
  ASSERT_TRUE(Send(0).ok());
  sender_->Abort();
  EXPECT_FALSE(sender_->was_touched(0));
  Bucket bucket;
  const Status status = receiver->Next("x", kTimeoutS, &bucket);
  EXPECT_EQ(status.code, StatusCode::kUnavailable);
  EXPECT_NE(status.message.find("gave up"), std::string::npos) << status.message;
  EXPECT_FALSE(sender_->was_touched(0));
}

TEST_P(TcpTreeTest, AReceiverSaysWhyItFails) {
  Make(1, 1);
  const auto receiver = Attach(0);
  ASSERT_TRUE(Send(0).ok());
  receiver->Fail("no such tensor");
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_EQ(sender_->receiver_error(0), "no such tensor");
  EXPECT_EQ(Send(1).code, StatusCode::kUnavailable);
}

TEST_P(TcpTreeTest, StrangersAndOldEpochsAreRefused) {
  Make(1, 1);
  std::unique_ptr<TcpReceiver> receiver;
  const auto attach = [&](const std::string& token, uint64_t epoch, uint32_t index) {
    return TcpReceiver::Attach("127.0.0.1", sender_->port(), token, epoch, index, kTimeoutS,
                               &receiver)
        .code;
  };
  EXPECT_EQ(attach("fedcba9876543210", 7, 0), StatusCode::kUnavailable);
  EXPECT_EQ(attach(kToken, 6, 0), StatusCode::kFenced);
  EXPECT_EQ(attach(kToken, 7, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(attach("short", 7, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(sender_->receiver_state(0), ReceiverState::kAbsent);
  EXPECT_EQ(attach(kToken, 7, 0), StatusCode::kOk);
}

TEST_P(TcpTreeTest, AScanDelaysReceiversAndCostsNoneOfThem) {
  Make(2, 1);
  std::vector<std::unique_ptr<Socket>> strangers;
  for (int i = 0; i < 600; ++i) {  // more than there are places
    std::unique_ptr<Socket> socket;
    if (!Socket::Connect("127.0.0.1", sender_->port(), After(0.2), &socket).ok()) continue;
    if (i % 3 == 0) continue;  // closed again
    if (i % 3 == 1 && !socket->Write("junk", 4, After(kTimeoutS)).ok()) continue;
    strangers.push_back(std::move(socket));
  }
  ASSERT_GT(strangers.size(), 200u);
  auto first = TakeAll(0, 3), second = TakeAll(1, 3);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Send(i).ok());
  ASSERT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_TRUE(first.get());
  EXPECT_TRUE(second.get());
}

TEST_P(TcpTreeTest, AReasonIsCutBetweenCharacters) {
  Make(1, 1);
  const auto receiver = Attach(0);
  std::string reason(4095, 'x');
  reason += "\xC3\xA9 and more";  // a character of two bytes over the end
  receiver->Fail(reason);
  EXPECT_TRUE(sender_->Finish(kTimeoutS).ok());
  EXPECT_EQ(sender_->receiver_error(0), std::string(4095, 'x'));
}

TEST_P(TcpTreeTest, ASenderThatEndsEndsTheWaitOfItsReceivers) {
  Make(1, 1);
  const auto receiver = Attach(0);
  auto waiting = std::async(std::launch::async, [&] {
    Bucket bucket;
    return receiver->Next("x", kTimeoutS, &bucket).code;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  sender_.reset();
  EXPECT_EQ(waiting.get(), StatusCode::kUnavailable);
}

TEST_P(TcpTreeTest, ABucketThatDoesNotComeIsNamed) {
  Make(1, 1);
  const auto receiver = Attach(0);
  Bucket bucket;
  const Status status = receiver->Next("w", 0.2, &bucket);
  EXPECT_EQ(status.code, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message, "bucket 0 (w) did not arrive within 0.2 s");
}

}  // namespace
}  // namespace swe_rl::weightsync
