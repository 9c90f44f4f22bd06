#include "rollout/scheduler/kv_scheduler.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace swe_rl::scheduler {
namespace {

constexpr SchedulerOptions kOptions{0.8, 10.0, 1000, 100};

KvScheduler TwoEngines() {
  KvScheduler scheduler(kOptions);
  EXPECT_TRUE(scheduler.AddEngine("e0", 1000).ok());
  EXPECT_TRUE(scheduler.AddEngine("e1", 1000).ok());
  return scheduler;
}

// "ticket@engine" of each admission.
std::vector<std::string> Poll(KvScheduler* scheduler, double now_s) {
  std::vector<std::string> result;
  for (const Admission& a : scheduler->Poll(now_s)) {
    result.push_back(a.ticket_id + "@" + a.engine);
  }
  return result;
}

using Tickets = std::vector<std::string>;

TEST(KvScheduler, SpreadsSessionsAndReturnsThemToTheirTokens) {
  KvScheduler s = TwoEngines();
  ASSERT_TRUE(s.Submit({"a0", "a", 100, 50, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"b0", "b", 100, 50, 0}, 0).ok());
  EXPECT_EQ(Poll(&s, 0), (Tickets{"a0@e0", "b0@e1"}));
  EXPECT_TRUE(s.Finish("a0", 150, 1));
  EXPECT_TRUE(s.Finish("b0", 150, 1));
  ASSERT_TRUE(s.Submit({"b1", "b", 200, 50, 0}, 2).ok());
  ASSERT_TRUE(s.Submit({"a1", "a", 200, 50, 0}, 2).ok());
  EXPECT_EQ(Poll(&s, 2), (Tickets{"b1@e1", "a1@e0"}));
}

TEST(KvScheduler, MovesASessionWhoseEngineIsFull) {
  KvScheduler s = TwoEngines();
  ASSERT_TRUE(s.Submit({"a0", "a", 100, 50, 0}, 0).ok());
  EXPECT_EQ(Poll(&s, 0), (Tickets{"a0@e0"}));
  EXPECT_TRUE(s.Finish("a0", 150, 1));
  // e1 carries less, so c lands there; d makes e0 full.
  ASSERT_TRUE(s.Submit({"c0", "c", 50, 50, 0}, 1).ok());
  ASSERT_TRUE(s.Submit({"d0", "d", 700, 50, 0}, 1).ok());
  EXPECT_EQ(Poll(&s, 1), (Tickets{"c0@e1", "d0@e0"}));
  ASSERT_TRUE(s.Submit({"a1", "a", 200, 50, 0}, 2).ok());
  EXPECT_EQ(Poll(&s, 2), (Tickets{"a1@e1"}));
}

TEST(KvScheduler, IdleResidentsNeverBlockAndAreForgottenOldestFirst) {
  KvScheduler s(kOptions);
  ASSERT_TRUE(s.AddEngine("e0", 1000).ok());
  for (const std::string name : {"a", "b", "c"}) {
    ASSERT_TRUE(s.Submit({name, name, 300, 20, 0}, 0).ok());
    ASSERT_EQ(Poll(&s, 0).size(), 1u);
    ASSERT_TRUE(s.Finish(name, 320, 0));
  }
  EXPECT_EQ(s.Stats().engines["e0"].tokens_resident, 960);
  ASSERT_TRUE(s.Submit({"d", "d", 300, 50, 0}, 1).ok());
  EXPECT_EQ(Poll(&s, 1), (Tickets{"d@e0"}));
  EXPECT_EQ(s.Stats().engines["e0"].tokens_resident, 640);  // a is gone
}

TEST(KvScheduler, WatermarkBoundsTogetherAndBudgetAlone) {
  KvScheduler s(kOptions);
  ASSERT_TRUE(s.AddEngine("e0", 1000).ok());
  ASSERT_TRUE(s.Submit({"big", "big", 900, 100, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"small", "small", 10, 10, 0}, 0).ok());
  EXPECT_EQ(Poll(&s, 0), (Tickets{"big@e0"}));
  EXPECT_TRUE(s.Finish("big", 0, 1));
  EXPECT_EQ(Poll(&s, 1), (Tickets{"small@e0"}));
}

TEST(KvScheduler, RefusesWhatCanNeverRun) {
  KvScheduler s = TwoEngines();
  EXPECT_EQ(s.Submit({"t", "a", 901, 100, 0}, 0).code, StatusCode::kInvalidArgument);
  KvScheduler small(kOptions);
  ASSERT_TRUE(small.AddEngine("e0", 500).ok());
  EXPECT_EQ(small.Submit({"t", "a", 450, 100, 0}, 0).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(s.Submit({"t", "a", 1, 0, 0}, 0).code, StatusCode::kInvalidArgument);
  EXPECT_TRUE(s.Submit({"t", "a", 1, 1, 0}, 0).ok());
  EXPECT_EQ(s.Submit({"t", "a", 1, 1, 0}, 0).code, StatusCode::kAlreadyExists);
}

TEST(KvScheduler, PriorityThenArrivalThenAge) {
  KvScheduler s = TwoEngines();
  s.SetPaused(true);
  ASSERT_TRUE(s.Submit({"first", "a", 10, 10, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"second", "b", 10, 10, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"urgent", "c", 10, 10, 2}, 19).ok());
  ASSERT_TRUE(s.Submit({"late", "d", 10, 10, 2}, 21).ok());
  EXPECT_TRUE(Poll(&s, 30).empty());
  s.SetPaused(false);
  std::vector<std::string> order;
  for (const Admission& a : s.Poll(30)) order.push_back(a.ticket_id);
  EXPECT_EQ(order, (Tickets{"urgent", "first", "second", "late"}));
}

TEST(KvScheduler, AnAgedCallGetsTheRightOfWay) {
  KvScheduler s(kOptions);
  ASSERT_TRUE(s.AddEngine("e0", 1000).ok());
  ASSERT_TRUE(s.Submit({"r0", "r0", 300, 10, 0}, 0).ok());
  EXPECT_EQ(Poll(&s, 0).size(), 1u);
  ASSERT_TRUE(s.Submit({"big", "big", 700, 10, 0}, 1).ok());
  ASSERT_TRUE(s.Submit({"s0", "s0", 100, 10, 0}, 2).ok());
  EXPECT_EQ(Poll(&s, 3), (Tickets{"s0@e0"}));  // passes: big is young
  ASSERT_TRUE(s.Submit({"s1", "s1", 100, 10, 0}, 12).ok());
  EXPECT_TRUE(Poll(&s, 12).empty());  // does not pass any more
  EXPECT_TRUE(s.Finish("r0", 0, 13));
  EXPECT_TRUE(Poll(&s, 13).empty());
  EXPECT_TRUE(s.Finish("s0", 0, 14));
  EXPECT_EQ(Poll(&s, 14), (Tickets{"big@e0"}));
}

TEST(KvScheduler, AnEngineLossLosesItsCallsAndNothingElse) {
  KvScheduler s = TwoEngines();
  ASSERT_TRUE(s.Submit({"a0", "a", 100, 10, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"b0", "b", 100, 10, 0}, 0).ok());
  ASSERT_TRUE(s.Submit({"c0", "c", 10, 10, 0}, 0).ok());
  EXPECT_EQ(Poll(&s, 0), (Tickets{"a0@e0", "b0@e1", "c0@e0"}));
  EXPECT_EQ(s.RemoveEngine("e0"), (Tickets{"a0", "c0"}));
  EXPECT_FALSE(s.Finish("a0", 110, 1));
  EXPECT_EQ(s.Stats().running, 1);
  ASSERT_TRUE(s.Submit({"a1", "a", 100, 10, 0}, 1).ok());
  EXPECT_EQ(Poll(&s, 1), (Tickets{"a1@e1"}));
  EXPECT_TRUE(s.RemoveEngine("e0").empty());
}

TEST(KvScheduler, CancelAndEndSessionGiveRoomBack) {
  KvScheduler s = TwoEngines();
  ASSERT_TRUE(s.Submit({"a0", "a", 100, 10, 0}, 0).ok());
  EXPECT_TRUE(s.Cancel("a0"));
  EXPECT_FALSE(s.Cancel("a0"));
  ASSERT_TRUE(s.Submit({"a1", "a", 100, 10, 0}, 0).ok());
  ASSERT_EQ(Poll(&s, 0).size(), 1u);
  s.EndSession("a");
  EXPECT_TRUE(s.Finish("a1", 110, 1));
  for (const auto& [name, engine] : s.Stats().engines) {
    EXPECT_EQ(engine.tokens_resident, 0) << name;
    EXPECT_EQ(engine.tokens_running, 0) << name;
  }
}

TEST(KvScheduler, AFinishedCallStaysResidentEvenWhenTheCacheIsTight) {
  KvScheduler s(kOptions);
  ASSERT_TRUE(s.AddEngine("e0", 1000).ok());
  ASSERT_TRUE(s.Submit({"a0", "a", 400, 10, 0}, 0).ok());
  ASSERT_EQ(Poll(&s, 0).size(), 1u);
  ASSERT_TRUE(s.Finish("a0", 410, 1));
  ASSERT_TRUE(s.Submit({"b0", "b", 280, 10, 0}, 1).ok());
  ASSERT_TRUE(s.Submit({"a1", "a", 480, 10, 0}, 1).ok());
  ASSERT_EQ(Poll(&s, 1).size(), 2u);
  ASSERT_TRUE(s.Finish("a1", 490, 2));
  EXPECT_EQ(s.Stats().engines["e0"].tokens_resident, 490);
}

TEST(KvScheduler, ValidatesItsOptions) {
  EXPECT_TRUE(KvScheduler::Validate(kOptions).ok());
  EXPECT_FALSE(KvScheduler::Validate({0, 10, 1000, 100}).ok());
  EXPECT_FALSE(KvScheduler::Validate({1.1, 10, 1000, 100}).ok());
  EXPECT_FALSE(KvScheduler::Validate({0.8, 0, 1000, 100}).ok());
  EXPECT_FALSE(KvScheduler::Validate({0.8, 10, 0, 100}).ok());
  EXPECT_FALSE(KvScheduler::Validate({0.8, 10, 1000, -1}).ok());
}

}  // namespace
}  // namespace swe_rl::scheduler
