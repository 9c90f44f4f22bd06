#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "weightsync/core/bucket_window.h"
#include "weightsync/core/messages.h"
#include "weightsync/core/tcp_tree.h"
#include "weightsync/core/tcp_wire.h"

namespace swe_rl::weightsync {

struct TcpSender::State {
  struct Peer {
    ReceiverState state = ReceiverState::kAbsent;
    bool is_left_out = false;
    bool is_touched = false;
    uint64_t digest = 0;
    uint64_t consumed = 0;
    std::string error;
    std::string host;
    uint16_t relay_port = 0;
    int64_t parent = -1;        // a receiver, or -1: the sender
    Socket* control = nullptr;  // while its thread runs
  };

  explicit State(const TcpOptions& given) : options(given), peers(given.num_receivers) {}

  bool is_failed(const Peer& peer) const {
    return peer.is_left_out || peer.state == ReceiverState::kFailed;
  }
  bool any_left() const {
    return std::any_of(peers.begin(), peers.end(), [&](const Peer& p) { return !is_failed(p); });
  }

  // With the mutex: messages are short and sockets have room for them.
  void Tell(Peer* peer, MessageType type, uint64_t value = 0, const std::string& text = "") {
    if (peer->control != nullptr && !WriteMessage(peer->control, type, value, text).ok()) {
      peer->control->Cut();
    }
  }

  // With the mutex. What it still reads is cut, at its parent too.
  void LeaveOut(uint32_t index, const std::string& reason) {
    Peer& peer = peers[index];
    if (is_failed(peer) || peer.state == ReceiverState::kVerified) return;
    peer.is_left_out = true;
    peer.error = reason;
    Tell(&peer, MessageType::kLeftOut, 0, reason);
    window.CutChild(index);
    if (peer.parent >= 0) Tell(&peers[peer.parent], MessageType::kCutChild, index);
    window.changed.notify_all();
  }

  // Waits until `done` holds for all that are not left out; leaves out those that are late.
  template <typename Done>
  void WaitForEach(std::unique_lock<std::mutex>* lock, const Done& done, const std::string& what,
                   double timeout_s) {
    const auto all_done = [&] {
      return is_aborted || std::all_of(peers.begin(), peers.end(), [&](const Peer& peer) {
               return is_failed(peer) || done(peer);
             });
    };
    if (window.changed.wait_until(*lock, After(timeout_s), all_done)) return;
    for (uint32_t i = 0; i < peers.size(); ++i) {
      if (is_failed(peers[i]) || done(peers[i])) continue;
      LeaveOut(i, std::string("it ") + what + " within " + Seconds(timeout_s) +
                      " (it has released " + std::to_string(peers[i].consumed) + " buckets)");
    }
  }

  // With the mutex: tells every receiver where to fetch.
  void NameParents() {
    for (uint32_t i = 0; i < peers.size(); ++i) {
      Peer& peer = peers[i];
      int64_t parent = i < options.fan_out ? -1 : static_cast<int64_t>(i / options.fan_out) - 1;
      while (parent >= 0 && is_failed(peers[parent])) {
        parent = parent < options.fan_out ? -1 : parent / options.fan_out - 1;
      }
      peer.parent = parent;
      if (parent < 0) {
        Tell(&peer, MessageType::kParent);
      } else {
        Tell(&peer, MessageType::kParent, peers[parent].relay_port, peers[parent].host);
      }
    }
  }

  void Serve(Socket* socket) {
    Hello hello;
    if (!socket->Read(&hello, sizeof(hello), After(kHelloTimeoutS)).ok()) return;
    if (!HasToken(hello, options.token)) return;
    if (hello.kind == Kind::kData) {
      if (hello.epoch != options.epoch || hello.index >= peers.size()) return;
      Outlet outlet = {hello.index, socket, hello.sequence, hello.offset};
      window.Serve(&outlet, &num_bytes_sent);
      return;
    }
    Welcome welcome = {};
    welcome.buffer_bytes = options.buffer_bytes;
    welcome.stall_timeout_s = options.stall_timeout_s;
    welcome.num_buffers = options.num_buffers;
    welcome.with_checksums = options.with_checksums ? 1 : 0;
    welcome.with_local_sockets = options.with_local_sockets ? 1 : 0;
    StatusCode code = StatusCode::kOk;
    if (hello.epoch != options.epoch) code = StatusCode::kFenced;
    if (hello.index >= peers.size()) code = StatusCode::kInvalidArgument;
    welcome.code = static_cast<uint32_t>(code);
    if (!socket->Write(&welcome, sizeof(welcome), After(kControlTimeoutS)).ok()) return;
    if (code == StatusCode::kOk) Control(socket, hello);
  }

