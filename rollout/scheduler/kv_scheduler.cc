#include "rollout/scheduler/kv_scheduler.h"

#include <algorithm>
#include <cmath>

namespace swe_rl::scheduler {
namespace {

Status Invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

}  // namespace

Status KvScheduler::Validate(const SchedulerOptions& options) {
  if (!(options.high_watermark > 0 && options.high_watermark <= 1)) {
    return Invalid("high_watermark must be in (0, 1], got " +
                   std::to_string(options.high_watermark));
  }
  if (!(options.ageing_s > 0) || !std::isfinite(options.ageing_s)) {
    return Invalid("ageing_s must be a number of seconds above 0, got " +
                   std::to_string(options.ageing_s));
  }
  if (options.hard_context_cap <= 0) {
    return Invalid("hard_context_cap must be above 0, got " +
                   std::to_string(options.hard_context_cap));
  }
  if (options.growth_tokens < 0) {
    return Invalid("growth_tokens must not be negative, got " +
                   std::to_string(options.growth_tokens));
  }
  return {};
}

KvScheduler::KvScheduler(const SchedulerOptions& options) : options_(options) {}

Status KvScheduler::AddEngine(const std::string& engine, int64_t token_budget) {
  if (engine.empty() || token_budget <= 0) {
    return Invalid("engine '" + engine + "': wanted a name and a token_budget above 0, got " +
                   std::to_string(token_budget));
  }
  Engine& added = engines_[engine];
  added.token_budget = token_budget;
  Evict(&added);
  return {};
}

std::vector<std::string> KvScheduler::RemoveEngine(const std::string& engine) {
  std::vector<std::pair<uint64_t, std::string>> lost;
  for (auto it = running_.begin(); it != running_.end();) {
    auto next = std::next(it);
    if (it->second.engine == engine) {
      lost.emplace_back(it->second.sequence, it->first);
      const Running running = TakeRunning(it);
      auto session = sessions_.find(running.session);
      if (session != sessions_.end()) Rest(session->first, &session->second);
    }
    it = next;
  }
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    Session& session = it->second;
    if (session.engine == engine) {
      Unrest(it->first, &session);
      session.engine.clear();
      session.resident_tokens = 0;
    }
    const bool forget = session.engine.empty() && session.num_running == 0;
    it = forget ? sessions_.erase(it) : std::next(it);
  }
  engines_.erase(engine);
  std::sort(lost.begin(), lost.end());
  std::vector<std::string> tickets;
  for (auto& [sequence, ticket] : lost) tickets.push_back(std::move(ticket));
  return tickets;
}

Status KvScheduler::Submit(const Call& call, double now_s) {
  const std::string name = "ticket '" + call.ticket_id + "' of session '" + call.session + "'";
  if (call.ticket_id.empty() || call.prompt_tokens < 0 || call.max_new_tokens <= 0 ||
      !std::isfinite(now_s)) {
    return Invalid(name +
                   ": wanted a ticket_id, prompt_tokens >= 0, max_new_tokens > 0 and a finite "
                   "now_s, got prompt_tokens " +
                   std::to_string(call.prompt_tokens) + ", max_new_tokens " +
                   std::to_string(call.max_new_tokens) + ", now_s " + std::to_string(now_s));
  }
  if (queued_.count(call.ticket_id) || running_.count(call.ticket_id)) {
    return {StatusCode::kAlreadyExists, name + " is queued or running already"};
  }
  // Written without a sum, which could overflow.
  if (call.prompt_tokens > options_.hard_context_cap ||
      call.max_new_tokens > options_.hard_context_cap - call.prompt_tokens) {
    return Invalid(name + ": prompt of " + std::to_string(call.prompt_tokens) + " + " +
                   std::to_string(call.max_new_tokens) + " new tokens is above hard_context_cap " +
                   std::to_string(options_.hard_context_cap));
  }
  const int64_t whole = call.prompt_tokens + call.max_new_tokens;
  if (!engines_.empty() && !FitsSomewhereEmpty(whole)) {
    return Invalid(name + ": " + std::to_string(whole) +
                   " tokens are above the whole token_budget of every engine");
  }
  const QueueKey key{-(call.priority - now_s / options_.ageing_s), next_sequence_++};
  queue_.emplace(key, Queued{call, now_s});
  queued_.emplace(call.ticket_id, key);
  return {};
}

std::vector<Admission> KvScheduler::Poll(double now_s) {
  std::vector<Admission> admissions;
  if (paused_) return admissions;
  for (auto it = queue_.begin(); it != queue_.end();) {
    const Queued& queued = it->second;
    const double waited_s = std::max(0.0, now_s - queued.submitted_s);
    const std::string* engine = Place(queued.call);
    if (engine == nullptr) {
      // One that no engine of today could ever hold waits for another engine, and must not
      // hold up the rest.
      if (waited_s >= options_.ageing_s && FitsSomewhereEmpty(Footprint(queued.call))) break;
      ++it;
      continue;
    }
    admissions.push_back({queued.call.ticket_id, *engine, waited_s});
    Admit(queued.call, *engine);
    queued_.erase(queued.call.ticket_id);
    it = queue_.erase(it);
  }
  return admissions;
}

bool KvScheduler::Finish(const std::string& ticket_id, int64_t resident_tokens, double) {
  auto it = running_.find(ticket_id);
  if (it == running_.end()) return false;
  const Running running = TakeRunning(it);
  auto found = sessions_.find(running.session);
  if (found == sessions_.end()) return true;
  Session& session = found->second;
  if (session.ended) {
    ForgetIfGone(running.session);
    return true;
  }
  Unrest(found->first, &session);
  session.engine = running.engine;
  session.resident_tokens = std::max<int64_t>(0, resident_tokens);
  session.last_use = next_sequence_++;
  Rest(found->first, &session);
  ForgetIfGone(running.session);
  return true;
}

