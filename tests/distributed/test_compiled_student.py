"""A compiled student under FSDP2 recomputes its activations as it does uncompiled."""

from __future__ import annotations

import pytest
import torch
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from distiller.launch.block_compilation import compile_blocks
from distiller.tasks.activation_checkpointing import enable_checkpointing
from distiller.training.student_compilation import blocks_of
from tests import toy_causal_lm
from tests.distributed.ranks import on_ranks


def kept_bytes(recomputes: bool, compiles: bool) -> tuple[int, list[float]]:
    """Bytes that a forward pass keeps for the backward pass, and the gradients' norms."""
    PartialState(cpu=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toy_causal_lm.llama_config(num_hidden_layers=3)).train()
    if recomputes:
        enable_checkpointing(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if compiles:
        compiler = torch.compile
        torch.compile = lambda function, mode, **options: compiler(function, backend="aot_eager", **options)  # type: ignore[assignment]
        compile_blocks(blocks_of(model, ("LlamaDecoderLayer",)), "default")
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.arange(64).reshape(4, 16) % toy_causal_lm.VOCABULARY
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids).logits.float().square().mean()
    loss.backward()
    norms = [parameter.grad.full_tensor().norm().item() for parameter in model.parameters()]  # type: ignore[union-attr]
    return sum(kept.values()), norms


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_student_keeps_no_more_than_an_uncompiled_one():
    plain, gradients = on_ranks(2, kept_bytes, False, False)[0]
    recomputed, _ = on_ranks(2, kept_bytes, True, False)[0]
    compiled, compiled_gradients = on_ranks(2, kept_bytes, True, True)[0]
    assert recomputed < 0.6 * plain
    assert compiled < 0.6 * plain
    assert compiled_gradients == pytest.approx(gradients, rel=1e-4)
