"""Explorers: play tasks with a chat model and record every sampled token as rows."""
