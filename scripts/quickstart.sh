#!/usr/bin/env bash
# Distils a real (small) Wan pipeline on two CPU cores: sets up .venv, trains, evaluates, shows. No GPU, no hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
started=$SECONDS
make_environment deepspeed,demo
ready=$SECONDS

out=outputs/quickstart
rm -rf "$out"
accelerate launch --config_file accelerate_configs/cpu_2proc.yaml -m distiller train digits-wan output_dir="$out"
trained=$SECONDS
distiller evaluate "$out" | tee "$out/evaluation.txt"

python - "$out" $((ready - started)) $((trained - ready)) $((SECONDS - trained)) <<'PY'
import json, sys
from pathlib import Path

folder, setup_s, train_s, evaluate_s = Path(sys.argv[1]), *map(int, sys.argv[2:])
summary = json.loads((folder / "summary.json").read_text())
result = summary["evaluation"]
rows = [
    ("", "teacher", "student"),
    ("parameters", f"{result['teacher_parameters']:,}", f"{result['student_parameters']:,}"),
    ("forward pass, batch 50", f"{result['teacher_forward_ms']:.0f} ms", f"{result['student_forward_ms']:.0f} ms"),
    (f"recognised of {result['num_samples']}", f"{result['teacher_recognised']:.1%}", f"{result['student_recognised']:.1%}"),
]
print()
for name, teacher, student in rows:
    print(f"{name:<24} {teacher:>12} {student:>12}")
print(f"\nset-up {setup_s} s, training {train_s} s ({summary['steps']} steps, {summary['engine']} x {summary['world_size']}), "
      f"evaluation {evaluate_s} s")
print(f"student   {folder / 'student'}\nmetrics   {folder / 'metrics.jsonl'}\npicture   {folder / 'samples.png'}\n"
      f"report    {folder / 'report.html'}")
PY
