// The RCCL protocol over fake_rccl, whose head says what that proves and what not.
#include "weightsync/core/rccl_group.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace swe_rl::weightsync {
namespace {

constexpr char kLibrary[] = "weightsync/core/libfake_rccl.so";
constexpr double kTimeoutS = 20.0;
constexpr uint32_t kWorld = 3;
constexpr uint64_t kBucketBytes = 4096;
constexpr size_t kNumBuckets = 9;
const std::string kDigest(32, 'd');

void Plant(const char* name, int value) {
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(handle, nullptr) << dlerror();
  reinterpret_cast<void (*)(const char*, int)>(dlsym(handle, "FakeRcclSet"))(name, value);
}

// One rank's tensors: three a bucket, of different sizes.
class Tensors {
 public:
  Tensors(bool is_source, int seed) {
    for (size_t bucket = 0; bucket < kNumBuckets; ++bucket) {
      for (size_t size : {1000, 64, 1777}) {
        bytes_.emplace_back(size);
        if (is_source) {
          std::iota(bytes_.back().begin(), bytes_.back().end(),
                    static_cast<char>(seed + bytes_.size()));
        }
      }
    }
  }

  std::vector<RcclBucket> Buckets() {
    std::vector<RcclBucket> buckets;
    for (size_t i = 0; i < bytes_.size(); i += 3) {
      buckets.push_back({{{bytes_[i].data(), 1000, 0},
                          {bytes_[i + 1].data(), 64, 1024},
                          {bytes_[i + 2].data(), 1777, 1088}},
                         1088 + 1777,
                         "tensor " + std::to_string(i)});
    }
    return buckets;
  }

  bool operator==(const Tensors& other) const { return bytes_ == other.bytes_; }

 private:
  std::vector<std::vector<char>> bytes_;
};

class RcclGroupTest : public testing::Test {
 protected:
  using Body = std::function<Status(uint32_t, RcclGroup*)>;

  void SetUp() override {
    Plant("delay_us", 200);
    Plant("ignore_waits", 0);
    Plant("hang_rank", -1);
    const Status status = RcclApi::Load(kLibrary, kLibrary, &api_);
    ASSERT_TRUE(status.ok()) << status.message;
  }

  // Runs `body` as every rank and returns what each said.
  std::vector<Status> Run(const Body& body, uint32_t num_buffers = 2, bool with_checksums = true) {
    std::string id;
    EXPECT_TRUE(RcclGroup::MakeUniqueId(*api_, &id).ok());
    std::vector<std::future<Status>> ranks;
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      ranks.push_back(std::async(std::launch::async, [&, rank] {
        std::unique_ptr<RcclGroup> group;
        const RcclOptions options = {rank, kWorld, 0, kBucketBytes, num_buffers, with_checksums};
        const Status status = RcclGroup::Create(*api_, options, id, kTimeoutS, &group);
        return status.ok() ? body(rank, group.get()) : status;
      }));
    }
    std::vector<Status> results;
    for (auto& rank : ranks) results.push_back(rank.get());
    return results;
  }

  static Status Send(RcclGroup* group, Tensors* tensors, uint64_t version,
                     double timeout_s = kTimeoutS) {
    std::vector<RcclBucketTimes> times;
    return group->Broadcast(tensors->Buckets(), version, timeout_s, &times);
  }

  std::unique_ptr<RcclApi> api_;
};

TEST_F(RcclGroupTest, HundredOfHundredUpdatesAreRight) {
  int num_right = 0;
  for (const uint32_t num_buffers : {1u, 2u, 3u, 4u}) {
    const auto results = Run(
        [&](uint32_t rank, RcclGroup* group) {
          if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
          for (int update = 1; update <= 25; ++update) {
            Tensors own(rank == 0, update);
            if (Status status = Send(group, &own, update); !status.ok()) return status;
            if (!(own == Tensors(true, update))) {
              return Error(StatusCode::kDataLoss, "wrong bytes in " + std::to_string(update));
            }
            if (rank == 0) ++num_right;
          }
          return Status();
        },
        num_buffers);
    for (const Status& status : results) EXPECT_TRUE(status.ok()) << status.message;
  }
  EXPECT_EQ(num_right, 100);
}

TEST_F(RcclGroupTest, BucketTimesAreInOrder) {
  std::vector<RcclBucketTimes> times;
  const auto results = Run([&](uint32_t rank, RcclGroup* group) {
    Status status = group->Agree(kDigest, kTimeoutS);
    Tensors own(rank == 0, 1);
    std::vector<RcclBucketTimes> mine;
    if (status.ok()) status = group->Broadcast(own.Buckets(), 1, kTimeoutS, &mine);
    if (rank == 0) times = mine;
    return status;
  });
  for (const Status& status : results) ASSERT_TRUE(status.ok()) << status.message;
  ASSERT_EQ(times.size(), kNumBuckets);
  for (size_t i = 0; i < times.size(); ++i) {
    EXPECT_EQ(times[i].num_bytes, 1088u + 1777u);
    EXPECT_LT(times[i].issued_s, times[i].done_s);
    if (i > 0) {
      EXPECT_LT(times[i - 1].done_s, times[i].done_s);
    }
  }
}

// A buffer that is used again too early: the fake's streams wait for nothing.
TEST_F(RcclGroupTest, AReuseRaceIsCaught) {
  Plant("ignore_waits", 1);
  Plant("delay_us", 2000);
  int num_caught = 0;
  for (int round = 0; round < 10; ++round) {
    const auto results = Run([&](uint32_t rank, RcclGroup* group) {
      if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
      Tensors own(rank == 0, round);
      return Send(group, &own, 1);
    });
    bool is_caught = false;
    for (const Status& status : results) is_caught = is_caught || !status.ok();
    num_caught += is_caught;
  }
  EXPECT_EQ(num_caught, 10);
}