  void Control(Socket* socket, const Hello& hello) {
    Peer& peer = peers[hello.index];
    {
      const std::lock_guard lock(window.mutex);
      if (peer.state != ReceiverState::kAbsent || peer.is_left_out || is_aborted) return;
      peer.state = ReceiverState::kAttached;
      peer.host = socket->peer_host();
      peer.relay_port = static_cast<uint16_t>(hello.relay_port);
      peer.control = socket;
      window.changed.notify_all();
    }
    Message message;
    std::string text;
    Status status;
    while ((status = ReadMessage(socket, &message, &text)).ok()) {
      const std::lock_guard lock(window.mutex);
      Heard(&peer, message, text);
    }
    const std::lock_guard lock(window.mutex);
    peer.control = nullptr;
    if (!is_aborted) {
      LeaveOut(hello.index,
               status.message + " after " + std::to_string(peer.consumed) + " buckets");
    }
  }

  void Heard(Peer* peer, const Message& message, const std::string& text) {
    switch (message.type) {
      case MessageType::kTake:
        if (is_aborted || peer->is_left_out) break;
        peer->is_touched = true;
        Tell(peer, MessageType::kGo);
        break;
      case MessageType::kConsumed:
        peer->consumed = std::max(peer->consumed, message.value);
        break;
      case MessageType::kVerified:
        if (!peer->is_left_out) peer->state = ReceiverState::kVerified;
        peer->digest = message.value;
        break;
      case MessageType::kFailed:
        if (!peer->is_left_out) peer->error = text;
        peer->state = ReceiverState::kFailed;
        break;
      default:
        break;
    }
    window.changed.notify_all();
  }

