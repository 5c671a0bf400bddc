"""Image classifiers of the `transformers` library: teacher, student, pictures, loss and evaluation."""
