"""A comparison as a table on the terminal, as JSON and as JUnit; the verdict first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.comparison import Comparison, Row, Verdict, rules

WORDS = {Verdict.SAME: "SAME", Verdict.DIFFERS: "DIFFERS", Verdict.NOT_COMPARABLE: "NOT COMPARABLE"}


def verdict_line(comparison: Comparison) -> str:
    """One line: the verdict and what decided it."""
    line = f"{WORDS[comparison.verdict]}: {comparison.found.name} against {comparison.baseline.name}"
    if comparison.refusals:
        return line
    wrong = [row.metric for row in comparison.rows if not row.ok]
    if wrong:
        return f"{line}; outside: {', '.join(wrong)}"
    decided = [row for row in comparison.rows if row.tolerance is not None]
    return f"{line}; {len(decided)} figures within tolerance"


def table(comparison: Comparison) -> str:
    """The report for a terminal."""
    lines = [verdict_line(comparison)]
    lines += [f"  not comparable: {refusal}" for refusal in comparison.refusals]
    lines += [f"  allowed to differ: {item}" for item in comparison.allowed]
    if comparison.rows and not comparison.refusals:
        lines.append(f"tolerances    {comparison.kind}: {comparison.reason}")
        lines.append(f"{'':2}{'metric':28}{'found':>14}{'baseline':>14}{'difference':>13}{'allowed':>11}  verdict")
        lines += [f"  {_line(row)}" for row in comparison.rows]
    if comparison.changed:
        lines.append("configuration differs:")
        lines += [f"  {key}: {was} -> {now}" for key, (was, now) in comparison.changed.items()]
    unknown = sorted(comparison.found.facts.keys() - comparison.baseline.facts.keys())
    if unknown and comparison.baseline.facts:
        lines.append(f"not known of the baseline, so not compared: {', '.join(unknown)}")
    return "\n".join(lines)


def _line(row: Row) -> str:
    limit, relative = "", row.metric == "grad_norm"
    if row.tolerance is not None:
        limit = f"±{row.tolerance:.1e}" if row.tolerance else "exact"
    gap = row.difference / abs(row.baseline) if relative and row.baseline else row.difference
    state = "reported" if row.tolerance is None else "same" if row.ok else "OUTSIDE"
    where = f" ({row.at})" if row.at else ""
    return f"{row.metric:28}{row.found:>14.7g}{row.baseline:>14.7g}{gap:>+13.2e}{limit:>11}  {state}{where}"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """For --json: every figure, finite or null."""
    return {
        "verdict": comparison.verdict.name.lower(),
        "exit_status": int(comparison.verdict),
        "found": comparison.found.name,
        "baseline": comparison.baseline.name,
        "not_comparable": comparison.refusals,
        "allowed": comparison.allowed,
        "tolerances": {"kind": comparison.kind, "reason": comparison.reason},
        "configuration": {key: {"baseline": was, "found": now} for key, (was, now) in comparison.changed.items()},
        "metrics": [
            {
                "metric": row.metric,
                "found": _finite(row.found),
                "baseline": _finite(row.baseline),
                "difference": _finite(row.difference),
                "tolerance": row.tolerance,
                "relative": row.metric == "grad_norm",
                "unit": rules()["metrics"][row.metric]["unit"],
                "same": row.ok,
                "where": row.at,
            }
            for row in comparison.rows
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_junit(path: Path, comparison: Comparison) -> None:
    """One test case a figure, for CI; what cannot be compared is an error of its own."""
    suite = ElementTree.Element("testsuite", name=f"parity with {comparison.baseline.name}")
    for row in comparison.rows:
        case = ElementTree.SubElement(suite, "testcase", classname="parity", name=row.metric)
        if not row.ok:
            ElementTree.SubElement(case, "failure", message=" ".join(_line(row).split()))
    for refusal in comparison.refusals:
        case = ElementTree.SubElement(suite, "testcase", classname="parity", name="comparable")
        ElementTree.SubElement(case, "error", message=refusal)
    failures = sum(not row.ok for row in comparison.rows)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    suite.set("errors", str(len(comparison.refusals)))
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
