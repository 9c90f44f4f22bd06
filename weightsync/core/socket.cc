#include "weightsync/core/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

namespace swe_rl::weightsync {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kBacklog = 128;
// Asked of the kernel, which may give less: fewer, larger steps.
constexpr int kLocalBufferBytes = 4 << 20;

struct FreeAddresses {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Status Resolve(const std::string& host, uint16_t port, int flags, Addresses* found) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* result = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &result);
  if (code != 0) {
    return Error(StatusCode::kInvalidArgument,
                 "cannot resolve the host " + host + ": " + gai_strerror(code));
  }
  found->reset(result);
  return {};
}

int MillisecondsTo(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

// kOk: a descriptor is ready or broken, and the next call on it will tell. -1 is none.
Status Poll(std::array<int, 2> fds, short events, Deadline deadline, const std::string& what) {
  std::array<pollfd, 2> entries = {{{fds[0], events, 0}, {fds[1], events, 0}}};
  while (true) {
    const int ready = poll(entries.data(), entries.size(), MillisecondsTo(deadline));
    if (ready > 0) return {};
    if (ready == 0) return Error(StatusCode::kDeadlineExceeded, what + " took too long");
    if (errno != EINTR) {
      return Error(StatusCode::kUnavailable, what + ": " + std::strerror(errno));
    }
  }
}

template <typename GetName>
std::string NumericHost(int fd, GetName get_name) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  char host[NI_MAXHOST] = "";
  if (get_name(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof(host), nullptr, 0,
                NI_NUMERICHOST);
  }
  return host;
}

// An abstract name: no file, gone with the listener, seen in its network namespace only.
socklen_t LocalAddress(const std::string& host, uint16_t port, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::string name("\0swe_rl_ws/", 11);
  name += host + "/" + std::to_string(port);
  const size_t size = std::min(name.size(), sizeof(address->sun_path));
  std::memcpy(address->sun_path, name.data(), size);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + size);
}

void SetLocalBuffers(int fd) {
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kLocalBufferBytes, sizeof(kLocalBufferBytes));
}

void SetNoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

}  // namespace

Deadline After(double seconds) {
  return SteadyClock::now() +
         std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(seconds));
}

Status Socket::Connect(const std::string& host, uint16_t port, Deadline deadline,
                       std::unique_ptr<Socket>* socket) {
  Addresses found;
  if (const Status status = Resolve(host, port, 0, &found); !status.ok()) return status;
  const std::string to = host + ":" + std::to_string(port);
  Status last = Error(StatusCode::kUnavailable, to + " has no address");
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      last = Error(StatusCode::kUnavailable, std::string("no socket: ") + std::strerror(errno));
      continue;
    }
    auto made = std::make_unique<Socket>(fd);
    int code = connect(fd, at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (code == EINPROGRESS) {
      last = Poll({fd, -1}, POLLOUT, deadline, "connecting to " + to);
      if (!last.ok()) continue;
      socklen_t size = sizeof(code);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size);
    }
    if (code == 0) {
      SetNoDelay(fd);
      *socket = std::move(made);
      return {};
    }
    last = Error(StatusCode::kUnavailable, "cannot connect to " + to + ": " + std::strerror(code));
  }
  return last;
}

Status Socket::ConnectLocal(const std::string& host, uint16_t port,
                            std::unique_ptr<Socket>* socket) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return Error(StatusCode::kUnavailable, std::string("no local socket: ") + std::strerror(errno));
  }
  auto made = std::make_unique<Socket>(fd);
  sockaddr_un address;
  const socklen_t size = LocalAddress(host, port, &address);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return Error(StatusCode::kUnavailable, "no local socket of " + host + ":" +
                                               std::to_string(port) + ": " + std::strerror(errno));
  }
  SetLocalBuffers(fd);
  *socket = std::move(made);
  return {};
}

Socket::~Socket() { close(fd_); }

void Socket::Cut() { shutdown(fd_, SHUT_RDWR); }

Status Socket::Wait(short events, Deadline deadline, const char* what) {
  return Poll({fd_, -1}, events, deadline, what);
}

void Socket::SetLowWater(uint64_t size) {
  const int wanted = static_cast<int>(std::clamp<uint64_t>(size, 1, 1 << 30));
  if (wanted == low_water_) return;
  // Advice: without it reads are only smaller.
  if (setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted)) == 0) low_water_ = wanted;
}

