#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "weightsync/core/bucket_window.h"
#include "weightsync/core/checksum.h"
#include "weightsync/core/messages.h"
#include "weightsync/core/tcp_tree.h"
#include "weightsync/core/tcp_wire.h"

namespace swe_rl::weightsync {

namespace {

constexpr double kRetryS = 0.1;
// Bytes that are received and summed at a time: they fit into a core's cache, and fewer are not
// worth a wake-up.
constexpr uint64_t kChunk = 512 << 10;

}  // namespace

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
    if (!socket->Read(&hello, sizeof(hello), After(kHelloTimeoutS)).ok()) return;
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
        case MessageType::kParent:
          has_parent = true;
          parent_host = message.value == 0 ? sender_host : text;
          parent_port = message.value == 0 ? sender_port : static_cast<uint16_t>(message.value);
          is_parent_sender = message.value == 0;
          break;
        case MessageType::kGo:
          may_take = true;
          break;
        case MessageType::kProduced:
          produced = std::max(produced, message.value);
          break;
        case MessageType::kCutChild:
          window.CutChild(static_cast<uint32_t>(message.value));
          break;
        case MessageType::kLeftOut:
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
      Status status = Error(StatusCode::kUnavailable, "no local socket");
      if (with_local_sockets) {
        const std::string numeric = from_sender ? control->peer_host() : host;
        status = Socket::ConnectLocal(numeric, port, &socket);
      }
      if (!status.ok()) status = Socket::Connect(host, port, After(kControlTimeoutS), &socket);
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
        window.slot(fetching) = {};
        window.slot(fetching).header = header;
        window.begun = fetching + 1;
        sum = Checksum();
      }
      BucketWindow::Slot& slot = window.slot(fetching);
      if (slot.header.size != header.size) status = Error(StatusCode::kDataLoss, "a wrong frame");
      while (status.ok() && slot.filled < header.size) {
        char* const to = window.buffer(fetching) + slot.filled;
        const uint64_t size = std::min(header.size - slot.filled, kChunk);
        lock->unlock();
        uint64_t got = 0;
        status = ReadSomeOr(socket, to, size, from_sender, &got);
        if (with_checksums) sum.Update(to, got);  // while it is in the cache
        lock->lock();
        slot.filled += got;
        if (!window.outlets.empty()) window.changed.notify_all();
      }
      lock->unlock();
      uint64_t checksum = 0;
      if (status.ok()) status = ReadOr(socket, &checksum, sizeof(checksum), from_sender);
      if (!status.ok()) break;
      lock->lock();
      slot.checksum = checksum;
      if (with_checksums) slot.own_checksum = sum.Digest();
      slot.is_complete = true;
      ++fetching;
      window.changed.notify_all();
      lock->unlock();
    }
    lock->lock();
    return status;
  }

  // Gives a silent parent up, but waits for the sender, and for buckets that are not there yet.
  Status ReadSomeOr(Socket* socket, void* to, uint64_t size, bool from_sender, uint64_t* got) {
    while (true) {
      const Status status = socket->ReadSome(to, size, kChunk, After(stall_timeout_s), got);
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
  bool with_local_sockets = false;
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
  std::unique_ptr<ConnectionServer> server;
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
  state->with_local_sockets = welcome.with_local_sockets != 0;
  if (state->with_local_sockets) listener->ListenLocally();
  state->stall_timeout_s = welcome.stall_timeout_s;
  status = state->window.Allocate(welcome.num_buffers, welcome.buffer_bytes);
  if (!status.ok()) return status;
  state->server =
      std::make_unique<ConnectionServer>(std::move(listener), kMaxReceivers + kMaxStrangers,
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
    status = WriteMessage(state.control.get(), MessageType::kTake);
    if (status.ok()) status = wait([&] { return state.may_take; }, " was not allowed");
    if (!status.ok()) return status;
  }
  const BucketWindow::Slot& slot = window.slot(sequence);
  if (state.with_checksums && slot.own_checksum != slot.checksum) {
    return Error(StatusCode::kDataLoss, name + ": checksum " + std::to_string(slot.own_checksum) +
                                            ", wanted " + std::to_string(slot.checksum) + " over " +
                                            std::to_string(slot.header.size) + " bytes");
  }
  *bucket = {sequence, window.buffer(sequence), slot.header.size};
  return {};
}

void TcpReceiver::Release() {
  const std::lock_guard lock(state_->window.mutex);
  ++state_->released;
  // A sender that cannot be told is gone, which the control connection's thread finds out.
  static_cast<void>(WriteMessage(state_->control.get(), MessageType::kConsumed, state_->released));
  state_->window.changed.notify_all();
}

void TcpReceiver::Verified(uint64_t digest) {
  std::unique_lock lock(state_->window.mutex);
  static_cast<void>(WriteMessage(state_->control.get(), MessageType::kVerified, digest));
  // Children that are not through by then take the rest from the sender.
  state_->window.changed.wait_until(lock, After(state_->stall_timeout_s), [&] {
    return state_->window.ended ||
           std::all_of(state_->window.outlets.begin(), state_->window.outlets.end(),
                       [&](const Outlet* o) { return o->sequence >= state_->released; });
  });
}

void TcpReceiver::Fail(const std::string& reason) {
  const std::lock_guard lock(state_->window.mutex);
  static_cast<void>(WriteMessage(state_->control.get(), MessageType::kFailed, 0, reason));
  // Those that it passes bytes to turn to the sender at once.
  state_->End(StatusCode::kUnavailable, "this receiver failed: " + reason);
}

}  // namespace swe_rl::weightsync
