// What tcp_sender and tcp_receiver say to each other, and the threads that listen.
#ifndef WEIGHTSYNC_CORE_TCP_WIRE_H_
#define WEIGHTSYNC_CORE_TCP_WIRE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "weightsync/core/socket.h"
#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

inline constexpr uint32_t kMaxToken = 64;
// Tokens and text are small: whoever takes longer than this to read or write one is gone.
inline constexpr double kControlTimeoutS = 10.0;
// Who has connected says at once who it is. Strangers, such as a port scan, may have so many of a
// server's places for so long.
inline constexpr double kHelloTimeoutS = 3.0;
inline constexpr size_t kMaxStrangers = 256;

enum class Kind : uint32_t { kControl, kData };

struct Hello {
  uint64_t magic;
  uint64_t epoch;
  uint64_t sequence;  // data: where to begin
  uint64_t offset;
  Kind kind;
  uint32_t index;
  uint32_t relay_port;  // control: where others may fetch from this receiver
  uint32_t token_size;
  char token[kMaxToken];
};

// The sender's answer to a control connection.
struct Welcome {
  uint64_t buffer_bytes;
  double stall_timeout_s;
  uint32_t code;  // a StatusCode; the rest counts only if it is kOk
  uint32_t num_buffers;
  uint32_t with_checksums;
  uint32_t with_local_sockets;
};

enum class MessageType : uint32_t {
  // Receiver to sender.
  kTake,      // about to hand out its first bucket
  kConsumed,  // value: buckets that it released
  kVerified,  // value: the digest of what it holds
  kFailed,    // text: why
  // Sender to receiver.
  kParent,    // value and text: port and host to fetch from; port 0 is the sender
  kGo,        // its kTake was noted
  kProduced,  // value: buckets there are
  kCutChild,  // value: a receiver that was left out
  kLeftOut,   // text: why
};

struct Message {
  MessageType type;
  uint32_t size;  // of the text that follows
  uint64_t value;
};

Status WriteMessage(Socket* socket, MessageType type, uint64_t value = 0, std::string text = "");
// Waits until a message comes or the socket is cut.
Status ReadMessage(Socket* socket, Message* message, std::string* text);

Hello MakeHello(Kind kind, const std::string& token, uint64_t epoch, uint32_t index);
// Takes as long for every wrong token.
bool HasToken(const Hello& hello, const std::string& token);
Status CheckToken(const std::string& token);

// Accepts connections and runs a thread for each, until Close; at most max_connections at a time.
class ConnectionServer {
 public:
  using Handler = std::function<void(Socket*)>;

  ConnectionServer(std::unique_ptr<Listener> listener, size_t max_connections, Handler handler);
  ~ConnectionServer() { Close(); }

  uint16_t port() const { return listener_->port(); }
  void Close();

 private:
  struct Connection {
    std::unique_ptr<Socket> socket;
    std::thread thread;
    std::atomic<bool> has_ended = false;
  };

  void Run();
  void RemoveEnded();

  const std::unique_ptr<Listener> listener_;
  const size_t max_connections_;
  const Handler handler_;
  std::atomic<bool> is_closing_ = false;
  std::list<Connection> connections_;  // the accepting thread's, and Close's after it
  std::thread thread_;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_TCP_WIRE_H_
