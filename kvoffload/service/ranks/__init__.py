"""Tensor parallel: the front end or engine core decides, rank processes own tensors and execute numbered commands."""
