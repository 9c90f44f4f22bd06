// Python face of KvScheduler: converts arguments, and a bad status into an exception.
// Nothing in the core blocks or calls back, so the GIL is kept: it is what serialises access.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "rollout/scheduler/kv_scheduler.h"

namespace py = pybind11;

namespace swe_rl::scheduler {
namespace {

void ThrowUnlessOk(const Status& status) {
  // Both codes are the caller's mistake, and Python has one class for that.
  if (!status.ok()) throw py::value_error(status.message);
}

py::dict StatsDict(const KvScheduler& scheduler) {
  const SchedulerStats stats = scheduler.Stats();
  py::dict engines;
  for (const auto& [name, engine] : stats.engines) {
    py::dict row;
    row["token_budget"] = engine.token_budget;
    row["tokens_reserved"] = engine.tokens_running + engine.tokens_resident;
    row["tokens_running"] = engine.tokens_running;
    row["tokens_resident"] = engine.tokens_resident;
    row["num_running"] = engine.num_running;
    engines[py::str(name)] = row;
  }
  py::dict result;
  result["queued"] = stats.queued;
  result["running"] = stats.running;
  result["paused"] = stats.paused;
  result["engines"] = engines;
  return result;
}

}  // namespace

PYBIND11_MODULE(_kv_scheduler, m) {
  py::class_<Admission>(m, "Admission")
      .def_readonly("ticket_id", &Admission::ticket_id)
      .def_readonly("engine", &Admission::engine)
      .def_readonly("queued_s", &Admission::queued_s)
      .def("__repr__", [](const Admission& a) {
        return "Admission(ticket_id='" + a.ticket_id + "', engine='" + a.engine +
               "', queued_s=" + std::to_string(a.queued_s) + ")";
      });

  py::class_<KvScheduler>(m, "KvScheduler")
      .def(py::init([](double high_watermark, double ageing_s, int64_t hard_context_cap,
                       int64_t growth_tokens) {
             const SchedulerOptions options{high_watermark, ageing_s, hard_context_cap,
                                            growth_tokens};
             ThrowUnlessOk(KvScheduler::Validate(options));
             return std::make_unique<KvScheduler>(options);
           }),
           py::arg("high_watermark"), py::arg("ageing_s"), py::arg("hard_context_cap"),
           py::arg("growth_tokens"))
      .def(
          "add_engine",
          [](KvScheduler& self, const std::string& engine, int64_t token_budget) {
            ThrowUnlessOk(self.AddEngine(engine, token_budget));
          },
          py::arg("engine"), py::arg("token_budget"))
      .def("remove_engine", &KvScheduler::RemoveEngine, py::arg("engine"))
      .def(
          "submit",
          [](KvScheduler& self, std::string ticket_id, std::string session, int64_t prompt_tokens,
             int64_t max_new_tokens, int priority, double now_s) {
            ThrowUnlessOk(self.Submit(
                {std::move(ticket_id), std::move(session), prompt_tokens, max_new_tokens, priority},
                now_s));
          },
          py::arg("ticket_id"), py::arg("session"), py::arg("prompt_tokens"),
          py::arg("max_new_tokens"), py::arg("priority"), py::arg("now_s"))
      .def("poll", &KvScheduler::Poll, py::arg("now_s"))
      .def("finish", &KvScheduler::Finish, py::arg("ticket_id"), py::arg("resident_tokens"),
           py::arg("now_s"))
      .def("cancel", &KvScheduler::Cancel, py::arg("ticket_id"))
      .def("end_session", &KvScheduler::EndSession, py::arg("session"))
      .def("set_paused", &KvScheduler::SetPaused, py::arg("paused"))
      .def("stats", &StatsDict);
}

}  // namespace swe_rl::scheduler
