"""The folder of matrix.toml and what stands in it: read once, at the edge."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from packaging.version import Version

from harness import __version__, models
from harness.cells import Cell, Selection
from harness.environments import environment_of
from harness.errors import ConfigurationError
from harness.expectations import Expectation, load_expectations
from harness.images import BuildOptions, Image, ca_bundle, image_for
from harness.locks import require_current, target_dockerfile, target_lock
from harness.needs import kept, unmet
from harness.plan import Facts, Planned, cell_facts, choose, decide, expand, without_idle_references
from harness.records import SCHEMA, Host, Record, Revision, history
from harness.spec import CONFIG_NAME, MatrixSpec, load_spec

SUITE_SYNTAX = (3, 10)  # the oldest Python a target may bring


@dataclass(frozen=True, kw_only=True)
class Project:
    """matrix.toml, its cells and expectations, and the folder they stand in.

    `python` stands for that of every target; `told` is the revision where the folder came without its repository.
    """

    root: Path
    spec: MatrixSpec
    cells: tuple[Cell, ...]
    expectations: tuple[Expectation, ...]
    python: str | None = None
    told: Revision | None = None

    @property
    def suite(self) -> Path:
        return self.root / self.spec.suite

    @property
    def results(self) -> Path:
        return self.root / self.spec.results

    @property
    def max_age(self) -> timedelta:
        return timedelta(days=self.spec.run.max_age_days)

    @property
    def revision(self) -> Revision:
        return self.told or revision(self.root)

    def python_of(self, target: str) -> str:
        return self.python or self.spec.targets[target].python


def load_project(config: Path | None, python: str | None = None) -> Project:
    """`python` (`3.12`) takes the place of every target's own. Raises ConfigurationError that names file and place."""
    if python is not None and not re.fullmatch(r"3\.\d{1,3}", python):
        raise ConfigurationError(f"--python {python!r} is no minor version of Python", "It looks like 3.12.")
    path = (config or find_config(Path.cwd())).resolve()
    spec = load_spec(path)
    cells = expand(spec)
    check_scenarios(path.parent / spec.suite, {cell.file for cell in cells})
    named = "expectations" in spec.model_fields_set
    expectations = load_expectations(path.parent / spec.expectations, cells, datetime.now(UTC).date(), required=named)
    if python is not None:
        cells = tuple(replace(cell, python=python) for cell in cells)
    return Project(root=path.parent, spec=spec, cells=cells, expectations=expectations, python=python)


def find_config(start: Path) -> Path:
    """matrix.toml in this folder or the nearest one above."""
    for folder in (start, *start.parents):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    raise ConfigurationError(
        f"there is no {CONFIG_NAME} in {start} or above it", "Change to the project's folder, or pass --config."
    )


def check_scenarios(suite: Path, files: Iterable[str]) -> None:
    """See that every scenario file is there and parses on the oldest Python of a target."""
    for name in sorted(files):
        path = suite / name
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=SUITE_SYNTAX)
        except FileNotFoundError as error:
            raise ConfigurationError(f"scenario file {path} does not exist", "matrix.toml names it.") from error
        except SyntaxError as error:
            raise ConfigurationError(
                f"{path}, line {error.lineno}: {error.msg}", "Scenarios have to parse on Python 3.10."
            ) from error
        except (UnicodeDecodeError, ValueError) as error:
            raise ConfigurationError(f"{path} is no Python source: {error}") from error


def build_options(project: Project, base: str | None = None, index_url: str | None = None) -> BuildOptions:
    """Build arguments: command line before matrix.toml; the CA bundle as the environment names it."""
    images = project.spec.images
    return BuildOptions(
        base=base or images.base,
        index_url=index_url or images.index_url,
        ca_bundle=ca_bundle(None, os.environ),
        docker_dir=project.root / "docker",
        timeout=images.timeout * project.spec.run.timeout_multiplier,
        revision=project.revision.commit,
    )


