"""Compiles CUDA C++ to PTX with NVRTC, which needs neither a GPU nor a toolkit.

All PTX goes into one archive, compressed as a whole: kernels of different types have much in common.

usage: nvrtc.py LIBNVRTC SOURCES OUT NAME:FILE:ARCHITECTURE[:MACRO=VALUE]...
"""

import ctypes
import pathlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import zstandard

OPTIONS = ["-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]


def compile_one(nvrtc, sources, job):
    """The PTX of one job; what the compiler says otherwise."""
    name, file, architecture, *macros = job.split(":")
    options = OPTIONS + [f"--gpu-architecture={architecture}"] + [f"-D{macro}" for macro in macros]
    headers = sorted(sources.glob("*.cuh"))
    texts = [header.read_bytes() for header in headers]
    names = [header.name.encode() for header in headers]
    strings = ctypes.c_char_p * len(headers)
    program = ctypes.c_void_p()
    text = (sources / file).read_bytes()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, file.encode(), len(headers), strings(*texts), strings(*names)
    )
    if made != 0:
        raise SystemExit(f"nvrtcCreateProgram: {made}")
    given = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).strip()
    if log:
        print(f"{name}: {log}", file=sys.stderr)
    if status != 0:
        raise SystemExit(f"{name}: NVRTC said {status}")
    ptx = fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # Calls are numbered through all that the process has compiled, in comments.
    return name, re.sub(r" // callseq \d+(, \d+)?$", "", ptx, flags=re.MULTILINE)


def fetch(size_of, get, program):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value.decode()


def main():
    library, sources, out, *jobs = sys.argv[1:]
    nvrtc = ctypes.CDLL(library)
    sources, out = pathlib.Path(sources), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda job: compile_one(nvrtc, sources, job), jobs))
    for name, ptx in made:
        (out / f"{name}.ptx").write_text(ptx)
    # Each file after a line with its name and length.
    archive = "".join(f"{name} {len(ptx)}\n{ptx}" for name, ptx in sorted(made))
    (out / "ptx.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(archive.encode()))


main()
