// Buckets by RCCL or NCCL broadcast from rank 0, double-buffered on two streams.
//
//   rank 0   copy stream: tensors -> buffer k | event packed[k] | comm stream: broadcast buffer k
//   others   comm stream: broadcast into buffer k | event sent[k] | copy stream: buffer k ->
//   tensors
//
// Every bucket begins with a header of 64 bytes (plan digest, version, sequence, size, checksum),
// which receivers read and check before they copy a byte of the bucket to a tensor.
//
// Invariants:
//  * A buffer is packed again only after its broadcast, and received into again only after it was
//    copied out: the streams wait for each other's events.
//  * No wait is without a deadline: events and the communicator are polled. When a deadline
//    passes, or RCCL reports an error, the communicator is aborted, the error names rank and
//    bucket, and the group is of no more use.
//  * Tensors must be complete when Broadcast is called (synchronise the stream that wrote them) and
//    are complete when it returns.
// Owner: one thread a rank. Abort may come from any thread.
#ifndef WEIGHTSYNC_CORE_RCCL_GROUP_H_
#define WEIGHTSYNC_CORE_RCCL_GROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weightsync/core/rccl_api.h"
#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

struct RcclOptions {
  uint32_t rank;
  uint32_t world;
  int device;
  uint64_t bucket_bytes;  // without the header
  uint32_t num_buffers;   // 1..kMaxBuffers
  bool with_checksums;    // costs a copy to the host on every rank
};

// A tensor of a bucket: device or host memory, read at rank 0 and written at the others.
struct RcclPiece {
  void* data;
  uint64_t size;
  uint64_t offset;
};

struct RcclBucket {
  std::vector<RcclPiece> pieces;
  uint64_t size;  // from the bucket's start to the end of its last piece
  std::string label;
};

struct RcclBucketTimes {
  uint64_t num_bytes;
  double issued_s;  // since the broadcast began
  double done_s;
};

class RcclGroup {
 public:
  // What rank 0 makes and the others are given: 128 bytes.
  static Status MakeUniqueId(const RcclApi& api, std::string* unique_id);
  // Joins; returns when all ranks have. `api` must outlive the group.
  static Status Create(const RcclApi& api, const RcclOptions& options, const std::string& unique_id,
                       double timeout_s, std::unique_ptr<RcclGroup>* group);
  ~RcclGroup();

  // Compares every rank's digest of its plan (32 bytes); kInvalidArgument names those that differ.
  Status Agree(const std::string& digest, double timeout_s);
  // Sends or receives every bucket as `version`; `timeout_s` bounds each bucket. Call after Agree.
  Status Broadcast(const std::vector<RcclBucket>& buckets, uint64_t version, double timeout_s,
                   std::vector<RcclBucketTimes>* times);
  // Ends a wait of another thread.
  void Abort();

 private:
  struct Buffer;
  struct Run;

  RcclGroup(const RcclApi& api, const RcclOptions& options);
  Status Allocate();
  Status Settle(const std::string& what, double timeout_s);
  Status WaitFor(GpuEvent event, const std::string& what, double timeout_s);
  Status Fail(StatusCode code, const std::string& message);
  // Fails unless it has, and waits until nothing of the caller's is copied any more.
  Status GiveUp(const Status& why, double timeout_s);
  Status Issue(Run* run, uint64_t sequence);
  Status Finish(Run* run, uint64_t sequence);
  Status Pack(Run* run, uint64_t sequence);
  Status Unpack(Run* run, uint64_t sequence);
  Status Sum(const Buffer& buffer, uint64_t size, const std::string& what, double timeout_s,
             uint64_t* sum);
  std::string Where(const Run& run, uint64_t sequence) const;

  const RcclApi& api_;
  const RcclOptions options_;
  RcclComm comm_ = nullptr;
  GpuStream copy_ = nullptr, send_ = nullptr;
  std::vector<Buffer> buffers_;
  void* staging_ = nullptr;  // host memory for checksums
  char* digests_ = nullptr;  // of every rank, on the device
  char* host_digests_ = nullptr;
  GpuEvent settled_ = nullptr;
  std::string digest_;
  std::atomic<bool> aborted_ = false;
  bool is_broken_ = false;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_RCCL_GROUP_H_
