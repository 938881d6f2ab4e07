"""Is the loss still the same? Compares two results, or runs two configurations and compares them.

  python scripts/parity.py RUN --baseline BASELINE                   a finished run against another, or against a named baseline
  python scripts/parity.py RUN --baseline gaudi2_70b_after           the 70b experiment against the published figures
  python scripts/parity.py --record NAME RUN                         keep a run's figures as conf/baseline/NAME.yaml
  python scripts/parity.py --ab runtime.mark_step=true,false +experiment=tiny runtime=cpu_lazy
  python scripts/parity.py --arms checkpointing +experiment=tiny     ready arms (list below), each run in processes of its own
  python scripts/parity.py --stock +experiment=tiny                  against transformers' own Llama, PEFT and Trainer
  python scripts/parity.py --arms dtype --seeds 5 +experiment=tiny   does the difference stand out of seed-to-seed noise?

RUN and BASELINE are a run folder, an all_results.json, a log.jsonl, or a name in conf/baseline. Loss and perplexity decide, both
ways; memory and speed are reported, and decide with --require. Exit status: 0 same, 1 differs, 2 cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.pipeline.compose import exit_on_error
from recipes.pipeline.config import InputError
from scripts import parity_report, results
from scripts.arguments import OneLineParser
from scripts.comparison import Verdict, compare


def main(argv: list[str] | None = None) -> int:
    """Exit status, see Verdict."""
    with exit_on_error():
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.ab or options.arms or options.stock:
            from scripts.arms import experiment

            return experiment(options)
        if options.record:
            return _record(options)
        return _compare(options)
    return Verdict.NOT_COMPARABLE


def parse(argv: list[str]) -> argparse.Namespace:
    from scripts.ready_arms import READY

    ready = "\n".join(
        f"  {name:14} {', '.join(' '.join(arm) or '(as configured)' for arm in arms)}" for name, arms in READY.items()
    )
    parser = OneLineParser(
        prog="parity.py",
        description=__doc__,
        epilog=f"ready arms\n{ready}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--baseline", help="what RUN is compared with")
    parser.add_argument("--require", nargs="+", choices=["memory", "speed"], default=[], help="these decide too")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY", help="may differ or be missing; said in the report"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write it as JUnit XML, a test case a figure")
    parser.add_argument("--record", metavar="NAME", help="write RUN as a named baseline")
    parser.add_argument("--overwrite", action="store_true", help="--record may replace a baseline")
    parser.add_argument(
        "--ab",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="arms: one for each value; several: all combinations",
    )
    parser.add_argument("--arms", choices=sorted(READY), help="ready arms")
    parser.add_argument("--stock", action="store_true", help="this repository's Llama against transformers'")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each arm, alternating (default 1)")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of each arm: tells a shift from noise, from 3 on")
    parser.add_argument("--trace", type=int, default=2, help="optimizer steps traced tensor by tensor (default 2)")
    parser.add_argument(
        "--output", type=Path, help="folder of the arms' runs and of report.html (default outputs/parity/TIME)"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="RUN | OVERRIDE", help="one RUN, or the options of recipes/lora.py for the arms"
    )
    return parser.parse_intermixed_args(argv)


def _one_run(options: argparse.Namespace) -> str:
    if len(options.arguments) != 1:
        given = f"{len(options.arguments)} were given" if options.arguments else "none was given"
        raise InputError(f"one RUN is needed, {given}; --help shows the forms")
    return options.arguments[0]


def _record(options: argparse.Namespace) -> int:
    path = results.record_baseline(options.record, results.read(_one_run(options)), options.overwrite)
    print(f"recorded: {path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    run = _one_run(options)
    if options.baseline is None:
        raise InputError("--baseline is needed: another run, or one of " + ", ".join(results.baselines()))
    found, baseline = results.read(run), results.read(options.baseline)
    comparison = compare(found, baseline, tuple(options.require), tuple(options.allow))
    print(parity_report.table(comparison))
    if options.json:
        parity_report.write_json(options.json, parity_report.as_dict(comparison))
    if options.junit:
        parity_report.write_junit(options.junit, comparison)
    return int(comparison.verdict)


if __name__ == "__main__":
    sys.exit(main())
