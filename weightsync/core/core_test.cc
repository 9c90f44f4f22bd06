// The core between two threads: everything but the other process, which transfer_test.py adds.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "weightsync/core/checksum.h"
#include "weightsync/core/packer.h"
#include "weightsync/core/shm_ring.h"

namespace swe_rl::weightsync {
namespace {

uint64_t Sum(const std::string& text) {
  Checksum checksum;
  checksum.Update(text.data(), text.size());
  return checksum.Digest();
}

std::vector<unsigned char> Bytes(size_t size, int seed) {
  std::vector<unsigned char> bytes(size);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(seed));
  return bytes;
}

TEST(ChecksumTest, HasThePublishedValuesOfXxh64) {
  EXPECT_EQ(Sum(""), 0xEF46DB3751D8E999u);
  EXPECT_EQ(Sum("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(Sum("abc"), 0x44BC2CF5AD770999u);
  EXPECT_EQ(Sum("The quick brown fox jumps over the lazy dog"), 0x0B242D361FDA71BCu);
}

TEST(ChecksumTest, DoesNotDependOnHowBytesAreCut) {
  const auto bytes = Bytes(1000, 3);
  Checksum whole;
  whole.Update(bytes.data(), bytes.size());
  for (size_t step : {1, 7, 31, 32, 33, 999}) {
    Checksum parts;
    for (size_t i = 0; i < bytes.size(); i += step) {
      parts.Update(bytes.data() + i, std::min(step, bytes.size() - i));
    }
    EXPECT_EQ(parts.Digest(), whole.Digest()) << step;
  }
}

TEST(PackerTest, PlacesPiecesAndZeroesGaps) {
  // Larger than the threshold of streaming stores, and of odd size.
  const auto small = Bytes(5, 1), large = Bytes((1 << 20) + 13, 2);
  std::vector<unsigned char> bucket(64 + large.size(), 0xFF);
  Packed packed;
  ASSERT_TRUE(Pack({{small.data(), small.size(), 0}, {large.data(), large.size(), 64}},
                   bucket.data(), bucket.size(), true, &packed)
                  .ok());
  EXPECT_EQ(packed.size, bucket.size());
  EXPECT_EQ(std::memcmp(bucket.data(), small.data(), small.size()), 0);
  for (size_t i = small.size(); i < 64; ++i) EXPECT_EQ(bucket[i], 0);
  EXPECT_EQ(std::memcmp(bucket.data() + 64, large.data(), large.size()), 0);
  Checksum checksum;
  checksum.Update(bucket.data(), bucket.size());
  EXPECT_EQ(packed.checksum, checksum.Digest());
}

TEST(PackerTest, UnpackPutsPiecesBackAndRefusesThoseThatLeaveTheBucket) {
  std::vector<char> large((1 << 20) + 5), bucket((1 << 20) + 64);
  std::iota(bucket.begin(), bucket.end(), static_cast<char>(3));
  char small[7] = {};
  const std::vector<Piece> pieces = {{small, 7, 1}, {large.data(), large.size(), 13}};
  ASSERT_TRUE(Unpack(bucket.data(), bucket.size(), pieces).ok());
  EXPECT_EQ(std::memcmp(small, bucket.data() + 1, 7), 0);
  EXPECT_EQ(std::memcmp(large.data(), bucket.data() + 13, large.size()), 0);
  EXPECT_EQ(Unpack(bucket.data(), large.size(), pieces).code, StatusCode::kInvalidArgument);
}

TEST(PackerTest, RefusesOverlapAndOverflow) {
  const auto bytes = Bytes(100, 0);
  unsigned char bucket[128] = {};
  Packed packed;
  const auto pack = [&](std::vector<Piece> pieces) {
    return Pack(pieces, bucket, sizeof(bucket), false, &packed).code;
  };
  EXPECT_EQ(pack({{bytes.data(), 64, 0}, {bytes.data(), 10, 63}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{bytes.data(), 100, 64}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(pack({{bytes.data(), UINT64_MAX, 64}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(bucket[0], 0);
}

class RingTest : public testing::Test {
 protected:
  void Make(uint32_t num_receivers, uint32_t num_buffers) {
    // A process of another namespace may have this one's number, and shares /dev/shm.
    std::random_device random;
    name_ = "swe_rl_ws_test_" + std::to_string(random()) + "_" + std::to_string(random());
    ASSERT_TRUE(
        RingSender::Create(name_, {7, num_receivers, num_buffers, 4096, true}, &sender_).ok());
  }
  std::unique_ptr<RingReceiver> Attach(uint32_t index) {
    std::unique_ptr<RingReceiver> receiver;
    EXPECT_TRUE(RingReceiver::Attach(name_, 7, index, &receiver).ok());
    return receiver;
  }
  Status Send(const std::string& text, double timeout_s = 5) {
    return sender_->Send({{text.data(), text.size(), 0}}, text, timeout_s);
  }

  std::string name_;
  std::unique_ptr<RingSender> sender_;
};

TEST_F(RingTest, EveryReceiverGetsEveryBucketInOrder) {
  Make(2, 2);
  const auto receive = [&](uint32_t index) {
    auto receiver = Attach(index);
    for (int i = 0; i < 100; ++i) {
      Bucket bucket;
      ASSERT_TRUE(receiver->Next("x", 5, &bucket).ok());
      EXPECT_EQ(bucket.sequence, static_cast<uint64_t>(i));
      EXPECT_EQ(std::string(bucket.data, bucket.size), "bucket " + std::to_string(i));
      receiver->Release();
    }
    receiver->Verified(700 + index);
  };
  std::thread first(receive, 0), second(receive, 1);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Send("bucket " + std::to_string(i)).ok());
  ASSERT_TRUE(sender_->Finish(5).ok());
  first.join();
  second.join();
  EXPECT_EQ(sender_->receiver_state(0), ReceiverState::kVerified);
  EXPECT_EQ(sender_->receiver_state(1), ReceiverState::kVerified);
  EXPECT_EQ(sender_->digest(0), 700);
  EXPECT_EQ(sender_->digest(1), 701);
}

TEST_F(RingTest, ALateReceiverIsLeftOutAndTheOthersGoOn) {
  Make(2, 1);
  auto quick = Attach(0), late = Attach(1);
  Bucket bucket;
  ASSERT_TRUE(Send("first").ok());
  ASSERT_TRUE(quick->Next("first", 1, &bucket).ok());
  quick->Release();
  ASSERT_TRUE(late->Next("first", 1, &bucket).ok());  // and never releases it
  ASSERT_TRUE(Send("second", 0.05).ok());
  EXPECT_EQ(sender_->receiver_state(1), ReceiverState::kFailed);
  EXPECT_NE(sender_->receiver_error(1).find("bucket 1 (second)"), std::string::npos);
  EXPECT_TRUE(sender_->was_touched(1));
  ASSERT_TRUE(quick->Next("second", 1, &bucket).ok());
  late->Release();
  EXPECT_EQ(late->Next("second", 1, &bucket).code, StatusCode::kUnavailable);
  late->Verified();  // too late: the sender's word stands
  EXPECT_EQ(sender_->receiver_state(1), ReceiverState::kFailed);
}

TEST_F(RingTest, AReceiverThatNeverCameIsUntouched) {
  Make(1, 1);
  ASSERT_TRUE(Send("first").ok());
  EXPECT_EQ(Send("second", 0.02).code, StatusCode::kUnavailable);
  EXPECT_FALSE(sender_->was_touched(0));
  // If it comes now, it touches nothing.
  auto receiver = Attach(0);
  Bucket bucket;
  EXPECT_EQ(receiver->Next("first", 1, &bucket).code, StatusCode::kUnavailable);
}

TEST_F(RingTest, WaitsEndAtTheirDeadlineAndNameTheBucket) {
  Make(1, 2);
  auto receiver = Attach(0);
  Bucket bucket;
  const Status status = receiver->Next("model.norm.weight", 0.02, &bucket);
  EXPECT_EQ(status.code, StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message.find("bucket 0 (model.norm.weight)"), std::string::npos);
}

TEST_F(RingTest, AbortEndsWaitsOnBothSides) {
  Make(1, 1);
  auto receiver = Attach(0);
  ASSERT_TRUE(Send("first").ok());
  Bucket bucket;
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    sender_->Abort();
  });
  EXPECT_EQ(Send("second", 30).code, StatusCode::kUnavailable);
  aborter.join();
  EXPECT_EQ(receiver->Next("first", 30, &bucket).code, StatusCode::kUnavailable);
}

TEST_F(RingTest, AChangedByteIsFound) {
  Make(1, 2);
  auto receiver = Attach(0);
  ASSERT_TRUE(Send("sound").ok());
  Bucket bucket;
  ASSERT_TRUE(receiver->Next("sound", 1, &bucket).ok());
  receiver->Release();
  ASSERT_TRUE(Send("to be torn").ok());
  const_cast<char*>(bucket.data)[4096] ^= 1;  // the second buffer follows the first
  EXPECT_EQ(receiver->Next("torn", 1, &bucket).code, StatusCode::kDataLoss);
}

TEST_F(RingTest, AReasonIsCutBetweenCharacters) {
  Make(1, 2);
  const auto receiver = Attach(0);
  std::string accents;
  for (int i = 0; i < 1000; ++i) accents += "\xC3\xA9";  // two bytes each
  receiver->Fail("x" + accents);
  const std::string told = sender_->receiver_error(0);
  EXPECT_GT(told.size(), 400u);
  EXPECT_EQ(told.size() % 2, 1u);
  EXPECT_EQ(told, ("x" + accents).substr(0, told.size()));
}

TEST_F(RingTest, AnotherEpochIsFenced) {
  Make(1, 1);
  std::unique_ptr<RingReceiver> receiver;
  EXPECT_EQ(RingReceiver::Attach(name_, 6, 0, &receiver).code, StatusCode::kFenced);
  EXPECT_EQ(RingReceiver::Attach(name_, 7, 1, &receiver).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(RingReceiver::Attach(name_ + "x", 7, 0, &receiver).code, StatusCode::kUnavailable);
}

TEST_F(RingTest, CloseUnlinksAndSweepSparesTheLiving) {
  Make(1, 1);
  EXPECT_EQ(Sweep(name_), 0);
  std::unique_ptr<RingReceiver> receiver;
  EXPECT_TRUE(RingReceiver::Attach(name_, 7, 0, &receiver).ok());
  sender_->Close();
  EXPECT_EQ(RingReceiver::Attach(name_, 7, 0, &receiver).code, StatusCode::kUnavailable);
  EXPECT_EQ(Sweep(name_), 0);
}

}  // namespace
}  // namespace swe_rl::weightsync
