"""Packs: an attempt as one file, and what is made of it at home, where nothing in it is believed."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from harness import merged, packs
from harness.cells import slug
from harness.errors import ConfigurationError, NothingSelectedError
from harness.imports import import_packs
from harness.packs import RefusedError, pack, pack_new, unpack, zstd
from harness.project import Project, build_options
from harness.records import records_of
from harness.resume import rest_of
from harness.run import Outcome
from harness.share import VARIABLE
from harness.status import NOTRUN, Status
from tests import scripted
from tests.conftest import error
from tests.scripted import RefusingBackend, ScriptedBackend
from tests.test_merge import evidence, fails, said
from tests.test_run import go, go_with, make_project, project  # noqa: F401 - a fixture
from tests.test_shards import sharded


def away(outcome: Outcome) -> Path:
    """The run is on another machine."""
    node = outcome.folder.parent.parent.parent / "node"
    node.mkdir(exist_ok=True)
    return outcome.folder.rename(node / outcome.folder.name)


@pytest.fixture
def node(project: Project) -> Path:  # noqa: F811
    return away(go(project, ScriptedBackend(scripted.passes)))


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    return tmp_path / "outbox"


# --- packing ----------------------------------------------------------------------------------------------------------


def test_every_attempt_with_a_record_is_packed_once(node: Path, outbox: Path) -> None:
    made = pack_new(node, outbox)
    names = {f"{node.name}.{slug(cell)}.attempt-1.tar.zst" for cell in records_of(node)}
    assert {path.name for path in made} == {path.name for path in outbox.iterdir()} == names
    before = {path: path.stat().st_mtime_ns for path in made}
    assert pack_new(node, outbox) == ()
    made[0].unlink()
    assert pack_new(node, outbox) == (made[0],)
    assert {path: path.stat().st_mtime_ns for path in made[1:]} == {path: before[path] for path in made[1:]}


def test_the_same_files_make_the_same_bytes(node: Path, tmp_path: Path) -> None:
    one = {path.name: path.read_bytes() for path in pack_new(node, tmp_path / "a")}
    shutil.copytree(node, tmp_path / "b" / node.name)
    assert {path.name: path.read_bytes() for path in pack_new(tmp_path / "b" / node.name, tmp_path / "c")} == one


def test_what_was_cut_short_is_not_packed(node: Path, outbox: Path) -> None:
    (first, second, *_) = sorted(node.glob("cells/*/attempt-1"))
    (first / "record.json").unlink()
    (second / "record.json").write_text("{")
    assert len(pack_new(node, outbox)) == 2
    with pytest.raises(ConfigurationError, match="no record that can be read"):
        pack(node, first, outbox)
    assert len(list(outbox.iterdir())) == 2


def test_what_is_no_evidence_stays_behind(
    node: Path, outbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = min(node.glob("cells/*/attempt-1"))
    out = attempt / "out"
    os.mkfifo(out / "pipe")
    (out / "link").symlink_to("/etc/passwd")
    (out / "folder").symlink_to("/etc")
    (out / "bad\nname").write_text("x")
    (out / ("long" * 40)).write_text("kept")
    (out / "huge").write_bytes(b"x" * 40_001)
    monkeypatch.setattr(packs, "MAX_FILE", 40_000)
    monkeypatch.setattr("harness.evidence.MAX_FILE", 40_000)
    (tmp_path / "in").mkdir()
    done = unpack(pack(node, attempt, outbox), tmp_path / "in")
    names = {str(path.relative_to(done.attempt)) for path in done.attempt.rglob("*") if path.is_file()}
    assert {"record.json", "out/DONE", "out/events.jsonl", f"out/{'long' * 40}"} <= names
    assert not {name for name in names if "\n" in name or "/folder" in name}
    assert not names & {"out/pipe", "out/link", "out/huge"}


def test_a_pack_never_is_more_than_is_taken_at_home(
    node: Path, outbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = min(node.glob("cells/*/attempt-1"))
    for number in range(30):
        (attempt / "out" / f"x{number}").write_bytes(b"x" * 1_000)
    size = sum(path.stat().st_size for path in (node / "plan.json", attempt / "record.json"))
    monkeypatch.setattr(packs, "MAX_UNPACKED", size + 10_000)
    monkeypatch.setattr(packs, "MAX_MEMBERS", 8)
    unpack(pack(node, attempt, outbox), tmp_path / "in")


def test_a_full_disk_leaves_nothing(node: Path, outbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packs, "_write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        pack_new(node, outbox)
    assert str(outbox) in str(caught.value)
    assert list(outbox.iterdir()) == []


# --- importing --------------------------------------------------------------------------------------------------------


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".merge.lock"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"
    }


def test_a_run_comes_home(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    pack_new(node, outbox)
    done = import_packs(project, [outbox])
    assert (done.exit_code, done.refused, done.changed, done.packs) == (0, (), True, 4)
    assert done.outcome is not None
    assert done.outcome.matrix.green
    assert evidence(done.outcome.folder) == evidence(node)
    assert {(r.run, r.reused_from) for r in records_of(done.outcome.folder).values()} == {
        (done.outcome.folder.name, node.name)
    }
    targets = {path.name: path.read_bytes() for path in (node / "targets").iterdir()}
    assert {path.name: path.read_bytes() for path in (done.outcome.folder / "targets").iterdir()} == targets
    before = files_of(project.results)
    again = import_packs(project, [outbox])
    assert (again.changed, again.exit_code) == (False, 0)
    assert again.outcome is not None
    assert again.outcome.folder == done.outcome.folder
    assert files_of(project.results) == before


def test_what_says_something_else_of_the_same_attempt_is_not_there_already(
    project: Project,  # noqa: F811
    node: Path,
    outbox: Path,
) -> None:
    pack_new(node, outbox)
    first = import_packs(project, [outbox]).outcome
    assert first is not None
    path = min(first.folder.glob("cells/*/attempt-1/record.json"))
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "properties": {"engine.core": "V9"}}))
    again = import_packs(project, [outbox])
    assert again.changed
    assert again.outcome is not None
    assert again.outcome.folder != first.folder


def test_as_they_come(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    """The node vanished after two cells; the others come later, into the same run."""
    first = sorted(pack_new(node, outbox))[:2]
    begun = import_packs(project, first)
    assert begun.outcome is not None
    assert begun.exit_code == 5
    assert [s.status for s in begun.outcome.matrix.squares].count(NOTRUN) == 2
    folder = begun.outcome.folder
    whole = import_packs(project, [outbox], folder)
    assert whole.outcome is not None
    assert (whole.exit_code, whole.changed, whole.outcome.folder) == (0, True, folder)
    assert evidence(folder) == evidence(node)
    before = files_of(folder)
    again = import_packs(project, [outbox], folder)
    assert (again.changed, files_of(folder) == before) == (False, True)


def test_what_was_cut_short_goes_on_with_the_next(
    project: Project,  # noqa: F811
    node: Path,
    outbox: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *_ = pack_new(node, outbox)
    begun = import_packs(project, [first])
    assert begun.outcome is not None
    put = merged._put

    def once(made: Path, target: Path, old: Path) -> None:
        put(made, target, old)
        raise KeyboardInterrupt

    monkeypatch.setattr(merged, "_put", once)
    with pytest.raises(KeyboardInterrupt):
        import_packs(project, [outbox], begun.outcome.folder)
    assert len(records_of(begun.outcome.folder)) == 2
    monkeypatch.undo()
    done = import_packs(project, [outbox], begun.outcome.folder)
    assert (done.exit_code, done.changed, len(records_of(begun.outcome.folder))) == (0, True, 4)
    assert names_in(project.results) == {"runs"}


def test_one_at_a_time_and_what_a_killed_one_left_goes(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    pack_new(node, outbox)
    left = project.results / ".merge" / "packs"
    left.mkdir(parents=True)
    with FileLock(project.results / ".merge.lock"), pytest.raises(ConfigurationError, match="Wait for its end"):
        import_packs(project, [outbox])
    assert left.is_dir()
    assert import_packs(project, [outbox]).exit_code == 0
    assert names_in(project.results) == {"runs"}


def test_into_a_run_that_left_cells_elsewhere(project: Project, outbox: Path) -> None:  # noqa: F811
    node = away(sharded(project, ScriptedBackend(scripted.passes), "1/2"))
    pack_new(node, outbox)
    home = sharded(project, ScriptedBackend(scripted.passes), "2/2")
    done = import_packs(project, [outbox], home.folder)
    assert done.outcome is not None
    assert (done.exit_code, done.outcome.matrix.elsewhere, len(done.outcome.matrix.squares)) == (0, 0, 4)
    assert len(done.outcome.matrix.targets) == 2


def test_packs_of_two_runs_are_merged(project: Project, outbox: Path) -> None:  # noqa: F811
    for number in (1, 2):
        pack_new(away(sharded(project, ScriptedBackend(scripted.passes), f"{number}/2")), outbox)
    done = import_packs(project, [outbox])
    assert done.outcome is not None
    assert (done.exit_code, len(done.outcome.matrix.squares)) == (0, 4)


def test_a_later_attempt_counts_and_the_earlier_one_is_kept(project: Project, outbox: Path) -> None:  # noqa: F811
    run = sharded(project, RefusingBackend(1), "1/2").folder
    retried = next(r for r in records_of(run).values() if r.attempt == 2)
    node = run.rename(project.root / run.name)
    pack_new(node, outbox)
    name = f"{node.name}.{slug(retried.cell)}.attempt-"
    begun = import_packs(project, [outbox / f"{name}1.tar.zst"])
    assert begun.outcome is not None
    assert {s.status for s in begun.outcome.matrix.squares} == {Status.MISS, NOTRUN}
    done = import_packs(project, [outbox / f"{name}2.tar.zst"], begun.outcome.folder)
    assert done.outcome is not None
    square = next(s for s in done.outcome.matrix.squares if s.cell.id == retried.cell)
    assert square.status == Status.PASS
    assert sorted(path.name for path in done.outcome.folder.glob(f"cells/{slug(retried.cell)}/*")) == [
        "attempt-1", "attempt-2",
    ]  # fmt: skip


def test_an_imported_run_is_resumed(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    first = sorted(pack_new(node, outbox))[:3]
    done = import_packs(project, first)
    assert done.outcome is not None
    rest = rest_of(project, done.outcome.folder, build_options(project), "docker")
    assert len(rest.plan) == 1
    assert go_with(project, ScriptedBackend(scripted.passes), rest.plan, done.outcome.folder).exit_code == 0


def test_of_another_state_of_the_project_is_refused_on_resume(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    done = import_packs(project, sorted(pack_new(node, outbox))[:3])
    assert done.outcome is not None
    for path in project.suite.glob("test_*.py"):
        path.write_text("def test_b(): ...\n")
    with pytest.raises(ConfigurationError, match="what would run now is not what it planned"):
        rest_of(project, done.outcome.folder, build_options(project), "docker")


def test_runs_at_odds_are_not_written(project: Project, node: Path, outbox: Path) -> None:  # noqa: F811
    pack_new(node, outbox)
    home = go(project, ScriptedBackend(fails), fresh=True)
    before = files_of(project.results)
    with pytest.raises(ConfigurationError, match="different ends"):
        import_packs(project, [outbox], home.folder)
    with pytest.raises(ConfigurationError, match="is no run of"):
        import_packs(project, [outbox], node)
    assert files_of(project.results) == before


def test_no_pack(project: Project, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".x.tar.zst.77").write_text("being carried")
    with pytest.raises(NothingSelectedError, match="there is no pack"):
        import_packs(project, [tmp_path / "empty"])


# --- what is refused --------------------------------------------------------------------------------------------------


def members(path: Path) -> dict[str, bytes]:
    with zstd.ZstdFile(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]


Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, data: bytes = b"", **fields: Any) -> Entry:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive_of(entries: list[Entry], form: int = tarfile.GNU_FORMAT) -> bytes:
    return b"".join(
        info.tobuf(form, "utf-8", "surrogateescape") + data + b"\0" * (-len(data) % 512) for info, data in entries
    ) + b"\0" * (1024)


def packed(files: Mapping[str, bytes], *more: Entry) -> bytes:
    return zstd.compress(archive_of([*(entry(name, data) for name, data in files.items()), *more]))


@pytest.fixture(scope="module")
def run_in_packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The packs of a run, by name."""
    room = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(room / "leases"))  # it is made before what each test has of its own
        run = go(make_project(room, patch), ScriptedBackend(scripted.passes)).folder
    return {path.name: path.read_bytes() for path in pack_new(run, room / "outbox")}


