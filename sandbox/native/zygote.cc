#include "sandbox/native/zygote.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "sandbox/native/container.h"
#include "sandbox/native/init.h"
#include "sandbox/native/message.h"

namespace swe_rl::sandbox {
namespace {

constexpr int kControlFd = 3;
constexpr int kNamespaces = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS;

void SendFailure(int fd, const std::string& text) {
  SendPacket(fd, static_cast<char>(Kind::kFailure) + text);
}

void SendResult(int fd, bool ok, const std::string& error) {
  if (ok) {
    SendPacket(fd, Record(Kind::kReady).Serialize());
  } else {
    SendFailure(fd, error);
  }
}

// Best effort (it needs CAP_SYS_RESOURCE): without it, init is only the least likely victim,
// because commands have a raised score.
void ProtectFromOom(int proc_fd) {
  const int fd = openat(proc_fd, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  (void)!write(fd, "-1000", 5);
  close(fd);
}

// Life of a sandbox, from its first instruction as pid 1.
[[noreturn]] void SandboxMain(int control_fd, const Record& request, const std::string& stage) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "sandbox_init");
  prctl(PR_SET_DUMPABLE, 0);
  // Nothing of the zygote's stays open: its control socket must close when it dies.
  control_fd = dup2(control_fd, kControlFd) < 0 ? control_fd : kControlFd;
  fcntl(control_fd, F_SETFD, FD_CLOEXEC);
  syscall(SYS_close_range, kControlFd + 1, ~0u, 0);
  ContainerSpec spec;
  spec.stage = stage;
  spec.lowers = request.GetAll("lower");
  spec.usr = request.Get("usr");
  spec.binds = request.GetAll("bind");
  spec.cgroup_procs = request.GetAll("cgroup_procs");
  spec.hostname = request.Get("hostname");
  spec.disk_bytes = request.GetInt("disk_bytes", 1ll << 30);
  ContainerFds fds;
  std::string error;
  umask(022);
  if (!EnterContainer(spec, &fds, &error)) {
    SendFailure(control_fd, error);
    _exit(1);
  }
  ProtectFromOom(fds.proc);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  const int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd : {0, 1, 2}) dup2(null_fd, fd);
  close(null_fd);
  const int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (pid_fd < 0) {
    SendFailure(control_fd, ErrnoMessage("pidfd_open"));
    _exit(1);
  }
  if (!SendPacket(control_fd, Record(Kind::kReady).Serialize(), {fds.root, fds.upper, pid_fd})) {
    _exit(1);
  }
  for (int fd : {fds.root, fds.upper, pid_fd}) close(fd);
  RunInit(control_fd, fds.proc);
}

void ForkSandbox(int zygote_fd, int control_fd, const Record& request, const std::string& stage) {
  const auto pid = static_cast<pid_t>(
      syscall(SYS_clone, static_cast<unsigned long>(kNamespaces | SIGCHLD), 0, 0, 0, 0));
  if (pid == 0) {
    close(zygote_fd);
    SandboxMain(control_fd, request, stage);
  }
  if (pid < 0) SendFailure(control_fd, ErrnoMessage("clone into new namespaces"));
}

// A private mount namespace with a directory for shared trees and one for stages.
bool PrepareMounts(const std::string& stage, std::string* error) {
  if (unshare(CLONE_NEWNS) != 0) {
    *error = ErrnoMessage("unshare the mount namespace (the local backend needs root)");
    return false;
  }
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("stage", stage.c_str(), "tmpfs", MS_NOSUID, "mode=0700,size=1m") != 0 ||
      mkdir((stage + "/new").c_str(), 0700) != 0) {
    *error = ErrnoMessage("prepare " + stage);
    return false;
  }
  return true;
}

}  // namespace

int RunZygote(int control_fd, const std::string& stage) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGCHLD, SIG_IGN);  // dead sandboxes are reaped by the kernel
  signal(SIGPIPE, SIG_IGN);
  std::string error;
  const bool prepared = PrepareMounts(stage, &error);
  SendResult(control_fd, prepared, error);
  if (!prepared) return 1;
  std::string packet;
  while (true) {
    std::vector<int> fds;
    if (ReceivePacket(control_fd, &packet, &fds) <= 0) return 0;
    Record request(Kind::kFailure);
    if (!Record::Parse(packet, &request)) {
      SendFailure(control_fd, "malformed request");
    } else if (request.kind() == Kind::kImage) {
      const bool ok =
          MountSharedTree(request.GetAll("lower"), stage + "/" + request.Get("name"), &error);
      SendResult(control_fd, ok, error);
    } else if (request.kind() == Kind::kNew && fds.size() == 1) {
      ForkSandbox(control_fd, fds[0], request, stage + "/new");
    } else {
      SendFailure(control_fd, "unknown request");
    }
    for (int fd : fds) close(fd);
  }
}

}  // namespace swe_rl::sandbox
