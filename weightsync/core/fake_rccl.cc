// A stand-in for librccl and libamdhip64, for tests of the protocol between ranks of one process.
//
// Device memory is host memory. A stream is a thread that runs its queue after random delays, so a
// missing wait shows as wrong bytes. A collective checks that every rank calls the same one with
// the same count, type and root, in the same order; otherwise every rank gets an error, where the
// real library would hang or mix bytes up. It proves nothing about speed, devices, links or the
// real library's own behaviour.
//
// FakeRcclSet(name, value) plants faults: "delay_us" (the longest delay of an operation),
// "ignore_waits" (StreamWaitEvent does nothing), "hang_rank" (its collectives never end; -1: none).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace {

std::atomic<int> delay_us{0}, ignore_waits{0}, hang_rank{-1};

class Stream {
 public:
  Stream() : thread_([this] { Run(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

 private:
  void Run() {
    std::mt19937 random(std::random_device{}());
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (const int most = delay_us; most > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      }
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_closed_ = false;
  std::thread thread_;  // last: it uses the others
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
};

// What all ranks of a communicator share.
struct Group {
  struct Call {
    std::string shape;
    const void* from = nullptr;        // the root's bytes, or none
    std::map<int, const void*> parts;  // by rank
    int arrived = 0, left = 0;
    int copying = 0;  // ranks that read others' memory now
  };
  std::mutex mutex;
  std::condition_variable changed;
  int world = 0, joined = 0;
  bool is_aborted = false;
  std::string error;
  std::map<uint64_t, Call> calls;
};

struct Comm {
  std::shared_ptr<Group> group;
  int rank;
  uint64_t num_calls = 0;
};

std::mutex groups_mutex;
std::map<std::string, std::weak_ptr<Group>> groups;

constexpr int kInternalError = 3, kInvalidArgument = 4, kInProgress = 7;

// Runs on a stream: waits for the others, copies, and leaves when all have.
void Collective(const std::shared_ptr<Group>& group, int rank, uint64_t number,
                const std::string& shape, const void* from, bool is_root, void* to, size_t count,
                bool gathers) {
  std::unique_lock lock(group->mutex);
  if (group->calls.contains(number) && group->calls[number].shape != shape) {
    group->error = "ranks differ: " + group->calls[number].shape + " and " + shape;
    group->changed.notify_all();
  }
  Group::Call& call = group->calls[number];
  call.shape = shape;
  if (is_root) call.from = from;
  call.parts[rank] = from;
  ++call.arrived;
  group->changed.notify_all();
  const auto is_over = [&] { return group->is_aborted || !group->error.empty(); };
  group->changed.wait(
      lock, [&] { return is_over() || (call.arrived == group->world && hang_rank != rank); });
  if (is_over()) {
    group->changed.wait(lock, [&] { return call.copying == 0; });
    return;
  }
  const std::map<int, const void*> parts = call.parts;
  const void* const root = call.from;
  ++call.copying;
  lock.unlock();
  if (gathers) {
    for (const auto& [of, part] : parts) {
      char* const at = static_cast<char*>(to) + of * count;
      if (at != part) std::memcpy(at, part, count);
    }
  } else if (!is_root) {
    std::memcpy(to, root, count);
  }
  lock.lock();
  --call.copying;
  ++call.left;
  group->changed.notify_all();
  // Its memory may be freed once it leaves.
  group->changed.wait(
      lock, [&] { return call.left == group->world || (is_over() && call.copying == 0); });
}

}  // namespace

struct UniqueId {
  char internal[128];
};

extern "C" {

void FakeRcclSet(const char* name, int value) {
  const std::string which = name;
  if (which == "delay_us") delay_us = value;
  if (which == "ignore_waits") ignore_waits = value;
  if (which == "hang_rank") hang_rank = value;
}

int hipSetDevice(int) { return 0; }
int hipMalloc(void** at, size_t size) {
  *at = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return *at == nullptr ? 2 : 0;
}
int hipFree(void* at) {
  std::free(at);
  return 0;
}
int hipHostMalloc(void** at, size_t size, unsigned int) { return hipMalloc(at, size); }
int hipHostFree(void* at) { return hipFree(at); }
int hipStreamCreateWithFlags(void** stream, unsigned int) {
  *stream = new Stream;
  return 0;
}
int hipStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}
int hipMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) {
  static_cast<Stream*>(stream)->Push([=] { std::memcpy(to, from, size); });
  return 0;
}
int hipEventCreate(void** event) {
  *event = new Event;
  return 0;
}
int hipEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
int hipEventRecord(void* event, void* stream) {
  Event* const at = static_cast<Event*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(at->mutex);
    number = ++at->recorded;
  }
  static_cast<Stream*>(stream)->Push([=] {
    const std::lock_guard lock(at->mutex);
    at->done = number;
    at->changed.notify_all();
  });
  return 0;
}
int hipEventQuery(void* event) {
  Event* const at = static_cast<Event*>(event);
  const std::lock_guard lock(at->mutex);
  return at->done >= at->recorded ? 0 : 600;
}
int hipStreamWaitEvent(void* stream, void* event, unsigned int) {
  if (ignore_waits) return 0;
  Event* const at = static_cast<Event*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(at->mutex);
    number = at->recorded;
  }
  static_cast<Stream*>(stream)->Push([=] {
    std::unique_lock lock(at->mutex);
    at->changed.wait(lock, [&] { return at->done >= number; });
  });
  return 0;
}

