// Python face of the core: converts arguments and turns a bad status into WeightSyncError.
// Whatever may block or copies much runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "weightsync/core/checksum.h"
#include "weightsync/core/packer.h"
#include "weightsync/core/rccl_api.h"
#include "weightsync/core/rccl_group.h"
#include "weightsync/core/shm_ring.h"
#include "weightsync/core/tcp_tree.h"

namespace py = pybind11;

namespace swe_rl::weightsync {
namespace {

const char* CodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kDeadlineExceeded:
      return "deadline_exceeded";
    case StatusCode::kUnavailable:
      return "unavailable";
    case StatusCode::kFenced:
      return "fenced";
    case StatusCode::kDataLoss:
      return "data_loss";
  }
  return "unknown";
}

void ThrowUnlessOk(const Status& status) {
  if (status.ok()) return;
  // errors.py holds the table from code to class.
  py::object error = py::module_::import("weightsync.errors")
                         .attr("from_code")(CodeName(status.code), status.message);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

// Reads (address, size, offset) triples from a buffer of uint64: one object for a bucket, since
// a Python object for each tensor would cost more than the copy of a small one.
std::vector<Piece> ReadPieces(const py::buffer& triples) {
  const py::buffer_info info = triples.request();
  if (info.itemsize != 8 || info.ndim != 1 || info.strides[0] != 8 || info.size % 3 != 0) {
    throw py::value_error("pieces must be a flat array of 8-byte (address, size, offset) triples");
  }
  const auto* words = static_cast<const uint64_t*>(info.ptr);
  std::vector<Piece> pieces(info.size / 3);
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {reinterpret_cast<const void*>(words[3 * i]), words[3 * i + 1], words[3 * i + 2]};
  }
  return pieces;
}

std::unique_ptr<RingSender> MakeSender(const std::string& name, uint64_t epoch,
                                       uint32_t num_receivers, uint32_t num_buffers,
                                       uint64_t buffer_bytes, bool with_checksums) {
  std::unique_ptr<RingSender> sender;
  Status status;
  {
    py::gil_scoped_release release;
    status = RingSender::Create(
        name, {epoch, num_receivers, num_buffers, buffer_bytes, with_checksums}, &sender);
  }
  ThrowUnlessOk(status);
  return sender;
}

std::unique_ptr<RingReceiver> MakeReceiver(const std::string& name, uint64_t epoch,
                                           uint32_t index) {
  std::unique_ptr<RingReceiver> receiver;
  ThrowUnlessOk(RingReceiver::Attach(name, epoch, index, &receiver));
  return receiver;
}

std::unique_ptr<TcpSender> MakeTcpSender(const std::string& host, const std::string& token,
                                         uint64_t epoch, uint32_t num_receivers, uint32_t fan_out,
                                         uint32_t num_buffers, uint64_t buffer_bytes,
                                         bool with_checksums, double stall_timeout_s,
                                         bool with_local_sockets) {
  std::unique_ptr<TcpSender> sender;
  Status status;
  {
    py::gil_scoped_release release;
    status = TcpSender::Create({host, token, epoch, num_receivers, fan_out, num_buffers,
                                buffer_bytes, with_checksums, stall_timeout_s, with_local_sockets},
                               &sender);
  }
  ThrowUnlessOk(status);
  return sender;
}

std::unique_ptr<TcpReceiver> MakeTcpReceiver(const std::string& host, uint16_t port,
                                             const std::string& token, uint64_t epoch,
                                             uint32_t index, double timeout_s) {
  std::unique_ptr<TcpReceiver> receiver;
  Status status;
  {
    py::gil_scoped_release release;
    status = TcpReceiver::Attach(host, port, token, epoch, index, timeout_s, &receiver);
  }
  ThrowUnlessOk(status);
  return receiver;
}

// Keeps a Python object alive, to be let go by any thread.
std::shared_ptr<void> Hold(py::object owner) {
  return {owner.release().ptr(), [](PyObject* held) {
            py::gil_scoped_acquire acquire;
            Py_DECREF(held);
          }};
}

template <typename Sender>
void Send(Sender& sender, const py::buffer& triples, const std::string& label, double timeout_s,
          py::object owner) {
  std::vector<Piece> pieces = ReadPieces(triples);
  Status status;
  if constexpr (std::is_same_v<Sender, TcpSender>) {
    std::shared_ptr<void> held = Hold(std::move(owner));
    py::gil_scoped_release release;
    status = sender.Send(std::move(pieces), label, timeout_s, std::move(held));
  } else {
    py::gil_scoped_release release;
    status = sender.Send(pieces, label, timeout_s);
  }
  ThrowUnlessOk(status);
}

template <typename Sender>
void Finish(Sender& sender, double timeout_s) {
  Status status;
  {
    py::gil_scoped_release release;
    status = sender.Finish(timeout_s);
  }
  ThrowUnlessOk(status);
}

