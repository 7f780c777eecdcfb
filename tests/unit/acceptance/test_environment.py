"""A receipt names the versions that ran."""

from pathlib import Path

import pytest
import torch

from lite.acceptance.receipt import environment


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("first", ["transformers", "megatron_core"])
def test_of_two_installed_versions_the_one_that_is_imported_is_named(first: str, tmp_path, monkeypatch) -> None:
    """As where a user's site folder and the system's both hold a package, spelt alike or not."""
    name = first.replace("_", "-")
    install(tmp_path / "system", name, "9.2")
    install(tmp_path / "user", first, "9.1")
    monkeypatch.syspath_prepend(tmp_path / "system")
    monkeypatch.syspath_prepend(tmp_path / "user")
    packages = environment(torch.device("cpu"), {})["packages"]
    assert {key: value for key, value in packages.items() if key.replace("_", "-") == name} == {name: "9.1"}
