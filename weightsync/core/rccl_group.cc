#include "weightsync/core/rccl_group.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "weightsync/core/checksum.h"
#include "weightsync/core/messages.h"
#include "weightsync/core/receiver_state.h"

namespace swe_rl::weightsync {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr size_t kDigestBytes = 32;
constexpr unsigned int kNonBlocking = 1;  // hipStreamNonBlocking, cudaStreamNonBlocking

struct Header {
  char digest[kDigestBytes];
  uint64_t version;
  uint64_t sequence;
  uint64_t size;
  uint64_t checksum;
};
static_assert(sizeof(Header) == 64);

double Since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

}  // namespace

struct RcclGroup::Buffer {
  char* device = nullptr;    // header, then the bucket
  Header* header = nullptr;  // in host memory that the device can copy
  GpuEvent ready = nullptr;  // rank 0: packed; others: header and bucket have arrived
  GpuEvent sent = nullptr;   // its broadcast is over
  GpuEvent free = nullptr;   // others: copied out
};

struct RcclGroup::Run {
  const std::vector<RcclBucket>& buckets;
  uint64_t version;
  double timeout_s;
  SteadyClock::time_point start;
  std::vector<RcclBucketTimes>* times;
};

Status RcclGroup::MakeUniqueId(const RcclApi& api, std::string* unique_id) {
  RcclUniqueId id;
  const Status status = api.Check(api.GetUniqueId(&id), "ncclGetUniqueId");
  if (status.ok()) unique_id->assign(id.internal, kUniqueIdBytes);
  return status;
}

RcclGroup::RcclGroup(const RcclApi& api, const RcclOptions& options)
    : api_(api), options_(options), buffers_(options.num_buffers) {}

Status RcclGroup::Create(const RcclApi& api, const RcclOptions& options,
                         const std::string& unique_id, double timeout_s,
                         std::unique_ptr<RcclGroup>* group) {
  if (!api.has_runtime || options.world == 0 || options.rank >= options.world ||
      options.num_buffers == 0 || options.num_buffers > kMaxBuffers || options.bucket_bytes == 0 ||
      unique_id.size() != kUniqueIdBytes) {
    return Error(StatusCode::kInvalidArgument,
                 "an RCCL group wants a runtime, a rank below its world, 1.." +
                     std::to_string(kMaxBuffers) + " buffers with bytes and an id of " +
                     std::to_string(kUniqueIdBytes) + " bytes, got rank " +
                     std::to_string(options.rank) + " of " + std::to_string(options.world) + ", " +
                     std::to_string(options.num_buffers) + " buffers of " +
                     std::to_string(options.bucket_bytes) + " and an id of " +
                     std::to_string(unique_id.size()));
  }
  std::unique_ptr<RcclGroup> made(new RcclGroup(api, options));
  Status status = made->Allocate();
  if (!status.ok()) return status;
  RcclUniqueId id;
  std::memcpy(id.internal, unique_id.data(), kUniqueIdBytes);
  RcclConfig config;
  status = api.Check(api.CommInitRankConfig(&made->comm_, static_cast<int>(options.world), id,
                                            static_cast<int>(options.rank), &config),
                     "ncclCommInitRankConfig");
  if (!status.ok()) return status;
  status = made->Settle("joining the group", timeout_s);
  if (!status.ok()) return status;
  *group = std::move(made);
  return {};
}

Status RcclGroup::Allocate() {
  Status status = api_.CheckGpu(api_.SetDevice(options_.device),
                                "choosing device " + std::to_string(options_.device));
  const auto run = [&](int code, const char* what) {
    if (status.ok()) status = api_.CheckGpu(code, what);
    return status.ok();
  };
  if (!status.ok()) return status;
  run(api_.StreamCreateWithFlags(&copy_, kNonBlocking), "making a stream");
  run(api_.StreamCreateWithFlags(&send_, kNonBlocking), "making a stream");
  run(api_.EventCreate(&settled_), "making an event");
  const size_t digest_bytes = options_.world * kDigestBytes;
  run(api_.Malloc(reinterpret_cast<void**>(&digests_), digest_bytes),
      "allocating digests on the device");
  run(api_.HostMalloc(reinterpret_cast<void**>(&host_digests_), digest_bytes, 0),
      "allocating host memory");
  for (Buffer& buffer : buffers_) {
    if (!status.ok()) break;
    run(api_.Malloc(reinterpret_cast<void**>(&buffer.device),
                    sizeof(Header) + options_.bucket_bytes),
        "allocating a bucket on the device");
    run(api_.HostMalloc(reinterpret_cast<void**>(&buffer.header), sizeof(Header), 0),
        "allocating host memory");
    run(api_.EventCreate(&buffer.ready), "making an event");
    run(api_.EventCreate(&buffer.sent), "making an event");
    run(api_.EventCreate(&buffer.free), "making an event");
  }
  if (options_.with_checksums) {
    run(api_.HostMalloc(&staging_, options_.bucket_bytes, 0), "allocating host memory");
  }
  return status;
}