def images_for(
    project: Project, cells: Iterable[Cell], options: BuildOptions, backend: str
) -> dict[tuple[str, str], Image]:
    """The image, or for `local` the environment, of each target and device among the cells.

    Raises ConfigurationError for a missing file, for a Dockerfile that cannot be followed without Docker, and for a
    Python that is not the target's own where it cannot be another.
    """
    pairs = dict.fromkeys((cell.target, cell.device) for cell in cells)
    images = {pair: _image(project, *pair, options) for pair in pairs}
    _check_python(project, {target for target, _ in pairs}, backend)
    if backend != "local":
        return images
    return {pair: environment_of(image, project.python_of(pair[0]), options) for pair, image in images.items()}


def _check_python(project: Project, targets: Iterable[str], backend: str) -> None:
    if project.python is None:
        return
    if backend != "local":
        raise ConfigurationError("--python is for cells without a container", "An image's Python is its base's own.")
    for target in sorted(targets):
        own = project.spec.targets[target].python
        if Version(project.python) < Version(own):
            raise ConfigurationError(
                f"--python {project.python}: {target} needs {own} or later", "Its lock was resolved from there upwards."
            )


def _image(project: Project, target: str, device: str, options: BuildOptions) -> Image:
    own = project.spec.targets[target].on(device)
    dockerfile = project.root / target_dockerfile(target, device, own)
    lock = project.root / target_lock(target, device, own)
    for path in (dockerfile, lock):
        if not path.is_file():
            raise ConfigurationError(f"target {target} on {device}: {path} does not exist")
    require_current(project.spec, project.root, target, device)
    return image_for(target, device, dockerfile, lock, options, own.distribution)


def make_plan(
    project: Project,
    selection: Selection,
    profile: str | None,
    fresh: bool,
    options: BuildOptions,
    backend: str = "docker",
) -> tuple[Planned, ...]:
    """Choose the cells and decide about each. Reads files, starts nothing."""
    chosen = choose(project.spec, project.cells, selection, profile)
    earlier = history(project.results, datetime.now(UTC) - project.max_age)
    return without_idle_references(plan_cells(project, chosen, options, backend, earlier, fresh))


def plan_cells(
    project: Project,
    chosen: Sequence[tuple[Cell, bool]],
    options: BuildOptions,
    backend: str,
    earlier: Mapping[str, Sequence[Record]],
    fresh: bool,
) -> tuple[Planned, ...]:
    """Decide about each of the chosen cells, by the files as they are now and by earlier records."""
    cells = [cell for cell, _ in chosen]
    images = images_for(project, cells, options, backend)
    return decide(
        chosen,
        facts={cell.id: _facts(project, cell, images[cell.target, cell.device], backend) for cell in cells},
        earlier=earlier,
        now=datetime.now(UTC),
        max_age=project.max_age,
        fresh=fresh,
        unmet=unmet(project.spec, cells, kept(project.spec, project.suite, images)),
    )


def _facts(project: Project, cell: Cell, image: Image, backend: str) -> Facts:
    return cell_facts(
        cell,
        {
            "backend": backend,
            "image": image.tag,
            "suite": suite_sha256(project.suite, cell.file),
            "models": models.digest(),
            "device_class": f"{cell.device}/{platform.machine()}",
            "schema": str(SCHEMA),
        },
    )


def suite_sha256(suite: Path, scenario: str) -> str:
    """Over the scenario's own file and everything shared in the suite, but no other scenario."""
    shared = [path for path in suite.rglob("*.py") if not (path.parent == suite and path.name.startswith("test_"))]
    return tree_sha256(suite, [*shared, suite / scenario])


def tree_sha256(root: Path, files: Sequence[Path]) -> str:
    """sha256 over names and contents, whatever the order given."""
    total = hashlib.sha256()
    for path in sorted(set(files)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def revision(root: Path) -> Revision:
    """Version of the harness, and the commit of the project's folder where git knows one."""
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain") if commit else None
    return Revision(version=__version__, commit=commit, dirty=bool(status) if commit else None)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],  # noqa: S607 - the user's own git
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def host(engine: str) -> Host:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Host(machine=platform.machine(), cpus=os.cpu_count() or 1, memory=memory, engine=engine)
