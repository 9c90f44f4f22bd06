#include "sandbox/native/message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace swe_rl::sandbox {

bool Record::Parse(std::string_view packet, Record* record) {
  if (packet.empty()) return false;
  *record = Record(static_cast<Kind>(packet[0]));
  packet.remove_prefix(1);
  while (!packet.empty()) {
    const size_t end = packet.find('\0');
    if (end == std::string_view::npos) return false;
    const std::string_view entry = packet.substr(0, end);
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) return false;
    record->Add(entry.substr(0, equals), entry.substr(equals + 1));
    packet.remove_prefix(end + 1);
  }
  return true;
}

std::string Record::Get(std::string_view key) const {
  for (const auto& [name, value] : entries_) {
    if (name == key) return value;
  }
  return "";
}

int64_t Record::GetInt(std::string_view key, int64_t fallback) const {
  const std::string value = Get(key);
  return value.empty() ? fallback : std::strtoll(value.c_str(), nullptr, 10);
}

std::vector<std::string> Record::GetAll(std::string_view key) const {
  std::vector<std::string> values;
  for (const auto& [name, value] : entries_) {
    if (name == key) values.push_back(value);
  }
  return values;
}

std::string Record::Serialize() const {
  std::string packet(1, static_cast<char>(kind_));
  for (const auto& [name, value] : entries_) {
    packet.append(name).append("=").append(value).push_back('\0');
  }
  return packet;
}

bool SendPacket(int socket_fd, std::string_view packet, const std::vector<int>& fds) {
  iovec vector{const_cast<char*>(packet.data()), packet.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* message = CMSG_FIRSTHDR(&header);
    message->cmsg_level = SOL_SOCKET;
    message->cmsg_type = SCM_RIGHTS;
    message->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(message), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket_fd, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(packet.size());
}

int64_t ReceivePacket(int socket_fd, std::string* packet, std::vector<int>* fds) {
  packet->resize(kMaxPacketBytes);
  iovec vector{packet->data(), packet->size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = recvmsg(socket_fd, &header, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  packet->resize(received > 0 ? static_cast<size_t>(received) : 0);
  for (cmsghdr* message = CMSG_FIRSTHDR(&header); message != nullptr;
       message = CMSG_NXTHDR(&header, message)) {
    if (message->cmsg_level != SOL_SOCKET || message->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (message->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const size_t base = fds->size();
    fds->resize(base + count);
    std::memcpy(fds->data() + base, CMSG_DATA(message), count * sizeof(int));
  }
  return received;
}

}  // namespace swe_rl::sandbox
