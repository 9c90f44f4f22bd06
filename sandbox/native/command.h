// Starts one command of a sandbox in its own session, confined.
#ifndef SWE_RL_SANDBOX_NATIVE_COMMAND_H_
#define SWE_RL_SANDBOX_NATIVE_COMMAND_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace swe_rl::sandbox {

struct CommandSpec {
  std::string command;           // for `bash -c`, or `sh -c` where there is no bash
  std::string cwd;               // absolute
  std::string user;              // name, uid or uid:gid; empty: root
  std::vector<std::string> env;  // `NAME=value`, complete
  bool merge_output = false;
};

struct Command {
  pid_t pid = -1;
  int stdout_fd = -1;  // non-blocking read ends; stderr_fd is -1 when merged
  int stderr_fd = -1;
};

// Forks and executes. A failure in the child (no such directory, user or shell) is written to
// its stderr and ends it with status 126. False with errno set when nothing was started.
bool StartCommand(const CommandSpec& spec, int proc_fd, Command* command);

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_COMMAND_H_
