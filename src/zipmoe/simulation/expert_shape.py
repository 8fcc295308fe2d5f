"""Shapes of experts: traces hold ids only, and bytes are what the machine works on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources

from zipmoe import _native
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.layer_costs import LayerCosts, TensorBytes
from zipmoe.planning.partition import CodecCapabilities, ExpertBytes


@dataclass(frozen=True)
class ExpertShape:
    """The tensors of one expert."""

    tensors: tuple[tuple[int, int], ...]
    """(rows, columns) of each."""

    def __post_init__(self) -> None:
        if not self.tensors or any(rows < 1 or columns < 1 for rows, columns in self.tensors):
            raise InvalidArgumentError(f"{self.tensors} are not the shapes of an expert's tensors")

    @property
    def weights(self) -> int:
        """Of all tensors."""
        return sum(rows * columns for rows, columns in self.tensors)

    @classmethod
    def of_model(cls, model: str) -> ExpertShape:
        """The shape of a model known by name (``expert_shapes.json``).

        Raises:
            InvalidArgumentError: the model is not among them.
        """
        shapes = _known_shapes()
        if model not in shapes:
            raise InvalidArgumentError(
                f"the shapes of the experts of {model!r} are not known",
                hint="give them, e.g. --expert-shape 1408x2048,1408x2048,2048x1408",
            )
        return cls(tuple((int(rows), int(columns)) for rows, columns in shapes[model]["tensors"]))

    @classmethod
    def parse(cls, text: str) -> ExpertShape:
        """The shape written as ``1408x2048,1408x2048,2048x1408``.

        Raises:
            InvalidArgumentError: it is not written like that.
        """
        try:
            tensors = [tuple(int(n) for n in part.lower().split("x")) for part in text.split(",")]
            return cls(tuple((rows, columns) for rows, columns in tensors))
        except ValueError:
            raise InvalidArgumentError(
                f"--expert-shape {text!r} is not a list of matrices", hint="rows x columns, e.g. 1024x2048,2048x1024"
            ) from None


@dataclass(frozen=True)
class ExpertOnDevice:
    """An expert packed with a codec, on a machine: what the replay and the planner need to know."""

    bytes: ExpertBytes
    costs: LayerCosts
    capabilities: CodecCapabilities

    @classmethod
    def of(cls, shape: ExpertShape, device: DeviceProfile, codec: str, shards: int) -> ExpertOnDevice:
        """Bytes and costs of an expert.

        Args:
            shape: its tensors.
            device: the machine, which also knows rho of the codec.
            codec: a name of ``_native.codecs()``, or an operating point of one that the machine was measured with, such
                as ``zstd huf``.
            shards: K of separable codecs.

        Raises:
            InvalidArgumentError: the codec does not exist, or the machine was not measured with it.
        """
        known = {codec.name: codec for codec in _native.codecs()}
        name = codec.split(" ", 1)[0]
        if name not in known:
            raise InvalidArgumentError(
                f"codec {codec!r} does not exist", hint=f"choose one of {', '.join(sorted(known))}"
            )
        if codec not in device.exponent_ratio:
            raise InvalidArgumentError(
                f"device {device.name!r} was not measured with codec {codec!r}",
                hint=f"it knows {', '.join(sorted(device.exponent_ratio))}",
            )
        capabilities = CodecCapabilities(known[name].separable, known[name].fused)
        ratio = device.exponent_ratio[codec]
        separable = not capabilities.whole
        tensors = []
        for rows, columns in shape.tensors:
            weights = rows * columns
            exponent = math.ceil(weights * ratio)
            tensors.append(
                TensorBytes(weights, exponent, weights) if separable else TensorBytes(weights, exponent + weights, 0)
            )
        costs = LayerCosts.from_profile(device, codec, capabilities, tensors, shards)
        total = ExpertBytes(
            full=2 * shape.weights,
            exponent=sum(tensor.exponent for tensor in tensors),
            sign_mantissa=sum(tensor.sign_mantissa for tensor in tensors),
        )
        return cls(total, costs, capabilities)


def _known_shapes() -> dict[str, dict[str, list[tuple[int, int]]]]:
    text = (resources.files("zipmoe.simulation") / "expert_shapes.json").read_text(encoding="utf-8")
    shapes: dict[str, dict[str, list[tuple[int, int]]]] = json.loads(text)
    return shapes
