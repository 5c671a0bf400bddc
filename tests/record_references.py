"""Records the toy runs' trajectories anew: `python -m tests.record_references`.

Run it only with a change that is meant to alter numbers, and commit both together with the reason.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from distiller import commands
from distiller.config.loading import parse
from tests import toys

FOLDER = Path(__file__).parent / "references"


def main() -> None:
    from accelerate.state import AcceleratorState, GradientState

    for num_experts in (1, 2):
        with tempfile.TemporaryDirectory() as temporary:
            pipeline = toys.make_pipeline(Path(temporary) / "pipeline", num_experts)
            commands.train(parse(toys.recipe(Path(temporary), pipeline)), resume=False)
            run_dir = Path(temporary) / "run"
            record = {
                "loss": [round(line["loss"], 7) for line in toys.read_metrics(run_dir)],
                "student_norm": toys.student_vector(run_dir).norm().item(),
            }
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        (FOLDER / f"toy-{num_experts}-experts.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
