#include "sandbox/native/init.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "sandbox/native/capped_buffer.h"
#include "sandbox/native/command.h"
#include "sandbox/native/container.h"
#include "sandbox/native/message.h"

namespace swe_rl::sandbox {
namespace {

constexpr size_t kChunkBytes = 64 * 1024;
// Reads from one pipe before the deadline and the control socket are looked at again.
constexpr int kReadsPerTurn = 16;
// A killed process that will not die (stuck in the kernel) is waited for this long.
constexpr int64_t kKillWaitMs = 5000;

int64_t NowUs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

// One pipe of the running command.
struct Stream {
  Stream(int fd, size_t cap_bytes) : fd(fd), buffer(cap_bytes) {}
  int fd;
  CappedBuffer buffer;

  // Reads what is there. False once the stream has ended.
  bool Drain(int max_reads) {
    static char chunk[kChunkBytes];
    for (int i = 0; i < max_reads && fd >= 0; ++i) {
      const ssize_t count = read(fd, chunk, sizeof(chunk));
      if (count > 0) {
        buffer.Append({chunk, static_cast<size_t>(count)});
      } else if (count < 0 && errno == EINTR) {
        continue;
      } else if (count < 0 && errno == EAGAIN) {
        break;
      } else {
        Close();
      }
    }
    return fd >= 0;
  }
  void Close() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
};

struct Running {
  pid_t pid;
  Stream out;
  Stream err;
  int64_t started_us;
  int64_t deadline_us;
  int64_t grace_us;  // wait for the end of output after the command has ended
  int64_t exited_us = -1;
  int status = 0;
  bool timed_out = false;
  bool killed = false;
};

class Init {
 public:
  Init(int control_fd, int proc_fd) : control_fd_(control_fd), proc_fd_(proc_fd) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    child_fd_ = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
  }

  [[noreturn]] void Loop() {
    while (true) {
      pollfd polls[4] = {{control_fd_, POLLIN, 0},
                         {child_fd_, POLLIN, 0},
                         {running_ ? running_->out.fd : -1, POLLIN, 0},
                         {running_ ? running_->err.fd : -1, POLLIN, 0}};
      if (poll(polls, 4, TimeoutMs()) < 0 && errno != EINTR) _exit(1);
      if (polls[1].revents != 0) Reap();
      if (running_) {
        running_->out.Drain(kReadsPerTurn);
        running_->err.Drain(kReadsPerTurn);
      }
      if (polls[0].revents != 0) HandleRequest();
      if (running_) Advance();
    }
  }

 private:
  int TimeoutMs() const {
    if (!running_) return -1;
    const int64_t at =
        running_->exited_us >= 0 ? running_->exited_us + running_->grace_us : running_->deadline_us;
    return static_cast<int>(std::clamp<int64_t>((at - NowUs() + 999) / 1000, 0, 1 << 30));
  }

  // Reaps every dead child; returns how many.
  int Reap() {
    signalfd_siginfo info;
    while (read(child_fd_, &info, sizeof(info)) > 0) {
    }
    int count = 0;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
      ++count;
      if (running_ && pid == running_->pid) {
        running_->status = status;
        running_->exited_us = NowUs();
      }
    }
    return count;
  }

