"""Saves a classifier whose BatchNorm layers were replaced by GroupNorm, so that transformers loads it correctly.

Under the original model type, transformers would build BatchNorm layers, load weight and bias into them, and compute
wrong outputs. So the model is saved under a type of its own, together with code for that type:
`from_pretrained(folder, trust_remote_code=True)` loads it, and without that flag transformers refuses.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel

from distiller.vision.batch_norm import MAX_GROUPS, MIN_CHANNELS_A_GROUP

SUFFIX = "-group-norm"
CODE_FILE = "group_norm.py"

_CODE = '''"""A classifier whose BatchNorm layers are GroupNorm: load it with trust_remote_code=True."""

from torch import nn
from transformers import {config}, {model}


def num_groups(num_channels):
    most = min({max_groups}, num_channels // {min_channels})
    return next((count for count in range(most, 1, -1) if num_channels % count == 0), 1)


class GroupNormConfig({config}):
    model_type = "{type}"


class GroupNormModel({model}):
    config_class = GroupNormConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in list(self.modules()):
            for name, child in list(layer.named_children()):
                if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
                    groups = num_groups(child.num_features)
                    setattr(layer, name, nn.GroupNorm(groups, child.num_features, child.eps))
'''


def save_group_norm(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights, config and code into `folder`."""
    # With the module's own tensor names: transformers renames tensors only for its own model types.
    model.save_pretrained(folder, save_original_format=False)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["model_type"] = f"{config['model_type']}{SUFFIX}"
    module = CODE_FILE.removesuffix(".py")
    config["auto_map"] = {
        "AutoConfig": f"{module}.GroupNormConfig",
        "AutoModelForImageClassification": f"{module}.GroupNormModel",
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    code = _CODE.format(
        config=type(model.config).__name__,
        model=type(model).__name__,
        type=config["model_type"],
        max_groups=MAX_GROUPS,
        min_channels=MIN_CHANNELS_A_GROUP,
    )
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
