#include "weightsync/core/bucket_window.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

namespace swe_rl::weightsync {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
// Bytes that are summed and passed on at a time: they fit into a core's cache, and a chain of
// receivers works at once.
constexpr uint64_t kChunk = 512 << 10;
constexpr uint64_t kMaxGap = 4096;
// What lies between two pieces.
constexpr char kZeroes[kMaxGap] = {};
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

void BucketWindow::UsePieces(uint32_t num_buffers, bool with_checksums) {
  with_checksums_ = with_checksums;
  slots_.resize(num_buffers);
}

void BucketWindow::Begin(FrameHeader header, std::vector<Piece> pieces,
                         std::shared_ptr<void> owner) {
  Slot& at = slot(begun);
  at = Slot();
  at.header = header;
  at.pieces = std::move(pieces);
  at.owner = std::move(owner);
  if (!with_checksums_ || header.size == 0) {
    at.filled = header.size;
    at.is_complete = true;
  }
  ++begun;
  changed.notify_all();
}

void BucketWindow::SumMore(Slot* slot, std::unique_lock<std::mutex>* lock) {
  slot->is_being_summed = true;
  if (slot->filled == 0) sum_ = Checksum();
  const uint64_t sequence = slot->header.sequence;
  uint64_t offset = slot->filled;
  const uint64_t end = std::min(offset + kChunk, slot->header.size);
  lock->unlock();
  std::vector<iovec> parts;
  while (offset < end) {
    parts.clear();
    offset += AddParts(sequence, offset, end - offset, &parts);
    for (const iovec& part : parts) sum_.Update(part.iov_base, part.iov_len);
  }
  lock->lock();
  slot->is_being_summed = false;
  slot->filled = end;
  if (end == slot->header.size) {
    slot->checksum = sum_.Digest();
    slot->is_complete = true;
  }
  if (outlets.size() > 1) changed.notify_all();
}

uint64_t BucketWindow::AddParts(uint64_t sequence, uint64_t offset, uint64_t size,
                                std::vector<iovec>* parts) {
  if (!buffers_.empty()) {
    parts->push_back({buffer(sequence) + offset, size});
    return size;
  }
  const std::vector<Piece>& pieces = slot(sequence).pieces;
  // The first piece that begins behind the offset; the one before may hold it.
  auto next = std::upper_bound(pieces.begin(), pieces.end(), offset,
                               [](uint64_t at, const Piece& piece) { return at < piece.offset; });
  const uint64_t end = offset + size;
  uint64_t at = offset;
  const auto add = [&](const char* data, uint64_t until) {
    const uint64_t taken = std::min(until, end) - at;
    parts->push_back({const_cast<char*>(data), taken});
    at += taken;
  };
  auto piece = next == pieces.begin() ? next : next - 1;
  while (at < end && parts->size() < Socket::kMaxParts) {
    if (piece != pieces.end() && at >= piece->offset + piece->size) {
      ++piece;
    } else if (piece != pieces.end() && at >= piece->offset) {
      add(static_cast<const char*>(piece->data) + (at - piece->offset),
          piece->offset + piece->size);
    } else {
      add(kZeroes, std::min(at + kMaxGap, piece == pieces.end() ? end : piece->offset));
    }
  }
  return at - offset;
}

void BucketWindow::Serve(Outlet* outlet, std::atomic<uint64_t>* num_bytes) {
  std::unique_lock lock(mutex);
  if (outlet->sequence + num_buffers() < begun) return;  // overwritten; the child asks the sender
  outlets.push_back(outlet);
  bool needs_header = true;
  std::vector<iovec> parts;
  while (true) {
    const auto can_sum = [&](const Slot& slot) {
      return with_checksums_ && !slot.is_being_summed && slot.filled == outlet->offset &&
             slot.filled < slot.header.size;
    };
    const auto has_work = [&] {
      if (ended) return true;
      if (begun <= outlet->sequence) return false;
      const Slot& slot = this->slot(outlet->sequence);
      return slot.is_complete || slot.filled > outlet->offset || can_sum(slot);
    };
    changed.wait(lock, has_work);
    if (ended) break;
    Slot& at = slot(outlet->sequence);
    // Whoever comes to bytes first sums them, and sends them while they are in the cache.
    if (can_sum(at)) SumMore(&at, &lock);
    if (ended || outlet->offset > at.header.size) break;
    const FrameHeader header = at.header;
    uint64_t size = std::min(at.filled - outlet->offset, kChunk);
    const uint64_t checksum = at.checksum;
    const bool is_complete = at.is_complete;
    lock.unlock();
    parts.clear();
    if (needs_header) parts.push_back({const_cast<FrameHeader*>(&header), sizeof(header)});
    if (size > 0) size = AddParts(outlet->sequence, outlet->offset, size, &parts);
    const bool is_last = is_complete && outlet->offset + size == header.size;
    if (is_last) parts.push_back({const_cast<uint64_t*>(&checksum), sizeof(checksum)});
    const Status status = outlet->socket->WriteAll(&parts, After(kWriteTimeoutS));
    needs_header = is_last;
    lock.lock();
    if (!status.ok()) break;
    *num_bytes += size;
    outlet->offset += size;
    if (is_last) {
      ++outlet->sequence;
      outlet->offset = 0;
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
