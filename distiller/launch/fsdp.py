"""FSDP's settings: read from the launch file, checked, and passed to Accelerate's plugin.

Accelerate drops some of them without an error (FSDP1's sharding strategy; FSDP itself on a CPU-only machine) and would
compute wrong numbers with others (flat parameters, inputs in bfloat16), so they are read and set here.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from distiller.distributed.process import world_size
from distiller.errors import UserError
from distiller.launch.values import choice, whole_number

PREFIX, PARALLELISM = "FSDP_", "ACCELERATE_USE_PARALLELISM_CONFIG"
CLASSES, SIZE, NO_WRAP = FSDP_AUTO_WRAP_POLICY
HYBRID = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
"""Strategies that shard inside a machine and replicate over machines -> the equivalent on one machine."""
PREFETCHES = (*FSDP_BACKWARD_PREFETCH, "1", "2")
YES, NO = ("true", "1", "yes"), ("false", "0", "no", "none")


@final
@dataclass(frozen=True)
class FsdpLaunch:
    """The FSDP settings of a launch file.

    Attributes:
        version: 1 (flat parameters) or 2 (one DTensor a parameter).
        strategy: torch's name; FSDP2 has the first two, FULL_SHARD frees gathered weights between forward and backward.
        offloads: weights, gradients and optimizer state lie in host memory.
        recomputes: activations are recomputed in the backward pass, as with the recipe's train.gradient_checkpointing.
        policy: which modules are gathered as one unit: TRANSFORMER_BASED_WRAP (`class_names`, or the student's blocks
            where there are none), SIZE_BASED_WRAP (more than `min_num_params` parameters), NO_WRAP (all at once).
        uses_flat: FSDP1 is asked to show the optimizer flat parameters.
        loads_on_one_rank: one rank is asked to load the student for all.
        num_replicas: groups of ranks, each of which holds all shards.
    """

    version: int
    strategy: str
    offloads: bool
    recomputes: bool
    policy: str
    class_names: tuple[str, ...]
    min_num_params: int
    uses_flat: bool
    loads_on_one_rank: bool
    num_replicas: int = 1

    @property
    def engine(self) -> str:
        """The engine's name in summary.json."""
        return f"fsdp{self.version}"

    @property
    def shards_weights(self) -> bool:
        """Whether a GPU holds only its shard of the weights, except while a unit runs."""
        return self.strategy in ("FULL_SHARD", "HYBRID_SHARD")