  // Kills every process but init (a daemon that left the group too) and reaps them all.
  // Returns how many; sets `stuck_` when some would not die.
  int KillAll() {
    int count = 0;
    if (kill(-1, SIGKILL) != 0) return Reap();  // ESRCH: nothing but init
    const int64_t give_up_us = NowUs() + kKillWaitMs * 1000;
    while (true) {
      count += Reap();
      siginfo_t info;
      if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) break;
      const int64_t left_us = give_up_us - NowUs();
      if (left_us <= 0) {
        stuck_ = true;
        break;
      }
      pollfd wait{child_fd_, POLLIN, 0};
      poll(&wait, 1, static_cast<int>(std::min<int64_t>(left_us / 1000 + 1, 100)));
    }
    return count;
  }

  void HandleRequest() {
    std::string packet;
    std::vector<int> fds;
    if (ReceivePacket(control_fd_, &packet, &fds) <= 0) _exit(0);  // the broker let go
    for (int fd : fds) close(fd);
    Record request(Kind::kFailure);
    if (!Record::Parse(packet, &request)) return Fail("malformed request");
    switch (request.kind()) {
      case Kind::kExec:
        return StartExec(request);
      case Kind::kCancel:
        if (running_) KillRunning();
        return;
      case Kind::kKill: {
        Record reply(Kind::kKill);
        reply.Add("num_killed", KillAll());
        if (running_) running_->killed = true;
        return Send(reply);
      }
      default:
        return Fail("unknown request");
    }
  }

  void StartExec(const Record& request) {
    if (running_) return Fail("a command is running");
    CommandSpec spec;
    spec.command = request.Get("command");
    spec.cwd = request.Get("cwd");
    spec.user = request.Get("user");
    spec.env = request.GetAll("env");
    spec.merge_output = request.GetInt("merge_output", 0) != 0;
    const auto cap_bytes = static_cast<size_t>(request.GetInt("output_cap_bytes", 65536));
    const int64_t started_us = NowUs();
    Command command;
    if (!StartCommand(spec, proc_fd_, &command)) return Fail(ErrnoMessage("start the command"));
    running_.reset(new Running{command.pid, Stream(command.stdout_fd, cap_bytes),
                               Stream(command.stderr_fd, cap_bytes), started_us,
                               started_us + request.GetInt("timeout_ms", 60000) * 1000,
                               request.GetInt("grace_ms", 20) * 1000});
  }

  void KillRunning() {
    running_->killed = true;
    KillAll();
  }

  // Ends the running command when it is over, or past its deadline.
  void Advance() {
    Running& run = *running_;
    const int64_t now_us = NowUs();
    if (run.exited_us < 0 && now_us >= run.deadline_us) {
      run.timed_out = true;
      KillRunning();
    }
    if (run.exited_us < 0) {
      if (!stuck_) return;
      run.status = SIGKILL;  // as if it had died: the broker gives the sandbox up
    }
    // What the command wrote before it ended is in the pipes. A process that it left behind
    // may hold them open for ever, so their end is waited for only so long, and a flood from
    // it is cut.
    const bool open = run.out.Drain(kReadsPerTurn) | run.err.Drain(kReadsPerTurn);
    if (open && !run.killed && now_us < run.exited_us + run.grace_us) return;
    Finish();
  }

  void Finish() {
    Running& run = *running_;
    SendBytes(Kind::kStdout, run.out.buffer.Kept());
    SendBytes(Kind::kStderr, run.err.buffer.Kept());
    Record reply(Kind::kExit);
    reply.Add("exit_code",
              WIFSIGNALED(run.status) ? 128 + WTERMSIG(run.status) : WEXITSTATUS(run.status));
    reply.Add("timed_out", run.timed_out ? 1 : 0);
    reply.Add("stuck", stuck_ ? 1 : 0);
    reply.Add("stdout_dropped_bytes", static_cast<int64_t>(run.out.buffer.dropped_bytes()));
    reply.Add("stderr_dropped_bytes", static_cast<int64_t>(run.err.buffer.dropped_bytes()));
    reply.Add("duration_us", NowUs() - run.started_us);
    run.out.Close();
    run.err.Close();
    running_.reset();
    Send(reply);
  }

  void SendBytes(Kind kind, const std::string& bytes) {
    for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
      std::string packet(1, static_cast<char>(kind));
      packet.append(bytes, at, kChunkBytes);
      if (!SendPacket(control_fd_, packet)) _exit(1);
    }
  }
  void Send(const Record& record) {
    if (!SendPacket(control_fd_, record.Serialize())) _exit(1);
  }
  void Fail(const std::string& text) {
    if (!SendPacket(control_fd_, static_cast<char>(Kind::kFailure) + text)) _exit(1);
  }

  const int control_fd_;
  const int proc_fd_;
  int child_fd_;
  std::unique_ptr<Running> running_;
  bool stuck_ = false;
};

}  // namespace

void RunInit(int control_fd, int proc_fd) {
  Init init(control_fd, proc_fd);
  init.Loop();
}

}  // namespace swe_rl::sandbox
