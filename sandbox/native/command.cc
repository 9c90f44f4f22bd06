#include "sandbox/native/command.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "sandbox/native/confine.h"

namespace swe_rl::sandbox {
namespace {

constexpr int kPipeBytes = 256 * 1024;

struct Account {
  uid_t uid = 0;
  gid_t gid = 0;
  std::string name = "root";
  std::string home = "/root";
};

[[noreturn]] void Die(const std::string& what) {
  const std::string line = "sandbox: " + what + ": " + std::strerror(errno) + "\n";
  (void)!write(STDERR_FILENO, line.data(), line.size());
  _exit(126);
}

bool IsNumber(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// Looks `user` up in the sandbox's own /etc/passwd; a number needs no entry there.
bool FindAccount(const std::string& user, Account* account) {
  const std::string key = user.substr(0, user.find(':'));
  bool found = false;
  std::ifstream passwd("/etc/passwd");
  for (std::string line; !found && std::getline(passwd, line);) {
    std::vector<std::string> fields(1);
    for (char c : line) {
      if (c == ':') {
        fields.emplace_back();
      } else {
        fields.back().push_back(c);
      }
    }
    if (fields.size() < 6 || (fields[0] != key && fields[2] != key)) continue;
    *account = {static_cast<uid_t>(std::strtoul(fields[2].c_str(), nullptr, 10)),
                static_cast<gid_t>(std::strtoul(fields[3].c_str(), nullptr, 10)), fields[0],
                fields[5]};
    found = true;
  }
  if (!found && IsNumber(key)) {
    const auto id = static_cast<uid_t>(std::strtoul(key.c_str(), nullptr, 10));
    *account = {id, id, key, "/"};
    found = true;
  }
  if (found && user.size() > key.size()) {
    const std::string group = user.substr(key.size() + 1);
    if (!IsNumber(group)) return false;
    account->gid = static_cast<gid_t>(std::strtoul(group.c_str(), nullptr, 10));
  }
  return found;
}

bool Has(const std::vector<std::string>& env, std::string_view name) {
  for (const std::string& entry : env) {
    if (entry.size() > name.size() && entry.compare(0, name.size(), name) == 0 &&
        entry[name.size()] == '=') {
      return true;
    }
  }
  return false;
}

[[noreturn]] void RunChild(const CommandSpec& spec, int proc_fd, int out, int err) {
  setsid();
  const int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(err, STDERR_FILENO);
  dup2(out, STDOUT_FILENO);
  if (null_fd < 0 || dup2(null_fd, STDIN_FILENO) < 0) Die("open /dev/null");
  // When memory runs out a command is to die, before init and before the host's processes.
  const int score_fd = openat(proc_fd, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (score_fd < 0 || write(score_fd, "500", 3) != 3) Die("set the OOM score");
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
  prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
  Account account;
  if (!spec.user.empty() && !FindAccount(spec.user, &account)) {
    errno = EINVAL;
    Die("no such user '" + spec.user + "' in /etc/passwd");
  }
  if (!ConfineCommand()) Die("drop privileges");
  if (account.uid != 0 || account.gid != 0) {
    if (setgroups(1, &account.gid) != 0 || setgid(account.gid) != 0 || setuid(account.uid) != 0) {
      Die("become user '" + spec.user + "'");
    }
  }
  if (chdir(spec.cwd.c_str()) != 0) Die("cannot start in directory '" + spec.cwd + "'");
  std::vector<std::string> env = spec.env;
  if (!Has(env, "HOME")) env.push_back("HOME=" + account.home);
  if (!Has(env, "USER")) env.push_back("USER=" + account.name);
  std::vector<char*> pointers;
  for (std::string& entry : env) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  std::string command = spec.command;
  for (const char* shell : {"/bin/bash", "/bin/sh"}) {
    std::string name = std::strrchr(shell, '/') + 1;
    char flag[] = "-c";
    char* arguments[] = {name.data(), flag, command.data(), nullptr};
    execve(shell, arguments, pointers.data());
    if (errno != ENOENT) break;
  }
  Die("cannot execute a shell");
}

}  // namespace

bool StartCommand(const CommandSpec& spec, int proc_fd, Command* command) {
  int out[2];
  int err[2] = {-1, -1};
  if (pipe2(out, O_CLOEXEC) != 0) return false;
  if (!spec.merge_output && pipe2(err, O_CLOEXEC) != 0) {
    close(out[0]);
    close(out[1]);
    return false;
  }
  fcntl(out[0], F_SETPIPE_SZ, kPipeBytes);
  const pid_t pid = fork();
  if (pid == 0) RunChild(spec, proc_fd, out[1], spec.merge_output ? out[1] : err[1]);
  const int fork_errno = errno;
  close(out[1]);
  if (!spec.merge_output) close(err[1]);
  if (pid < 0) {
    close(out[0]);
    if (!spec.merge_output) close(err[0]);
    errno = fork_errno;
    return false;
  }
  fcntl(out[0], F_SETFL, O_NONBLOCK);
  if (!spec.merge_output) fcntl(err[0], F_SETFL, O_NONBLOCK);
  *command = {pid, out[0], spec.merge_output ? -1 : err[0]};
  return true;
}

}  // namespace swe_rl::sandbox