RcclGroup::~RcclGroup() {
  // Abort ends what may still run on the streams; destroying could wait for a rank that is gone.
  if (comm_ != nullptr) api_.CommAbort(comm_);
  // Before the memory that they may still copy to.
  if (copy_ != nullptr) api_.StreamDestroy(copy_);
  if (send_ != nullptr) api_.StreamDestroy(send_);
  for (Buffer& buffer : buffers_) {
    if (buffer.device != nullptr) api_.Free(buffer.device);
    if (buffer.header != nullptr) api_.HostFree(buffer.header);
    for (GpuEvent event : {buffer.ready, buffer.sent, buffer.free}) {
      if (event != nullptr) api_.EventDestroy(event);
    }
  }
  if (staging_ != nullptr) api_.HostFree(staging_);
  if (digests_ != nullptr) api_.Free(digests_);
  if (host_digests_ != nullptr) api_.HostFree(host_digests_);
  if (settled_ != nullptr) api_.EventDestroy(settled_);
}

void RcclGroup::Abort() { aborted_ = true; }

Status RcclGroup::Fail(StatusCode code, const std::string& message) {
  is_broken_ = true;
  if (comm_ != nullptr) api_.CommAbort(comm_);
  comm_ = nullptr;
  return Error(code, "rank " + std::to_string(options_.rank) + ": " + message);
}

