"""Rows out of a store and into one: Parquet, JSONL, Hugging Face datasets, whole stores, other tools' files."""
