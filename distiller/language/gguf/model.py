"""Converts a GGUF file (llama.cpp's format) into a transformers folder, once, in two keyed stages.

Config and tokenizer are converted first, so that a recipe can be checked against them; the weights are converted when
they are needed.
"""

# Names that the libraries import lazily, or from C, without exporting them in their stubs.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.gguf import read_gguf_metadata

from distiller.errors import RunError, UserError
from distiller.language.gguf.metadata import apply_metadata
from distiller.language.gguf.rope import FACTOR_TENSORS
from distiller.language.gguf.tensors import check_tensors, has_own_output, tensors_of
from distiller.language.gguf.tokenizer import apply_tokenizer_metadata
from distiller.storage.stage_folders import StageFolders
from distiller.storage.stages import Stage, digest_files

FORMAT = 3
"""Version of the conversion; a part of the stages' keys."""

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes in which `exact_dtype` tries to hold weights, in this order."""


@final
class GgufModel:
    """A GGUF file of a causal language model.

    Attributes:
        description: the folder with config.json and the tokenizer's files.
    """

    def __init__(self, file: Path, stages_dir: Path | StageFolders) -> None:
        """Converts config and tokenizer unless a run has done so, under a file lock. Reads the file for its digest.

        Does not communicate.

        Args:
            file: the .gguf file.
            stages_dir: where the results are kept.

        Raises:
            UserError: the package gguf is missing, or the file cannot be read or converted.
        """
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"{file} needs the package gguf to be read; pip install gguf")
        if not file.is_file():
            raise UserError(f"{file} does not exist; give a .gguf file")
        self._file, self._stages_dir = file, stages_dir
        try:
            digest = digest_files([file])
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); copy it again") from error
        self._key = {
            "format": FORMAT,
            "file": digest,
            "transformers": version("transformers"),
            "gguf": version("gguf"),
        }
        stage = Stage("gguf-description", self._key, stages_dir)
        try:
            # Any process may be the maker. If the file is invalid, each process raises the same error, and none waits.
            stage.make_once(True, lambda: self._describe(stage))
        except OSError as error:
            raise UserError(f"{file} cannot be converted in {stage.folder} ({error}); set cache_dir=...") from error
        self.description = stage.folder

    def convert(self, is_maker: bool) -> Path:
        """The folder with config.json, the tokenizer's files and the weights in safetensors; converts unless a run has.

        The weights are the file's blocks, dequantised to float32. They are stored in bfloat16 or float16 where every
        weight has exactly the same value in that dtype, else in float32. One process of a machine (`is_maker`) converts
        and holds all weights in float32 in host memory; the others poll for its files without a time limit. Does not
        communicate.

        Raises:
            RunError: the weights cannot be read, or one is missing.
        """
        stage = Stage("gguf", self._key, self._stages_dir)
        stage.make_once(is_maker, lambda: self._convert(stage))
        return stage.folder

    def _describe(self, stage: Stage) -> None:
        """Writes the stage with config and tokenizer. Raises UserError."""
        folder, name = self._file.parent, self._file.name
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
            config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
            reader = importlib.import_module("gguf").GGUFReader(str(self._file))
            metadata, _ = read_gguf_metadata(str(self._file))
        except Exception as error:
            # Each reader raises exceptions of its own for damaged files and unknown models.
            why = " ".join(str(error).split())
            raise UserError(
                f"{self._file} is not a complete GGUF file of a causal language model that transformers "
                f"knows ({type(error).__name__}: {why})"
            ) from error
        apply_metadata(config, metadata, tensors_of(reader, FACTOR_TENSORS), str(self._file))
        config.tie_word_embeddings = config.tie_word_embeddings and not has_own_output(reader)
        model = self._build(config)
        config.architectures = [type(model).__name__]
        check_tensors(reader, metadata["general.architecture"], model, str(self._file))
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        apply_tokenizer_metadata(tokenizer, metadata, str(self._file))
        config.dtype = torch.float32
        stage.partial.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(stage.partial)
        tokenizer.save_pretrained(stage.partial)
        stage.finish()

    def _build(self, config: Any) -> Any:
        """A model of this config on the meta device. Raises UserError."""
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        except Exception as error:
            # The metadata describe a model that transformers does not have.
            why = " ".join(str(error).split())
            raise UserError(
                f"{self._file}: transformers cannot build a model of its metadata ({type(error).__name__}: {why})"
            ) from error

    def _convert(self, stage: Stage) -> None:
        """Writes the stage with config, tokenizer and weights. Raises RunError."""
        # Under ZeRO-3 transformers would partition the weights over all ranks, and only this one runs the code.
        unset_hf_deepspeed_config()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._file.parent,
                gguf_file=self._file.name,
                # The converted config, since transformers' own reading of the file drops some keys.
                config=AutoConfig.from_pretrained(self.description),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                **_dequantize_options(),
            )
            model, report = loaded
        except Exception as error:
            why = " ".join(str(error).split())
            raise RunError(f"{self._file}: the weights cannot be read ({type(error).__name__}: {why})") from error
        if missing := sorted(report["missing_keys"]):
            raise RunError(f"{self._file}: has no weights for {missing[0]}; convert the model again")
        state: dict[str, Tensor] = model.state_dict()
        dtype = exact_dtype(state)
        stage.partial.mkdir(parents=True, exist_ok=True)
        config = AutoConfig.from_pretrained(self.description)
        config.dtype = dtype
        config.save_pretrained(stage.partial)
        AutoTokenizer.from_pretrained(self.description, local_files_only=True).save_pretrained(stage.partial)
        if config.tie_word_embeddings:
            # Converting the dtype would make two tensors of a tied one, and both would be stored.
            state = {name: tensor for name, tensor in state.items() if name not in model.all_tied_weights_keys}
        save_torch_state_dict(
            {name: tensor.to(dtype) for name, tensor in state.items()},
            stage.partial,
            filename_pattern="model{suffix}.safetensors",
            metadata={"format": "pt"},
        )
        stage.finish()


def exact_dtype(state: dict[str, Tensor]) -> torch.dtype:
    """The first of bfloat16, float16 and float32 that holds every value of these float32 tensors exactly."""
    for dtype in HALF_DTYPES:
        if all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in state.values()):
            return dtype
    return torch.float32


def _dequantize_options() -> dict[str, Any]:
    """Arguments of `from_pretrained` that dequantise: newer versions of transformers may keep the quantised blocks."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
