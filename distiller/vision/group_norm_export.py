"""A saved classifier whose BatchNorm layers are GroupNorm, in a form that the library loads as what it is.

Under its own model type the library would build BatchNorm layers, put scale and shift into them, and answer wrongly.
So it is saved under a type that only its own code knows: `from_pretrained(folder, trust_remote_code=True)` builds it,
and without that flag the library refuses.
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
    """Writes weights, config and code."""
    # Renamings of the library belong to its own model types.
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
