#include "weightsync/core/tcp_tree.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "weightsync/core/bucket_window.h"
#include "weightsync/core/checksum.h"
#include "weightsync/core/socket.h"

namespace swe_rl::weightsync {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire carries structs as they lie");

constexpr uint64_t kMagic = 0x3130'4343'5457'5352;  // "RSWTCC01"
constexpr uint32_t kMaxToken = 64;
constexpr uint32_t kMaxText = 4096;
// Tokens and text are small: whoever takes longer than this to read or write one is gone.
constexpr double kControlTimeoutS = 10.0;
// Waits that Cut ends; the deadline is only what the calls want.
constexpr double kUntilCutS = 1e6;
constexpr double kRetryS = 0.1;

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
  uint32_t unused;
};

enum class Type : uint32_t {
  // Receiver to sender.
  kTake,      // about to hand out its first bucket
  kConsumed,  // value: buckets that it released
  kVerified,
  kFailed,  // text: why
  // Sender to receiver.
  kParent,    // value and text: port and host to fetch from; port 0 is the sender
  kGo,        // its kTake was noted
  kProduced,  // value: buckets there are
  kCutChild,  // value: a receiver that was left out
  kLeftOut,   // text: why
};

struct Message {
  Type type;
  uint32_t size;  // of the text that follows
  uint64_t value;
};

std::string Named(uint64_t sequence, const std::string& label) {
  return "bucket " + std::to_string(sequence) + " (" + label + ")";
}

std::string Seconds(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2) + " s";
}