// Waits until the communicator has taken the last call.
Status RcclGroup::Settle(const std::string& what, double timeout_s) {
  const auto start = SteadyClock::now();
  while (true) {
    int state = kRcclSuccess;
    const int code = api_.CommGetAsyncError(comm_, &state);
    if (code != kRcclSuccess) state = code;
    if (state == kRcclSuccess) return {};
    if (state != kRcclInProgress) {
      return Fail(StatusCode::kUnavailable, what + ": " + api_.GetErrorString(state));
    }
    if (aborted_) return Fail(StatusCode::kUnavailable, what + ": aborted");
    if (Since(start) > timeout_s) {
      return Fail(StatusCode::kDeadlineExceeded, what + " took longer than " + Seconds(timeout_s));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Status RcclGroup::WaitFor(GpuEvent event, const std::string& what, double timeout_s) {
  const auto start = SteadyClock::now();
  for (int i = 0;; ++i) {
    const int code = api_.EventQuery(event);
    if (code == kGpuSuccess) return {};
    if (code != kGpuNotReady) {
      return Fail(StatusCode::kUnavailable, what + ": device error " + std::to_string(code));
    }
    int state = kRcclSuccess;
    if (api_.CommGetAsyncError(comm_, &state) != kRcclSuccess ||
        (state != kRcclSuccess && state != kRcclInProgress)) {
      return Fail(StatusCode::kUnavailable, what + ": " + api_.GetErrorString(state));
    }
    if (aborted_) return Fail(StatusCode::kUnavailable, what + ": aborted");
    if (Since(start) > timeout_s) {
      return Fail(StatusCode::kDeadlineExceeded, what + " took longer than " + Seconds(timeout_s));
    }
    if (i < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

Status RcclGroup::Agree(const std::string& digest, double timeout_s) {
  if (digest.size() != kDigestBytes) {
    return Error(StatusCode::kInvalidArgument,
                 "a plan's digest has 32 bytes, got " + std::to_string(digest.size()));
  }
  if (is_broken_) return Error(StatusCode::kUnavailable, "the group is broken");
  const std::string what = "comparing plans";
  const uint64_t num_bytes = options_.world * kDigestBytes;
  char* const own = digests_ + options_.rank * kDigestBytes;
  std::memcpy(host_digests_, digest.data(), kDigestBytes);
  Status status = api_.CheckGpu(
      api_.MemcpyAsync(own, host_digests_, kDigestBytes, kGpuCopyDefault, send_), what);
  if (status.ok()) {
    status =
        api_.Check(api_.AllGather(own, digests_, kDigestBytes, kRcclUint8, comm_, send_), what);
  }
  if (!status.ok()) return Fail(status.code, status.message);
  status = Settle(what, timeout_s);
  if (!status.ok()) return status;
  status = api_.CheckGpu(
      api_.MemcpyAsync(host_digests_, digests_, num_bytes, kGpuCopyDefault, send_), what);
  if (status.ok()) status = api_.CheckGpu(api_.EventRecord(settled_, send_), what);
  if (status.ok()) status = WaitFor(settled_, what, timeout_s);
  if (!status.ok()) return status;
  std::string others;
  for (uint32_t rank = 0; rank < options_.world; ++rank) {
    if (std::memcmp(host_digests_ + rank * kDigestBytes, digest.data(), kDigestBytes) != 0) {
      others += (others.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (!others.empty()) {
    digest_.clear();
    return Error(StatusCode::kInvalidArgument,
                 "rank " + std::to_string(options_.rank) + ": the plan differs from that of rank " +
                     others + " in names, shapes, dtypes or their order");
  }
  digest_ = digest;
  return {};
}

std::string RcclGroup::Where(const Run& run, uint64_t sequence) const {
  return Named(sequence, run.buckets[sequence].label) + " of version " +
         std::to_string(run.version);
}

Status RcclGroup::Broadcast(const std::vector<RcclBucket>& buckets, uint64_t version,
                            double timeout_s, std::vector<RcclBucketTimes>* times) {
  if (is_broken_) return Error(StatusCode::kUnavailable, "the group is broken");
  if (digest_.empty()) {
    return Error(StatusCode::kInvalidArgument, "ranks have not agreed on a plan");
  }
  for (const RcclBucket& bucket : buckets) {
    if (bucket.size > options_.bucket_bytes) {
      return Error(StatusCode::kInvalidArgument,
                   "bucket " + bucket.label + " has " + std::to_string(bucket.size) +
                       " bytes, buffers " + std::to_string(options_.bucket_bytes));
    }
  }
  times->assign(buckets.size(), {});
  Run run = {buckets, version, timeout_s, SteadyClock::now(), times};
  const uint64_t lag = buffers_.size() - 1;
  for (uint64_t i = 0; i < buckets.size() + lag; ++i) {
    // A receiver reads headers `lag` buckets behind, so that the next broadcast is under way.
    if (i < buckets.size()) {
      if (Status status = Issue(&run, i); !status.ok()) return GiveUp(status, timeout_s);
    }
    if (i >= lag) {
      if (Status status = Finish(&run, i - lag); !status.ok()) return GiveUp(status, timeout_s);
    }
  }
  // Rank 0's tensors may be changed, and the others' read, from here on.
  Status status = api_.CheckGpu(api_.EventRecord(settled_, copy_), "the last copy");
  if (status.ok()) status = WaitFor(settled_, "the last copy", timeout_s);
  return status.ok() ? status : GiveUp(status, timeout_s);
}

// The caller may free its tensors once Broadcast returned: copies that were queued come first.
Status RcclGroup::GiveUp(const Status& why, double timeout_s) {
  const Status status = is_broken_ ? why : Fail(why.code, why.message);
  const auto start = SteadyClock::now();
  if (api_.EventRecord(settled_, copy_) != kGpuSuccess) return status;
  while (api_.EventQuery(settled_) == kGpuNotReady) {
    if (Since(start) > timeout_s) {
      return Error(status.code, status.message + "; and the device was still copying " +
                                    Seconds(timeout_s) + " later: keep the tensors");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return status;
}

// Starts the broadcast of a bucket, after packing at rank 0.
Status RcclGroup::Issue(Run* run, uint64_t sequence) {
  Buffer& buffer = buffers_[sequence % buffers_.size()];
  const RcclBucket& bucket = run->buckets[sequence];
  const std::string where = Where(*run, sequence);
  (*run->times)[sequence] = {bucket.size, Since(run->start), 0};
  Status status;
  if (options_.rank == 0) {
    status = Pack(run, sequence);
    if (status.ok()) {
      status = api_.CheckGpu(api_.StreamWaitEvent(send_, buffer.ready, 0), where);
    }
  } else if (sequence >= buffers_.size()) {
    status = api_.CheckGpu(api_.StreamWaitEvent(send_, buffer.free, 0), where);
  }
  if (status.ok()) {
    status = api_.Check(api_.Broadcast(buffer.device, buffer.device, sizeof(Header) + bucket.size,
                                       kRcclUint8, 0, comm_, send_),
                        where);
  }
  if (!status.ok()) return Fail(status.code, status.message);
  status = Settle(where, run->timeout_s);
  if (status.ok()) status = api_.CheckGpu(api_.EventRecord(buffer.sent, send_), where);
  return status;
}

Status RcclGroup::Pack(Run* run, uint64_t sequence) {
  Buffer& buffer = buffers_[sequence % buffers_.size()];
  const RcclBucket& bucket = run->buckets[sequence];
  const std::string where = Where(*run, sequence);
  Status status;
  const auto copy = [&](void* to, const void* from, uint64_t size) {
    if (status.ok()) {
      status = api_.CheckGpu(api_.MemcpyAsync(to, from, size, kGpuCopyDefault, copy_), where);
    }
  };
  if (sequence >= buffers_.size()) {
    status = api_.CheckGpu(api_.StreamWaitEvent(copy_, buffer.sent, 0), where);
  }
  char* const body = buffer.device + sizeof(Header);
  for (const RcclPiece& piece : bucket.pieces) copy(body + piece.offset, piece.data, piece.size);
  if (!status.ok()) return status;
  // The header's host memory is free: Finish waited for the bucket that had it before.
  Header header = {{}, run->version, sequence, bucket.size, 0};
  std::memcpy(header.digest, digest_.data(), kDigestBytes);
  if (options_.with_checksums) {
    status = Sum(buffer, bucket.size, where, run->timeout_s, &header.checksum);
  }
  *buffer.header = header;
  copy(buffer.device, buffer.header, sizeof(Header));
  if (status.ok()) status = api_.CheckGpu(api_.EventRecord(buffer.ready, copy_), where);
  return status;
}

// Waits until a bucket was sent, or has arrived and is on its way to the tensors.
Status RcclGroup::Finish(Run* run, uint64_t sequence) {
  Buffer& buffer = buffers_[sequence % buffers_.size()];
  Status status = options_.rank == 0 ? WaitFor(buffer.sent, Where(*run, sequence), run->timeout_s)
                                     : Unpack(run, sequence);
  (*run->times)[sequence].done_s = Since(run->start);
  return status;
}

Status RcclGroup::Unpack(Run* run, uint64_t sequence) {
  Buffer& buffer = buffers_[sequence % buffers_.size()];
  const RcclBucket& bucket = run->buckets[sequence];
  const std::string where = Where(*run, sequence);
  Status status;
  const auto gpu = [&](int code) {
    if (status.ok()) status = api_.CheckGpu(code, where);
    return status.ok();
  };
  if (!gpu(api_.StreamWaitEvent(copy_, buffer.sent, 0)) ||
      !gpu(
          api_.MemcpyAsync(buffer.header, buffer.device, sizeof(Header), kGpuCopyDefault, copy_)) ||
      !gpu(api_.EventRecord(buffer.ready, copy_))) {
    return status;
  }
  status = WaitFor(buffer.ready, where, run->timeout_s);
  if (!status.ok()) return status;
  const Header& header = *buffer.header;
  if (std::memcmp(header.digest, digest_.data(), kDigestBytes) != 0) {
    return Fail(StatusCode::kDataLoss, where + ": it belongs to another plan, or was overwritten");
  }
  if (header.version != run->version || header.sequence != sequence || header.size != bucket.size) {
    return Fail(StatusCode::kDataLoss, where + ": got bucket " + std::to_string(header.sequence) +
                                           " of version " + std::to_string(header.version) +
                                           " with " + std::to_string(header.size) +
                                           " bytes, wanted " + std::to_string(bucket.size));
  }
  if (options_.with_checksums) {
    uint64_t sum = 0;
    status = Sum(buffer, bucket.size, where, run->timeout_s, &sum);
    if (!status.ok()) return status;
    if (sum != header.checksum) {
      return Fail(StatusCode::kDataLoss, where + ": checksum " + std::to_string(sum) + ", wanted " +
                                             std::to_string(header.checksum));
    }
  }
  const char* const body = buffer.device + sizeof(Header);
  for (const RcclPiece& piece : bucket.pieces) {
    gpu(api_.MemcpyAsync(piece.data, body + piece.offset, piece.size, kGpuCopyDefault, copy_));
  }
  gpu(api_.EventRecord(buffer.free, copy_));
  return status;
}

// Of a bucket's bytes, copied to the host after what the copy stream has to do.
Status RcclGroup::Sum(const Buffer& buffer, uint64_t size, const std::string& what,
                      double timeout_s, uint64_t* sum) {
  Status status = api_.CheckGpu(
      api_.MemcpyAsync(staging_, buffer.device + sizeof(Header), size, kGpuCopyDefault, copy_),
      what);
  if (status.ok()) status = api_.CheckGpu(api_.EventRecord(settled_, copy_), what);
  if (status.ok()) status = WaitFor(settled_, what, timeout_s);
  if (!status.ok()) return status;
  Checksum checksum;
  checksum.Update(staging_, size);
  *sum = checksum.Digest();
  return {};
}

}  // namespace swe_rl::weightsync
