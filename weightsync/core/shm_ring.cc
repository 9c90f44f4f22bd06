#include "weightsync/core/shm_ring.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>

#include "weightsync/core/checksum.h"
#include "weightsync/core/messages.h"

namespace swe_rl::weightsync {

// Shared between processes: fixed widths, no pointers.
struct Header {
  static constexpr uint64_t kMagic = 0x3330'5357'4C52'4557;  // "WERLWS03"
  struct Slot {
    uint64_t epoch;
    uint64_t sequence;
    uint64_t size;
    uint64_t checksum;
  };
  struct alignas(64) Receiver {
    std::atomic<uint64_t> digest;    // what a verified receiver holds
    std::atomic<uint64_t> taken;     // buckets that it began to read
    std::atomic<uint64_t> consumed;  // buckets that it released
    std::atomic<uint32_t> state;
    std::atomic<uint32_t> left_out;  // set by the sender alone, which then ignores the rest
    char error[480];
  };

  std::atomic<uint64_t> magic;  // stored last by the sender
  uint64_t epoch;
  int64_t sender_pid;
  uint64_t buffer_bytes;
  uint32_t num_receivers;
  uint32_t num_buffers;
  uint32_t with_checksums;
  std::atomic<uint32_t> aborted;
  std::atomic<uint32_t> changes;      // a futex: counts what either side announced
  std::atomic<uint32_t> num_waiting;  // too many after a waiter was killed, which only costs calls
  alignas(64) std::atomic<uint64_t> produced;
  Slot slots[kMaxBuffers];
  Receiver receivers[kMaxReceivers];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHeaderBytes = (sizeof(Header) + kPage - 1) / kPage * kPage;
constexpr int kNumEager = 64;
constexpr char kShmFolder[] = "/dev/shm/";

// Longest sleep without a look at what nobody announces: a sender that was killed.
constexpr double kLookS = 0.02;

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");

// Tells the processes that wait for a change of the header.
void Announce(Header* header) {
  header->changes.fetch_add(1, std::memory_order_seq_cst);
  if (header->num_waiting.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &header->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `done` holds or the deadline passes: eagerly first, for a partner that is running,
// then asleep, for one that needs this core. False: the deadline passed.
template <typename Done>
bool WaitUntil(Header* header, const Done& done, double timeout_s) {
  const auto deadline = SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(
                                                 std::chrono::duration<double>(timeout_s));
  for (int i = 0;; ++i) {
    if (i < kNumEager) {
      if (done()) return true;
      sched_yield();
      continue;
    }
    header->num_waiting.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = header->changes.load(std::memory_order_seq_cst);
    const bool is_done = done();
    const std::chrono::duration<double> left = deadline - SteadyClock::now();
    if (!is_done && left.count() > 0) {
      const auto sleep_ns = static_cast<long>(std::min(left.count(), kLookS) * 1e9);
      const timespec sleep = {0, sleep_ns};
      syscall(SYS_futex, &header->changes, FUTEX_WAIT, seen, &sleep, nullptr, 0);
    }
    header->num_waiting.fetch_sub(1, std::memory_order_seq_cst);
    if (is_done) return true;
    if (left.count() <= 0) return false;
  }
}

void SetError(Header::Receiver* receiver, const std::string& reason) {
  const std::string text = Shortened(reason, sizeof(receiver->error) - 1);
  std::memcpy(receiver->error, text.c_str(), text.size() + 1);
}

char* BufferAt(const Mapping& mapping, const Header& header, uint64_t sequence) {
  return mapping.data() + kHeaderBytes + (sequence % header.num_buffers) * header.buffer_bytes;
}

}  // namespace

Mapping::~Mapping() { Close(); }

void Mapping::Close() {
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
  data_ = nullptr;
  fd_ = -1;
}

Status Mapping::Map(const std::string& name) {
  // All page tables at once: one fault for each page would halve the rate.
  void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (at == MAP_FAILED) {
    return Error(StatusCode::kUnavailable, "cannot map " + std::to_string(size_) + " bytes of " +
                                               name + ": " + std::strerror(errno));
  }
  data_ = static_cast<char*>(at);
  return {};
}

Status Mapping::Create(const std::string& name, uint64_t size) {
  fd_ = shm_open(("/" + name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd_ < 0) {
    return Error(StatusCode::kUnavailable,
                 "cannot make the segment " + name + ": " + std::strerror(errno));
  }
  struct stat info;
  if (flock(fd_, LOCK_EX) != 0 || fstat(fd_, &info) != 0 || info.st_nlink == 0) {
    return Error(StatusCode::kUnavailable, "segment " + name + " was swept while it was made");
  }
  size_ = size;
  // Reserves the memory now: a short /dev/shm must be an error here, not a SIGBUS later.
  if (const int code = posix_fallocate(fd_, 0, static_cast<off_t>(size)); code != 0) {
    shm_unlink(("/" + name).c_str());
    return Error(StatusCode::kUnavailable,
                 "cannot reserve " + std::to_string(size) + " bytes in /dev/shm for " + name +
                     ": " + std::strerror(code) + "; lower bucket_bytes or enlarge /dev/shm");
  }
  return Map(name);
}

Status Mapping::Open(const std::string& name) {
  fd_ = shm_open(("/" + name).c_str(), O_RDWR | O_CLOEXEC, 0600);
  struct stat info;
  if (fd_ < 0 || fstat(fd_, &info) != 0) {
    return Error(StatusCode::kUnavailable, "cannot open the segment " + name + ": " +
                                               std::strerror(errno) +
                                               "; is its sender on this host and alive?");
  }
  size_ = static_cast<uint64_t>(info.st_size);
  if (size_ < kHeaderBytes) {
    return Error(StatusCode::kUnavailable, "segment " + name + " is not complete");
  }
  return Map(name);
}

Status RingSender::Create(const std::string& name, const RingOptions& options,
                          std::unique_ptr<RingSender>* sender) {
  if (options.num_receivers == 0 || options.num_receivers > kMaxReceivers ||
      options.num_buffers == 0 || options.num_buffers > kMaxBuffers || options.buffer_bytes == 0) {
    return Error(StatusCode::kInvalidArgument, "a ring wants 1.." + std::to_string(kMaxReceivers) +
                                                   " receivers, 1.." + std::to_string(kMaxBuffers) +
                                                   " buffers and buffers with bytes, got " +
                                                   std::to_string(options.num_receivers) + ", " +
                                                   std::to_string(options.num_buffers) + " and " +
                                                   std::to_string(options.buffer_bytes));
  }
  std::unique_ptr<RingSender> made(new RingSender);
  // A buffer starts on a page, so that tensors in it are aligned.
  const uint64_t buffer_bytes = (options.buffer_bytes + kPage - 1) / kPage * kPage;
  Status status = made->mapping_.Create(name, kHeaderBytes + options.num_buffers * buffer_bytes);
  if (!status.ok()) return status;
  made->name_ = name;
  made->with_checksums_ = options.with_checksums;
  Header* header = new (made->mapping_.data()) Header();
  header->epoch = options.epoch;
  header->sender_pid = getpid();
  header->buffer_bytes = buffer_bytes;
  header->num_receivers = options.num_receivers;
  header->num_buffers = options.num_buffers;
  header->with_checksums = options.with_checksums;
  header->magic.store(Header::kMagic, std::memory_order_release);
  made->header_ = header;
  *sender = std::move(made);
  return {};
}

RingSender::~RingSender() { Close(); }

void RingSender::Close() {
  Abort();  // ends a wait of Send or Finish in another thread
  const std::lock_guard lock(mutex_);
  if (header_ == nullptr) return;
  shm_unlink(("/" + name_).c_str());
  header_ = nullptr;
  mapping_.Close();
}

void RingSender::Abort() {
  if (header_ == nullptr) return;
  header_->aborted.store(1, std::memory_order_seq_cst);
  Announce(header_);
}

void RingSender::Drop(uint32_t index, const std::string& reason) {
  if (header_ == nullptr || index >= header_->num_receivers) return;
  Header::Receiver& receiver = header_->receivers[index];
  if (receiver_state(index) == ReceiverState::kFailed) return;
  if (receiver.state.load(std::memory_order_acquire) ==
      static_cast<uint32_t>(ReceiverState::kVerified)) {
    return;
  }
  SetError(&receiver, reason);
  receiver.left_out.store(1, std::memory_order_seq_cst);
  Announce(header_);
}

ReceiverState RingSender::receiver_state(uint32_t index) const {
  if (header_ == nullptr || index >= header_->num_receivers) return ReceiverState::kFailed;
  const Header::Receiver& receiver = header_->receivers[index];
  if (receiver.left_out.load(std::memory_order_acquire) != 0) return ReceiverState::kFailed;
  return static_cast<ReceiverState>(receiver.state.load(std::memory_order_acquire));
}

std::string RingSender::receiver_error(uint32_t index) const {
  if (header_ == nullptr || index >= header_->num_receivers) return "the ring is closed";
  if (receiver_state(index) != ReceiverState::kFailed) return "";
  const char* error = header_->receivers[index].error;
  return std::string(error, strnlen(error, sizeof(Header::Receiver::error)));
}

uint64_t RingSender::num_consumed(uint32_t index) const {
  if (header_ == nullptr || index >= header_->num_receivers) return 0;
  return header_->receivers[index].consumed.load(std::memory_order_acquire);
}

bool RingSender::was_touched(uint32_t index) const {
  if (header_ == nullptr || index >= header_->num_receivers) return true;
  return header_->receivers[index].taken.load(std::memory_order_seq_cst) > 0;
}

uint64_t RingSender::digest(uint32_t index) const {
  if (header_ == nullptr || index >= header_->num_receivers) return 0;
  return header_->receivers[index].digest.load(std::memory_order_acquire);
}

template <typename Done>
void RingSender::WaitForEach(const Done& done, const std::string& what, double timeout_s) {
  const auto all_done = [&] {
    if (header_->aborted.load(std::memory_order_acquire) != 0) return true;
    for (uint32_t i = 0; i < header_->num_receivers; ++i) {
      if (receiver_state(i) != ReceiverState::kFailed && !done(i)) return false;
    }
    return true;
  };
  if (WaitUntil(header_, all_done, timeout_s)) return;
  for (uint32_t i = 0; i < header_->num_receivers; ++i) {
    if (receiver_state(i) != ReceiverState::kFailed && !done(i)) {
      Drop(i, std::string("it ") + what + " within " + Seconds(timeout_s) + " (it has released " +
                  std::to_string(num_consumed(i)) + " buckets)");
    }
  }
}

Status RingSender::Send(const std::vector<Piece>& pieces, const std::string& label,
                        double timeout_s) {
  const std::lock_guard lock(mutex_);
  if (header_ == nullptr) return Error(StatusCode::kInvalidArgument, "the ring is closed");
  const uint64_t sequence = next_;
  const uint64_t num_buffers = header_->num_buffers;
  if (sequence >= num_buffers) {
    const uint64_t wanted = sequence - num_buffers + 1;
    WaitForEach([&](uint32_t i) { return num_consumed(i) >= wanted; },
                "did not free a buffer for " + Named(sequence, label), timeout_s);
  }
  if (header_->aborted.load(std::memory_order_acquire) != 0) {
    return Error(StatusCode::kUnavailable, "aborted before " + Named(sequence, label));
  }
  bool any = false;
  for (uint32_t i = 0; i < header_->num_receivers; ++i) {
    any = any || receiver_state(i) != ReceiverState::kFailed;
  }
  if (!any) {
    return Error(StatusCode::kUnavailable, "no receiver is left for " + Named(sequence, label) +
                                               "; the first said: " + receiver_error(0));
  }
  Packed packed;
  const Status status = Pack(pieces, BufferAt(mapping_, *header_, sequence), header_->buffer_bytes,
                             with_checksums_, &packed);
  if (!status.ok()) return Error(status.code, Named(sequence, label) + ": " + status.message);
  header_->slots[sequence % num_buffers] = {header_->epoch, sequence, packed.size, packed.checksum};
  next_ = sequence + 1;
  header_->produced.store(next_, std::memory_order_release);
  Announce(header_);
  return {};
}

Status RingSender::Finish(double timeout_s) {
  const std::lock_guard lock(mutex_);
  if (header_ == nullptr) return Error(StatusCode::kInvalidArgument, "the ring is closed");
  WaitForEach([&](uint32_t i) { return receiver_state(i) == ReceiverState::kVerified; },
              "did not verify the update after " + std::to_string(next_) + " buckets", timeout_s);
  return {};
}

Status RingReceiver::Attach(const std::string& name, uint64_t epoch, uint32_t index,
                            std::unique_ptr<RingReceiver>* receiver) {
  std::unique_ptr<RingReceiver> made(new RingReceiver);
  const Status status = made->mapping_.Open(name);
  if (!status.ok()) return status;
  Header* header = reinterpret_cast<Header*>(made->mapping_.data());
  if (header->magic.load(std::memory_order_acquire) != Header::kMagic) {
    return Error(StatusCode::kUnavailable,
                 "segment " + name + " has another layout: sender and receiver differ in version");
  }
  if (header->epoch != epoch) {
    return Error(StatusCode::kFenced, "segment " + name + " is of epoch " +
                                          std::to_string(header->epoch) + ", wanted " +
                                          std::to_string(epoch));
  }
  if (index >= header->num_receivers) {
    return Error(StatusCode::kInvalidArgument, "receiver " + std::to_string(index) +
                                                   " of a ring for " +
                                                   std::to_string(header->num_receivers));
  }
  made->header_ = header;
  made->index_ = index;
  made->epoch_ = epoch;
  // A sender in another pid namespace cannot be probed; then the deadline alone counts.
  made->sender_visible_ = kill(static_cast<pid_t>(header->sender_pid), 0) == 0 || errno == EPERM;
  header->receivers[index].state.store(static_cast<uint32_t>(ReceiverState::kAttached),
                                       std::memory_order_release);
  *receiver = std::move(made);
  return {};
}

Status RingReceiver::Next(const std::string& label, double timeout_s, Bucket* bucket) {
  const uint64_t sequence = next_;
  Header::Receiver& own = header_->receivers[index_];
  bool ended = false, dead = false;
  const bool arrived = WaitUntil(
      header_,
      [&] {
        if (header_->produced.load(std::memory_order_acquire) > sequence) return true;
        ended = header_->aborted.load(std::memory_order_acquire) != 0;
        dead = sender_visible_ && kill(static_cast<pid_t>(header_->sender_pid), 0) != 0 &&
               errno == ESRCH;
        return ended || dead;
      },
      timeout_s);
  const std::string name = Named(sequence, label);
  if (arrived && !ended && !dead) {
    // Before the flags are read again (both sequentially consistent): either this side sees
    // that it was given up and touches nothing, or the sender sees that it took the bucket.
    own.taken.store(sequence + 1, std::memory_order_seq_cst);
    ended = header_->aborted.load(std::memory_order_seq_cst) != 0;
  }
  if (!arrived) {
    return Error(StatusCode::kDeadlineExceeded,
                 name + " did not arrive within " + Seconds(timeout_s));
  }
  if (ended) return Error(StatusCode::kUnavailable, "the sender gave up before " + name);
  if (dead) {
    return Error(
        StatusCode::kUnavailable,
        "the sender (process " + std::to_string(header_->sender_pid) + ") ended before " + name);
  }
  if (own.left_out.load(std::memory_order_seq_cst) != 0) {
    return Error(StatusCode::kUnavailable, "the sender left this receiver out before " + name +
                                               ": its buffers may be overwritten");
  }
  const Header::Slot slot = header_->slots[sequence % header_->num_buffers];
  if (slot.epoch != epoch_ || slot.sequence != sequence || slot.size > header_->buffer_bytes) {
    return Error(StatusCode::kDataLoss, name + ": got epoch " + std::to_string(slot.epoch) +
                                            " sequence " + std::to_string(slot.sequence) +
                                            ", wanted epoch " + std::to_string(epoch_));
  }
  const char* data = BufferAt(mapping_, *header_, sequence);
  if (header_->with_checksums != 0) {
    Checksum checksum;
    checksum.Update(data, slot.size);
    if (const uint64_t got = checksum.Digest(); got != slot.checksum) {
      return Error(StatusCode::kDataLoss, name + ": checksum " + std::to_string(got) + ", wanted " +
                                              std::to_string(slot.checksum) + " over " +
                                              std::to_string(slot.size) + " bytes");
    }
  }
  *bucket = {sequence, data, slot.size};
  return {};
}

void RingReceiver::Release() {
  ++next_;
  header_->receivers[index_].consumed.store(next_, std::memory_order_release);
  Announce(header_);
}

void RingReceiver::Verified(uint64_t digest) {
  header_->receivers[index_].digest.store(digest, std::memory_order_release);
  header_->receivers[index_].state.store(static_cast<uint32_t>(ReceiverState::kVerified),
                                         std::memory_order_release);
  Announce(header_);
}

void RingReceiver::Fail(const std::string& reason) {
  Header::Receiver& own = header_->receivers[index_];
  if (own.left_out.load(std::memory_order_acquire) == 0) SetError(&own, reason);
  own.state.store(static_cast<uint32_t>(ReceiverState::kFailed), std::memory_order_release);
  Announce(header_);
}

int Sweep(const std::string& prefix) {
  DIR* folder = opendir(kShmFolder);
  if (folder == nullptr) return 0;
  int num_removed = 0;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    const int fd = shm_open(("/" + name).c_str(), O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) continue;  // gone, or another user's
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && shm_unlink(("/" + name).c_str()) == 0) ++num_removed;
    close(fd);
  }
  closedir(folder);
  return num_removed;
}

}  // namespace swe_rl::weightsync