  const TcpOptions options;
  std::mutex calls;  // held by Send, Finish and Close
  BucketWindow window;
  std::vector<Peer> peers;  // never resized; guarded by window.mutex
  bool is_aborted = false;
  bool is_closed = false;
  std::atomic<uint64_t> num_bytes_sent = 0;
  std::unique_ptr<ConnectionServer> server;
};

TcpSender::TcpSender(std::unique_ptr<State> state) : state_(std::move(state)) {}

Status TcpSender::Create(const TcpOptions& options, std::unique_ptr<TcpSender>* sender) {
  if (options.num_receivers == 0 || options.num_receivers > kMaxReceivers ||
      options.num_buffers == 0 || options.num_buffers > kMaxBuffers || options.buffer_bytes == 0 ||
      options.fan_out == 0) {
    return Error(
        StatusCode::kInvalidArgument,
        "a TCP tree wants 1.." + std::to_string(kMaxReceivers) + " receivers, 1.." +
            std::to_string(kMaxBuffers) + " buffers, buffers with bytes and a fan_out, got " +
            std::to_string(options.num_receivers) + ", " + std::to_string(options.num_buffers) +
            ", " + std::to_string(options.buffer_bytes) + " and " +
            std::to_string(options.fan_out));
  }
  if (Status status = CheckToken(options.token); !status.ok()) return status;
  auto state = std::make_unique<State>(options);
  state->window.UsePieces(options.num_buffers, options.with_checksums);
  std::unique_ptr<Listener> listener;
  Status status = Listener::Listen(options.host, &listener);
  if (!status.ok()) return status;
  if (options.with_local_sockets) listener->ListenLocally();
  State* const at = state.get();
  // Two connections a receiver, and as many again for those that turn to the sender.
  state->server = std::make_unique<ConnectionServer>(std::move(listener),
                                                     4 * options.num_receivers + kMaxStrangers,
                                                     [at](Socket* socket) { at->Serve(socket); });
  sender->reset(new TcpSender(std::move(state)));
  return {};
}

TcpSender::~TcpSender() { Close(); }

void TcpSender::Abort() {
  const std::lock_guard lock(state_->window.mutex);
  if (state_->is_aborted) return;
  state_->is_aborted = true;
  for (State::Peer& peer : state_->peers) {
    if (peer.state != ReceiverState::kVerified) {
      state_->Tell(&peer, MessageType::kLeftOut, 0, "the sender gave up");
    }
  }
  state_->window.changed.notify_all();
}

void TcpSender::Close() {
  Abort();
  const std::lock_guard calls(state_->calls);
  {
    const std::lock_guard lock(state_->window.mutex);
    if (state_->is_closed) return;
    state_->is_closed = true;
    state_->window.ended = true;
    state_->window.CutAll();
    state_->window.changed.notify_all();
  }
  state_->server->Close();
  // Nothing reads any more.
  for (uint64_t i = 0; i < state_->window.num_buffers(); ++i) state_->window.slot(i) = {};
}

void TcpSender::Drop(uint32_t receiver, const std::string& reason) {
  const std::lock_guard lock(state_->window.mutex);
  if (receiver < state_->peers.size()) state_->LeaveOut(receiver, reason);
}

Status TcpSender::Send(std::vector<Piece> pieces, const std::string& label, double timeout_s,
                       std::shared_ptr<void> owner) {
  const std::lock_guard calls(state_->calls);
  State& state = *state_;
  BucketWindow& window = state.window;
  std::shared_ptr<void> previous;  // of the bucket whose place this one takes; ends after the lock
  std::unique_lock lock(window.mutex);
  const uint64_t sequence = window.begun;
  const std::string name = Named(sequence, label);
  uint64_t size = 0;
  if (const Status status = CheckPieces(pieces, state.options.buffer_bytes, &size); !status.ok()) {
    return Error(status.code, name + ": " + status.message);
  }
  if (sequence == 0) {
    state.WaitForEach(
        &lock, [](const State::Peer& peer) { return peer.state != ReceiverState::kAbsent; },
        "did not attach", timeout_s);
    state.NameParents();
  } else if (sequence >= state.options.num_buffers) {
    const uint64_t wanted = sequence - state.options.num_buffers + 1;
    state.WaitForEach(
        &lock, [&](const State::Peer& peer) { return peer.consumed >= wanted; },
        "did not free a buffer for " + name, timeout_s);
    // Those that released it may be ahead of the connection that serves a slower one no more.
    if (!window.changed.wait_until(lock, After(timeout_s), [&] {
          return state.is_aborted || window.is_free_of_outlets(sequence);
        })) {
      return Error(StatusCode::kDeadlineExceeded, "a connection still reads the buffer of " + name);
    }
  }
  if (state.is_aborted) return Error(StatusCode::kUnavailable, "aborted before " + name);
  if (!state.any_left()) {
    return Error(StatusCode::kUnavailable,
                 "no receiver is left for " + name + "; the first said: " + state.peers[0].error);
  }
  window.slot(sequence).owner.swap(previous);
  window.Begin({state.options.epoch, sequence, size}, std::move(pieces), std::move(owner));
  for (State::Peer& peer : state.peers) {
    if (!state.is_failed(peer)) state.Tell(&peer, MessageType::kProduced, window.begun);
  }
  return {};
}

Status TcpSender::Finish(double timeout_s) {
  const std::lock_guard calls(state_->calls);
  std::unique_lock lock(state_->window.mutex);
  if (state_->is_closed) return Error(StatusCode::kInvalidArgument, "the sender is closed");
  state_->WaitForEach(
      &lock, [](const State::Peer& peer) { return peer.state == ReceiverState::kVerified; },
      "did not verify the update after " + std::to_string(state_->window.begun) + " buckets",
      timeout_s);
  return {};
}

uint16_t TcpSender::port() const { return state_->server->port(); }

ReceiverState TcpSender::receiver_state(uint32_t index) const {
  const std::lock_guard lock(state_->window.mutex);
  if (index >= state_->peers.size()) return ReceiverState::kFailed;
  const State::Peer& peer = state_->peers[index];
  return peer.is_left_out ? ReceiverState::kFailed : peer.state;
}

std::string TcpSender::receiver_error(uint32_t index) const {
  const std::lock_guard lock(state_->window.mutex);
  if (index >= state_->peers.size()) return "there is no such receiver";
  return state_->is_failed(state_->peers[index]) ? state_->peers[index].error : "";
}

uint64_t TcpSender::num_consumed(uint32_t index) const {
  const std::lock_guard lock(state_->window.mutex);
  return index < state_->peers.size() ? state_->peers[index].consumed : 0;
}

bool TcpSender::was_touched(uint32_t index) const {
  const std::lock_guard lock(state_->window.mutex);
  return index >= state_->peers.size() || state_->peers[index].is_touched;
}

uint64_t TcpSender::digest(uint32_t index) const {
  const std::lock_guard lock(state_->window.mutex);
  return index < state_->peers.size() ? state_->peers[index].digest : 0;
}

uint64_t TcpSender::num_bytes_sent() const { return state_->num_bytes_sent; }

}  // namespace swe_rl::weightsync
