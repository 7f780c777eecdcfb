"""The one door through which a model's weights are written: loading, syncing, and deploying an optimizer's step."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lite.errors import InputError
from lite.model.protocol import ModelBundle
from lite.primitive.ckpt.hf_weights import LoadReport, deployed, export_weights, fingerprint, load_weights
from lite.primitive.ckpt.spec import Part
from lite.primitive.compare import bits


class DeployedWeights:
    """A model's parameters as inference reads them, with the version of the policy that they are.

    Each write stamps a version. While one is under way, or after one that failed, the version is None and `require` raises: half a
    policy cannot be run.
    """

    def __init__(self, bundle: ModelBundle):
        self.bundle = bundle
        self.parameters: dict[str, Tensor] = dict(bundle.module.named_parameters())
        self.version: int | None = None
        self.bytes_changed = 0  # by the latest deploy

    def require(self) -> int:
        if self.version is None:
            raise InputError("weights", "are not whole (never loaded, or a load failed)", "load or sync them first")
        return self.version

    @torch.no_grad()
    def load(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, where: object, masters: Mapping[str, Tensor] | None = None
    ) -> LoadReport:
        """Every checkpoint tensor, complete or an InputError. masters get the value before it is rounded to the model dtype."""
        self.version = None

        def write(part: Part, tensor: Tensor) -> Tensor:
            if masters is not None and part.native in masters:
                part.of(masters[part.native]).copy_(tensor)
            return part.of(self.parameters[part.native]).copy_(tensor)

        return self._load(self.parameters, tensors, version, where, write)

    def _load(
        self,
        shapes: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        where: object,
        write: Callable[[Part, Tensor], Tensor],
    ) -> LoadReport:
        b = self.bundle
        report = load_weights(b.weights, b.config, b.layers, shapes, tensors, write, where)
        self.version = version
        return report

    @torch.no_grad()
    def deploy(self, masters: Mapping[str, Tensor], version: int) -> None:
        """Rounds the masters into the image; counts in bytes_changed how many bytes of it changed."""
        self.version = None
        self.bytes_changed = 0
        for name, master in masters.items():
            parameter = self.parameters[name]
            image = master.to(parameter.device).to(parameter.dtype)  # rounded there, wherever the master rests
            self.bytes_changed += differing_bytes(parameter, image)
            parameter.copy_(image)
        self.version = version

    def stamp(self) -> tuple[int | None, int]:
        """Another one after every write, through this door or past it."""
        return self.version, sum(p._version for p in self.parameters.values())

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of the deployed image."""
        b = self.bundle
        return export_weights(b.weights, b.config, b.layers, self.parameters)

    def fingerprint(self) -> str:
        return fingerprint(deployed(self.export()))


def differing_bytes(a: Tensor, b: Tensor) -> int:
    return int((bits(a.reshape(-1)).view(torch.uint8) != bits(b.reshape(-1)).view(torch.uint8)).sum())
