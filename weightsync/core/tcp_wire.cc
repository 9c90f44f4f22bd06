#include "weightsync/core/tcp_wire.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "weightsync/core/messages.h"

namespace swe_rl::weightsync {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire carries structs as they lie");

constexpr uint64_t kMagic = 0x3230'4343'5457'5352;  // "RSWTCC02"
constexpr uint32_t kMaxText = 4096;
// Waits that Cut ends; the deadline is only what the calls want.
constexpr double kUntilCutS = 1e6;
// Between two looks for a place among the connections.
constexpr double kFullS = 0.02;

}  // namespace

Status WriteMessage(Socket* socket, MessageType type, uint64_t value, std::string text) {
  text = Shortened(text, kMaxText);
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

void ConnectionServer::RemoveEnded() {
  std::erase_if(connections_, [](Connection& connection) {
    if (!connection.has_ended) return false;
    connection.thread.join();
    return true;
  });
}

void ConnectionServer::Close() {
  is_closing_ = true;
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
    RemoveEnded();
    // Others wait in the backlog; a stranger's place is free again after kHelloTimeoutS.
    while (connections_.size() >= max_connections_ && !is_closing_) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kFullS));
      RemoveEnded();
    }
    if (is_closing_) return;
    const Status status = listener_->Accept(After(kUntilCutS), &socket);
    if (status.code == StatusCode::kDeadlineExceeded) continue;
    if (!status.ok()) return;
    Connection& made = connections_.emplace_back();
    made.socket = std::move(socket);
    made.thread = std::thread([this, &made] {
      handler_(made.socket.get());
      made.socket->Cut();
      made.has_ended = true;
    });
  }
}

}  // namespace swe_rl::weightsync
