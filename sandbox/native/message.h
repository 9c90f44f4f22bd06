// Records exchanged with the broker over SOCK_SEQPACKET: a kind byte, then NUL-terminated
// `key=value` strings. Values hold no NUL (paths, commands and environments cannot).
#ifndef SWE_RL_SANDBOX_NATIVE_MESSAGE_H_
#define SWE_RL_SANDBOX_NATIVE_MESSAGE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace swe_rl::sandbox {

// Largest packet either side sends. The socket buffers are set to hold several.
inline constexpr size_t kMaxPacketBytes = 512 * 1024;

// First byte of a packet.
enum class Kind : char {
  kImage = 'I',    // broker -> zygote: prepare a shared /usr
  kNew = 'N',      // broker -> zygote: make a sandbox (control socket attached)
  kExec = 'C',     // broker -> init
  kKill = 'K',     // broker -> init, and its reply: num_killed
  kCancel = 'A',   // broker -> init: kill the running command, which then replies kExit
  kReady = 'R',    // init -> broker, with the root, upper and pid descriptors
  kFailure = 'F',  // text: what failed
  kStdout = 'O',   // bytes of the running command
  kStderr = 'E',   // bytes of the running command
  kExit = 'X',     // end of the running command
};

class Record {
 public:
  explicit Record(Kind kind) : kind_(kind) {}

  // False when the packet is empty or has an entry without `=` or without its NUL.
  static bool Parse(std::string_view packet, Record* record);

  void Add(std::string_view key, std::string_view value) {
    entries_.emplace_back(std::string(key), std::string(value));
  }
  void Add(std::string_view key, int64_t value) { Add(key, std::to_string(value)); }

  Kind kind() const { return kind_; }
  // The first value under `key`, empty when absent.
  std::string Get(std::string_view key) const;
  int64_t GetInt(std::string_view key, int64_t fallback) const;
  std::vector<std::string> GetAll(std::string_view key) const;
  std::string Serialize() const;

 private:
  Kind kind_;
  std::vector<std::pair<std::string, std::string>> entries_;
};

// Sends one packet with optional descriptors. False on error (errno set).
bool SendPacket(int socket_fd, std::string_view packet, const std::vector<int>& fds = {});

// Receives one packet and at most 8 descriptors (close-on-exec). Returns the length, 0 at the
// end of the stream, -1 on error.
int64_t ReceivePacket(int socket_fd, std::string* packet, std::vector<int>* fds);

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_MESSAGE_H_
