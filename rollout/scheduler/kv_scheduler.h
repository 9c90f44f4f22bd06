// Decides when and where each model call runs, so that KV caches never thrash.
//
// Owner: the RolloutManager, through bindings.cc. The simulation runs the same code.
//
// A call's footprint on an engine is its whole prompt plus the growth predicted for it,
// min(max_new_tokens, growth_tokens). Between calls a session's tokens stay in the engine's
// prefix cache: resident, evictable, and worth returning to.
//
// Invariants:
//  * Running footprints on an engine sum to at most high_watermark * token_budget; a call
//    alone on an engine may fill the whole budget. Idle residents never block a call: they
//    are forgotten, least recently used first, as the engine's cache would evict them.
//  * Order: priority + waited_s / ageing_s, then first come first served. A later call may
//    pass one that fits nowhere yet, until that one has waited ageing_s: then it has the
//    right of way, so nothing starves.
//  * Deterministic: the same calls with the same now_s give the same result. No clock, no
//    I/O, no threads: callers serialise access (bindings: the GIL).
#ifndef ROLLOUT_SCHEDULER_KV_SCHEDULER_H_
#define ROLLOUT_SCHEDULER_KV_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace swe_rl::scheduler {

enum class StatusCode { kOk, kInvalidArgument, kAlreadyExists };

// A code and, unless ok, a message for people.
struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
};

struct SchedulerOptions {
  double high_watermark;     // share of a token budget that running calls may fill, (0, 1]
  double ageing_s;           // waiting this long is worth one step of priority, > 0
  int64_t hard_context_cap;  // most prompt + max_new_tokens of one call, > 0
  int64_t growth_tokens;     // most growth that is predicted for one call, >= 0
};

struct Call {
  std::string ticket_id;  // unique among queued and running calls
  std::string session;
  int64_t prompt_tokens;   // the whole prompt, resident or not
  int64_t max_new_tokens;  // > 0
  int priority;            // higher goes first
};

struct Admission {
  std::string ticket_id;
  std::string engine;
  double queued_s;
};

struct EngineStats {
  int64_t token_budget = 0;
  int64_t tokens_running = 0;   // footprints of running calls
  int64_t tokens_resident = 0;  // tokens of idle sessions
  int64_t num_running = 0;
};

struct SchedulerStats {
  int64_t queued = 0;
  int64_t running = 0;
  bool paused = false;
  std::map<std::string, EngineStats> engines;
};

class KvScheduler {
 public:
  static Status Validate(const SchedulerOptions& options);
  // `options` must be valid.
  explicit KvScheduler(const SchedulerOptions& options);

  // Adds an engine, or changes the budget of one that is known.
  Status AddEngine(const std::string& engine, int64_t token_budget);
  // Forgets an engine and what is resident there. Returns the tickets that were running on
  // it, in order of admission; they are gone. Queued calls stay queued.
  std::vector<std::string> RemoveEngine(const std::string& engine);

  // Queues a call. Refused when it could never run: over hard_context_cap, or over the
  // budget of every engine there is.
  Status Submit(const Call& call, double now_s);
  // Admits what fits, in order.
  std::vector<Admission> Poll(double now_s);
  // A running call ended; `resident_tokens` of its session stay in that engine's cache.
  // False when the ticket does not run (lost with its engine, or finished before).
  bool Finish(const std::string& ticket_id, int64_t resident_tokens, double now_s);
  // Drops a queued or running call. False when unknown.
  bool Cancel(const std::string& ticket_id);
  // The session will not come back: its resident tokens stop counting.
  void EndSession(const std::string& session);
  // While paused, Poll admits nothing.
  void SetPaused(bool paused) { paused_ = paused; }

  SchedulerStats Stats() const;

 private:
  struct Engine {
    int64_t token_budget = 0;
    int64_t tokens_running = 0;
    int64_t tokens_resident = 0;
    int64_t num_running = 0;
    std::set<std::pair<uint64_t, std::string>> idle;  // (last use, session), oldest first
  };
  struct Session {
    std::string engine;  // empty: resident nowhere
    int64_t resident_tokens = 0;
    uint64_t last_use = 0;
    int num_running = 0;
    bool ended = false;
  };
  struct Queued {
    Call call;
    double submitted_s;
  };
  struct Running {
    std::string session;
    std::string engine;
    int64_t footprint;
    uint64_t sequence;  // order of admission
  };
  // Sorted by falling rank, then by order of arrival. The rank priority - submitted_s /
  // ageing_s orders calls at any one moment as priority + waited_s / ageing_s does, and
  // does not change with time.
  using QueueKey = std::pair<double, uint64_t>;

  int64_t Footprint(const Call& call) const;
  bool Fits(const Engine& engine, int64_t footprint) const;
  bool FitsSomewhereEmpty(int64_t footprint) const;
  // The engine to run on, or null when none has room now.
  const std::string* Place(const Call& call) const;
  void Admit(const Call& call, const std::string& engine);
  Running TakeRunning(std::map<std::string, Running>::iterator it);
  void Unrest(const std::string& name, Session* session);
  void Rest(const std::string& name, Session* session);
  void Evict(Engine* engine);
  // Drops a session that neither runs nor is resident.
  void ForgetIfGone(const std::string& name);

  const SchedulerOptions options_;
  bool paused_ = false;
  uint64_t next_sequence_ = 1;
  std::map<std::string, Engine> engines_;
  std::map<std::string, Session> sessions_;
  std::map<QueueKey, Queued> queue_;
  std::map<std::string, QueueKey> queued_;  // ticket -> place in the queue
  std::map<std::string, Running> running_;
};

}  // namespace swe_rl::scheduler

#endif  // ROLLOUT_SCHEDULER_KV_SCHEDULER_H_
