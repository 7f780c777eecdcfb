"""mamba_ssm reads at its import whether it may time its kernels; vLLM has set a variable that would let it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite.errors import InputError
from lite.primitive.kernels.vjp.mamba import scan_backward

SSD_COMBINED = """
import os
class Kernel:  # one configuration only in the mode that mamba_ssm takes for deterministic
    configs = [1] if os.environ.get("MAMBA_DETERMINISTIC") == "1" and os.environ.get("TRITON_CACHE_AUTOTUNING") != "1" else [1, 2]
_chunk_scan_chunk_state_bwd_dx_kernel, _mamba_chunk_scan_combined_bwd = Kernel, "the backward"
"""


@pytest.fixture
def mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "ssd_combined.py").write_text(SSD_COMBINED)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "0")
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("mamba_ssm")
def test_the_backward_is_imported_with_one_configuration_of_each_kernel() -> None:
    assert scan_backward() == "the backward"
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1", "vLLM's own kernels keep theirs"


@pytest.mark.usefixtures("mamba_ssm")
def test_an_import_before_ours_is_refused() -> None:
    import mamba_ssm.ops.triton.ssd_combined  # noqa: F401

    with pytest.raises(InputError, match="outside its deterministic mode"):
        scan_backward()
