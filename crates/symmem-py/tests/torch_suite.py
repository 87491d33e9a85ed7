"""Runs torch's own tests of process groups with gloo, and with this library in its place, and compares the results.

    python crates/symmem-py/tests/torch_suite.py --ranks 3                 # both, as a table
    python crates/symmem-py/tests/torch_suite.py --ranks 2 -k all_gather   # tests with that in their name

Needs expecttest from PyPI. The tests are those of `torch.testing._internal.distributed.distributed_test`, which comes with torch. They ask
for `gloo`, so that this also tests `replace_gloo`. Tests that need a GPU are skipped with both.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

BACKENDS = ("gloo", "symmem")
#: Seconds that one test may take.
LIMIT = 90


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-k", dest="part", default="", help="only tests with this in their name")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.into:
        return run(given)
    results = {backend: apart(backend, given) for backend in BACKENDS if given.backend in (None, backend)}
    for backend, result in results.items():
        counts = collections.Counter(outcome for outcome, _ in result.values())
        print(f"{backend} with {given.ranks} ranks: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    if len(results) == 1:
        differences = {
            name for result in results.values() for name, (outcome, _) in result.items() if outcome == "failed"
        }
    else:
        gloo, symmem = (results[backend] for backend in BACKENDS)
        differences = {name for name in {*gloo, *symmem} if gloo.get(name, [""])[0] != symmem.get(name, [""])[0]}
    for name in sorted(differences):
        print(
            f"\n{name}: " + ", ".join(f"{backend} {result.get(name, ['-'])[0]}" for backend, result in results.items())
        )
        print("\n".join(f"    {result[name][1]}" for result in results.values() if name in result and result[name][1]))
    return 0


def apart(backend, given):
    """The results of one backend, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="symmem-suite-") as folder:
        into = os.path.join(folder, "results.json")
        names = {"BACKEND": "gloo", "WORLD_SIZE": str(given.ranks), "TEMP_DIR": folder, "OMP_NUM_THREADS": "1"}
        names["SYMMEM_REPLACE_GLOO"] = str(int(backend == "symmem"))
        command = [sys.executable, __file__, "--ranks", str(given.ranks), "-k", given.part, "--into", into]
        subprocess.run(command, env={**os.environ, **names}, check=False)
        with open(into, encoding="utf-8") as file:
            return json.load(file)


def run(given):
    """Runs the tests in this process, and writes their results."""
    import torch
    import torch.distributed as dist

    dist.Backend._ensure_backend_registered("gloo")
    replaced = dist.Backend._plugins["GLOO"].creator_fn.__module__.startswith("symmem")
    assert replaced == (os.environ["SYMMEM_REPLACE_GLOO"] == "1"), "gloo is not what it should be"
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = LIMIT
    common_distributed.TIMEOUT_OVERRIDE.clear()
    for name in ("test_dir", "init_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], name), exist_ok=True)
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Suite(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forked: each rank starts in no time, because torch is loaded.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(Suite) if given.part in name]
    results = {}
    for name in names:
        begun, result = time.monotonic(), unittest.TestResult()
        Suite(name).run(result)
        results[name] = outcome(result)
        print(f"{name}: {results[name][0]} ({time.monotonic() - begun:.1f} s)", file=sys.stderr, flush=True)
        with open(given.into, "w", encoding="utf-8") as file:
            json.dump(results, file)
    return 0


def outcome(result):
    """What became of a test, and why."""
    bad = result.errors + result.failures
    if bad:
        said = [line for line in bad[0][1].splitlines() if line.strip()]
        telling = [line for line in said if "Error" in line or "timed out" in line or "exit" in line]
        return "failed", (telling or said)[-1].strip()[:300]
    return ("skipped" if result.skipped else "passed"), ""


if __name__ == "__main__":
    sys.exit(main())
