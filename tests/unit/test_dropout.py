"""No dropout is left in a student's config, wherever the library keeps its rates."""

import pytest
from transformers import CvtConfig, DbrxConfig, LlamaConfig, MptConfig, SwinConfig, UperNetConfig

from distiller.tasks.dropout import remove_dropout


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            LlamaConfig(resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.2, summary_first_dropout=0.0),
            {"resid_pdrop", "attn_pdrop"},
        ),
        # Rates of parts have configs of their own.
        (DbrxConfig(resid_pdrop=0.1, attn_config={"attn_pdrop": 0.3}), {"resid_pdrop", "attn_config.attn_pdrop"}),
        (UperNetConfig(backbone_config=SwinConfig(drop_path_rate=0.3)), {"backbone_config.drop_path_rate"}),
        # A rate for each stage.
        (CvtConfig(drop_path_rate=[0.0, 0.0, 0.3]), {"drop_path_rate"}),
        # The library takes whole numbers alone here, and checks each assignment.
        (MptConfig(attn_config={"attn_pdrop": 1}), {"attn_config.attn_pdrop"}),
        (
            LlamaConfig(
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, label2id={"drop": 3}
            ),
            set(),
        ),
    ],
)
def test_every_rate_is_found_and_removed_once(config, keys):
    assert set(remove_dropout(config)) == keys
    assert remove_dropout(config) == ()
