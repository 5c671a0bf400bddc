"""Names of the files that a run leaves in its `output_dir`. Imports no torch."""

from __future__ import annotations

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
BAD_BATCHES_FILE = "bad_batches.jsonl"
ENVIRONMENT_FILE = "environment.json"
REPORT_FILE = "report.html"
