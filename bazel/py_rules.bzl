"""The Python rules under defs.bzl: source sets, launchers and generated protobuf modules.

The native Python rules choose one interpreter a build through a toolchain. Here targets of
three environments meet in one build, so a launcher names its environment's interpreter itself.
"""

load("//bazel:python_env.bzl", "PythonEnvInfo")

ProtoFilesInfo = provider("Proto sources that protoc must see.", fields = ["files"])

_SOURCES = [".py", ".pyi"]

def _runfiles(ctx, files):
    """Merges what srcs, data and deps need at run time."""
    result = ctx.runfiles(files = files + ctx.files.data)
    for dep in ctx.attr.deps + ctx.attr.data:
        result = result.merge(dep[DefaultInfo].default_runfiles)
    return result

def _py_sources_impl(ctx):
    return [DefaultInfo(
        files = depset(ctx.files.srcs),
        runfiles = _runfiles(ctx, ctx.files.srcs),
    )]

_common = {
    "data": attr.label_list(allow_files = True),
    "deps": attr.label_list(),
    "srcs": attr.label_list(allow_files = _SOURCES),
}

py_sources = rule(implementation = _py_sources_impl, attrs = _common)

_LAUNCHER = """#!/bin/bash
# Starts {what} in the {env} environment.
self="$0"
[[ "$self" = /* ]] || self="$PWD/$self"
# Inside another target's runfiles, that tree holds ours.
if [[ "$self" == *.runfiles/{workspace}/* ]]; then
  root="${{self%%.runfiles/{workspace}/*}}.runfiles/{workspace}"
elif [[ -d "$self.runfiles/{workspace}" ]]; then
  root="$self.runfiles/{workspace}"
elif [[ -d "$(readlink -f "$self").runfiles/{workspace}" ]]; then
  root="$(readlink -f "$self").runfiles/{workspace}"
else
  root="${{RUNFILES_DIR:-${{TEST_SRCDIR:-}}}}/{workspace}"
fi
[[ -d "$root" ]] || {{ echo "$self: no runfiles; start it with ./bazelw run, or from bazel-bin" >&2; exit 1; }}
# The generated proto/ lies under $root; the source tree's must never be found first, so
# neither the current folder nor a script's goes on the path, here and in children.
export PYTHONPATH="$root" PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export RUNFILES_DIR="${{root%/*}}"
unset PYTHONHOME
{exports}
exec {python} -P -m {command} "$@"
"""

def _quote(text):
    return "'" + text.replace("'", "'\\''") + "'"

def _write_launcher(ctx, what, command):
    env = ctx.attr.python[PythonEnvInfo]
    out = ctx.actions.declare_file(ctx.label.name)
    exports = ["export %s=%s" % (k, _quote(v)) for k, v in sorted(ctx.attr.env_vars.items())]
    ctx.actions.write(
        output = out,
        content = _LAUNCHER.format(
            what = what,
            env = env.name,
            workspace = ctx.workspace_name,
            exports = "\n".join(exports),
            python = _quote(env.path),
            command = command,
        ),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = out,
        files = depset([out]),
        runfiles = _runfiles(ctx, ctx.files.srcs + [out]),
    )]

def _py_launcher_impl(ctx):
    return _write_launcher(ctx, "the module " + ctx.attr.module, ctx.attr.module)

def _pytest_launcher_impl(ctx):
    files = ["\"$root\"/" + _quote(f.short_path) for f in ctx.files.test_srcs]
    return _write_launcher(ctx, "pytest", "bazel.pytest_main " + " ".join(files))

_launcher = dict(
    _common,
    env_vars = attr.string_dict(),
    python = attr.label(mandatory = True, providers = [PythonEnvInfo]),
)

py_launcher = rule(
    implementation = _py_launcher_impl,
    attrs = dict(_launcher, module = attr.string(mandatory = True)),
    executable = True,
)

pytest_launcher_test = rule(
    implementation = _pytest_launcher_impl,
    attrs = dict(_launcher, test_srcs = attr.label_list(allow_files = [".py"])),
    test = True,
)

def _py_grpc_impl(ctx):
    protos = depset(
        ctx.files.srcs,
        transitive = [d[ProtoFilesInfo].files for d in ctx.attr.deps if ProtoFilesInfo in d],
    )
    outs = []
    for src in ctx.files.srcs:
        stem = src.basename[:-len(".proto")]
        outs += [ctx.actions.declare_file(stem + s) for s in ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"]]
    args = ctx.actions.args()
    args.add("--proto_path=.")
    for language in ["python", "pyi", "grpc_python"]:
        args.add("--%s_out=%s" % (language, ctx.bin_dir.path))
    args.add_all(ctx.files.srcs)
    ctx.actions.run(
        executable = ctx.executable._protoc,
        arguments = [args],
        inputs = protos,
        outputs = outs,
        mnemonic = "PyGrpc",
        progress_message = "Generating Python from %{label}",
    )
    return [
        ProtoFilesInfo(files = protos),
        DefaultInfo(files = depset(outs), runfiles = _runfiles(ctx, outs + ctx.files.package_srcs)),
    ]

py_grpc = rule(
    implementation = _py_grpc_impl,
    attrs = dict(
        _common,
        package_srcs = attr.label_list(allow_files = _SOURCES),
        srcs = attr.label_list(mandatory = True, allow_files = [".proto"]),
        _protoc = attr.label(default = "//bazel:grpc_protoc", executable = True, cfg = "exec"),
    ),
)

def _environments_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".py")
    lines = ["\"\"\"The interpreter of each Python environment. Generated; see //bazel.\"\"\"", ""]
    lines += ["PYTHON = {"]
    for target in ctx.attr.pythons:
        env = target[PythonEnvInfo]
        lines.append("    \"%s\": \"%s\"," % (env.name, env.path))
    ctx.actions.write(output = out, content = "\n".join(lines + ["}", ""]))
    return [DefaultInfo(
        files = depset([out]),
        runfiles = ctx.runfiles(files = [out] + ctx.files.package_srcs),
    )]

environments = rule(
    implementation = _environments_impl,
    attrs = {
        "package_srcs": attr.label_list(allow_files = _SOURCES),
        "pythons": attr.label_list(providers = [PythonEnvInfo]),
    },
)
