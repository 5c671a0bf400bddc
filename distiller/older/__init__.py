"""The older trainer's command line, for scripts/train_distillation.py: flags in, a recipe that is trained."""