Status WriteMessage(Socket* socket, Type type, uint64_t value = 0, std::string text = "") {
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

// Takes as long for every wrong token.
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

// Accepts connections and runs a thread for each, until Close. Connections that ended are kept
// until then, so their number is bounded.
class Server {
 public:
  using Handler = std::function<void(Socket*)>;

  Server(std::unique_ptr<Listener> listener, size_t max_connections, Handler handler)
      : listener_(std::move(listener)),
        max_connections_(max_connections),
        handler_(std::move(handler)),
        thread_([this] { Run(); }) {}
  ~Server() { Close(); }

  uint16_t port() const { return listener_->port(); }

  void Close() {
    listener_->Cut();
    if (thread_.joinable()) thread_.join();
    for (auto& connection : connections_) connection.socket->Cut();
    for (auto& connection : connections_) {
      if (connection.thread.joinable()) connection.thread.join();
    }
  }

 private:
  struct Connection {
    std::unique_ptr<Socket> socket;
    std::thread thread;
  };

  void Run() {
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

  const std::unique_ptr<Listener> listener_;
  const size_t max_connections_;
  const Handler handler_;
  std::list<Connection> connections_;  // the accepting thread's, and Close's after it
  std::thread thread_;
};

}  // namespace

// ---------------------------------------------------------------------------------- the sender

struct TcpSender::State {
  struct Peer {
    ReceiverState state = ReceiverState::kAbsent;
    bool is_left_out = false;
    bool is_touched = false;
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
  void Tell(Peer* peer, Type type, uint64_t value = 0, const std::string& text = "") {
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
    Tell(&peer, Type::kLeftOut, 0, reason);
    window.CutChild(index);
    if (peer.parent >= 0) Tell(&peers[peer.parent], Type::kCutChild, index);
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
      LeaveOut(i, "receiver " + std::to_string(i) + " " + what + " within " + Seconds(timeout_s) +
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
        Tell(&peer, Type::kParent);
      } else {
        Tell(&peer, Type::kParent, peers[parent].relay_port, peers[parent].host);
      }
    }
  }

  void Serve(Socket* socket) {
    Hello hello;
    if (!socket->Read(&hello, sizeof(hello), After(kControlTimeoutS)).ok()) return;
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
      LeaveOut(hello.index, "receiver " + std::to_string(hello.index) + ": " + status.message +
                                " after " + std::to_string(peer.consumed) + " buckets");
    }
  }

  void Heard(Peer* peer, const Message& message, const std::string& text) {
    switch (message.type) {
      case Type::kTake:
        if (is_aborted || peer->is_left_out) break;
        peer->is_touched = true;
        Tell(peer, Type::kGo);
        break;
      case Type::kConsumed:
        peer->consumed = std::max(peer->consumed, message.value);
        break;
      case Type::kVerified:
        if (!peer->is_left_out) peer->state = ReceiverState::kVerified;
        break;
      case Type::kFailed:
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
  std::unique_ptr<Server> server;
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
  Status status = state->window.Allocate(options.num_buffers, options.buffer_bytes);
  if (!status.ok()) return status;
  std::unique_ptr<Listener> listener;
  status = Listener::Listen(options.host, &listener);
  if (!status.ok()) return status;
  State* const at = state.get();
  // Two connections a receiver, and as many again for those that turn to the sender.
  state->server = std::make_unique<Server>(std::move(listener), 4 * options.num_receivers + 16,
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
      state_->Tell(&peer, Type::kLeftOut, 0, "the sender gave up");
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
}

void TcpSender::Drop(uint32_t receiver, const std::string& reason) {
  const std::lock_guard lock(state_->window.mutex);
  if (receiver < state_->peers.size()) state_->LeaveOut(receiver, reason);
}

Status TcpSender::Send(const std::vector<Piece>& pieces, const std::string& label,
                       double timeout_s) {
  const std::lock_guard calls(state_->calls);
  State& state = *state_;
  BucketWindow& window = state.window;
  std::unique_lock lock(window.mutex);
  const uint64_t sequence = window.begun;
  const std::string name = Named(sequence, label);
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
  lock.unlock();
  Packed packed;
  const Status status = Pack(pieces, window.buffer(sequence), window.buffer_bytes(),
                             state.options.with_checksums, &packed);
  if (!status.ok()) return Error(status.code, name + ": " + status.message);
  lock.lock();
  window.slot(sequence) = {
      {state.options.epoch, sequence, packed.size, packed.checksum}, packed.size, packed.checksum};
  window.begun = sequence + 1;
  window.changed.notify_all();
  for (State::Peer& peer : state.peers) {
    if (!state.is_failed(peer)) state.Tell(&peer, Type::kProduced, window.begun);
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

uint64_t TcpSender::num_bytes_sent() const { return state_->num_bytes_sent; }

// -------------------------------------------------------------------------------- the receiver

struct TcpReceiver::State {
  // Ends everything; the first reason stands. With the mutex.
  void End(StatusCode code, const std::string& reason) {
    if (!window.ended) end = Error(code, reason);
    window.ended = true;
    if (data != nullptr) data->Cut();
    window.CutAll();
    window.changed.notify_all();
  }

  void ServeChild(Socket* socket) {
    Hello hello;
    if (!socket->Read(&hello, sizeof(hello), After(kControlTimeoutS)).ok()) return;
    if (!HasToken(hello, token) || hello.epoch != epoch || hello.kind != Kind::kData) return;
    Outlet outlet = {hello.index, socket, hello.sequence, hello.offset};
    window.Serve(&outlet, &num_bytes_sent);
  }

  // The control connection's thread.
  void Listen() {
    Message message;
    std::string text;
    Status status;
    while ((status = ReadMessage(control.get(), &message, &text)).ok()) {
      const std::lock_guard lock(window.mutex);
      switch (message.type) {
        case Type::kParent:
          has_parent = true;
          parent_host = message.value == 0 ? sender_host : text;
          parent_port = message.value == 0 ? sender_port : static_cast<uint16_t>(message.value);
          is_parent_sender = message.value == 0;
          break;
        case Type::kGo:
          may_take = true;
          break;
        case Type::kProduced:
          produced = std::max(produced, message.value);
          break;
        case Type::kCutChild:
          window.CutChild(static_cast<uint32_t>(message.value));
          break;
        case Type::kLeftOut:
          End(StatusCode::kUnavailable, "the sender left this receiver out: " + text);
          break;
        default:
          break;
      }
      window.changed.notify_all();
    }
    const std::lock_guard lock(window.mutex);
    End(StatusCode::kUnavailable, "the sender is gone (" + status.message + ")");
  }

  // The data connection's thread: one parent after the other, until the end.
  void Fetch() {
    std::unique_lock lock(window.mutex);
    while (true) {
      window.changed.wait(lock, [&] { return window.ended || has_parent; });
      if (window.ended) return;
      const std::string host = parent_host;
      const uint16_t port = parent_port;
      const bool from_sender = is_parent_sender;
      lock.unlock();
      std::unique_ptr<Socket> socket;
      Status status = Socket::Connect(host, port, After(kControlTimeoutS), &socket);
      lock.lock();
      if (window.ended) return;
      if (status.ok()) {
        data = socket.get();
        status = FetchFrom(socket.get(), from_sender, &lock);
        data = nullptr;
        if (window.ended) return;
      }
      // Its parent is gone, late or wrong: the sender has whatever this receiver lacks.
      is_parent_sender = true;
      parent_host = sender_host;
      parent_port = sender_port;
      if (from_sender) window.changed.wait_for(lock, std::chrono::duration<double>(kRetryS));
    }
  }

  // Reads buckets from one connection until it fails. With the mutex, which waits give up.
  Status FetchFrom(Socket* socket, bool from_sender, std::unique_lock<std::mutex>* lock) {
    Hello hello = MakeHello(Kind::kData, token, epoch, index);
    hello.sequence = fetching;
    hello.offset = window.begun > fetching ? window.slot(fetching).filled : 0;
    lock->unlock();
    Status status = socket->Write(&hello, sizeof(hello), After(kControlTimeoutS));
    while (status.ok()) {
      FrameHeader header;
      status = ReadOr(socket, &header, sizeof(header), from_sender);
      if (!status.ok()) break;
      if (header.epoch != epoch || header.sequence != fetching ||
          header.size > window.buffer_bytes()) {
        status = Error(StatusCode::kDataLoss, "a wrong frame");
        break;
      }
      lock->lock();
      if (window.begun == fetching) {
        window.changed.wait(*lock, [&] {
          return window.ended || (released + window.num_buffers() > fetching &&
                                  window.is_free_of_outlets(fetching));
        });
        if (window.ended) return {};
        window.slot(fetching) = {header, 0, 0};
        window.begun = fetching + 1;
        sum = Checksum();
      }
      BucketWindow::Slot& slot = window.slot(fetching);
      while (status.ok() && slot.filled < header.size) {
        char* const to = window.buffer(fetching) + slot.filled;
        const uint64_t size = header.size - slot.filled;
        lock->unlock();
        uint64_t got = 0;
        status = ReadSomeOr(socket, to, size, from_sender, &got);
        if (with_checksums) sum.Update(to, got);  // while it is in the cache
        lock->lock();
        slot.filled += got;
        if (slot.filled == header.size) slot.checksum = sum.Digest();
        window.changed.notify_all();
      }
      if (status.ok()) ++fetching;
      lock->unlock();
    }
    lock->lock();
    return status;
  }

  // Gives a silent parent up, but waits for the sender, and for buckets that are not there yet.
  Status ReadSomeOr(Socket* socket, void* to, uint64_t size, bool from_sender, uint64_t* got) {
    while (true) {
      const Status status = socket->ReadSome(to, size, After(stall_timeout_s), got);
      if (status.code != StatusCode::kDeadlineExceeded) return status;
      const std::lock_guard lock(window.mutex);
      if (!from_sender && produced > fetching) return status;
    }
  }

  Status ReadOr(Socket* socket, void* to, uint64_t size, bool from_sender) {
    for (uint64_t done = 0; done < size;) {
      uint64_t got = 0;
      const Status status =
          ReadSomeOr(socket, static_cast<char*>(to) + done, size - done, from_sender, &got);
      if (!status.ok()) return status;
      done += got;
    }
    return {};
  }

  std::string token;
  std::string sender_host;
  uint16_t sender_port = 0;
  uint64_t epoch = 0;
  uint32_t index = 0;
  bool with_checksums = false;
  double stall_timeout_s = 0;
  std::unique_ptr<Socket> control;

  BucketWindow window;
  // Guarded by window.mutex.
  Status end;
  bool has_parent = false;
  bool is_parent_sender = false;
  std::string parent_host;
  uint16_t parent_port = 0;
  Socket* data = nullptr;
  bool may_take = false;
  uint64_t produced = 0;  // by the sender, as far as known
  uint64_t fetching = 0;  // the bucket whose bytes come next
  Checksum sum;           // of the bytes of that bucket; the fetching thread's
  uint64_t released = 0;

  std::atomic<uint64_t> num_bytes_sent = 0;
  std::unique_ptr<Server> server;
  std::thread listening, fetching_thread;
};

TcpReceiver::TcpReceiver(std::unique_ptr<State> state) : state_(std::move(state)) {}

Status TcpReceiver::Attach(const std::string& host, uint16_t port, const std::string& token,
                           uint64_t epoch, uint32_t index, double timeout_s,
                           std::unique_ptr<TcpReceiver>* receiver) {
  if (Status status = CheckToken(token); !status.ok()) return status;
  auto state = std::make_unique<State>();
  state->token = token;
  state->sender_host = host;
  state->sender_port = port;
  state->epoch = epoch;
  state->index = index;
  const Deadline deadline = After(timeout_s);
  Status status = Socket::Connect(host, port, deadline, &state->control);
  if (!status.ok()) return status;
  std::unique_ptr<Listener> listener;
  status = Listener::Listen(state->control->local_host(), &listener);
  if (!status.ok()) return status;
  State* const at = state.get();
  Hello hello = MakeHello(Kind::kControl, token, epoch, index);
  hello.relay_port = listener->port();
  status = state->control->Write(&hello, sizeof(hello), deadline);
  Welcome welcome;
  if (status.ok()) status = state->control->Read(&welcome, sizeof(welcome), deadline);
  const std::string where = "the sender at " + host + ":" + std::to_string(port);
  if (!status.ok()) return Error(status.code, where + ": " + status.message);
  if (welcome.code == static_cast<uint32_t>(StatusCode::kFenced)) {
    return Error(StatusCode::kFenced, where + " is of another epoch than " + std::to_string(epoch));
  }
  if (welcome.code != static_cast<uint32_t>(StatusCode::kOk)) {
    return Error(StatusCode::kInvalidArgument, where + " has no receiver " + std::to_string(index));
  }
  if (welcome.num_buffers == 0 || welcome.num_buffers > kMaxBuffers) {
    return Error(StatusCode::kDataLoss, where + " speaks another protocol");
  }
  state->with_checksums = welcome.with_checksums != 0;
  state->stall_timeout_s = welcome.stall_timeout_s;
  status = state->window.Allocate(welcome.num_buffers, welcome.buffer_bytes);
  if (!status.ok()) return status;
  state->server = std::make_unique<Server>(std::move(listener), 4 * kMaxReceivers,
                                           [at](Socket* socket) { at->ServeChild(socket); });
  state->listening = std::thread([at] { at->Listen(); });
  state->fetching_thread = std::thread([at] { at->Fetch(); });
  receiver->reset(new TcpReceiver(std::move(state)));
  return {};
}

TcpReceiver::~TcpReceiver() {
  {
    const std::lock_guard lock(state_->window.mutex);
    state_->End(StatusCode::kUnavailable, "the receiver was closed");
  }
  state_->control->Cut();
  state_->listening.join();
  state_->fetching_thread.join();
  state_->server->Close();
}

Status TcpReceiver::Next(const std::string& label, double timeout_s, Bucket* bucket) {
  State& state = *state_;
  BucketWindow& window = state.window;
  const Deadline deadline = After(timeout_s);
  std::unique_lock lock(window.mutex);
  const uint64_t sequence = state.released;
  const std::string name = Named(sequence, label);
  const auto wait = [&](const auto& done, const std::string& late) -> Status {
    if (!window.changed.wait_until(lock, deadline, [&] { return window.ended || done(); })) {
      return Error(StatusCode::kDeadlineExceeded, name + late + " within " + Seconds(timeout_s));
    }
    if (window.ended) return Error(state.end.code, "before " + name + ": " + state.end.message);
    return {};
  };
  Status status = wait([&] { return window.is_complete(sequence); }, " did not arrive");
  if (!status.ok()) return status;
  if (sequence == 0 && !state.may_take) {
    status = WriteMessage(state.control.get(), Type::kTake);
    if (status.ok()) status = wait([&] { return state.may_take; }, " was not allowed");
    if (!status.ok()) return status;
  }
  const BucketWindow::Slot& slot = window.slot(sequence);
  if (state.with_checksums && slot.checksum != slot.header.checksum) {
    return Error(StatusCode::kDataLoss, name + ": checksum " + std::to_string(slot.checksum) +
                                            ", wanted " + std::to_string(slot.header.checksum) +
                                            " over " + std::to_string(slot.header.size) + " bytes");
  }
  *bucket = {sequence, window.buffer(sequence), slot.header.size};
  return {};
}

void TcpReceiver::Release() {
  const std::lock_guard lock(state_->window.mutex);
  ++state_->released;
  // A sender that cannot be told is gone, which the control connection's thread finds out.
  static_cast<void>(WriteMessage(state_->control.get(), Type::kConsumed, state_->released));
  state_->window.changed.notify_all();
}

void TcpReceiver::Verified() {
  std::unique_lock lock(state_->window.mutex);
  static_cast<void>(WriteMessage(state_->control.get(), Type::kVerified));
  // Children that are not through by then take the rest from the sender.
  state_->window.changed.wait_until(lock, After(state_->stall_timeout_s), [&] {
    return state_->window.ended ||
           std::all_of(state_->window.outlets.begin(), state_->window.outlets.end(),
                       [&](const Outlet* o) { return o->sequence >= state_->released; });
  });
}

void TcpReceiver::Fail(const std::string& reason) {
  const std::lock_guard lock(state_->window.mutex);
  static_cast<void>(WriteMessage(state_->control.get(), Type::kFailed, 0, reason));
  // Those that it passes bytes to turn to the sender at once.
  state_->End(StatusCode::kUnavailable, "this receiver failed: " + reason);
}

}  // namespace swe_rl::weightsync
