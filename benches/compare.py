#!/usr/bin/env python3
"""Compares two builds of the program on one machine: old and new in alternating rounds, a ratio for each round.

    python3 benches/compare.py OLD NEW [--ranks 2,4] [--bytes 8,1K,...] [--rounds 11] [OPTIONS OF symmem bench]

Prints, for each row, both medians and the median, quartiles and range of new / old over the rounds. A virtual machine may move its cores
into one cache and apart again from one minute to the next, which changes a row by a factor of three: a round in which the two programs
met it differently does not count, and rows are printed for each placement.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile


def figures(program, ranks, options, more):
    """One round of `program`: what was measured, in microseconds, by row and size."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "figures.json"
        command = [program, "bench", *options.rows.split(","), "-n", str(ranks), "--rounds", "1"]
        command += ["--bytes", options.bytes, "--json", str(file), *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    ours = [line for line in lines if line.get("system") == "symmem"]
    return {(line["collective"], line.get("bytes") or 0): line["median_us"] for line in ours}


def quantiles(values):
    values = sorted(values)
    if len(values) < 3:
        return values[0], statistics.median(values), values[-1]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def placements(both):
    """The rounds by how the cores lay, where a row's times fall into two groups: `near` to each other, and `apart`."""
    times = [time for pair in both for time in pair]
    low, high = min(times), max(times)
    if high < 2.5 * low:
        return {"": both}
    between = (low * high) ** 0.5
    near = [pair for pair in both if max(pair) < between]
    apart = [pair for pair in both if min(pair) >= between]
    return {name: pairs for name, pairs in (("near", near), ("apart", apart)) if pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--bytes", default="8,64,1K,16K,128K,1M")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", default="barrier,put_signal,all_reduce")
    options, more = parser.parse_known_args()
    print("| row | ranks | bytes | cores | rounds | old, µs | new, µs | new / old | quartiles | range |")
    print("| --- | --: | --: | --- | --: | --: | --: | --: | --- | --- |")
    for ranks in map(int, options.ranks.split(",")):
        rounds = []
        for number in range(options.rounds):
            order = [options.old, options.new]
            if number % 2:
                order.reverse()
            measured = {program: figures(program, ranks, options, more) for program in order}
            rounds.append((measured[options.old], measured[options.new]))
        for row in rounds[0][0]:
            both = [(old[row], new[row]) for old, new in rounds if row in old and row in new]
            for cores, pairs in placements(both).items():
                old, new = (statistics.median(times) for times in zip(*pairs))
                ratios = [new / old for old, new in pairs]
                low, middle, high = quantiles(ratios)
                collective, size = row
                print(
                    f"| {collective} | {ranks} | {size} | {cores} | {len(pairs)} | {old:.3f} | {new:.3f} | **{middle:.3f}** "
                    f"| {low:.3f} – {high:.3f} | {min(ratios):.3f} – {max(ratios):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
