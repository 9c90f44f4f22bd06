"""Repositories that Bazel 4.2.3 would otherwise fetch from the network."""

def compat_repositories():
    """Declares local stand-ins for them; a newer Bazel needs none."""

    # native.module_name came with Bazel 5; Debian's 4.2.3 reports no version to ask for.
    if not hasattr(native, "module_name"):
        for name in ["remote_coverage_tools", "rules_cc", "rules_java"]:
            native.local_repository(name = name, path = "third_party/debian4/" + name)
