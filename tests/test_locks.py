"""Locks: what matrix.toml asks for, and what uv makes of it from an index of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from harness.cli import app
from harness.errors import BuildError, ConfigurationError, NothingSelectedError
from harness.locks import (
    changes_of,
    differences,
    is_current,
    pinned,
    questions,
    questions_of,
    require_current,
    resolve,
    target_dockerfile,
)
from harness.recipes import Install, steps
from harness.spec import CONFIG_NAME, MatrixSpec, load_spec
from tests.conftest import ROOT
from tests.wheelhouse import Upload, index

SPEC = """
schema = 1
[locks]
grace_days = 10
tools = ["tool>=1"]
[changes.no_gpu]
drop = ["gpu-lib"]
reason = "never called"
[changes.gone]
take = ["grammar==2"]
reason = "1 is gone"
[changes.undeclared]
add = ["extra"]
reason = "imported and not declared"
[stacks.heavy]
requires = ["torch==2.0"]
changes = ["no_gpu"]
[targets.new]
vllm = "0.7"
python = "3.11"
released = 2025-02-20
[targets.new.devices.cpu]
distribution = "engine==0.7.3"
stack = "heavy"
changes = ["gone", "undeclared"]
[targets.old]
vllm = "0.6"
python = "3.11"
released = 2025-02-20
[targets.old.devices.cpu]
distribution = "engine==0.6"
stack = "heavy"
build = ["builder"]
later = { engine = 2025-09-01 }
[scenarios.cold_start]
[profiles.quick]
select = ["*"]
"""

UPLOADS = (
    Upload(
        "engine", "0.7.3", "2025-02-20", ("torch==2.0+cpu", "grammar==1", "extra-less", "squatted ; python_version<'3'")
    ),
    Upload("engine", "0.7.4", "2025-02-21"),
    Upload("engine", "0.6", "2025-08-01", ("extra-less",)),  # uploaded long after its release
    Upload("torch", "2.0", "2025-01-01", ("gpu-lib", "light")),
    Upload("light", "1", "2025-01-01"),
    Upload("gpu-lib", "1", "2025-01-01"),
    Upload("grammar", "2", "2025-03-01"),
    Upload("extra", "1", "2025-03-01"),
    Upload("extra-less", "1", "2025-03-01"),
    Upload("extra-less", "2", "2025-03-04"),  # later than release and grace
    Upload("tool", "1", "2025-01-01"),
    Upload("builder", "3", "2025-01-01"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_text(SPEC)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "test_cold_start.py").write_text('"""Does it?"""\n')
    return tmp_path


@pytest.fixture
def spec(root: Path) -> MatrixSpec:
    return load_spec(root / CONFIG_NAME)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with index(UPLOADS) as found:
        yield found


def test_a_lock_is_cut_after_the_release_and_holds_the_stack(spec: MatrixSpec, address: str) -> None:
    stack, own = questions(spec, "new", "cpu")
    assert own.cutoff == date(2025, 3, 2)
    assert pinned(resolve(stack, address)) == {"torch": "2.0"}
    text = resolve(own, address)
    assert pinned(text) == {
        "engine": "0.7.3",
        "torch": "2.0",  # not 2.0+cpu, which this index does not have
        "light": "1",
        "grammar": "2",
        "extra": "1",
        "extra-less": "1",  # 2 came after the cut-off
        "tool": "1",
    }
    assert text.count("--hash=sha256:") == len(pinned(text))
    assert is_current(text, own) and not is_current(text, stack)


def test_what_is_built_is_left_to_a_lock_of_its_own(spec: MatrixSpec, address: str) -> None:
    _, own, tools, source = (resolve(question, address) for question in questions(spec, "old", "cpu"))
    assert pinned(own) == {"extra-less": "1", "tool": "1"}
    assert pinned(tools) == {"builder": "3", "torch": "2.0", "light": "1"}
    assert pinned(source) == {"engine": "0.6"}
    names = [question.path.name for question in questions(spec, "old", "cpu")]
    assert names == ["heavy.lock", "cpu.lock", "cpu-build.lock", "cpu-source.lock"]


def test_nothing_is_built_to_find_out_what_it_asks_for(spec: MatrixSpec, tmp_path: Path) -> None:
    del tmp_path
    squatted = Upload("grammar", "2", "2025-01-01", sdist=True)
    others = [upload for upload in UPLOADS if upload.name != "grammar"]
    with index([*others, squatted]) as address, pytest.raises(BuildError) as caught:
        resolve(questions(spec, "new", "cpu")[1], address)
    assert "no usable wheels" in caught.value.log_tail
    assert "docker/new/cpu.lock" in str(caught.value)


def test_a_torch_of_another_index_is_a_stack_of_its_own(root: Path, address: str) -> None:
    with index([Upload("torch", "2.0+cpu", "2025-01-01", ("light",))]) as other:
        text = SPEC.replace('requires = ["torch==2.0"]', f'requires = ["torch==2.0+cpu"]\nindex = "{other}"')
        (root / CONFIG_NAME).write_text(text)
        stack, own = questions(load_spec(root / CONFIG_NAME), "new", "cpu")
        assert pinned(resolve(stack, address)) == {"torch": "2.0+cpu"}
        lock = resolve(own, address)
    assert pinned(lock)["torch"] == "2.0+cpu"
    assert f"\n--extra-index-url {other}\n" in lock


def test_the_verb_writes_checks_and_says_what_changed(root: Path, address: str) -> None:
    def lock(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(
            app, ["lock", *words, "--index-url", address, "--config", str(root / CONFIG_NAME)], catch_exceptions=False
        )
        return done.exit_code, done.output

    assert lock("new", "--check") == (1, "docker/shared/heavy.lock: is missing\ndocker/new/cpu.lock: is missing\n")
    assert not (root / "docker").exists()
    assert lock("new")[0] == 0
    assert lock("new", "--check")[0] == 0
    path = root / "docker/new/cpu.lock"
    path.write_text(path.read_text().replace("grammar==2", "grammar==1"))
    assert lock("new", "--check") == (
        1,
        "docker/shared/heavy.lock: as it was\ndocker/new/cpu.lock: resolves otherwise\n  grammar 1 → 2\n",
    )
    (root / CONFIG_NAME).write_text(SPEC.replace('tools = ["tool>=1"]', "tools = []"))
    code, said = lock("n*", "--check")
    assert code == 1 and "docker/new/cpu.lock: matrix.toml says something else\n" in said and "  tool 1 → –\n" in said


def test_a_lock_left_behind_by_matrix_toml_is_no_lock(root: Path, spec: MatrixSpec, address: str) -> None:
    for question in questions(spec, "new", "cpu"):
        (root / question.path).parent.mkdir(parents=True, exist_ok=True)
        (root / question.path).write_text(resolve(question, address))
    require_current(spec, root, "new", "cpu")
    for old, new in (
        ("grace_days = 10", "grace_days = 11"),
        ('"torch==2.0"', '"torch==2.1"'),
        ('drop = ["gpu-lib"]', 'drop = ["gpu-lib2"]'),
    ):
        (root / CONFIG_NAME).write_text(SPEC.replace(old, new))
        with pytest.raises(ConfigurationError, match="vllm-matrix lock new"):
            require_current(load_spec(root / CONFIG_NAME), root, "new", "cpu")
    # a reason is for readers: it makes no lock old
    (root / CONFIG_NAME).write_text(SPEC.replace("never called", "never, ever called"))
    require_current(load_spec(root / CONFIG_NAME), root, "new", "cpu")
    (root / "docker/shared/heavy.lock").unlink()
    with pytest.raises(ConfigurationError, match="does not exist"):
        require_current(spec, root, "new", "cpu")


def test_selectors(spec: MatrixSpec) -> None:
    assert len(questions_of(spec, ["*"], ["*"])) == 5  # the stack's lock once
    with pytest.raises(NothingSelectedError, match="old"):
        questions_of(spec, ["nex"], ["*"])


def test_differences_show_versions_markers_and_files() -> None:
    old = "a==1 ; python_version < '3.12' \\\n    --hash=sha256:11\nb==1 \\\n    --hash=sha256:22\n    # via x\n"
    assert differences(old, old.replace("# via x", "# via y")) == ()
    assert differences(old, old.replace("'3.12'", "'3.13'")) == (
        'a 1 ; python_version < "3.12" → 1 ; python_version < "3.13"',
    )
    assert differences(old, old.replace("22", "33")) == ("the same versions with other files (hashes)",)
    assert differences("<<<<<<< a merge\n" + old, old) == ("what was there could not be read as a lock",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('requires = ["torch==2.0"]', 'requires = ["torch>=2.0"]', "must name one version exactly"),
        ('stack = "heavy"\nbuild', 'stack = "heavyy"\nbuild', "did you mean 'heavy'"),
        ('changes = ["gone", "undeclared"]', 'changes = ["gome"]', "did you mean 'gone'"),
        ('distribution = "engine==0.6"', 'distribution = "engine==0.7.3"', "not of the release line 0.6"),
        ('add = ["extra"]\n', "", "changes nothing"),
        ('reason = "1 is gone"', 'reason = ""', "changes.gone.reason"),
        ("[scenarios.cold_start]", '[scenarios.cold_start]\nneeds = { "mode=x" = ["y"] }', "no such name 'mode=x'"),
    ],
)
def test_faults_in_matrix_toml(root: Path, old: str, new: str, said: str) -> None:
    assert old in SPEC
    (root / CONFIG_NAME).write_text(SPEC.replace(old, new))
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load_spec(root / CONFIG_NAME)


def test_a_target_without_its_day_cannot_be_locked(root: Path) -> None:
    (root / CONFIG_NAME).write_text(SPEC.replace("released = 2025-02-20", "", 1))
    with pytest.raises(ConfigurationError, match=r"targets\.new has no `released`"):
        questions(load_spec(root / CONFIG_NAME), "new", "cpu")


# --- the project's own locks -----------------------------------------------------------------------------------------

OWN = load_spec(ROOT / CONFIG_NAME)
PAIRS = [(name, device) for name, target in OWN.targets.items() for device in target.devices]


@pytest.mark.parametrize(("target", "device"), PAIRS)
def test_our_locks_are_as_matrix_toml_says(target: str, device: str) -> None:
    for question in questions(OWN, target, device):
        assert is_current((ROOT / question.path).read_text(), question), f"vllm-matrix lock {target}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docker").rglob("*.lock")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_our_locks_hold_no_squatted_name_and_only_hashed_files(path: Path) -> None:
    text = path.read_text()
    dropped = {name for change in OWN.changes.values() for name in change.drop}
    found = set(pinned(text))
    assert "pyairports" not in found
    if "cuda" not in path.stem:
        assert not found & {canonicalize_name(name) for name in dropped if name.startswith("nvidia-")}
    blocks = re.split(r"\n(?=[a-z0-9])", text[text.index("==") - 60 :])
    assert all("--hash=sha256:" in block for block in blocks if "==" in block)
    assert "://" not in text  # no address: the index is the user's choice


@pytest.mark.parametrize("target", [target for target, device in PAIRS if device == "cuda"])
def test_a_target_on_cuda_is_two_locks_and_all_of_its_libraries_are_in_the_shared_one(target: str) -> None:
    own = OWN.targets[target].on("cuda")
    stack, lock = questions(OWN, target, "cuda")
    dockerfile = ROOT / target_dockerfile(target, "cuda", own)
    assert dockerfile.name == "Dockerfile.cuda"
    assert steps(dockerfile, ROOT / "docker") == (Install(ROOT / stack.path), Install(ROOT / lock.path))
    shared, whole = (pinned((ROOT / question.path).read_text()) for question in (stack, lock))
    libraries = {name for name in whole if name.startswith("nvidia-") and name.endswith("-cu12")}
    assert {"torch", "torchvision", "triton", *libraries} <= set(shared) <= set(whole)
    assert not own.build and not {"no_cuda_libraries", "no_cuda_extras"} & {n for n, _ in changes_of(OWN, own)}


def test_a_device_has_a_dockerfile_of_its_own_unless_it_names_one(spec: MatrixSpec) -> None:
    own = spec.targets["new"].on("cpu")
    assert target_dockerfile("new", "cpu", own) == Path("docker/new/Dockerfile")
    assert target_dockerfile("new", "cuda", own) == Path("docker/new/Dockerfile.cuda")
    named = own.model_copy(update={"dockerfile": "docker/mine"})
    assert target_dockerfile("new", "cuda", named) == Path("docker/mine")
