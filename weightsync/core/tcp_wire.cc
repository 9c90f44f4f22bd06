#include "weightsync/core/tcp_wire.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace swe_rl::weightsync {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire carries structs as they lie");

constexpr uint64_t kMagic = 0x3230'4343'5457'5352;  // "RSWTCC02"
constexpr uint32_t kMaxText = 4096;
// Waits that Cut ends; the deadline is only what the calls want.
constexpr double kUntilCutS = 1e6;

}  // namespace

Status WriteMessage(Socket* socket, MessageType type, uint64_t value, std::string text) {
  text.resize(std::min<size_t>(text.size(), kMaxText));
  const Message message = {type, static_cast<uint32_t>(text.size()), value};
  std::string bytes(reinterpret_cast<const char*>(&message), sizeof(message));
  bytes += text;
  return socket->Write(bytes.data(), bytes.size(), After(kControlTimeoutS));
}

Status ReadMessage(Socket* socket, Message* message, std::string* text) {
  Status status = socket->Read(message, sizeof(*message), After(kUntilCutS));
  if (!status.ok()) return status;
  if (message->size > kMaxText) return Error(StatusCode::kDataLoss, "a message is too long");
  text->resize(message->size);
  return socket->Read(text->data(), text->size(), After(kControlTimeoutS));
}

Hello MakeHello(Kind kind, const std::string& token, uint64_t epoch, uint32_t index) {
  Hello hello = {};
  hello.magic = kMagic;
  hello.epoch = epoch;
  hello.kind = kind;
  hello.index = index;
  hello.token_size = static_cast<uint32_t>(token.size());
  std::memcpy(hello.token, token.data(), std::min<size_t>(token.size(), kMaxToken));
  return hello;
}

bool HasToken(const Hello& hello, const std::string& token) {
  if (hello.magic != kMagic || hello.token_size != token.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < token.size(); ++i) {
    difference |= static_cast<unsigned char>(hello.token[i] ^ token[i]);
  }
  return difference == 0;
}

Status CheckToken(const std::string& token) {
  if (token.size() >= 16 && token.size() <= kMaxToken) return {};
  return Error(StatusCode::kInvalidArgument, "a token has 16 to " + std::to_string(kMaxToken) +
                                                 " bytes, got " + std::to_string(token.size()));
}

ConnectionServer::ConnectionServer(std::unique_ptr<Listener> listener, size_t max_connections,
                                   Handler handler)
    : listener_(std::move(listener)),
      max_connections_(max_connections),
      handler_(std::move(handler)),
      thread_([this] { Run(); }) {}

void ConnectionServer::Close() {
  listener_->Cut();
  if (thread_.joinable()) thread_.join();
  for (auto& connection : connections_) connection.socket->Cut();
  for (auto& connection : connections_) {
    if (connection.thread.joinable()) connection.thread.join();
  }
}

void ConnectionServer::Run() {
  std::unique_ptr<Socket> socket;
  while (true) {
    const Status status = listener_->Accept(After(kUntilCutS), &socket);
    if (status.code == StatusCode::kDeadlineExceeded) continue;
    if (!status.ok()) return;
    if (connections_.size() >= max_connections_) continue;
    Socket* const at = socket.get();
    connections_.push_back({std::move(socket), {}});
    connections_.back().thread = std::thread([this, at] {
      handler_(at);
      at->Cut();
    });
  }
}

}  // namespace swe_rl::weightsync
