"""What can be asked of rpipe on the command line?

Starts fast and without torch: each command imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

_EPILOG = "A run file is YAML; configs/quickstart.yaml is one to start from. Every figure of a run is in its run directory."


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("rpipe", description="Streamed, on-policy RL post-training as one MPI job.", epilog=_EPILOG)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a job on this machine or in this Slurm allocation",
        description="Starts the ranks (mpirun, or srun inside a Slurm allocation), watches over them, and reports at the end.",
        epilog="Exit code: 0 ended, 1 failed, 2 not started (the config, what it names, or the run directory), 130 Ctrl-C,"
        " 143 SIGTERM, 75 stopped by USR2."
        " Ctrl-C asks for an end at the next safe point; twice ends at once.",
    )
    train.add_argument("config", metavar="CONFIG", help="a run file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="changes one key: run.seed=1 pipeline.mode=serial")
    # add_help=False: --help and everything else is the command's own
    commands.add_parser("report", help="tables of one or more run directories (--json for machines)", add_help=False)
    commands.add_parser("simulate", help="run the job's config on a virtual clock: what would it take?", add_help=False)
    commands.add_parser("calibrate", help="fit what rpipe simulate knows of the hardware to real runs", add_help=False)
    commands.add_parser("plan", help="which split and layout of N accelerators to ask for, by simulation", add_help=False)
    commands.add_parser("story", help="what touched one trajectory (12.5), group (12) or step (s7) of a run", add_help=False)
    commands.add_parser("doctor", help="what this machine has, and what to do about the rest", add_help=False)
    commands.add_parser("version", help="print the version")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader went (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 0


def _run(words: list[str]) -> int:
    if words[:1] == ["report"]:
        from rpipe.report import main as report

        return report(words[1:])
    if words[:1] == ["simulate"]:
        from rpipe.report import write
        from rpipe.simulate import main as simulate

        return simulate(words[1:], report=write)
    if words[:1] == ["calibrate"]:
        from rpipe.calibrate import main as calibrate

        return calibrate(words[1:])
    if words[:1] == ["plan"]:
        from rpipe.plan import main as plan

        return plan(words[1:])
    if words[:1] == ["story"]:
        from rpipe.story import main as story

        return story(words[1:])
    if words[:1] == ["doctor"]:
        from rpipe.doctor import main as doctor

        return doctor(words[1:])
    arguments = parser().parse_args(words)
    if arguments.command == "version":
        print(version())
        return 0
    try:
        from rpipe.report import write
        from rpipe.runtime.launch import train

        return train(arguments.config, arguments.overrides, report=write)
    except KeyboardInterrupt:  # the job's own handlers stand later
        print("stopped by Ctrl-C before the job started", file=sys.stderr)
        return 130


def version() -> str:
    """The installed package's, or this checkout's."""
    from importlib import metadata

    try:
        return metadata.version("rpipe")
    except metadata.PackageNotFoundError:
        import configparser
        from pathlib import Path

        cfg = configparser.ConfigParser(interpolation=None)
        cfg.read(Path(__file__).resolve().parents[1] / "setup.cfg")
        return cfg.get("metadata", "version", fallback="unknown")


if __name__ == "__main__":
    raise SystemExit(main())