int ncclGetVersion(int* version) {
  *version = 22703;
  return 0;
}
const char* ncclGetErrorString(int code) {
  return code == kInvalidArgument ? "invalid argument (fake)" : "ranks differ (fake)";
}
int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> number{0};
  std::memset(id, 0, sizeof(*id));
  const std::string name = "fake-" + std::to_string(++number);
  std::memcpy(id->internal, name.data(), name.size());
  return 0;
}
int ncclCommInitRankConfig(void** comm, int world, UniqueId id, int rank, void*) {
  if (rank < 0 || rank >= world) return kInvalidArgument;
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(groups_mutex);
    group = groups[id.internal].lock();
    if (group == nullptr) groups[id.internal] = group = std::make_shared<Group>();
  }
  const std::lock_guard lock(group->mutex);
  group->world = world;
  ++group->joined;
  *comm = new Comm{group, rank};
  return kInProgress;
}
int ncclCommGetAsyncError(void* comm, int* state) {
  Group& group = *static_cast<Comm*>(comm)->group;
  const std::lock_guard lock(group.mutex);
  *state = !group.error.empty() ? kInternalError : group.joined < group.world ? kInProgress : 0;
  return 0;
}
int ncclCommAbort(void* comm) {
  Comm* const at = static_cast<Comm*>(comm);
  {
    const std::lock_guard lock(at->group->mutex);
    at->group->is_aborted = true;
    at->group->changed.notify_all();
  }
  delete at;
  return 0;
}
int ncclCommDestroy(void* comm) { return ncclCommAbort(comm); }
int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, void* comm,
                  void* stream) {
  Comm* const at = static_cast<Comm*>(comm);
  const std::string shape = "broadcast of " + std::to_string(count) + " x type " +
                            std::to_string(dtype) + " from " + std::to_string(root);
  const uint64_t number = at->num_calls++;
  static_cast<Stream*>(stream)->Push([=, group = at->group, rank = at->rank] {
    Collective(group, rank, number, shape, from, rank == root, to, count, false);
  });
  return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int dtype, void* comm, void* stream) {
  Comm* const at = static_cast<Comm*>(comm);
  const std::string shape =
      "gather of " + std::to_string(count) + " x type " + std::to_string(dtype);
  const uint64_t number = at->num_calls++;
  static_cast<Stream*>(stream)->Push([=, group = at->group, rank = at->rank] {
    Collective(group, rank, number, shape, from, false, to, count, true);
  });
  return 0;
}

}  // extern "C"
