"""Trainers: turn batches of stored rows into weight updates."""
