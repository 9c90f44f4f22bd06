"""python_env: one hash-locked virtual environment as an external repository.

The environment itself (bazel/venv.py) stays outside the build and outside runfiles; targets
name its interpreter by absolute path. That path holds a hash of the lock, so a changed lock
reruns what used the old one.

Environment variables (or --repo_env=NAME=value):
  SWE_RL_PYTHON           base interpreter of main and engine
  SWE_RL_HARNESS_PYTHON   base interpreter of harness
  SWE_RL_SYSTEM_SITE      "1": see the base interpreter's own packages, as an accelerator
                          image's torch; set by --config=rocm and --config=cuda
  SWE_RL_VENV_CACHE       where environments are kept (default: ~/.cache/swe_rl/venv)
"""

PythonEnvInfo = provider("An environment's interpreter.", fields = ["name", "path"])

def _python_interpreter_impl(ctx):
    return [PythonEnvInfo(name = ctx.attr.env, path = ctx.attr.path)]

python_interpreter = rule(
    implementation = _python_interpreter_impl,
    attrs = {
        "env": attr.string(mandatory = True),
        "path": attr.string(mandatory = True),
    },
)

_BUILD = """load("@swe_rl//bazel:python_env.bzl", "python_interpreter")

package(default_visibility = ["//visibility:public"])

python_interpreter(
    name = "python",
    env = "{env}",
    path = "{python}",
)

cc_library(
    name = "pybind11",
    hdrs = glob([
        "python_include/**/*.h",
        "pybind11_include/**/*.h",
    ]),
    includes = [
        "python_include",
        "pybind11_include",
    ],
)
"""

def _python_env_impl(rctx):
    python = rctx.which("python3")
    if not python:
        fail("\n\nswe_rl: no python3 on PATH; ./bazelw installs it on Debian.\n")
    system_site = rctx.os.environ.get("SWE_RL_SYSTEM_SITE") == "1" and rctx.attr.system_site_lock
    lock = rctx.attr.system_site_lock if system_site else rctx.attr.lock
    rctx.report_progress("installing " + lock.name)
    command = [python, rctx.path(rctx.attr._venv), rctx.attr.env, "--lock", rctx.path(lock)]
    result = rctx.execute(
        command + (["--system-site"] if system_site else []),
        environment = {
            "PYTHONHOME": "",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": "",
        },
        timeout = 3600,
    )
    if result.return_code:
        fail("\n\n%s\n" % result.stderr.strip())
    paths = json.decode(result.stdout)
    rctx.symlink(paths["include"], "python_include")
    pybind11 = rctx.path(paths["site_packages"] + "/pybind11/include")
    if pybind11.exists:
        rctx.symlink(pybind11, "pybind11_include")
    rctx.file(
        "BUILD.bazel",
        _BUILD.format(env = rctx.attr.env, python = paths["python"]),
        executable = False,
    )

python_env = repository_rule(
    implementation = _python_env_impl,
    attrs = {
        "env": attr.string(mandatory = True),
        "lock": attr.label(mandatory = True, allow_single_file = True),
        "system_site_lock": attr.label(allow_single_file = True),
        "_venv": attr.label(default = "//bazel:venv.py", allow_single_file = True),
    },
    environ = [
        "SWE_RL_HARNESS_PYTHON",
        "SWE_RL_PYTHON",
        "SWE_RL_SYSTEM_SITE",
        "SWE_RL_VENV_CACHE",
    ],
)
