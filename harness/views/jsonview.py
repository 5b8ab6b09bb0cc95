"""The Matrix as JSON: what another program reads. Schema 1; the records beside it hold the evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.events import clean
from harness.fingerprint import fingerprints
from harness.matrix import JudgedCheck, Matrix, Square
from harness.plan import Planned
from harness.targets import TargetFacts
from harness.views.causes import Cause, causes


def to_json(matrix: Matrix) -> str:
    return clean(json.dumps(document(matrix), indent=1, ensure_ascii=False)) + "\n"  # JSON leaves C1 controls alone


def document(matrix: Matrix) -> dict[str, Any]:
    """See docs/formats.md, `matrix.json`."""
    return {
        "schema": 1,
        "run": matrix.run,
        "green": matrix.green,
        "rows": list(matrix.rows),
        "columns": list(matrix.columns),
        "not_runnable": list(matrix.not_runnable),
        "elsewhere": matrix.elsewhere,
        "cells": [_square(square) for square in matrix.squares],
        "causes": [_cause(cause) for cause in causes(matrix.squares)],
        "targets": [_target(facts) for facts in matrix.targets],
    }


def _target(facts: TargetFacts) -> dict[str, Any]:
    """All that is known of it; `row` as the cells have it."""
    return {"row": facts.row, **facts.model_dump(mode="json", by_alias=True, exclude_none=True)}


def _square(square: Square) -> dict[str, Any]:
    record = square.record
    known = (
        {
            "attempt": record.attempt,
            "started": record.started.isoformat(),
            "seconds": round((record.ended - record.started).total_seconds(), 1),
            "reason": record.reason,
            "advice": record.advice,
            "backend": record.backend,
            "image": record.image.tag if record.image else None,
            "reused_from": record.reused_from,
            "axes": record.axes,
            "phases": record.phases,
        }
        if record
        else {}
    )
    return {
        "cell": square.cell.id,
        "row": square.row,
        "column": square.column,
        "status": square.status,
        "verdict": square.verdict,
        "stale": square.stale,
        **{key: value for key, value in known.items() if value is not None},
        "checks": [
            _check(judged, said)
            for judged, said in zip(square.checks, fingerprints([it.check for it in square.checks]), strict=True)
        ],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    cells = [
        {"cell": affected.square.cell.id, "checks": [judged.check.id for judged in affected.checks]}
        for affected in cause.affected
    ]
    return {"key": cause.key, "title": cause.title, "verdict": cause.verdict, "cells": cells}


def _check(judged: JudgedCheck, said: str) -> dict[str, Any]:
    check, expectation = judged.check, judged.expectation
    error = {"type": check.error.type, "message": check.error.message} if check.error else None
    expected = {"reason": expectation.reason, "link": expectation.link} if expectation else None
    fields = {
        "id": check.id,
        "status": check.status,
        "verdict": judged.verdict,
        "reason": check.reason,
        "seconds": check.seconds,
        "error": error,
        "fingerprint": said or None,
        "expectation": expected,
    }
    return {key: value for key, value in fields.items() if value is not None}


def plan_document(plan: Sequence[Planned], not_runnable: Sequence[str]) -> dict[str, Any]:
    """What `plan --json` prints."""
    cells = [
        {
            "cell": planned.cell.id,
            "action": planned.action,
            "reason": planned.reason,
            "selected": planned.selected,
            "digest": planned.digest,
            "reuse": planned.reuse.run if planned.reuse else None,
        }
        for planned in plan
    ]
    return {"schema": 1, "cells": cells, "not_runnable": list(not_runnable)}
