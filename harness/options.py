"""Options that several verbs take, in the same words, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cells import Selection

Config = Annotated[Path | None, typer.Option("--config", help="matrix.toml; default: the nearest one upwards.")]
Selectors = Annotated[list[str] | None, typer.Argument(help="Globs on cell ids; `[` and `]` are literal.")]
Targets = Annotated[list[str] | None, typer.Option("--target", help="Glob on the target, as vllm-0.8.*; repeatable.")]
Devices = Annotated[list[str] | None, typer.Option("--device", help="cpu or cuda; default: run.device.")]
Scenarios = Annotated[list[str] | None, typer.Option("--scenario", help="Glob on the scenario; repeatable.")]
Profile = Annotated[str | None, typer.Option("--profile", help="A profile of matrix.toml; default: run.profile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Reuse no earlier record.")]


def selection(
    select: list[str] | None, target: list[str] | None, device: list[str] | None, scenario: list[str] | None
) -> Selection:
    return Selection(ids=select or (), targets=target or (), devices=device or (), scenarios=scenario or ())
