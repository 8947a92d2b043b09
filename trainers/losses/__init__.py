"""Losses: pure functions of tensors. Every tensor is flat, [N], one element per token; nothing here knows of rows."""
