"""`harness.load`: runs as pandas DataFrames, for questions that no verb answers. docs/compare.md has the columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.fingerprint import fingerprint
from harness.matrix import JudgedCheck, judged_checks, passed
from harness.project import Project, load_project
from harness.records import Record, find_run, records_of
from harness.status import RED, Verdict, worst_verdict

_TIME = "datetime64[ns, UTC]"
_KEY = {"run": "string", "cell": "string"}
_RECORDS = {
    **_KEY,
    "target": "string",
    "device": "string",
    "scenario": "string",
    "params": "object",
    "vllm": "string",
    "attempt": "int64",
    "started": _TIME,
    "seconds": "float64",
    "status": "string",
    "verdict": "string",
    "reason": "string",
    "passed": "int64",
    "checks": "int64",
    "backend": "string",
    "reused_from": "string",
    "axes": "object",
    "distributions": "object",
    "phases": "object",
}
_CHECKS = {
    **_KEY,
    "check": "string",
    "status": "string",
    "verdict": "string",
    "reason": "string",
    "seconds": "float64",
    "error": "string",
    "message": "string",
    "fingerprint": "string",
}
_METRICS = {**_KEY, "check": "string", "name": "string", "value": "float64", "unit": "string"}
_PROPERTIES = {**_KEY, "name": "string", "value": "object"}


@dataclass(frozen=True, kw_only=True)
class Frames:
    """A row a record, a check, a metric, a property; `run` and `cell` are the keys between them."""

    records: pd.DataFrame
    checks: pd.DataFrame
    metrics: pd.DataFrame
    properties: pd.DataFrame


def load(*runs: str | Path, config: str | Path | None = None) -> Frames:
    """The records of these runs, by name or folder, as they are judged by today's expectations; without any, of the
    newest run. `config`: matrix.toml; default: the nearest one from the working folder upwards.

    Raises ConfigurationError and NothingSelectedError, as the command line does.
    """
    project = load_project(Path(config) if config is not None else None)
    names: list[str | None] = [str(run) for run in runs]
    judged = list(_judged(project, dict.fromkeys(find_run(project.results, name) for name in names or [None])))
    return Frames(
        records=_frame(_RECORDS, (_record(one) for one in judged)),
        checks=_frame(_CHECKS, (row for one in judged for row in _checks(one))),
        metrics=_frame(_METRICS, (row for one in judged for row in _metrics(one))),
        properties=_frame(_PROPERTIES, (row for one in judged for row in _properties(one))),
    )


@dataclass(frozen=True)
class _Judged:
    run: str
    record: Record
    checks: tuple[JudgedCheck, ...]

    @property
    def key(self) -> dict[str, object]:
        return {"run": self.run, "cell": self.record.cell}

    @property
    def verdict(self) -> Verdict:
        return worst_verdict(judged.verdict for judged in self.checks)


def _judged(project: Project, folders: Iterable[Path]) -> Iterator[_Judged]:
    for folder in folders:
        for record in records_of(folder).values():
            question = record.cell.partition("/")[2]
            yield _Judged(folder.name, record, judged_checks(record, question, project.expectations))


def _frame(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """With these dtypes also where there is no row."""
    return pd.DataFrame(list(rows), columns=list(columns)).astype(dict(columns))


def _record(one: _Judged) -> dict[str, object]:
    record = one.record
    good, of = passed(one.checks)
    return {
        **one.key,
        "target": record.target,
        "device": record.device,
        "scenario": record.scenario,
        "params": record.params,
        "vllm": record.vllm,
        "attempt": record.attempt,
        "started": record.started,
        "seconds": (record.ended - record.started).total_seconds(),
        "status": str(record.status),
        "verdict": str(one.verdict),
        "reason": record.reason,
        "passed": good,
        "checks": of,
        "backend": record.backend,
        "reused_from": record.reused_from,
        "axes": record.axes,
        "distributions": record.distributions,
        "phases": record.phases,
    }


def _checks(one: _Judged) -> Iterator[dict[str, object]]:
    for judged in one.checks:
        check = judged.check
        yield {
            **one.key,
            "check": check.id,
            "status": str(check.status),
            "verdict": str(judged.verdict),
            "reason": check.reason,
            "seconds": check.seconds,
            "error": check.error.type if check.error else None,
            "message": check.error.message if check.error else None,
            "fingerprint": fingerprint(check) if check.status in RED else None,
        }


def _metrics(one: _Judged) -> Iterator[dict[str, object]]:
    for metric in one.record.metrics:
        yield {**one.key, "check": metric.check, "name": metric.name, "value": metric.value, "unit": metric.unit}


def _properties(one: _Judged) -> Iterator[dict[str, object]]:
    for name, value in one.record.properties.items():
        yield {**one.key, "name": name, "value": value}
