"""Packed linear layers and embeddings alone, on an engine that holds their matrices in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.engine_slot import EngineSlot
from zipmoe.hf.packed_embedding import PackedEmbedding
from zipmoe.hf.packed_linear import PackedLinear
from zipmoe.hf.packed_module import pack_module


class MatrixEngine:
    """Serves dense matrices from a dict, tile by tile through one scratch buffer."""

    fused = None

    def __init__(self, matrices, tile_rows=None):
        self.matrices = matrices
        self.tile_rows = tile_rows
        self.decoded = []

    def dense_tiles(self, parameter):
        matrix = self.matrices[parameter]
        rows = self.tile_rows or len(matrix)
        scratch = torch.empty(rows, matrix.shape[1], dtype=matrix.dtype)
        for begin in range(0, len(matrix), rows):
            tile = scratch[: len(matrix) - begin]
            tile.copy_(matrix[begin : begin + rows])
            yield begin, begin + len(tile), tile

    def dense_matrix(self, parameter):
        self.decoded.append(parameter)
        return self.matrices[parameter].clone()

    def dense_rows(self, parameter, rows):
        return self.matrices[parameter][rows]


def pack(module, packed_class, tile_rows=None):
    """The module with its weight moved into an engine."""
    slot = EngineSlot()
    engine = MatrixEngine({"some.weight": module.weight.detach().to(torch.bfloat16).clone()}, tile_rows)
    slot.open(engine)
    pack_module(module, packed_class, slot, "some.weight")
    return engine


def linear(rows, columns, bias, dtype=torch.bfloat16, cls=nn.Linear):
    torch.manual_seed(rows + columns)
    module = cls(columns, rows, bias=bias)
    with torch.no_grad():
        module.weight.copy_(module.weight.to(torch.bfloat16))
    return module.to(dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize("shape", [(64,), (1, 64), (7, 64), (2, 5, 64), (1, 1, 64), (3, 2, 4, 64)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tile_is_one_linear_call(shape, bias, dtype):
    module = linear(48, 64, bias, dtype)
    inputs = torch.randn(*shape).to(dtype)
    expected = module(inputs)
    pack(module, PackedLinear)
    assert not isinstance(module._parameters.get("weight"), nn.Parameter)
    assert torch.equal(module(inputs), expected)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3072, 512), (5000, 2048)])
def test_tiles_of_1024_rows_equal_the_whole(tokens, bias, rows, columns):
    module = linear(rows, columns, bias)
    inputs = torch.randn(1, tokens, columns).to(torch.bfloat16)
    expected = module(inputs)
    pack(module, PackedLinear, tile_rows=1024)
    assert torch.equal(module(inputs), expected)


def test_metadata_does_not_decode():
    module = linear(48, 64, True)
    engine = pack(module, PackedLinear)
    weight = module.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((48, 64), torch.bfloat16, "cpu")
    assert (weight.size(0), weight.dim(), weight.ndim, weight.numel(), len(weight)) == (48, 2, 2, 48 * 64, 48)
    assert weight.element_size() == weight.itemsize == 2
    assert weight.is_floating_point()
    assert not weight.is_meta
    assert weight.nbytes == 48 * 64 * 2
    assert weight.is_contiguous()
    assert weight.stride() == (64, 1)
    assert isinstance(weight, nn.Parameter)
    assert "some.weight" in repr(weight)
    assert weight.data is weight
    assert module.get_parameter("weight").dtype == torch.bfloat16
    assert engine.decoded == []


def test_numbers_decode_once_for_each_weight_that_is_asked_for():
    module = linear(48, 64, False)
    expected = module.weight.detach().clone()
    engine = pack(module, PackedLinear)
    weight = module.weight
    assert torch.equal(weight, expected)
    assert torch.equal(weight.T, expected.T)
    assert torch.equal(torch.cat([weight, weight[:2]]), torch.cat([expected, expected[:2]]))
    assert weight[0, 0].item() == expected[0, 0].item()
    assert torch.equal(weight.float(), expected.float())
    assert engine.decoded == ["some.weight"]
    assert torch.equal(module.weight @ torch.eye(64, dtype=torch.bfloat16), expected)
    assert engine.decoded == ["some.weight"] * 2


@torch.no_grad()
def test_a_product_takes_the_kernel_that_the_parameter_took():
    """``matmul`` folds or does not fold its batch depending on whether the weight requires a gradient."""
    module = linear(128, 4, False, torch.float32)
    inputs = torch.randn(2, 9, 4).transpose(1, 2)
    expected = module.weight @ inputs
    pack(module, PackedLinear)
    assert torch.equal(module.weight @ inputs, expected)
    with torch.inference_mode():
        assert torch.equal(module.weight @ inputs, expected)


class Operations(TorchDispatchMode):
    """Records the kernels that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("tile_rows", [None, 16])