template <typename Receiver>
py::memoryview Next(Receiver& receiver, const std::string& label, double timeout_s) {
  Bucket bucket;
  Status status;
  {
    py::gil_scoped_release release;
    status = receiver.Next(label, timeout_s, &bucket);
  }
  ThrowUnlessOk(status);
  // Writable, for torch.frombuffer warns of memory that is not; receivers only read.
  return py::memoryview::from_memory(const_cast<char*>(bucket.data),
                                     static_cast<py::ssize_t>(bucket.size));
}

py::tuple PackInto(const py::buffer& triples, const py::buffer& bucket, bool with_checksum) {
  const std::vector<Piece> pieces = ReadPieces(triples);
  const py::buffer_info info = bucket.request(/*writable=*/true);
  Packed packed;
  Status status;
  {
    py::gil_scoped_release release;
    status = Pack(pieces, info.ptr, info.size * info.itemsize, with_checksum, &packed);
  }
  ThrowUnlessOk(status);
  return py::make_tuple(packed.size, packed.checksum);
}

void UnpackFrom(const py::buffer& bucket, const py::buffer& triples) {
  const std::vector<Piece> pieces = ReadPieces(triples);
  const py::buffer_info info = bucket.request();
  Status status;
  {
    py::gil_scoped_release release;
    status = Unpack(info.ptr, info.size * info.itemsize, pieces);
  }
  ThrowUnlessOk(status);
}

uint64_t ChecksumOf(const py::buffer& data) {
  const py::buffer_info info = data.request();
  py::gil_scoped_release release;
  Checksum checksum;
  checksum.Update(info.ptr, info.size * info.itemsize);
  return checksum.Digest();
}

std::unique_ptr<RcclApi> LoadRccl(const std::string& library, const std::string& runtime) {
  std::unique_ptr<RcclApi> api;
  Status status;
  {
    py::gil_scoped_release release;
    status = RcclApi::Load(library, runtime, &api);
  }
  ThrowUnlessOk(status);
  return api;
}

int RcclVersion(const RcclApi& api) {
  int version = 0;
  ThrowUnlessOk(api.Check(api.GetVersion(&version), "ncclGetVersion"));
  return version;
}

py::bytes RcclUniqueIdOf(const RcclApi& api) {
  std::string id;
  Status status;
  {
    py::gil_scoped_release release;  // opens sockets
    status = RcclGroup::MakeUniqueId(api, &id);
  }
  ThrowUnlessOk(status);
  return py::bytes(id);
}

std::unique_ptr<RcclGroup> JoinRccl(const RcclApi& api, const py::bytes& unique_id, uint32_t rank,
                                    uint32_t world, int device, uint64_t bucket_bytes,
                                    uint32_t num_buffers, bool with_checksums, double timeout_s) {
  const std::string id = unique_id;
  std::unique_ptr<RcclGroup> group;
  Status status;
  {
    py::gil_scoped_release release;
    status =
        RcclGroup::Create(api, {rank, world, device, bucket_bytes, num_buffers, with_checksums}, id,
                          timeout_s, &group);
  }
  ThrowUnlessOk(status);
  return group;
}

void AgreeRccl(RcclGroup& group, const py::bytes& digest, double timeout_s) {
  const std::string bytes = digest;
  Status status;
  {
    py::gil_scoped_release release;
    status = group.Agree(bytes, timeout_s);
  }
  ThrowUnlessOk(status);
}

// buckets: (pieces as for `pack`, bytes, label) each; returns (bytes, issued_s, done_s) each.
py::list BroadcastRccl(RcclGroup& group, const py::list& buckets, uint64_t version,
                       double timeout_s) {
  std::vector<RcclBucket> all;
  for (const py::handle& item : buckets) {
    const auto [triples, size, label] = item.cast<std::tuple<py::buffer, uint64_t, std::string>>();
    RcclBucket bucket = {{}, size, label};
    for (const Piece& piece : ReadPieces(triples)) {
      if (piece.size > size || piece.offset > size - piece.size) {
        throw py::value_error("a piece of bucket " + label + " leaves its " + std::to_string(size) +
                              " bytes");
      }
      bucket.pieces.push_back({const_cast<void*>(piece.data), piece.size, piece.offset});
    }
    all.push_back(std::move(bucket));
  }
  std::vector<RcclBucketTimes> times;
  Status status;
  {
    py::gil_scoped_release release;
    status = group.Broadcast(all, version, timeout_s, &times);
  }
  ThrowUnlessOk(status);
  py::list result;
  for (const RcclBucketTimes& time : times) {
    result.append(py::make_tuple(time.num_bytes, time.issued_s, time.done_s));
  }
  return result;
}