def launched_fsdp(on_cpu: bool, local_world_size: int, notices: list[str]) -> FsdpLaunch | None:
    """The FSDP settings that `accelerate launch` gave to this process; None without FSDP. Raises UserError.

    Where FSDP would shard nothing it is turned off, with a notice; None then too.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    found = parse_fsdp({name.removeprefix(PREFIX): v for name, v in os.environ.items() if name.startswith(PREFIX)})
    if os.environ.get(PARALLELISM, "false").lower() == "true":
        replicas = _num_replicas({name.lower(): value for name, value in os.environ.items()}, world_size())
        found = replace(found, num_replicas=replicas)
        if on_cpu or replicas == 1:
            # One replica needs no device mesh, and without a GPU Accelerate finds no FSDP that could have one.
            os.environ[PARALLELISM] = "false"
    if reason := _reason_unsharded(found, local_world_size):
        check_sharding(replace(found, strategy="NO_SHARD"), world_size())
        notices.append(f"FSDP1 is not used: {reason}")
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        return None
    if found.strategy in HYBRID:
        if local_world_size == world_size():
            alike = HYBRID[found.strategy]
            notices.append(f"{found.strategy} on one machine is {alike}")
            return replace(found, strategy=alike)
        if on_cpu or local_world_size != torch.cuda.device_count():
            raise UserError(
                f"{found.strategy} on several machines needs one process for each of a machine's GPUs, and "
                f"{local_world_size} run on this one; start as many, or use FULL_SHARD"
            )
        return replace(found, num_replicas=world_size() // local_world_size)
    return found


def _reason_unsharded(fsdp: FsdpLaunch, local_world_size: int) -> str | None:
    """Why FSDP1 would shard nothing; None where it would shard."""
    if fsdp.version == 1 and world_size() == 1:
        return "one process has nobody to share with"
    if fsdp.strategy == "NO_SHARD":
        return "NO_SHARD is what DDP does, which runs instead"
    if fsdp.strategy in HYBRID and local_world_size == 1:
        return f"{fsdp.strategy} with one process a machine is what DDP does, which runs instead"
    return None


def fsdp_of_file(file: Path, num_processes: int) -> FsdpLaunch | None:
    """The FSDP settings of a launch file, read without a launcher; None without FSDP. Raises UserError."""
    config: Any = load_config_from_file(str(file))
    if config.distributed_type != DistributedType.FSDP:
        return None
    values = {str(key).removeprefix("fsdp_"): value for key, value in config.fsdp_config.items()}
    values["transformer_cls_to_wrap"] = values.pop("transformer_layer_cls_to_wrap", None)
    replicas = _num_replicas(config.parallelism_config, num_processes) if config.parallelism_config else 1
    found = parse_fsdp({key.upper(): str(value) for key, value in values.items() if value is not None})
    return replace(found, num_replicas=replicas)


def parse_fsdp(values: Mapping[str, str]) -> FsdpLaunch:
    """Reads the keys of `fsdp_config` (upper case, without `fsdp_`), with Accelerate's defaults. Raises UserError."""
    version = values.get("VERSION", "1")
    if version not in ("1", "2"):
        raise UserError(f"fsdp_version is {version}; choose 1 or 2")
    for key, reason in {
        "IGNORED_MODULES": "nobody would average the gradients of what FSDP ignores",
        "ACTIVATION_CHECKPOINTING_OFFLOAD": "activations are recomputed, not stored in host memory",
    }.items():
        if values.get(key, "none").lower() not in NO:
            raise UserError(f"fsdp_{key.lower()} is not supported: {reason}; remove it from the launch file")
    policy = values.get("AUTO_WRAP_POLICY", NO_WRAP).upper()
    if policy not in FSDP_AUTO_WRAP_POLICY:
        raise UserError(f"fsdp_auto_wrap_policy is {policy}; choose one of {', '.join(FSDP_AUTO_WRAP_POLICY)}")
    # Accelerate's plugin reads these two itself.
    _flag(values, "FORWARD_PREFETCH")
    choice(values.get("BACKWARD_PREFETCH", "NO_PREFETCH").upper(), "fsdp_backward_prefetch", PREFETCHES)
    names = values.get("TRANSFORMER_CLS_TO_WRAP", "")
    return FsdpLaunch(
        version=int(version),
        strategy=_strategy(values, int(version)),
        offloads=_flag(values, "OFFLOAD_PARAMS"),
        recomputes=_flag(values, "ACTIVATION_CHECKPOINTING"),
        policy=policy,
        class_names=tuple(filter(None, (name.strip() for name in names.split(",")))),
        min_num_params=whole_number(values.get("MIN_NUM_PARAMS", "1e8"), "fsdp_min_num_params"),
        uses_flat=version == "1" and not _flag(values, "USE_ORIG_PARAMS", "true"),
        loads_on_one_rank=_flag(values, "CPU_RAM_EFFICIENT_LOADING", "true"),
    )


def _strategy(values: Mapping[str, str], version: int) -> str:
    reshard = values.get("RESHARD_AFTER_FORWARD", "true")
    if version == 2:
        if reshard.lower() not in (*YES, *NO):
            raise UserError(f"fsdp_reshard_after_forward is {reshard} and fsdp_version 2 takes true or false")
        return "FULL_SHARD" if reshard.lower() in YES else "SHARD_GRAD_OP"
    # Accelerate prefers the older key, and its launcher always sets it to FULL_SHARD, whatever the newer one is.
    older = values.get("SHARDING_STRATEGY", "FULL_SHARD").upper()
    older = FSDP_SHARDING_STRATEGY[int(older) - 1] if older in ("1", "2", "3", "4", "5") else older
    newer = older if reshard.lower() in (*YES, "none") else reshard.upper()
    for name in (older, newer):
        if name not in FSDP_SHARDING_STRATEGY:
            raise UserError(
                f"FSDP1's sharding strategy is {name}; choose one of {', '.join(FSDP_SHARDING_STRATEGY)} in "
                "fsdp_reshard_after_forward"
            )
    if newer != older and older != "FULL_SHARD":
        raise UserError(
            f"fsdp_sharding_strategy is {older} and fsdp_reshard_after_forward {newer}; remove one of the two"
        )
    return newer


