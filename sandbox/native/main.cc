// sandbox_init CONTROL_FD STAGE_DIR: the zygote, started by the broker's local backend.
#include <cstdio>
#include <cstdlib>

#include "sandbox/native/zygote.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: sandbox_init CONTROL_FD STAGE_DIR (started by the broker)\n");
    return 2;
  }
  return swe_rl::sandbox::RunZygote(std::atoi(argv[1]), argv[2]);
}
