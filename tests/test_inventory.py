"""The inventory of images: what the engine says, by the project's tags."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests
from rich.console import Console

from harness import inventory
from harness.errors import InfrastructureError
from harness.images import Image
from harness.inventory import Row, row_of, rows
from harness.project import Project, build_options, images_for, load_project
from harness.views.images import table, totals
from tests.conftest import ROOT


def image(target: str) -> Image:
    return Image(
        target=target, device="cpu", dockerfile=Path("D"), lock=Path("l"), inputs=(), tag=f"m/{target}:1", base_tag="b"
    )


def said(target: str, size: int = 5_000_000_000, **more: Any) -> dict[str, Mapping[str, Any]]:
    facts = {"Id": f"sha256:{target}", "Size": size, "SharedSize": 3_000_000_000, "Created": 1_700_000_000, **more}
    return {f"m/{target}:1": facts}


THERE = row_of(image("a"), said("a"))
MISSING = row_of(image("b"), said("a"))


def test_a_row_is_what_the_engine_says() -> None:
    assert (
        Row(
            target="a",
            device="cpu",
            tag="m/a:1",
            id="sha256:a",
            bytes=5_000_000_000,
            unique=2_000_000_000,
            shared=3_000_000_000,
            created=datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        )
        == THERE
    )
    assert THERE.built


def test_an_image_that_is_not_there_has_a_row_too() -> None:
    assert Row(target="b", device="cpu", tag="m/b:1") == MISSING
    assert not MISSING.built


def test_an_engine_that_has_not_counted_what_is_shared_says_nothing_of_it() -> None:
    row = row_of(image("a"), said("a", SharedSize=-1))
    assert (row.bytes, row.unique, row.shared) == (5_000_000_000, None, None)


def test_table_and_totals() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table([THERE, MISSING]))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines == [
        ["target", "image", "size", "unique", "shared", "made"],
        ["a@cpu", "m/a:1", "5.00", "GB", "2.00", "GB", "3.00", "GB", "2023-11-14", "22:13", "UTC"],
        ["b@cpu", "m/b:1", "–", "–", "–", "not", "yet"],
    ]
    assert totals([THERE, MISSING]) == "1 of 2 images are there; 2.00 GB are in one of them only"


class Engine:
    """As much of the SDK's client as this asks. `answer` may be an exception."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.closed = answer, False

    def df(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def project() -> Project:
    return load_project(ROOT / "matrix.toml")


def test_every_target_and_device_of_the_project_has_a_row(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    options = build_options(project)
    images = list(images_for(project, project.cells, options, "docker").values())
    there = [{**said("x")["m/x:1"], "RepoTags": ["other:1", images[-1].tag]}, {"Id": "sha256:y", "RepoTags": None}]
    engine = Engine({"Images": there})
    monkeypatch.setattr(inventory, "connect", lambda: engine)
    found = rows(project, options)
    named = [(name, device) for name, target in project.spec.targets.items() for device in target.devices]
    assert [(row.target, row.device) for row in found] == named
    assert [row.built for row in found] == [False] * (len(named) - 1) + [True]
    assert engine.closed


def test_an_engine_without_images(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "connect", lambda: Engine({"Images": None}))
    assert not any(row.built for row in rows(project, build_options(project)))


def test_an_engine_that_says_it_otherwise_has_no_images_for_us(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From API 1.53 on images stand elsewhere in the answer: that is not the same as none."""
    monkeypatch.setattr(inventory, "connect", lambda: Engine({"ImageUsage": {}}))
    with pytest.raises(InfrastructureError, match=r"API 1\.53"):
        rows(project, build_options(project))


def test_an_engine_that_does_not_answer_is_one_clear_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(requests.ConnectionError("gone"))
    monkeypatch.setattr(inventory, "connect", lambda: engine)
    with pytest.raises(InfrastructureError, match="does not say which images it has: gone"):
        rows(project, build_options(project))
    assert engine.closed
