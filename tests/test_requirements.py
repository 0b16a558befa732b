"""The requirement files: what is declared is pinned, with hashes, and the pins fit the declared ranges."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("requirements.lock", "requirements-dev.lock")
BY_VERSION_ALONE = {"torch", "triton"}


def read_requirements(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    texts = (line.partition(" --hash")[0].strip() for line in lines if line and not line.startswith("#"))
    return [Requirement(text) for text in texts]


def locked_versions(name: str) -> dict[str, set[str]]:
    """Versions by package; a package may have several, for different versions of Python."""
    versions: dict[str, set[str]] = {}
    for requirement in read_requirements(name):
        [pin] = requirement.specifier
        assert pin.operator == "=="
        versions.setdefault(canonicalize_name(requirement.name), set()).add(pin.version)
    return versions


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_hashes_and_no_address(lock):
    content = (ROOT / lock).read_text()
    entries = content.replace("\\\n", " ").splitlines()
    assert len(entries) > 30
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)] == []
    assert "://" not in content


@pytest.mark.parametrize("lock", LOCKS)
def test_declared_requirements_are_locked(lock):
    """After a change of pyproject.toml or requirements-dev.txt: make lock."""
    locked = locked_versions(lock)
    declared = [Requirement(text) for text in PROJECT["dependencies"]]
    if lock == "requirements-dev.lock":
        declared += read_requirements("requirements-dev.txt")
    for requirement in declared:
        name = canonicalize_name(requirement.name)
        if name not in BY_VERSION_ALONE:
            assert name in locked, f"{name}: run make lock"
            assert all(requirement.specifier.contains(version) for version in locked[name]), f"{name}: run make lock"
    assert locked.keys().isdisjoint(BY_VERSION_ALONE)


def test_both_locks_have_the_same_versions():
    development = locked_versions("requirements-dev.lock")
    assert {name: development.get(name) for name in locked_versions("requirements.lock")} == locked_versions(
        "requirements.lock"
    )


def test_torch_is_pinned_by_version():
    requirements = read_requirements("requirements-torch.txt")
    assert {requirement.name for requirement in requirements} == BY_VERSION_ALONE
    assert all(str(requirement.specifier).startswith("==") for requirement in requirements)


def test_stated_versions_of_python_agree():
    """In pyproject.toml and in the README."""
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    assert f"Python {classifiers[0]} to {classifiers[-1]}" in (ROOT / "README.md").read_text()