@pytest.fixture
def good(run_in_packs: dict[str, bytes], outbox: Path) -> tuple[Path, dict[str, bytes]]:
    """The first of a run's packs, and what is in it."""
    outbox.mkdir()
    for name, data in run_in_packs.items():
        (outbox / name).write_bytes(data)
    path = outbox / min(run_in_packs)
    return path, members(path)


def refused(path: Path, data: bytes, tmp_path: Path) -> str:
    """Why; and that nothing was written but below the folder."""
    room = tmp_path / "room"
    path.write_bytes(data)
    before = files_of(tmp_path)
    with pytest.raises(RefusedError) as caught:
        unpack(path, room / "in")
    shutil.rmtree(room, ignore_errors=True)
    assert files_of(tmp_path) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


NAMES = [
    "/etc/x", "../x", "cells/../../x", "cells/./x", "cells//x", "x", "cells/x", "targets/a/b.json", "targets/x",
    "cells/a/attempt-1", "cells/a/attempt-0/x", "cells/a/attempt-x/y", "cells/a/attempt-1/../../../../x", "plan.json/",
    "cells/a/attempt-1/\x1b[31m", "cells/a/attempt-1/a\nb", "cells/a/attempt-1/\u202ex",
    "cells/a/attempt-1/" + "x" * 256, "cells/a/attempt-1" + "/x" * 600, "", ".", "cells/a/attempt-1/x/",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    assert (
        "is no name in a pack" in (why := refused(good[0], packed(good[1], entry(name, b"x")), tmp_path))
        or "too long" in why
    )


KINDS = {
    "a link": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "a hard link": {"type": tarfile.LNKTYPE, "linkname": "plan.json"},
    "a device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "a pipe": {"type": tarfile.FIFOTYPE},
    "a folder": {"type": tarfile.DIRTYPE},
    "a sparse file": {"type": tarfile.GNUTYPE_SPARSE},
    "a file as of old": {"type": tarfile.AREGTYPE},
    "an unknown kind": {"type": b"Z"},
    "a header of another format": {"type": tarfile.XHDTYPE},
    "a long link": {"type": tarfile.GNUTYPE_LONGLINK},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    name = next(name for name in good[1] if name.startswith("cells/")).rsplit("/", 1)[0] + "/strange"
    assert "no regular file" in refused(good[0], packed(good[1], entry(name, **KINDS[kind])), tmp_path)


def test_twice_and_below_each_other(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = good
    name = next(name for name in files if name.endswith("record.json"))
    assert "or there twice" in refused(path, packed(files, entry(name, files[name])), tmp_path)
    for nested in (entry(f"{name}/x"), entry(f"{name}/x/y")):
        assert "below another one" in refused(path, packed(files, nested), tmp_path)
    folder = name.rsplit("/", 1)[0] + "/out"
    assert "below another one" in refused(path, packed(files, entry(folder, b"x")), tmp_path)


def test_a_name_in_a_header_of_its_own(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = good
    kind = {"type": tarfile.GNUTYPE_LONGNAME}
    attempt = next(name for name in files if name.endswith("record.json")).rsplit("/", 1)[0]
    path.write_bytes(packed(files, entry("x", f"{attempt}/named\0".encode(), **kind), entry("cut", b"1")))
    assert (unpack(path, tmp_path / "ok").attempt / "named").read_bytes() == b"1"
    for data in (b"../x\0", b"/x", b"\0", b"\xff\xfe"):
        assert refused(path, packed(files, entry("x", data, **kind), entry("cut", b"1")), tmp_path)
    assert "ends after a name" in refused(path, packed(files, entry("x", b"plan.json", **kind)), tmp_path)
    assert "too long" in refused(path, packed(files, entry("x", b"x" * 3_000, **kind)), tmp_path)
    twice = entry("x", b"a", **kind)
    assert "no regular file" in refused(path, packed(files, twice, twice, entry("cut")), tmp_path)


def test_a_bomb_is_refused_before_it_is_unpacked(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = good
    name = next(name for name in files if name.startswith("cells/")).rsplit("/", 1)[0] + "/bomb"
    header = entry(name)[0]
    for size in (packs.MAX_FILE + 1, 1 << 40, 1 << 62, -1, -(1 << 62)):
        header.size = size
        raw = archive_of([entry(n, d) for n, d in files.items()])[:-1024] + header.tobuf(tarfile.GNU_FORMAT)
        assert "too large" in refused(path, zstd.compress(raw), tmp_path)


def test_caps(good: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files = good
    whole = path.read_bytes()
    monkeypatch.setattr(packs, "MAX_MEMBERS", len(files) - 1)
    assert "more than" in refused(path, whole, tmp_path)
    monkeypatch.setattr(packs, "MAX_MEMBERS", len(files))
    monkeypatch.setattr(packs, "MAX_UNPACKED", sum(map(len, files.values())) - 1)
    assert "too large" in refused(path, whole, tmp_path)
    monkeypatch.setattr(packs, "MAX_PACKED", len(whole) - 1)
    assert "larger than" in refused(path, whole, tmp_path)


@pytest.mark.parametrize("name", ["a folder", "a pipe", "nothing"])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.zst"
    {"a folder": path.mkdir, "a pipe": lambda: os.mkfifo(path), "nothing": lambda: None}[name]()
    with pytest.raises(RefusedError):
        unpack(path, tmp_path / "in")


def test_damage(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = good
    whole, raw = path.read_bytes(), archive_of([entry(name, data) for name, data in files.items()])
    others = {
        "empty": b"",
        "no zstd": raw,
        "cut": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "something behind": whole + b"x",
        "another archive behind": whole + whole,
        "no end": zstd.compress(raw[:-1024]),
        "text behind": zstd.compress(raw + b"\0" * 600 + b"x"),
        "zeros without end": zstd.compress(raw + b"\0" * (1 << 20)),
        "a checksum": zstd.compress(bytes([raw[0] ^ 1]) + raw[1:]),
        "text": zstd.compress(b"x" * 5_000),
    }
    for what, data in others.items():
        assert refused(path, data, tmp_path), what


Change = Callable[[dict[str, bytes]], dict[str, bytes]]


def of(end: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the JSON in the file whose name ends so."""

    def changed(files: dict[str, bytes]) -> dict[str, bytes]:
        name = next(name for name in files if name.endswith(end))
        value = json.loads(files[name])
        change(value)
        return {**files, name: json.dumps(value).encode()}

    return changed


def without(end: str) -> Change:
    return lambda files: {name: data for name, data in files.items() if not name.endswith(end)}


def moved(start: str, to: str) -> Change:
    return lambda files: {name.replace(start, to): data for name, data in files.items()}


def own(plan: dict[str, Any], files: str = "cold_start") -> dict[str, Any]:
    return next(e for e in plan["cells"] if e["cell"]["scenario"] == files and e["cell"]["target"] == "vllm-0.10.0")


STRANGE: dict[str, tuple[Change, str]] = {
    "no plan": (without("plan.json"), "plan.json is missing"),
    "no record": (without("record.json"), "record is missing"),
    "no attempt": (lambda files: {"plan.json": files["plan.json"]}, "0 attempts"),
    "another place": (moved("attempt-1", "attempt-2"), "of another run, cell or attempt"),
    "another cell's place": (moved("cold_start", "hot_start"), "of another run, cell or attempt"),
    "another run": (of("record.json", lambda r: r.update(run="other")), "of another run"),
    "an earlier run's name": (of("plan.json", lambda p: p.update(run="../x")), "names no run"),
    "a record of another digest": (of("record.json", lambda r: r.update(digest="0" * 64)), "not of what its plan"),
    "a plan of another digest": (of("plan.json", lambda p: own(p).update(digest="0" * 64)), "not that of its facts"),
    "other facts": (of("plan.json", lambda p: own(p)["facts"].update(image="x")), "not that of its facts"),
    "a cell twice": (of("plan.json", lambda p: p["cells"].append(p["cells"][0])), "a cell twice"),
    "a cell that was elsewhere": (of("plan.json", lambda p: own(p).update(action="elsewhere")), "not of what its plan"),
    "a cell of no plan": (of("plan.json", lambda p: p["cells"].remove(own(p))), "not of what its plan"),
    "another vLLM": (of("record.json", lambda r: r.update(vllm="9.9")), "not of what its plan"),
    "a PASS over a FAIL": (of("record.json", lambda r: r["checks"][0].update(status="FAIL")), "record is missing or"),
    "no checks": (of("record.json", lambda r: r.update(checks=[])), "record is missing or broken"),
    "infinity": (of("plan.json", lambda p: own(p)["cell"]["deadlines"].update(total=float("inf"))), "plan.json is"),
    "another target's": (of("@cpu.json", lambda t: t.update(target="vllm-0.8.5")), "of its target is broken"),
    "another target's file": (moved("targets/vllm-0.10.0", "targets/vllm-0.8.5"), "of its target is broken"),
    "a broken target": (of("@cpu.json", lambda t: t.update(x=1)), "of its target is broken"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_does_not_hold_together(what: str, good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    change, why = STRANGE[what]
    assert why in refused(good[0], packed(change(good[1])), tmp_path)


def test_two_attempts_in_one(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, files = good
    name = next(name for name in files if name.endswith("record.json"))
    data = packed(files, entry(name.replace("attempt-1", "attempt-2"), files[name]))
    assert "2 attempts" in refused(path, data, tmp_path)


def test_without_what_is_known_of_its_target(good: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    good[0].write_bytes(packed(without("@cpu.json")(good[1])))
    assert unpack(good[0], tmp_path / "in").record.status is Status.PASS


def test_one_refused_pack_stops_no_other(project: Project, good: tuple[Path, dict[str, bytes]], outbox: Path) -> None:  # noqa: F811
    path, files = good
    plan = of("plan.json", lambda p: p.update(created="2026-01-01T00:00:00Z"))(files)
    (outbox / "a\x1b[31m.tar.zst").write_bytes(b"x")
    path.write_bytes(packed(plan))
    done = import_packs(project, [outbox])
    assert [done.exit_code, len(done.refused)] == [2, 2]
    assert str(done.refused[1]).startswith("refused a.tar.zst: it is damaged")
    assert "its plan is not that of the other packs" in done.refused[0].reason
    assert done.outcome is not None
    assert [s.status for s in done.outcome.matrix.squares].count(Status.PASS) == 3
    assert names_in(project.results) == {"runs"}


def test_the_same_attempt_told_in_two_ways(project: Project, good: tuple[Path, dict[str, bytes]], outbox: Path) -> None:  # noqa: F811
    other = of("record.json", lambda r: r.update(reason="because"))(good[1])
    (outbox / "z.tar.zst").write_bytes(packed(other))
    done = import_packs(project, [outbox])
    assert [(r.path.name, "the same attempt otherwise" in r.reason) for r in done.refused] == [("z.tar.zst", True)]


def test_what_a_cell_left_counts_whatever_its_record_says(
    project: Project,  # noqa: F811
    good: tuple[Path, dict[str, bytes]],
) -> None:
    """A PASS over a check that raised is the FAIL that it was."""
    path, files = good
    events = next(name for name in files if name.endswith("out/events.jsonl"))
    lines = [json.loads(line) for line in files[events].splitlines()]
    ends = [line for line in lines if line["type"] == "end"]
    ends[0] |= {"outcome": "raised", "error": error("OracleError", reason="ids-differ"), "reason": "ids-differ"}
    done = next(name for name in files if name.endswith("out/DONE"))
    failed = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    path.write_bytes(packed({**files, events: failed, done: files[done].replace(b'"exit": 0', b'"exit": 1')}))
    outcome = import_packs(project, [path])
    cell = json.loads(files[next(name for name in files if name.endswith("record.json"))])["cell"]
    assert outcome.corrected == (f"{cell}: FAIL by what its cell left; its record said PASS",)
    assert outcome.outcome is not None
    (record,) = records_of(outcome.outcome.folder).values()
    assert (record.status, record.checks[0].id) == (Status.FAIL, ends[0]["check"])
    again = import_packs(project, [path])
    assert (again.changed, again.corrected) == (False, outcome.corrected)


def test_a_pass_without_its_evidence_is_refused(project: Project, good: tuple[Path, dict[str, bytes]]) -> None:  # noqa: F811
    path, files = good
    for gone in ("out/DONE", "out/events.jsonl"):
        path.write_bytes(packed({name: data for name, data in files.items() if not name.endswith(gone)}))
        done = import_packs(project, [path])
        assert (done.exit_code, done.outcome) == (2, None)
        assert done.refused[0].reason.startswith("its record says PASS, and its ")


def test_what_judges_a_record_is_packed_before_what_may_not_fit(
    node: Path, outbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = min(node.glob("cells/*/attempt-1"))
    for number in range(30):
        (attempt / "out" / f"A{number}").write_bytes(b"x")
    monkeypatch.setattr(packs, "MAX_MEMBERS", 6)
    (tmp_path / "in").mkdir()
    done = unpack(pack(node, attempt, outbox), tmp_path / "in")
    assert {"DONE", "events.jsonl"} <= {path.name for path in (done.attempt / "out").iterdir()}


def test_nothing_is_left_where_all_are_refused(project: Project, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "x.tar.zst").write_bytes(b"x")
    done = import_packs(project, [tmp_path / "x.tar.zst", tmp_path / "y.tar.zst"])
    assert (done.exit_code, done.outcome, len(done.refused)) == (2, None, 2)
    assert not (project.results / "runs").exists()
    assert names_in(project.results) == set()


def test_the_command(project: Project, good: tuple[Path, dict[str, bytes]], outbox: Path) -> None:  # noqa: F811
    """What is said, and the exit code; the run can be shown like any other."""
    half = said(project, "bundle", "import", str(good[0]))
    assert (half.exit_code, half.output.count(": no record in any of the runs")) == (5, 3)
    (run,) = (project.results / "runs").iterdir()
    assert f"1 of 1 pack taken into run {run.name}" in half.output
    (outbox / "z.tar.zst").write_bytes(b"x")
    whole = said(project, "bundle", "import", str(outbox), "--into", run.name)
    assert (whole.exit_code, "refused z.tar.zst: it is damaged" in whole.output) == (2, True)
    assert "4 of 5 packs taken into run" in whole.output
    (outbox / "z.tar.zst").unlink()
    again = said(project, "bundle", "import", str(outbox), "--into", run.name)
    assert (again.exit_code, f"4 of 4 packs taken; run {run.name} has all of it already" in again.output) == (0, True)