def _num_replicas(values: Mapping[str, Any], num_processes: int) -> int:
    sizes = {
        name: whole_number(values.get(key, 1), key, least=1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
        for key in (f"parallelism_config_{name}_size",)
    }
    for name, kind in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
        if sizes[name] > 1:
            raise UserError(
                f"parallelism_config_{name}_size is {sizes[name]} and {kind} parallelism is not supported; set it to 1"
            )
    product = sizes["dp_replicate"] * sizes["dp_shard"]
    if product != num_processes:
        raise UserError(
            f"parallelism_config_dp_replicate_size {sizes['dp_replicate']} x dp_shard_size {sizes['dp_shard']} is "
            f"{product} and the run has {num_processes} processes; make them equal, or remove parallelism_config"
        )
    if sizes["dp_shard"] == 1 and num_processes > 1:
        raise UserError("parallelism_config_dp_shard_size is 1, so FSDP would shard nothing; raise it, or use ddp.yaml")
    return sizes["dp_replicate"]


def _flag(values: Mapping[str, str], key: str, default: str = "false") -> bool:
    given = values.get(key, default).lower()
    if given not in (*YES, *NO):
        raise UserError(f"fsdp_{key.lower()} is {given}; choose true or false")
    return given in YES


def check_sharding(fsdp: FsdpLaunch, num_processes: int) -> None:
    """Refuses (UserError) an offload of what FSDP1 does not shard, and so does not offload."""
    if fsdp.offloads and (fsdp.strategy == "NO_SHARD" or (fsdp.version == 1 and num_processes == 1)):
        raise UserError(
            "fsdp_offload_params is true and FSDP1 shards nothing here (NO_SHARD, one process, or HYBRID_SHARD with "
            "one a machine), so nothing would be offloaded; use fsdp_version: 2, or remove it"
        )


def check_offload(fsdp: FsdpLaunch, precisions: tuple[str, ...]) -> None:
    """Refuses (UserError) an offload in fp16, whose loss is scaled; fp16 without a GPU is refused elsewhere."""
    if fsdp.offloads and precisions == ("fp16",):
        raise UserError(
            "fsdp_offload_params is true and train.mixed_precision is fp16: torch's loss scaler reads its scale on the "
            "host before it has arrived there; use bf16 or no, or remove the offload"
        )


def wrapped_classes(fsdp: FsdpLaunch, skeleton: nn.Module, block_classes: tuple[str, ...]) -> tuple[str, ...]:
    """The module classes that become FSDP units. UserError where the student lacks a class that the file names.

    FSDP2 shards by class only: Accelerate's rule by size makes units of ModuleLists, which torch refuses. By size, the
    classes are those of the student's modules that are large enough. FSDP1 uses torch's rule by size.

    Args:
        skeleton: the student, on any device.
        block_classes: the classes of its repeated blocks.
    """
    if any(parameter.ndim == 0 for parameter in skeleton.parameters()) and fsdp.version == 2:
        raise UserError("the student has a parameter without dimensions, which FSDP2 cannot shard; use fsdp_version: 1")
    if fsdp.policy == NO_WRAP:
        return ()
    inner = [module for module in skeleton.modules() if module is not skeleton]
    if fsdp.policy == SIZE:
        units = [module for module in inner if not isinstance(module, nn.ModuleList | nn.ModuleDict)]
        large = (module for module in units if _size(module) > fsdp.min_num_params)
        return tuple(sorted({type(module).__name__ for module in large}))
    names = {type(module).__name__ for module in inner}
    for name in fsdp.class_names:
        if name not in names:
            raise UserError(
                f"fsdp_transformer_layer_cls_to_wrap names {name}, which the student does not have; its blocks are of "
                f"class {', '.join(block_classes)}"
            )
    return fsdp.class_names or block_classes


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fsdp_plugin(
    fsdp: FsdpLaunch, classes: tuple[str, ...], precision: str, on_cpu: bool, notices: list[str]
) -> FullyShardedDataParallelPlugin:
    """Accelerate's plugin for it; `classes` are those of `wrapped_classes`.

    In bfloat16 and float16 the forward runs under autocast, as with DDP: FSDP would cast all inputs, among them
    timesteps and rotary embeddings. FSDP2 gathers weights in that precision and accumulates gradients in float32; FSDP1
    would accumulate micro-batches in the lower precision, so it gathers float32.
    """
    check_offload(fsdp, (precision,))
    if fsdp.uses_flat:
        notices.append(
            "fsdp_use_orig_params is true whatever the launch file says: flat parameters would be decayed alike, "
            "matrices and vectors"
        )
    if fsdp.loads_on_one_rank:
        notices.append(
            "fsdp_cpu_ram_efficient_loading has nothing to load: every rank builds the student from the seed"
        )
    if fsdp.policy != NO_WRAP and not classes:
        notices.append(
            f"no module of the student has more than {fsdp.min_num_params} parameters (fsdp_min_num_params): all of it "
            "is gathered at once"
        )
    if fsdp.offloads and on_cpu:
        notices.append("fsdp_offload_params changes nothing without a GPU: everything is in host memory")
    # Passed as an argument it would cause a deprecation warning on every rank.
    os.environ[f"{PREFIX}SHARDING_STRATEGY"] = fsdp.strategy
    compute_dtype = None if precision == "no" else {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if fsdp.version == 2:
        # Modules often return a view, to which FSDP2 attaches its hooks; no output is changed in place here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mixed = MixedPrecisionPolicy(compute_dtype, torch.float32 if compute_dtype else None, cast_forward_inputs=False)
        # torch page-locks by default, which needs a GPU.
        offload: Any = CPUOffloadPolicy(pin_memory=False) if fsdp.offloads and on_cpu else fsdp.offloads
    else:
        mixed = MixedPrecision(cast_root_forward_inputs=False)
        offload = fsdp.offloads and not on_cpu
    policy = NO_WRAP if not classes else SIZE if fsdp.policy == SIZE and fsdp.version == 1 else CLASSES
    min_num_params = fsdp.min_num_params
    if policy == NO_WRAP and fsdp.strategy in HYBRID:
        # FSDP1 makes the machines' groups only with a wrap policy. No module is as large as this one asks for.
        policy, min_num_params = SIZE, sys.maxsize
    try:
        return FullyShardedDataParallelPlugin(
            fsdp_version=fsdp.version,
            reshard_after_forward=fsdp.shards_weights if fsdp.version == 2 else None,
            auto_wrap_policy=policy,  # type: ignore[arg-type]
            transformer_cls_names_to_wrap=list(classes),
            min_num_params=min_num_params,
            mixed_precision_policy=mixed,  # type: ignore[arg-type]
            cpu_offload=offload,
            state_dict_type="SHARDED_STATE_DICT",
            use_orig_params=True if fsdp.version == 1 else None,
            sync_module_states=False if fsdp.version == 1 else None,
            # This also keeps transformers from loading the text encoder on one rank and leaving it empty on others.
            cpu_ram_efficient_loading=False,
            # The student does it itself: Accelerate's would rename its modules.
            activation_checkpointing=False,
            activation_checkpointing_offload=False,
        )
    except (ValueError, KeyError, ImportError) as error:
        raise UserError(f"the launch file's FSDP settings are refused: {' '.join(str(error).split())}") from error


def shard_on_cpu(accelerator: Accelerator, fsdp: FsdpLaunch, plugin: FullyShardedDataParallelPlugin) -> None:
    """Turns FSDP on over gloo. Accelerate makes these assignments itself, but only where it has found a GPU."""
    state: Any = accelerator.state
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if fsdp.num_replicas > 1:
        state.parallelism_config = ParallelismConfig(
            dp_replicate_size=fsdp.num_replicas, dp_shard_size=accelerator.num_processes // fsdp.num_replicas
        )
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
