"""The recipe: typed, frozen sections, one file a task, and reading one from YAML. Imports no torch."""