template <typename Sender>
py::class_<Sender> BindSender(py::module_& m, const char* name) {
  using Release = py::call_guard<py::gil_scoped_release>;
  return py::class_<Sender>(m, name)
      .def("send", &Send<Sender>, py::arg("pieces"), py::arg("label"), py::arg("timeout_s"),
           py::arg("owner") = py::none())
      .def("finish", &Finish<Sender>, py::arg("timeout_s"))
      .def("drop", &Sender::Drop, py::arg("receiver"), py::arg("reason"), Release())
      .def("abort", &Sender::Abort, Release())
      .def("close", &Sender::Close, Release())
      .def("state", &Sender::receiver_state, py::arg("receiver"), Release())
      .def("error", &Sender::receiver_error, py::arg("receiver"), Release())
      .def("num_consumed", &Sender::num_consumed, py::arg("receiver"), Release())
      .def("digest", &Sender::digest, py::arg("receiver"), Release())
      .def("was_touched", &Sender::was_touched, py::arg("receiver"), Release());
}

template <typename Receiver>
py::class_<Receiver> BindReceiver(py::module_& m, const char* name) {
  using Release = py::call_guard<py::gil_scoped_release>;
  return py::class_<Receiver>(m, name)
      // The view reads the receiver's memory, which ends with it.
      .def("next", &Next<Receiver>, py::arg("label"), py::arg("timeout_s"), py::keep_alive<0, 1>())
      .def("release", &Receiver::Release, Release())
      .def("verified", &Receiver::Verified, py::arg("digest") = 0, Release())
      .def("fail", &Receiver::Fail, py::arg("reason"), Release());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() =
      "Bucket packing, and buckets over shared memory, TCP and RCCL; core/*.h state the behaviour.";
  m.attr("MAX_RECEIVERS") = kMaxReceivers;
  m.attr("MAX_BUFFERS") = kMaxBuffers;
  py::enum_<ReceiverState>(m, "ReceiverState")
      .value("ABSENT", ReceiverState::kAbsent)
      .value("ATTACHED", ReceiverState::kAttached)
      .value("FAILED", ReceiverState::kFailed)
      .value("VERIFIED", ReceiverState::kVerified);
  BindSender<RingSender>(m, "RingSender")
      .def(py::init(&MakeSender), py::kw_only(), py::arg("name"), py::arg("epoch"),
           py::arg("num_receivers"), py::arg("num_buffers"), py::arg("buffer_bytes"),
           py::arg("with_checksums"))
      .def_property_readonly("name", &RingSender::name);
  BindSender<TcpSender>(m, "TcpSender")
      .def(py::init(&MakeTcpSender), py::kw_only(), py::arg("host"), py::arg("token"),
           py::arg("epoch"), py::arg("num_receivers"), py::arg("fan_out"), py::arg("num_buffers"),
           py::arg("buffer_bytes"), py::arg("with_checksums"), py::arg("stall_timeout_s"),
           py::arg("with_local_sockets") = true)
      .def_property_readonly("port", &TcpSender::port)
      .def_property_readonly("num_bytes_sent", &TcpSender::num_bytes_sent);
  BindReceiver<RingReceiver>(m, "RingReceiver")
      .def(py::init(&MakeReceiver), py::kw_only(), py::arg("name"), py::arg("epoch"),
           py::arg("index"));
  BindReceiver<TcpReceiver>(m, "TcpReceiver")
      .def(py::init(&MakeTcpReceiver), py::kw_only(), py::arg("host"), py::arg("port"),
           py::arg("token"), py::arg("epoch"), py::arg("index"), py::arg("timeout_s"));
  py::class_<RcclApi>(m, "RcclApi")
      .def(py::init(&LoadRccl), py::kw_only(), py::arg("library") = "", py::arg("runtime") = "")
      .def_property_readonly("version", &RcclVersion)
      .def("unique_id", &RcclUniqueIdOf);
  py::class_<RcclGroup>(m, "RcclGroup")
      .def(py::init(&JoinRccl), py::arg("api"), py::kw_only(), py::arg("unique_id"),
           py::arg("rank"), py::arg("world"), py::arg("device"), py::arg("bucket_bytes"),
           py::arg("num_buffers"), py::arg("with_checksums"), py::arg("timeout_s"),
           py::keep_alive<1, 2>())
      .def("agree", &AgreeRccl, py::arg("digest"), py::arg("timeout_s"))
      .def("broadcast", &BroadcastRccl, py::arg("buckets"), py::arg("version"),
           py::arg("timeout_s"))
      .def("abort", &RcclGroup::Abort);
  m.def("pack", &PackInto, py::arg("pieces"), py::arg("bucket"), py::arg("with_checksum"));
  m.def("unpack", &UnpackFrom, py::arg("bucket"), py::arg("pieces"));
  m.def("checksum", &ChecksumOf, py::arg("data"));
  m.def("sweep", &Sweep, py::arg("prefix"));
}

}  // namespace swe_rl::weightsync
