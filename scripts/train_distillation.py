"""The older trainer's command line: its flags become a recipe, which the ordinary training runs.

torchrun --nproc_per_node=4 train_distillation.py --teacher_path PIPELINE --student_config config/student_config.json \
    --data_path data/static_prompts.txt --output_dir ./outputs --teacher_device_strategy cpu --distributed
"""

import sys

from distiller.older.run import main

if __name__ == "__main__":
    sys.exit(main())
