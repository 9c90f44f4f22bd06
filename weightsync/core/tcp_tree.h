// Buckets over TCP, passed on from receiver to receiver so that the sender's link carries each
// bucket `fan_out` times, whatever the number of receivers.
//
// Every receiver has a control connection to the sender (what it took, released, verified, or why
// it failed) and one data connection to its parent: the sender, or another receiver that passes
// the bytes on while they arrive. Receivers are ranked by index; the children of the sender are
// 0 .. fan_out - 1, those of receiver i are fan_out * (i + 1) onwards. fan_out 1 is a chain.
//
// Invariants:
//  * The sender has no buffers: it sends buckets from the memory that its caller names, which must
//    stay as it is until every receiver that is still taken into account has released the bucket.
//    A receiver's buffer too is written again only then. So a receiver whose parent dies or stalls
//    takes what it lacks from the sender itself, from the byte that it had reached.
//  * Parents are named once all receivers are there or left out, before the first bucket.
//  * A receiver hands out its first bucket only after the sender has noted that it is touched.
//  * Each wait has a deadline; a receiver that fails or is late is left out, with its reason kept.
//  * A connection begins with the transfer's token and epoch, and is cut if either is wrong.
// Threads: one accepts, one a control connection, one a child that is being sent to. All end in
// Close or in the destructor. Both ends must be little-endian.
#ifndef WEIGHTSYNC_CORE_TCP_TREE_H_
#define WEIGHTSYNC_CORE_TCP_TREE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weightsync/core/packer.h"
#include "weightsync/core/receiver_state.h"
#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

struct TcpOptions {
  std::string host;   // where the sender listens, on a free port
  std::string token;  // secret of this transfer, 16..64 bytes
  uint64_t epoch;
  uint32_t num_receivers;  // 1..kMaxReceivers
  uint32_t fan_out;        // >= 1
  uint32_t num_buffers;    // 1..kMaxBuffers
  uint64_t buffer_bytes;   // > 0
  bool with_checksums;
  double
      stall_timeout_s;  // a receiver without a byte for so long turns from its parent to the sender
  bool with_local_sockets = true;  // receivers on their parent's host take no TCP for their data
};

class TcpSender {
 public:
  static Status Create(const TcpOptions& options, std::unique_ptr<TcpSender>* sender);
  ~TcpSender();

  // As RingSender's, but nothing is copied: the pieces' bytes must neither change nor go before
  // num_buffers later buckets were sent, Finish returned or Close did. `owner` is kept until then.
  Status Send(std::vector<Piece> pieces, const std::string& label, double timeout_s,
              std::shared_ptr<void> owner = nullptr);
  // As RingSender's.
  Status Finish(double timeout_s);
  void Drop(uint32_t receiver, const std::string& reason);
  void Abort();
  void Close();

  uint16_t port() const;
  ReceiverState receiver_state(uint32_t receiver) const;
  std::string receiver_error(uint32_t receiver) const;
  uint64_t num_consumed(uint32_t receiver) const;
  bool was_touched(uint32_t receiver) const;
  uint64_t digest(uint32_t receiver) const;
  // Payload bytes that left this process, over all connections.
  uint64_t num_bytes_sent() const;

 private:
  struct State;

  explicit TcpSender(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class TcpReceiver {
 public:
  // Connects. kFenced when the sender has another epoch; kUnavailable when it is not there.
  static Status Attach(const std::string& host, uint16_t port, const std::string& token,
                       uint64_t epoch, uint32_t index, double timeout_s,
                       std::unique_ptr<TcpReceiver>* receiver);
  ~TcpReceiver();

  // As RingReceiver's. Verified waits until those that it passes bytes to have them all.
  Status Next(const std::string& label, double timeout_s, Bucket* bucket);
  void Release();
  void Verified(uint64_t digest = 0);
  void Fail(const std::string& reason);

 private:
  struct State;

  explicit TcpReceiver(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_TCP_TREE_H_
