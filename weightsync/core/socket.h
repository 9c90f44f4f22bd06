// Stream sockets whose every wait has a deadline, and which another thread can cut. Between
// processes of one host a local socket does for half of the CPU time that TCP takes.
//
// Owner: tcp_tree. Invariants: a Socket is used by one reading and one writing thread at a time;
// Cut() may come from any thread, ends both and makes every later call fail. No call blocks
// beyond its deadline, which is a point in steady time, so that a peer that sends one byte a
// second cannot stretch it.
#ifndef WEIGHTSYNC_CORE_SOCKET_H_
#define WEIGHTSYNC_CORE_SOCKET_H_

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

using Deadline = std::chrono::steady_clock::time_point;

// `seconds` from now.
Deadline After(double seconds);

class Socket {
 public:
  static constexpr size_t kMaxParts = 512;  // of one WriteAll; the kernel takes 1024

  // Connects to HOST:PORT. kUnavailable when nobody listens, kDeadlineExceeded when it takes
  // longer.
  static Status Connect(const std::string& host, uint16_t port, Deadline deadline,
                        std::unique_ptr<Socket>* socket);
  // Connects to the local socket of a Listener at the numeric HOST and PORT. kUnavailable when it
  // is on another host, in another network namespace, or has none.
  static Status ConnectLocal(const std::string& host, uint16_t port,
                             std::unique_ptr<Socket>* socket);
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  Status Read(void* to, uint64_t size, Deadline deadline);
  // Reads what is there, at least one byte and at most `size`; `*got` says how many. Where it has
  // to wait, it is not woken for less than `low_water` bytes: a wake-up for every packet would cost
  // more than the copy. At the deadline it takes less.
  Status ReadSome(void* to, uint64_t size, uint64_t low_water, Deadline deadline, uint64_t* got);
  Status Write(const void* from, uint64_t size, Deadline deadline);
  // Writes `parts` (up to kMaxParts) one after the other; they are used up.
  Status WriteAll(std::vector<iovec>* parts, Deadline deadline);
  // Ends reads and writes, at once and for good. Thread-safe.
  void Cut();

  // Numeric addresses of both ends.
  std::string local_host() const;
  std::string peer_host() const;

 private:
  Status Wait(short events, Deadline deadline, const char* what);
  void SetLowWater(uint64_t size);

  const int fd_;
  int low_water_ = 1;  // the reading thread's
};

class Listener {
 public:
  // Listens at HOST (a numeric address or a name) on a free port.
  static Status Listen(const std::string& host, std::unique_ptr<Listener>* listener);
  // Listens at a local socket too, which is found by the same address. Call before Accept; where it
  // cannot be had, TCP alone does.
  void ListenLocally();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // kUnavailable after Cut.
  Status Accept(Deadline deadline, std::unique_ptr<Socket>* socket);
  void Cut();
  uint16_t port() const { return port_; }

 private:
  Listener(int fd, uint16_t port) : fd_(fd), port_(port) {}

  const int fd_;
  const uint16_t port_;
  int local_fd_ = -1;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_SOCKET_H_
