"""The older trainer's command line (scripts/train_distillation.py), translated into a recipe that is then trained."""
