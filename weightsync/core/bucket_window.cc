#include "weightsync/core/bucket_window.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>

namespace swe_rl::weightsync {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
// Bytes that are passed on at a time: small enough that a chain of receivers works at once.
constexpr uint64_t kChunk = 1 << 20;
// A child that takes nothing for so long is gone, should nobody have said so before.
constexpr double kWriteTimeoutS = 300.0;

}  // namespace

Status BucketWindow::Allocate(uint32_t num_buffers, uint64_t buffer_bytes) {
  const uint64_t page = buffer_bytes < kHugePage ? kPage : kHugePage;
  buffer_bytes_ = (buffer_bytes + page - 1) / page * page;
  for (uint32_t i = 0; i < num_buffers; ++i) {
    buffers_.emplace_back(static_cast<char*>(std::aligned_alloc(page, buffer_bytes_)));
    if (buffers_.back() == nullptr) {
      return Error(StatusCode::kUnavailable, "cannot allocate " + std::to_string(num_buffers) +
                                                 " buffers of " + std::to_string(buffer_bytes_) +
                                                 " bytes; lower bucket_bytes");
    }
    // Advice only: a fault for each small page costs as much as the copy.
    if (page == kHugePage) madvise(buffers_.back().get(), buffer_bytes_, MADV_HUGEPAGE);
  }
  slots_.resize(num_buffers);
  return {};
}

bool BucketWindow::is_free_of_outlets(uint64_t sequence) const {
  if (sequence < num_buffers()) return true;
  const uint64_t last = sequence - num_buffers();
  return std::all_of(outlets.begin(), outlets.end(),
                     [&](const Outlet* outlet) { return outlet->sequence > last; });
}

void BucketWindow::Serve(Outlet* outlet, std::atomic<uint64_t>* num_bytes) {
  std::unique_lock lock(mutex);
  if (outlet->sequence + num_buffers() < begun) return;  // overwritten; the child asks the sender
  outlets.push_back(outlet);
  bool needs_header = true;
  while (true) {
    const auto has_work = [&] {
      return ended || (begun > outlet->sequence &&
                       (needs_header || slot(outlet->sequence).filled > outlet->offset));
    };
    changed.wait(lock, has_work);
    if (ended) break;
    const Slot& at = slot(outlet->sequence);
    const FrameHeader header = at.header;
    const uint64_t size = std::min(at.filled - outlet->offset, kChunk);
    const char* from = buffer(outlet->sequence) + outlet->offset;
    lock.unlock();
    Status status;
    if (needs_header) {
      status = outlet->socket->Write(&header, sizeof(header), After(kWriteTimeoutS));
      needs_header = false;
    }
    if (status.ok()) status = outlet->socket->Write(from, size, After(kWriteTimeoutS));
    lock.lock();
    if (!status.ok()) break;
    *num_bytes += size;
    outlet->offset += size;
    if (outlet->offset == header.size) {
      ++outlet->sequence;
      outlet->offset = 0;
      needs_header = true;
      changed.notify_all();
    }
  }
  outlets.remove(outlet);
  changed.notify_all();
}

void BucketWindow::CutChild(uint32_t child) {
  for (Outlet* outlet : outlets) {
    if (outlet->child == child) outlet->socket->Cut();
  }
}

void BucketWindow::CutAll() {
  for (Outlet* outlet : outlets) outlet->socket->Cut();
}

}  // namespace swe_rl::weightsync