Status Socket::ReadSome(void* to, uint64_t size, uint64_t low_water, Deadline deadline,
                        uint64_t* got) {
  Status waited;
  while (true) {
    const ssize_t count = recv(fd_, to, size, 0);
    if (count > 0) {
      *got = static_cast<uint64_t>(count);
      return {};
    }
    if (count == 0) return Error(StatusCode::kUnavailable, "the connection was closed");
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return Error(StatusCode::kUnavailable, std::string("reading: ") + std::strerror(errno));
    }
    if (!waited.ok()) return waited;
    SetLowWater(std::min(low_water, size));
    waited = Wait(POLLIN, deadline, "reading");
  }
}

Status Socket::Read(void* to, uint64_t size, Deadline deadline) {
  for (uint64_t done = 0; done < size;) {
    uint64_t got = 0;
    const Status status =
        ReadSome(static_cast<char*>(to) + done, size - done, size - done, deadline, &got);
    if (!status.ok()) return status;
    done += got;
  }
  return {};
}

Status Socket::Write(const void* from, uint64_t size, Deadline deadline) {
  std::vector<iovec> parts = {{const_cast<void*>(from), size}};
  return WriteAll(&parts, deadline);
}

Status Socket::WriteAll(std::vector<iovec>* parts, Deadline deadline) {
  msghdr message = {};
  message.msg_iov = parts->data();
  message.msg_iovlen = parts->size();
  while (true) {
    while (message.msg_iovlen > 0 && message.msg_iov->iov_len == 0) {
      ++message.msg_iov;
      --message.msg_iovlen;
    }
    if (message.msg_iovlen == 0) return {};
    const ssize_t count = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return Error(StatusCode::kUnavailable, std::string("writing: ") + std::strerror(errno));
      }
      if (const Status status = Wait(POLLOUT, deadline, "writing"); !status.ok()) return status;
      continue;
    }
    for (auto left = static_cast<size_t>(count); left > 0;) {
      const size_t taken = std::min(left, message.msg_iov->iov_len);
      message.msg_iov->iov_base = static_cast<char*>(message.msg_iov->iov_base) + taken;
      message.msg_iov->iov_len -= taken;
      left -= taken;
      if (message.msg_iov->iov_len == 0) {
        ++message.msg_iov;
        --message.msg_iovlen;
      }
    }
  }
}

std::string Socket::local_host() const { return NumericHost(fd_, getsockname); }

std::string Socket::peer_host() const { return NumericHost(fd_, getpeername); }

Status Listener::Listen(const std::string& host, std::unique_ptr<Listener>* listener) {
  Addresses found;
  if (const Status status = Resolve(host, 0, AI_PASSIVE, &found); !status.ok()) return status;
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, kBacklog) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    const Status status =
        Error(StatusCode::kUnavailable, "cannot listen at " + host + ": " + std::strerror(errno));
    if (fd >= 0) close(fd);
    return status;
  }
  const uint16_t port =
      ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  listener->reset(new Listener(fd, port));
  return {};
}

Listener::~Listener() {
  close(fd_);
  if (local_fd_ >= 0) close(local_fd_);
}

void Listener::ListenLocally() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  sockaddr_un address;
  const socklen_t size = LocalAddress(NumericHost(fd_, getsockname), port_, &address);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
      listen(fd, kBacklog) == 0) {
    local_fd_ = fd;
  } else {
    close(fd);
  }
}

void Listener::Cut() {
  shutdown(fd_, SHUT_RDWR);
  if (local_fd_ >= 0) shutdown(local_fd_, SHUT_RDWR);
}

Status Listener::Accept(Deadline deadline, std::unique_ptr<Socket>* socket) {
  while (true) {
    for (const int listening : {fd_, local_fd_}) {
      if (listening < 0) continue;
      const int fd = accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        if (listening == fd_) SetNoDelay(fd);
        if (listening == local_fd_) SetLocalBuffers(fd);
        *socket = std::make_unique<Socket>(fd);
        return {};
      }
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // For a moment there is no descriptor or memory; who connects waits in the backlog.
        if (SteadyClock::now() >= deadline) {
          return Error(StatusCode::kDeadlineExceeded, "accepting: out of descriptors or memory");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        continue;
      }
      if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN && errno != EWOULDBLOCK) {
        return Error(StatusCode::kUnavailable, std::string("accepting: ") + std::strerror(errno));
      }
    }
    const Status status = Poll({fd_, local_fd_}, POLLIN, deadline, "accepting");
    if (!status.ok()) return status;
  }
}

}  // namespace swe_rl::weightsync
