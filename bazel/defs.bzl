"""The repository's build rules; bazel/README.md shows each in use.

BUILD files load every Python and C++ rule from here and never use native ones, so that a
newer Bazel needs a change in this folder alone.
"""

load("//bazel:py_rules.bzl", "py_grpc", "py_launcher", "py_sources", "pytest_launcher_test")

_WARNINGS = ["-Wall", "-Wextra"]

def _package_srcs():
    """The package's own __init__.py, which every target in it needs."""
    return native.glob(["__init__.py"], allow_empty = True)

def _with_package(srcs):
    return srcs + [f for f in _package_srcs() if f not in srcs]

def _module(file):
    """The dotted name of a file, or of a //package:file label."""
    package = native.package_name()
    if file.startswith("//"):
        package, _, file = file[2:].partition(":")
    file = file.lstrip(":")
    return (package + "/" + file if package else file)[:-len(".py")].replace("/", ".")

def _python(env):
    if env not in ["main", "engine", "harness"]:
        fail("env = %r: want \"main\", \"engine\" or \"harness\"" % env)
    return "@env_%s//:python" % env

def py_library(name, srcs = [], deps = [], data = [], **kwargs):
    """Python modules, imported by their path from the repository's root.

    Every package of a target's environment is always importable; deps name our own code.

    Args:
      name: the target's name.
      srcs: .py and .pyi files; the package's __init__.py is added.
      deps: py_library, py_grpc_library and pybind_extension targets.
      data: files wanted at run time, and py_binary targets to start.
      **kwargs: visibility, testonly, tags.
    """
    py_sources(name = name, srcs = _with_package(srcs), deps = deps, data = data, **kwargs)

def py_binary(name, main = None, env = "main", srcs = [], deps = [], env_vars = {}, **kwargs):
    """A program: `python -P -m <module>` in one environment.

    Args:
      name: the target's name, and its launcher's file name.
      main: a file ("server.py") or a dotted module ("rollout.server"); default: <name>.py.
      env: "main", "engine" or "harness".
      srcs: more sources; a `main` file of this package is added.
      deps: as py_library's.
      env_vars: environment variables to set.
      **kwargs: data, args, visibility, testonly, tags.
    """
    main = main or name + ".py"
    is_file = main.endswith(".py")
    py_launcher(
        name = name,
        srcs = _with_package(srcs + ([main] if is_file and main not in srcs else [])),
        module = _module(main) if is_file else main,
        python = _python(env),
        deps = deps,
        env_vars = env_vars,
        **kwargs
    )

def pytest_test(
        name,
        srcs,
        deps = [],
        env = "main",
        slow = False,
        gpu = False,
        host_access = False,
        size = "small",
        tags = [],
        env_vars = {},
        helpers = [],
        **kwargs):
    """Test modules run by pytest in one environment; --test_filter becomes `pytest -k`.

    Args:
      name: the target's name.
      srcs: test modules.
      deps: as py_library's.
      env: "main", "engine" or "harness".
      slow: left out of `//...`; add it to //tests:slow.
      gpu: needs an accelerator; run with --config=gpu.
      host_access: needs mounts, cgroups or user namespaces: runs outside Bazel's sandbox.
      size: small 60 s, medium 300 s, large 900 s, enormous 3600 s.
      tags: more tags; "exclusive" runs a test alone.
      env_vars: environment variables to set.
      helpers: conftest.py and other modules of this package that are not tests.
      **kwargs: data, args, timeout, flaky is refused.
    """
    if "flaky" in kwargs:
        fail("%s: a flaky test is mended, not rerun" % name)
    pytest_launcher_test(
        name = name,
        test_srcs = srcs,
        srcs = _with_package(srcs + helpers),
        python = _python(env),
        deps = deps + ["//bazel:pytest_main"],
        env_vars = env_vars,
        size = size,
        tags = tags + _test_tags(slow, gpu, host_access),
        **kwargs
    )

def _test_tags(slow, gpu, host_access):
    return (
        (["slow", "manual"] if slow else []) +
        (["gpu", "exclusive"] if gpu else []) +
        (["no-sandbox", "local"] if host_access else ["block-network"])
    )

def py_grpc_library(name, srcs, deps = [], **kwargs):
    """x_pb2.py, x_pb2.pyi and x_pb2_grpc.py from x.proto, imported by their package path.

    Args:
      name: the target's name.
      srcs: .proto files, which import one another by path from the repository's root.
      deps: py_grpc_library targets whose protos these import.
      **kwargs: visibility, testonly, tags.
    """
    py_grpc(name = name, srcs = srcs, package_srcs = _package_srcs(), deps = deps, **kwargs)

def pybind_extension(name, srcs, deps = [], copts = [], pyi = [], visibility = None, testonly = False, **kwargs):
    """<name>.so, imported as <package>.<name> in main and engine (Python 3.11 both).

    Args:
      name: the module's name, as in PYBIND11_MODULE.
      srcs: the binding's sources.
      deps: cc_library targets.
      copts: compiler flags.
      pyi: type stubs; <name>.pyi is added where it exists.
      visibility: of the extension.
      testonly: as everywhere.
      **kwargs: linkopts, defines and the like, for the shared object.
    """
    native.cc_binary(
        name = name + ".so",
        srcs = srcs,
        copts = _WARNINGS + ["-fvisibility=hidden"] + copts,
        linkshared = True,
        testonly = testonly,
        deps = deps + ["@env_main//:pybind11"],
        visibility = ["//visibility:private"],
        **kwargs
    )
    stubs = native.glob([name + ".pyi"], allow_empty = True)
    py_library(
        name = name,
        srcs = pyi + [f for f in stubs if f not in pyi],
        data = [name + ".so"],
        testonly = testonly,
        visibility = visibility,
    )

def cc_library(copts = [], **kwargs):
    """A C++20 library, compiled with warnings on."""
    native.cc_library(copts = _WARNINGS + copts, **kwargs)

def cc_binary(copts = [], **kwargs):
    """A C++20 program or, with linkshared, a shared object."""
    native.cc_binary(copts = _WARNINGS + copts, **kwargs)

def cc_test(deps = [], copts = [], slow = False, gpu = False, host_access = False, tags = [], size = "small", **kwargs):
    """A GoogleTest program; gtest_main is linked. slow, gpu, host_access as pytest_test's."""
    native.cc_test(
        copts = _WARNINGS + copts,
        size = size,
        tags = tags + _test_tags(slow, gpu, host_access),
        deps = deps + ["@gtest//:gtest_main"],
        **kwargs
    )
