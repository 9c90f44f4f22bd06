// A ring of buckets in POSIX shared memory: one sender packs into it, receivers read in place.
//
// Owner: the sender makes and unlinks the segment. Layout: a header page group (below, in
// shm_ring.cc), then num_buffers buffers of buffer_bytes. Two buffers let the sender pack
// bucket i + 1 while receivers load bucket i.
//
// Invariants:
//  * Bucket i lies in buffer i % num_buffers. It is written only after every receiver that is
//    still taken into account has released bucket i - num_buffers.
//  * `produced` is stored (release) after the bucket's bytes and slot header; a receiver reads
//    neither before it has seen it (acquire).
//  * Each wait has a deadline; a message names the bucket by number and label.
//  * A receiver that fails or is late is left out from then on, with its reason kept; the
//    others go on. Receivers never wait for one another.
//  * A segment belongs to one epoch; a receiver of another epoch is fenced when it attaches.
//  * The sender holds a lock (flock) on the segment while it lives. `Sweep` unlinks segments
//    whose lock is free: their sender was killed.
#ifndef WEIGHTSYNC_CORE_SHM_RING_H_
#define WEIGHTSYNC_CORE_SHM_RING_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "weightsync/core/packer.h"
#include "weightsync/core/receiver_state.h"
#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

struct RingOptions {
  uint64_t epoch;
  uint32_t num_receivers;  // 1..kMaxReceivers
  uint32_t num_buffers;    // 1..kMaxBuffers
  uint64_t buffer_bytes;   // > 0
  bool with_checksums;
};

struct Header;  // what lies at the segment's start

// The mapped segment; both sides hold one.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Status Create(const std::string& name, uint64_t size);
  Status Open(const std::string& name);
  void Close();

  char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  Status Map(const std::string& name);

  char* data_ = nullptr;
  uint64_t size_ = 0;
  int fd_ = -1;
};

class RingSender {
 public:
  // Makes the segment /NAME, locked. kUnavailable when shared memory is short or the name taken.
  static Status Create(const std::string& name, const RingOptions& options,
                       std::unique_ptr<RingSender>* sender);
  ~RingSender();

  // Packs the next bucket and publishes it. Waits for a free buffer; receivers that have not
  // freed it after timeout_s are left out. kUnavailable when none is left.
  Status Send(const std::vector<Piece>& pieces, const std::string& label, double timeout_s);
  // Waits until every receiver still taken into account is verified or failed; those that are
  // neither after timeout_s are left out.
  Status Finish(double timeout_s);
  // Leaves a receiver out, for instance because its engine died.
  void Drop(uint32_t receiver, const std::string& reason);
  // Tells receivers to give up now, and ends a wait of Send or Finish. Thread-safe.
  void Abort();
  // Aborts, waits for a Send or Finish in another thread, and unlinks the segment. Receivers that
  // have it mapped keep reading safely. Safe to repeat.
  void Close();

  const std::string& name() const { return name_; }
  ReceiverState receiver_state(uint32_t receiver) const;
  std::string receiver_error(uint32_t receiver) const;
  uint64_t num_consumed(uint32_t receiver) const;  // buckets that it released
  // Whether it may have read a bucket. If false after Abort, it never will.
  bool was_touched(uint32_t receiver) const;
  // What it gave to Verified; 0 until then.
  uint64_t digest(uint32_t receiver) const;

 private:
  RingSender() = default;
  template <typename Done>
  void WaitForEach(const Done& done, const std::string& what, double timeout_s);

  std::mutex mutex_;  // held by Send, Finish and Close
  std::string name_;
  Mapping mapping_;
  Header* header_ = nullptr;
  uint64_t next_ = 0;
  bool with_checksums_ = true;
};

class RingReceiver {
 public:
  // Maps the segment. kFenced when it belongs to another epoch; kUnavailable when there is none.
  static Status Attach(const std::string& name, uint64_t epoch, uint32_t index,
                       std::unique_ptr<RingReceiver>* receiver);

  // Waits for the next bucket and checks its epoch, sequence and checksum.
  Status Next(const std::string& label, double timeout_s, Bucket* bucket);
  // Gives the bucket of the last Next back.
  void Release();
  // Tells the sender that everything arrived and is complete, and a digest of it.
  void Verified(uint64_t digest = 0);
  // Tells the sender why this receiver gives up.
  void Fail(const std::string& reason);

 private:
  RingReceiver() = default;

  Mapping mapping_;
  Header* header_ = nullptr;
  uint32_t index_ = 0;
  uint64_t epoch_ = 0;
  uint64_t next_ = 0;
  bool sender_visible_ = false;
};

// Unlinks every segment whose name starts with `prefix` and whose sender is dead; returns how
// many.
int Sweep(const std::string& prefix);

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_SHM_RING_H_
