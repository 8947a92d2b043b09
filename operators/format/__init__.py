"""Operators that check the form of dialogues, answers and tool calls, or bring rows into another form."""
