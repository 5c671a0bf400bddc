"""The report of one or several runs: one HTML page, made from the files in their folders. Imports no torch."""