TEST_F(RcclGroupTest, AnotherPlanIsCaughtBeforeAnythingIsSent) {
  const auto results = Run([&](uint32_t rank, RcclGroup* group) {
    return group->Agree(rank == 2 ? std::string(32, 'e') : kDigest, kTimeoutS);
  });
  EXPECT_EQ(results[0].code, StatusCode::kInvalidArgument);
  EXPECT_NE(results[0].message.find("differs from that of rank 2"), std::string::npos);
  EXPECT_NE(results[2].message.find("differs from that of rank 0, 1"), std::string::npos);
}

TEST_F(RcclGroupTest, WrongOrderIsCaught) {
  const auto results = Run([&](uint32_t rank, RcclGroup* group) {
    if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
    Tensors own(rank == 0, 1);
    auto buckets = own.Buckets();
    if (rank == 0) buckets.erase(buckets.begin());  // the second comes first
    std::vector<RcclBucketTimes> times;
    return group->Broadcast(buckets, 1, 1.0, &times);
  });
  // Headers number what was sent, so the bytes look right until one is missing at the end.
  for (uint32_t rank = 1; rank < kWorld; ++rank) {
    EXPECT_FALSE(results[rank].ok());
    EXPECT_NE(results[rank].message.find("rank " + std::to_string(rank)), std::string::npos);
  }
}

TEST_F(RcclGroupTest, AShortBucketIsCaught) {
  const auto results = Run([&](uint32_t rank, RcclGroup* group) {
    if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
    Tensors own(rank == 0, 1);
    auto buckets = own.Buckets();
    if (rank == 1) {
      buckets[4].pieces.pop_back();
      buckets[4].size = 1088;
    }
    std::vector<RcclBucketTimes> times;
    return group->Broadcast(buckets, 1, kTimeoutS, &times);
  });
  for (const Status& status : results) {
    EXPECT_EQ(status.code, StatusCode::kUnavailable) << status.message;
    EXPECT_NE(status.message.find("ranks differ"), std::string::npos) << status.message;
  }
}

TEST_F(RcclGroupTest, NothingIsCopiedAfterAFailureWasTold) {
  Plant("delay_us", 4000);
  for (const int abort_ms : {20, 30, 40, 50, 60}) {
    const auto results = Run(
        [&](uint32_t rank, RcclGroup* group) {
          if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
          Tensors own(rank == 0, 1);
          std::thread aborting([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(abort_ms));
            group->Abort();
          });
          const Status status = Send(group, &own, 1);
          // As a caller that frees its tensors, and uses their memory for something else.
          const Tensors then = own;
          std::this_thread::sleep_for(std::chrono::milliseconds(60));
          EXPECT_TRUE(own == then) << "rank " << rank << " was still written";
          aborting.join();
          return status;
        },
        2, false);
    for (const Status& status : results) EXPECT_FALSE(status.ok());
  }
}

TEST_F(RcclGroupTest, TwoVersionsInterleavedAreCaught) {
  const auto results = Run([&](uint32_t rank, RcclGroup* group) {
    if (Status status = group->Agree(kDigest, kTimeoutS); !status.ok()) return status;
    Tensors own(rank == 0, 1);
    auto buckets = own.Buckets();
    std::vector<RcclBucketTimes> times;
    if (rank != 0) return group->Broadcast(buckets, 1, 1.0, &times);
    const std::vector<RcclBucket> first(buckets.begin(), buckets.begin() + 4);
    if (Status status = group->Broadcast(first, 1, kTimeoutS, &times); !status.ok()) return status;
    return group->Broadcast(buckets, 2, 1.0, &times);
  });
  EXPECT_EQ(results[1].code, StatusCode::kDataLoss);
  EXPECT_NE(results[1].message.find("got bucket 0 of version 2"), std::string::npos)
      << results[1].message;
}

TEST_F(RcclGroupTest, ARankThatHangsEndsEveryWaitAndIsNamed) {
  Plant("hang_rank", 1);
  const auto start = std::chrono::steady_clock::now();
  const auto results = Run([&](uint32_t, RcclGroup* group) { return group->Agree(kDigest, 0.5); });
  Plant("hang_rank", -1);
  EXPECT_EQ(results[1].code, StatusCode::kDeadlineExceeded) << results[1].message;
  EXPECT_NE(results[1].message.find("rank 1: comparing plans took longer"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(RcclGroupTest, WhoNeverJoinsDoesNotHoldTheOthers) {
  std::string id;
  ASSERT_TRUE(RcclGroup::MakeUniqueId(*api_, &id).ok());
  std::unique_ptr<RcclGroup> group;
  const Status status =
      RcclGroup::Create(*api_, {0, 2, 0, kBucketBytes, 2, false}, id, 0.2, &group);
  EXPECT_EQ(status.code, StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message.find("joining the group"), std::string::npos);
}

TEST_F(RcclGroupTest, BadArgumentsAreNamed) {
  std::unique_ptr<RcclGroup> group;
  EXPECT_EQ(RcclGroup::Create(*api_, {2, 2, 0, kBucketBytes, 2, false}, "", 1, &group).code,
            StatusCode::kInvalidArgument);
  std::unique_ptr<RcclApi> api;
  const Status status = RcclApi::Load("libno_such_rccl.so", "none", &api);
  EXPECT_EQ(status.code, StatusCode::kUnavailable);
  EXPECT_NE(status.message.find("libno_such_rccl.so"), std::string::npos);
}

}  // namespace
}  // namespace swe_rl::weightsync
