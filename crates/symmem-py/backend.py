"""Builds the Python package: maturin's build backend, with the `symmem` program inside the wheel.

`python backend.py ARGUMENT...` is `maturin build ARGUMENT...` with the program; `cargo xtask wheel` calls it so.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import maturin
from maturin import (  # noqa: F401 (hooks that are maturin's own)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "crates/symmem-py/python/symmem/bin/symmem"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with program(maturin.get_maturin_pep517_args(config_settings)):
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    # An editable package is the directory itself, so the program stays there.
    build_program(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


@contextlib.contextmanager
def program(arguments):
    """The program in its place, for as long as maturin makes a wheel."""
    build_program(arguments)
    try:
        yield
    finally:
        shutil.rmtree(PROGRAM.parent)


def build_program(arguments):
    """Builds the program as maturin is told to build the module, and makes both small."""
    os.environ.setdefault("CARGO_PROFILE_RELEASE_STRIP", "symbols")
    profile, target = value_of("--profile", arguments) or "release", value_of("--target", arguments)
    zig = "--zig" in arguments
    # The module's package is named too: cargo then builds what both need once, with the same features.
    command = ["cargo", "zigbuild" if zig else "build", "--package", "symmem-cli", "--package", "symmem-py", "--bins"]
    command += ["--profile", profile, "--message-format", "json-render-diagnostics"]
    if target:
        command += ["--target", target + (f".{glibc(arguments)}" if zig else "")]
    if not shutil.which("cargo"):
        sys.exit("symmem is built from Rust, and there is no cargo; https://rustup.rs installs it")
    # Maturin's answer to pip is the last line that is printed.
    print("$", *command, file=sys.stderr, flush=True)
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    built = [message.get("executable") for message in map(json.loads, said.splitlines())]
    PROGRAM.parent.mkdir(exist_ok=True)
    shutil.copy(next(filter(None, built)), PROGRAM)


def value_of(option, arguments):
    return arguments[arguments.index(option) + 1] if option in arguments else None


def glibc(arguments):
    """The version that `--compatibility manylinux_2_28` names: 2.28."""
    return (value_of("--compatibility", arguments) or "manylinux_2_17").removeprefix("manylinux_").replace("_", ".")


if __name__ == "__main__":
    with program(sys.argv[1:]):
        sys.exit(subprocess.run([sys.executable, "-m", "maturin", "build", *sys.argv[1:]], cwd=ROOT).returncode)
