// A small process that forks sandboxes, so that the broker, which is large, never forks.
#ifndef SWE_RL_SANDBOX_NATIVE_ZYGOTE_H_
#define SWE_RL_SANDBOX_NATIVE_ZYGOTE_H_

#include <string>

namespace swe_rl::sandbox {

// Serves kImage and kNew requests on `control_fd` until the broker closes it; then every
// sandbox dies with this process. `stage` is an empty directory for its mounts. Returns the
// exit status.
int RunZygote(int control_fd, const std::string& stage);

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_ZYGOTE_H_
