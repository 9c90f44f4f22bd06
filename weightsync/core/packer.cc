#include "weightsync/core/packer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "weightsync/core/checksum.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace swe_rl::weightsync {
namespace {

// Bytes that are summed and then copied while they are in the L1 cache.
constexpr size_t kBlock = 16 << 10;
// From here on a piece would push more useful data out of the cache than it is worth.
constexpr size_t kStreamFrom = 1 << 20;

// Copies without reading the destination's cache lines first (0.97 x memcpy's best; plain
// memcpy of a large bucket is slower for that read).
void StreamCopy(char* to, const char* from, size_t size) {
#ifdef __SSE2__
  const size_t head = std::min(size, (16 - (reinterpret_cast<uintptr_t>(to) & 15)) & 15);
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  size_t i = 0;
  for (; i + 64 <= size; i += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + i, from + i, size - i);
#else
  std::memcpy(to, from, size);
#endif
}

void PlainCopy(char* to, const char* from, size_t size) { std::memcpy(to, from, size); }

auto CopierFor(uint64_t size) { return size >= kStreamFrom ? StreamCopy : PlainCopy; }

void FinishStreaming() {
#ifdef __SSE2__
  _mm_sfence();  // streaming stores are weakly ordered: make them visible before what follows
#endif
}

}  // namespace

Status CheckPieces(const std::vector<Piece>& pieces, uint64_t capacity, uint64_t* size) {
  uint64_t end = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.offset < end || piece.size > capacity || piece.offset > capacity - piece.size) {
      return Error(StatusCode::kInvalidArgument,
                   "piece " + std::to_string(i) + " at [" + std::to_string(piece.offset) + ", +" +
                       std::to_string(piece.size) + ") overlaps the one before (which ends at " +
                       std::to_string(end) + ") or leaves a bucket of " + std::to_string(capacity) +
                       " bytes");
    }
    end = piece.offset + piece.size;
  }
  *size = end;
  return {};
}

Status Pack(const std::vector<Piece>& pieces, void* bucket, uint64_t capacity, bool with_checksum,
            Packed* packed) {
  uint64_t end = 0;
  if (Status status = CheckPieces(pieces, capacity, &end); !status.ok()) return status;
  char* const base = static_cast<char*>(bucket);
  Checksum checksum;
  uint64_t at = 0;
  for (const Piece& piece : pieces) {
    if (piece.offset > at) {
      std::memset(base + at, 0, piece.offset - at);
      if (with_checksum) checksum.Update(base + at, piece.offset - at);
    }
    const char* from = static_cast<const char*>(piece.data);
    char* to = base + piece.offset;
    const auto copy = CopierFor(piece.size);
    if (!with_checksum) {
      copy(to, from, piece.size);
    } else {
      for (uint64_t done = 0; done < piece.size; done += kBlock) {
        const size_t size = std::min<uint64_t>(kBlock, piece.size - done);
        checksum.Update(from + done, size);
        copy(to + done, from + done, size);
      }
    }
    at = piece.offset + piece.size;
  }
  FinishStreaming();
  packed->size = end;
  packed->checksum = with_checksum ? checksum.Digest() : 0;
  return {};
}

Status Unpack(const void* bucket, uint64_t size, const std::vector<Piece>& pieces) {
  uint64_t end = 0;
  if (Status status = CheckPieces(pieces, size, &end); !status.ok()) return status;
  for (const Piece& piece : pieces) {
    CopierFor(piece.size)(static_cast<char*>(const_cast<void*>(piece.data)),
                          static_cast<const char*>(bucket) + piece.offset, piece.size);
  }
  FinishStreaming();
  return {};
}

}  // namespace swe_rl::weightsync