bool KvScheduler::Cancel(const std::string& ticket_id) {
  auto queued = queued_.find(ticket_id);
  if (queued != queued_.end()) {
    queue_.erase(queued->second);
    queued_.erase(queued);
    return true;
  }
  auto running = running_.find(ticket_id);
  if (running == running_.end()) return false;
  const Running taken = TakeRunning(running);
  auto session = sessions_.find(taken.session);
  // What was resident before the call still is.
  if (session != sessions_.end()) Rest(session->first, &session->second);
  ForgetIfGone(taken.session);
  return true;
}

void KvScheduler::EndSession(const std::string& name) {
  auto it = sessions_.find(name);
  if (it == sessions_.end()) return;
  Unrest(name, &it->second);
  it->second.engine.clear();
  it->second.resident_tokens = 0;
  it->second.ended = true;
  ForgetIfGone(name);
}

SchedulerStats KvScheduler::Stats() const {
  SchedulerStats stats;
  stats.queued = static_cast<int64_t>(queue_.size());
  stats.running = static_cast<int64_t>(running_.size());
  stats.paused = paused_;
  for (const auto& [name, engine] : engines_) {
    stats.engines[name] = {engine.token_budget, engine.tokens_running, engine.tokens_resident,
                           engine.num_running};
  }
  return stats;
}

int64_t KvScheduler::Footprint(const Call& call) const {
  return call.prompt_tokens + std::min(call.max_new_tokens, options_.growth_tokens);
}

bool KvScheduler::Fits(const Engine& engine, int64_t footprint) const {
  if (engine.num_running == 0) return footprint <= engine.token_budget;
  const double limit = options_.high_watermark * static_cast<double>(engine.token_budget);
  return static_cast<double>(engine.tokens_running + footprint) <= limit;
}

bool KvScheduler::FitsSomewhereEmpty(int64_t footprint) const {
  return std::any_of(engines_.begin(), engines_.end(), [footprint](const auto& entry) {
    return footprint <= entry.second.token_budget;
  });
}

const std::string* KvScheduler::Place(const Call& call) const {
  const int64_t footprint = Footprint(call);
  auto session = sessions_.find(call.session);
  if (session != sessions_.end() && !session->second.engine.empty()) {
    auto home = engines_.find(session->second.engine);
    if (home != engines_.end() && Fits(home->second, footprint)) return &home->first;
  }
  // Residents count as load here, so that sessions, not only their calls, spread evenly.
  const std::string* best = nullptr;
  double least = 0;
  for (const auto& [name, engine] : engines_) {
    if (!Fits(engine, footprint)) continue;
    const double load = static_cast<double>(engine.tokens_running + engine.tokens_resident) /
                        static_cast<double>(engine.token_budget);
    if (best == nullptr || load < least) {
      best = &name;
      least = load;
    }
  }
  return best;
}

void KvScheduler::Admit(const Call& call, const std::string& name) {
  Session& session = sessions_[call.session];
  session.ended = false;
  Unrest(call.session, &session);
  session.num_running += 1;
  // A call that moves leaves its old copy behind; the old engine will evict it.
  if (session.engine != name) {
    session.engine.clear();
    session.resident_tokens = 0;
  }
  Engine& engine = engines_.at(name);
  const int64_t footprint = Footprint(call);
  engine.tokens_running += footprint;
  engine.num_running += 1;
  running_.emplace(call.ticket_id, Running{call.session, name, footprint, next_sequence_++});
  Evict(&engine);
}

// Ends a running call's accounting; the caller decides what stays resident.
KvScheduler::Running KvScheduler::TakeRunning(std::map<std::string, Running>::iterator it) {
  Running running = std::move(it->second);
  running_.erase(it);
  Engine& engine = engines_.at(running.engine);
  engine.tokens_running -= running.footprint;
  engine.num_running -= 1;
  auto session = sessions_.find(running.session);
  if (session != sessions_.end()) session->second.num_running -= 1;
  return running;
}

void KvScheduler::ForgetIfGone(const std::string& name) {
  auto session = sessions_.find(name);
  if (session == sessions_.end() || session->second.num_running > 0) return;
  if (session->second.engine.empty() || session->second.resident_tokens == 0) {
    sessions_.erase(session);
  }
}

// Idle residents are listed with their engine; a running session's tokens are part of the
// footprint instead.
void KvScheduler::Rest(const std::string& name, Session* session) {
  if (session->num_running > 0 || session->engine.empty() || session->resident_tokens == 0) {
    return;
  }
  auto engine = engines_.find(session->engine);
  if (engine == engines_.end()) return;
  if (engine->second.idle.emplace(session->last_use, name).second) {
    engine->second.tokens_resident += session->resident_tokens;
  }
  Evict(&engine->second);
}

void KvScheduler::Unrest(const std::string& name, Session* session) {
  auto engine = engines_.find(session->engine);
  if (engine != engines_.end() && engine->second.idle.erase({session->last_use, name}) > 0) {
    engine->second.tokens_resident -= session->resident_tokens;
  }
}

void KvScheduler::Evict(Engine* engine) {
  while (!engine->idle.empty() &&
         engine->tokens_running + engine->tokens_resident > engine->token_budget) {
    const std::string name = engine->idle.begin()->second;
    engine->idle.erase(engine->idle.begin());
    auto session = sessions_.find(name);
    engine->tokens_resident -= session->second.resident_tokens;
    sessions_.erase(session);
  }
}

}  // namespace swe_rl::scheduler
