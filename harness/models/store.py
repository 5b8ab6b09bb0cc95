"""Checkpoints on disk: made once, compared with the committed checksums, replaced a variant at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from harness.errors import ConfigurationError, InfrastructureError
from harness.models.config import config_files
from harness.models.spec import MODELS, ModelSpec, Variant
from harness.models.tokenizer import tokenizer_files
from harness.models.weights import serialize

CHECKSUMS = Path(__file__).with_name("checksums.json")
REMAKE = "Run `vllm-matrix models` to make them again."


def variant_files(spec: ModelSpec, variant: Variant) -> dict[str, bytes]:
    """Every file of one checkpoint, by name: a pure function of the source."""
    documents = config_files(spec) | tokenizer_files(with_vision=spec.vision is not None)
    files = {name: _encode(content) for name, content in documents.items()}
    return files | {"model.safetensors": serialize(spec, variant)}


def checksums() -> dict[str, str]:
    """The committed SHA-256 of every file, by path relative to the root."""
    files: dict[str, str] = json.loads(CHECKSUMS.read_text(encoding="utf-8"))["files"]
    return files


def digest() -> str:
    """One hex digest for all checkpoints: changes if and only if a byte of a model does."""
    lines = "".join(f"{sha}  {path}\n" for path, sha in sorted(checksums().items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def default_root() -> Path:
    """Where models live unless told otherwise; another digest is another folder."""
    from platformdirs import user_cache_path

    return user_cache_path("vllm-matrix") / f"models-{digest()[:12]}"


def generate(root: Path) -> dict[str, str]:
    """Makes what is missing or damaged under `root`, and returns the checksums of all files.

    Does nothing where everything is there already. Safe to call from several processes at once. Nothing outside the
    folders `<model>/<variant>` is touched.

    Raises:
        InfrastructureError: the disk refuses, or this machine computes other bytes than were committed.
    """
    if any(_damage(root, path) for path in _variant_paths()):
        try:
            _generate_locked(root)
        except OSError as error:
            message = f"cannot write the models to {root}: {error}"
            raise InfrastructureError(message, "Choose another folder.") from error
    return checksums()


def verify(root: Path) -> None:
    """Compares every file under `root` with the committed checksums.

    Raises:
        ConfigurationError: there are no models at `root`.
        InfrastructureError: a file is missing, changed, or not one of ours; the message names it.
    """
    if not any((root / path).is_dir() for path in _variant_paths()):
        raise ConfigurationError(f"no models in {root}", "Run `vllm-matrix models`, or correct the path.")
    for path in _variant_paths():
        if damage := _damage(root, path):
            raise InfrastructureError(damage, REMAKE)


def write_checksums() -> None:
    """Recomputes checksums.json. For the maintainer, after a change of the models that is meant."""
    files = {
        f"{spec.name}/{variant.name}/{name}": hashlib.sha256(data).hexdigest()
        for spec in MODELS
        for variant in spec.variants
        for name, data in variant_files(spec, variant).items()
    }
    CHECKSUMS.write_bytes(_encode({"schema": 1, "files": dict(sorted(files.items()))}))


def _generate_locked(root: Path) -> None:
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        for spec in MODELS:
            for variant in spec.variants:
                path = f"{spec.name}/{variant.name}"
                if _damage(root, path):  # looked at again: another process may have been faster
                    _replace(root / path, _checked(path, variant_files(spec, variant)))


def _checked(path: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """The files as they are, if they are what was committed."""
    expected = checksums()
    for name, data in files.items():
        if expected.get(f"{path}/{name}") != hashlib.sha256(data).hexdigest():
            raise InfrastructureError(
                f"{path}/{name} comes out with other bytes than the committed checksum",
                "If the models were changed on purpose, run `python -m harness.models --write-checksums`; "
                "otherwise please report it with the versions of Python and numpy.",
            )
    return files


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Puts a complete folder in place of whatever is there: a reader sees the old one, none, or the new one."""
    fresh, stale = (folder.with_name(f".{folder.name}.{state}") for state in ("fresh", "stale"))
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, data in files.items():
        (fresh / name).write_bytes(data)
    if folder.exists():
        folder.replace(stale)
    fresh.replace(folder)
    shutil.rmtree(stale, ignore_errors=True)


def _variant_paths() -> list[str]:
    return [f"{spec.name}/{variant.name}" for spec in MODELS for variant in spec.variants]


def _damage(root: Path, path: str) -> str | None:
    """What is wrong with the folder of one variant, in words, or None."""
    folder = root / path
    if not folder.is_dir():
        return f"{folder} is missing"
    expected = {Path(name).name: sha for name, sha in checksums().items() if name.startswith(f"{path}/")}
    for name, sha in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if hashlib.sha256(file.read_bytes()).hexdigest() != sha:
            return f"{file} does not match its checksum"
    # An engine loads every *.safetensors it finds, so a stray file is damage as well.
    strays = sorted(file.name for file in folder.iterdir() if file.name not in expected)
    return f"{folder / strays[0]} is not part of the model" if strays else None


def _encode(content: dict[str, Any] | str) -> bytes:
    """Text as UTF-8 with plain line ends, JSON in one fixed layout."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=True) + "\n"
    return text.encode()