def test_the_last_positions_of_a_batch_are_one_product(tile_rows):
    """Without the gradient that a parameter requires, ``linear`` would copy the weight for each sequence."""
    module = linear(48, 64, False)
    inputs = torch.randn(5, 7, 64).to(torch.bfloat16)[:, -1:]
    expected = module(inputs)
    pack(module, PackedLinear, tile_rows)
    with Operations() as operations:
        output = module(inputs)
    assert torch.equal(output, expected)
    assert "aten::mm" in operations.names
    assert "aten::bmm" not in operations.names


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * torch.tensor(8.0).to(self.weight.dtype)


class NormalisedLinear(nn.Linear):
    def forward(self, input):
        return functional.linear(input, functional.normalize(self.weight), self.bias)


@torch.no_grad()
def test_families_classes_keep_their_own_forward():
    module = linear(48, 64, True, cls=NormalisedLinear)
    inputs = torch.randn(5, 64).to(torch.bfloat16)
    expected = module(inputs)
    pack(module, PackedLinear)
    assert isinstance(module, NormalisedLinear)
    assert torch.equal(module(inputs), expected)


@torch.no_grad()
@pytest.mark.parametrize("cls", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_decode_each_row_once(cls, dtype):
    torch.manual_seed(0)
    module = cls(100, 64, padding_idx=3)
    module.weight.copy_(module.weight.to(torch.bfloat16))
    module = module.to(dtype)
    ids = torch.tensor([[5, 3, 99], [5, 0, 5]])
    expected = module(ids)
    engine = pack(module, PackedEmbedding)
    asked = []
    engine.dense_rows = lambda parameter, rows: asked.append(rows.tolist()) or engine.matrices[parameter][rows]
    found = module(ids)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert asked == [[0, 3, 5, 99]]
    assert module(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 64)
    assert torch.equal(module(ids.to(torch.int32)), expected)
    for outside in (-1, 100):
        with pytest.raises(IndexError):
            module(torch.tensor([[outside]]))


@torch.no_grad()
@pytest.mark.parametrize("cls", [nn.Embedding, Scaled])
def test_rows_that_were_looked_up_ahead_are_not_read_again(cls):
    torch.manual_seed(0)
    module = cls(100, 64).to(torch.bfloat16)
    expected = module(torch.arange(100))
    engine = pack(module, PackedEmbedding)
    asked = []
    engine.dense_rows = lambda parameter, rows: asked.append(rows.tolist()) or engine.matrices[parameter][rows].clone()
    with torch.inference_mode():
        ahead = module.look_up_ahead([7, 3])
    assert torch.equal(ahead, engine.matrices[module._zipmoe_parameter][[7, 3]])
    found = module(torch.tensor([[7], [3]]))
    assert torch.equal(found, expected[[7, 3]].unsqueeze(1))
    assert asked == [[7, 3]]
    found.zero_()  # they are the caller's own
    assert torch.equal(ahead, engine.matrices[module._zipmoe_parameter][[7, 3]])
    assert torch.equal(module(torch.tensor([7, 3])), expected[[7, 3]])  # kept for one call
    module.look_up_ahead([7])
    assert torch.equal(module(torch.tensor([[8]])), expected[[8]].unsqueeze(0))  # another token came
    assert torch.equal(module(torch.tensor([[7]])), expected[[7]].unsqueeze(0))
    assert asked == [[7, 3], [3, 7], [7], [8], [7]]
    module.look_up_ahead([7])
    assert module.float()(torch.tensor([7])).dtype == torch.float32


def test_transformers_initialises_the_rest_of_a_packed_module_but_not_its_weight():
    """Families set the buffers of their embeddings (scales) in ``_init_weights``, also after loading."""
    module = linear(48, 64, True)
    engine = pack(module, PackedLinear)
    assert not getattr(module, "_is_hf_initialized", False)
    initialization.normal_(module.weight)
    initialization.zeros_(module.bias)
    assert torch.equal(module.bias, torch.zeros_like(module.bias))
    assert engine.decoded == []


def test_the_engine_must_be_open():
    module = linear(48, 64, False)
    pack_module(module, PackedLinear, EngineSlot(), "some.weight")
    assert module.weight.dtype == torch.bfloat16
    with pytest.raises(UnsupportedOperationError, match="loaded"):
        module(torch.zeros(1, 64, dtype=torch.bfloat16))
